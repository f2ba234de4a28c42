//! `POST /v1/chat/completions`.
use super::{Form, finish_reason, likely, read_shared, tools, usage, usage_of};
use crate::answer::{Happened, Part, Usage};
use crate::ask::{Ask, MOST_LIKELY, Prompt, Talk, arguments, call, text_of};
use crate::asked::Asked;
use crate::dialect::{Dialect, json_of};
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::server::Server;
use crate::stream::{Frame, Render, respond};
use crate::trail::Trail;
use crate::whole::{Block, Whole};
use crate::words::{name, now};
use axum::response::Response;
use q4_model::batch::Weighed;
use q4_model::template::Message;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::Arc;

/// Answers a request.
///
/// # Errors
/// Why it is not answered.
pub async fn post(server: Arc<Server>, trail: Arc<Trail>, asked: Asked) -> Result<Response, Refusal> {
    let Asked { body, held, work } = asked;
    let (ask, form) = read(&body)?;
    drop(body);
    let is_weighed = ask.logprobs.is_some();
    let answers = server.ask(ask, &trail, held, work).await?;
    let chunks = Chunks::new(server.clone(), answers.len(), form, is_weighed);
    if form.stream {
        return Ok(respond(answers, chunks));
    }
    let wholes = answers.all().await?;
    let choices: Vec<Value> = wholes.iter().enumerate().map(|(i, whole)| chunks.whole(i, whole)).collect();
    Ok(json_of(&json!({
        "id": chunks.id,
        "object": "chat.completion",
        "created": chunks.created,
        "model": server.served.name,
        "choices": choices,
        "usage": usage_of(&wholes, wholes.len()),
    })))
}

fn read(body: &Value) -> Result<(Ask, Form), Refusal> {
    let f = Fields::of("", body)?;
    let mut ask = Ask::new(Prompt::Talk(Talk::default()));
    read_shared(&mut ask, &f)?;
    let most = f.count("max_completion_tokens", 1..=usize::MAX)?;
    ask.max_tokens = most.or(f.count("max_tokens", 1..=usize::MAX)?);
    let top = f.count("top_logprobs", 0..=MOST_LIKELY)?;
    ask.logprobs = f.flag("logprobs")?.unwrap_or(false).then_some(top.unwrap_or(0));
    if ask.logprobs.is_none() && top.is_some_and(|top| top > 0) {
        return Err(f.wrong("top_logprobs", "logprobs to be true"));
    }
    let is_empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    f.neutral("functions", is_empty)?;
    f.neutral("modalities", |v| *v == json!(["text"]))?;
    let tools = tools::read(&mut ask, &f, tool)?;
    let talk = Talk { messages: messages(&f)?, tools, variables: variables(&f)? };
    ask.prompts = vec![Prompt::Talk(talk)];
    Ok((ask, Form::read(&f)?))
}

/// The conversation alone.
pub fn talk(f: &Fields) -> Result<Talk, Refusal> {
    let tools = tools::read(&mut Ask::new(Prompt::Talk(Talk::default())), f, tool)?;
    Ok(Talk { messages: messages(f)?, tools, variables: variables(f)? })
}

/// Variables of the template.
pub(super) fn variables(f: &Fields) -> Result<Map<String, Value>, Refusal> {
    let mut variables = match f.object("chat_template_kwargs")? {
        Some(given) => given.map().clone(),
        None => Map::new(),
    };
    if let Some(effort) = f.text("reasoning_effort")? {
        think(&mut variables, effort);
    }
    Ok(variables)
}

/// What templates make of an effort: some know its names, others whether to think at all.
pub(super) fn think(variables: &mut Map<String, Value>, effort: &str) {
    variables.entry("reasoning_effort").or_insert_with(|| effort.into());
    if effort == "none" {
        variables.entry("enable_thinking").or_insert_with(|| false.into());
    }
}

fn tool(tool: &Fields) -> Result<Option<Value>, Refusal> {
    if tool.text("type")?.is_some_and(|kind| kind != "function") {
        return Ok(None);
    }
    let function = tool.object("function")?.ok_or_else(|| tool.wrong("function", "an object"))?;
    function.needed_text("name")?;
    Ok(Some(json!({"type": "function", "function": function.map()})))
}

fn messages(f: &Fields) -> Result<Vec<Message>, Refusal> {
    let list = f.objects("messages")?.filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| f.wrong("messages", "a list of at least one message"))?;
    list.iter().map(message).collect()
}

fn message(f: &Fields) -> Result<Message, Refusal> {
    let role = match f.needed_text("role")? {
        "developer" => "system",
        role @ ("system" | "user" | "assistant" | "tool") => role,
        _ => return Err(f.wrong("role", "system, developer, user, assistant or tool")),
    };
    let mut message = Message::new(role, text_of(f, "content", &["text", "refusal"])?);
    if role == "assistant" {
        let thoughts = f.text("reasoning_content")?.or(f.text("reasoning")?);
        message.reasoning_content = thoughts.map(str::to_owned);
        message.tool_calls = calls(f)?;
    }
    for field in ["name", "tool_call_id"] {
        if let Some(text) = f.text(field)? {
            message.extra.insert(field.to_owned(), text.into());
        }
    }
    Ok(message)
}

fn calls(f: &Fields) -> Result<Option<Value>, Refusal> {
    let mut calls = Vec::new();
    for made in f.objects("tool_calls")?.unwrap_or_default() {
        let function = made.object("function")?.ok_or_else(|| made.wrong("function", "an object"))?;
        let given = match function.get("arguments") {
            Some(Value::String(text)) => arguments(text),
            Some(object @ Value::Object(_)) => object.clone(),
            None => json!({}),
            Some(_) => return Err(function.wrong("arguments", "a JSON text")),
        };
        calls.push(call(made.text("id")?.unwrap_or_default(), function.needed_text("name")?, given));
    }
    Ok((!calls.is_empty()).then_some(Value::Array(calls)))
}

/// Writes answers to a conversation.
struct Chunks {
    id: String,
    created: u64,
    form: Form,
    is_weighed: bool,
    server: Arc<Server>,
    /// Tokens of every answer that no event has told yet.
    untold: Vec<Vec<Weighed>>,
    usages: Vec<Usage>,
}

impl Chunks {
    fn new(server: Arc<Server>, answers: usize, form: Form, is_weighed: bool) -> Self {
        Self {
            id: name("chatcmpl-"),
            created: now(),
            form,
            is_weighed,
            server,
            untold: vec![Vec::new(); answers],
            usages: vec![Usage::default(); answers],
        }
    }

    fn whole(&self, index: usize, whole: &Whole) -> Value {
        let calls: Vec<Value> = whole
            .blocks
            .iter()
            .filter_map(|block| match block {
                Block::Call { id, name, arguments, .. } => {
                    Some(call(&format!("call_{id}"), name, arguments.as_str().into()))
                }
                _ => None,
            })
            .collect();
        let text = whole.text();
        let is_silent = text.is_empty() && !calls.is_empty();
        let content = if is_silent { Value::Null } else { text.into() };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        let thoughts = whole.thoughts();
        if !thoughts.is_empty() {
            message["reasoning"] = thoughts.as_str().into();
            message["reasoning_content"] = thoughts.into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        let logprobs = if self.is_weighed { self.logprobs(&whole.tokens) } else { Value::Null };
        let finish = whole.end.as_ref().map(|end| finish_reason(&end.finish));
        json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
    }

    fn logprobs(&self, tokens: &[Weighed]) -> Value {
        likely::chat(&self.server.served.tokenizer, tokens)
    }

    fn chunk(&self, choices: Value) -> Value {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.server.served.name,
            "choices": choices,
        });
        if self.form.usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn delta(&mut self, choice: usize, delta: Value, finish: Option<&str>) -> Frame {
        let tokens = std::mem::take(&mut self.untold[choice]);
        let logprobs = if tokens.is_empty() { Value::Null } else { self.logprobs(&tokens) };
        Frame::data(
            &self.chunk(
                json!([{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]),
            ),
        )
    }

    fn parts(&mut self, choice: usize, parts: Vec<Part>, out: &mut VecDeque<Frame>) {
        for part in parts {
            let delta = match part {
                Part::Text(text) => json!({"content": text}),
                Part::Thought(text) => json!({"reasoning": text, "reasoning_content": text}),
                Part::Call { index, id, name } => {
                    let mut begun = call(&format!("call_{id}"), &name, "".into());
                    begun["index"] = index.into();
                    json!({"tool_calls": [begun]})
                }
                Part::Arguments { index, delta } => {
                    json!({"tool_calls": [{"index": index, "function": {"arguments": delta}}]})
                }
                Part::Called { .. } => continue,
            };
            out.push_back(self.delta(choice, delta, None));
        }
    }
}

impl Render for Chunks {
    fn begin(&mut self, _: &mut VecDeque<Frame>) {}

    fn happened(&mut self, choice: usize, what: Happened, out: &mut VecDeque<Frame>) {
        match what {
            Happened::Started { .. } => {
                out.push_back(self.delta(choice, json!({"role": "assistant", "content": ""}), None));
            }
            Happened::Step { parts, token } => {
                self.untold[choice].extend(token);
                self.parts(choice, parts, out);
            }
            Happened::Ended { parts, end } => {
                self.parts(choice, parts, out);
                self.usages[choice] = end.usage;
                out.push_back(self.delta(choice, json!({}), Some(finish_reason(&end.finish))));
            }
        }
    }

    fn end(&mut self, out: &mut VecDeque<Frame>) {
        if self.form.usage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = usage(&self.usages, self.usages.len());
            out.push_back(Frame::data(&chunk));
        }
        out.push_back(Frame { event: None, data: "[DONE]".to_owned() });
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut VecDeque<Frame>) {
        out.push_back(Frame::data(&Dialect::OpenAi.document(refusal)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{calls, engine::Scripted};
    use crate::{Options, server::Server};

    fn chunks() -> Chunks {
        let engine = Arc::new(Scripted::saying(""));
        let server = Server::new(engine.served.clone(), engine, Options::default());
        Chunks::new(server, 1, Form { stream: true, usage: false }, false)
    }

    #[test]
    fn calls_grow_by_deltas() {
        insta::assert_snapshot!(calls::rendered(chunks()));
    }

    #[test]
    fn calls_come_beside_text_and_thoughts() {
        let whole = chunks().whole(0, &calls::whole());
        insta::assert_snapshot!(serde_json::to_string_pretty(&whole).expect("JSON"));
    }

    #[test]
    fn a_call_alone_has_no_content() {
        let mut whole = calls::whole();
        whole.blocks.drain(..2);
        assert_eq!(chunks().whole(0, &whole)["message"]["content"], Value::Null);
    }
}
