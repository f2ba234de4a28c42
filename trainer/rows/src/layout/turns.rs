//! The turns of a conversation, by whoever names them.
use super::{Chat, bad, show};
use q4_core::{Error, Result};
use q4_text::template::Message;
use serde_json::{Map, Value, json};

/// Who speaks, in the words of ShareGPT and its heirs.
const SPEAKERS: [(&str, &str); 12] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("model", "assistant"),
    ("assistant", "assistant"),
    ("system", "system"),
    ("observation", "tool"),
    ("tool", "tool"),
    ("function_response", "tool"),
];

/// Fields of a turn that would change what is learnt of it.
const SAYING: [&str; 6] = ["train", "training", "train_detail", "training_detail", "loss", "loss_weight"];

/// The turns of a field, `role` and `content` or `from` and `value`.
pub(super) fn of(list: &Value, field: &str) -> Result<Chat> {
    let need = "a list of objects with role and content (or from and value)";
    let Value::Array(list) = list else {
        return Err(bad(&format!("`{field}`")).need(need).have(show(&list.to_string())));
    };
    let mut chat = Chat::default();
    for (i, turn) in list.iter().enumerate() {
        let within = |e: Error| e.within(format!("`{field}`[{i}]"));
        let Value::Object(turn) = turn else {
            return Err(within(bad("a turn").need(need).have(show(&turn.to_string()))));
        };
        let mut turn = turn.clone();
        turn.retain(|_, v| !v.is_null());
        let learnt = weight(&mut turn).map_err(within)?;
        let message = message(turn).map_err(within)?;
        if !learnt {
            chat.unlearnt.push(i);
        }
        chat.messages.push(message);
    }
    Ok(chat)
}

/// Whether a turn is learnt: `weight`, 0 or 1.
fn weight(turn: &mut Map<String, Value>) -> Result<bool> {
    if let Some(name) = SAYING.iter().find(|name| turn.contains_key(**name)) {
        return Err(bad(&format!("`{name}` of a turn"))
            .need("`weight`, 0 or 1")
            .have(show(&turn[*name].to_string()))
            .fix("name it `weight`: 0 is read and not learnt"));
    }
    match turn.shift_remove("weight").map(|w| (w.as_f64(), w)) {
        None | Some((Some(1.0), _)) => Ok(true),
        Some((Some(0.0), _)) => Ok(false),
        Some((_, other)) => Err(bad("`weight` of a message")
            .need("0 or 1")
            .have(show(&other.to_string()))
            .fix("0 is read and not learnt; for whole files a weight in data.train")),
    }
}

fn message(mut turn: Map<String, Value>) -> Result<Message> {
    match (turn.contains_key("role"), turn.shift_remove("from"), turn.shift_remove("value")) {
        (false, Some(from), Some(value)) => spoken(&from, &value, turn),
        (true, None, None) => written(turn),
        (_, from, value) => {
            let mut names: Vec<&str> = turn.keys().map(String::as_str).collect();
            names.extend(from.map(|_| "from"));
            names.extend(value.map(|_| "value"));
            let have = if names.is_empty() { "nothing".into() } else { show(&names.join(", ")) };
            Err(bad("a turn").need("role and content, or from and value").have(have))
        }
    }
}

/// `role` and `content`; a content of parts is their texts.
fn written(mut turn: Map<String, Value>) -> Result<Message> {
    if let Some(Value::Array(parts)) = turn.get("content") {
        let mut text = String::new();
        for part in parts {
            match (part["type"].as_str(), part["text"].as_str()) {
                (Some("text"), Some(part)) => text += part,
                _ => return Err(bad("`content`").need("text only").have(show(&part.to_string()))),
            }
        }
        turn.insert("content".into(), text.into());
    }
    if turn.get("role") == Some(&json!("assistant"))
        && !turn.contains_key("content")
        && !turn.contains_key("tool_calls")
    {
        return Err(bad("an assistant's turn").need("content, or tool_calls").have("neither"));
    }
    serde_json::from_value(Value::Object(turn))
        .map_err(|e| bad("a turn").need("role and content as texts").have(e.to_string()))
}

/// `from` and `value`.
fn spoken(from: &Value, value: &Value, rest: Map<String, Value>) -> Result<Message> {
    let text = value.as_str().ok_or_else(|| bad("`value`").need("a text").have(show(&value.to_string())))?;
    if let Some(name) = rest.keys().find(|n| ["tool_calls", "content", "reasoning_content"].contains(&&***n))
    {
        return Err(bad(&format!("`{name}` beside `value`")).need("role and content").have("from and value"));
    }
    let speaker = from.as_str().unwrap_or_default();
    if speaker == "function_call" {
        return called(text);
    }
    match SPEAKERS.iter().find(|(name, _)| *name == speaker) {
        Some((_, role)) => Ok(Message::new(*role, text)),
        None => {
            let names: Vec<_> = SPEAKERS.iter().map(|(name, _)| *name).collect();
            Err(bad("`from`")
                .need(format!("one of {}, function_call", names.join(", ")))
                .have(show(&from.to_string())))
        }
    }
}

/// A turn that calls functions: one `{"name", "arguments"}` as a text, or a list of them.
fn called(text: &str) -> Result<Message> {
    let wrong = || {
        bad("a function_call").need("{\"name\", \"arguments\"} as a text, or a list of them").have(show(text))
    };
    let calls = match serde_json::from_str(text).map_err(|_| wrong())? {
        Value::Array(calls) if !calls.is_empty() => calls,
        call @ Value::Object(_) => vec![call],
        _ => return Err(wrong()),
    };
    let call = |call: Value| match (call["name"].as_str(), call.get("arguments")) {
        (Some(name), Some(arguments)) => {
            Ok(json!({ "type": "function", "function": { "name": name, "arguments": arguments } }))
        }
        _ => Err(wrong()),
    };
    let calls = calls.into_iter().map(call).collect::<Result<Vec<_>>>()?;
    Ok(Message { tool_calls: Some(calls.into()), ..Message::new("assistant", "") })
}
