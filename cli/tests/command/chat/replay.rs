//! Commands in a pipe, and conversations that go on elsewhere.
use crate::{document, err, json, out, q4};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

fn piped(args: &[&str], input: &str) -> Output {
    let mut command = q4();
    command.arg("chat").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // Who ends early need not read everything.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// The turns of a conversation that ends well.
fn turns(args: &[&str], input: &str) -> Vec<Value> {
    let output = piped(&[&["--json"], args].concat(), input);
    assert!(output.status.success(), "{}", err(&output));
    out(&output).lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn file(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn undo_and_retry_leave_what_was_never_said_otherwise() {
    let lines = turns(&[], "Who are you?\nWho am I?\n/undo\nWho am I?\n/retry\n/undo\n/undo\nWho am I?\n");
    let part = |i: usize| (lines[i]["text"].clone(), lines[i]["context_used"].clone());
    assert_eq!(lines.len(), 5);
    assert_eq!(part(1), part(2), "the cache is cut where the exchange began");
    assert_eq!(part(1), part(3), "the most likely answer is the same one");
    let alone = turns(&[], "Who am I?\n");
    assert_eq!(part(4), (alone[0]["text"].clone(), alone[0]["context_used"].clone()));
    // Another draw of the same seed goes on where the last one ended.
    let drawn = turns(&["--seed", "1"], "/params temperature 2 max-tokens 12\nTell me a story.\n/retry\n");
    assert_ne!(drawn[0]["token_ids"], drawn[1]["token_ids"]);
    for lone in ["/undo\n", "/retry\n"] {
        assert_eq!(piped(&[], lone).status.code(), Some(2));
    }
}

#[test]
fn a_saved_conversation_goes_on_as_if_nothing_had_been() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk.json");
    let path = path.to_str().unwrap();
    let options =
        ["--temperature", "0.8", "--top-k", "9", "--seed", "5", "-n", "20", "--system", "Be brief."];
    let lines =
        turns(&options, &format!("Who are you?\n談談UFO\n/save {path}\n/params temperature 0\nWho am I?\n"));
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!((&saved["schema"], &saved["model"]), (&"q4.conversation/1".into(), &"demo".into()));
    assert_eq!(saved["sampling"]["seed"], 5);
    let contents: Vec<_> = saved["messages"].as_array().unwrap().iter().map(|m| &m["content"]).collect();
    let said = [
        &json!("Be brief."),
        &json!("Who are you?"),
        &lines[0]["text"],
        &json!("談談UFO"),
        &lines[1]["text"],
    ];
    assert_eq!(contents, said);
    // In a new process, in the same words.
    let on = turns(&["--load", path, "--temperature", "0"], "Who am I?\n");
    assert_eq!((&on[0]["text"], &on[0]["context_used"]), (&lines[2]["text"], &lines[2]["context_used"]));
    let loaded = turns(&[], &format!("something else\n/load {path}\n/params temperature 0\nWho am I?\n"));
    assert_eq!(loaded[1]["text"], lines[2]["text"]);
    // Every message answered anew, drawn as before.
    let replayed = json("generate", &["--turns", path]);
    assert_eq!(replayed["seed"], 5);
    for (turn, line) in replayed["turns"].as_array().unwrap().iter().zip(&lines) {
        assert_eq!((&turn["user"], &turn["text"]), (&line["user"], &line["text"]));
    }
    let played = turns(&["--turns", path], "/params temperature 0\nWho am I?\n");
    assert_eq!(played.len(), 3);
    assert_eq!((&played[1]["text"], &played[2]["text"]), (&lines[1]["text"], &lines[2]["text"]));
    // The last message alone, behind what stands in the file; options stand over it.
    let greedy = json("generate", &["--conversation", path, "--temperature", "0"]);
    let again = turns(&["--load", path, "--temperature", "0"], "/retry\n");
    assert_eq!(greedy["text"], again[0]["text"]);
    // Nothing is overwritten by chance.
    let before = std::fs::read(path).unwrap();
    let refused = piped(&[], &format!("/save {path}\n"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(err(&refused).contains("/save! "), "{}", err(&refused));
    assert_eq!(std::fs::read(path).unwrap(), before);
    assert!(piped(&[], &format!("/save! {path}\n")).status.success());
    assert_ne!(std::fs::read(path).unwrap(), before);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn turns_are_played_before_the_pipe_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let questions = file(dir.path(), "turns.txt", "Who are you?\n\n/undo\n");
    let lines = turns(&["--turns", &questions, "-n", "4"], "Who am I?\n");
    let users: Vec<_> = lines.iter().map(|l| l["user"].as_str().unwrap()).collect();
    assert_eq!(users, ["Who are you?", "/undo", "Who am I?"], "a file has messages, no commands");
    assert_eq!(piped(&["--turns", "-"], "").status.code(), Some(2));
    assert_eq!(piped(&["--load", "-"], "").status.code(), Some(2));
}

#[test]
fn files_that_are_no_conversation_are_named_and_refused() {
    let dir = tempfile::tempdir().unwrap();
    let bad = file(dir.path(), "bad.json", "{\"messages\": 7}");
    let nobody = file(dir.path(), "nobody.json", r#"{"schema": "q4.conversation/1", "messages": []}"#);
    let later = file(dir.path(), "later.json", r#"{"schema": "q4.conversation/9", "messages": []}"#);
    for (verb, option, path) in [
        ("generate", "--conversation", &bad),
        ("generate", "--conversation", &nobody),
        ("generate", "--turns", &later),
        ("generate", "--turns", &nobody),
        ("chat", "--load", &bad),
        ("chat", "--turns", &later),
    ] {
        let output = q4().args(["--json", verb, option, path]).output().unwrap();
        assert_eq!(output.status.code(), Some(4), "{verb} {option} {path}");
        let error = document("error", &output);
        assert_eq!(error["code"], "Q4-E0214");
        assert!(error["what"].as_str().unwrap().contains(".json") || verb == "generate", "{error}");
    }
    let missing = dir.path().join("none.json");
    let output = q4().args(["chat", "--load"]).arg(missing).output().unwrap();
    assert_eq!(output.status.code(), Some(8));
    // What nobody knows is named, and no reason to stop.
    let more = r#"{"schema": "q4.conversation/1", "model": "other", "mood": 1, "sampling": {"top_q": 1},
        "messages": [{"role": "user", "content": "Who are you?"}]}"#;
    let more = file(dir.path(), "more.json", more);
    let output = q4().args(["generate", "--conversation", &more]).output().unwrap();
    assert!(output.status.success());
    for word in ["mood", "sampling.top_q", "other"] {
        assert!(err(&output).contains(word), "{}", err(&output));
    }
    assert_eq!(out(&output), out(&q4().args(["generate", "-p", "Who are you?"]).output().unwrap()));
    let long =
        json!({"schema": "q4.conversation/1", "messages": [{"role": "user", "content": "x ".repeat(200)}]});
    let long = file(dir.path(), "long.json", &long.to_string());
    let output = piped(&["--load", &long, "--context", "64"], "");
    assert_eq!(output.status.code(), Some(4));
    assert!(err(&output).contains("Q4-E0212") && err(&output).contains("--context"), "{}", err(&output));
}

#[test]
fn thinking_is_for_templates_that_know_it() {
    let unknown = piped(&[], "/think on\n");
    assert_eq!(unknown.status.code(), Some(2));
    assert!(err(&unknown).contains("enable_thinking"), "{}", err(&unknown));
    let dir = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
    for entry in std::fs::read_dir(demo).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n\
        {% if enable_thinking is defined and enable_thinking is false %}I am{% endif %}{% endif %}";
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let path = dir.path().join("talk.json");
    let (model, path) = (dir.path().to_str().unwrap(), path.to_str().unwrap());
    let lines =
        turns(&[model], &format!("Who are you?\n/reset\n/think off\nWho are you?\n/think\n/save {path}\n"));
    let prompt = |i: usize| lines[i]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt(1) > prompt(0), "{lines:?}");
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(saved["template_args"], json!({"enable_thinking": false}));
    let replayed = json("generate", &[model, "--conversation", path]);
    assert_eq!(
        (&replayed["prompt_tokens"], &replayed["text"]),
        (&lines[1]["prompt_tokens"], &lines[1]["text"])
    );
}
