//! `q4 generate --batch`: a file of requests, many computed at once, a line an answer in the order of the file.
//!
//! An answer is the one that `q4 generate` gives to its request alone. A run that was cut short is taken up
//! where its file of answers ends.
use crate::args::{AnswerArgs, GenerateArgs};
use crate::context::Context;
use crate::generate::ROOM;
use crate::input;
use crate::prompt;
use crate::report::{Outcome, stdout};
use crate::session::Session;
use crate::signals;
use crate::text::{Text, context_size};
use q4_core::{Code, Error, Result};
use q4_model::batch::{Event, Nudges, Request, Scheduler, Sink};
use q4_model::checkpoint::Checkpoint;
use q4_model::cpu::KvType;
use q4_model::generate::{Answer, FinishReason, Limits};
use q4_model::load::ContextOptions;
use q4_model::sampling::SamplingParams;
use q4_model::template::{self, ChatTemplate, Message};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
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

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// One line of answers.
#[derive(Serialize)]
struct Said<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a Value>,
    #[serde(flatten)]
    outcome: Spoken<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Spoken<'a> {
    Answer {
        text: &'a str,
        token_ids: &'a [u32],
        prompt_tokens: usize,
        finish_reason: FinishReason,
        seed: u64,
    },
    Error {
        error: &'a Error,
    },
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
    let base = (text.sampling(&args.answer, cx.report())?, text.limits(&args.answer));
    let reader = Reader { args, checkpoint: &checkpoint, text: &text, base };
    let requests = reader.read(batch)?;
    let need = |(_, r): &(Option<Value>, Request)| {
        r.prompt.len().saturating_add(r.limits.max_tokens.min(ROOM.max(args.answer.max_tokens.unwrap_or(0))))
    };
    let most = requests.iter().map(need).max().unwrap_or(1);
    let context = context_size(args.answer.context, most, &checkpoint)?;
    if let Some(at) = requests.iter().position(|(_, r)| r.prompt.len() > context) {
        return Err(Error::new(
            Code::ContextFull,
            format!("{}: line {}: the prompt", batch.display(), at + 1),
        )
        .need(format!("{} positions", requests[at].1.prompt.len()))
        .have(format!("{context} positions")));
    }
    let mut out = Answers::open(how.output.as_deref(), &requests)?;
    let sequences = usize::from(how.parallel.unwrap_or(PARALLEL)).min(requests.len()).max(1);
    let rows = ROWS.max(2 * sequences);
    let sizes =
        ContextOptions { context, chunk: rows, all_logits: false, kv: cx.kv(KvType::F16), many: None };
    let session = Session::load_many(cx, dispatch, &checkpoint, args.answer.quantize, sizes, sequences)?;
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
            scheduler.submit(requests[next].1.clone(), Box::new(keeper));
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
    cx.report().detail(&format!(
        "{} answers, {} tokens in {seconds:.2} s, {:.1} tok/s; prompts {} tokens, {} of them shared; \
         {} sequences at once",
        out.written - first,
        gauges.answer_tokens,
        gauges.answer_tokens as f64 / seconds,
        gauges.prompt_tokens,
        gauges.cached_tokens,
        sequences
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
    base: (SamplingParams, Limits),
}

impl Reader<'_> {
    /// All of a file; `-` is standard input.
    fn read(&self, path: &Path) -> Result<Vec<(Option<Value>, Request)>> {
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

    fn request(&self, line: Line, template: &Result<Rc<ChatTemplate>>) -> Result<(Option<Value>, Request)> {
        let prompt = self.prompt(&line, template)?;
        let (params, limits) = self.base.clone();
        let params = SamplingParams {
            temperature: line.temperature.unwrap_or(params.temperature),
            top_k: line.top_k.unwrap_or(params.top_k),
            top_p: line.top_p.unwrap_or(params.top_p),
            min_p: line.min_p.unwrap_or(params.min_p),
            repetition_penalty: line.repetition_penalty.unwrap_or(params.repetition_penalty),
            seed: line.seed.unwrap_or(params.seed),
        };
        params.validate()?;
        let limits = Limits {
            max_tokens: line.max_tokens.unwrap_or(limits.max_tokens),
            stop_strings: if line.stop.is_empty() { limits.stop_strings } else { line.stop },
            ..limits
        };
        q4_model::stop::StopMatcher::new(&limits.stop_strings)?;
        let nudges = Nudges::default();
        Ok((line.id, Request { prompt, params, nudges, limits, reuse: true, prompt_logprobs: false }))
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

/// Where answers go.
struct Answers {
    file: Option<(PathBuf, File)>,
    /// Lines that are there.
    written: usize,
    /// The first failure.
    failed: Option<Code>,
}

impl Answers {
    /// Standard output, or a file, behind the whole lines that are in it.
    fn open(path: Option<&Path>, requests: &[(Option<Value>, Request)]) -> Result<Self> {
        let Some(path) = path else { return Ok(Self { file: None, written: 0, failed: None }) };
        let failed = |e: io::Error| Error::new(Code::Io, format!("{}: {e}", path.display()));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed)?;
        let (mut whole, mut written, mut line) = (0, 0, Vec::new());
        let mut reader = BufReader::new(&file);
        loop {
            line.clear();
            reader.read_until(b'\n', &mut line).map_err(failed)?;
            if line.last() != Some(&b'\n') {
                break; // half a line, or the end
            }
            let other = |have: String| {
                Error::new(Code::Usage, format!("{}: line {}", path.display(), written + 1))
                    .need("the answers of an earlier run on the same file")
                    .have(have)
                    .fix("another name for --output")
            };
            let value: Value = serde_json::from_slice(&line).map_err(|e| other(e.to_string()))?;
            let Some((id, _)) = requests.get(written) else {
                return Err(other(format!("more lines than the {} requests", requests.len())));
            };
            if value.get("index").and_then(Value::as_u64) != Some(written as u64)
                || value.get("id") != id.as_ref()
            {
                return Err(other("the answer to another request".to_owned()));
            }
            whole += line.len() as u64;
            written += 1;
        }
        file.set_len(whole).and_then(|()| file.seek(SeekFrom::End(0))).map_err(failed)?;
        Ok(Self { file: Some((path.to_owned(), file)), written, failed: None })
    }

    /// Writes the next answer, if it is known.
    fn say(&mut self, requests: &[(Option<Value>, Request)], kept: &Kept) -> Result<bool> {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(outcome) = &*kept else { return Ok(false) };
        let (id, request) = &requests[self.written];
        let spoken = match outcome {
            Ok(answer) => Spoken::Answer {
                text: &answer.text,
                token_ids: &answer.ids,
                prompt_tokens: answer.prompt_tokens,
                finish_reason: answer.finish,
                seed: request.params.seed,
            },
            Err(error) => {
                self.failed = self.failed.or(Some(error.code()));
                Spoken::Error { error }
            }
        };
        let said = Said { index: self.written, id: id.as_ref(), outcome: spoken };
        let mut line = serde_json::to_string(&said)
            .map_err(|e| Error::new(Code::Internal, format!("an answer: {e}")))?;
        line.push('\n');
        match &mut self.file {
            None => stdout(&line)?,
            Some((path, file)) => file
                .write_all(line.as_bytes())
                .map_err(|e| Error::new(Code::Io, format!("{}: {e}", path.display())))?,
        }
        // Its text is not needed any longer.
        *kept = None;
        self.written += 1;
        Ok(true)
    }
}

fn invalid(what: impl Into<String>, have: String) -> Error {
    Error::new(Code::Usage, what)
        .need(r#"lines like {"prompt": "Who are you?", "max_tokens": 64} or {"messages": [...], "id": 7}"#)
        .have(have)
}
