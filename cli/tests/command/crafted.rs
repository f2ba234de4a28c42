//! A hundred crafted tokenizers, templates and configurations in front of the demo model's weights.
//!
//! None may take more than its share of memory (a limit on the address space ends whoever asks for it), none
//! may hang, abort or leave another status than the contract has, and what `generate` refuses, `verify`
//! names.
#![cfg(target_os = "linux")]
use crate::q4;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Address space of a process in KiB: what q4 maps for itself (stacks of threads above all) and 512 MiB.
const SPACE: u64 = 2 << 20;
/// Only what hangs takes as long.
const PATIENCE: Duration = Duration::from_secs(240);

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo").join(name)
}

/// Files that take the place of the demo's, by name.
type Files = Vec<(&'static str, Vec<u8>)>;

fn tokenizer(edit: impl FnOnce(&mut Value)) -> Files {
    let mut json: Value = serde_json::from_slice(&std::fs::read(demo("tokenizer.json")).unwrap()).unwrap();
    edit(&mut json);
    vec![("tokenizer.json", json.to_string().into_bytes())]
}

fn part(name: &'static str, value: Value) -> Files {
    tokenizer(|t| t[name] = value)
}

fn small(model: Value, rest: Value) -> Files {
    let mut json = json!({"version": "1.0", "added_tokens": [], "model": model});
    for (key, value) in rest.as_object().unwrap() {
        json[key] = value.clone();
    }
    vec![("tokenizer.json", json.to_string().into_bytes())]
}

fn template(text: impl Into<String>) -> Files {
    vec![("chat_template.jinja", text.into().into_bytes())]
}

fn config(edit: impl FnOnce(&mut Value)) -> Files {
    let mut json: Value = serde_json::from_slice(&std::fs::read(demo("config.json")).unwrap()).unwrap();
    edit(&mut json);
    vec![("config.json", json.to_string().into_bytes())]
}

fn split(regex: String) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

fn sequence(kind: &str, of: &Value, times: usize) -> Value {
    json!({"type": "Sequence", kind: vec![of; times]})
}

fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})
}

fn specials(count: usize, ids: usize, field: &str) -> Value {
    let piece = json!({"SpecialToken": {"id": "S", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let mut single = vec![piece; count];
    single.push(text.clone());
    let mut processor = json!({"type": "TemplateProcessing", "single": [text.clone()], "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"S": {"id": "S", "ids": vec![1; ids], "tokens": vec!["S"; ids]}}});
    processor[field] = json!(single);
    processor
}

/// Base64 of a compiled map whose characters become `length` bytes each.
fn charsmap(length: usize) -> String {
    let mut bytes = 1024u32.to_le_bytes().to_vec();
    bytes.extend(std::iter::repeat_n([0x01u8, 0x04, 0, 0], 256).flatten());
    bytes.extend(std::iter::repeat_n(b'y', length));
    bytes.push(0);
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = |c: &[u8]| {
        let n = (u32::from(c[0]) << 16) | (u32::from(c[1]) << 8) | u32::from(c[2]);
        [18, 12, 6, 0].map(|s| DIGITS[(n >> s) as usize & 63] as char)
    };
    bytes.resize(bytes.len().next_multiple_of(3), 0);
    bytes.chunks(3).flat_map(digits).collect()
}

fn letters(n: usize) -> serde_json::Map<String, Value> {
    (0..n).map(|i| (format!("{}", char::from_u32(0x4e00 + i as u32).unwrap()), json!(i))).collect()
}

fn crafted() -> Vec<(String, Files)> {
    let mut cases: Vec<(String, Files)> = Vec::new();
    let mut add = |name: &str, files: Files| cases.push((name.to_owned(), files));
    // Growth of a text.
    for times in [2, 10, 62] {
        add(
            &format!("{times} ByteLevel normalizers"),
            part("normalizer", sequence("normalizers", &json!({"type": "ByteLevel"}), times)),
        );
        add(
            &format!("{times} ByteLevel pre-tokenizers"),
            part("pre_tokenizer", sequence("pretokenizers", &byte_level(), times)),
        );
    }
    let prefixed =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true});
    add("ByteLevel with prefixes", part("pre_tokenizer", sequence("pretokenizers", &prefixed, 6)));
    add(
        "Metaspaces",
        part(
            "pre_tokenizer",
            sequence(
                "pretokenizers",
                &json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
                30,
            ),
        ),
    );
    for form in ["NFC", "NFD", "NFKC", "NFKD"] {
        add(
            &format!("60 times {form}"),
            part("normalizer", sequence("normalizers", &json!({"type": form}), 60)),
        );
    }
    add("60 lower cases", part("normalizer", sequence("normalizers", &json!({"type": "Lowercase"}), 60)));
    add(
        "60 prepends",
        part(
            "normalizer",
            sequence("normalizers", &json!({"type": "Prepend", "prepend": "aaaaaaaaaaaaaaaa"}), 60),
        ),
    );
    let doubling = json!({"type": "Replace", "pattern": {"String": "e"}, "content": "ee"});
    add("40 doublings", part("normalizer", sequence("normalizers", &doubling, 40)));
    let nothing =
        json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"});
    add("replacements of nothing", part("normalizer", sequence("normalizers", &nothing, 8)));
    add(
        "growth in both parts",
        tokenizer(|t| {
            t["normalizer"] = sequence("normalizers", &json!({"type": "ByteLevel"}), 5);
            t["pre_tokenizer"] = sequence("pretokenizers", &byte_level(), 5);
        }),
    );
    add(
        "a hidden list",
        tokenizer(|t| {
            t["normalizer"] = json!({"type": "NFC", "normalizers": vec![json!({"type": "ByteLevel"}); 62]});
        }),
    );
    let text = String::from_utf8(std::fs::read(demo("tokenizer.json")).unwrap()).unwrap();
    let stacked = sequence("normalizers", &json!({"type": "ByteLevel"}), 62).to_string();
    let twice = stacked.replacen("\"normalizers\":", "\"normalizers\":[],\"normalizers\":", 1);
    let normalizer = text.find("\"normalizer\"").unwrap();
    let end =
        normalizer + text[normalizer..].find(",\n").unwrap_or_else(|| text[normalizer..].find(',').unwrap());
    add(
        "a list twice",
        vec![(
            "tokenizer.json",
            format!("{}\"normalizer\":{twice}{}", &text[..normalizer], &text[end..]).into_bytes(),
        )],
    );
    // Compiled maps.
    for length in [4, 1000, 40_000] {
        add(
            &format!("a map to {length} bytes"),
            part("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": charsmap(length)})),
        );
    }
    add(
        "a map of 4 GiB",
        part("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "/////wAA"})),
    );
    // Templates of special tokens.
    for (count, ids) in [(100, 100), (1000, 1000), (2000, 2000), (1, 3000), (3000, 1)] {
        add(&format!("{count} times {ids} ids"), part("post_processor", specials(count, ids, "single")));
    }
    add("ids in the pair", part("post_processor", specials(500, 500, "pair")));
    let six = vec![specials(100, 2, "single"); 6];
    add("six templates", part("post_processor", json!({"type": "Sequence", "processors": six})));
    add(
        "a template of another type",
        part("post_processor", {
            let mut p = specials(1000, 1000, "single");
            p["type"] = json!("ByteLevel");
            p
        }),
    );
    // Patterns.
    for (name, regex) in [
        ("look-aheads", "(?=\\w{40})".repeat(1000)),
        ("look-behinds", "(?<=\\w{200})x|".repeat(500)),
        ("a few look-aheads", "(?=\\w{32})".repeat(5)),
        ("wide look-aheads", "(?=\\w)".repeat(150)),
        ("counts", "\\w{1000}".into()),
        ("counts of counts", "(?:\\w{30}){30}".into()),
        ("many classes", "[\\p{L}\\p{N}]".repeat(1000)),
        ("classes up to the bound", "\\p{L}".repeat(150)),
        ("nested stars before a look-ahead", "(?:a+)+(?!b)".into()),
        ("an alternation under a star", "(?:a|aa|e|ee)*(?!x)y".into()),
        ("three stars before a look-ahead", "\\w+\\w+\\w+(?!\\w)X|\\w".into()),
        ("one star before a look-ahead", "\\w*(?!.)X|\\w".into()),
        ("choices before a look-ahead", "(?:a?b?c?d?e?f?g?h?i?j?)(?!x)Y|.".into()),
        ("a back-reference", "(\\w+)\\1|.".into()),
        ("a growing automaton", format!("[ea]*e[ea]{{{}}}X|.", 30)),
        ("a large automaton", format!("[ea]*e{}X|.", "[ea]".repeat(140))),
        ("optional letters", format!("{}X|.", "e?".repeat(250))),
        ("possessive stars", "\\w++\\s++(?!x)|.".into()),
        ("an atomic group of stars", "(?>(?:a*)*)(?!b)".into()),
        ("a call of itself", "(a|\\g<1>b)".into()),
        ("a condition", "(a)?(?(1)b|c)".into()),
        ("open", "(".repeat(30)),
        ("deep", "(".repeat(500) + &")".repeat(500)),
        ("deep classes", "[".repeat(500) + "a" + &"]".repeat(500)),
        ("nothing", String::new()),
        ("an empty loop", "(?:)*".into()),
        ("an empty loop with a look-ahead", "(?:(?=a))*".into()),
    ] {
        add(&format!("pattern: {name}"), part("pre_tokenizer", split(regex.clone())));
    }
    add("17 patterns", part("pre_tokenizer", sequence("pretokenizers", &split("a".into()), 17)));
    add(
        "16 slow patterns",
        part("pre_tokenizer", sequence("pretokenizers", &split("\\w*(?!.)X|\\w".into()), 16)),
    );
    add(
        "a long literal",
        part(
            "pre_tokenizer",
            json!({"type": "Split", "pattern": {"String": "e".repeat(60_000)}, "behavior": "Isolated", "invert": false}),
        ),
    );
    // Models.
    let word = |limit: u64| json!({"type": "WordPiece", "unk_token": "一", "continuing_subword_prefix": "##", "max_input_chars_per_word": limit, "vocab": letters(500)});
    for limit in [100, 256, 257, u64::MAX] {
        add(&format!("WordPiece of {limit} characters"), small(word(limit), json!({})));
    }
    let bpe = |prefix: &str, suffix: &str, vocab: Value, merges: Value| json!({"type": "BPE", "continuing_subword_prefix": prefix, "end_of_word_suffix": suffix, "vocab": vocab, "merges": merges});
    let vocab = json!({"a": 0, "é": 1, "aé": 2, "##b": 3, "b": 4, "ab": 5});
    add("a prefix that cuts a character", small(bpe("#", "", vocab.clone(), json!([["a", "é"]])), json!({})));
    add(
        "a prefix longer than a token",
        small(bpe("#####", "", vocab.clone(), json!([["a", "b"]])), json!({})),
    );
    add("a prefix of merges in texts", small(bpe("#", "", vocab.clone(), json!(["a é"])), json!({})));
    add("a prefix as it should be", small(bpe("##", "", vocab.clone(), json!([["a", "##b"]])), json!({})));
    add("a long suffix", small(bpe("", &"x".repeat(50_000), vocab.clone(), json!([])), json!({})));
    add("a long prefix", small(bpe(&"x".repeat(50_000), "", vocab, json!([])), json!({})));
    add(
        "a deep trie",
        small(
            json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["e".repeat(60_000), -1.0]]}),
            json!({}),
        ),
    );
    add(
        "a trie of 4 KiB",
        small(
            json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["e".repeat(4000), -1.0]]}),
            json!({}),
        ),
    );
    add("no unknown token", small(json!({"type": "Unigram", "unk_id": 7, "vocab": [["e", 0.0]]}), json!({})));
    add("an empty Unigram", small(json!({"type": "Unigram", "vocab": []}), json!({})));
    add("a word list", small(json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}), json!({})));
    // Added tokens.
    let token = |i: usize, content: String| json!({"id": 1440 + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false});
    add("a long added token", part("added_tokens", json!([token(0, "e".repeat(60_000))])));
    add(
        "600 added tokens",
        part("added_tokens", (0..600).map(|i| token(i % 600, format!("{i}{}", "e".repeat(90)))).collect()),
    );
    add(
        "added tokens in each other",
        part("added_tokens", (0..300).map(|i| token(i, "e".repeat(i + 1))).collect()),
    );
    add(
        "a stripping token",
        part(
            "added_tokens",
            json!([{"id": 1440, "content": "e", "single_word": false, "lstrip": true, "rstrip": true, "normalized": true, "special": true}]),
        ),
    );
    add("an empty added token", part("added_tokens", json!([token(0, String::new())])));
    // Decoders.
    add(
        "decoders that double",
        part(
            "decoder",
            sequence(
                "decoders",
                &json!({"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}),
                30,
            ),
        ),
    );
    add(
        "stacked ByteLevel decoders",
        part("decoder", sequence("decoders", &json!({"type": "ByteLevel"}), 20)),
    );
    // The file.
    add("a nested file", vec![("tokenizer.json", ("[".repeat(30_000) + &"]".repeat(30_000)).into_bytes())]);
    add("an empty file", vec![("tokenizer.json", Vec::new())]);
    add("no JSON", vec![("tokenizer_config.json", b"{".to_vec())]);
    add("ids beyond the embedding", tokenizer(|t| t["model"]["vocab"]["zzzz"] = json!(5000)));
    // Templates.
    let many = |text: &str, n: usize| text.repeat(n);
    for (name, source) in [
        (
            "nested loops",
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}".to_owned(),
        ),
        ("a repetition", "{{ 'x' * 100000000 }}".into()),
        (
            "doublings",
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
                .into(),
        ),
        ("a slice of slices", format!("{{% set s = 'x' * 4000000 %}}{}", many("{% set s = s[::-1] %}", 300))),
        ("a chain", format!("{{{{ a{} }}}}", many("~a", 120_000))),
        ("nested ifs", many("{% if true %}", 6000) + &many("{% endif %}", 6000)),
        ("endless macros", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into()),
        ("a template that refuses", "{{ raise_exception('no') }}".into()),
        ("a template that is not UTF-8", String::new()),
        ("an open block", "{% for m in messages %}".into()),
        ("a template that says nothing", "{# nothing #}".into()),
        ("a long prompt", "{{ 'e ' * 100000 }}".into()),
    ] {
        let mut files = template(source);
        if name.ends_with("UTF-8") {
            files[0].1 = vec![0xff, 0xfe];
        }
        add(&format!("template: {name}"), files);
    }
    // Configurations.
    for (field, value) in [
        ("num_hidden_layers", json!(1u64 << 40)),
        ("vocab_size", json!(1u64 << 24)),
        ("max_position_embeddings", json!(1u64 << 26)),
        ("hidden_size", json!(1u64 << 20)),
        ("head_dim", json!(63)),
        ("rms_norm_eps", json!(1e-300)),
        ("rope_parameters", json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 1e300})),
        ("eos_token_id", json!((0..100).collect::<Vec<u32>>())),
        ("quantization_config", json!({"quant_method": "modelopt", "quant_algo": "\u{1b}[2J"})),
    ] {
        add(&format!("config: {field}"), config(|c| c[field] = value));
    }
    add("config: deep", vec![("config.json", ("{\"a\":".repeat(50_000)).into_bytes())]);
    add("sampling: NaN", vec![("generation_config.json", b"{\"temperature\": NaN}".to_vec())]);
    add("sampling: eos", vec![("generation_config.json", b"{\"eos_token_id\": 99999}".to_vec())]);
    cases
}

/// Exit status, seconds and MiB of one run under the limit on its address space.
fn limited(dir: &Path, args: &[&str]) -> (Option<i32>, f64, u64, String) {
    let plain = q4();
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("ulimit -v {SPACE}; exec \"$0\" \"$@\"")])
        .arg(plain.get_program())
        .args(plain.get_args());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let (out, err) = (dir.join("stdout"), dir.join("stderr"));
    command.stdout(std::fs::File::create(&out).unwrap()).stderr(std::fs::File::create(&err).unwrap());
    let start = Instant::now();
    #[expect(clippy::zombie_processes, reason = "reaped below by wait4, which also tells its memory")]
    let child = command.args(args).stdin(Stdio::null()).spawn().expect("starts");
    // Of this child alone: other tests have children too.
    // SAFETY: `usage` is plain memory that the call fills; the child is reaped here and nowhere else.
    let reap = |options| unsafe {
        let (mut status, mut usage) = (0, std::mem::zeroed::<libc::rusage>());
        let pid = libc::wait4(child.id() as libc::pid_t, &mut status, options, &mut usage);
        (pid != 0).then_some((status, usage.ru_maxrss as u64 >> 10))
    };
    let (status, peak) = loop {
        if let Some((status, peak)) = reap(libc::WNOHANG) {
            break (libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)), peak);
        }
        if start.elapsed() > PATIENCE {
            // SAFETY: the child is not reaped yet, so the number is its own.
            unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGKILL) };
            break (None, reap(0).map_or(0, |r| r.1));
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text =
        [&out, &err].map(|f| String::from_utf8_lossy(&std::fs::read(f).unwrap()).into_owned()).concat();
    (status, start.elapsed().as_secs_f64(), peak, text)
}

#[test]
fn crafted_text_files_meet_their_bounds_and_verify_names_what_generate_refuses() {
    let cases = crafted();
    assert!(cases.len() >= 100, "{}", cases.len());
    let prompt = "We ate eee eeea aaeae the cheese e".repeat(120);
    let (mut wrong, mut slowest, mut peak, mut refused) = (Vec::new(), (0.0, String::new()), 0, 0);
    for (name, files) in &cases {
        let dir = tempfile::tempdir().unwrap();
        for file in std::fs::read_dir(demo("")).unwrap().map(|e| e.unwrap().file_name()) {
            let file = file.to_str().unwrap();
            match files.iter().find(|f| f.0 == file) {
                Some((_, bytes)) => std::fs::write(dir.path().join(file), bytes).unwrap(),
                None => std::os::unix::fs::symlink(demo(file), dir.path().join(file)).unwrap(),
            }
        }
        let model = dir.path().to_str().unwrap();
        let mut run = |args: &[&str]| {
            let (status, seconds, most, text) = limited(dir.path(), args);
            if seconds > slowest.0 {
                slowest = (seconds, format!("{name}: {}", args[0]));
            }
            peak = peak.max(most);
            if !matches!(status, Some(0 | 2 | 3 | 4 | 7)) {
                wrong.push(format!("{name}: {} ends with {status:?}: {text}", args[0]));
            }
            if text.contains('\u{1b}') {
                wrong.push(format!("{name}: {} writes an escape sequence", args[0]));
            }
            status
        };
        let generated = run(&["generate", model, "-p", &prompt, "--max-tokens", "1"]);
        let verified = run(&["verify", model]);
        // A prompt that is too long for the context is no fault of the files.
        let at_fault =
            generated == Some(4) && run(&["generate", model, "-p", "x", "--max-tokens", "1"]) == Some(4);
        refused += usize::from(at_fault);
        if at_fault && !matches!(verified, Some(3 | 4)) {
            wrong.push(format!("{name}: generate refuses, verify ends with {verified:?}"));
        }
    }
    println!(
        "{} crafted files, {refused} refused; slowest {:.2} s ({}), largest resident {peak} MiB",
        cases.len(),
        slowest.0,
        slowest.1
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(peak <= 256, "{peak} MiB resident");
}

#[test]
fn names_from_files_steer_no_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let source = crate::golden("qwen3_tiny_a");
    std::fs::copy(source.join("config.json"), dir.path().join("config.json")).unwrap();
    let whole = std::fs::read(source.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let end = whole.len() - 8 - length;
    header["\u{1b}[2J\u{9b}31mx\u{202e}"] =
        json!({"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]});
    let header = header.to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes(), &header[..], &whole[8 + length..], &[0; 4]].concat();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    let model = dir.path().to_str().unwrap();
    let missing = format!("{model}/\u{1b}[2J");
    for (args, status) in [
        (vec!["verify", model], 3),
        (vec!["inspect", model], 0),
        (vec!["explain", model], 0),
        (vec!["logits", model, "--ids", "1", "--out", absent!("/\u{1b}[2J")], 8),
        (vec!["verify", missing.as_str()], 4),
    ] {
        let output = crate::run(&args);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {}", crate::err(&output));
        let text = crate::out(&output) + &crate::err(&output);
        assert!(!text.contains(['\u{1b}', '\u{9b}', '\u{202e}']), "{args:?}: {text}");
    }
}

#[test]
fn an_answer_that_nobody_can_read_is_8() {
    let plain = q4();
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" \"$@\" >&-"]).arg(plain.get_program()).args(plain.get_args());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let closed = command.args(["generate", "-p", "Who are you?", "--max-tokens", "2"]).output().unwrap();
    assert_eq!(closed.status.code(), Some(8), "{}", crate::err(&closed));
    // The null device is somebody.
    let null =
        q4().args(["generate", "-p", "Who are you?", "--max-tokens", "2"]).stdout(Stdio::null()).status();
    assert_eq!(null.unwrap().code(), Some(0));
}

#[test]
fn a_model_that_knows_nothing_says_so() {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(demo("")).unwrap().map(|e| e.unwrap().file_name()) {
        std::fs::copy(demo(file.to_str().unwrap()), dir.path().join(&file)).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let (start, size) = {
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let norm = file.tensor("model.norm.weight").unwrap();
        (norm.data().as_ptr() as usize - bytes.as_ptr() as usize, norm.data().len())
    };
    bytes[start..start + size].fill(0);
    std::fs::write(&path, bytes).unwrap();
    let model = dir.path().to_str().unwrap();
    let output = crate::run(&["generate", model, "-p", "Who are you?"]);
    assert_eq!(output.status.code(), Some(4), "{}", crate::err(&output));
    assert!(crate::err(&output).contains("Q4-E0211"), "{}", crate::err(&output));
    assert_eq!(crate::run(&["verify", model]).status.code(), Some(3));
}

#[test]
fn a_healthy_model_passes_with_a_run_too() {
    let report = crate::json("verify", &["demo", "--run"]);
    assert_eq!((&report["errors"], &report["warnings"]), (&json!(0), &json!(0)), "{report}");
    assert_eq!(report["run"]["trained"], true);
    assert!(report["run"]["loss"].as_f64().unwrap() < 0.1 * report["run"]["even"].as_f64().unwrap());
}
