//! Generating text: prompt in, sampled tokens out, stopped by ids, strings or a limit.
use crate::draft::Draft;
pub use crate::draft::{Answer, FinishReason, Limits};
use crate::runner::Runner;
use crate::sampling::{Sampler, SamplingParams};
use crate::template::{ChatTemplate, Message};
use crate::tokenizer::Tokenizer;
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value};
use std::time::Instant;

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
    let room = runner.context() - runner.tokens().len();
    let mut draft = Draft::new(tokenizer, limits, runner.tokens(), room)?;
    draft.answer.prompt_tokens = prompt.len();
    draft.answer.prefill = prefill;
    if !is_whole {
        draft.answer.finish = FinishReason::Interrupted;
        return Ok(draft.answer);
    }
    let mut say = |text: String| {
        if !text.is_empty() {
            emit(&text);
        }
    };
    while draft.has_room() {
        if limits.is_interrupted() {
            draft.end(FinishReason::Interrupted);
            break;
        }
        if draft.looks() {
            draft.look(runner.logits()?)?;
        }
        let drawn = match draft.is_bound() {
            true => runner.sample_bound(sampler, &mut |logits| draft.bind(logits))?,
            false => Some(runner.sample(sampler)?),
        };
        let Some(id) = drawn else { break };
        if !draft.take(id)? {
            break;
        }
        runner.decode(id)?;
        say(draft.spell(id)?);
    }
    runner.settle()?;
    say(draft.finish()?);
    draft.answer.decode = start.elapsed();
    Ok(draft.answer)
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
