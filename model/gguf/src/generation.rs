//! `tokenizer_config.json` and `generation_config.json` of the model in a file.
use crate::{Gguf, tokenizer};
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value};

/// Tokens that end an answer, as the file has them.
const ENDS: [&str; 3] = ["eos", "eot", "eom"];
/// Ends a document. Models that were made to talk end their answers with another token, and with this one
/// too: published configurations list both, a file has room for the first.
const DOCUMENT: &str = "<|endoftext|>";

/// Sampling wishes, and what transformers calls them.
const WISHES: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// The `tokenizer_config.json`: texts of `bos_token`, `eos_token` and `pad_token` and the `chat_template`, as
/// far as the file has them.
///
/// # Errors
/// [`Code::TokenizerInvalid`] for ids that no token has, [`Code::TemplateInvalid`] for a template that is no
/// text.
pub fn tokenizer_config(gguf: &Gguf<'_>) -> Result<Value> {
    let mut c = Map::new();
    for (name, stored) in [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")] {
        if let Some((_, text)) = tokenizer::named(gguf, stored)? {
            c.insert(name.to_owned(), text.into());
        }
    }
    if let Some(template) = gguf.get("tokenizer.chat_template") {
        let source = template.text().ok_or_else(|| {
            Error::new(Code::TemplateInvalid, "GGUF metadata `tokenizer.chat_template`")
                .need("a text")
                .have(template.to_string())
        })?;
        c.insert("chat_template".to_owned(), source.into());
    }
    c.insert("clean_up_tokenization_spaces".to_owned(), false.into());
    c.insert("tokenizer_class".to_owned(), "Qwen2Tokenizer".into());
    Ok(c.into())
}

/// The `generation_config.json`: `eos_token_id` lists the tokens that end an answer, `<|endoftext|>` among
/// them where it is a control token, and what `general.sampling` asks for is there, with `do_sample`.
///
/// # Errors
/// [`Code::TokenizerInvalid`] for ids that no token has, [`Code::ConfigInvalid`] for wishes that are no
/// numbers.
pub fn generation_config(gguf: &Gguf<'_>) -> Result<Value> {
    let mut c = Map::new();
    for (name, stored) in [("bos_token_id", "bos"), ("pad_token_id", "padding")] {
        if let Some((id, _)) = tokenizer::named(gguf, stored)? {
            c.insert(name.to_owned(), id.into());
        }
    }
    let mut ends = Vec::new();
    for name in ENDS {
        ends.extend(tokenizer::named(gguf, name)?.map(|(id, _)| id));
    }
    ends.extend(tokenizer::control(gguf, DOCUMENT));
    let mut seen = std::collections::BTreeSet::new();
    ends.retain(|id| seen.insert(*id));
    c.insert("eos_token_id".to_owned(), ends.into());

    let mut wishes = Map::new();
    for (stored, name) in WISHES {
        let key = format!("general.sampling.{stored}");
        let Some(value) = gguf.get(&key) else { continue };
        let number = value.whole().map(Value::from).or_else(|| value.number().map(Value::from));
        let number = number.ok_or_else(|| {
            Error::new(Code::ConfigInvalid, format!("GGUF metadata `{key}`"))
                .need("a number")
                .have(value.to_string())
        })?;
        wishes.insert(name.to_owned(), number);
    }
    let greedy = wishes.get("temperature").is_some_and(|t| t.as_f64() == Some(0.0));
    c.insert("do_sample".to_owned(), (!wishes.is_empty() && !greedy).into());
    c.extend(wishes);
    Ok(c.into())
}
