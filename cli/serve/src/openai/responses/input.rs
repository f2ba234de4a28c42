//! Items as turns of a conversation.
use crate::ask::{Ask, MOST_LIKELY, Prompt, Talk, arguments, call, function, text_of};
use crate::constraint::{Constraint, unite};
use crate::fields::Fields;
use crate::openai::{chat, tools};
use crate::refusal::{Refusal, shown};
use q4_model::template::Message;
use serde_json::Value;

const TEXTS: &[&str] = &["input_text", "output_text", "text", "refusal"];

/// What is asked, and whether event by event.
pub fn read(body: &Value) -> Result<(Ask, bool), Refusal> {
    let f = Fields::of("", body)?;
    let mut ask = Ask::new(Prompt::Talk(Talk::default()));
    ask.read_shared(&f)?;
    ask.max_tokens = f.count("max_output_tokens", 1..=usize::MAX)?;
    for name in ["previous_response_id", "conversation"] {
        let what = format!("{name}: nothing is kept here between requests; send the whole conversation");
        f.neutral(name, |_| false).map_err(|refusal| Refusal { message: what, ..refusal })?;
    }
    f.neutral("background", |v| *v == false)?;
    ask.logprobs = logprobs(&f)?;
    truncation(&f)?;
    if let Some(format) = f.object("text")?.and_then(|text| text.object("format").transpose()).transpose()? {
        unite(&mut ask.constraint, Constraint::of_format(&format)?)?;
    }
    let tools = tools::read(&mut ask, &f, tool)?;
    let mut variables = chat::variables(&f)?;
    if let Some(effort) = f.object("reasoning")?.map(|r| r.text("effort")).transpose()?.flatten() {
        chat::think(&mut variables, effort);
    }
    ask.prompts = vec![Prompt::Talk(Talk { messages: messages(&f)?, tools, variables })];
    Ok((ask, f.flag("stream")?.unwrap_or(false)))
}

/// What an answer may be asked to include beside what it has anyway.
const LOGPROBS: &str = "message.output_text.logprobs";
/// Known to clients, and nothing here: thoughts are told as they are, so nothing has to come back encrypted,
/// and no tool that has results or pictures of its own runs here.
const NOTHING: [&str; 7] = [
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];

/// Likely tokens to tell at each place of the text.
fn logprobs(f: &Fields) -> Result<Option<usize>, Refusal> {
    let mut is_asked = false;
    for (path, value) in f.list("include")?.unwrap_or_default() {
        match value.as_str() {
            Some(LOGPROBS) => is_asked = true,
            Some(name) if NOTHING.contains(&name) => {}
            _ => {
                let need = format!("{LOGPROBS}, or what has no effect here: {}", NOTHING.join(", "));
                return Err(Refusal::field(&path, &need, shown(value)));
            }
        }
    }
    let top = f.count("top_logprobs", 0..=MOST_LIKELY)?;
    if !is_asked && top.is_some_and(|top| top > 0) {
        return Err(f.wrong("top_logprobs", &format!("include to have {LOGPROBS}")));
    }
    Ok(is_asked.then_some(top.unwrap_or(0)))
}

/// A conversation that is too long is refused; which turns to leave out is not for the server to choose.
fn truncation(f: &Fields) -> Result<(), Refusal> {
    match f.text("truncation")? {
        None | Some("disabled") => Ok(()),
        Some("auto") => {
            let what = "truncation: no turns are left out here, have the text \"auto\"; send disabled, and \
                        less of the conversation where it is refused";
            Err(Refusal::unsupported("truncation", what))
        }
        Some(_) => Err(f.wrong("truncation", "disabled")),
    }
}

fn tool(tool: &Fields) -> Result<Option<Value>, Refusal> {
    if tool.needed_text("type")? != "function" {
        return Ok(None);
    }
    let name = tool.needed_text("name")?;
    let parameters = tool.object("parameters")?.and_then(|_| tool.get("parameters"));
    Ok(Some(function(name, tool.text("description")?, parameters)))
}

fn messages(f: &Fields) -> Result<Vec<Message>, Refusal> {
    let mut turns = Turns::default();
    if let Some(instructions) = f.text("instructions")?.filter(|text| !text.is_empty()) {
        turns.0.push(Message::new("system", instructions));
    }
    match f.get("input") {
        Some(Value::String(text)) => turns.0.push(Message::new("user", text)),
        Some(Value::Array(items)) if !items.is_empty() => {
            for item in f.objects("input")?.unwrap_or_default() {
                turns.add(&item)?;
            }
        }
        _ => return Err(f.wrong("input", "a text, or a list of at least one item")),
    }
    Ok(turns.0)
}

/// Turns so far; what an assistant thinks, says and calls in a row is one of them.
#[derive(Default)]
struct Turns(Vec<Message>);

impl Turns {
    fn add(&mut self, item: &Fields) -> Result<(), Refusal> {
        match item.text("type")?.unwrap_or("message") {
            "message" => self.message(item)?,
            "reasoning" => {
                let content = text_of(item, "content", &["reasoning_text", "text"])?;
                let thought = match content.is_empty() {
                    true => text_of(item, "summary", &["summary_text"])?,
                    false => content,
                };
                if !thought.is_empty() {
                    self.assistant().reasoning_content = Some(thought);
                }
            }
            "function_call" => {
                let id = item.text("call_id")?.or(item.text("id")?).unwrap_or_default();
                let given = arguments(item.text("arguments")?.unwrap_or("{}"));
                let made = call(id, item.needed_text("name")?, given);
                match self.assistant().tool_calls.get_or_insert_with(|| Value::Array(Vec::new())) {
                    Value::Array(calls) => calls.push(made),
                    other => *other = Value::Array(vec![made]),
                }
            }
            "function_call_output" => {
                let mut message = Message::new("tool", text_of(item, "output", TEXTS)?);
                message.extra.insert("tool_call_id".to_owned(), item.needed_text("call_id")?.into());
                self.0.push(message);
            }
            "item_reference" => {
                let what = format!("{}: nothing is kept here between requests; send the item", item.at());
                return Err(Refusal::unsupported(item.at(), what));
            }
            _ => {
                let need = "message, reasoning, function_call or function_call_output";
                return Err(item.wrong("type", need));
            }
        }
        Ok(())
    }

    fn message(&mut self, item: &Fields) -> Result<(), Refusal> {
        let text = text_of(item, "content", TEXTS)?;
        match item.needed_text("role")? {
            "assistant" => {
                let turn = self.assistant();
                let gap = if turn.content.is_empty() { "" } else { "\n" };
                turn.content = format!("{}{gap}{text}", turn.content);
            }
            "system" | "developer" => self.0.push(Message::new("system", text)),
            "user" => self.0.push(Message::new("user", text)),
            _ => return Err(item.wrong("role", "system, developer, user or assistant")),
        }
        Ok(())
    }

    /// The turn of an assistant that goes on.
    fn assistant(&mut self) -> &mut Message {
        if self.0.last().is_none_or(|last| last.role != "assistant") {
            self.0.push(Message::new("assistant", ""));
        }
        let last = self.0.len() - 1;
        &mut self.0[last]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn items_of_an_assistant_in_a_row_are_one_turn() {
        let body = json!({"instructions": "Be brief.", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "time?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
            {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{\"zone\":1}"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        ]});
        let (ask, _) = read(&body).expect("valid");
        let Prompt::Talk(talk) = &ask.prompts[0] else { panic!("{ask:?}") };
        let roles: Vec<&str> = talk.messages.iter().map(|m| m.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool"]);
        let turn = &talk.messages[2];
        assert_eq!((turn.content.as_str(), turn.reasoning_content.as_deref()), ("wait", Some("hm")));
        assert_eq!(turn.tool_calls.as_ref().expect("calls")[0]["function"]["arguments"]["zone"], 1);
    }
}
