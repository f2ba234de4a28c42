//! An answer, and one in the making: what every token does to it, whoever computes the logits.
use crate::constraint::{Grammar, Matcher};
use crate::likely::Ranking;
use crate::stop::StopMatcher;
use crate::tokenizer::{DecodeStream, Tokenizer};
use q4_core::{Code, Error, Result};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What an answer is held to: when it ends, and what it must be.
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
    /// What it must be, if that is not left to the model. Ids of `stop_ids` end it where its form may end and
    /// nowhere else; where nothing but the end is left it ends without one.
    pub form: Option<Grammar>,
    /// Ends an answer at the next token, or a prompt before the next operation, once it is set.
    pub interrupt: Option<&'static AtomicBool>,
}

impl Limits {
    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupt.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FinishReason {
    /// A stop id was sampled, or the form it must have was complete.
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

/// For each token: [`look`](Self::look) at its logits, [`bind`](Self::bind) them, [`take`](Self::take) what
/// was drawn, [`spell`](Self::spell) it; [`finish`](Self::finish) at the end.
pub struct Draft<'a> {
    /// What there is of it.
    pub answer: Answer,
    stream: DecodeStream<'a>,
    matcher: StopMatcher,
    form: Option<Matcher>,
    collapse: Collapse,
    stop_ids: Vec<u32>,
    top_logprobs: usize,
    /// Tokens that were asked for at most, and those there is room for.
    most: usize,
    room: usize,
    /// Why it ended, once it has.
    ended: Option<FinishReason>,
}

impl<'a> Draft<'a> {
    /// An answer to `history`, all tokens before it, behind which the cache has room for `room` more.
    ///
    /// # Errors
    /// As [`StopMatcher::new`].
    pub fn new(tokenizer: &'a Tokenizer, limits: &Limits, history: &[u32], room: usize) -> Result<Self> {
        let most = limits.max_tokens.min(room);
        let answer = Answer {
            text: String::new(),
            ids: Vec::with_capacity(most),
            likely: Ranking::new(limits.top_logprobs, most),
            prompt_tokens: history.len(),
            finish: FinishReason::Length,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
        };
        Ok(Self {
            answer,
            stream: tokenizer.stream(true),
            matcher: StopMatcher::new(&limits.stop_strings)?,
            form: limits.form.as_ref().map(Grammar::matcher),
            collapse: Collapse::behind(history),
            stop_ids: limits.stop_ids.clone(),
            top_logprobs: limits.top_logprobs,
            most: limits.max_tokens,
            room,
            ended: None,
        })
    }

    /// Whether it goes on: nothing has ended it, and there is room for one more token.
    pub fn has_room(&self) -> bool {
        self.ended.is_none() && self.answer.ids.len() < self.most.min(self.room)
    }

    /// Whether [`look`](Self::look) has anything to do: a device need not send its logits otherwise.
    pub fn looks(&self) -> bool {
        !self.collapse.over || self.top_logprobs > 0
    }

    /// Looks at the logits of the next token, before a draw changes them.
    ///
    /// # Errors
    /// [`Code::NonFinite`] for logits that say nothing about any token.
    pub fn look(&mut self, logits: &[f32]) -> Result<()> {
        self.collapse.look(logits)?;
        if self.top_logprobs > 0 {
            self.answer.likely.look(logits);
        }
        Ok(())
    }

    /// Whether [`bind`](Self::bind) has anything to do: a device may draw by itself otherwise.
    pub fn is_bound(&self) -> bool {
        self.form.is_some()
    }

    /// Takes all tokens out of `logits` that the answer's form does not admit; the last thing that is done to
    /// them before a draw, so that nothing lifts one again. False where the answer is complete: it ends
    /// without a draw. This allocates.
    ///
    /// # Errors
    /// As [`Matcher::mask`].
    pub fn bind(&mut self, logits: &mut [f32]) -> Result<bool> {
        let Some(form) = &mut self.form else { return Ok(true) };
        let goes_on = form.mask(logits, &self.stop_ids)?;
        if !goes_on {
            self.ended = Some(FinishReason::Stop);
        }
        Ok(goes_on)
    }

    /// Takes the token that was drawn. False where it ends the answer and is none of it.
    ///
    /// # Errors
    /// As [`Matcher::accept`].
    pub fn take(&mut self, id: u32) -> Result<bool> {
        if self.stop_ids.contains(&id) {
            self.ended = Some(FinishReason::Stop);
            return Ok(false);
        }
        if let Some(form) = &mut self.form
            && !form.accept(id)?
        {
            self.ended = Some(FinishReason::Stop);
        }
        self.collapse.take(id);
        self.answer.ids.push(id);
        Ok(true)
    }

    /// The text that became complete with a token that was taken; none while it may still become a stop
    /// string.
    ///
    /// # Errors
    /// As [`DecodeStream::push`].
    pub fn spell(&mut self, id: u32) -> Result<String> {
        let Some(piece) = self.stream.push(id)? else { return Ok(String::new()) };
        Ok(self.say(&piece))
    }

    /// Ends it for a reason of its owner's.
    pub fn end(&mut self, why: FinishReason) {
        self.ended = self.ended.or(Some(why));
    }

    /// The rest of the text, which nobody has to wait for any longer; sets why the answer ended.
    ///
    /// # Errors
    /// As [`DecodeStream::finish`].
    pub fn finish(&mut self) -> Result<String> {
        let is_full = self.answer.ids.len() < self.most;
        let cut = if is_full { FinishReason::Context } else { FinishReason::Length };
        self.answer.finish = self.ended.unwrap_or(cut);
        if self.answer.finish == FinishReason::StopString {
            return Ok(String::new());
        }
        let rest = self.stream.finish()?;
        // Half a character that nobody waited for is no text.
        let is_left = self.answer.finish == FinishReason::Interrupted;
        let rest = if is_left { rest.trim_end_matches(char::REPLACEMENT_CHARACTER) } else { &rest };
        let mut said = self.say(rest);
        if self.ended == Some(FinishReason::StopString) {
            self.answer.finish = FinishReason::StopString;
        } else {
            let held = self.matcher.finish();
            self.answer.text.push_str(&held);
            said.push_str(&held);
        }
        Ok(said)
    }

    fn say(&mut self, piece: &str) -> String {
        let matched = self.matcher.push(piece);
        if matched.stopped.is_some() {
            self.ended = Some(FinishReason::StopString);
        }
        self.answer.text.push_str(&matched.emit);
        matched.emit
    }
}

/// Tells logits that are finite and know nothing: all equal, or the same for every one of the first tokens of
/// an answer. Whoever repeats himself has other logits each time, so nothing is looked at once two rows
/// differ; only where all there is so far is one token again and again may the bits be the same, for attention
/// to equal values is that value.
struct Collapse {
    /// The token that is all there is so far.
    only: Option<u32>,
    before: Option<u64>,
    same: usize,
    over: bool,
}

impl Collapse {
    /// Rows in a row that are the same, bit for bit.
    const ROWS: usize = 8;

    fn behind(history: &[u32]) -> Self {
        let only = history.first().copied().filter(|first| history.iter().all(|id| id == first));
        Self { only, before: None, same: 0, over: false }
    }

    fn take(&mut self, id: u32) {
        self.only = self.only.filter(|only| *only == id);
    }

    fn look(&mut self, logits: &[f32]) -> Result<()> {
        if self.over {
            return Ok(());
        }
        let told = |have: &str| {
            Err(Error::new(Code::NonFinite, "the logits say nothing about the next token")
                .need("logits that differ from token to token, and from position to position")
                .have(have)
                .fix("`q4 verify --run MODEL` looks for the cause"))
        };
        if logits.len() > 1 && logits.iter().all(|l| *l == logits[0]) {
            return told("the same logit for every token");
        }
        if self.only.is_some() {
            return Ok(());
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of so many equal rows behind `history`, with `id` drawn from each, is told.
    fn told(history: &[u32], id: u32, rows: usize) -> Option<usize> {
        let mut collapse = Collapse::behind(history);
        (1..=rows).find(|_| {
            let is_told = collapse.look(&[0.5, 1.5, -1.0]).is_err();
            collapse.take(id);
            is_told
        })
    }

    #[test]
    fn equal_rows_are_told_unless_all_there_is_is_one_token() {
        assert_eq!(told(&[1, 2], 2, 20), Some(Collapse::ROWS));
        assert_eq!(told(&[2, 2], 2, 20), None);
        assert_eq!(told(&[2], 2, 20), None);
        // The first row is that of the prompt alone.
        assert_eq!(told(&[2, 2], 1, 20), Some(Collapse::ROWS + 1));
        assert!(Collapse::behind(&[2]).look(&[0.5; 3]).is_err(), "the same for every token is always told");
    }
}
