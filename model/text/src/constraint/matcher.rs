//! One answer on its way through a grammar.
use super::Thoughts;
use super::lexicon::{CLOSE, Marks, find_close, leaves};
use super::words::plain;
use llguidance::TokenParser;
use llguidance::toktrie::SimpleVob;
use q4_core::{Code, Error, Result};
use std::sync::Arc;

/// Newlines behind thoughts that are nobody's text.
const NEWLINES: usize = 2;

/// Which tokens may come next in one answer. For each token: [`mask`](Self::mask) the logits, then
/// [`accept`](Self::accept) what was drawn from them.
pub struct Matcher {
    inner: llguidance::Matcher,
    marks: Arc<Marks>,
    stage: Stage,
    name: &'static str,
}

/// Where an answer is.
enum Stage {
    /// At its first token, which may be `<think>`.
    Start,
    /// In thoughts, of whose last bytes so many are the beginning of `</think>`.
    Thoughts(Vec<u8>),
    /// Behind thoughts, and so many newlines.
    Closed(usize),
    /// In its form.
    Form,
}

/// Which tokens there may be now.
struct Next {
    allowed: SimpleVob,
    may_end: bool,
}

impl Matcher {
    pub(super) fn new(
        parser: TokenParser,
        marks: Arc<Marks>,
        thoughts: Thoughts,
        name: &'static str,
    ) -> Self {
        let stage = match thoughts {
            Thoughts::None => Stage::Form,
            Thoughts::Possible => Stage::Start,
            Thoughts::Begun => Stage::Thoughts(Vec::new()),
        };
        Self { inner: llguidance::Matcher::new(Ok(parser)), marks, stage, name }
    }

    /// Looks whether the form has a beginning.
    pub(super) fn begin(mut self) -> Result<()> {
        self.next().map(drop)
    }

    /// Takes every token its chance that may not come: its logit becomes -inf. `logits`, `[vocab]`, may have
    /// rows that no token has. Tokens of `ends` may come where the form may end and nowhere else. False where
    /// nothing but the end is left: the answer is complete.
    ///
    /// # Errors
    /// [`Code::Usage`] where the form takes more work than a step may, or goes nowhere from here.
    pub fn mask(&mut self, logits: &mut [f32], ends: &[u32]) -> Result<bool> {
        if let Stage::Thoughts(tail) = &self.stage {
            self.forbid_leaving(tail, logits);
            for id in ends {
                forbid(logits, *id);
            }
            return Ok(true);
        }
        let Next { mut allowed, may_end } = self.next()?;
        match self.stage {
            Stage::Start => self.marks.open.iter().for_each(|id| allowed.allow_token(*id)),
            Stage::Closed(so_far) => {
                let more = self.marks.newlines.iter().filter(|(_, n)| so_far + n <= NEWLINES);
                more.for_each(|(id, _)| allowed.allow_token(*id));
            }
            Stage::Thoughts(_) | Stage::Form => {}
        }
        let tokens = allowed.len();
        for id in ends.iter().filter(|id| (**id as usize) < tokens) {
            allowed.disallow_token(*id);
        }
        if allowed.is_zero() {
            return if may_end { Ok(false) } else { Err(self.failed("no token goes on from here")) };
        }
        let kept: Vec<_> = match may_end {
            true => ends.iter().filter_map(|id| Some((*id, *logits.get(*id as usize)?))).collect(),
            false => Vec::new(),
        };
        apply(&allowed, logits);
        for (id, logit) in kept {
            logits[id as usize] = logit;
        }
        Ok(true)
    }

    /// Takes the token that was drawn, which ends nothing. False where the answer is complete with it.
    ///
    /// # Errors
    /// As [`mask`](Self::mask), and for a token that it does not admit.
    pub fn accept(&mut self, id: u32) -> Result<bool> {
        match &mut self.stage {
            Stage::Start if self.marks.open == Some(id) => {
                self.stage = Stage::Thoughts(Vec::new());
                return Ok(true);
            }
            Stage::Thoughts(tail) => {
                let trie =
                    self.inner.tok_env().map_err(|e| Error::new(Code::Internal, plain(&e.to_string())))?;
                let trie = trie.tok_trie();
                if !trie.is_special_token(id) {
                    tail.extend_from_slice(trie.token(id));
                }
                self.stage = match find_close(tail) {
                    Some(end) => Stage::Closed(tail.len() - end),
                    None => Stage::Thoughts(tail[tail.len() - begun(tail)..].to_vec()),
                };
                return Ok(true);
            }
            Stage::Closed(so_far) => {
                let newlines = self.marks.newlines.iter().find(|(newline, _)| *newline == id);
                if let Some((_, n)) = newlines.filter(|(_, n)| *so_far + n <= NEWLINES) {
                    *so_far += n;
                    return Ok(true);
                }
            }
            Stage::Start | Stage::Form => {}
        }
        self.stage = Stage::Form;
        self.inner.consume_token(id).map_err(|e| self.failed(&e.to_string()))?;
        Ok(!self.inner.is_stopped())
    }

    /// Whether the answer is complete, and nothing can come any more.
    #[cfg(test)]
    pub(super) fn is_over(&self) -> bool {
        self.inner.is_stopped() && !self.inner.is_error()
    }

    fn next(&mut self) -> Result<Next> {
        let asked = self.inner.compute_mask().and_then(|allowed| {
            let may_end = self.inner.is_accepting()?;
            Ok(Next { allowed, may_end })
        });
        let mut next = asked.map_err(|e| self.failed(&e.to_string()))?;
        // The token that stands for the end is the last one, and no token.
        next.allowed.disallow_token(next.allowed.len() as u32 - 1);
        Ok(next)
    }

    /// Thoughts end with `</think>` and newlines, never inside of a token that goes on: what follows would
    /// have been drawn without the form.
    fn forbid_leaving(&self, tail: &[u8], logits: &mut [f32]) {
        let Ok(env) = self.inner.tok_env() else { return };
        let trie = env.tok_trie();
        let (whole, mut text) = (tail.is_empty(), Vec::new());
        for id in if whole { &self.marks.always } else { &self.marks.beyond } {
            text.clear();
            text.extend_from_slice(tail);
            text.extend_from_slice(trie.token(*id));
            if whole || leaves(&text) {
                forbid(logits, *id);
            }
        }
        for logit in logits.iter_mut().skip(trie.vocab_size() - 1) {
            *logit = f32::NEG_INFINITY;
        }
    }

    fn failed(&self, why: &str) -> Error {
        Error::new(Code::Usage, format!("the answer cannot keep to {}", self.name))
            .need("a form that goes on from here, within the work that a step may take")
            .have(plain(why))
            .fix("a simpler form")
    }
}

fn forbid(logits: &mut [f32], id: u32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

/// Bytes at the end of `text` that the end of thoughts begins with.
fn begun(text: &[u8]) -> usize {
    (0..CLOSE.len()).rev().find(|n| text.ends_with(&CLOSE[..*n])).unwrap_or(0)
}

/// -inf for all that is not allowed, and for what is no token.
fn apply(allowed: &SimpleVob, logits: &mut [f32]) {
    let (words, none) = (allowed.as_slice(), 0);
    for (at, logits) in logits.chunks_mut(32).enumerate() {
        match *words.get(at).unwrap_or(&none) {
            u32::MAX => {}
            0 => logits.fill(f32::NEG_INFINITY),
            word => {
                for (bit, logit) in logits.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}
