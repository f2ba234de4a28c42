//! A `tokenizer.json` as metadata: the way back of [`tokenizer`](crate::tokenizer()).
use crate::Head;
use crate::tokenizer::{PRES, cutting};
use q4_core::{Code, Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;

/// Adds `tokenizer.ggml.…`: a token for each of `rows` of the embedding, those that nothing stands for as
/// unused ones.
///
/// # Errors
/// [`Code::TokenizerInvalid`] for what a file has no words for: another model than byte-level BPE, another
/// way of cutting texts than those that [`tokenizer`](crate::tokenizer()) knows, something put around a text,
/// added tokens that take spaces with them, ids beyond `rows`, an id that two tokens have.
pub fn put_tokenizer(head: &mut Head, tokenizer: &Value, rows: usize) -> Result<()> {
    let model = &tokenizer["model"];
    only(model, "model.type", &[Value::from("BPE")])?;
    let empty = [Value::Null, "".into()];
    for field in ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"] {
        only(model, &format!("model.{field}"), &empty)?;
    }
    for field in ["byte_fallback", "ignore_merges", "fuse_unk"] {
        only(model, &format!("model.{field}"), &[Value::Null, false.into()])?;
    }
    let pre = PRES.into_iter().find(|pre| {
        let (normalizer, pre_tokenizer) = cutting(pre);
        meant(&tokenizer["normalizer"]) == meant(&normalizer)
            && meant(&tokenizer["pre_tokenizer"]) == meant(&pre_tokenizer)
    });
    let pre = pre.ok_or_else(|| {
        refused("normalizer and pre_tokenizer")
            .need(format!("those of {}, which a GGUF file has names for", PRES.join(" or ")))
            .have("others")
    })?;
    if puts_something(&tokenizer["post_processor"]) {
        return Err(refused("post_processor").need("nothing put around a text").have("tokens"));
    }

    let mut tokens = BTreeMap::new();
    for (text, id) in model["vocab"].as_object().into_iter().flatten() {
        add(&mut tokens, rows, id, text, 1)?;
    }
    for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
        let text = token["content"].as_str().unwrap_or_default();
        for field in ["single_word", "lstrip", "rstrip", "normalized"] {
            if token[field].as_bool() == Some(true) {
                return Err(refused(&format!("added_tokens: {field} of `{text}`"))
                    .need("false")
                    .have("true"));
            }
        }
        let kind = if token["special"].as_bool() == Some(true) { 3 } else { 4 };
        add(&mut tokens, rows, &token["id"], text, kind)?;
    }
    let merges = model["merges"].as_array().into_iter().flatten().map(merge).collect::<Result<Vec<_>>>()?;

    head.text("tokenizer.ggml.model", "gpt2");
    head.text("tokenizer.ggml.pre", pre);
    // What llama.cpp calls rows without a token.
    let all: Vec<_> =
        (0..rows).map(|id| tokens.remove(&id).unwrap_or_else(|| (format!("[PAD{id}]"), 5))).collect();
    head.texts("tokenizer.ggml.tokens", all.iter().map(|(text, _)| text.as_str()));
    head.i32s("tokenizer.ggml.token_type", &all.iter().map(|(_, kind)| *kind).collect::<Vec<_>>());
    head.texts("tokenizer.ggml.merges", merges.iter().map(String::as_str));
    head.flag("tokenizer.ggml.add_bos_token", false);
    Ok(())
}

/// An added token may stand in the vocabulary too, under the same text.
fn add(
    tokens: &mut BTreeMap<usize, (String, i32)>,
    rows: usize,
    id: &Value,
    text: &str,
    kind: i32,
) -> Result<()> {
    let id = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|id| *id < rows);
    let id = id.ok_or_else(|| {
        refused(&format!("the id of `{text}`"))
            .need(format!("a row of the embedding, below {rows}"))
            .have("none")
    })?;
    match tokens.insert(id, (text.to_owned(), kind)) {
        Some((other, _)) if other != text => {
            Err(refused(&format!("token {id}")).need("one text").have(format!("`{other}` and `{text}`")))
        }
        _ => Ok(()),
    }
}

/// Two tokens with a space between them, of a text or a pair.
fn merge(merge: &Value) -> Result<String> {
    let pair = merge.as_array().map(|pair| pair.iter().filter_map(Value::as_str).collect::<Vec<_>>());
    let text = match pair.as_deref() {
        Some([a, b]) => format!("{a} {b}"),
        Some(_) => String::new(),
        None => merge.as_str().unwrap_or_default().to_owned(),
    };
    match text.split(' ').count() {
        2 => Ok(text),
        _ => Err(refused("merges").need("two tokens without a space").have(merge.to_string())),
    }
}

/// A part of a tokenizer without what changes no token: offsets are nobody's here.
fn meant(part: &Value) -> Value {
    match part {
        Value::Object(fields) => {
            let told = fields.iter().filter(|(name, _)| *name != "trim_offsets");
            Value::Object(told.map(|(name, value)| (name.clone(), meant(value))).collect())
        }
        Value::Array(all) => all.iter().map(meant).collect(),
        other => other.clone(),
    }
}

fn puts_something(processor: &Value) -> bool {
    match processor["type"].as_str() {
        None | Some("ByteLevel") => false,
        Some("TemplateProcessing") => processor.to_string().contains("SpecialToken"),
        Some(_) => true,
    }
}

fn only(model: &Value, field: &str, accepted: &[Value]) -> Result<()> {
    let have = &model[field.trim_start_matches("model.")];
    if accepted.contains(have) {
        return Ok(());
    }
    let need: Vec<_> = accepted.iter().map(Value::to_string).collect();
    Err(refused(field).need(need.join(" or ")).have(have.to_string()))
}

fn refused(what: &str) -> Error {
    Error::new(Code::TokenizerInvalid, format!("tokenizer.json: {what}: no place in a GGUF file"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gguf, tokenizer};
    use serde_json::json;

    fn plain() -> Value {
        let added = |id: u32, text: &str, special: bool| json!({ "id": id, "content": text, "special": special, "lstrip": false });
        let (normalizer, pre_tokenizer) = cutting("qwen2");
        json!({
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": { "type": "ByteLevel", "trim_offsets": true },
            "added_tokens": [added(4, "<|end|>", true), added(6, "<think>", false)],
            "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "ab": 2, "\u{120}a": 3, "\u{120}": 5 },
                       "merges": ["a b", ["\u{120}", "a"]] },
        })
    }

    fn written(from: &Value, rows: usize) -> Result<Value> {
        let mut head = Head::default();
        put_tokenizer(&mut head, from, rows)?;
        tokenizer(&Gguf::parse("m", &head.bytes())?)
    }

    #[test]
    fn a_tokenizer_comes_back() -> Result<()> {
        let back = written(&plain(), 9)?;
        let vocab =
            json!({ "a": 0, "b": 1, "ab": 2, "\u{120}a": 3, "<|end|>": 4, "\u{120}": 5, "<think>": 6 });
        assert_eq!(back["model"]["vocab"], vocab, "and no token for the rows behind it");
        assert_eq!(back["model"]["merges"], json!(["a b", "\u{120} a"]));
        let added = |of: &Value| {
            let all = of["added_tokens"].as_array().expect("tokens").clone();
            all.into_iter()
                .map(|t| (t["id"].clone(), t["content"].clone(), t["special"].clone()))
                .collect::<Vec<_>>()
        };
        assert_eq!(added(&back), added(&plain()));
        assert_eq!(meant(&back["pre_tokenizer"]), meant(&plain()["pre_tokenizer"]));
        assert_eq!(back["normalizer"], plain()["normalizer"]);
        Ok(())
    }

    #[test]
    fn what_a_file_has_no_words_for_is_refused() {
        let with = |pointer: &str, value: Value| {
            let mut all = plain();
            *all.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
            all
        };
        let around =
            json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<|end|>" } }] });
        let lone = json!({ "type": "ByteLevel", "add_prefix_space": true, "use_regex": true });
        for (wrong, told) in [
            (with("/model/type", "Unigram".into()), "model.type"),
            (with("/normalizer", json!({ "type": "NFKC" })), "normalizer and pre_tokenizer"),
            (with("/pre_tokenizer", lone), "normalizer and pre_tokenizer"),
            (with("/post_processor", around), "post_processor"),
            (with("/added_tokens/0/lstrip", true.into()), "lstrip of `<|end|>`"),
            (with("/added_tokens/0/id", 1.into()), "token 1"),
            (with("/added_tokens/0/id", 9.into()), "the id of `<|end|>`"),
            (with("/model/merges/0", "a b c".into()), "merges"),
        ] {
            let e = written(&wrong, 9).expect_err(told);
            assert!(e.code() == Code::TokenizerInvalid && e.what().contains(told), "{told}: {e}");
        }
    }
}
