//! `POST /v1/completions`: texts and tokens as they are, also weighed, as measurements ask for them.
use super::likely::Lists;
use super::{Form, finish_reason, read_shared, usage, usage_of};
use crate::answer::{Answers, Happened, Part, Usage};
use crate::ask::{Ask, MOST_LIKELY, Prompt};
use crate::asked::Asked;
use crate::dialect::{Dialect, json_of};
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::server::Server;
use crate::stream::{Frame, Render, respond};
use crate::trail::Trail;
use crate::whole::Whole;
use crate::words::{name, now};
use axum::response::Response;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::Arc;

/// Tokens of an answer where nobody says how many.
const MAX_TOKENS: usize = 16;

/// Answers a request.
///
/// # Errors
/// Why it is not answered.
pub async fn post(server: Arc<Server>, trail: Arc<Trail>, asked: Asked) -> Result<Response, Refusal> {
    let Asked { body, held, work } = asked;
    let (ask, form) = read(&body)?;
    drop(body);
    let (echo, is_weighed, each) = (ask.echo, ask.logprobs.is_some(), ask.n);
    let answers = server.ask(ask, &trail, held, work).await?;
    let mut chunks = Chunks::new(&answers, form, echo, is_weighed, each);
    if form.stream {
        return Ok(respond(answers, chunks));
    }
    let wholes = answers.all().await?;
    let choices: Vec<Value> = wholes.iter().enumerate().map(|(i, whole)| chunks.whole(i, whole)).collect();
    let mut document = chunks.chunk(choices.into());
    document["usage"] = usage_of(&wholes, each);
    Ok(json_of(&document))
}

fn read(body: &Value) -> Result<(Ask, Form), Refusal> {
    let f = Fields::of("", body)?;
    let mut ask = Ask::new(Prompt::Text(String::new()));
    read_shared(&mut ask, &f)?;
    ask.prompts = prompts(&f)?;
    ask.echo = f.flag("echo")?.unwrap_or(false);
    ask.max_tokens = Some(f.count("max_tokens", 0..=usize::MAX)?.unwrap_or(MAX_TOKENS));
    if ask.max_tokens == Some(0) && !ask.echo {
        return Err(f.wrong("max_tokens", "at least 1 without echo"));
    }
    ask.logprobs = f.count("logprobs", 0..=MOST_LIKELY)?;
    f.neutral("suffix", |v| v == "")?;
    let n = ask.n;
    f.neutral("best_of", |v| v.as_u64() == Some(n as u64))?;
    Ok((ask, Form::read(&f)?))
}

/// A text, texts, tokens, or lists of tokens.
fn prompts(f: &Fields) -> Result<Vec<Prompt>, Refusal> {
    let need = "a text, a list of texts, a list of token ids, or a list of such lists";
    let wrong = || f.wrong("prompt", need);
    let list = match f.get("prompt") {
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text.clone())]),
        Some(Value::Array(list)) if !list.is_empty() => list,
        _ => return Err(wrong()),
    };
    if list[0].is_number() {
        return Ok(vec![Prompt::Ids(ids(list).ok_or_else(wrong)?)]);
    }
    list.iter()
        .map(|prompt| match prompt {
            Value::String(text) => Ok(Prompt::Text(text.clone())),
            Value::Array(inner) => ids(inner).map(Prompt::Ids).ok_or_else(wrong),
            _ => Err(wrong()),
        })
        .collect()
}

fn ids(list: &[Value]) -> Option<Vec<u32>> {
    list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

/// Writes continuations.
struct Chunks {
    id: String,
    created: u64,
    form: Form,
    is_weighed: bool,
    each: usize,
    server: Arc<Server>,
    /// The prompts that are repeated; none without `echo`.
    echoes: Vec<String>,
    lists: Vec<Lists>,
    usages: Vec<Usage>,
}

impl Chunks {
    fn new(answers: &Answers, form: Form, echo: bool, is_weighed: bool, each: usize) -> Self {
        let echoes = answers.prompts().iter().filter(|_| echo).map(|given| given.text.clone()).collect();
        Self {
            id: name("cmpl-"),
            created: now(),
            form,
            is_weighed,
            each,
            server: answers.server().clone(),
            echoes,
            lists: (0..answers.len()).map(|_| Lists::default()).collect(),
            usages: vec![Usage::default(); answers.len()],
        }
    }

    fn echo(&self, choice: usize) -> &str {
        self.echoes.get(choice / self.each).map_or("", String::as_str)
    }

    fn whole(&mut self, choice: usize, whole: &Whole) -> Value {
        let tokenizer = &self.server.served.tokenizer;
        self.lists[choice].add(tokenizer, &whole.prompt);
        self.lists[choice].add(tokenizer, &whole.tokens);
        let logprobs = if self.is_weighed { self.lists[choice].take() } else { Value::Null };
        let text = format!("{}{}", self.echo(choice), whole.text());
        let finish = whole.end.as_ref().map(|end| finish_reason(&end.finish));
        json!({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish})
    }

    fn chunk(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.server.served.name,
            "choices": choices,
        })
    }

    fn event(&mut self, choice: usize, text: &str, finish: Option<&str>) -> Frame {
        let list = &mut self.lists[choice];
        let logprobs = if list.is_empty() { Value::Null } else { list.take() };
        let mut chunk = self
            .chunk(json!([{"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}]));
        if self.form.usage {
            chunk["usage"] = Value::Null;
        }
        Frame::data(&chunk)
    }

    fn parts(&mut self, choice: usize, parts: Vec<Part>, out: &mut VecDeque<Frame>) {
        for part in parts {
            // Nothing else comes out of what is no conversation.
            if let Part::Text(text) = part {
                out.push_back(self.event(choice, &text, None));
            }
        }
    }
}

impl Render for Chunks {
    fn begin(&mut self, _: &mut VecDeque<Frame>) {}

    fn happened(&mut self, choice: usize, what: Happened, out: &mut VecDeque<Frame>) {
        let server = self.server.clone();
        match what {
            Happened::Started { prompt, .. } => {
                self.lists[choice].add(&server.served.tokenizer, &prompt);
                let echo = self.echo(choice).to_owned();
                if !echo.is_empty() {
                    out.push_back(self.event(choice, &echo, None));
                }
            }
            Happened::Step { parts, token } => {
                self.lists[choice].add(&server.served.tokenizer, token.as_slice());
                self.parts(choice, parts, out);
            }
            Happened::Ended { parts, end } => {
                self.parts(choice, parts, out);
                self.usages[choice] = end.usage;
                out.push_back(self.event(choice, "", Some(finish_reason(&end.finish))));
            }
        }
    }

    fn end(&mut self, out: &mut VecDeque<Frame>) {
        if self.form.usage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = usage(&self.usages, self.each);
            out.push_back(Frame::data(&chunk));
        }
        out.push_back(Frame { event: None, data: "[DONE]".to_owned() });
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut VecDeque<Frame>) {
        out.push_back(Frame::data(&Dialect::OpenAi.document(refusal)));
    }
}
