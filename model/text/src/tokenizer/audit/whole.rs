//! Whether tokens hold all bytes of their text, so that a text cannot have few of them.
use super::File;
use serde_json::Value;

/// What encoding keeps of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Kept {
    /// All bytes: tokens side by side are the text.
    Bytes,
    /// All bytes of its composed form (NFC).
    Composed,
    /// Nothing that the file promises.
    Unknown,
}

/// Byte pairs over a byte-level text, with nothing before them that leaves anything out.
pub(super) fn kept(file: &File) -> Kept {
    let model = &file.model;
    let is_plain = |affix: &Option<String>| affix.as_deref().is_none_or(str::is_empty);
    let is_pairs = model.kind.as_deref() == Some("BPE")
        && is_plain(&model.continuing_subword_prefix)
        && is_plain(&model.end_of_word_suffix);
    if !is_pairs || file.added_tokens.strips || !splits(&file.pre_tokenizer.0) {
        return Kept::Unknown;
    }
    let normalizers = parts(&file.normalizer.0, "normalizers");
    match normalizers.iter().all(|part| kind(part) == Some("NFC")) {
        true if normalizers.is_empty() => Kept::Bytes,
        true => Kept::Composed,
        false => Kept::Unknown,
    }
}

/// Whether a text is only cut, and written in the alphabet of bytes once.
fn splits(pre_tokenizer: &Value) -> bool {
    let parts = parts(pre_tokenizer, "pretokenizers");
    let is_cut = |part: &&Value| match kind(part) {
        Some("Split") => part.get("behavior").is_some_and(|b| b != "Removed"),
        Some("Digits" | "ByteLevel") => true,
        _ => false,
    };
    let byte_levels = parts.iter().filter(|part| kind(part) == Some("ByteLevel")).count();
    byte_levels == 1 && parts.iter().all(is_cut)
}

/// A part, or those of a sequence; a sequence in another is a part that nobody knows.
fn parts<'a>(part: &'a Value, of: &str) -> Vec<&'a Value> {
    match (part, kind(part)) {
        (Value::Null, _) => Vec::new(),
        (_, Some("Sequence")) => part.get(of).and_then(Value::as_array).into_iter().flatten().collect(),
        _ => vec![part],
    }
}

fn kind(part: &Value) -> Option<&str> {
    part.get("type").and_then(Value::as_str)
}
