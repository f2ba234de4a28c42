//! Rows of files, before they are tokens.
use super::Format;
use q4_core::{Code, Error, Result};
use q4_model::template::Message;
use serde_json::{Map, Value};
use std::{fs, path::Path};

/// Bytes a data file may have.
const FILE_LIMIT: u64 = 16 << 30;
/// Bytes a line may have.
const LINE_LIMIT: usize = 16 << 20;

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// A conversation.
    Chat(Vec<Message>),
    /// A document.
    Text(String),
}

/// The rows of a file with their line numbers, from 1. Empty lines are skipped, bad ones are errors.
///
/// # Errors
/// [`Code::Container`] with `file:line`; [`Code::ModelMissing`] or [`Code::Io`] where the file cannot be
/// read.
pub fn read_rows(path: &Path, format: Format) -> Result<Vec<(usize, Row)>> {
    let size = fs::metadata(path).map_err(|e| Error::io(path, &e))?.len();
    if size > FILE_LIMIT {
        return Err(bad("too large")
            .need(format!("at most {FILE_LIMIT} bytes"))
            .have(size.to_string())
            .within(path.display()));
    }
    let bytes = fs::read(path).map_err(|e| Error::io(path, &e))?;
    let format = match (format, path.extension().and_then(|e| e.to_str())) {
        (Format::Auto, Some("tsv")) => Format::Tsv,
        (Format::Auto, Some("txt")) => Format::Text,
        (Format::Auto, _) => Format::Jsonl,
        (named, _) => named,
    };
    parse(&bytes, format).map_err(|e| e.within(path.display()))
}

fn parse(bytes: &[u8], format: Format) -> Result<Vec<(usize, Row)>> {
    let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
    let mut rows = Vec::new();
    for (i, line) in bytes.split(|b| *b == b'\n').enumerate() {
        let number = i + 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let row = one(line, format, rows.is_empty()).map_err(|e| e.within(format!("line {number}")))?;
        rows.extend(row.map(|row| (number, row)));
    }
    Ok(rows)
}

fn one(line: &[u8], format: Format, first: bool) -> Result<Option<Row>> {
    if line.len() > LINE_LIMIT {
        return Err(bad("too long").need(format!("at most {LINE_LIMIT} bytes")).have(line.len().to_string()));
    }
    let line =
        std::str::from_utf8(line).map_err(|e| bad("not UTF-8").need("UTF-8 text").have(e.to_string()))?;
    if line.trim().is_empty() {
        return Ok(None);
    }
    match format {
        Format::Text => Ok(Some(Row::Text(line.to_owned()))),
        Format::Tsv => tsv(line, first),
        Format::Jsonl | Format::Auto => json(line).map(Some),
    }
}

/// Prompt, tab, answer. The first row may be the header `prompt<TAB>target`.
fn tsv(line: &str, first: bool) -> Result<Option<Row>> {
    if line.starts_with('#') {
        return Ok(None);
    }
    let pair = line.split_once('\t').map(|(p, t)| (p.trim(), t.trim()));
    match pair {
        Some(("prompt", "target" | "response" | "completion")) if first => Ok(None),
        Some((prompt, target)) if !prompt.is_empty() && !target.is_empty() => Ok(Some(turn(prompt, target))),
        _ => Err(bad("no pair").need("a prompt, a tab and an answer, neither empty").have(show(line))),
    }
}

fn json(line: &str) -> Result<Row> {
    let need = "an object with `messages`, with `prompt` and `completion`, or with `text`";
    let value: Value =
        serde_json::from_str(line).map_err(|e| bad("not JSON").need(need).have(e.to_string()))?;
    let Value::Object(object) = value else { return Err(bad("no object").need(need).have(show(line))) };
    let text = |name: &str| match object.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) => Ok(Some(s.as_str())),
        Some(other) => Err(bad(&format!("`{name}`")).need("a text").have(show(&other.to_string()))),
    };
    let answer = match text("completion")? {
        Some(answer) => Some(answer),
        None => text("response")?,
    };
    match (object.get("messages"), text("prompt")?, answer, text("text")?) {
        (Some(messages), None, None, None) => conversation(messages),
        (None, Some(prompt), Some(answer), None) => Ok(turn(prompt, answer)),
        (None, None, None, Some(text)) if !text.is_empty() => Ok(Row::Text(text.to_owned())),
        _ => Err(bad("fields").need(need).have(fields(&object))),
    }
}

fn conversation(messages: &Value) -> Result<Row> {
    let messages: Vec<Message> = serde::Deserialize::deserialize(messages)
        .map_err(|e| bad("`messages`").need("a list of objects with role and content").have(e.to_string()))?;
    if !messages.iter().any(|m| m.role == "assistant") {
        return Err(bad("`messages`")
            .need("at least one assistant turn")
            .have(format!("{} turns without", messages.len())));
    }
    Ok(Row::Chat(messages))
}

fn turn(prompt: &str, answer: &str) -> Row {
    Row::Chat(vec![Message::new("user", prompt), Message::new("assistant", answer)])
}

fn fields(object: &Map<String, Value>) -> String {
    let names: Vec<_> = object.keys().take(8).map(String::as_str).collect();
    if names.is_empty() { "none".into() } else { show(&names.join(", ")) }
}

fn show(text: &str) -> String {
    let short: String = text.chars().take(60).collect();
    if short.len() < text.len() { format!("{short}...") } else { short }
}

pub(super) fn bad(what: &str) -> Error {
    Error::new(Code::Container, what)
}
