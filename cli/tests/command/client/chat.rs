//! `q4 chat --server`.
use super::mock::{Mock, Says, delta, document, end, events, models, whole};
use crate::chat::terminal::Terminal;
use crate::serve::{Server, of_one_order};
use crate::{err, out, q4};
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Output, Stdio};

/// Says `lines` through a pipe.
fn pipe(args: &[&str], lines: &str) -> Output {
    piped(q4().args(args), lines)
}

fn piped(command: &mut std::process::Command, lines: &str) -> Output {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // Who refuses the line reads nothing.
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
    child.wait_with_output().unwrap()
}

fn said(text: &str) -> Vec<u8> {
    whole(&[&[delta(json!({"content": text}))][..], &end("stop", 5, 1)].concat())
}

#[test]
fn a_server_of_q4_says_what_q4_says_here() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys.txt");
    std::fs::write(&keys, "\n  open-sesame \nanother\n").unwrap();
    let keys = keys.to_str().unwrap();
    let server = Server::start(&["--api-key-file", keys]);
    server.wait_until_ready();
    let url = format!("http://{}/v1", server.address);
    let lines = "Who are you?\nWhat is 3 plus 4?\n";
    let here = piped(of_one_order(q4().args(["--device", "cpu", "chat"])), lines);
    let there = pipe(&["chat", "--server", &url, "--api-key-file", keys], lines);
    assert!(there.status.success(), "{}", err(&there));
    assert_eq!(out(&there), out(&here));
    // The key may be in the environment; without one, nobody answers.
    let args = ["--json", "chat", "--server", &url, "--model", "demo", "--temperature", "0.9", "--seed", "4"];
    let keyed = piped(q4().args(args).env("Q4_API_KEY", "open-sesame"), "Who are you?\n");
    let turn: Value = serde_json::from_str(&out(&keyed)).unwrap();
    assert_eq!(
        (&turn["schema"], &turn["turn"], &turn["model"]),
        (&"q4.chat/1".into(), &1.into(), &"demo".into())
    );
    let args = ["--json", "generate", "-p", "Who are you?", "--temperature", "0.9", "--seed", "4"];
    let alone = of_one_order(q4().args(["--device", "cpu"]).args(args)).output().unwrap();
    let alone: Value = serde_json::from_str(&out(&alone)).unwrap();
    for (there, here) in
        [("text", "text"), ("prompt_tokens", "prompt_tokens"), ("finish_reason", "finish_reason")]
    {
        assert_eq!(turn[there], alone[here], "{there}");
    }
    assert_eq!(turn["answer_tokens"], alone["token_ids"].as_array().unwrap().len());
    let none = pipe(&["chat", "--server", &url], "Hello\n");
    assert_eq!(none.status.code(), Some(8));
    assert!(err(&none).contains("Q4-E0502") && err(&none).contains("--api-key-file"), "{}", err(&none));
}

#[test]
fn commands_change_what_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.json");
    let thoughtful = [
        &[delta(json!({"role": "assistant", "content": ""}))][..],
        &[delta(json!({"reasoning": "hm", "reasoning_content": "hm"})), delta(json!({"content": "談"}))],
        &[delta(json!({"content": "!"}))],
        &end("length", 7, 3),
    ];
    let mock = Mock::answering(whole(&thoughtful.concat()));
    let lines = format!(
        "one\n/params temperature 0.5 max-tokens 9\n/think off\n/retry\ntwo\n/undo\n/system Be brief.\nthree\n/stats\n\
         /save {0}\n/reset\n/load {0}\nfour\n",
        file.display()
    );
    let args = [
        "chat",
        "--server",
        &mock.url,
        "--stop",
        "x",
        "--top-k",
        "3",
        "--ignore-eos",
        "--template-arg",
        "a=1",
    ];
    let output = pipe(&args, &lines);
    assert!(output.status.success(), "{}", err(&output));
    // As a model that is computed here writes it.
    assert_eq!(out(&output), "<think>\nhm\n</think>\n\n談!\n".repeat(5));
    let told = err(&output);
    for part in [
        "temperature 0.5, top-k 3, max-tokens 9, the rest as the server has it",
        "thinking: off is what the server is asked for",
        "cut after 3 tokens",
        "prompt 7 tokens; answer 3 tokens",
    ] {
        assert!(told.contains(part), "{part} is missing in\n{told}");
    }
    let bodies = mock.bodies();
    let users = |body: &Value| {
        let list = body["messages"].as_array().unwrap().clone();
        list.iter().map(|m| m["content"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let all: Vec<_> = bodies.iter().map(users).collect();
    assert_eq!(all[0], ["one"]);
    assert_eq!(all[1], ["one"], "asked anew");
    assert_eq!(all[2], ["one", "談!", "two"]);
    assert_eq!(all[3], ["Be brief.", "three"]);
    assert_eq!(all[4], ["Be brief.", "three", "談!", "four"]);
    assert_eq!((&bodies[0]["temperature"], &bodies[3]["temperature"]), (&Value::Null, &0.5.into()));
    assert_eq!((&bodies[0]["top_k"], &bodies[3]["max_tokens"]), (&3.into(), &9.into()));
    assert_eq!(bodies[0]["chat_template_kwargs"], json!({"a": 1}));
    assert_eq!(bodies[4]["chat_template_kwargs"], json!({"enable_thinking": false, "a": 1}));
    let first = json!({"model": "m", "stream": true, "ignore_eos": true, "stop": ["x"]});
    for (name, value) in first.as_object().unwrap() {
        assert_eq!(&bodies[0][name], value, "{name}");
    }
    // Notes of q4's own are in the file and are not sent.
    let kept: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!((&kept["model"], &kept["sampling"]["temperature"]), (&"m".into(), &0.5.into()));
    assert_eq!(kept["messages"][2]["finish_reason"], "length");
    assert_eq!(kept["messages"][2]["reasoning_content"], "hm");
    assert_eq!(
        bodies[4]["messages"][2],
        json!({"role": "assistant", "content": "談!", "reasoning_content": "hm"})
    );
}

#[test]
fn tools_are_offered_and_calls_shown() {
    let dir = tempfile::tempdir().unwrap();
    let tools = dir.path().join("tools.json");
    std::fs::write(&tools, r#"[{"type": "function", "function": {"name": "f"}}]"#).unwrap();
    let call = json!({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]});
    let mock = Mock::answering(whole(&[&[delta(call)][..], &end("tool_calls", 5, 9)].concat()));
    let output = pipe(&["chat", "--server", &mock.url, "--tools", tools.to_str().unwrap()], "go\nagain\n");
    let want = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n";
    assert_eq!(out(&output), want.repeat(2), "{}", err(&output));
    let bodies = mock.bodies();
    assert_eq!(bodies[0]["tools"][0]["function"]["name"], "f");
    assert_eq!(bodies[1]["messages"][1]["tool_calls"][0]["function"]["arguments"], "{\"x\": 1}");
}

#[test]
fn what_goes_wrong_has_a_code_and_ends_a_pipe() {
    let refused =
        |status: &str, head: &str| document(status, head, &json!({"error": {"message": "because it is so"}}));
    let half = [delta(json!({"content": "half an ans"}))];
    let chunked = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let cut = format!("{chunked}100\r\ndata: {}\n\n", half[0]);
    let table: Vec<(&str, Vec<u8>, &str, &[&str])> = vec![
        ("401", refused("401 Unauthorized", ""), "Q4-E0502", &["key", "because it is so"]),
        ("404", refused("404 Not Found", ""), "Q4-E0502", &["--model NAME", "because"]),
        ("400", refused("400 Bad Request", ""), "Q4-E0502", &["because"]),
        (
            "429",
            refused("429 Too Many Requests", "retry-after: 17\r\n"),
            "Q4-E0502",
            &["busy", "again after 17 s"],
        ),
        (
            "307",
            refused("307 Temporary Redirect", "location: http://elsewhere/\r\n"),
            "Q4-E0502",
            &["http://elsewhere/"],
        ),
        ("500", refused("500 Oh", ""), "Q4-E0503", &["because"]),
        ("503", refused("503 Later", "retry-after: 2\r\n"), "Q4-E0503", &["again after 2 s"]),
        ("no HTTP", b"220 mail.example.org ESMTP\r\n".to_vec(), "Q4-E0503", &["no HTTP"]),
        ("nothing", Vec::new(), "Q4-E0503", &["went away"]),
        (
            "a page",
            document("200 OK", "", &json!({"a": 1})),
            "Q4-E0503",
            &["text/event-stream", "application/json"],
        ),
        (
            "an error in the stream",
            events(&[half[0].clone(), json!({"error": {"message": "out of it"}})]),
            "Q4-E0503",
            &["out of it", "/retry"],
        ),
        ("no JSON", [events(&half), b"data: {\n\n".to_vec()].concat(), "Q4-E0503", &["no JSON", "/retry"]),
        ("cut in a chunk", cut.into_bytes(), "Q4-E0503", &["/retry"]),
        ("an end without a reason", events(&half), "Q4-E0503", &["finish_reason", "/retry"]),
    ];
    for (name, bytes, code, parts) in table {
        let mock = Mock::answering(bytes);
        let output = pipe(&["--json", "chat", "--server", &mock.url], "Hello\nnot said\n");
        assert_eq!(output.status.code(), Some(8), "{name}: {}{}", out(&output), err(&output));
        let error: Value = serde_json::from_str(&out(&output)).unwrap();
        assert_eq!((&error["schema"], &error["code"]), (&"q4.error/1".into(), &code.into()), "{name}");
        for part in [&[&*mock.url.replace("http://", "")], parts].concat() {
            assert!(err(&output).contains(part), "{name}: {part} is missing in\n{}", err(&output));
        }
        assert_eq!(mock.bodies().len(), 1, "{name}");
    }
    // Somebody who hangs up before he was asked.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || listener.incoming().for_each(drop));
    for _ in 0..8 {
        let hung_up = pipe(&["chat", "--server", &url, "--model", "m"], "Hello\n");
        assert_eq!(hung_up.status.code(), Some(8), "{}", err(&hung_up));
        assert!(err(&hung_up).contains("Q4-E0503"), "{}", err(&hung_up));
    }
    let nobody = pipe(&["chat", "--server", "http://127.0.0.1:9"], "Hello\n");
    assert_eq!(nobody.status.code(), Some(8));
    assert!(err(&nobody).contains("Q4-E0501") && err(&nobody).contains("q4 serve"), "{}", err(&nobody));
}

#[test]
fn what_cannot_be_meant_is_a_mistake_of_usage() {
    let url = "http://127.0.0.1:9";
    for (args, part) in [
        (&["chat", "--server", "https://example.org"][..], "no TLS"),
        (&["chat", "--server", "localhost:8080"], "fix: http://localhost:8080"),
        (&["chat", "demo", "--server", url], "cannot be used with"),
        (&["chat", "--server", url, "--context", "64"], "--context beside --server"),
        (&["chat", "--server", url, "--quantize", "nf4"], "--quantize beside --server"),
        (&["--backend", "reference", "chat", "--server", url], "--backend beside --server"),
        (&["chat", "--server", url, "--memory-limit", "1GiB"], "--memory-limit beside --server"),
        (&["chat", "--model", "demo"], "fix: q4 chat demo"),
        (&["bench", "--model", "demo"], "fix: q4 bench demo"),
        (&["chat", "--api-key-file", "x"], "--server URL"),
        (&["chat", "--server", url, "--model", "m", "--top-p", "7"], "top_p has no meaning"),
    ] {
        let output = pipe(args, "Hello\n");
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", err(&output));
        assert!(err(&output).contains(part), "{args:?}: {}", err(&output));
    }
}

#[test]
fn ctrl_c_closes_the_stream_and_a_server_that_goes_leaves_the_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let began = |text: &str| events(&[delta(json!({"content": text}))]);
    let mock = Mock::start(move |path, body| {
        let said = body["messages"].as_array().and_then(|m| m.last()).map(|m| m["content"].clone());
        match said.as_ref().and_then(Value::as_str) {
            _ if path == "/v1/models" => models(),
            Some("silence") => Says::Waits(events(&[])),
            Some("wait") => Says::Waits(began("so far")),
            Some("go") => Says::Bytes(began("and then")),
            Some("no") => Says::Bytes(document("429 Busy", "retry-after: 3\r\n", &json!({}))),
            _ => Says::Bytes(said_fine()),
        }
    });
    let mut command = q4();
    command.args(["chat", "--no-history", "--server", &mock.url]).current_dir(dir.path());
    let mut t = Terminal::start(command, 100);
    t.prompt();
    assert!(t.text().contains("m at http://127.0.0.1"), "{}", t.text());
    t.press("wait\r");
    t.see("so far");
    t.press("\x03");
    t.see("[interrupted; /retry answers anew");
    mock.until_left();
    t.prompt();
    t.press("silence\r");
    // Nothing is shown of it: only the server knows that it was asked.
    while mock.bodies().len() < 2 {
        std::thread::yield_now();
    }
    t.press("\x03");
    t.see("the message is dropped");
    mock.until_left();
    t.prompt();
    t.say("no");
    assert!(t.text().contains("again after 3 s"), "{}", t.text());
    t.say("go");
    assert!(t.text().contains("Q4-E0503") && t.text().contains("/retry answers anew"), "{}", t.text());
    t.say("still there?");
    t.say("/save talk.json");
    let kept: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.path().join("talk.json")).unwrap()).unwrap();
    let kept: Vec<_> =
        kept["messages"].as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap()).collect();
    assert_eq!(kept, ["wait", "so far", "go", "and then", "still there?", "fine"]);
    t.press("\x04");
    assert_eq!(t.end().code(), Some(0));
}

fn said_fine() -> Vec<u8> {
    said("fine")
}

#[test]
fn a_saved_conversation_goes_on_and_turns_are_played() {
    let dir = tempfile::tempdir().unwrap();
    let (talk, turns) = (dir.path().join("talk.json"), dir.path().join("turns.txt"));
    let saved = json!({"model": "else", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "sampling": {"temperature": 0.3, "max_tokens": 4}});
    std::fs::write(&talk, saved.to_string()).unwrap();
    std::fs::write(&turns, "c\nd\n").unwrap();
    let mock = Mock::answering(said("fine"));
    let files = [talk.to_str().unwrap(), turns.to_str().unwrap()];
    let args = [
        "chat", "--server", &mock.url, "--model", "mine", "--load", files[0], "--turns", files[1], "-n", "8",
    ];
    let output = pipe(&args, "e\n");
    assert!(output.status.success(), "{}", err(&output));
    assert!(err(&output).contains("held with else; mine goes on"), "{}", err(&output));
    let bodies = mock.bodies();
    let last = &bodies[2];
    assert_eq!(bodies.len(), 3);
    assert_eq!(last["messages"].as_array().unwrap().len(), 7);
    assert_eq!(
        (&last["model"], &last["temperature"], &last["max_tokens"]),
        (&"mine".into(), &0.3.into(), &8.into())
    );
}
