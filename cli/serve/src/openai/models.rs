//! `GET /v1/models`.
use crate::refusal::{Kind, Refusal};
use crate::served::Served;
use serde_json::{Value, json};

/// The list of the one model. Some clients read `data`, others `models`; those of Anthropic look for the
/// ends of a page.
pub fn list(served: &Served) -> Value {
    let other = json!({
        "name": served.name,
        "model": served.name,
        "type": "model",
        "capabilities": ["completion"],
    });
    json!({
        "object": "list",
        "data": [entry(served)],
        "models": [other],
        "first_id": served.name,
        "last_id": served.name,
        "has_more": false,
    })
}

/// One model.
///
/// # Errors
/// 404 for any other name.
pub fn one(served: &Served, name: &str) -> Result<Value, Refusal> {
    if name == served.name {
        return Ok(entry(served));
    }
    let message = format!("no model {name:?}; {:?} is served", served.name);
    Err(Refusal { param: Some("model".to_owned()), ..Refusal::new(Kind::Missing, message) }
        .coded("model_not_found"))
}

fn entry(served: &Served) -> Value {
    json!({
        "id": served.name,
        "object": "model",
        "type": "model",
        "display_name": served.name,
        "created": served.created,
        "owned_by": "q4",
        "root": served.name,
        "parent": null,
        "max_model_len": served.context,
    })
}
