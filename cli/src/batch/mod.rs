//! `q4 generate --batch`: a file of requests, many computed at once, a line an answer in the order of the file.
//!
//! An answer is the one that `q4 generate` gives to its request alone. A run that was cut short is taken up
//! where its file of answers ends.
mod answers;
mod identity;

use crate::args::{AnswerArgs, GenerateArgs};
use crate::context::Context;
use crate::generate::ROOM;
use crate::input;
use crate::prompt;
use crate::report::Outcome;
use crate::session::Session;
use crate::signals;
use crate::text::{Text, context_size};
use answers::Answers;
use q4_core::{Code, Error, Result};
use q4_model::batch::{Event, Nudges, Request, Scheduler, Sink};
use q4_model::checkpoint::Checkpoint;
use q4_model::cpu::KvType;
use q4_model::generate::{Answer, Limits};
use q4_model::load::ContextOptions;
use q4_model::plan::Plan;
use q4_model::template::{self, ChatTemplate, Message};
use q4_model::wishes::Wishes;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Rows of a step: enough for prompts, few enough that nobody waits long for his next token.
const ROWS: usize = 128;

/// Requests at once where nobody says.
const PARALLEL: u16 = 16;

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
}

impl Line {
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

/// A request of the file.
struct Asked {
    id: Option<Value>,
    request: Request,
    identity: String,
}

/// What became of a request, once it is known.
type Kept = Arc<Mutex<Option<Result<Answer>>>>;

struct Keeper(Kept);

impl Sink for Keeper {
    fn tell(&mut self, event: Event) {
        let outcome = match event {
            Event::Ended { answer, .. } => Ok(*answer),
            Event::Failed(e) => Err(e),
            Event::Started { .. } | Event::Token { .. } => return,
        };
        // Nobody panics while he holds it.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

/// Runs the verb.
pub fn run(cx: &Context, args: &GenerateArgs, batch: &Path) -> Result<Outcome> {
    let how = &args.batch;
    let dispatch = Session::dispatch(cx)?;
    let checkpoint = cx.open(&args.model)?;
    let mut text = Text::of(&checkpoint)?;
    prompt::give_to(&mut text, &args.answer.prompt, &checkpoint, cx.report())?;
    let seed = text.sampling(&args.answer, cx.report())?.seed;
    let limits = text.limits(&args.answer);
    let reader = Reader { args, checkpoint: &checkpoint, text: &text, seed, limits };
    let requests = reader.read(batch)?;
    let room = ROOM.max(args.answer.max_tokens.unwrap_or(0));
    let need = |a: &Asked| a.request.prompt.len().saturating_add(a.request.limits.max_tokens.min(room));
    let most = requests.iter().map(need).max().unwrap_or(1);
    let context = context_size(args.answer.context, most, &checkpoint)?;
    if let Some(at) = requests.iter().position(|a| a.request.prompt.len() > context) {
        return Err(Error::new(
            Code::ContextFull,
            format!("{}: line {}: the prompt", batch.display(), at + 1),
        )
        .need(format!("{} positions", requests[at].request.prompt.len()))
        .have(format!("{context} positions")));
    }
    let sequences = usize::from(how.parallel.unwrap_or(PARALLEL)).min(requests.len()).max(1);
    let rows = ROWS.max(2 * sequences);
    let sizes =
        ContextOptions { context, chunk: rows, all_logits: false, kv: cx.kv(KvType::F16), many: None };
    let plan = Plan::new(&checkpoint, &dispatch, &cx.plan_options(args.answer.quantize, rows)?)?;
    plan.require(&dispatch)?;
    let computed = format!("{} {:?} {:?}", cx.device()?, cx.isa(), sizes.kv);
    let run = identity::run(&checkpoint, &plan, &computed);
    let mut out = Answers::open(how.output.as_deref(), &requests, run)?;
    if let Some((count, first)) = out.stale {
        cx.report().warn(&format!(
            "{count} requests failed in an earlier run and are not asked again; cut the file of answers before line {} \
             to ask from there on",
            first + 1
        ));
    }
    let session = Session::load_many(cx, dispatch, &checkpoint, args.answer.quantize, sizes, sequences)?;
    if let Some(first) = session.dependents()?.first() {
        cx.report().warn(&format!(
            "answers may differ in the last bits from those of q4 generate: {}: {}",
            first.layer, first.why
        ));
    }
    let (engine, bounds) = session.sequences()?;
    let mut scheduler = Scheduler::new(engine, &text.tokenizer, bounds);
    let hold = signals::cleanup();
    let bar = cx.report().bar("answers");
    bar.set_length(requests.len() as u64);
    let start = Instant::now();
    let (first, mut next) = (out.written, out.written);
    let mut kept: Vec<Kept> = Vec::new();
    while out.written < requests.len() && !signals::interrupted() {
        while next < requests.len() && scheduler.gauges().waiting < sequences {
            kept.push(Kept::default());
            let keeper = Keeper(kept[next - first].clone());
            scheduler.submit(requests[next].request.clone(), Box::new(keeper));
            next += 1;
        }
        scheduler.step();
        while out.written < next && out.say(&requests, &kept[out.written - first])? {
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    drop(hold);
    let (gauges, seconds) = (scheduler.gauges(), start.elapsed().as_secs_f64());
    let (tokens, prompts, shared) = (gauges.answer_tokens, gauges.prompt_tokens, gauges.cached_tokens);
    cx.report().detail(&format!(
        "{} answers, {tokens} tokens in {seconds:.2} s, {:.1} tok/s; prompts {prompts} tokens, {shared} of them \
         shared; {sequences} sequences at once",
        out.written - first,
        tokens as f64 / seconds,
    ));
    session.facts().detail(cx.report());
    match (out.written < requests.len(), out.failed) {
        (true, _) => Ok(Outcome::Interrupted),
        (false, None) => Ok(Outcome::Done),
        (false, Some(code)) => Ok(Outcome::Found(code)),
    }
}

/// Makes requests of lines.
struct Reader<'a> {
    args: &'a GenerateArgs,
    checkpoint: &'a Checkpoint,
    text: &'a Text,
    /// Of requests that name none.
    seed: u64,
    limits: Limits,
}

impl Reader<'_> {
    /// All of a file; `-` is standard input.
    fn read(&self, path: &Path) -> Result<Vec<Asked>> {
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

    fn request(&self, line: Line, template: &Result<Rc<ChatTemplate>>) -> Result<Asked> {
        let prompt = self.prompt(&line, template)?;
        let (seed, limits) = (self.seed, self.limits.clone());
        let wishes = line.wishes().or(&self.args.answer.wishes());
        let params = wishes.over(self.text.generation(), seed)?;
        let limits = Limits {
            max_tokens: line.max_tokens.unwrap_or(limits.max_tokens),
            stop_strings: if line.stop.is_empty() { limits.stop_strings } else { line.stop },
            ..limits
        };
        q4_model::stop::StopMatcher::new(&limits.stop_strings)?;
        let seeded = line.seed.or(self.args.answer.seed).is_some();
        let nudges = Nudges::default();
        let request = Request { prompt, params, nudges, limits, reuse: true, prompt_logprobs: false };
        Ok(Asked { id: line.id, identity: identity::request(&request, seeded), request })
    }

    fn prompt(&self, line: &Line, template: &Result<Rc<ChatTemplate>>) -> Result<Vec<u32>> {
        let AnswerArgs { system, .. } = &self.args.answer;
        let ids = match (&line.prompt, &line.messages) {
            (Some(Prompt::Ids(ids)), None) => ids.clone(),
            (Some(Prompt::Text(text)), None) if line.raw || self.args.raw => {
                self.text.tokenizer.encode(text, false)?
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
            None => Ok(ids),
        }
    }

    fn rendered(
        &self,
        messages: &[Message],
        line: &Line,
        template: &Result<Rc<ChatTemplate>>,
    ) -> Result<Vec<u32>> {
        let template = template.as_ref().map_err(Clone::clone)?;
        if let Some(tools) = &line.tools {
            prompt::check(tools).map_err(|have| invalid("tools", have))?;
        }
        let mut variables = self.text.variables.clone();
        variables.extend(line.template_args.clone());
        let tools = line.tools.as_ref().or(variables.get("tools")).cloned();
        let rendered = template.render(messages, tools.as_ref(), true, &variables)?;
        self.text.tokenizer.encode(&rendered, false)
    }
}

fn invalid(what: impl Into<String>, have: String) -> Error {
    Error::new(Code::Usage, what)
        .need(r#"lines like {"prompt": "Who are you?", "max_tokens": 64} or {"messages": [...], "id": 7}"#)
        .have(have)
}
