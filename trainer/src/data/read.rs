//! Rows of files, before they are tokens.
use super::Format;
use q4_core::{Code, Error, Result};
use q4_model::template::Message;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::{fs, path::Path};

/// Bytes a data file may have.
const FILE_LIMIT: u64 = 16 << 30;
/// Bytes a line may have.
const LINE_LIMIT: usize = 16 << 20;

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// A conversation.
    Chat(Chat),
    /// A document.
    Text(String),
}

/// A conversation and what is learnt of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// Turns.
    pub messages: Vec<Message>,
    /// Turns whose `weight` is 0: they are read and not learnt.
    pub unlearnt: Vec<usize>,
    /// What the template is told of tools.
    pub tools: Option<Value>,
}

/// Fields that no row is made of, and how many rows have them.
pub type Unused = BTreeMap<String, usize>;

/// Fields that would change what a row says, with what says the same.
const CHANGING: [(&str, &str); 9] = [
    ("system", "a first message with role system"),
    ("weight", "`weight` in the messages it is about, 0 or 1"),
    ("functions", "`tools`"),
    ("function_call", "`tool_calls` in a message"),
    ("chosen", "an answer to learn from; preferences are not trained"),
    ("rejected", "an answer to learn from; preferences are not trained"),
    ("input", "one `prompt`"),
    ("images", "text only"),
    ("train_on_input", "data.supervise"),
];

/// The rows of a file with their line numbers, from 1, and the fields that were not used. Empty lines are
/// skipped, bad ones are errors.
///
/// # Errors
/// [`Code::Container`] with `file:line`; [`Code::ModelMissing`] or [`Code::Io`] where the file cannot be
/// read.
pub fn read_rows(path: &Path, format: Format) -> Result<(Vec<(usize, Row)>, Unused)> {
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

fn parse(bytes: &[u8], format: Format) -> Result<(Vec<(usize, Row)>, Unused)> {
    let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
    container(bytes, format)?;
    let (mut rows, mut unused) = (Vec::new(), Unused::new());
    for (i, line) in bytes.split(|b| *b == b'\n').enumerate() {
        let number = i + 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let row = one(line, format, rows.is_empty(), &mut unused)
            .map_err(|e| e.within(format!("line {number}")))?;
        rows.extend(row.map(|row| (number, row)));
    }
    Ok((rows, unused))
}

/// Refuses what is plainly another kind of file, with the way to the lines that are needed.
fn container(bytes: &[u8], format: Format) -> Result<()> {
    let need = "a JSON object a line";
    if bytes.starts_with(b"PAR1") {
        return Err(bad("a Parquet file")
            .need(need)
            .fix("in Python: pandas.read_parquet('IN').to_json('OUT.jsonl', orient='records', lines=True)"));
    }
    let list = bytes.trim_ascii_start().starts_with(b"[") && bytes.trim_ascii_end().ends_with(b"]");
    if list && matches!(format, Format::Auto | Format::Jsonl) && bytes.contains(&b'{') {
        return Err(bad("one JSON list").need(need).fix("jq -c '.[]' IN > OUT.jsonl"));
    }
    Ok(())
}

fn one(line: &[u8], format: Format, first: bool, unused: &mut Unused) -> Result<Option<Row>> {
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
        Format::Jsonl | Format::Auto => json(line, unused).map(Some),
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
        Some((prompt, target)) if !prompt.is_empty() && !target.is_empty() => {
            Ok(Some(Row::Chat(turn(prompt, target))))
        }
        _ => Err(bad("no pair").need("a prompt, a tab and an answer, neither empty").have(show(line))),
    }
}

fn json(line: &str, unused: &mut Unused) -> Result<Row> {
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
    for (name, need) in CHANGING {
        if object.get(name).is_some_and(|v| !v.is_null()) {
            return Err(bad(&format!("`{name}`")).need(need).have(fields(&object)));
        }
    }
    const KNOWN: [&str; 6] = ["messages", "prompt", "completion", "response", "text", "tools"];
    for name in object.keys().filter(|n| !KNOWN.contains(&n.as_str())) {
        *unused.entry(name.clone()).or_default() += 1;
    }
    let tools = object.get("tools").filter(|v| !v.is_null()).cloned();
    if tools.as_ref().is_some_and(|t| !t.is_array()) {
        return Err(bad("`tools`").need("a list of functions").have(fields(&object)));
    }
    match (object.get("messages"), text("prompt")?, answer, text("text")?) {
        (Some(messages), None, None, None) => conversation(messages, tools),
        (None, Some(prompt), Some(answer), None) => Ok(Row::Chat(Chat { tools, ..turn(prompt, answer) })),
        (None, None, None, Some(text)) if !text.is_empty() && tools.is_none() => {
            Ok(Row::Text(text.to_owned()))
        }
        _ => Err(bad("fields").need(need).have(fields(&object))),
    }
}

fn conversation(messages: &Value, tools: Option<Value>) -> Result<Row> {
    let mut messages: Vec<Message> = serde::Deserialize::deserialize(messages)
        .map_err(|e| bad("`messages`").need("a list of objects with role and content").have(e.to_string()))?;
    let mut unlearnt = Vec::new();
    for (i, m) in messages.iter_mut().enumerate() {
        match m.extra.shift_remove("weight").map(|w| (w.as_f64(), w)) {
            None | Some((Some(1.0), _)) => {}
            Some((Some(0.0), _)) => unlearnt.push(i),
            Some((_, other)) => {
                return Err(bad("`weight` of a message").need("0 or 1").have(show(&other.to_string())));
            }
        }
    }
    if !messages.iter().any(|m| m.role == "assistant") {
        return Err(bad("`messages`")
            .need("at least one assistant turn")
            .have(format!("{} turns without", messages.len())));
    }
    Ok(Row::Chat(Chat { messages, unlearnt, tools }))
}

fn turn(prompt: &str, answer: &str) -> Chat {
    let messages = vec![Message::new("user", prompt), Message::new("assistant", answer)];
    Chat { messages, ..Chat::default() }
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
