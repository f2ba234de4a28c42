use super::House;
use super::engine::{Mood, Scripted};
use crate::options::Options;
use serde_json::json;

const PATH: &str = "/v1/responses";

#[tokio::test]
async fn an_answer_comes_as_one_document() {
    let house = House::saying("<think>hm</think>Hello, you.");
    let got = house.post(PATH, &json!({"model": "x", "input": "Hi", "instructions": "Be brief."})).await;
    assert_eq!(got.status, 200);
    assert_eq!(house.engine.prompt(), "<system>Be brief.\n<user>Hi\n<assistant>");
    insta::assert_snapshot!(got.stable());
}

#[tokio::test]
async fn events_are_typed_and_numbered() {
    let got = House::saying("Hi.").post(PATH, &json!({"input": "Hi", "stream": true})).await;
    assert_eq!((got.status, got.header("content-type")), (200, "text/event-stream"));
    let numbers: Vec<u64> =
        got.events().iter().map(|e| e["sequence_number"].as_u64().expect("a number")).collect();
    assert!(numbers.iter().copied().eq(0..numbers.len() as u64), "{numbers:?}");
    insta::assert_snapshot!(got.stable());
}

#[tokio::test]
async fn an_answer_that_is_cut_is_incomplete() {
    let body = json!({"input": "Hi", "max_output_tokens": 2});
    let got = House::saying("one two three").post(PATH, &body).await.json();
    assert_eq!(got["status"], "incomplete");
    assert_eq!(got["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(got["output"][0]["status"], "incomplete");
    let body = json!({"input": "Hi", "max_output_tokens": 2, "stream": true});
    let last = House::saying("one two three").post(PATH, &body).await.events().pop().expect("events");
    assert_eq!(last["type"], "response.incomplete");
}

/// As an agent sends them: many fields, tools of many kinds, nothing about sampling.
#[tokio::test]
async fn requests_of_agents_are_understood() {
    let house = House::saying("Hello");
    let body = json!({
        "model": "gpt-anything", "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs.", "strict": false,
             "parameters": {"type": "object", "properties": {}}},
            {"type": "web_search", "external_web_access": false},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        ],
        "tool_choice": "auto", "parallel_tool_calls": false, "reasoning": {"effort": "medium"},
        "store": false, "stream": true, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k", "text": {"verbosity": "low"},
    });
    let got = house.post(PATH, &body).await;
    assert_eq!(got.status, 200, "{}", got.body);
    assert!(house.engine.prompt().starts_with(r#"[{"type": "function", "function": {"name": "shell""#));
    assert!(!house.engine.prompt().contains("web_search") && !house.engine.prompt().contains("apply_patch"));
}

#[tokio::test]
async fn what_is_not_kept_is_refused_clearly() {
    let house = House::saying("Hello");
    for (body, part) in [
        (json!({"input": "a", "previous_response_id": "resp_1"}), "send the whole conversation"),
        (json!({"input": "a", "background": true}), "background: not supported"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "send the item"),
        (json!({"input": [{"type": "computer_call"}]}), "input[0].type: need message"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "reads text only"),
        (json!({"input": []}), "input: need a text"),
        (json!({}), "input: need a text"),
        (json!({"input": "a", "text": {"format": {"type": "xml"}}}), "text.format.type: need text"),
    ] {
        let (status, message) = house.post(PATH, &body).await.error();
        assert_eq!(status, 400);
        assert!(message.contains(part), "{message}");
    }
}

#[tokio::test]
async fn a_failure_in_the_middle_is_told_by_the_response() {
    let house = House::with(Scripted::in_mood(Mood::Failing), Options::default());
    let last =
        house.post(PATH, &json!({"input": "Hi", "stream": true})).await.events().pop().expect("events");
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"]["code"], "Q4-E0211");
}
