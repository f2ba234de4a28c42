//! What people type first: refused, and the last line says what would have worked. Where that is a whole
//! command it is run.
use crate::{err, out, q4, run};
use std::path::Path;
use std::process::Output;

/// The last line of what is said on stderr but for clap's own.
fn said(output: &Output) -> String {
    let text = err(output);
    let line =
        |start: &str| text.lines().map(str::trim).find_map(|l| l.strip_prefix(start).map(str::to_owned));
    line("fix: ").or_else(|| line("tip: ")).unwrap_or_else(|| panic!("nothing to do about it:\n{text}"))
}

/// Runs what a shell would make of a line that names q4's verb.
fn follow(line: &str, folder: &Path) -> Output {
    let exe = env!("CARGO_BIN_EXE_q4");
    let line = line.replacen("q4 ", &format!("'{exe}' -q "), 1);
    let mut shell = std::process::Command::new("sh");
    shell.env("XDG_DATA_HOME", folder).args(["-c", &line]).current_dir(folder).output().expect("a shell")
}

#[test]
fn a_prompt_in_the_place_of_the_model_leads_to_a_line_that_answers() {
    let folder = tempfile::tempdir().unwrap();
    for words in [&["generate", "Who are you?"][..], &["chat", "Who are you?"], &["Who are you?"]] {
        let refused = run(words);
        assert!(matches!(refused.status.code(), Some(2 | 4)), "{words:?}");
        let answer = follow(&said(&refused), folder.path());
        assert!(answer.status.success(), "{words:?}: {}", err(&answer));
        assert_eq!(out(&answer), "I am the q4 demo model, made of four-bit numbers.\n");
    }
    let refused = run(&["generate", "demo", "Who are you?"]);
    assert_eq!(refused.status.code(), Some(2));
    let line = said(&refused);
    let line = line.rsplit_once(": ").unwrap().1.replace("MODEL", "demo");
    assert!(follow(&line, folder.path()).status.success(), "{line}");
}

#[test]
fn what_other_programs_call_it_leads_to_what_q4_calls_it() {
    for (words, want) in [
        (&["run", "demo"][..], "q4 generate MODEL -p TEXT"),
        (&["api", "demo"], "q4 serve MODEL"),
        (&["pull", "Qwen/Qwen3-0.6B"], "hf download"),
        (&["demo"], "q4 generate demo -p TEXT"),
        (&["connect", "http://x"], "q4 chat --server URL"),
        (&["chat", "--base-url", "http://x"], "q4 chat --server URL"),
        (&["chat", "--server", "http://x", "--api-key", "k"], "--api-key-file FILE"),
        (&["bench", "--server", "http://x", "--concurrency", "8"], "--users N,..."),
        (&["bench", "--request-rate", "4"], "--rate R,..."),
        (&["-p", "hi"], "q4 generate MODEL -p TEXT"),
        (&["generate", "-m", "demo", "-p", "hi"], "q4 generate MODEL -p TEXT"),
        (&["generate", "demo", "-p", "hi", "--temp", "0"], "--temperature T"),
        (&["generate", "demo", "-p", "hi", "-t", "4"], "--threads N"),
        (&["generate", "demo", "-p", "hi", "--ctx-size", "64"], "--context TOKENS"),
        (&["generate", "demo", "-p", "hi", "--n-gpu-layers", "9"], "--device cuda"),
        (&["generate", "demo", "-f", "prompt.txt"], "q4 generate MODEL < FILE"),
        (&["generate", "demo", "-p", "hi", "--json-schema-file", "s.json"], "--json-schema FILE"),
        (&["generate", "demo", "-p", "hi", "--grammar-file", "g.gbnf"], "--grammar FILE"),
        (&["--backend", "nvfp4", "generate", "demo", "-p", "hi"], "--backend nvfp4-kernel"),
        (&["--backend", "cuda", "generate", "demo", "-p", "hi"], "--device cuda"),
    ] {
        let refused = run(words);
        assert!(matches!(refused.status.code(), Some(2 | 6)), "{words:?}: {}", err(&refused));
        let line = said(&refused);
        assert!(line.contains(want), "{words:?}: {line}");
        // The same is in the document.
        let document = out(&run(&[&["--json"], words].concat()));
        let document: serde_json::Value = serde_json::from_str(&document).unwrap();
        assert_eq!(document["fix"].as_str(), Some(&*line), "{words:?}");
    }
}

#[test]
fn a_folder_or_a_library_whose_name_is_nearly_right_is_found() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("Qwen3-0.6B-NVFP4")).unwrap();
    std::fs::write(folder.path().join("libmine.so"), "").unwrap();
    let at = |words: &[&str]| q4().args(words).current_dir(folder.path()).output().unwrap();
    for verb in ["generate", "inspect", "verify", "explain"] {
        let refused = at(&[verb, "qwen3-0.6b-nvfp4"]);
        assert_eq!(refused.status.code(), Some(4), "{}", err(&refused));
        assert_eq!(said(&refused), "Qwen3-0.6B-NVFP4 is there", "{verb}");
    }
    if cfg!(target_os = "linux") {
        for name in ["libmine.so", "./libmin.so", "."] {
            let refused = at(&["--plugin", name, "generate", "demo", "-p", "hi"]);
            assert_eq!(refused.status.code(), Some(6), "{}", err(&refused));
            assert_eq!(said(&refused), "--plugin ./libmine.so", "{name}");
        }
    }
}
