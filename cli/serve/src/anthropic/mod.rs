//! The API of Anthropic: `POST /v1/messages` and `POST /v1/messages/count_tokens`. Every name of a model is
//! welcome.
mod events;
mod input;

use crate::answer::{End, Finish, Usage};
use crate::asked::Asked;
use crate::dialect::json_of;
use crate::fields::Fields;
use crate::prepare::rendered;
use crate::refusal::Refusal;
use crate::server::Server;
use crate::stream::respond;
use crate::trail::Trail;
use crate::whole::Block;
use crate::words::name;
use axum::response::Response;
use events::Events;
use serde_json::{Value, json};
use std::sync::Arc;

/// Answers a request.
///
/// # Errors
/// Why it is not answered.
pub async fn post(server: Arc<Server>, trail: Arc<Trail>, asked: Asked) -> Result<Response, Refusal> {
    let Asked { body, held, work } = asked;
    let f = Fields::of("", &body)?;
    let ask = input::read(&f)?;
    let stream = f.flag("stream")?.unwrap_or(false);
    drop(body);
    let answers = server.ask(ask, &trail, held, work).await?;
    if stream {
        let prompt = answers.prompts().first().map_or(0, |given| given.ids.len());
        return Ok(respond(answers, Events::new(server.served.name.clone(), prompt)));
    }
    let mut document = message(&name("msg_"), &server.served.name, Usage::default());
    for whole in answers.all().await? {
        document["content"] = whole.blocks.iter().map(block).collect();
        document["usage"] = usage(whole.usage());
        if let Some(end) = &whole.end {
            (document["stop_reason"], document["stop_sequence"]) = stop(end);
        }
    }
    Ok(json_of(&document))
}

/// Counts the tokens of a conversation.
///
/// # Errors
/// Why they cannot be counted.
pub async fn count(server: Arc<Server>, _: Arc<Trail>, asked: Asked) -> Result<Response, Refusal> {
    let talk = input::talk(&Fields::of("", &asked.body)?)?;
    let count = server
        .aside(move |server| {
            let text = rendered(&server.served, &talk)?;
            Ok(server.served.tokenizer.encode(&text, false)?.len())
        })
        .await?;
    Ok(json_of(&json!({"input_tokens": count})))
}

fn message(id: &str, model: &str, so_far: Usage) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage(so_far),
    })
}

/// Tokens from the cache are counted apart from the others.
fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt.saturating_sub(usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.answer,
    })
}

fn block(block: &Block) -> Value {
    match block {
        Block::Text(text) => json!({"type": "text", "text": text}),
        Block::Thought(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Block::Call { id, name, arguments, .. } => {
            // What is no JSON is shown as it is: whoever called can be told.
            let input = serde_json::from_str(arguments).unwrap_or_else(|_| json!({"arguments": arguments}));
            json!({"type": "tool_use", "id": format!("toolu_{id}"), "name": name, "input": input})
        }
    }
}

/// `stop_reason` and `stop_sequence`.
fn stop(end: &End) -> (Value, Value) {
    match &end.finish {
        Finish::Stop => ("end_turn".into(), Value::Null),
        Finish::StopString(which) => ("stop_sequence".into(), which.clone().into()),
        Finish::Length => ("max_tokens".into(), Value::Null),
        Finish::Calls => ("tool_use".into(), Value::Null),
    }
}
