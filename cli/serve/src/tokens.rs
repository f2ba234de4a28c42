//! `POST /tokenize` and `POST /detokenize`, with the fields of vLLM and of llama-server.
use crate::dialect::json_of;
use crate::fields::Fields;
use crate::openai::chat;
use crate::prepare::rendered;
use crate::refusal::Refusal;
use crate::server::Server;
use crate::trail::Trail;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// Tokens of a text (`prompt` or `content`) or of a conversation (`messages`).
///
/// # Errors
/// 400 for anything else.
pub async fn encode(server: Arc<Server>, _: Arc<Trail>, body: Value) -> Result<Response, Refusal> {
    let f = Fields::of("", &body)?;
    let talk = match f.get("messages") {
        Some(_) => Some(chat::talk(&f)?),
        None => None,
    };
    let text = match f.text("content")?.map_or_else(|| f.text("prompt"), |text| Ok(Some(text)))? {
        Some(text) => text.to_owned(),
        None if talk.is_some() => String::new(),
        None => return Err(f.wrong("prompt", "a text; or messages")),
    };
    // vLLM adds special tokens unless told otherwise, llama-server the other way round.
    let is_llama = f.get("content").is_some();
    let special = match f.flag("add_special_tokens")?.or(f.flag("add_special")?) {
        Some(special) => special,
        None => !is_llama && talk.is_none(),
    };
    let with_texts = f.flag("return_token_strs")?.unwrap_or(false);
    let with_pieces = f.flag("with_pieces")?.unwrap_or(false);
    let max = server.served.context;
    let document = server
        .aside(move |server| {
            let tokenizer = &server.served.tokenizer;
            let text = match talk {
                Some(talk) => rendered(&server.served, &talk)?,
                None => text,
            };
            let ids = tokenizer.encode(&text, special)?;
            let texts = || ids.iter().map(|id| tokenizer.token_of(*id)).collect::<Vec<_>>();
            let tokens = match with_pieces {
                true => ids.iter().map(|id| piece(server, *id)).collect(),
                false => json!(ids),
            };
            let texts = with_texts.then(texts);
            Ok(json!({"count": ids.len(), "max_model_len": max, "tokens": tokens, "token_strs": texts}))
        })
        .await?;
    Ok(json_of(&document))
}

/// A token with its text, or its bytes where they are none.
fn piece(server: &Server, id: u32) -> Value {
    let tokenizer = &server.served.tokenizer;
    match tokenizer.bytes_of(id).map(std::str::from_utf8) {
        Some(Ok(text)) => json!({"id": id, "piece": text}),
        Some(Err(_)) => json!({"id": id, "piece": tokenizer.bytes_of(id)}),
        None => json!({"id": id, "piece": tokenizer.decode(&[id], false).unwrap_or_default()}),
    }
}

/// Text of `tokens`.
///
/// # Errors
/// 400 for what is no list of token ids.
pub async fn decode(server: Arc<Server>, _: Arc<Trail>, body: Value) -> Result<Response, Refusal> {
    let f = Fields::of("", &body)?;
    let need = "a list of token ids";
    let list = f.list("tokens")?.ok_or_else(|| f.wrong("tokens", need))?;
    let ids = list
        .iter()
        .map(|(path, id)| {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| Refusal::field(path, "a token id", "something else"))
        })
        .collect::<Result<Vec<u32>, _>>()?;
    let text = server.aside(move |server| Ok(server.served.tokenizer.decode(&ids, false)?)).await?;
    Ok(json_of(&json!({"prompt": text, "content": text})))
}
