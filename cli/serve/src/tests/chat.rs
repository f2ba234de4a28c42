use super::House;
use q4_model::batch::Nudges;
use serde_json::{Value, json};

const PATH: &str = "/v1/chat/completions";

fn hello(more: Value) -> Value {
    let mut body = json!({"model": "any", "messages": [{"role": "user", "content": "Hi"}]});
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}

#[tokio::test]
async fn an_answer_comes_as_one_document() {
    let got = House::saying("Hello, you.").post(PATH, &hello(json!({}))).await;
    assert_eq!(got.status, 200);
    insta::assert_snapshot!(got.stable());
}

#[tokio::test]
async fn an_answer_comes_event_by_event() {
    let body = hello(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let got = House::saying("<think>hm</think>Hello, 你好!").post(PATH, &body).await;
    assert_eq!((got.status, got.header("content-type")), (200, "text/event-stream"));
    insta::assert_snapshot!(got.stable());
}

#[tokio::test]
async fn usage_comes_only_if_it_is_asked_for() {
    let got = House::saying("Hello").post(PATH, &hello(json!({"stream": true}))).await;
    let events = got.events();
    assert!(events.iter().all(|event| event.get("usage").is_none()));
    assert_eq!(events.last(), Some(&json!("[DONE]")));
    assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn thoughts_have_both_names() {
    let body = hello(json!({"chat_template_kwargs": {"enable_thinking": true}}));
    let message =
        &House::saying("two\n</think>\n\nYes").post(PATH, &body).await.json()["choices"][0]["message"];
    assert_eq!(message["content"], "Yes");
    assert_eq!((&message["reasoning"], &message["reasoning_content"]), (&json!("two"), &json!("two")));
}

#[tokio::test]
async fn several_answers_have_seeds_in_a_row() {
    let house = House::saying("Hello");
    let got = house.post(PATH, &hello(json!({"n": 3, "seed": 11, "temperature": 1}))).await.json();
    let indices: Vec<&Value> =
        got["choices"].as_array().expect("choices").iter().map(|c| &c["index"]).collect();
    assert_eq!(indices, [&json!(0), &json!(1), &json!(2)]);
    let seeds: Vec<u64> = house.engine.asked.lock().expect("lock").iter().map(|r| r.params.seed).collect();
    assert_eq!(seeds, [11, 12, 13]);
    // The prompt is there once.
    let single = house.post(PATH, &hello(json!({}))).await.json();
    assert_eq!(got["usage"]["prompt_tokens"], single["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn a_seed_has_64_bits_however_they_are_written() {
    let house = House::saying("Hello");
    for (seed, taken) in [
        (json!(0), 0),
        (json!(7.0), 7),
        (json!(-1), u64::MAX),
        (json!(i64::MIN), 1 << 63),
        (json!(i64::MAX), i64::MAX as u64),
        (json!(u64::MAX), u64::MAX),
    ] {
        assert_eq!(house.post(PATH, &hello(json!({"seed": seed}))).await.status, 200, "{seed}");
        assert_eq!(house.engine.last().params.seed, taken, "{seed}");
    }
    for seed in ["18446744073709551616", "-9223372036854775809", "0.5", "\"7\""] {
        let body = hello(json!({"seed": "SEED"})).to_string().replace("\"SEED\"", seed);
        let (status, message) = house.post_text(PATH, body).await.error();
        assert_eq!(status, 400, "{seed}");
        assert!(message.starts_with("seed: need a whole number from -2^63 to 2^64 - 1"), "{message}");
    }
}

#[tokio::test]
async fn without_a_seed_every_request_has_another() {
    let house = House::saying("Hello");
    for _ in 0..2 {
        house.post(PATH, &hello(json!({"temperature": 1}))).await;
    }
    let asked = house.engine.asked.lock().expect("lock");
    assert_ne!(asked[0].params.seed, asked[1].params.seed);
}

#[tokio::test]
async fn sampling_and_limits_reach_the_engine() {
    let house = House::saying("Hello");
    let body = hello(json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1,
        "max_completion_tokens": 9, "max_tokens": 3, "stop": "END", "cache_prompt": false,
        "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"5": 2}, "user": "me", "store": true,
    }));
    assert_eq!(house.post(PATH, &body).await.status, 200);
    let request = house.engine.last();
    let params = &request.params;
    assert_eq!((params.temperature, params.top_p, params.top_k, params.min_p), (0.5, 0.9, 0, 0.1));
    assert_eq!(params.repetition_penalty, 1.1);
    let nudges = Nudges { presence: 0.5, frequency: -1.0, bias: vec![(5, 2.0)] };
    assert_eq!(request.nudges, nudges);
    assert_eq!((request.limits.max_tokens, request.limits.stop_strings.as_slice()), (9, &["END".into()][..]));
    assert!(!request.reuse);
}

#[tokio::test]
async fn a_limit_beyond_the_context_is_what_the_context_holds() {
    let house = House::saying("Hello");
    assert_eq!(house.post(PATH, &hello(json!({"max_tokens": 32_000}))).await.status, 200);
    let request = house.engine.last();
    assert_eq!(request.limits.max_tokens, super::engine::CONTEXT - request.prompt.len());
}

#[tokio::test]
async fn an_answer_that_is_cut_says_so() {
    let got = House::saying("one two three four").post(PATH, &hello(json!({"max_tokens": 2}))).await;
    let choice = &got.json()["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(got.json()["usage"]["completion_tokens"], 2);
}

#[tokio::test]
async fn a_stop_string_is_not_part_of_the_answer() {
    let body = hello(json!({"stop": ["xx", ", y"]}));
    let choice = &House::saying("Hello, you.").post(PATH, &body).await.json()["choices"][0];
    assert_eq!(choice["message"]["content"], "Hello");
    assert_eq!(choice["finish_reason"], "stop");
}

#[tokio::test]
async fn tokens_come_with_their_probabilities() {
    let body = hello(json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 2}));
    let got = House::saying("你").post(PATH, &body).await;
    let content = &got.json()["choices"][0]["logprobs"]["content"];
    insta::assert_snapshot!(serde_json::to_string_pretty(content).expect("JSON"));
    let body = hello(json!({"logprobs": true, "stream": true}));
    let events = House::saying("你好").post(PATH, &body).await.events();
    let told: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .collect();
    let tokens = super::engine::tokenizer().encode("你好", false).expect("encodes");
    assert_eq!(told.len(), tokens.len(), "every token once, whenever its text comes");
    assert!(told.iter().all(|token| token["top_logprobs"] == json!([])));
}

#[tokio::test]
async fn turns_of_all_kinds_reach_the_template() {
    let house = House::saying("Hello");
    let body = json!({"messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ], "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}},
                 {"type": "web_search", "x": 1}]});
    assert_eq!(house.post(PATH, &body).await.status, 200);
    let prompt = house.engine.prompt();
    let tools = "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {}}}]\n";
    assert_eq!(prompt, format!("{tools}<system>Be brief.\n<user>a\nb\n<assistant>\n<tool>7\n<assistant>"));
    // Tools that may not be called are not shown.
    let mut body = body;
    body["tool_choice"] = "none".into();
    house.post(PATH, &body).await;
    assert!(house.engine.prompt().starts_with("<system>"));
}

#[tokio::test]
async fn what_nobody_does_is_refused_by_its_name() {
    let house = House::saying("Hello");
    let picture = json!({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:"}}]}]});
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    for (body, param, part) in [
        (hello(json!({"logit_bias": {"5": 101}})), "logit_bias", "-100 to 100"),
        (hello(json!({"logit_bias": {"five": 1}})), "logit_bias", "token ids"),
        (hello(json!({"logit_bias": {"99999999": 1}})), "logit_bias", "token ids up to"),
        (hello(json!({"logit_bias": [1]})), "logit_bias", "object"),
        (hello(json!({"presence_penalty": 2.5})), "presence_penalty", "-2 to 2"),
        (hello(json!({"frequency_penalty": "much"})), "frequency_penalty", "number"),
        (hello(json!({"min_tokens": 3})), "min_tokens", "not supported"),
        (picture, "messages[0].content[0].type", "this model reads text only"),
        (hello(json!({"temperature": "hot"})), "temperature", "need a number, have the text \"hot\""),
        (hello(json!({"stop": vec!["a"; 17]})), "stop", "at most 16 texts"),
        (hello(json!({"n": 9})), "n", "from 1 to 8"),
        (hello(json!({"n": 0})), "n", "from 1 to 8"),
        (hello(json!({"max_tokens": 0})), "max_tokens", "at least 1"),
        (hello(json!({"top_logprobs": 21})), "top_logprobs", "from 0 to 20"),
        (hello(json!({"top_logprobs": 2})), "top_logprobs", "logprobs to be true"),
        (hello(json!({"stream": "yes"})), "stream", "true or false"),
        (json!({"messages": []}), "messages", "at least one message"),
        (json!({"messages": "hi"}), "messages", "need a list"),
        (
            json!({"messages": [{"role": "robot", "content": ""}]}),
            "messages[0].role",
            "have the text \"robot\"",
        ),
        (json!({"messages": [{"role": "user", "content": 7}]}), "messages[0].content", "a text or a list"),
        (json!({"messages": [7]}), "messages[0]", "need an object, have the number 7"),
        (
            hello(json!({"tools": tool, "tool_choice": {"type": "function", "function": {"name": "g"}}})),
            "tool_choice",
            "one of the tools",
        ),
        (hello(json!({"tool_choice": "required"})), "tool_choice", "tools to choose from"),
        (hello(json!({"response_format": {"type": "xml"}})), "response_format.type", "json_schema"),
    ] {
        let got = house.post(PATH, &body).await;
        let error = &got.json()["error"];
        assert_eq!((got.status, &error["type"]), (400, &json!("invalid_request_error")), "{body}");
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().expect("a message").contains(part), "{error}");
    }
    // What has a meaning only to the sampler is named by it.
    let (status, message) = house.post(PATH, &hello(json!({"top_p": 1.5}))).await.error();
    assert_eq!(status, 400);
    assert!(message.contains("top_p has no meaning") && message.contains("have: 1.5"), "{message}");
    let (_, message) = house.post(PATH, &hello(json!({"stop": [""]}))).await.error();
    assert!(message.contains("stop strings"), "{message}");
    assert!(house.engine.asked.lock().expect("lock").is_empty(), "nothing reached the engine");
}
