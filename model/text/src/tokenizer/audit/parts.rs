//! Normalizer, pre-tokenizer, post-processor and decoder: how many components, and how far they lengthen a
//! text.
use super::{bounded, pattern::Patterns, refused};
use q4_core::Result;
use serde_json::Value;

/// Components of a part.
const COMPONENTS: usize = 64;
/// Factor by which normalizer and pre-tokenizer together may lengthen a text.
const GROWTH: usize = 64;
/// The same for decoders.
const DECODED: usize = 32;
/// Bytes of a text that is looked for literally.
const LITERAL: usize = 1024;
/// Ids that a post-processor may add to a prompt.
const SPECIAL: usize = 256;

/// Checks all parts, each with its name.
pub(super) fn check(parts: &[(&str, &Value)]) -> Result<()> {
    let mut patterns = Patterns::default();
    let mut entering = 1;
    for (name, part) in parts {
        match *name {
            "post_processor" => check_post_processor(part)?,
            "decoder" => {
                let growth = check_part(name, part, &mut patterns)?;
                bounded("decoder: growth of a text", growth, DECODED)?;
            }
            _ => {
                entering = check_part(name, part, &mut patterns)?.saturating_mul(entering);
                bounded(&format!("{name}: growth of a text"), entering, GROWTH)?;
            }
        }
    }
    Ok(())
}

/// The factor by which a part may lengthen a text. A list of components multiplies.
fn check_part(name: &str, part: &Value, patterns: &mut Patterns) -> Result<usize> {
    if part.is_null() {
        return Ok(1);
    }
    let (mut components, mut growth, mut form) = (0usize, 1usize, 1usize);
    let mut open = vec![part];
    while let Some(component) = open.pop() {
        components += 1;
        bounded(&format!("{name}: components"), components, COMPONENTS)?;
        let kind = component.get("type").and_then(Value::as_str).unwrap_or_default();
        let flag = |field: &str| component.get(field).and_then(Value::as_bool);
        let text = |field: &str| component.get(field).and_then(Value::as_str).map_or(0, str::len);
        growth = growth.saturating_mul(match kind {
            "Sequence" => {
                let lists = ["normalizers", "pretokenizers", "decoders"];
                let list = lists.iter().find_map(|l| component.get(*l)?.as_array());
                let list = list.ok_or_else(|| {
                    refused(&format!("{name}: a Sequence of nothing"))
                        .need("a list of components")
                        .have("none")
                })?;
                open.extend(list);
                1
            }
            // The forms of Unicode are not lengthened again by another: U+FDFA has 3 bytes and decomposes
            // into 33.
            "NFC" | "NFD" | "NFKC" | "NFKD" => {
                form = form.max(if kind.len() == 4 { 11 } else { 3 });
                1
            }
            "ByteLevel" if name == "pre_tokenizer" && flag("add_prefix_space") != Some(false) => 4,
            "ByteLevel" if name == "decoder" => 3,
            "ByteLevel" => 2,
            "Bert" | "BertNormalizer" | "Metaspace" => 4,
            "Lowercase" => 2,
            "Prepend" => 1 + text("prepend"),
            "Replace" => replace(component, text("content")),
            "FixedLength" if component.get("length") == Some(&0.into()) => {
                return Err(refused(&format!("{name}: FixedLength has length 0"))
                    .need("at least 1")
                    .have("0"));
            }
            "Precompiled" => {
                return Err(refused(&format!("{name}: Precompiled"))
                    .need("a normalizer whose growth is known")
                    .have("a compiled map of characters, which may turn each into a book")
                    .fix("Qwen3's own tokenizer.json normalizes with NFC"));
            }
            "Nmt" | "Strip" | "StripAccents" | "BertPreTokenizer" | "CharDelimiterSplit" | "Delimiter"
            | "Digits" | "FixedLength" | "Punctuation" | "Split" | "UnicodeScripts" | "Whitespace"
            | "WhitespaceSplit" | "BPEDecoder" | "WordPiece" | "CTC" | "Fuse" | "ByteFallback" => 1,
            other => {
                return Err(refused(&format!("{name}: unknown component"))
                    .need("a type of the tokenizers library")
                    .have(format!("`{}`", other.chars().take(40).collect::<String>())));
            }
        });
        if let Some(pattern) = component.get("pattern") {
            bounded(
                &format!("{name}: bytes of a text to look for"),
                literal(pattern).map_or(0, str::len),
                LITERAL,
            )?;
            if let Some(regex) = pattern.get("Regex").and_then(Value::as_str) {
                patterns.add(name, regex)?;
            }
        }
    }
    Ok(growth.saturating_mul(form))
}

fn literal(pattern: &Value) -> Option<&str> {
    pattern.as_str().or_else(|| pattern.get("String")?.as_str())
}

/// A regular expression may match the empty text before every byte; a literal costs its own bytes.
fn replace(component: &Value, content: usize) -> usize {
    match component.get("pattern").and_then(literal).map(str::len) {
        Some(length) if length > 0 => content.div_ceil(length).max(1),
        _ => 1 + content,
    }
}

/// A template names the text once and adds few ids. The library tells processors apart by their fields, not
/// by their type, so every object is looked at.
fn check_post_processor(part: &Value) -> Result<()> {
    let (mut components, mut added) = (0, 0usize);
    let mut open = vec![part];
    while let Some(value) = open.pop() {
        match value {
            Value::Array(list) => open.extend(list),
            Value::Object(map) => {
                components += usize::from(map.contains_key("type"));
                let pieces = |field: &str| map.get(field).and_then(Value::as_array);
                if map.get("single").is_some_and(|s| !s.is_array()) {
                    return Err(refused("post_processor: the template")
                        .need("a list of pieces")
                        .have("a text"));
                }
                let texts = pieces("single")
                    .map_or(1, |s| s.iter().filter(|piece| piece.get("Sequence").is_some()).count());
                if texts != 1 {
                    return Err(refused("post_processor: the template must name the text once")
                        .need("one Sequence in single")
                        .have(texts.to_string()));
                }
                let ids = map.get("special_tokens").map_or(0, most_ids);
                let specials = |field| {
                    pieces(field).map_or(0, |p| p.iter().filter(|p| p.get("SpecialToken").is_some()).count())
                };
                added =
                    added.saturating_add(specials("single").max(specials("pair")).saturating_mul(ids.max(1)));
                open.extend(
                    map.iter()
                        .filter(|(key, v)| v.is_array() && *key != "single" && *key != "pair")
                        .map(|e| e.1),
                );
            }
            _ => {}
        }
    }
    bounded("post_processor: components", components, COMPONENTS)?;
    bounded("post_processor: ids added to a prompt", added, SPECIAL)
}

/// Ids of the special token that has most.
fn most_ids(specials: &Value) -> usize {
    let ids = |token: &Value| token.get("ids").and_then(Value::as_array).map_or(0, Vec::len);
    match specials {
        Value::Object(map) => map.values().map(ids).max().unwrap_or(0),
        Value::Array(list) => list.iter().map(ids).max().unwrap_or(0),
        _ => 0,
    }
}
