//! `q4 generate --batch`: a line an answer, the one its request gets alone, and nothing twice.
use crate::{err, out, q4, run};
use serde_json::Value;
use std::fs;
use std::path::Path;

const REQUESTS: &str = r#"{"prompt": "Who are you?", "id": "first"}
{"prompt": "Tell me a story.", "max_tokens": 30}

{"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "id": 7, "temperature": 0.8, "seed": 5}
{"prompt": "Once", "raw": true, "max_tokens": 9}
{"prompt": "你是誰", "stop": ["q4"]}
{"prompt": "When?", "regex": "[0-2][0-9]:[0-5][0-9]", "temperature": 0.9}
{"prompt": "Who?", "json_schema": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"], "additionalProperties": false}}
{"prompt": "Is it so?", "choice": ["yes", "no"], "temperature": 2, "seed": 9}
{"prompt": "Is it so?", "grammar": "start: \"yes\" | \"no\"", "raw": true}
"#;

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

fn batch(file: &Path, more: &[&str]) -> std::process::Output {
    q4().args(["generate", "--seed", "3", "--batch"]).arg(file).args(more).output().unwrap()
}

#[test]
fn every_line_is_answered_as_it_is_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("requests.jsonl");
    fs::write(&file, REQUESTS).unwrap();
    let output = batch(&file, &[]);
    assert!(output.status.success(), "{}", err(&output));
    let answers = lines(&out(&output));
    let lark = dir.path().join("answer.lark");
    fs::write(&lark, "start: \"yes\" | \"no\"").unwrap();
    let lark = lark.to_str().unwrap();
    let schema = r#"{"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"],
        "additionalProperties": false}"#;
    let alone = [
        &["-p", "Who are you?"][..],
        &["-p", "Tell me a story.", "-n", "30"],
        &["-p", "What is 3 plus 4?", "--temperature", "0.8", "--seed", "5"],
        &["-p", "Once", "--raw", "-n", "9"],
        &["-p", "你是誰", "--stop", "q4"],
        &["-p", "When?", "--regex", "[0-2][0-9]:[0-5][0-9]", "--temperature", "0.9", "--seed", "3"],
        &["-p", "Who?", "--json-schema", schema],
        &["-p", "Is it so?", "--choice", "yes", "--choice", "no", "--temperature", "2", "--seed", "9"],
        &["-p", "Is it so?", "--grammar", lark, "--raw"],
    ];
    assert_eq!(answers.len(), alone.len());
    for (i, (answer, args)) in answers.iter().zip(alone).enumerate() {
        assert_eq!(answer["index"], i);
        let one = run(&[&["--json", "generate"], args].concat());
        let one: Value = serde_json::from_str(&out(&one)).unwrap();
        for field in ["text", "token_ids", "prompt_tokens", "finish_reason"] {
            assert_eq!(answer[field], one[field], "{args:?}: {field}");
        }
    }
    assert_eq!((&answers[0]["id"], &answers[2]["id"]), (&"first".into(), &7.into()));
    assert!(answers[1].get("id").is_none());
    let text = |i: usize| answers[i]["text"].as_str().unwrap();
    assert!(text(5).len() == 5 && text(5).as_bytes()[2] == b':', "{}", text(5));
    assert!(serde_json::from_str::<Value>(text(6)).unwrap()["n"].as_f64().unwrap() <= 99.0);
    assert!(["yes", "no"].contains(&text(7)) && ["yes", "no"].contains(&text(8)), "{} {}", text(7), text(8));
}

/// Whoever names a temperature draws as the model wishes, in a line as in an option.
#[test]
fn what_a_line_leaves_out_is_as_the_model_wishes() {
    let dir = tempfile::tempdir().unwrap();
    let (model, file) = (dir.path().join("model"), dir.path().join("requests.jsonl"));
    let model_arg = model.to_str().unwrap();
    assert!(run(&["convert", "demo", model_arg, "--layout", "modelopt"]).status.success());
    // Greedy by itself; with a temperature, one token of all.
    fs::write(model.join("generation_config.json"), r#"{"eos_token_id": 2, "top_k": 1}"#).unwrap();
    fs::write(&file, r#"{"prompt": "Tell me a story.", "temperature": 3, "max_tokens": 12}"#).unwrap();
    let output = q4().args(["generate", model_arg, "--seed", "3", "--batch"]).arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    let args = ["--json", "generate", model_arg, "-p", "Tell me a story.", "--seed", "3", "-n", "12"];
    let hot = run(&[&args[..], &["--temperature", "3"]].concat());
    let alone: Value = serde_json::from_str(&out(&hot)).unwrap();
    assert_eq!(lines(&out(&output))[0]["text"], alone["text"]);
    let greedy: Value = serde_json::from_str(&out(&run(&args))).unwrap();
    assert_eq!(alone["text"], greedy["text"], "the wish for one token counts");
}

#[test]
fn a_run_that_was_cut_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (file, answers) = (dir.path().join("requests.jsonl"), dir.path().join("answers.jsonl"));
    let to = ["-o", answers.to_str().unwrap(), "--parallel", "2"];
    fs::write(&file, REQUESTS).unwrap();
    assert!(batch(&file, &to).status.success());
    let whole = fs::read(&answers).unwrap();
    let second = whole.iter().position(|b| *b == b'\n').unwrap() + 1;
    // Nothing, a line, a line and a half, all but the last byte, everything.
    for cut in [0, second, second + 20, whole.len() - 1, whole.len()] {
        fs::write(&answers, &whole[..cut]).unwrap();
        let output = batch(&file, &to);
        assert!(output.status.success(), "{}", err(&output));
        assert_eq!(fs::read(&answers).unwrap(), whole, "cut behind byte {cut}");
    }
    // Answers that this run would not have given: other options, another kernel, another model, other requests.
    for (other, word) in [
        (&["--seed", "3", "--max-tokens", "5"][..], "other options"),
        (&["--seed", "3", "--temperature", "0.3"], "other options"),
        (&["--seed", "4"], "other options"),
        (&["--seed", "3", "--system", "Be brief."], "other options"),
        (&["--seed", "3", "--stop", "x"], "other options"),
    ] {
        let output = q4().arg("generate").args(other).arg("--batch").arg(&file).args(to).output();
        refused(&output.unwrap(), word, &answers, &whole);
    }
    let words = ["--backend", "reference", "generate", "--seed", "3", "--batch"];
    refused(&q4().args(words).arg(&file).args(to).output().unwrap(), "computed otherwise", &answers, &whole);
    let words = ["generate", "--seed", "3", "--batch"];
    let output = q4().env("Q4_ISA", "portable").args(words).arg(&file).args(to).output().unwrap();
    refused(&output, "computed otherwise", &answers, &whole);
    fs::write(&file, REQUESTS.replace("Who are", "What are")).unwrap();
    refused(&batch(&file, &to), "another request", &answers, &whole);
    fs::write(&file, REQUESTS).unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("demo").join(name), model.join(name)).unwrap();
    }
    let of_model = |more: &[&str]| {
        let asked = ["--seed", "3", "--raw", "--batch", file.to_str().unwrap()];
        q4().args(more).arg("generate").arg(&model).args(asked).args(to).output().unwrap()
    };
    fs::remove_file(&answers).unwrap();
    fs::write(&file, "{\"prompt\": \"Who\", \"max_tokens\": 2}\n").unwrap();
    assert!(of_model(&[]).status.success());
    let of_one = fs::read(&answers).unwrap();
    refused(&of_model(&["--kv-cache", "f32"]), "computed otherwise", &answers, &of_one);
    // Another byte, far from the ends of its tensor.
    let mut weights = fs::read(model.join("model.safetensors")).unwrap();
    let middle = weights.len() / 2;
    weights[middle] ^= 1;
    fs::write(model.join("model.safetensors"), weights).unwrap();
    refused(&of_model(&[]), "computed otherwise", &answers, &of_one);
    fs::write(&file, REQUESTS).unwrap();
    // What is there and is something else is not touched.
    for other in ["notes\n", "{\"index\": 1}\n", "{\"index\": 0, \"id\": \"last\"}\n"] {
        fs::write(&answers, other).unwrap();
        let output = batch(&file, &to);
        assert_eq!(output.status.code(), Some(2), "{other}: {}", err(&output));
        assert_eq!(fs::read_to_string(&answers).unwrap(), other);
    }
    let output = batch(&file, &["-o", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(fs::read_to_string(&file).unwrap(), REQUESTS, "the requests are still there");
}

fn refused(output: &std::process::Output, word: &str, answers: &Path, whole: &[u8]) {
    assert_eq!(output.status.code(), Some(2), "{word}: {}", err(output));
    assert!(err(output).contains(word), "{word}: {}", err(output));
    assert_eq!(fs::read(answers).unwrap(), whole, "{word}");
}

/// A line that failed counts in every run on its file.
#[test]
fn an_error_of_an_earlier_run_is_not_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let (file, answers) = (dir.path().join("requests.jsonl"), dir.path().join("answers.jsonl"));
    let to = ["-o", answers.to_str().unwrap(), "--parallel", "2"];
    fs::write(&file, REQUESTS).unwrap();
    assert!(batch(&file, &to).status.success());
    let mut said = lines(&fs::read_to_string(&answers).unwrap());
    for field in ["text", "token_ids", "prompt_tokens", "finish_reason", "seed"] {
        said[1].as_object_mut().unwrap().remove(field);
    }
    said[1]["error"] = serde_json::json!({"code": "Q4-E0212", "what": "the context is full"});
    // With lines behind it that are missing, and with all of them.
    for kept in [3, said.len()] {
        let text: String = said[..kept].iter().map(|line| format!("{line}\n")).collect();
        fs::write(&answers, text).unwrap();
        let output = batch(&file, &to);
        assert_eq!(output.status.code(), Some(4), "{}", err(&output));
        assert!(err(&output).contains("before line 2"), "{}", err(&output));
        assert_eq!(lines(&fs::read_to_string(&answers).unwrap()), said, "{kept} lines kept");
    }
}

/// Dense products have no promise about the company of a row, and are measured.
#[test]
fn products_that_depend_on_their_company_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("requests.jsonl");
    fs::write(&file, REQUESTS).unwrap();
    let words = ["--compute", "dequant-matmul-only", "generate", "--max-tokens", "2", "--batch"];
    let output = q4().args(words).arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    assert!(err(&output).contains("may differ in the last bits"), "{}", err(&output));
    let output =
        q4().env("Q4_ISA", "portable").args(["generate", "-n", "2", "--batch"]).arg(&file).output().unwrap();
    assert!(!err(&output).contains("may differ"), "{}", err(&output));
}

#[test]
fn what_is_no_request_is_named_by_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("requests.jsonl");
    for (bad, word) in [
        ("x", "expected"),
        ("7", "expected"),
        ("{}", "neither"),
        (r#"{"prompt": "a", "messages": []}"#, "both"),
        (r#"{"promt": "a"}"#, "promt"),
        (r#"{"prompt": ""}"#, "empty"),
        (r#"{"prompt": [], "max_tokens": 1}"#, "empty"),
        (r#"{"prompt": [99999999]}"#, "99999999"),
        (r#"{"prompt": "a", "top_p": 7}"#, "top_p"),
        (r#"{"prompt": "a", "stop": [""]}"#, "stop"),
        (r#"{"prompt": "a", "tools": {}}"#, "tools"),
        (r#"{"prompt": "a", "max_tokens": -1}"#, "-1"),
        (r#"{"prompt": "a", "regex": "a", "choice": ["a"]}"#, "two forms"),
        (r#"{"prompt": "a", "json_schema": {"uniqueItems": true}}"#, "uniqueItems"),
        (r#"{"prompt": "a", "grammar": "root ::= \"a\""}"#, "GBNF"),
    ] {
        fs::write(&file, format!("{{\"prompt\": \"a\"}}\n{bad}\n")).unwrap();
        let output = batch(&file, &[]);
        let text = err(&output);
        // An empty text has the tokens of its template.
        if word == "empty" && bad.contains("\"\"") {
            assert!(output.status.success(), "{text}");
            continue;
        }
        assert_eq!(output.status.code(), Some(2), "{bad}: {text}");
        assert!(text.contains("line 2") && text.contains(word), "{bad}: {text}");
        assert_eq!(out(&output), "", "{bad}: nothing was computed");
    }
    fs::write(&file, "\n").unwrap();
    assert_eq!(batch(&file, &[]).status.code(), Some(2));
    assert_eq!(run(&["generate", "-p", "a", "--parallel", "2"]).status.code(), Some(2));
    assert_eq!(batch(&file, &["-p", "a"]).status.code(), Some(2));
}
