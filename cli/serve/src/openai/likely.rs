//! Tokens with their probabilities, in the shapes that OpenAI has for them.
use q4_model::batch::Weighed;
use q4_model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// The smallest number that is told: JSON has no infinity.
const LEAST: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    if logprob.is_nan() { LEAST } else { logprob.max(LEAST) }
}

/// The bytes of a token as they come out of a text.
pub fn bytes(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    tokenizer
        .bytes_of(id)
        .map_or_else(|| tokenizer.decode(&[id], false).unwrap_or_default().into_bytes(), <[u8]>::to_vec)
}

/// A token as a text. Half a character is told by its bytes, or different tokens would look the same.
fn text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let bytes: String = bytes.iter().map(|b| format!("\\x{b:02x}")).collect();
            format!("bytes:{bytes}")
        }
    }
}

/// The shape of chat.
pub fn chat(tokenizer: &Tokenizer, tokens: &[Weighed]) -> Value {
    json!({"content": entries(tokenizer, tokens), "refusal": null})
}

/// Tokens, each with the likely ones at its place, as chat and responses have them.
pub fn entries(tokenizer: &Tokenizer, tokens: &[Weighed]) -> Vec<Value> {
    let entry = |id: u32, logprob: f32| {
        let bytes = bytes(tokenizer, id);
        json!({"token": text(&bytes), "logprob": finite(logprob), "bytes": bytes})
    };
    tokens
        .iter()
        .map(|token| {
            let mut whole = entry(token.id, token.logprob.unwrap_or(LEAST));
            let top: Vec<Value> = token.top.iter().map(|likely| entry(likely.id, likely.logprob)).collect();
            whole["top_logprobs"] = top.into();
            whole
        })
        .collect()
}

/// The shape of completions: lists side by side, with the places of the tokens in the text.
#[derive(Debug, Default)]
pub struct Lists {
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<Value>,
    offset: usize,
}

impl Lists {
    /// Adds tokens. One that nothing precedes has no probability. Offsets count characters.
    pub fn add(&mut self, tokenizer: &Tokenizer, tokens: &[Weighed]) {
        for token in tokens {
            let bytes_of = bytes(tokenizer, token.id);
            let own = text(&bytes_of);
            self.offsets.push(self.offset.into());
            // Characters that begin in it: half a character is written longer than it is.
            self.offset += bytes_of.iter().filter(|byte| **byte & 0xc0 != 0x80).count();
            let Some(logprob) = token.logprob else {
                self.tokens.push(own.into());
                self.logprobs.push(Value::Null);
                self.top.push(Value::Null);
                continue;
            };
            let mut top = Map::new();
            for likely in &token.top {
                // Of two tokens that look the same the likelier one counts.
                let text = text(&bytes(tokenizer, likely.id));
                top.entry(text).or_insert_with(|| finite(likely.logprob).into());
            }
            // The token itself is among them in any case.
            top.entry(own.as_str()).or_insert_with(|| finite(logprob).into());
            self.tokens.push(own.into());
            self.logprobs.push(finite(logprob).into());
            self.top.push(top.into());
        }
    }

    /// What came together since the last time; the places go on.
    pub fn take(&mut self) -> Value {
        json!({
            "tokens": std::mem::take(&mut self.tokens),
            "token_logprobs": std::mem::take(&mut self.logprobs),
            "top_logprobs": std::mem::take(&mut self.top),
            "text_offset": std::mem::take(&mut self.offsets),
        })
    }

    /// Whether nothing has come together.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}
