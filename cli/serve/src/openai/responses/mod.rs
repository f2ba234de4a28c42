//! `POST /v1/responses`: items in, items out.
mod events;
mod input;
mod told;

use crate::answer::{End, Finish, Usage};
use crate::asked::Asked;
use crate::dialect::json_of;
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::server::Server;
use crate::stream::{Render, respond};
use crate::trail::Trail;
use crate::words::{name, now};
use axum::response::Response;
use events::Events;
use q4_model::sampling::SamplingParams;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use told::Told;

/// Answers a request.
///
/// # Errors
/// Why it is not answered.
pub async fn post(server: Arc<Server>, trail: Arc<Trail>, asked: Asked) -> Result<Response, Refusal> {
    let Asked { body, held, work } = asked;
    let (ask, stream) = input::read(&body)?;
    let params = ask.wishes.over(&server.served.generation, 0)?;
    let envelope = Envelope::new(&server.served.name, &body, &params)?;
    drop(body);
    let told = ask.logprobs.is_some().then(|| Told::new(server.served.clone()));
    let mut answers = server.ask(ask, &trail, held, work).await?;
    let mut events = Events::new(envelope, told);
    if stream {
        return Ok(respond(answers, events));
    }
    let mut unsent = VecDeque::new();
    while let Some(next) = answers.next().await {
        let (choice, happened) = next?;
        events.happened(choice, happened, &mut unsent);
        unsent.clear();
    }
    Ok(json_of(&events.whole()))
}

/// What a response repeats of its request.
struct Envelope {
    id: String,
    created: u64,
    model: String,
    echoed: Map<String, Value>,
}

/// Fields that a response repeats, with what stands there if nobody said anything.
const ECHOED: [(&str, &str); 13] = [
    ("instructions", "null"),
    ("max_output_tokens", "null"),
    ("max_tool_calls", "null"),
    ("metadata", "{}"),
    ("parallel_tool_calls", "true"),
    ("reasoning", r#"{"effort": null, "summary": null}"#),
    ("safety_identifier", "null"),
    ("prompt_cache_key", "null"),
    ("text", r#"{"format": {"type": "text"}}"#),
    ("tool_choice", r#""auto""#),
    ("tools", "[]"),
    ("top_logprobs", "0"),
    ("user", "null"),
];

impl Envelope {
    fn new(model: &str, body: &Value, params: &SamplingParams) -> Result<Self, Refusal> {
        let f = Fields::of("", body)?;
        let mut echoed = Map::new();
        for (name, default) in ECHOED {
            let mut value = serde_json::from_str(default).unwrap_or(Value::Null);
            match (&mut value, f.get(name)) {
                (Value::Object(fields), Some(Value::Object(given))) => fields.extend(given.clone()),
                (value, Some(given)) => *value = given.clone(),
                (_, None) => {}
            }
            echoed.insert(name.to_owned(), value);
        }
        echoed.insert("temperature".to_owned(), decimal(params.temperature));
        echoed.insert("top_p".to_owned(), decimal(params.top_p));
        Ok(Self { id: name("resp_"), created: now(), model: model.to_owned(), echoed })
    }

    /// The response as it is now.
    fn document(
        &self,
        status: &str,
        output: Vec<Value>,
        end: Option<&End>,
        error: Option<&Refusal>,
    ) -> Value {
        let is_cut = status == "incomplete";
        let code = error.map(|e| e.code.clone().unwrap_or_else(|| "server_error".to_owned()));
        let mut document = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": (status == "completed").then(now),
            "status": status,
            "background": false,
            "error": error.map(|e| json!({"code": code, "message": e.message})),
            "incomplete_details": is_cut.then(|| json!({"reason": "max_output_tokens"})),
            "model": self.model,
            "output": output,
            "previous_response_id": null,
            "service_tier": "default",
            "store": false,
            "truncation": "disabled",
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "usage": end.map(|end| usage(end.usage)),
        });
        if let Value::Object(fields) = &mut document {
            fields.extend(self.echoed.clone());
        }
        document
    }
}

/// A number with the digits that it was given with.
fn decimal(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn status(end: &End) -> &'static str {
    if end.finish == Finish::Length { "incomplete" } else { "completed" }
}

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.answer,
    })
}

fn message(id: &str, status: &str, part: Option<Value>) -> Value {
    let content: Vec<Value> = part.into_iter().collect();
    json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
}

fn text_part(text: &str, logprobs: &[Value]) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

fn thought(id: &str, status: &str, text: Option<&str>) -> Value {
    let content: Vec<Value> = text.map(thought_part).into_iter().collect();
    json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
}

fn thought_part(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

fn call(item: &str, id: &str, tool: &str, arguments: &str, status: &str) -> Value {
    let call = format!("call_{id}");
    json!({
        "id": item,
        "type": "function_call",
        "status": status,
        "call_id": call,
        "name": tool,
        "arguments": arguments,
    })
}
