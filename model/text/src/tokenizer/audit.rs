//! Refuses tokenizers that would make the library panic, hang or grow without bound, before it sees them.
//!
//! Every rule answers a way to turn a small file into a large amount of work; honest tokenizers are far
//! below. What is accepted loads within 2 seconds and 256 MiB for every 64 KiB, and so does a prompt of 4
//! KiB.
mod entries;
mod parts;
mod pattern;
mod tree;
mod whole;

use entries::{Contents, Count, Entries, Merges};
use q4_core::{Code, Error, Result};
use serde::Deserialize;
use tree::Tree;
pub(super) use whole::Kept;

/// Nesting of the JSON.
const DEPTH: usize = 64;
/// Vocabulary entries and merges together, and the bound on token ids.
const ENTRIES: usize = 1 << 20;
/// Added tokens.
const ADDED: usize = 1 << 16;
/// Bytes of all added tokens together: the automaton that finds them takes about a second for them.
const ADDED_BYTES: usize = 1 << 20;
/// Bytes of one token; the longest of Qwen3 has 256.
const TOKEN: usize = 4096;
/// Bytes of what a subword may begin or end with; it is written again for every character of a text.
const AFFIX: usize = 64;
/// Characters of a word that WordPiece may look at: its work grows with their cube. The usual bound is 100.
const WORD: u64 = 256;

/// What the file says beside its size.
pub(super) struct Facts {
    /// The decoder is plain byte-level.
    pub byte_level: bool,
    /// The largest token id.
    pub highest: u32,
    /// What encoding keeps of a text.
    pub kept: Kept,
}

/// Errors: [`Code::TokenizerInvalid`], naming what is out of bounds.
pub(super) fn audit(bytes: &[u8]) -> Result<Facts> {
    check_depth(bytes)?;
    let file: File = serde_json::from_slice(bytes).map_err(|e| {
        refused("damaged or not a tokenizer").need("a JSON object with a model").have(e.to_string())
    })?;
    check_model(bytes, &file.model)?;
    let highest = check_added(&file.added_tokens, file.model.vocab.highest)?;
    parts::check(&[
        ("normalizer", &file.normalizer.0),
        ("pre_tokenizer", &file.pre_tokenizer.0),
        ("post_processor", &file.post_processor.0),
        ("decoder", &file.decoder.0),
    ])?;
    check_truncation(&file.truncation.0)?;
    let byte_level = file.decoder.0.get("type").is_some_and(|t| t == "ByteLevel");
    Ok(Facts { byte_level, highest, kept: whole::kept(&file) })
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

fn check_model(bytes: &[u8], model: &Model) -> Result<()> {
    bounded("vocabulary and merges", model.vocab.count + model.merges.0, ENTRIES)?;
    if model.vocab.count == 0 {
        return Err(refused("the vocabulary is empty").need("at least one token").have("none"));
    }
    bounded("bytes of a token", model.vocab.longest, TOKEN)?;
    if let Some(dropout) = model.dropout.filter(|p| *p != 0.0) {
        return Err(refused("model.dropout makes encoding random")
            .need("null or 0")
            .have(dropout.to_string()));
    }
    if let Some(most) = model.max_input_chars_per_word.filter(|n| *n > WORD) {
        return Err(refused("model.max_input_chars_per_word out of bounds")
            .need(format!("at most {WORD}"))
            .have(most.to_string())
            .fix("set it to 100, the usual bound"));
    }
    for (name, affix) in [
        ("continuing_subword_prefix", &model.continuing_subword_prefix),
        ("end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        bounded(&format!("model.{name}: bytes"), affix.as_ref().map_or(0, |a| a.len()), AFFIX)?;
    }
    match model.continuing_subword_prefix.as_deref() {
        Some(prefix) if !prefix.is_empty() && model.merges.0 > 0 => check_prefix(bytes, prefix),
        _ => Ok(()),
    }
}

/// The library cuts the prefix off the second half of every merge by its length in bytes, whatever stands
/// there.
fn check_prefix(bytes: &[u8], prefix: &str) -> Result<()> {
    #[derive(Deserialize)]
    struct File {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        merges: Merges,
    }
    let file: File = serde_json::from_slice(bytes).map_err(|e| {
        refused("model.merges").need("pairs of tokens, or texts of two tokens").have(e.to_string())
    })?;
    let cut = file.model.merges.0.iter().find(|second| second.get(prefix.len()..).is_none());
    cut.map_or(Ok(()), |second| {
        Err(refused("model.continuing_subword_prefix does not begin every merge's second half")
            .need(format!("`{prefix}` before it"))
            .have(format!("`{}`", second.chars().take(40).collect::<String>()))
            .fix("leave the prefix out, or export the merges again"))
    })
}

fn check_added(added: &Contents, highest: u64) -> Result<u32> {
    bounded("added_tokens", added.count, ADDED)?;
    bounded("added_tokens: bytes of a token", added.longest, TOKEN)?;
    bounded("added_tokens: bytes of all tokens", added.bytes, ADDED_BYTES)?;
    let highest = added.highest.max(highest);
    bounded("highest token id", highest.try_into().unwrap_or(usize::MAX), ENTRIES - 1)?;
    Ok(highest as u32)
}

fn check_truncation(truncation: &serde_json::Value) -> Result<()> {
    let size = |name: &str| truncation.get(name).and_then(serde_json::Value::as_u64);
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
    added_tokens: Contents,
    #[serde(default)]
    truncation: Tree,
    #[serde(default)]
    normalizer: Tree,
    #[serde(default)]
    pre_tokenizer: Tree,
    #[serde(default)]
    post_processor: Tree,
    #[serde(default)]
    decoder: Tree,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    vocab: Entries,
    #[serde(default)]
    merges: Count,
    #[serde(default)]
    dropout: Option<f64>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    max_input_chars_per_word: Option<u64>,
}
