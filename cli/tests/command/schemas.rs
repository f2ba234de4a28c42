//! Every verb has a document: verb by verb, what `--json` prints, whether it goes well or not.
use crate::{err, golden_arg, out, q4, run};
use serde_json::Value;
use std::io::Write;
use std::process::Stdio;

/// Arguments, exit status, name in the schema. `TINY` is a dense model, `TEXT` a file, `OUT` a free path.
const TABLE: [(&str, i32, &str); 32] = [
    ("generate -p Hello -n 2", 0, "generate"),
    ("chat -n 2", 0, "chat"),
    ("diagnose", 0, "diagnose"),
    ("diagnose --matrix", 0, "diagnose-matrix"),
    ("explain", 0, "explain"),
    ("inspect", 0, "inspect"),
    ("verify", 0, "verify"),
    ("quantize TINY OUT", 0, "quantize"),
    ("convert demo OUT --layout dat", 0, "convert"),
    ("eval --data TEXT --tokens 32", 0, "eval"),
    ("compare demo demo --data TEXT --tokens 32", 0, "compare"),
    ("logits --ids 1,2 --out OUT", 0, "logits"),
    ("trace --ids 1,2 --against dequant-matmul", 0, "trace"),
    ("bench -r 1 --prefill 8 --decode 2", 0, "bench"),
    ("conformance --backend nf4-kernel --level L1 --sample 1 --no-certificate", 0, "conformance"),
    ("conformance --backend nf4-kernel --level L1 --list", 0, "conformance-list"),
    ("tokenize demo Hello", 0, "tokenize"),
    ("generate -p Hello --show-prompt", 0, "generate"),
    ("plugin header", 0, "plugin-header"),
    ("plugin new --lang c OUT", 0, "plugin-new"),
    ("completions bash", 0, "completions"),
    ("man verify", 0, "man"),
    // What goes wrong, wherever it does.
    ("", 2, "error"),
    ("nonsense", 2, "error"),
    ("generate --nonsense", 2, "error"),
    ("--nonsense generate", 2, "error"),
    ("generate --seed many", 2, "error"),
    ("man nonsense", 2, "error"),
    ("plugin", 2, "error"),
    ("generate OUT -p x", 4, "error"),
    ("--backend nobody generate -p x", 6, "error"),
    ("explain --threads 1", 2, "error"),
];

#[test]
fn every_verb_has_a_document_that_names_its_schema_first() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.txt");
    std::fs::write(&text, "Four bits are enough for a small model to say who it is. ".repeat(9)).unwrap();
    for (at, (line, status, schema)) in TABLE.iter().enumerate() {
        let filled = |word: &str| match word {
            "TINY" => golden_arg("qwen3_tiny_a"),
            "TEXT" => text.display().to_string(),
            "OUT" => dir.path().join(format!("out-{at}")).display().to_string(),
            word => word.to_owned(),
        };
        let mut command = q4();
        command.arg("--json").args(line.split_whitespace().map(filled));
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Who reads nothing may be gone.
        let _ = child.stdin.take().unwrap().write_all(b"Hello\n");
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(*status), "{line}: {}", err(&output));
        let text = out(&output);
        assert!(text.starts_with(&format!("{{\"schema\":\"q4.{schema}/1\",")), "{line}: {text}");
        let document: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{line}: {e}"));
        assert_eq!(
            document["exit"].as_i64().unwrap_or(0),
            if *schema == "error" { (*status).into() } else { 0 }
        );
    }
}

#[test]
fn the_table_has_every_verb() {
    let help = out(&run(&["--help"]));
    let list = help.split_once("Commands:\n").unwrap().1.split_once("\n\n").unwrap().0;
    for verb in list.lines().filter_map(|l| l.split_whitespace().next()) {
        // A server's document comes before its end and has a test of its own; the other two are not about results
        // of this program.
        let is_here = TABLE.iter().any(|(line, ..)| line.split(' ').next() == Some(verb));
        assert!(is_here || matches!(verb, "serve" | "train" | "help"), "{verb}");
    }
}
