//! A text as tokens, cut into windows that a model predicts one by one.
use crate::args::CutArgs;
use crate::context::Context;
use crate::text::Text;
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::cpu::KvType;
use q4_model::load::ContextOptions;
use std::path::Path;

/// Rows of a step at most: all their logits are held at once.
pub const ROWS: usize = 64;
/// Tokens of a window where the user does not say.
const WINDOW: usize = 512;

/// The text and how it is cut.
pub struct Windows {
    ids: Vec<u32>,
    window: usize,
}

/// Some rows of one window.
pub struct Step<'a> {
    /// The window begins: the cache must be empty.
    pub is_first: bool,
    /// What the model reads.
    pub ids: &'a [u32],
    /// The token behind each of them.
    pub next: &'a [u32],
    /// Which of those count; `None`: all.
    pub learnt: Option<&'a [bool]>,
}

/// Tokens of a window: those asked for, of at most `context`.
pub fn window(cut: &CutArgs, context: usize) -> Result<usize> {
    match cut.window.map(|w| w as usize) {
        Some(window) if window > context => Err(Error::new(Code::Usage, format!("--window {window}"))
            .need(format!("at most {context}, the model's max_position_embeddings"))),
        window => Ok(window.unwrap_or(WINDOW.min(context))),
    }
}

/// [`Code::TokenizerInvalid`] for ids that the model has no logit for.
pub fn known<'a>(ids: impl IntoIterator<Item = &'a u32>, checkpoint: &Checkpoint) -> Result<()> {
    let vocab = checkpoint.config().vocab_size;
    match ids.into_iter().find(|id| **id as usize >= vocab) {
        None => Ok(()),
        Some(id) => Err(Error::new(
            Code::TokenizerInvalid,
            format!("{}: the tokenizer is that of another model", checkpoint.name()),
        )
        .need(format!("ids below {vocab}, the model's vocab_size"))
        .have(format!("id {id}"))),
    }
}

/// A context for one window of `tokens`, which keeps the logits of whole steps.
pub fn sizes(tokens: usize, cx: &Context) -> ContextOptions {
    ContextOptions { context: tokens, chunk: ROWS, all_logits: true, kv: cx.kv(KvType::F16), many: None }
}

impl Windows {
    /// The text of `path` as `checkpoint` reads it, in windows of at most `context` tokens.
    /// [`Code::Container`]
    /// where nothing is left to predict, [`Code::TokenizerInvalid`] as of [`known`].
    pub fn new(
        path: &Path,
        text: &str,
        cut: &CutArgs,
        checkpoint: &Checkpoint,
        context: usize,
    ) -> Result<Self> {
        let window = window(cut, context)?;
        let mut ids = Text::of(checkpoint)?.tokenizer.encode(text, false)?;
        ids.truncate(cut.tokens.map_or(usize::MAX, |n| n as usize));
        known(&ids, checkpoint)?;
        let windows = Self { ids, window };
        if windows.predicted() == 0 {
            return Err(Error::new(Code::Container, format!("{}: nothing to predict", path.display()))
                .need("a text of 2 tokens or more")
                .have(format!("{} tokens", windows.ids.len())));
        }
        Ok(windows)
    }

    /// All tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Tokens of a window.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Tokens that have another before them in their window.
    pub fn predicted(&self) -> usize {
        self.steps().map(|s| s.next.len()).sum()
    }

    /// All windows in steps of [`ROWS`]. A window's last token is only predicted, so one of a single token
    /// has no step.
    pub fn steps(&self) -> impl Iterator<Item = Step<'_>> {
        self.ids.chunks(self.window).flat_map(|window| {
            let (read, next) = (&window[..window.len() - 1], &window[1..]);
            let steps = read.chunks(ROWS).zip(next.chunks(ROWS)).enumerate();
            steps.map(|(i, (ids, next))| Step { is_first: i == 0, ids, next, learnt: None })
        })
    }

    /// A context for one window.
    pub fn sizes(&self, cx: &Context) -> ContextOptions {
        sizes(self.window.min(self.ids.len()), cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(ids: u32, window: usize) -> Vec<(bool, Vec<u32>, Vec<u32>)> {
        let windows = Windows { ids: (0..ids).collect(), window };
        windows.steps().map(|s| (s.is_first, s.ids.to_vec(), s.next.to_vec())).collect()
    }

    #[test]
    fn every_token_of_a_window_but_its_first_is_predicted() {
        let steps = [(true, vec![0, 1], vec![1, 2]), (true, vec![3, 4], vec![4, 5])];
        assert_eq!(cut(6, 3), steps);
        assert_eq!(cut(7, 3), steps, "a window of one token predicts nothing");
        assert_eq!(cut(1, 3), []);
        assert_eq!(cut(0, 3), []);
    }

    #[test]
    fn long_windows_take_several_steps() {
        let steps = cut(200, 150);
        let seen: Vec<_> = steps.iter().map(|(first, ids, _)| (*first, ids[0], ids.len())).collect();
        assert_eq!(seen, [(true, 0, 64), (false, 64, 64), (false, 128, 21), (true, 150, 49)]);
        for (_, ids, next) in &steps {
            assert!(ids.iter().zip(next).all(|(i, n)| i + 1 == *n) && ids.len() == next.len());
        }
    }
}
