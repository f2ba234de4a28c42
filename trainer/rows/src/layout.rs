//! What a row is: the layouts people keep their data in, and the fields that would change what a row says.
use q4_core::{Code, Error, Result};
use q4_text::template::Message;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

mod turns;

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

/// A layout: the fields that a row of it has, and those it may have.
struct Layout {
    has: &'static [&'static str],
    may: &'static [&'static str],
    read: fn(&Map<String, Value>) -> Result<Row>,
}

/// Tried in this order; the first whose fields are there is meant.
const LAYOUTS: [Layout; 6] = [
    Layout { has: &["messages"], may: &["tools"], read: messages },
    Layout { has: &["conversations"], may: &["system", "tools"], read: sharegpt },
    Layout { has: &["instruction", "output"], may: &["input", "system", "history"], read: alpaca },
    Layout { has: &["prompt", "completion"], may: &["tools"], read: pair },
    Layout { has: &["prompt", "response"], may: &["tools"], read: pair },
    Layout { has: &["text"], may: &[], read: document },
];

const NEED: &str = "an object with `messages`, with `conversations`, with `instruction` and `output`, with \
                    `prompt` and `completion`, or with `text`";

/// Fields that say something, with what says the same to us. In a layout that does not have them they are
/// errors.
const SAYING: [(&str, &str); 32] = [
    ("messages", "one layout a row"),
    ("conversations", "one layout a row"),
    ("instruction", "one layout a row"),
    ("output", "one layout a row"),
    ("prompt", "one layout a row"),
    ("completion", "one layout a row"),
    ("response", "one layout a row"),
    ("text", "one layout a row"),
    ("input", "one `prompt`, or `instruction`, `input` and `output`"),
    ("system", "a first message with role system"),
    ("history", "earlier turns as `messages`"),
    ("tools", "`messages`, or `prompt` and `completion`, beside them"),
    ("weight", "`weight` in the messages it is about, 0 or 1; for whole files a weight in data.train"),
    ("loss_weight", "`weight` in the messages it is about, 0 or 1"),
    ("functions", "`tools`"),
    ("function_call", "`tool_calls` in a message"),
    ("chosen", "an answer to learn from; preferences are not trained"),
    ("rejected", "an answer to learn from; preferences are not trained"),
    ("label", "rows to learn from alone; verdicts are not trained"),
    ("kto_tag", "rows to learn from alone; verdicts are not trained"),
    ("images", "text only"),
    ("image", "text only"),
    ("videos", "text only"),
    ("audios", "text only"),
    ("train_on_input", "data.supervise = \"all\""),
    ("input_ids", "text: rows become tokens here"),
    ("labels", "text: rows become tokens here"),
    ("attention_mask", "text: rows become tokens here"),
    ("completion_mask", "`weight` in the messages it is about, 0 or 1"),
    ("assistant_masks", "`weight` in the messages it is about, 0 or 1"),
    ("chat_template_kwargs", "what the chat template needs of nobody"),
    ("documents", "documents inside a message"),
];

/// Names other people use, and the line that gives a row the names used here.
const RENAMED: [(&str, &str); 9] = [
    ("question", "{prompt: .question, completion: .answer}"),
    ("query", "{prompt: .query, completion: .response}"),
    ("inputs", "{prompt: .inputs, completion: .targets}"),
    ("source", "{prompt: .source, completion: .target}"),
    ("context", "{instruction, input: .context, output: .response}"),
    ("conversation", "{messages: .conversation}"),
    ("dialogue", "{messages: .dialogue}"),
    ("content", "{text: .content}"),
    ("data", ".data[]"),
];

/// A row out of a line.
pub(super) fn json(line: &str, unused: &mut Unused) -> Result<Row> {
    let value: Value =
        serde_json::from_str(line).map_err(|e| bad("not JSON").need(NEED).have(e.to_string()))?;
    match value {
        Value::Object(object) => row(object, unused),
        _ => Err(bad("no object").need(NEED).have(show(line))),
    }
}

/// A row out of its fields; those of a layout that are null are not there.
pub(super) fn row(mut object: Map<String, Value>, unused: &mut Unused) -> Result<Row> {
    object.retain(|_, v| !v.is_null());
    let is = |layout: &&Layout| layout.has.iter().all(|name| object.contains_key(*name));
    let Some(layout) = LAYOUTS.iter().find(is) else { return Err(unknown(&object)) };
    let known = |name: &str| layout.has.contains(&name) || layout.may.contains(&name);
    for (name, value) in object.iter().filter(|(name, _)| !known(name)) {
        match SAYING.iter().find(|(other, _)| other == name) {
            // Nothing is said by an empty text.
            Some(_) if value == "" => {}
            // A class of a text is no verdict about an answer.
            Some(("label", _)) if !value.is_boolean() => *unused.entry(name.clone()).or_default() += 1,
            Some((_, need)) => {
                return Err(bad(&format!("`{name}` beside `{}`", layout.has[0]))
                    .need(*need)
                    .have(fields(&object))
                    .fix(format!(
                        "another layout, or rows without it: jq -c 'del(.{name})' IN > OUT.jsonl"
                    )));
            }
            None => *unused.entry(name.clone()).or_default() += 1,
        }
    }
    (layout.read)(&object)
}

fn unknown(object: &Map<String, Value>) -> Error {
    let e = bad("fields").need(NEED).have(fields(object));
    // The name that says most: `context` of a question is Dolly's only beside `instruction`.
    let renamed = RENAMED.iter().find(|(name, _)| {
        object.contains_key(*name) && (*name != "context" || object.contains_key("instruction"))
    });
    match renamed {
        Some((_, program)) => e.fix(format!("jq -c '{program}' IN > OUT.jsonl")),
        None => e.fix("rename the fields: jq -c '{prompt: .QUESTION, completion: .ANSWER}' IN > OUT.jsonl"),
    }
}

/// A text that a row cannot do without.
fn text<'a>(object: &'a Map<String, Value>, name: &str) -> Result<&'a str> {
    match object.get(name) {
        Some(Value::String(text)) if !text.trim().is_empty() => Ok(text),
        Some(Value::String(_)) => Err(bad(&format!("`{name}`"))
            .need("a text that is not empty")
            .have("an empty one")
            .fix(format!("leave such rows out: jq -c 'select(.{name} != \"\")' IN > OUT.jsonl"))),
        Some(other) => Err(no_text(name, other)),
        None => Err(bad(&format!("`{name}`")).need("a text").have("none")),
    }
}

/// A text that may be missing or empty.
fn optional<'a>(object: &'a Map<String, Value>, name: &str) -> Result<Option<&'a str>> {
    match object.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok((!text.is_empty()).then_some(text)),
        Some(other) => Err(no_text(name, other)),
    }
}

fn no_text(name: &str, have: &Value) -> Error {
    bad(&format!("`{name}`")).need("a text").have(show(&have.to_string()))
}

fn document(object: &Map<String, Value>) -> Result<Row> {
    text(object, "text").map(|t| Row::Text(t.to_owned()))
}

/// `{"messages": [{"role", "content"}]}`.
fn messages(object: &Map<String, Value>) -> Result<Row> {
    conversation(object, turns::of(&object["messages"], "messages")?)
}

/// `{"conversations": [{"from", "value"}]}`.
fn sharegpt(object: &Map<String, Value>) -> Result<Row> {
    let mut chat = turns::of(&object["conversations"], "conversations")?;
    if let Some(system) = optional(object, "system")? {
        if chat.messages.first().is_some_and(|m| m.role == "system") {
            return Err(bad("`system`")
                .need("it once")
                .have("`system` and a first turn from system")
                .fix("jq -c 'del(.system)' IN > OUT.jsonl"));
        }
        chat.put_first(Message::new("system", system));
    }
    conversation(object, chat)
}

/// `{"instruction", "input", "output"}`: the input follows the instruction on a line of its own.
fn alpaca(object: &Map<String, Value>) -> Result<Row> {
    let mut chat = Chat::default();
    if let Some(system) = optional(object, "system")? {
        chat.messages.push(Message::new("system", system));
    }
    for turn in earlier(object)? {
        chat.messages.extend(turn);
    }
    let instruction = text(object, "instruction")?;
    let asked = match optional(object, "input")? {
        Some(input) => format!("{instruction}\n{input}"),
        None => instruction.to_owned(),
    };
    chat.messages.extend(turn(&asked, text(object, "output")?).messages);
    Ok(Row::Chat(chat))
}

/// `history`: pairs of a prompt and an answer, before the instruction.
fn earlier(object: &Map<String, Value>) -> Result<Vec<[Message; 2]>> {
    let wrong =
        |have: &Value| bad("`history`").need("a list of [prompt, answer]").have(show(&have.to_string()));
    let list = match object.get("history") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong(other)),
    };
    let pair = |pair: &Value| match pair.as_array().map(Vec::as_slice) {
        Some([Value::String(prompt), Value::String(answer)]) => {
            Ok([Message::new("user", prompt), Message::new("assistant", answer)])
        }
        _ => Err(wrong(pair)),
    };
    list.iter().map(pair).collect()
}

/// `{"prompt", "completion"}`: both texts, or both lists of messages, of which the completion's are learnt.
fn pair(object: &Map<String, Value>) -> Result<Row> {
    let name = if object.contains_key("completion") { "completion" } else { "response" };
    if object.contains_key("completion") && object.contains_key("response") {
        return Err(bad("fields").need("`completion` or `response`").have("both"));
    }
    match (&object["prompt"], &object[name]) {
        (Value::Array(_), Value::Array(_)) => {
            let mut chat = turns::of(&object["prompt"], "prompt")?;
            let asked = chat.messages.iter().enumerate().filter(|(_, m)| m.role == "assistant");
            chat.unlearnt = asked.map(|(i, _)| i).collect();
            let answer = turns::of(&object[name], name)?;
            if !answer.messages.iter().any(|m| m.role == "assistant") {
                return Err(bad(&format!("`{name}`")).need("an assistant's turn").have("none"));
            }
            let first = chat.messages.len();
            chat.unlearnt.extend(answer.unlearnt.iter().map(|i| i + first));
            chat.messages.extend(answer.messages);
            conversation(object, chat)
        }
        (Value::Array(_), _) | (_, Value::Array(_)) => Err(bad(&format!("`prompt` and `{name}`"))
            .need("two texts, or two lists of messages")
            .have("one of each")
            .fix("give both as messages: [{\"role\", \"content\"}]")),
        _ => {
            let answer = match object.get(name) {
                Some(Value::String(answer)) => answer,
                Some(other) => return Err(no_text(name, other)),
                None => return Err(bad(&format!("`{name}`")).need("a text").have("none")),
            };
            conversation(object, turn(text(object, "prompt")?, answer))
        }
    }
}

/// With the tools of a row; some turn must be the assistant's.
fn conversation(object: &Map<String, Value>, mut chat: Chat) -> Result<Row> {
    chat.tools = tools(object)?;
    if !chat.messages.iter().any(|m| m.role == "assistant") {
        let roles: Vec<_> = chat.messages.iter().take(4).map(|m| m.role.as_str()).collect();
        return Err(bad("a conversation")
            .need("at least one assistant turn")
            .have(match roles.as_slice() {
                [] => "no turns".to_owned(),
                roles => format!("{} turns: {}", chat.messages.len(), roles.join(", ")),
            })
            .fix("leave such rows out: there is nothing to learn in them"));
    }
    Ok(Row::Chat(chat))
}

/// A list, or a text that is one, as tables of columns keep it.
fn tools(object: &Map<String, Value>) -> Result<Option<Value>> {
    let wrong = |have: &dyn std::fmt::Display| {
        bad("`tools`").need("a list of functions, or a text that is one").have(show(&have.to_string()))
    };
    match object.get("tools") {
        None => Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Array(list)) => Ok(Some(Value::Array(list)).filter(|v| v != &json!([]))),
            _ => Err(wrong(text)),
        },
        Some(Value::Array(list)) if list.is_empty() => Ok(None),
        Some(list @ Value::Array(_)) => Ok(Some(list.clone())),
        Some(other) => Err(wrong(other)),
    }
}

impl Chat {
    fn put_first(&mut self, message: Message) {
        self.messages.insert(0, message);
        self.unlearnt.iter_mut().for_each(|i| *i += 1);
    }
}

pub(super) fn turn(prompt: &str, answer: &str) -> Chat {
    let messages = vec![Message::new("user", prompt), Message::new("assistant", answer)];
    Chat { messages, ..Chat::default() }
}

fn fields(object: &Map<String, Value>) -> String {
    let names: Vec<_> = object.keys().take(8).map(String::as_str).collect();
    if names.is_empty() { "none".into() } else { show(&names.join(", ")) }
}

pub(super) fn show(text: &str) -> String {
    let short: String = text.chars().take(60).collect();
    if short.len() < text.len() { format!("{short}...") } else { short }
}

pub(super) fn bad(what: &str) -> Error {
    Error::new(Code::Container, what)
}
