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
        (json!({"input": "a", "truncation": "auto"}), "truncation: no turns are left out here"),
        (json!({"input": "a", "truncation": "some"}), "truncation: need disabled, have the text \"some\""),
        (json!({"input": "a", "include": ["everything"]}), "include[0]: need message.output_text.logprobs"),
        (json!({"input": "a", "include": "logprobs"}), "include: need a list"),
        (json!({"input": "a", "top_logprobs": 2}), "top_logprobs: need include to have message.output"),
        (
            json!({"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 21}),
            "from 0 to 20",
        ),
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

#[tokio::test]
async fn what_changes_nothing_may_be_asked_for() {
    let house = House::saying("Hello");
    for more in [
        json!({"truncation": "disabled"}),
        json!({"truncation": null, "include": null}),
        json!({"include": []}),
        json!({"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}),
    ] {
        let mut body = json!({"input": "Hi"});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let got = house.post(PATH, &body).await.json();
        assert_eq!((&got["status"], &got["truncation"]), (&json!("completed"), &json!("disabled")), "{more}");
        assert_eq!(got["output"][0]["content"][0]["logprobs"], json!([]));
        assert_eq!(house.engine.last().limits.top_logprobs, 0);
    }
}

/// Each token of the text once, whether it comes as a whole or event by event; none of a thought or a tag.
#[tokio::test]
async fn tokens_of_the_text_come_with_their_probabilities() {
    let house = House::saying("<think>hm, so</think>\n\nHello, 你好 there.");
    let mut body = json!({"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let got = house.post(PATH, &body).await.json();
    let message = &got["output"][1]["content"][0];
    let told = message["logprobs"].as_array().expect("a list");
    let bytes: Vec<u8> = told
        .iter()
        .flat_map(|token| token["bytes"].as_array().expect("bytes"))
        .map(|byte| byte.as_u64().expect("a byte") as u8)
        .collect();
    assert_eq!(String::from_utf8(bytes).expect("UTF-8"), message["text"].as_str().expect("a text"));
    assert_eq!(message["text"], "Hello, 你好 there.");
    assert!(told.iter().all(|token| token["top_logprobs"].as_array().map(Vec::len) == Some(2)), "{told:?}");
    body["stream"] = true.into();
    let events = house.post(PATH, &body).await.events();
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<_>>();
    let deltas = of("response.output_text.delta");
    let pieces: Vec<_> = deltas.iter().flat_map(|e| e["logprobs"].as_array().expect("a list")).collect();
    assert_eq!(pieces, told.iter().collect::<Vec<_>>());
    assert_eq!(&of("response.output_text.done")[0]["logprobs"], &message["logprobs"]);
    let last = events.last().expect("events");
    assert_eq!(last["response"]["output"][1]["content"][0]["logprobs"], message["logprobs"]);
}
