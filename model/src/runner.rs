//! A model with its cache: tokens in, logits out. The cache's length is always the number of accepted tokens.
use crate::cpu::{CpuExecutor, CpuTensor, KvCache};
use crate::executor::{Logits, Slots};
use crate::graph::Qwen3;
use q4_core::{Code, Error, Result};
use std::sync::Arc;

/// One context over a (shared) model.
pub struct Runner {
    model: Arc<Qwen3<CpuExecutor>>,
    executor: CpuExecutor,
    cache: KvCache,
    slots: Slots<CpuTensor>,
    tokens: Vec<u32>,
    /// Rows of the largest step.
    chunk: usize,
    prefilled: usize,
}

impl Runner {
    /// `slots` hold steps of up to `chunk` rows, and one row of logits at least.
    pub fn new(
        model: Arc<Qwen3<CpuExecutor>>,
        executor: CpuExecutor,
        cache: KvCache,
        slots: Slots<CpuTensor>,
        chunk: usize,
    ) -> Self {
        let tokens = Vec::with_capacity(cache.capacity());
        Self { model, executor, cache, slots, tokens, chunk, prefilled: 0 }
    }

    /// Tokens accepted so far; as many as the cache holds positions.
    pub fn tokens(&self) -> &[u32] {
        debug_assert_eq!(self.tokens.len(), self.cache.len());
        &self.tokens
    }
    /// Positions there is room for.
    pub fn context(&self) -> usize {
        self.cache.capacity()
    }
    /// Tokens that went through [`Runner::accept`] in all: what a conversation really computed of its prompts.
    pub fn prefilled(&self) -> usize {
        self.prefilled
    }

    /// Runs `ids` behind the accepted tokens, in steps of `chunk`; leaves the logits of the last one.
    /// On an error nothing of `ids` is accepted.
    pub fn accept(&mut self, ids: &[u32]) -> Result<()> {
        self.cache.room_for(ids.len())?;
        self.prefilled += ids.len();
        let before = self.tokens.len();
        let steps = ids.len().div_ceil(self.chunk);
        for (i, step) in ids.chunks(self.chunk).enumerate() {
            let which = if i + 1 == steps { Logits::Last } else { Logits::Skip };
            if let Err(e) = self.step(step, which) {
                self.truncate(before);
                return Err(e);
            }
        }
        Ok(())
    }

    /// Accepts one token. Allocates nothing.
    pub fn decode(&mut self, id: u32) -> Result<()> {
        self.step(&[id], Logits::Last)
    }

    /// Logits of the last accepted token, `[vocab]`; sampling may change them in place.
    pub fn logits(&mut self) -> &mut [f32] {
        self.slots.logits.data_mut()
    }

    /// Logits and history at once, for a sampler.
    pub fn logits_and_tokens(&mut self) -> (&mut [f32], &[u32]) {
        (self.slots.logits.data_mut(), &self.tokens)
    }

    /// Runs `ids` and hands the logits of every position to `sink`, `[rows, vocab]` a step. The slots must have been
    /// made with as many logit rows as steps have rows.
    pub fn accept_all(&mut self, ids: &[u32], sink: &mut dyn FnMut(&[f32])) -> Result<()> {
        self.cache.room_for(ids.len())?;
        for step in ids.chunks(self.chunk) {
            self.step(step, Logits::All)?;
            sink(self.slots.logits.data());
        }
        Ok(())
    }

    /// Forgets everything behind the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.cache.truncate(len);
    }

    fn step(&mut self, ids: &[u32], which: Logits) -> Result<()> {
        self.cache.room_for(ids.len())?;
        self.model.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which)?;
        if which != Logits::Skip && !self.slots.logits.data().iter().all(|v| v.is_finite()) {
            return Err(self.find_non_finite(ids, which));
        }
        self.tokens.extend_from_slice(ids);
        Ok(())
    }

    /// Repeats the step and names the first layer whose output is not finite.
    fn find_non_finite(&mut self, ids: &[u32], which: Logits) -> Error {
        self.cache.truncate(self.tokens.len());
        self.executor.set_watching(true);
        let again = self.model.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which);
        self.executor.set_watching(false);
        self.cache.truncate(self.tokens.len());
        again.err().unwrap_or_else(|| {
            Error::new(Code::NonFinite, "logits are not finite")
                .need("finite logits")
                .have("values that differ between two runs")
        })
    }
}
