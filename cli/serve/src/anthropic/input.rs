//! Blocks as turns of a conversation.
use crate::ask::{Ask, MOST_STOPS, Prompt, Talk, call, function, no_text, text_of};
use crate::constraint::{Constraint, Demand, unite};
use crate::fields::Fields;
use crate::refusal::Refusal;
use q4_model::template::Message;
use serde_json::{Map, Value};

/// What is asked.
pub fn read(f: &Fields) -> Result<Ask, Refusal> {
    let talk = talk(f)?;
    let names: Vec<&Value> = match &talk.tools {
        Some(Value::Array(tools)) => tools.iter().map(|tool| &tool["function"]["name"]).collect(),
        _ => Vec::new(),
    };
    if talk.messages.last().is_some_and(|last| last.role == "assistant") {
        return Err(
            f.wrong("messages", "a last message that is not the assistant's: none is gone on with here")
        );
    }
    f.neutral("output_format", |_| false)?;
    let (constraint, parallel_calls) = choice(f, &names)?;
    let mut ask = Ask::new(Prompt::Talk(Talk::default()));
    ask.read_shared(f)?;
    ask.max_tokens = f.count("max_tokens", 1..=usize::MAX)?;
    if ask.max_tokens.is_none() {
        return Err(f.wrong("max_tokens", "a whole number, at least 1"));
    }
    ask.stop = f.texts("stop_sequences", MOST_STOPS)?;
    ask.constraint = constraint;
    if let Some(format) =
        f.object("output_config")?.and_then(|c| c.object("format").transpose()).transpose()?
    {
        unite(&mut ask.constraint, Constraint::of_format(&format)?)?;
    }
    ask.parallel_calls = parallel_calls;
    ask.prompts = vec![Prompt::Talk(talk)];
    Ok(ask)
}

/// The conversation alone.
pub fn talk(f: &Fields) -> Result<Talk, Refusal> {
    let mut messages = Vec::new();
    if f.get("system").is_some() {
        messages.push(Message::new("system", text_of(f, "system", &["text"])?));
    }
    let turns = f.objects("messages")?.filter(|turns| !turns.is_empty());
    for turn in turns.ok_or_else(|| f.wrong("messages", "a list of at least one message"))? {
        add(&mut messages, &turn)?;
    }
    Ok(Talk { messages, tools: tools(f)?, variables: variables(f)? })
}

fn variables(f: &Fields) -> Result<Map<String, Value>, Refusal> {
    let mut variables = Map::new();
    if let Some(thinking) = f.object("thinking")? {
        let thinks = match thinking.needed_text("type")? {
            "enabled" | "adaptive" => true,
            "disabled" => false,
            _ => return Err(thinking.wrong("type", "enabled, adaptive or disabled")),
        };
        variables.insert("enable_thinking".to_owned(), thinks.into());
    }
    Ok(variables)
}

/// Tools with a schema; those that a service would run itself are passed over. None are shown where none may
/// be called.
fn tools(f: &Fields) -> Result<Option<Value>, Refusal> {
    let mut tools = Vec::new();
    for tool in f.objects("tools")?.unwrap_or_default() {
        if tool.text("type")?.is_some_and(|kind| kind != "custom") {
            continue;
        }
        let schema = tool.object("input_schema")?.and_then(|_| tool.get("input_schema"));
        tools.push(function(tool.needed_text("name")?, tool.text("description")?, schema));
    }
    let is_none = match f.object("tool_choice")? {
        Some(choice) => choice.needed_text("type")? == "none",
        None => false,
    };
    Ok((!tools.is_empty() && !is_none).then_some(Value::Array(tools)))
}

/// What `tool_choice` forces, and whether several calls may be made.
fn choice(f: &Fields, names: &[&Value]) -> Result<(Option<Constraint>, bool), Refusal> {
    let Some(choice) = f.object("tool_choice")? else { return Ok((None, true)) };
    let called = match choice.needed_text("type")? {
        "auto" | "none" => None,
        "any" if names.is_empty() => return Err(choice.wrong("type", "tools to choose from")),
        "any" => Some(None),
        "tool" => {
            let name = choice.needed_text("name")?;
            if !names.iter().any(|known| *known == name) {
                return Err(choice.wrong("name", "the name of one of the tools"));
            }
            Some(Some(name.to_owned()))
        }
        _ => return Err(choice.wrong("type", "auto, any, tool or none")),
    };
    let constraint = called.map(|named| Constraint::of(f, "tool_choice", Demand::Call(named)));
    Ok((constraint, !choice.flag("disable_parallel_tool_use")?.unwrap_or(false)))
}

fn add(messages: &mut Vec<Message>, turn: &Fields) -> Result<(), Refusal> {
    let role = match turn.needed_text("role")? {
        role @ ("user" | "assistant" | "system") => role,
        _ => return Err(turn.wrong("role", "user or assistant")),
    };
    let blocks = match turn.get("content") {
        Some(Value::String(text)) => {
            messages.push(Message::new(role, text));
            return Ok(());
        }
        Some(Value::Array(_)) => turn.objects("content")?.unwrap_or_default(),
        _ => return Err(turn.wrong("content", "a text or a list of blocks")),
    };
    let mut said = Message::new(role, "");
    let mut texts: Vec<&str> = Vec::new();
    let (mut thoughts, mut calls) = (Vec::new(), Vec::new());
    let mut is_result = false;
    for block in &blocks {
        match (block.needed_text("type")?, role) {
            ("text", _) => texts.push(block.needed_text("text")?),
            ("thinking", "assistant") => thoughts.push(block.needed_text("thinking")?),
            // Nobody but its author can read it.
            ("redacted_thinking", "assistant") => {}
            ("tool_use", "assistant") => {
                let input = block.object("input")?.map(|input| input.map().clone()).unwrap_or_default();
                let (id, name) = (block.needed_text("id")?, block.needed_text("name")?);
                calls.push(call(id, name, Value::Object(input)));
            }
            ("tool_result", "user") => {
                let mut result = Message::new("tool", text_of(block, "content", &["text"])?);
                result.extra.insert("tool_call_id".to_owned(), block.needed_text("tool_use_id")?.into());
                messages.push(result);
                is_result = true;
            }
            (kind, _) => return Err(no_text(block, kind)),
        }
    }
    said.content = texts.join("\n");
    said.reasoning_content = (!thoughts.is_empty()).then(|| thoughts.join("\n"));
    said.tool_calls = (!calls.is_empty()).then_some(Value::Array(calls));
    // Results alone are no turn of the user.
    if !(is_result && texts.is_empty()) {
        messages.push(said);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn results_of_tools_become_turns_of_their_own() {
        let system = json!([{"type": "text", "text": "Be brief.", "cache_control": {}}]);
        let body = json!({"system": system, "messages": [
            {"role": "user", "content": "time?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "wait"},
                {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]},
                {"type": "text", "text": "thanks"},
            ]},
        ]});
        let talk = talk(&Fields::of("", &body).expect("an object")).expect("valid");
        let turns: Vec<(&str, &str)> =
            talk.messages.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect();
        assert_eq!(
            turns,
            [
                ("system", "Be brief."),
                ("user", "time?"),
                ("assistant", "wait"),
                ("tool", "noon"),
                ("user", "thanks")
            ]
        );
        assert_eq!(talk.messages[2].reasoning_content.as_deref(), Some("hm"));
        assert_eq!(talk.messages[3].extra["tool_call_id"], "t1");
    }
}
