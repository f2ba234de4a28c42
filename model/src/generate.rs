//! Generating text: prompt in, sampled tokens out, stopped by ids, strings or a limit.
use crate::likely::Ranking;
use crate::runner::Runner;
use crate::sampling::{Sampler, SamplingParams};
use crate::stop::StopMatcher;
use crate::template::{ChatTemplate, Message};
use crate::tokenizer::Tokenizer;
use q4_core::{Code, Error, Result};
use serde::Serialize;
use serde_json::{Map, Value};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// When to stop.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Tokens to generate at most; the context may hold fewer.
    pub max_tokens: usize,
    /// Ids that end an answer; they are not part of it.
    pub stop_ids: Vec<u32>,
    /// Texts that end an answer; they are not part of it.
    pub stop_strings: Vec<String>,
    /// Most likely tokens to note before each draw; 0 notes none.
    pub top_logprobs: usize,
    /// Ends an answer at the next token, or a prompt before the next operation, once it is set.
    pub interrupt: Option<&'static AtomicBool>,
}

impl Limits {
    fn is_interrupted(&self) -> bool {
        self.interrupt.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FinishReason {
    /// A stop id was sampled.
    Stop,
    /// A stop string appeared.
    StopString,
    /// `max_tokens` were generated: it is cut.
    Length,
    /// The context is full: it is cut.
    Context,
    /// [`Limits::interrupt`] was set.
    Interrupted,
}

impl FinishReason {
    /// As reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::StopString => "stop-string",
            Self::Length => "length",
            Self::Context => "context",
            Self::Interrupted => "interrupted",
        }
    }

    /// Whether the answer would have gone on.
    pub fn is_cut(self) -> bool {
        !matches!(self, Self::Stop | Self::StopString)
    }
}

/// One answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The text, without stop string.
    pub text: String,
    /// The sampled ids, without stop id.
    pub ids: Vec<u32>,
    /// Tokens of the prompt that had to be computed.
    pub prompt_tokens: usize,
    /// Why it ended.
    pub finish: FinishReason,
    /// The most likely tokens before each draw, by the model alone: no penalty, no temperature. A draw that
    /// ended the answer is among them.
    pub likely: Ranking,
    /// Computing the prompt.
    pub prefill: Duration,
    /// Computing the answer.
    pub decode: Duration,
}

impl Answer {
    /// Whether there is an answer to keep: one that was interrupted before its first text is none.
    pub fn is_said(&self) -> bool {
        self.finish != FinishReason::Interrupted || !self.text.is_empty()
    }
}

/// Continues `prompt` behind what `runner` holds. Every id of the answer is accepted into the runner; text is
/// handed to `emit` as soon as it is complete. Nothing is accepted of a prompt that was interrupted.
///
/// # Errors
/// [`Code::Usage`] for an empty prompt, and as of [`Runner::accept`], [`Sampler::sample`] and
/// [`Tokenizer::decode`].
pub fn generate(
    runner: &mut Runner,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    sampler: &mut Sampler,
    limits: &Limits,
    emit: &mut dyn FnMut(&str),
) -> Result<Answer> {
    if prompt.is_empty() {
        return Err(Error::new(Code::Usage, "the prompt is empty").need("at least one token"));
    }
    let start = Instant::now();
    let is_whole = runner.accept_unless(prompt, limits.interrupt)?;
    let prefill = start.elapsed();
    let start = Instant::now();
    let mut stream = tokenizer.stream(true);
    let mut matcher = StopMatcher::new(&limits.stop_strings)?;
    let most = limits.max_tokens.min(runner.context());
    let mut answer = Answer {
        text: String::new(),
        ids: Vec::with_capacity(most),
        likely: Ranking::new(limits.top_logprobs, most),
        prompt_tokens: prompt.len(),
        finish: FinishReason::Length,
        prefill,
        decode: Duration::ZERO,
    };
    if !is_whole {
        answer.finish = FinishReason::Interrupted;
        return Ok(answer);
    }
    let mut say = |text: &str, all: &mut String| {
        all.push_str(text);
        if !text.is_empty() {
            emit(text);
        }
    };
    let mut cut = false;
    let mut collapse = Collapse::default();
    while answer.ids.len() < limits.max_tokens && runner.tokens().len() < runner.context() {
        if limits.is_interrupted() {
            answer.finish = FinishReason::Interrupted;
            break;
        }
        collapse.look(runner)?;
        if limits.top_logprobs > 0 {
            answer.likely.look(runner.logits()?);
        }
        let id = runner.sample(sampler)?;
        if limits.stop_ids.contains(&id) {
            answer.finish = FinishReason::Stop;
            break;
        }
        answer.ids.push(id);
        runner.decode(id)?;
        if let Some(piece) = stream.push(id)? {
            let matched = matcher.push(&piece);
            say(&matched.emit, &mut answer.text);
            if matched.stopped.is_some() {
                answer.finish = FinishReason::StopString;
                cut = true;
                break;
            }
        }
    }
    runner.settle()?;
    if answer.finish == FinishReason::Length && answer.ids.len() < limits.max_tokens {
        answer.finish = FinishReason::Context;
    }
    if !cut {
        let rest = stream.finish()?;
        // Half a character that nobody waited for is no text.
        let is_left = answer.finish == FinishReason::Interrupted;
        let rest = if is_left { rest.trim_end_matches(char::REPLACEMENT_CHARACTER) } else { &rest };
        let matched = matcher.push(rest);
        say(&matched.emit, &mut answer.text);
        if matched.stopped.is_some() {
            answer.finish = FinishReason::StopString;
        } else {
            say(&matcher.finish(), &mut answer.text);
        }
    }
    answer.decode = start.elapsed();
    Ok(answer)
}

/// Tells logits that are finite and know nothing: all equal, or the same for every one of the first tokens of
/// an answer. Whoever repeats himself has other logits each time, so nothing is looked at once two rows
/// differ.
#[derive(Default)]
struct Collapse {
    before: Option<u64>,
    same: usize,
    over: bool,
}

impl Collapse {
    /// Rows in a row that are the same, bit for bit.
    const ROWS: usize = 8;

    /// Call before a token is drawn, which may change the logits.
    fn look(&mut self, runner: &mut Runner) -> Result<()> {
        if self.over {
            return Ok(());
        }
        let logits = runner.logits()?;
        let told = |have: &str| {
            Err(Error::new(Code::NonFinite, "the logits say nothing about the next token")
                .need("logits that differ from token to token, and from position to position")
                .have(have)
                .fix("`q4 verify --run MODEL` looks for the cause"))
        };
        if logits.len() > 1 && logits.iter().all(|l| *l == logits[0]) {
            return told("the same logit for every token");
        }
        // FNV-1a over the bits.
        let row = logits.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, l| {
            (hash ^ u64::from(l.to_bits())).wrapping_mul(0x0000_0100_0000_01b3)
        });
        self.over = self.before.is_some_and(|before| before != row);
        self.before = Some(row);
        self.same += 1;
        if !self.over && self.same == Self::ROWS {
            return told("the same logits at every position");
        }
        Ok(())
    }
}

/// A conversation on one cache: each turn computes only what is new.
pub struct Conversation<'a> {
    runner: &'a mut Runner,
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    variables: Map<String, Value>,
    messages: Vec<Message>,
    /// The conversation as rendered so far.
    text: String,
    /// The runner's tokens are those of `text`; false after an answer that was cut inside a token.
    exact: bool,
}

impl<'a> Conversation<'a> {
    /// Starts with an optional system message; forgets whatever `runner` held. `variables` are what the
    /// template may ask for besides the messages, `tools` among them.
    pub fn new(
        runner: &'a mut Runner,
        tokenizer: &'a Tokenizer,
        template: &'a ChatTemplate,
        variables: &'a Map<String, Value>,
        system: Option<&str>,
    ) -> Self {
        runner.truncate(0);
        let messages = system.map(|s| Message::new("system", s)).into_iter().collect();
        let variables = variables.clone();
        Self { runner, tokenizer, template, variables, messages, text: String::new(), exact: true }
    }

    /// The messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }
    /// The context underneath.
    pub fn runner(&self) -> &Runner {
        self.runner
    }

    /// Other variables for the template from the next turn on.
    pub fn set_variables(&mut self, variables: Map<String, Value>) {
        self.variables = variables;
    }

    /// Puts `messages` in the place of those so far and returns the positions they take. The cache keeps what
    /// both begin with; the rest is computed by the next turn. Nothing changes on an error.
    ///
    /// # Errors
    /// [`Code::TemplateInvalid`] for what the template refuses, [`Code::TokenizerInvalid`].
    pub fn set_messages(&mut self, messages: Vec<Message>) -> Result<usize> {
        let before = std::mem::replace(&mut self.messages, messages);
        let aligned = self.align();
        if aligned.is_err() {
            self.messages = before;
        }
        aligned
    }

    /// Cuts the cache to what it shares with the messages.
    fn align(&mut self) -> Result<usize> {
        // Some templates refuse a conversation in which nobody has asked.
        let is_begun = self.messages.iter().any(|m| m.role != "system");
        let text = if is_begun { self.render(false)? } else { String::new() };
        let ids = self.tokenizer.encode(&text, false)?;
        let same = shared(&ids, self.runner.tokens());
        self.runner.truncate(same);
        self.exact = same == ids.len();
        self.text = text;
        Ok(ids.len())
    }

    /// Says `user`, generates the answer, and closes the turn, so that the cache ends where the next turn
    /// begins. When a turn fails, or is interrupted before there is text, the conversation is as it was
    /// before it. An answer that was cut says so in the `finish_reason` of its message.
    ///
    /// # Errors
    /// [`Code::Usage`] for parameters without a meaning, [`Code::TemplateInvalid`] for what the template
    /// refuses, and as of [`generate`].
    pub fn turn(
        &mut self,
        user: &str,
        params: &SamplingParams,
        sampler: &mut Sampler,
        limits: &Limits,
        emit: &mut dyn FnMut(&str),
    ) -> Result<Answer> {
        params.validate()?;
        let (before, messages) = (self.runner.tokens().len(), self.messages.len());
        let result = self.try_turn(user, sampler, limits, emit);
        if !result.as_ref().is_ok_and(Answer::is_said) {
            self.runner.truncate(before);
            self.messages.truncate(messages);
            self.exact = false;
        }
        result
    }

    fn try_turn(
        &mut self,
        user: &str,
        sampler: &mut Sampler,
        limits: &Limits,
        emit: &mut dyn FnMut(&str),
    ) -> Result<Answer> {
        self.messages.push(Message::new("user", user));
        let prompt = self.extend_to(self.render(true)?)?;
        let answer = generate(self.runner, self.tokenizer, &prompt, sampler, limits, emit)?;
        if !answer.is_said() {
            return Ok(answer);
        }
        let mut message = Message::new("assistant", &answer.text);
        if answer.finish.is_cut() {
            message.extra.insert("finish_reason".into(), answer.finish.name().into());
        }
        self.messages.push(message);
        // The cache holds the sampled ids; when their text is what the template repeats, only the closing is
        // new.
        self.text.push_str(&answer.text);
        let is_whole = !matches!(answer.finish, FinishReason::StopString | FinishReason::Interrupted);
        self.exact = is_whole && !answer.text.contains(char::REPLACEMENT_CHARACTER);
        let closing = self.extend_to(self.render(false)?)?;
        // A full context ends the conversation, not the answer it still had room for.
        self.exact = self.runner.tokens().len() + closing.len() <= self.runner.context();
        if self.exact && !closing.is_empty() {
            self.runner.accept(&closing)?;
        }
        Ok(answer)
    }

    fn render(&self, add_generation_prompt: bool) -> Result<String> {
        let tools = self.variables.get("tools");
        self.template.render(&self.messages, tools, add_generation_prompt, &self.variables)
    }

    /// Makes `rendered` the conversation's text and returns the ids to compute. When the template rewrote the
    /// past (thoughts stripped, answer cut at a stop string), the cache goes back to the last token both
    /// agree on.
    fn extend_to(&mut self, rendered: String) -> Result<Vec<u32>> {
        let ids = match rendered.strip_prefix(self.text.as_str()) {
            Some(new) if self.exact => self.tokenizer.encode(new, false)?,
            _ => {
                let all = self.tokenizer.encode(&rendered, false)?;
                // One token must be left to compute, or there would be no logits.
                let same = shared(&all, self.runner.tokens()).min(all.len().saturating_sub(1));
                self.runner.truncate(same);
                all[same..].to_vec()
            }
        };
        self.text = rendered;
        Ok(ids)
    }
}

/// Tokens both begin with.
fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
