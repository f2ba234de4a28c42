//! Refuses tokenizers that would make the library panic, hang or grow without bound, before it sees them.
//!
//! Every rule answers a way to turn a small file into a large amount of work; honest tokenizers are far below.
use q4_core::{Code, Error, Result};
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;
use std::fmt;

/// Nesting of the JSON.
const DEPTH: usize = 64;
/// Vocabulary entries and merges together, and the bound on token ids.
const ENTRIES: usize = 1 << 20;
/// Added tokens.
const ADDED: usize = 1 << 16;
/// Factor by which normalizers or decoders may lengthen a text.
const GROWTH: usize = 32;
/// Bytes of a regular expression.
const PATTERN: usize = 16 << 10;

/// Whether the decoder is plain byte-level. Errors: [`Code::TokenizerInvalid`], naming what is out of bounds.
pub(super) fn audit(bytes: &[u8]) -> Result<bool> {
    check_depth(bytes)?;
    let file: File = serde_json::from_slice(bytes).map_err(|e| {
        refused("damaged or not a tokenizer").need("a JSON object with a model").have(e.to_string())
    })?;
    let entries = file.model.vocab.count + file.model.merges.count;
    bounded("vocabulary and merges", entries, ENTRIES)?;
    bounded("added_tokens", file.added_tokens.len(), ADDED)?;
    let ids = file.added_tokens.iter().map(|t| t.id).chain([file.model.vocab.highest]);
    bounded("highest token id", ids.max().unwrap_or(0).try_into().unwrap_or(usize::MAX), ENTRIES - 1)?;
    if file.model.vocab.count == 0 {
        return Err(refused("the vocabulary is empty").need("at least one token").have("none"));
    }
    if let Some(dropout) = file.model.dropout.filter(|p| *p != 0.0) {
        return Err(refused("model.dropout makes encoding random")
            .need("null or 0")
            .have(dropout.to_string()));
    }
    for (name, part) in [
        ("normalizer", &file.normalizer),
        ("pre_tokenizer", &file.pre_tokenizer),
        ("post_processor", &file.post_processor),
        ("decoder", &file.decoder),
    ] {
        check_part(name, part)?;
    }
    check_post_processor(&file.post_processor)?;
    check_truncation(&file.truncation)?;
    Ok(file.decoder.get("type").is_some_and(|t| t == "ByteLevel"))
}

/// Counts brackets outside of strings, so that no recursive parser sees deep nesting.
fn check_depth(bytes: &[u8]) -> Result<()> {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for byte in bytes {
        match (in_string, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => in_string = !in_string,
            (false, b'[' | b'{') => depth += 1,
            (false, b']' | b'}') => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEPTH {
            return bounded("nesting", depth, DEPTH);
        }
    }
    Ok(())
}

/// Number of components, length of patterns, growth of the text.
fn check_part(name: &str, part: &Value) -> Result<()> {
    let (mut components, mut growth) = (0usize, 1usize);
    let mut open = vec![part];
    while let Some(value) = open.pop() {
        match value {
            Value::Array(list) => open.extend(list),
            Value::Object(map) => {
                components += usize::from(map.contains_key("type"));
                let added =
                    ["content", "prepend"].map(|k| map.get(k).and_then(Value::as_str).map_or(0, str::len));
                growth = growth.saturating_mul(added[0].max(added[1]).max(1));
                for pattern in ["Regex", "String"].iter().filter_map(|k| map.get(*k)?.as_str()) {
                    bounded(&format!("{name}: bytes of a pattern"), pattern.len(), PATTERN)?;
                }
                if map.get("type").is_some_and(|t| t == "FixedLength") && map.get("length") == Some(&0.into())
                {
                    return Err(refused(&format!("{name}: FixedLength has length 0"))
                        .need("at least 1")
                        .have("0"));
                }
                open.extend(map.values());
            }
            _ => {}
        }
    }
    bounded(&format!("{name}: components"), components, 64)?;
    bounded(&format!("{name}: growth of a text"), growth, GROWTH)
}

/// A template that names the text more than once multiplies it.
fn check_post_processor(part: &Value) -> Result<()> {
    let mut open = vec![part];
    while let Some(value) = open.pop() {
        match value {
            Value::Array(list) => open.extend(list),
            Value::Object(map) => {
                let single = map.get("single").and_then(Value::as_array);
                let texts =
                    single.map_or(1, |s| s.iter().filter(|piece| piece.get("Sequence").is_some()).count());
                if texts != 1 {
                    return Err(refused("post_processor: the template must name the text once")
                        .need("one Sequence in single")
                        .have(texts.to_string()));
                }
                open.extend(map.values().filter(|v| v.is_array()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_truncation(truncation: &Value) -> Result<()> {
    let size = |name: &str| truncation.get(name).and_then(Value::as_u64);
    match (size("stride"), size("max_length")) {
        (Some(stride), Some(length)) if stride >= length => {
            Err(refused("truncation: the stride is not below max_length")
                .need(format!("a stride below {length}"))
                .have(stride.to_string()))
        }
        _ => Ok(()),
    }
}

fn bounded(what: &str, have: usize, most: usize) -> Result<()> {
    if have <= most {
        return Ok(());
    }
    Err(refused(&format!("{what} out of bounds")).need(format!("at most {most}")).have(have.to_string()))
}

fn refused(what: &str) -> Error {
    Error::new(Code::TokenizerInvalid, format!("tokenizer.json: {what}"))
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    truncation: Value,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u64,
}

#[derive(Deserialize)]
struct Model {
    vocab: Entries,
    #[serde(default)]
    merges: Entries,
    #[serde(default)]
    dropout: Option<f64>,
}

/// Counts a list or map without keeping it; `highest` is the largest number among a map's values.
#[derive(Default)]
struct Entries {
    count: usize,
    highest: u64,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Entries::default())
    }
}

impl<'de> Visitor<'de> for Entries {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list or a map of token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<Self, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {
            self.count += 1;
        }
        self.highest = self.count.saturating_sub(1) as u64;
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((_, id)) = map.next_entry::<IgnoredAny, u64>()? {
            self.count += 1;
            self.highest = self.highest.max(id);
        }
        Ok(self)
    }
}
