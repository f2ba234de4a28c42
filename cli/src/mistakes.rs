//! What people type first, and the line that would have worked.
use q4_core::{Code, Error, Result};
use std::path::{Path, PathBuf};

/// Words of other programs for an option, and how q4 says it.
const OPTIONS: &[(&[&str], &str)] = &[
    (&["-m", "--model"], "the model stands alone, without an option: q4 generate MODEL -p TEXT"),
    (&["-p", "--prompt"], "the verb comes before its options: q4 generate MODEL -p TEXT"),
    (&["-f", "--file", "--prompt-file"], "a prompt is read from standard input: q4 generate MODEL < FILE"),
    (&["-t", "-j"], "threads: --threads N"),
    (&["-c", "--ctx-size", "--max-model-len", "--max-seq-len", "--num-ctx"], "the context: --context TOKENS"),
    (&["--n-predict", "--max-new-tokens", "--num-predict"], "the longest answer: --max-tokens N"),
    (&["--temp"], "--temperature T"),
    (
        &["-ngl", "--ngl", "--n-gpu-layers", "--gpu-layers", "--gpu", "--cuda"],
        "all layers on the first card: --device cuda",
    ),
    (
        &[
            "-tp",
            "--tensor-parallel-size",
            "--tp",
            "-sm",
            "--split-mode",
            "-ts",
            "--tensor-split",
            "-mg",
            "--main-gpu",
        ],
        "a model is on one device: --device cuda:N",
    ),
    (&["-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"], "--kv-cache TYPE"),
    (&["-cnv", "-i", "--interactive", "--conversation-mode"], "to talk: q4 chat MODEL"),
    (&["--stream"], "answers come as they are made; --no-stream waits for the whole"),
    (&["--format", "--output-format"], "one JSON document instead of text: --json"),
    (
        &["-o", "--output", "--outdir", "--outfile", "--out"],
        "what is written comes second: q4 quantize MODEL DIR",
    ),
    (&["--repeat-penalty", "--frequency-penalty"], "--repetition-penalty R"),
    (&["-r", "--reverse-prompt", "--stop-sequence", "--stop-sequences"], "--stop TEXT"),
    (&["--gpu-memory-utilization", "--max-memory"], "--memory-limit BYTES, e.g. 24GiB"),
    (&["--chat-template-kwargs"], "--template-arg NAME=VALUE"),
    (&["--verbose-prompt"], "--show-prompt"),
    (&["--quantization", "--load-in-4bit", "--isq"], "a dense model in 4 bits: --quantize nvfp4"),
    (&["--system-prompt"], "--system TEXT"),
    (
        &["--url", "--base-url", "--api-base", "--endpoint", "--remote", "--api-url"],
        "a server: q4 chat --server URL, q4 bench --server URL",
    ),
    (&["--api-key", "--token"], "a key is in a file, or in the variable Q4_API_KEY: --api-key-file FILE"),
    (
        &["--concurrency", "--max-concurrency", "--num-users", "--clients"],
        "q4 bench --server URL --users N,...",
    ),
    (&["--request-rate", "--qps", "--rps"], "q4 bench --server URL --rate R,..."),
    (&["--num-prompts", "--num-requests"], "q4 bench --server URL --requests N"),
    (
        &["--input-len", "--random-input-len", "--output-len", "--random-output-len"],
        "q4 bench --server URL --prompt-tokens N --answer-tokens N",
    ),
    (&["--json-schema-file", "-jf", "--guided-json"], "an answer of a schema: --json-schema FILE"),
    (&["--grammar-file", "--guided-grammar"], "an answer of a grammar of Lark: --grammar FILE"),
    (&["--guided-regex", "--guided-choice"], "an answer of a form: --regex PATTERN, --choice TEXT"),
    (&["--allowed-hosts", "--trusted-host", "--trusted-hosts"], "--allowed-host NAME, once for each"),
    (&["--log-json", "--json-logs"], "--log-format json"),
];

/// Words of other programs for a verb.
const VERBS: [(&[&str], &str); 11] = [
    (&["run", "complete", "completion", "predict"], "q4 generate MODEL -p TEXT, or q4 chat MODEL"),
    (&["demo"], "the built-in model: q4 generate demo -p TEXT, or q4 chat demo"),
    (&["api", "start", "daemon"], "q4 serve MODEL"),
    (
        &["pull", "download", "get"],
        "q4 fetches nothing: hf download OWNER/NAME --local-dir DIR, then q4 generate DIR -p TEXT",
    ),
    (&["connect", "client", "remote"], "q4 chat --server URL"),
    (&["benchmark", "load-test", "loadtest", "stress"], "q4 bench MODEL, or q4 bench --server URL"),
    (&["version"], "q4 --version"),
    (
        &["finetune", "fine-tune", "sft", "lora", "qlora"],
        "q4 train CONFIG.toml; q4 train init CONFIG.toml writes one",
    ),
    (&["perplexity", "ppl"], "q4 eval MODEL --data FILE"),
    (&["test", "selftest", "doctor"], "q4 diagnose, or q4 conformance"),
    (&["info", "show", "list"], "q4 inspect MODEL"),
];

/// Values of other programs, by option, and what q4 takes.
const VALUES: [(&str, &[&str], &str); 3] = [
    ("--format", &["json"], "one JSON document instead of text: --json"),
    ("--format", &["awq", "gptq", "fp8", "gguf", "q4_0", "q4_k_m"], FORMATS),
    ("--quantize", &["awq", "gptq", "fp8", "gguf", "q4_0", "q4_k_m"], FORMATS),
];
const FORMATS: &str = "q4 writes and runs nvfp4, nf4, mxfp4 and int4";

/// What to type instead of the option `word`, which no verb has or not `verb`.
pub fn option(verb: &str, word: &str) -> Option<String> {
    let name = word.split_once('=').map_or(word, |(name, _)| name);
    let known = OPTIONS.iter().find(|(words, _)| words.contains(&name)).map(|(_, tip)| (*tip).to_owned());
    // Not an option at all: something after the model.
    let is_bare = !word.starts_with('-') && !word.is_empty();
    known.or_else(|| match () {
        () if !is_bare => None,
        () if is_library(Path::new(word)) => Some(format!("--plugin {}", as_found(word))),
        () if matches!(verb, "generate" | "chat" | "trace") || is_text(word) => {
            Some(format!("a text is an option: q4 generate MODEL -p {}", quoted(word)))
        }
        () => None,
    })
}

/// What to type instead of `value`, which `option` does not take.
pub fn value(option: &str, value: &str) -> Option<String> {
    let asked = value.to_lowercase();
    let fits = |(name, words, _): &&(&str, &[&str], &str)| *name == option && words.contains(&&*asked);
    VALUES.iter().find(fits).map(|(_, _, tip)| (*tip).to_owned())
}

/// What to type instead of a word of `line` that other programs read as one option and q4 letter by letter.
pub fn long_with_one_dash<'a>(verb: &str, mut line: impl Iterator<Item = &'a str>) -> Option<String> {
    let is_one = |word: &str| word.starts_with('-') && !word.starts_with("--") && word.len() > 2;
    line.find_map(|word| if is_one(word) { option(verb, word) } else { None })
}

/// What to type instead of the verb `word`, which `q4` or its verb `under` does not have.
pub fn verb(under: &str, word: &str) -> Option<String> {
    if under == "plugin" {
        let lists = matches!(word, "list" | "ls" | "show" | "info");
        let tip = "q4 diagnose --plugin PATH shows what a library computes here, q4 conformance --plugin PATH judges it";
        return lists.then(|| tip.to_owned());
    }
    let known = VERBS.iter().find(|(words, _)| words.contains(&word)).map(|(_, tip)| (*tip).to_owned());
    known.or_else(|| match () {
        () if is_text(word) => Some(format!("q4 generate demo -p {}", quoted(word))),
        () if Path::new(word).exists() => Some(format!("q4 generate {} -p TEXT", quoted(word))),
        () => None,
    })
}

/// Fails when `path`, where a model was expected, is nothing that exists.
///
/// # Errors
/// [`Code::ModelMissing`], with what was probably meant.
pub fn model(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_ok() {
        return Ok(());
    }
    let name = path.display().to_string();
    let e = Error::new(Code::ModelMissing, format!("{name}: there is no such model"))
        .need("a folder with config.json and safetensors, a .safetensors, .gguf or .dat file, or `demo`, the built-in model");
    if is_text(&name) {
        return Err(e.have("what looks like a prompt").fix(format!("q4 generate demo -p {}", quoted(&name))));
    }
    Err(match beside(path, |_| true) {
        Some(near) => e.fix(format!("{} is there", near.display())),
        None => e.fix("name a folder that exists, or try q4 generate demo -p TEXT"),
    })
}

/// What to do about a text file that is not at `path`.
pub fn file(path: &Path) -> String {
    match beside(path, |_| true) {
        Some(near) => format!("{} is there", near.display()),
        None => "name a file that exists".to_owned(),
    }
}

/// The line that names a library so that it is found, if `path` nearly does.
pub fn plugin(path: &Path) -> Option<String> {
    let bare = path.parent().is_none_or(|p| p.as_os_str().is_empty());
    let spelt = if bare { Path::new(".").join(path) } else { path.to_owned() };
    let found = if path.is_dir() {
        let mut inside = libraries(path);
        if inside.len() == 1 { inside.pop() } else { None }
    } else if spelt.exists() {
        bare.then_some(spelt)
    } else {
        beside(&spelt, is_library)
    };
    found.map(|path| format!("--plugin {}", quoted(&path.display().to_string())))
}

/// What to do about a backend of that name, which none of `known` has.
pub fn backend(asked: &str, known: &[&str]) -> String {
    if matches!(asked, "cuda" | "gpu" | "cpu") {
        let device = if asked == "gpu" { "cuda" } else { asked };
        return format!("{asked} is a device: --device {device}");
    }
    match nearest(asked, known.iter().copied()) {
        Some(near) => format!("--backend {near}"),
        None => "q4 diagnose lists them; one of a library needs --plugin PATH".to_owned(),
    }
}

/// Spaces or the end of a sentence: nobody calls a model that.
fn is_text(word: &str) -> bool {
    let is_sentence = word.contains(char::is_whitespace) || word.ends_with(['?', '!', '。', '？', '！']);
    is_sentence && !word.contains(['/', '\\'])
}

fn is_library(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == std::env::consts::DLL_EXTENSION)
}

/// The name of a library so that no search path is asked.
fn as_found(word: &str) -> String {
    let is_bare = !word.contains(['/', '\\']);
    quoted(&if is_bare { format!("./{word}") } else { word.to_owned() })
}

/// Entries of a folder that are looked at.
const LOOKED_AT: usize = 2000;

fn libraries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().take(LOOKED_AT);
    entries.map(|e| e.path()).filter(|p| is_library(p)).collect()
}

/// What lies where `path` should and has nearly its name.
fn beside(path: &Path, fits: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    let entries = std::fs::read_dir(folder.unwrap_or(Path::new("."))).ok()?;
    let names = entries.flatten().take(LOOKED_AT).map(|e| PathBuf::from(e.file_name()));
    let names: Vec<_> = names.filter(|n| fits(n)).filter_map(|n| n.to_str().map(str::to_owned)).collect();
    let near = nearest(name, names.iter().map(String::as_str))?;
    Some(folder.map_or_else(|| PathBuf::from(near), |folder| folder.join(near)))
}

/// The nearest of `names`, if one is near: it goes on where `asked` ends, or few letters differ.
fn nearest<'a>(asked: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let asked = asked.to_lowercase();
    let score = |name: &str| match name.strip_prefix(&asked) {
        Some(_) if asked.len() > 2 => 1.0,
        _ => strsim::jaro_winkler(&asked, name),
    };
    let near = names.map(|name| (score(&name.to_lowercase()), name));
    near.filter(|(score, _)| *score >= 0.85).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

/// As a shell reads it back.
pub fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-:+,@%".contains(c);
    match () {
        () if !text.is_empty() && text.chars().all(is_plain) => text.to_owned(),
        () if !text.contains(['"', '$', '`', '\\', '!']) => format!("\"{text}\""),
        () => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_other_programs_lead_to_ours() {
        let option = |word| option("generate", word);
        assert_eq!(option("--ctx-size=4096").as_deref(), Some("the context: --context TOKENS"));
        assert_eq!(option("--no-such-option"), None);
        let text = option("hello there").expect("a text");
        assert!(text.ends_with("-p \"hello there\""), "{text}");
        assert_eq!(super::option("verify", "hello"), None);
        assert!(super::option("verify", "hello there").is_some());
        assert!(verb("", "run").expect("known").contains("q4 chat"));
        assert_eq!(verb("", "nonsense"), None);
        assert_eq!(verb("", "Who are you?").as_deref(), Some("q4 generate demo -p \"Who are you?\""));
        assert_eq!(verb("", "It's $5!").as_deref(), Some(r"q4 generate demo -p 'It'\''s $5!'"));
        assert!(verb("plugin", "list").expect("known").contains("q4 diagnose"));
    }

    #[test]
    fn one_dash_and_several_letters_are_read_as_they_are_meant() {
        let tip = |line: &str| long_with_one_dash("generate", line.split(' '));
        assert_eq!(
            tip("q4 generate demo -ngl 99").as_deref(),
            Some("all layers on the first card: --device cuda")
        );
        assert_eq!(tip("q4 generate demo -n8 -p x"), None);
        assert!(value("--format", "AWQ").expect("known").contains("int4"));
        assert_eq!(value("--format", "nvfp5"), None);
    }

    #[test]
    fn names_that_are_near_are_found() {
        let known = ["dequant-matmul", "nf4-kernel", "nvfp4-kernel", "reference"];
        assert_eq!(backend("nvfp4", &known), "--backend nvfp4-kernel");
        assert_eq!(backend("nf4", &known), "--backend nf4-kernel");
        assert_eq!(backend("gpu", &known), "gpu is a device: --device cuda");
        assert!(backend("volta", &known).contains("--plugin"));
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(dir.path().join("Qwen3-0.6B-NVFP4")).expect("a folder");
        let e = model(&dir.path().join("qwen3-0.6B-nvfp4")).expect_err("another name").to_string();
        assert!(e.contains("Qwen3-0.6B-NVFP4 is there"), "{e}");
        assert!(model(&dir.path().join("Qwen3-0.6B-NVFP4")).is_ok());
        let e = model(&dir.path().join("quite-another")).expect_err("another name").to_string();
        assert!(e.contains("fix: name a folder that exists"), "{e}");
        assert!(model(Path::new("Who are you?")).expect_err("a text").to_string().contains("a prompt"));
    }

    #[test]
    fn a_library_is_named_as_it_is_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join(format!("libmine.{}", std::env::consts::DLL_EXTENSION));
        std::fs::write(&file, "").expect("a file");
        let want = Some(format!("--plugin {}", file.display()));
        assert_eq!(plugin(dir.path()), want);
        assert_eq!(plugin(&file.with_file_name(format!("libmin.{}", std::env::consts::DLL_EXTENSION))), want);
        assert_eq!(plugin(&dir.path().join("another")), None);
        assert_eq!(plugin(&file), None);
        let bare = format!("libmine.{}", std::env::consts::DLL_EXTENSION);
        assert_eq!(option("conformance", &bare), Some(format!("--plugin ./{bare}")));
        assert_eq!(option("conformance", &file.display().to_string()), want);
    }
}
