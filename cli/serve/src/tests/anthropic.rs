use super::House;
use super::engine::{Mood, Scripted};
use crate::options::Options;
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";

fn hello(more: Value) -> Value {
    let mut body = json!({"model": "claude-anything", "max_tokens": 100,
                          "messages": [{"role": "user", "content": "Hi"}]});
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}

#[tokio::test]
async fn an_answer_comes_as_one_message() {
    let got = House::saying("<think>hm</think>Hello, you.").post(PATH, &hello(json!({}))).await;
    assert_eq!(got.status, 200);
    insta::assert_snapshot!(got.stable());
}

#[tokio::test]
async fn an_answer_comes_event_by_event() {
    let got = House::saying("Hello, 你").post(PATH, &hello(json!({"stream": true}))).await;
    assert_eq!((got.status, got.header("content-type")), (200, "text/event-stream"));
    insta::assert_snapshot!(got.stable());
}

#[tokio::test]
async fn the_reason_of_an_end_is_told() {
    for (more, reason, sequence) in [
        (json!({}), "end_turn", Value::Null),
        (json!({"max_tokens": 2}), "max_tokens", Value::Null),
        (json!({"stop_sequences": ["zz", ", y", ","]}), "stop_sequence", ",".into()),
        (json!({"stop_sequences": ["zz", ", you", "you"]}), "stop_sequence", ", you".into()),
    ] {
        let got = House::saying("Hello, you.").post(PATH, &hello(more.clone())).await.json();
        assert_eq!((&got["stop_reason"], &got["stop_sequence"]), (&json!(reason), &sequence), "{more}");
    }
}

#[tokio::test]
async fn blocks_reach_the_template() {
    let house = House::saying("Hello");
    let body = hello(json!({
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "time?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "t", "name": "clock", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "noon"}]},
        ],
        "tools": [{"name": "clock", "input_schema": {"type": "object"}},
                  {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "me"},
    }));
    assert_eq!(house.post(PATH, &body).await.status, 200);
    let tool = r#"[{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]"#;
    let turns = "<system>Be brief.\n<user>time?\n<assistant>\n<tool>noon\n<assistant><think>\n";
    assert_eq!(house.engine.prompt(), format!("{tool}\n{turns}"));
}

#[tokio::test]
async fn tokens_are_counted_without_an_answer() {
    let house = House::saying("Hello");
    let body = json!({"model": "claude-x", "messages": [{"role": "user", "content": "Hi"}]});
    let got = house.post("/v1/messages/count_tokens", &body).await.json();
    assert!(house.engine.asked.lock().expect("lock").is_empty());
    house.post(PATH, &hello(json!({}))).await;
    assert_eq!(got, json!({"input_tokens": house.engine.last().prompt.len()}));
}

#[tokio::test]
async fn refusals_have_the_form_of_this_dialect() {
    let house = House::saying("Hello");
    let tools = json!([{"name": "f", "input_schema": {}}]);
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    for (body, part) in [
        (json!({"messages": [{"role": "user", "content": "Hi"}]}), "max_tokens: need a whole number"),
        (hello(json!({"messages": []})), "messages: need a list of at least one message"),
        (hello(json!({"messages": image})), "messages[0].content[0].type: this model reads text only"),
        (hello(json!({"system": 7})), "system: need a text or a list of parts"),
        (hello(json!({"tools": tools, "tool_choice": {"type": "tool", "name": "g"}})), "one of the tools"),
        (hello(json!({"thinking": {"type": "deep"}})), "enabled, adaptive or disabled"),
    ] {
        let got = house.post(PATH, &body).await;
        let document = got.json();
        assert_eq!((got.status, &document["type"]), (400, &json!("error")));
        assert_eq!(document["error"]["type"], "invalid_request_error");
        let message = document["error"]["message"].as_str().expect("a message");
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(house.get(PATH).await.json()["error"]["type"], "invalid_request_error");
    assert_eq!(house.get("/v1/messages/nothing").await.json()["error"]["type"], "not_found_error");
    let full = House::with(Scripted::in_mood(Mood::Full), Options::default());
    assert_eq!(full.post(PATH, &hello(json!({}))).await.json()["error"]["type"], "rate_limit_error");
}

#[tokio::test]
async fn a_failure_in_the_middle_is_the_last_event() {
    let house = House::with(Scripted::in_mood(Mood::Failing), Options::default());
    let got = house.post(PATH, &hello(json!({"stream": true}))).await;
    let last = got.events().pop().expect("events");
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
}
