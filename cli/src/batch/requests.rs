//! The file of requests: a line each.
use super::identity;
use crate::args::{AnswerArgs, GenerateArgs};
use crate::form;
use crate::input;
use crate::prompt;
use crate::text::Text;
use q4_core::{Code, Error, Result};
use q4_model::batch::{Nudges, Request};
use q4_model::checkpoint::Checkpoint;
use q4_model::constraint::{Constraint, Grammar, Thoughts};
use q4_model::generate::Limits;
use q4_model::template::{self, ChatTemplate, Message};
use q4_model::wishes::Wishes;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

/// A request of the file.
pub struct Asked {
    pub id: Option<Value>,
    pub request: Request,
    pub identity: String,
}

/// One line of the file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Handed on with the answer.
    #[serde(default, alias = "custom_id")]
    id: Option<Value>,
    #[serde(default)]
    prompt: Option<Prompt>,
    #[serde(default)]
    messages: Option<Vec<Message>>,
    #[serde(default)]
    tools: Option<Value>,
    #[serde(default, alias = "chat_template_kwargs")]
    template_args: Map<String, Value>,
    #[serde(default)]
    raw: bool,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_p: Option<f32>,
    #[serde(default)]
    top_k: Option<usize>,
    #[serde(default)]
    min_p: Option<f32>,
    #[serde(default)]
    repetition_penalty: Option<f32>,
    #[serde(default)]
    seed: Option<u64>,
    #[serde(default)]
    max_tokens: Option<usize>,
    #[serde(default)]
    stop: Vec<String>,
    #[serde(default)]
    json_schema: Option<Value>,
    #[serde(default)]
    regex: Option<String>,
    #[serde(default)]
    choice: Option<Vec<String>>,
    #[serde(default)]
    grammar: Option<String>,
}

impl Line {
    /// What the answer must be, where the line says so.
    fn form(&mut self) -> Result<Option<Constraint>> {
        let asked = [
            self.json_schema.take().map(Constraint::JsonSchema),
            self.regex.take().map(Constraint::Regex),
            self.choice.take().map(Constraint::Choice),
            self.grammar.take().map(Constraint::Grammar),
        ];
        let mut asked = asked.into_iter().flatten();
        let first = asked.next();
        match asked.next() {
            Some(_) => Err(invalid("a request", "two forms of its answer".to_owned())),
            None => Ok(first),
        }
    }

    fn wishes(&self) -> Wishes {
        Wishes {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Makes requests of lines.
pub struct Reader<'a> {
    args: &'a GenerateArgs,
    checkpoint: &'a Checkpoint,
    text: &'a Text,
    /// Of requests that name none.
    seed: u64,
    limits: Limits,
    /// Of answers whose line says nothing else.
    form: Option<Constraint>,
    /// The form that was compiled last.
    last: RefCell<Option<(Constraint, Thoughts, Grammar)>>,
}

impl<'a> Reader<'a> {
    /// For lines that leave out what `args` say.
    pub fn new(
        args: &'a GenerateArgs,
        checkpoint: &'a Checkpoint,
        text: &'a Text,
        seed: u64,
        limits: Limits,
    ) -> Result<Self> {
        let form = form::asked(&args.form)?;
        Ok(Self { args, checkpoint, text, seed, limits, form, last: RefCell::default() })
    }

    /// All of a file; `-` is standard input.
    pub fn read(&self, path: &Path) -> Result<Vec<Asked>> {
        let (name, text) = input::file(path)?;
        let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            return Err(invalid(name, "no lines".to_owned()));
        }
        let template = self.text.template(self.checkpoint);
        lines
            .iter()
            .enumerate()
            .map(|(i, line)| {
                let at = || format!("{name}: line {}", i + 1);
                // Numbers of messages and tools stay as they are written.
                let value = template::json(line).map_err(|e| invalid(at(), e.to_string()))?;
                let line: Line = serde_json::from_value(value).map_err(|e| invalid(at(), e.to_string()))?;
                self.request(line, &template).map_err(|e| e.within(at()))
            })
            .collect()
    }

    fn request(&self, mut line: Line, template: &Result<Rc<ChatTemplate>>) -> Result<Asked> {
        let (prompt, thoughts) = self.prompt(&line, template)?;
        let form = line.form()?.or_else(|| self.form.clone()).map(|form| (form, thoughts));
        let grammar = form.clone().map(|(form, thoughts)| self.compiled(form, thoughts)).transpose()?;
        let (seed, limits) = (self.seed, self.limits.clone());
        let wishes = line.wishes().or(&self.args.answer.wishes());
        let params = wishes.over(self.text.generation(), seed)?;
        let limits = Limits {
            max_tokens: line.max_tokens.unwrap_or(limits.max_tokens),
            form: grammar,
            stop_strings: if line.stop.is_empty() { limits.stop_strings } else { line.stop },
            ..limits
        };
        q4_model::stop::StopMatcher::new(&limits.stop_strings)?;
        let seeded = line.seed.or(self.args.answer.seed).is_some();
        let nudges = Nudges::default();
        let request = Request { prompt, params, nudges, limits, reuse: true, prompt_logprobs: false };
        Ok(Asked { id: line.id, identity: identity::request(&request, form.as_ref(), seeded), request })
    }

    /// A form, which lines in a row that have the same one share.
    fn compiled(&self, form: Constraint, thoughts: Thoughts) -> Result<Grammar> {
        let mut last = self.last.borrow_mut();
        match &*last {
            Some((same, before, grammar)) if *same == form && *before == thoughts => Ok(grammar.clone()),
            _ => {
                let grammar = self.text.grammars.compile(&self.text.tokenizer, &form, thoughts)?;
                *last = Some((form, thoughts, grammar.clone()));
                Ok(grammar)
            }
        }
    }

    /// The tokens, and what the model may think behind them.
    fn prompt(&self, line: &Line, template: &Result<Rc<ChatTemplate>>) -> Result<(Vec<u32>, Thoughts)> {
        let AnswerArgs { system, .. } = &self.args.answer;
        let (ids, thoughts) = match (&line.prompt, &line.messages) {
            (Some(Prompt::Ids(ids)), None) => (ids.clone(), Thoughts::None),
            (Some(Prompt::Text(text)), None) if line.raw || self.args.raw => {
                (self.text.tokenizer.encode(text, false)?, Thoughts::None)
            }
            (Some(Prompt::Text(text)), None) => {
                let system = system.as_ref().map(|s| Message::new("system", s));
                let messages: Vec<_> = system.into_iter().chain([Message::new("user", text)]).collect();
                self.rendered(&messages, line, template)?
            }
            (None, Some(messages)) => self.rendered(messages, line, template)?,
            (Some(_), Some(_)) => return Err(invalid("a request", "both prompt and messages".to_owned())),
            (None, None) => return Err(invalid("a request", "neither prompt nor messages".to_owned())),
        };
        let rows = self.checkpoint.config().vocab_size;
        match ids.iter().find(|id| **id as usize >= rows) {
            _ if ids.is_empty() => Err(invalid("a request", "an empty prompt".to_owned())),
            Some(id) => Err(invalid("a token id", id.to_string()).need(format!("below {rows}"))),
            None => Ok((ids, thoughts)),
        }
    }

    fn rendered(
        &self,
        messages: &[Message],
        line: &Line,
        template: &Result<Rc<ChatTemplate>>,
    ) -> Result<(Vec<u32>, Thoughts)> {
        let template = template.as_ref().map_err(Clone::clone)?;
        if let Some(tools) = &line.tools {
            prompt::check(tools).map_err(|have| invalid("tools", have))?;
        }
        let mut variables = self.text.variables.clone();
        variables.extend(line.template_args.clone());
        let tools = line.tools.as_ref().or(variables.get("tools")).cloned();
        let rendered = template.render(messages, tools.as_ref(), true, &variables)?;
        Ok((self.text.tokenizer.encode(&rendered, false)?, Thoughts::of(&rendered, template)))
    }
}

fn invalid(what: impl Into<String>, have: String) -> Error {
    Error::new(Code::Usage, what)
        .need(r#"lines like {"prompt": "Who are you?", "max_tokens": 64} or {"messages": [...], "id": 7}"#)
        .have(have)
}
