//! `tokenizer.json` of the model in a file: a byte-level BPE, put together again from its tokens and merges.
use crate::{Gguf, Value as Entry, cursor::brief};
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value, json};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// Tokens and merges together, which is also what a `tokenizer.json` may have in q4.
const ENTRIES: usize = 1 << 20;

/// How Qwen2 and later cut a text before the merges: contractions, letters with one sign before them, single
/// digits, signs, line ends, spaces.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Values of `tokenizer.ggml.pre` that are known. The file has the name alone, not what it stands for.
pub(crate) const PRES: [&str; 2] = ["qwen2", "gpt-2"];

/// What a token is, by its number in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// 1: a part of texts, spelled in the alphabet of bytes.
    Plain,
    /// 3, 4: found in texts before anything else is; special ones steer the model and are no text.
    Added { special: bool },
    /// 5, and the fillers that older files have under 4: a row of the embedding without a token.
    None,
}

/// The `tokenizer.json` that encodes as the model's own does.
///
/// Control tokens become special ones and user-defined tokens added ones that are text. Files do not say
/// whether the original called a control token special: of those that look like `<|this|>` some were not,
/// which is seen only where special tokens are left out of a decoded text. Fillers are left out.
///
/// # Errors
/// [`Code::TokenizerInvalid`] for another model than `gpt2`, another `tokenizer.ggml.pre` than `qwen2` and
/// `gpt-2`, more than 2^20 tokens and merges, tokens that stand there twice, and merges of what is no token.
pub fn tokenizer(gguf: &Gguf<'_>) -> Result<Value> {
    one_of(gguf, "tokenizer.ggml.model", &["gpt2"])?;
    let pre = one_of(gguf, "tokenizer.ggml.pre", &PRES)?;
    let (vocab, added) = tokens(gguf)?;
    let merges = merges(gguf, &vocab)?;
    let (normalizer, pre_tokenizer) = cutting(pre);
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(gguf)?,
        "decoder": byte_level(false),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": merges,
        },
    }))
}

/// Normalizer and pre-tokenizer of one of [`PRES`].
pub(crate) fn cutting(pre: &str) -> (Value, Value) {
    if pre != "qwen2" {
        return (Value::Null, byte_level(true));
    }
    let split =
        json!({ "type": "Split", "pattern": { "Regex": QWEN2 }, "behavior": "Isolated", "invert": false });
    let parts = json!({ "type": "Sequence", "pretokenizers": [split, byte_level(false)] });
    (json!({ "type": "NFC" }), parts)
}

/// The text of a token.
pub(crate) fn token<'a>(gguf: &Gguf<'a>, id: u64) -> Option<&'a str> {
    gguf.get(TOKENS)?.array()?.texts()?.nth(usize::try_from(id).ok()?)
}

/// The id in `tokenizer.ggml.NAME_token_id` with the text it has, if there is one.
///
/// # Errors
/// [`Code::TokenizerInvalid`] for an id that no token has.
pub(crate) fn named<'a>(gguf: &Gguf<'a>, name: &str) -> Result<Option<(u64, &'a str)>> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    let Some(value) = gguf.get(&key) else { return Ok(None) };
    let found = value.whole().and_then(|id| Some((id, token(gguf, id)?)));
    match found {
        Some(found) => Ok(Some(found)),
        None => Err(refused(&key).need("the id of a token").have(value.to_string())),
    }
}

/// Ids of the control token of that text, of which there is one at most.
pub(crate) fn control(gguf: &Gguf<'_>, text: &str) -> Option<u64> {
    let id = gguf.get(TOKENS)?.array()?.texts()?.position(|t| t == text)?;
    let kind = gguf.get(TYPES)?.array()?.wholes()?.nth(id)?;
    (kind == 3).then_some(id as u64)
}

/// The vocabulary, and the added tokens by id.
fn tokens(gguf: &Gguf<'_>) -> Result<(Map<String, Value>, Vec<Value>)> {
    let texts = gguf.get(TOKENS).and_then(|v| v.array()).filter(|a| a.len() <= ENTRIES);
    let texts = texts.and_then(|a| a.texts());
    let texts = texts.ok_or_else(|| lacks(gguf, TOKENS, "an array of at most 2^20 texts"))?;
    let kinds = gguf.get(TYPES).and_then(|v| v.array()).and_then(|a| a.wholes());
    let mut kinds = kinds.ok_or_else(|| lacks(gguf, TYPES, "an array of whole numbers, one a token"))?;

    let (mut vocab, mut added) = (Map::new(), Vec::new());
    for (id, text) in texts.enumerate() {
        let kind = kinds.next();
        let kind = match kind {
            Some(1) => Kind::Plain,
            Some(3) => Kind::Added { special: true },
            Some(4) if !is_filler(text, id) => Kind::Added { special: false },
            Some(4 | 5) => Kind::None,
            _ => {
                return Err(refused(TYPES)
                    .need("1 (normal), 3 (control), 4 (user-defined) or 5 (unused) for every token")
                    .have(format!(
                        "{} for `{}`",
                        kind.map_or("nothing".into(), |k| k.to_string()),
                        brief(text)
                    )));
            }
        };
        if kind == Kind::None {
            continue;
        }
        // Added ones too, so that they keep their ids whatever lies between them: no merge makes one.
        if let Some(first) = vocab.insert(text.to_owned(), id.into()) {
            return Err(refused(TOKENS)
                .need("every token once")
                .have(format!("`{}` as {first} and as {id}", brief(text))));
        }
        if let Kind::Added { special } = kind {
            added.push(json!({
                "id": id,
                "content": text,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": special,
            }));
        }
    }
    if kinds.next().is_some() {
        return Err(refused(TYPES).need("one for every token").have("more of them"));
    }
    Ok((vocab, added))
}

/// What writers call a row of the embedding that has no token.
fn is_filler(text: &str, id: usize) -> bool {
    text.strip_prefix("[PAD").and_then(|t| t.strip_suffix(']')).is_some_and(|n| n.parse() == Ok(id))
}

fn merges(gguf: &Gguf<'_>, vocab: &Map<String, Value>) -> Result<Vec<Value>> {
    let most = ENTRIES - vocab.len().min(ENTRIES);
    let merges = gguf.get(MERGES).and_then(|v| v.array()).filter(|a| a.len() <= most);
    let merges = merges.and_then(|a| a.texts());
    let merges = merges.ok_or_else(|| lacks(gguf, MERGES, &format!("an array of at most {most} texts")))?;
    let mut joined = String::new();
    let checked = merges.enumerate().map(|(i, merge)| {
        let known = merge.split_once(' ').is_some_and(|(a, b)| {
            joined.clear();
            joined.extend([a, b]);
            [a, b, &joined].iter().all(|t| !t.is_empty() && vocab.contains_key(*t))
        });
        match known {
            true => Ok(merge.into()),
            false => Err(refused(MERGES)
                .need("two tokens with a space between them, which make a token")
                .have(format!("`{}`, the {i}th", brief(merge)))),
        }
    });
    checked.collect()
}

/// What is put around a text: nothing, unless the file asks for its first or last token.
fn post_processor(gguf: &Gguf<'_>) -> Result<Value> {
    let mut around = [None; 2];
    for (at, name) in ["bos", "eos"].into_iter().enumerate() {
        let key = format!("tokenizer.ggml.add_{name}_token");
        match gguf.get(&key) {
            None | Some(Entry::Bool(false)) => {}
            Some(Entry::Bool(true)) => {
                around[at] = named(gguf, name)?;
                if around[at].is_none() {
                    return Err(refused(&key)
                        .need(format!("an id in tokenizer.ggml.{name}_token_id"))
                        .have("none"));
                }
            }
            Some(other) => return Err(refused(&key).need("true or false").have(other.to_string())),
        }
    }
    if around == [None; 2] {
        return Ok(byte_level(false));
    }
    let [before, after] = around.map(|t| t.map(|(_, text)| text));
    let piece = |text: &str, kind: u8| json!({ "SpecialToken": { "id": text, "type_id": kind } });
    let one = |sequence: &str, kind: u8| {
        let text = json!({ "Sequence": { "id": sequence, "type_id": kind } });
        let pieces = [before.map(|t| piece(t, kind)), Some(text), after.map(|t| piece(t, kind))];
        pieces.into_iter().flatten().collect::<Vec<_>>()
    };
    let mut special = Map::new();
    for (id, text) in around.into_iter().flatten() {
        special.insert(text.to_owned(), json!({ "id": text, "ids": [id], "tokens": [text] }));
    }
    let pair = [one("A", 0), one("B", 1)].concat();
    Ok(json!({
        "type": "TemplateProcessing",
        "single": one("A", 0),
        "pair": pair,
        "special_tokens": special,
    }))
}

fn byte_level(use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex })
}

/// The text of a key, if it is one of those.
fn one_of(gguf: &Gguf<'_>, key: &str, known: &[&'static str]) -> Result<&'static str> {
    let have = gguf.get(key).and_then(|v| v.text());
    known.iter().find(|k| have == Some(**k)).copied().ok_or_else(|| {
        let known = known.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(" or ");
        lacks(gguf, key, &known).fix("name a tokenizer.json that was published with these weights")
    })
}

fn lacks(gguf: &Gguf<'_>, key: &str, need: &str) -> Error {
    refused(key).need(need).have(gguf.get(key).map_or("nothing".to_owned(), |v| v.to_string()))
}

fn refused(key: &str) -> Error {
    Error::new(Code::TokenizerInvalid, format!("GGUF metadata `{key}`"))
}
