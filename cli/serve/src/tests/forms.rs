//! Answers that must have a form: what every dialect makes of its fields, and what it refuses.
use super::{Got, House};
use q4_model::batch::Request;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Whether the form of a request admits a text, as a whole.
fn admits(house: &House, request: &Request, text: &str) -> bool {
    let served = &house.engine.served;
    let mut matcher = request.limits.form.as_ref().expect("a form").matcher();
    let rows = served.tokenizer.highest_id() as usize + 1;
    let mut logits = vec![0.0; rows];
    let ids = served.tokenizer.encode(text, false).expect("encodes");
    for (i, id) in ids.iter().enumerate() {
        logits.fill(0.0);
        let goes_on = matcher.mask(&mut logits, &served.stop_ids).expect("goes on");
        if !goes_on || logits[*id as usize] != 0.0 {
            return false;
        }
        // What cannot go on is complete.
        if !matcher.accept(*id).expect("admitted") {
            return i + 1 == ids.len();
        }
    }
    logits.fill(0.0);
    !matcher.mask(&mut logits, &served.stop_ids).expect("goes on")
        || logits[served.stop_ids[0] as usize] == 0.0
}

fn hello(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// The message of any dialect.
fn message(got: &Got) -> String {
    got.json()["error"]["message"].as_str().expect("a message").to_owned()
}

fn city() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
           "additionalProperties": false})
}

#[tokio::test]
async fn every_dialect_has_its_words_for_a_form() {
    let house = House::saying("Hello");
    let (oslo, other) = (r#"{"city": "Oslo"}"#, r#"{"town": "Oslo"}"#);
    let any = |body: &str| body.to_owned();
    let called = |name: &str, arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let chat = json!([
        {"type": "function", "function": {"name": "f", "parameters": city()}},
        {"type": "function", "function": {"name": "g"}}]);
    let claude = json!([{"name": "f", "input_schema": city()}, {"name": "g", "input_schema": {}}]);
    let responses = json!([{"type": "function", "name": "f", "parameters": city()}]);
    let named = |strict| json!({"name": "x", "schema": city(), "strict": strict});
    let schema = |strict| json!({"type": "json_schema", "json_schema": named(strict)});
    let named = json!({"type": "function", "function": {"name": "f"}});
    for (path, body, good, bad) in [
        (CHAT, hello(json!({"response_format": {"type": "json_object"}})), any(other), any("[1]")),
        (CHAT, hello(json!({"response_format": schema(true)})), any(oslo), any(other)),
        (CHAT, hello(json!({"response_format": schema(false)})), any(oslo), any(other)),
        (CHAT, hello(json!({"structured_outputs": {"json": city()}})), any(oslo), any(other)),
        (CHAT, hello(json!({"structured_outputs": {"regex": "a{2,3}"}})), any("aaa"), any("a")),
        (CHAT, hello(json!({"structured_outputs": {"choice": ["yes", "no"]}})), any("no"), any("nope")),
        (CHAT, hello(json!({"structured_outputs": {"grammar": "start: \"x\"+"}})), any("xx"), any("xy")),
        (CHAT, hello(json!({"structured_outputs": {"json_object": true}})), any("{}"), any("7")),
        (CHAT, hello(json!({"guided_json": city().to_string()})), any(oslo), any(other)),
        (CHAT, hello(json!({"guided_regex": "^[ab]$"})), any("b"), any("ab")),
        (CHAT, hello(json!({"guided_choice": ["one"]})), any("one"), any("two")),
        (CHAT, hello(json!({"guided_grammar": "start: \"x\""})), any("x"), any("xx")),
        (
            "/v1/completions",
            json!({"prompt": "a", "structured_outputs": {"regex": "[0-9]"}}),
            any("7"),
            any("77"),
        ),
        (
            CHAT,
            hello(json!({"tools": chat, "tool_choice": "required"})),
            called("f", oslo),
            called("f", other),
        ),
        (CHAT, hello(json!({"tools": chat, "tool_choice": "required"})), called("g", "{}"), any("Hello")),
        (CHAT, hello(json!({"tools": chat, "tool_choice": named})), called("f", oslo), called("g", "{}")),
        (
            CHAT,
            hello(json!({"tools": chat, "tool_choice": "required"})),
            format!("{}\n{}", called("g", "{}"), called("g", "{}")),
            format!("{}{}", called("g", "{}"), called("g", "{}")),
        ),
        (
            CHAT,
            hello(json!({"tools": chat, "tool_choice": "required", "parallel_tool_calls": false})),
            called("g", "{}"),
            format!("{}\n{}", called("g", "{}"), called("g", "{}")),
        ),
        (
            "/v1/responses",
            json!({"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": city()}}}),
            any(oslo),
            any(other),
        ),
        (
            "/v1/responses",
            json!({"input": "a", "tools": responses, "tool_choice": {"type": "function", "name": "f"}}),
            called("f", oslo),
            called("f", other),
        ),
        (
            "/v1/messages",
            hello(json!({"tools": claude, "tool_choice": {"type": "any"}})),
            called("g", "{}"),
            any("Hello"),
        ),
        (
            "/v1/messages",
            hello(json!({"tools": claude, "tool_choice": {"type": "tool", "name": "f"}})),
            called("f", oslo),
            called("g", "{}"),
        ),
        (
            "/v1/messages",
            hello(json!({"output_config": {"format": {"type": "json_schema", "schema": city()}}})),
            any(oslo),
            any(other),
        ),
    ] {
        let got = house.post(path, &body).await;
        assert_eq!(got.status, 200, "{body}: {}", got.body);
        let request = house.engine.last();
        assert!(admits(&house, &request, &good), "{body}: {good}");
        assert!(!admits(&house, &request, &bad), "{body}: {bad}");
    }
    for more in [json!({"response_format": {"type": "text"}}), json!({"tools": chat, "tool_choice": "auto"})]
    {
        assert_eq!(house.post(CHAT, &hello(more)).await.status, 200);
        assert!(house.engine.last().limits.form.is_none());
    }
}

#[tokio::test]
async fn what_has_a_form_is_told_as_it_is() {
    // Tools are offered, and the text looks like a call of one.
    let text = "{\"a\": \"<tool_call>\\n{\\\"name\\\": \\\"f\\\", \\\"arguments\\\": {}}\\n</tool_call>\"}";
    let house = House::saying(text);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let body = hello(json!({"tools": tools, "response_format": {"type": "json_object"}}));
    let choice = &house.post(CHAT, &body).await.json()["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(text), &json!("stop")));
}

#[tokio::test]
async fn thoughts_come_before_the_form() {
    let house = House::saying("Hello");
    let form = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": city()}});
    let body = json!({"response_format": form, "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(house.post(CHAT, &hello(body)).await.status, 200);
    let request = house.engine.last();
    assert!(admits(&house, &request, "A city?\n</think>\n\n{\"city\": \"Oslo\"}"));
    assert!(!admits(&house, &request, "{\"city\": \"Oslo\"}"));
}

#[tokio::test]
async fn what_cannot_be_kept_to_is_refused_before_it_waits() {
    let house = House::saying("Hello");
    let deep = (0..100).fold(json!({}), |inner, _| json!({"items": inner}));
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters":
        {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}}}]);
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    let at = "response_format.json_schema.schema";
    for (more, param, part) in [
        (schema(json!({"type": "array", "uniqueItems": true})), at, "uniqueItems"),
        (schema(json!({"type": "string", "format": "colour"})), at, "colour"),
        (schema(json!({"type": "integer", "multipleOf": 999_999_937})), at, "a JSON schema"),
        (schema(json!({"$ref": "#/nowhere"})), at, "nowhere"),
        (schema(deep), at, "levels"),
        (schema(json!("text")), at, "object"),
        (json!({"response_format": {"type": "json_schema", "json_schema": {}}}), at, "a JSON schema"),
        (json!({"guided_regex": "("}), "guided_regex", "a pattern"),
        (json!({"guided_json": "{"}), "guided_json", "a JSON schema"),
        (json!({"structured_outputs": {"grammar": "root ::= \"a\""}}), "structured_outputs.grammar", "GBNF"),
        (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice", "1 to 1024"),
        (
            json!({"structured_outputs": {"structural_tag": "x"}}),
            "structured_outputs.structural_tag",
            "not supported",
        ),
        (json!({"tools": tools, "tool_choice": "required"}), "tool_choice", "contains"),
        // Two forms of one answer.
        (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice", "one of them"),
        (
            json!({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
            "structured_outputs.regex",
            "one of them",
        ),
        (
            json!({"tools": tools, "tool_choice": "required", "response_format": {"type": "json_object"}}),
            "tool_choice",
            "one of them",
        ),
    ] {
        let got = house.post(CHAT, &hello(more.clone())).await;
        assert_eq!(got.status, 400, "{more}: {}", got.body);
        assert_eq!(got.json()["error"]["param"], param, "{more}: {}", got.body);
        assert!(message(&got).contains(part), "{more}: {}", message(&got));
    }
    let claude = json!({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}}});
    let got = house.post("/v1/messages", &hello(claude)).await;
    assert!(got.status == 400 && message(&got).contains("one of them"), "{}", got.body);
    assert!(house.engine.asked.lock().expect("lock").is_empty(), "nothing reached the engine");
}
