//! Answers with calls of tools, as the dialects render them.
use super::House;
use crate::answer::{End, Finish, Happened, Part, Usage};
use crate::stream::{Frame, Render};
use crate::whole::{Block, Whole};
use serde_json::{Value, json};
use std::collections::VecDeque;

fn end() -> End {
    let usage = Usage { prompt: 9, cached: 4, answer: 8, thought: 2 };
    End { finish: Finish::Calls, usage }
}

fn call(index: usize) -> Part {
    Part::Call { index, id: format!("{index:024x}"), name: "clock".to_owned() }
}

/// An answer that thinks, speaks and calls two tools.
pub fn happenings() -> Vec<Happened> {
    let more = |delta: &str| Part::Arguments { index: 0, delta: delta.to_owned() };
    let step = |parts: Vec<Part>| Happened::Step { parts, token: None };
    vec![
        Happened::Started { prompt: Vec::new(), usage: Usage { prompt: 9, cached: 4, ..Usage::default() } },
        step(vec![Part::Thought("hm".to_owned())]),
        step(vec![Part::Thought("m".to_owned()), Part::Text("Wait".to_owned())]),
        step(vec![]),
        step(vec![call(0)]),
        step(vec![more("{\"zone\":")]),
        step(vec![more(" 1}"), Part::Called { index: 0 }]),
        Happened::Ended {
            parts: vec![
                call(1),
                Part::Arguments { index: 1, delta: "{}".to_owned() },
                Part::Called { index: 1 },
            ],
            end: end(),
        },
    ]
}

/// The same as a whole.
pub fn whole() -> Whole {
    let call = |index: usize, arguments: &str| Block::Call {
        id: format!("{index:024x}"),
        name: "clock".to_owned(),
        arguments: arguments.to_owned(),
        is_complete: true,
    };
    Whole {
        blocks: vec![
            Block::Thought("hmm".to_owned()),
            Block::Text("Wait".to_owned()),
            call(0, "{\"zone\": 1}"),
            call(1, "{}"),
        ],
        end: Some(end()),
        ..Whole::default()
    }
}

/// All events of that answer as they go over the wire.
pub fn rendered(render: impl Render) -> String {
    rendered_of(render, happenings())
}

/// All events of an answer.
pub fn rendered_of(mut render: impl Render, happenings: Vec<Happened>) -> String {
    let mut frames: VecDeque<Frame> = VecDeque::new();
    render.begin(&mut frames);
    for what in happenings {
        render.happened(0, what, &mut frames);
    }
    render.end(&mut frames);
    let lines = frames.iter().map(|frame| {
        let event = frame.event.map_or_else(String::new, |event| format!("event: {event}\n"));
        format!("{event}data: {}\n", frame.data)
    });
    super::stable(&lines.collect::<Vec<_>>().join("\n"))
}

#[test]
fn pieces_come_together_to_the_whole() {
    let mut built = Whole::default();
    happenings().into_iter().for_each(|what| built.take(what));
    assert_eq!((built.blocks, built.end), (whole().blocks, whole().end));
}

/// What a model writes to call a tool.
const CALL: &str = "Wait.\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"zone\": 1}}\n</tool_call>";

fn chat(more: Value) -> Value {
    let tools =
        json!([{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]);
    let mut body = json!({"messages": [{"role": "user", "content": "time?"}], "tools": tools});
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}

#[tokio::test]
async fn a_call_is_taken_out_of_the_text_in_every_dialect() {
    let house = House::saying(CALL);
    let got = house.post("/v1/chat/completions", &chat(json!({}))).await.json();
    let choice = &got["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Wait.\n");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"zone\": 1}");
    let events = house.post("/v1/chat/completions", &chat(json!({"stream": true}))).await.events();
    let deltas =
        events.iter().map(|event| &event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]);
    let arguments: String = deltas.filter_map(Value::as_str).collect();
    assert_eq!(arguments, "{\"zone\": 1}");
    let tools = json!([{"name": "clock", "input_schema": {"type": "object"}}]);
    let body = json!({"max_tokens": 90, "messages": [{"role": "user", "content": "time?"}], "tools": tools});
    let got = house.post("/v1/messages", &body).await.json();
    assert_eq!((&got["stop_reason"], &got["content"][1]["input"]), (&json!("tool_use"), &json!({"zone": 1})));
    let tools = json!([{"type": "function", "name": "clock", "parameters": {"type": "object"}}]);
    let got = house.post("/v1/responses", &json!({"input": "time?", "tools": tools})).await.json();
    let call = &got["output"][1];
    assert_eq!((&call["type"], &call["arguments"]), (&json!("function_call"), &json!("{\"zone\": 1}")));
    assert!(call["call_id"].as_str().is_some_and(|id| id.starts_with("call_")));
}

#[tokio::test]
async fn without_tools_a_call_is_text() {
    let body = json!({"messages": [{"role": "user", "content": "time?"}]});
    let got = House::saying(CALL).post("/v1/chat/completions", &body).await.json();
    assert_eq!(got["choices"][0]["message"]["content"], CALL);
    assert_eq!(got["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn one_call_at_a_time_is_one_call() {
    let house = House::saying(&format!("{CALL}\n{CALL}"));
    for (parallel, calls) in [(true, 2), (false, 1)] {
        let body = chat(json!({"parallel_tool_calls": parallel}));
        let got = house.post("/v1/chat/completions", &body).await.json();
        assert_eq!(got["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len), Some(calls));
    }
}

#[tokio::test]
async fn a_call_that_is_cut_is_none() {
    let whole = House::saying(CALL);
    whole.post("/v1/chat/completions", &chat(json!({}))).await;
    let tokens = super::engine::tokenizer().encode(CALL, false).expect("encodes").len();
    for cut in 1..tokens {
        let got = whole.post("/v1/chat/completions", &chat(json!({"max_tokens": cut}))).await.json();
        let choice = &got["choices"][0];
        assert_eq!(choice["finish_reason"], "length", "{cut}");
        if let Some(calls) = choice["message"]["tool_calls"].as_array() {
            let arguments = calls[0]["function"]["arguments"].as_str().expect("a text");
            assert_eq!(arguments, "{\"zone\": 1}", "cut at {cut}");
        }
    }
}
