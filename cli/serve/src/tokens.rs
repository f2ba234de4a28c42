//! `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, with the fields of vLLM and llama-server.
use crate::asked::Asked;
use crate::dialect::json_of;
use crate::fields::Fields;
use crate::openai::chat;
use crate::prepare::rendered;
use crate::refusal::{Refusal, shown};
use crate::server::Server;
use crate::trail::Trail;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// Bytes of a token in a document: a number, and as JSON.
const NUMBER: usize = 128;
/// The same with its text or its bytes.
const DESCRIBED: usize = 1 << 10;
/// Times that a text is there while it is told: as tokens, as a text under two names, and as JSON.
const TEXTS: usize = 8;

/// Tokens of a text (`prompt` or `content`) or of a conversation (`messages`).
///
/// # Errors
/// 400 for anything else.
pub async fn encode(server: Arc<Server>, _: Arc<Trail>, asked: Asked) -> Result<Response, Refusal> {
    let Asked { body, mut held, work } = asked;
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
            let each = if with_pieces || with_texts { DESCRIBED } else { NUMBER };
            held.keep((each * ids.len()) as u64)?;
            drop(work);
            let texts = || ids.iter().map(|id| tokenizer.token_of(*id)).collect::<Vec<_>>();
            let tokens = match with_pieces {
                true => ids.iter().map(|id| piece(server, *id)).collect(),
                false => json!(ids),
            };
            let texts = with_texts.then(texts);
            let document =
                json!({"count": ids.len(), "max_model_len": max, "tokens": tokens, "token_strs": texts});
            Ok((document, held))
        })
        .await?;
    let (document, _held) = document;
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
pub async fn decode(server: Arc<Server>, _: Arc<Trail>, asked: Asked) -> Result<Response, Refusal> {
    let Asked { body, mut held, work } = asked;
    let f = Fields::of("", &body)?;
    let list = f.list("tokens")?.ok_or_else(|| f.wrong("tokens", "a list of token ids"))?;
    let read = |(path, value): &(String, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| Refusal::field(path, "a token id", shown(value)))
    };
    let ids = list.iter().map(read).collect::<Result<Vec<u32>, _>>()?;
    drop(list);
    drop(body);
    let (text, _held) = server
        .aside(move |server| {
            let tokenizer = &server.served.tokenizer;
            let mut bytes = 0;
            for (at, id) in ids.iter().enumerate() {
                let token = tokenizer.token_of(*id).ok_or_else(|| {
                    Refusal::field(&format!("tokens[{at}]"), "the id of a token of this model", id)
                })?;
                bytes += token.len();
            }
            held.keep((TEXTS * bytes) as u64)?;
            drop(work);
            Ok((tokenizer.decode(&ids, false)?, held))
        })
        .await?;
    Ok(json_of(&json!({"prompt": text, "content": text})))
}

/// What a client needs that renders conversations itself and tells texts from their ends.
pub async fn info(State(server): State<Arc<Server>>) -> Response {
    let served = &server.served;
    let named = |name: &str| served.variables.get(name).cloned().unwrap_or_default();
    let end = served.stop_ids.first().and_then(|id| served.tokenizer.token_of(*id));
    let eos = Some(named("eos_token")).filter(Value::is_string).unwrap_or_else(|| end.into());
    json_of(&json!({
        // What reads a tokenizer.json in transformers.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": served.template.source(),
        "bos_token": named("bos_token"),
        "eos_token": eos,
        "pad_token": named("pad_token"),
        "unk_token": named("unk_token"),
        "model_max_length": served.context,
        "vocab_size": served.tokenizer.vocab_size(),
    }))
}
