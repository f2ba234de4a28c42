//! What is asked of a [`Scheduler`](super::Scheduler), and what it tells while it answers.
use super::Nudges;
use crate::draft::{Answer, Limits};
use crate::likely::Likely;
use crate::sampling::SamplingParams;
use q4_core::Error;

/// One sequence to continue.
#[derive(Clone, Debug)]
pub struct Request {
    /// At least one token.
    pub prompt: Vec<u32>,
    /// How to draw.
    pub params: SamplingParams,
    /// What is added to logits before each draw.
    pub nudges: Nudges,
    /// When to stop. `interrupt` is nobody's here: whoever asked stops by being [gone](Sink::is_gone).
    pub limits: Limits,
    /// Whether the cache of another sequence that began alike may be read, and this one's may be kept for
    /// others. What is answered is the same.
    pub reuse: bool,
    /// Whether the probabilities of the prompt's own tokens are asked for: all of it is computed then.
    pub prompt_logprobs: bool,
}

/// A token with its probability, where `limits.top_logprobs` or `prompt_logprobs` ask for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Weighed {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability, by the model alone: no penalty, no temperature. `None` for the
    /// first token of a prompt, which nothing precedes.
    pub logprob: Option<f32>,
    /// The most likely tokens at its place, best first; as many as `limits.top_logprobs`.
    pub top: Vec<Likely>,
}

/// What happens to a request, in this order: `Started` once, then tokens, then one of the last two.
#[derive(Clone, Debug)]
pub enum Event {
    /// The prompt is in the cache.
    Started {
        /// Tokens of it that were there before.
        cached: usize,
        /// Its own tokens, if `prompt_logprobs` asked for them.
        prompt: Vec<Weighed>,
    },
    /// A token of the answer; a stop id is none.
    Token {
        /// The token; weighed if that was asked for.
        token: Weighed,
        /// The text that became complete with it: none while a character or a stop string may still grow.
        text: String,
    },
    /// The answer as a whole, with the text that nobody had to wait for any longer.
    Ended {
        /// Behind the last token's text.
        text: String,
        /// All of it.
        answer: Box<Answer>,
    },
    /// There is no answer.
    Failed(Error),
}

/// Who asked.
pub trait Sink: Send {
    /// Takes what happened; must not wait.
    fn tell(&mut self, event: Event);
    /// Nobody listens any longer: the request is dropped before the next step.
    fn is_gone(&self) -> bool {
        false
    }
}
