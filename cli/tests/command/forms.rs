//! Answers that must have a form: the options, and what is said where nobody could keep to it.
use crate::{err, out, run};
use serde_json::Value;
use std::fs;

#[test]
fn an_answer_has_its_form_in_every_turn() {
    let dir = tempfile::tempdir().unwrap();
    let (schema, turns) = (dir.path().join("schema.json"), dir.path().join("turns.txt"));
    fs::write(&schema, r#"{"enum": ["a", "b\"c", 12]}"#).unwrap();
    fs::write(&turns, "Hello\nThanks\n").unwrap();
    let args = ["--json", "generate", "--seed", "4", "--temperature", "1.5", "--json-schema"];
    let args = [&args[..], &[schema.to_str().unwrap(), "--turns", turns.to_str().unwrap()]].concat();
    let output = run(&args);
    assert!(output.status.success(), "{}", err(&output));
    let document: Value = serde_json::from_str(&out(&output)).unwrap();
    let turns = document["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 2);
    for turn in turns {
        assert!(["\"a\"", r#""b\"c""#, "12"].contains(&turn["text"].as_str().unwrap()), "{turn}");
        assert_eq!(turn["finish_reason"], "stop");
    }
    // Complete, whatever else would have ended it.
    let output = run(&["generate", "-p", "Hello", "--regex", "(ab){3}", "--ignore-eos"]);
    assert_eq!(out(&output), "ababab\n");
}

#[test]
fn a_form_that_cannot_be_kept_to_is_refused_before_anything_is_computed() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (gbnf, broken, text) =
        (file("a.gbnf", "root ::= \"a\""), file("b.lark", "start: other\n"), file("c.json", "not JSON"));
    for (args, status, word) in [
        (&["--json-schema", r#"{"uniqueItems": true}"#][..], 2, "uniqueItems"),
        (&["--json-schema", "{"], 2, "--json-schema"),
        (&["--json-schema", &text], 2, "a JSON schema"),
        (&["--json-schema", absent!()], 8, "fix"),
        (&["--regex", "("], 2, "pattern"),
        (&["--choice", ""], 2, "empty text"),
        (&["--grammar", &gbnf], 2, "GBNF"),
        (&["--grammar", &broken], 2, "other"),
        (&["--grammar", absent!()], 8, "fix"),
        (&["--regex", "a", "--choice", "a"], 2, "--choice"),
        (&["--regex", "a", "--show-prompt"], 2, "--show-prompt"),
    ] {
        let output = run(&[&["generate", "-p", "Hello"], args].concat());
        let said = err(&output);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
        assert!(said.contains(word), "{args:?}: {said}");
        assert_eq!(out(&output), "", "{args:?}");
    }
}
