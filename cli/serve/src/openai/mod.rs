//! The API of OpenAI, with the fields that its imitators have added.
pub mod chat;
pub mod completions;
pub mod likely;
pub mod models;
pub mod responses;
pub mod tools;

use crate::answer::{Finish, Usage};
use crate::ask::{Ask, MOST_ANSWERS, MOST_STOPS};
use crate::constraint::{Constraint, unite};
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::whole::Whole;
use serde_json::{Value, json};

/// How an answer is to be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// Event by event.
    pub stream: bool,
    /// Whether the last event tells the usage.
    pub usage: bool,
}

impl Form {
    fn read(f: &Fields) -> Result<Self, Refusal> {
        let usage = match f.object("stream_options")? {
            Some(options) => options.flag("include_usage")?.unwrap_or(false),
            None => false,
        };
        Ok(Self { stream: f.flag("stream")?.unwrap_or(false), usage })
    }
}

/// The fields that chat and completions share.
fn read_shared(ask: &mut Ask, f: &Fields) -> Result<(), Refusal> {
    ask.read_shared(f)?;
    ask.n = f.count("n", 1..=MOST_ANSWERS)?.unwrap_or(1);
    ask.stop = f.texts("stop", MOST_STOPS)?;
    let is_zero = |v: &Value| v.as_f64() == Some(0.0);
    f.neutral("min_tokens", is_zero)?;
    // Other servers' names for what would change the answer.
    for name in ["grammar", "json_schema", "allowed_token_ids", "stop_token_ids", "bad_words"] {
        f.neutral(name, |v| v.as_array().is_some_and(Vec::is_empty) || v.as_str() == Some(""))?;
    }
    f.neutral("continue_final_message", |v| v == &Value::Bool(false))?;
    if let Some(format) = f.object("response_format")? {
        unite(&mut ask.constraint, Constraint::of_format(&format)?)?;
    }
    unite(&mut ask.constraint, Constraint::of_structure(f)?)
}

fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop | Finish::StopString(_) => "stop",
        Finish::Length => "length",
        Finish::Calls => "tool_calls",
    }
}

/// The usage of several answers to the same prompts, `each` to a prompt: a prompt counts once.
fn usage(usages: &[Usage], each: usize) -> Value {
    let firsts = || usages.iter().step_by(each.max(1));
    let prompt: usize = firsts().map(|u| u.prompt).sum();
    let cached: usize = firsts().map(|u| u.cached).sum();
    let answer: usize = usages.iter().map(|u| u.answer).sum();
    let thought: usize = usages.iter().map(|u| u.thought).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    })
}

fn usage_of(wholes: &[Whole], each: usize) -> Value {
    let usages: Vec<Usage> = wholes.iter().map(Whole::usage).collect();
    usage(&usages, each)
}
