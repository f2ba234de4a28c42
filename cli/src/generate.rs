//! `q4 generate`: one prompt or a list of turns in, text out, with an account of what computed it.
use crate::args::{AnswerArgs, GenerateArgs};
use crate::context::Context;
use crate::conversation::{Saved, Turns};
use crate::form;
use crate::input;
use crate::prompt;
use crate::report::{self, Outcome, Report};
use crate::session::{Facts, Session, Timing, chunk};
use crate::text::{Text, context_size};
use crate::tokenize::{piece, quoted};
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::cpu::KvType;
use q4_model::generate::{Answer, Conversation, FinishReason, Limits, generate};
use q4_model::likely::Likely;
use q4_model::load::ContextOptions;
use q4_model::sampling::Sampler;
use q4_model::template::ChatTemplate;
use q4_model::tokenizer::Tokenizer;
use serde::Serialize;
use std::rc::Rc;
use std::time::Instant;

/// Tokens a template adds around a message, generously.
const TURN_OVERHEAD: usize = 16;
/// Positions for answers whose length nobody says, where the model has as many.
pub const ROOM: usize = 4096;

/// The document of `--json`.
#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    text: String,
    token_ids: Vec<u32>,
    prompt_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_ids: Option<&'a [u32]>,
    finish_reason: Option<FinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Vec<Candidate>>>,
    timing: Timing,
    seed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    turns: Option<Vec<Turn<'a>>>,
    #[serde(flatten)]
    facts: Facts,
}

/// One turn, also a line of `q4 chat --json`.
#[derive(Serialize)]
pub struct Turn<'a> {
    /// What was said.
    pub user: &'a str,
    /// What was answered.
    pub text: &'a str,
    /// The answer's tokens.
    pub token_ids: &'a [u32],
    /// Prompt tokens that had to be computed.
    pub prompt_tokens: usize,
    /// Why the answer ended.
    pub finish_reason: FinishReason,
    /// How long it took.
    pub timing: Timing,
}

impl<'a> Turn<'a> {
    /// The turn in which `user` got `answer`.
    pub fn new(user: &'a str, answer: &'a Answer) -> Self {
        Self {
            user,
            text: &answer.text,
            token_ids: &answer.ids,
            prompt_tokens: answer.prompt_tokens,
            finish_reason: answer.finish,
            timing: Timing::of(0.0, [answer]),
        }
    }
}

/// The document of `--show-prompt --json`.
#[derive(Serialize)]
struct Shown<'a> {
    model: &'a str,
    prompt: &'a str,
    prompt_tokens: usize,
    prompt_ids: &'a [u32],
}

/// A token that might have come.
#[derive(Serialize)]
struct Candidate {
    id: u32,
    text: String,
    logprob: f32,
}

/// What is asked.
enum Ask {
    Once(Vec<u32>),
    Turns(Vec<String>, Rc<ChatTemplate>),
}

/// The file that was named, read before the model.
enum Given {
    Nothing,
    Turns(Turns),
    Conversation(Saved),
}

impl Given {
    fn read(args: &GenerateArgs, report: &Report) -> Result<Self> {
        match (&args.turns, &args.conversation) {
            (Some(path), _) => Turns::read(path, report).map(Self::Turns),
            (None, Some(path)) => Saved::read(path, report).map(Self::Conversation),
            (None, None) => Ok(Self::Nothing),
        }
    }

    fn saved(&self) -> Option<&Saved> {
        match self {
            Self::Nothing => None,
            Self::Turns(turns) => turns.saved.as_ref(),
            Self::Conversation(saved) => Some(saved),
        }
    }
}

/// Runs the verb.
pub fn run(cx: &Context, args: &GenerateArgs) -> Result<Outcome> {
    if args.show_prompt {
        return show_prompt(cx, args);
    }
    // clap lets this pass beside a prompt, with which --batch could not be.
    if args.batch.output.is_some() || args.batch.parallel.is_some() {
        return Err(Error::new(Code::Usage, "--output and --parallel without --batch")
            .need("--batch FILE")
            .fix("a shell writes one answer to a file: q4 generate -p 'Who are you?' > answer.txt"));
    }
    let start = Instant::now();
    let given = Given::read(args, cx.report())?;
    let asked = form::asked(&args.form)?;
    let options = given.saved().map_or_else(|| args.answer.clone(), |saved| saved.over(&args.answer));
    let dispatch = Session::dispatch(cx)?;
    let checkpoint = cx.open(&args.model)?;
    let mut text = Text::of(&checkpoint)?;
    if let Some(saved) = given.saved() {
        saved.tell_of_other_model(checkpoint.name(), cx.report());
        text.variables.extend(saved.variables());
    }
    prompt::give_to(&mut text, &args.answer.prompt, &checkpoint, cx.report())?;
    let params = text.sampling(&options, cx.report())?;
    let top_logprobs = args.top_logprobs.map_or(0, usize::from);
    let system = options.system.as_deref();
    let form = asked.map(|asked| form::compiled(&asked, args.raw, system, &checkpoint, &text)).transpose()?;
    let limits = Limits { top_logprobs, form, ..text.limits(&options) };
    let ask = ask(args, &options, given, &checkpoint, &text)?;
    let context = context_size(options.context, need(&ask, &text, &options)?, &checkpoint)?;
    let chunk = chunk(cx.device()?).min(context);
    let sizes = ContextOptions { context, chunk, all_logits: false, kv: cx.kv(KvType::F16), many: None };
    let session = Session::load(cx, dispatch, &checkpoint, options.quantize, sizes)?;
    let mut runner = session.runner()?;
    let mut sampler = Sampler::new(params.clone(), checkpoint.config().vocab_size)?;
    let load_s = start.elapsed().as_secs_f64();

    let most = checkpoint.config().max_position_embeddings;
    let mut out = Emitter::new(!cx.report().is_json(), !args.no_stream);
    let mut answers = Vec::new();
    match &ask {
        Ask::Once(prompt) => {
            let mut emit = |piece: &str| out.piece(piece);
            answers.push(generate(&mut runner, &text.tokenizer, prompt, &mut sampler, &limits, &mut emit)?);
            out.end(&answers[0].text)?;
            tell_if_cut(cx.report(), &answers[0], context, most);
        }
        Ask::Turns(messages, template) => {
            let system = options.system.as_deref();
            let mut talk = Conversation::new(&mut runner, &text.tokenizer, template, &text.variables, system);
            for message in messages {
                let mut emit = |piece: &str| out.piece(piece);
                answers.push(talk.turn(message, &params, &mut sampler, &limits, &mut emit)?);
                out.end(&answers[answers.len() - 1].text)?;
                tell_if_cut(cx.report(), &answers[answers.len() - 1], context, most);
            }
        }
    }
    let timing = Timing::of(load_s, &answers);
    let facts = session.facts();
    if cx.report().is_json() {
        let texts: Vec<_> = answers.iter().map(|a| a.text.as_str()).collect();
        let turns = match &ask {
            Ask::Once(_) => None,
            Ask::Turns(messages, _) => {
                Some(messages.iter().zip(&answers).map(|(m, a)| Turn::new(m, a)).collect())
            }
        };
        cx.report().document(
            "generate",
            &Body {
                model: checkpoint.name(),
                text: texts.join("\n"),
                token_ids: answers.iter().flat_map(|a| a.ids.iter().copied()).collect(),
                prompt_tokens: answers.iter().map(|a| a.prompt_tokens).sum(),
                prompt_ids: match &ask {
                    Ask::Once(prompt) => Some(prompt),
                    Ask::Turns(..) => None,
                },
                finish_reason: answers.last().map(|a| a.finish),
                top_logprobs: args.top_logprobs.map(|_| candidates(&answers, &text.tokenizer)).transpose()?,
                timing,
                seed: params.seed,
                turns,
                facts,
            },
        )?;
    } else {
        if let Some(first) = answers.iter().find_map(|a| a.likely.steps().next()) {
            cx.report().text(&table(first, &text.tokenizer)?)?;
        }
        cx.report().detail(&stats(&timing, &answers));
        facts.detail(cx.report());
    }
    Ok(Outcome::Done)
}

/// What the model would be given.
fn show_prompt(cx: &Context, args: &GenerateArgs) -> Result<Outcome> {
    let checkpoint = cx.open(&args.model)?;
    let mut text = Text::of(&checkpoint)?;
    prompt::give_to(&mut text, &args.answer.prompt, &checkpoint, cx.report())?;
    let given = input::prompt(args.prompt.as_deref(), "generate")?;
    let prompt = match args.raw {
        true => given,
        false => prompt::rendered(&given, args.answer.system.as_deref(), &checkpoint, &text)?,
    };
    let ids = text.tokenizer.encode(&prompt, false)?;
    if cx.report().is_json() {
        let body =
            Shown { model: checkpoint.name(), prompt: &prompt, prompt_tokens: ids.len(), prompt_ids: &ids };
        cx.report().document("generate", &body)?;
    } else {
        let list: Vec<_> = ids.iter().map(u32::to_string).collect();
        let end = if prompt.ends_with('\n') { "" } else { "\n" };
        report::stdout(&format!("{prompt}{end}{} tokens: {}\n", ids.len(), list.join(",")))?;
    }
    Ok(Outcome::Done)
}

/// The most likely tokens of every step.
fn candidates(answers: &[Answer], tokenizer: &Tokenizer) -> Result<Vec<Vec<Candidate>>> {
    let candidate =
        |l: &Likely| Ok(Candidate { id: l.id, text: piece(tokenizer, l.id)?.text, logprob: l.logprob });
    answers.iter().flat_map(|a| a.likely.steps()).map(|step| step.iter().map(candidate).collect()).collect()
}

fn table(step: &[Likely], tokenizer: &Tokenizer) -> Result<String> {
    let mut out = format!("{:>5} {:>8} {:>9} {:>8}  first token\n", "rank", "id", "logprob", "share");
    for (i, l) in step.iter().enumerate() {
        let share = f64::from(l.logprob).exp() * 100.0;
        let text = quoted(&piece(tokenizer, l.id)?.text);
        out.push_str(&format!("{:>5} {:>8} {:>9.4} {share:>6.2} %  {text}\n", i + 1, l.id, l.logprob));
    }
    Ok(out)
}

/// Says on stderr that the model was not done with `answer`, and what would give it more room; `most` is all
/// that the model can have. `--json` has it as `finish_reason`.
pub fn tell_if_cut(report: &Report, answer: &Answer, context: usize, most: usize) {
    let tokens = answer.ids.len();
    match answer.finish {
        _ if report.is_json() => {}
        FinishReason::Length => {
            report.warn(&format!("the answer is cut after {tokens} tokens; a larger -n lets it go on"));
        }
        FinishReason::Context => {
            let fix =
                if context < most { "; a larger --context has room" } else { ", all that the model has" };
            report.warn(&format!(
                "the answer is cut after {tokens} tokens: the context of {context} positions is full{fix}"
            ));
        }
        FinishReason::Stop | FinishReason::StopString | FinishReason::Interrupted => {}
    }
}

/// A line about the speed of `answers`.
pub fn stats(timing: &Timing, answers: &[Answer]) -> String {
    let prompt: usize = answers.iter().map(|a| a.prompt_tokens).sum();
    let tokens: usize = answers.iter().map(|a| a.ids.len()).sum();
    format!(
        "prompt {prompt} tokens, {:.1} tok/s; answer {tokens} tokens, {:.1} tok/s; load {:.2} s",
        timing.prefill_tok_s, timing.decode_tok_s, timing.load_s
    )
}

/// Writes an answer to stdout while it is made, or at its end, or not at all.
pub struct Emitter {
    text: bool,
    stream: bool,
    failed: Option<Error>,
}

impl Emitter {
    /// `text`: results are text; `stream`: as they come.
    pub fn new(text: bool, stream: bool) -> Self {
        Self { text, stream, failed: None }
    }

    /// A piece of the answer. A failure is kept for [`end`](Self::end), for a generator cannot be told.
    pub fn piece(&mut self, piece: &str) {
        if self.text && self.stream && self.failed.is_none() {
            self.failed = report::stdout(piece).err();
        }
    }

    /// The end of an answer, which is `text` as a whole.
    pub fn end(&mut self, text: &str) -> Result<()> {
        match self.failed.take() {
            Some(e) => Err(e),
            None if !self.text => Ok(()),
            None if self.stream => report::stdout("\n"),
            None => report::stdout(&format!("{text}\n")),
        }
    }
}

fn ask(
    args: &GenerateArgs,
    options: &AnswerArgs,
    given: Given,
    checkpoint: &Checkpoint,
    text: &Text,
) -> Result<Ask> {
    match given {
        Given::Turns(turns) => Ok(Ask::Turns(turns.messages, text.template(checkpoint)?)),
        Given::Conversation(saved) => {
            let messages = saved.question(options.system.as_deref())?;
            let tools = text.variables.get("tools");
            let rendered = text.template(checkpoint)?.render(&messages, tools, true, &text.variables)?;
            text.tokenizer.encode(&rendered, false).map(Ask::Once)
        }
        Given::Nothing => {
            let prompt = input::prompt(args.prompt.as_deref(), "generate")?;
            prompt_ids(&prompt, args.raw, options.system.as_deref(), checkpoint, text).map(Ask::Once)
        }
    }
}

/// What the model is given for one message: as it is, or in its chat template.
pub fn prompt_ids(
    prompt: &str,
    raw: bool,
    system: Option<&str>,
    checkpoint: &Checkpoint,
    text: &Text,
) -> Result<Vec<u32>> {
    if raw {
        return text.tokenizer.encode(prompt, false);
    }
    text.tokenizer.encode(&prompt::rendered(prompt, system, checkpoint, text)?, false)
}

/// Positions that all prompts and answers take at most.
fn need(ask: &Ask, text: &Text, options: &AnswerArgs) -> Result<usize> {
    let most = options.max_tokens;
    match ask {
        Ask::Once(prompt) => Ok(prompt.len().saturating_add(most.unwrap_or(ROOM))),
        Ask::Turns(messages, _) => {
            let mut all = if most.is_some() { 0 } else { ROOM };
            for message in messages.iter().chain(options.system.as_ref()) {
                let tokens = text.tokenizer.encode(message, false)?.len() + TURN_OVERHEAD;
                all = all.saturating_add(tokens).saturating_add(most.unwrap_or(0));
            }
            Ok(all)
        }
    }
}
