//! The text side of a checkpoint as every verb reads it: tokenizer, chat template, sampling wishes.
//!
//! `q4 generate` and `q4 verify` go through the same functions, so that the one objects to whatever the other
//! refuses.
use crate::checkpoint::Checkpoint;
use crate::generation::GenerationConfig;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value};

/// Where the tokenizer is.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// Where a template may be, beside `chat_template.jinja`.
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Where the chat template is.
pub(crate) const TEMPLATE: &str = "chat_template.jinja";
/// Where the sampling wishes are.
pub(crate) const GENERATION: &str = "generation_config.json";

/// The tokenizer.
///
/// # Errors
/// [`Code::ModelMissing`] without one, [`Code::TokenizerInvalid`] for one that cannot be used or has ids that
/// the embedding has no row for.
pub fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    let file = checkpoint.file(TOKENIZER).ok_or_else(|| {
        Error::new(Code::ModelMissing, format!("{}: no {TOKENIZER}", checkpoint.name()))
            .need("tokenizer.json beside the weights")
            .fix("name it with --tokenizer PATH; `q4 logits` needs none")
    })?;
    let (tokenizer, rows) = (Tokenizer::from_bytes(&file)?, checkpoint.config().vocab_size);
    if tokenizer.highest_id() as usize >= rows {
        return Err(Error::new(Code::TokenizerInvalid, format!("{TOKENIZER}: ids beyond the embedding"))
            .need(format!("ids below {rows}, the rows of the embedding"))
            .have(format!("token id {}, but the embedding has {rows} rows", tokenizer.highest_id()))
            .fix("use the tokenizer.json that was published with these weights"));
    }
    Ok(tokenizer)
}

/// The model's own chat template, if it has one.
///
/// # Errors
/// [`Code::TemplateInvalid`].
pub fn template(checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>> {
    if let Some(bytes) = checkpoint.file(TEMPLATE) {
        let source = std::str::from_utf8(&bytes).map_err(|e| {
            Error::new(Code::TemplateInvalid, format!("{TEMPLATE}: not UTF-8")).have(e.to_string())
        })?;
        return ChatTemplate::compile(source).map(Some).map_err(|e| e.within(TEMPLATE));
    }
    let own = checkpoint.file(TOKENIZER_CONFIG).map(|b| ChatTemplate::from_tokenizer_config(&b));
    Ok(own.transpose()?.flatten())
}

/// The form that instruct models of its family use, for directories that ship no template.
pub fn of_family(checkpoint: &Checkpoint) -> ChatTemplate {
    ChatTemplate::of(checkpoint.config().arch.template.source)
}

/// `bos_token` and `eos_token`, for templates that print them.
///
/// # Errors
/// [`Code::TokenizerInvalid`] for a `tokenizer_config.json` that is no JSON.
pub fn variables(checkpoint: &Checkpoint) -> Result<Map<String, Value>> {
    let mut variables = Map::new();
    let Some(bytes) = checkpoint.file(TOKENIZER_CONFIG) else { return Ok(variables) };
    let config: Value = serde_json::from_slice(&bytes).map_err(|e| {
        Error::new(Code::TokenizerInvalid, TOKENIZER_CONFIG).need("valid JSON").have(e.to_string())
    })?;
    for name in ["bos_token", "eos_token", "pad_token", "unk_token"] {
        // Either the token's text, or an object that describes it.
        let token = config.get(name).map(|t| t.get("content").unwrap_or(t));
        if let Some(Value::String(text)) = token {
            variables.insert(name.to_owned(), text.as_str().into());
        }
    }
    Ok(variables)
}

/// The sampling wishes; empty ones without a file.
///
/// # Errors
/// [`Code::ConfigInvalid`] names every bad field.
pub fn generation(checkpoint: &Checkpoint) -> Result<GenerationConfig> {
    match checkpoint.file(GENERATION) {
        Some(bytes) => GenerationConfig::parse(&bytes, checkpoint.config().vocab_size),
        None => Ok(GenerationConfig::default()),
    }
}
