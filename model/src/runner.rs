//! A model with its cache: tokens in, logits out. The cache's length is always the number of accepted tokens.
use crate::batch::Sequences;
use crate::config::Rotation;
use crate::cpu::KvType;
use crate::executor::{Logits, Shape, Sizes};
use crate::sampling::Sampler;
use crate::watch::{Each, Watch};
use crate::weights::Linear;
use q4_core::memory::Budget;
use q4_core::{Code, DType, Error, Result, ThreadPool};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::span::EnteredSpan;

/// A graph with its weights, where it computes.
pub trait Model: Any + Send + Sync {
    /// Sizes of the graph.
    fn shape(&self) -> &Shape;
    /// Products of every layer: q/k/v, attention output, gate/up, MLP output.
    fn blocks(&self) -> Vec<[&Linear; 4]>;
    /// The head, if it is a 4-bit product.
    fn head(&self) -> Option<&Linear>;
    /// A context of its own.
    ///
    /// # Errors
    /// [`Code::OutOfMemory`] where it does not fit.
    fn engine(self: Arc<Self>, cx: Context<'_>) -> Result<Box<dyn Engine>>;
    /// Several sequences that share a cache of `pages` pages and their steps.
    ///
    /// # Errors
    /// As [`engine`](Self::engine).
    fn sequences(self: Arc<Self>, cx: Context<'_>, pages: usize) -> Result<Box<dyn Sequences>>;
    /// Why the bits of a row depend on who else is in a step, whatever products do; `None` where all between
    /// them promises that they do not.
    fn mixes_rows(&self) -> Option<&'static str> {
        None
    }
}

/// What a context is made of.
pub struct Context<'a> {
    /// Sizes.
    pub sizes: Sizes,
    /// How keys and values are cached, where there is a choice.
    pub kv: KvType,
    /// Output type of products.
    pub dtype: DType,
    /// Threads all contexts share.
    pub threads: Arc<ThreadPool>,
    /// How heads are turned.
    pub rotation: &'a Rotation,
    /// What may be allocated where the model is.
    pub budget: &'a Budget,
}

/// A graph, an executor, a cache and slots of one device: what a [`Runner`] drives.
pub trait Engine: Send {
    /// Runs `ids` behind what the cache holds and commits them to it; need not wait for it.
    fn step(&mut self, ids: &[u32], which: Logits<'_>) -> Result<()>;
    /// The logits of the last step, `[rows, vocab]`, in host memory; waits for them. Always of the last
    /// [`step`](Self::step) that was asked for: an engine may compute behind a chosen token before it is
    /// asked to, and keeps that to itself until it is.
    fn logits(&mut self) -> Result<&mut [f32]>;
    /// Whether every logit of the last step is finite; waits for it.
    fn is_finite(&mut self) -> Result<bool>;
    /// Positions the cache holds.
    fn len(&self) -> usize;
    /// Nothing accepted yet.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Positions it has room for.
    fn capacity(&self) -> usize;
    /// Forgets everything behind the first `len` positions.
    fn truncate(&mut self, len: usize);
    /// What is done between the operations of a step from now on.
    fn watch(&mut self, watch: Watch);
    /// The id with the largest logit of the last step, the lowest of several; waits for it. Any id where the
    /// logits are not finite.
    fn greedy(&mut self) -> Result<u32> {
        let logits = self.logits()?;
        let mut best = 0;
        for (i, v) in logits.iter().enumerate() {
            if *v > logits[best] {
                best = i;
            }
        }
        Ok(best as u32)
    }
    /// The next token by `sampler` from the logits of the last step, which a penalty on `recent` changes. An
    /// engine that does this elsewhere draws what the sampler draws from the same logits; it may return
    /// any id where they are not finite, which the sampler refuses.
    fn sample(&mut self, sampler: &mut Sampler, recent: &[u32]) -> Result<u32> {
        match sampler.is_greedy() {
            true => self.greedy(),
            false => sampler.sample(self.logits()?, recent),
        }
    }
}

/// One context over a (shared) model.
pub struct Runner {
    engine: Box<dyn Engine>,
    tokens: Vec<u32>,
    /// Rows of the largest step.
    chunk: usize,
    prefilled: usize,
    /// The last token was decoded, and nobody has looked whether its logits are finite.
    unchecked: bool,
}

impl Runner {
    /// `engine` takes steps of up to `chunk` rows.
    pub fn new(engine: Box<dyn Engine>, chunk: usize) -> Self {
        let tokens = Vec::with_capacity(engine.capacity());
        Self { engine, tokens, chunk, prefilled: 0, unchecked: false }
    }

    /// Tokens accepted so far; as many as the cache holds positions.
    pub fn tokens(&self) -> &[u32] {
        debug_assert_eq!(self.tokens.len(), self.engine.len());
        &self.tokens
    }
    /// Positions there is room for.
    pub fn context(&self) -> usize {
        self.engine.capacity()
    }
    /// Tokens that went through [`Runner::accept`] in all: what a conversation really computed of its
    /// prompts.
    pub fn prefilled(&self) -> usize {
        self.prefilled
    }

    /// Runs `ids` behind the accepted tokens, in steps of `chunk`; leaves the logits of the last one.
    /// On an error nothing of `ids` is accepted.
    ///
    /// # Errors
    /// [`Code::ContextFull`] when they do not fit, [`Code::NonFinite`] with the first layer that produced NaN
    /// or infinity, and those of backends and devices.
    pub fn accept(&mut self, ids: &[u32]) -> Result<()> {
        let _span = self.prefill(ids);
        self.settle()?;
        self.room_for(ids.len())?;
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

    /// The same until `stop` is set, which is looked at between the operations of a step. False where it was:
    /// nothing of `ids` is accepted then.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn accept_unless(&mut self, ids: &[u32], stop: Option<&'static AtomicBool>) -> Result<bool> {
        let Some(stop) = stop else { return self.accept(ids).map(|()| true) };
        self.engine.watch(Watch::Unless(stop));
        let accepted = self.accept(ids);
        self.engine.watch(Watch::Nothing);
        match accepted {
            Err(_) if stop.load(Ordering::Relaxed) => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Accepts one token; need not wait for its logits, so the device computes while the caller goes on.
    /// Whether they are finite is looked at by the next call that needs them, and by
    /// [`settle`](Self::settle). Allocates nothing.
    ///
    /// # Errors
    /// As [`accept`](Self::accept); [`Code::NonFinite`] is about the token before.
    pub fn decode(&mut self, id: u32) -> Result<()> {
        let _span = tracing::debug_span!("decode", position = self.tokens.len()).entered();
        self.settle()?;
        self.room_for(1)?;
        self.engine.step(&[id], Logits::Last)?;
        self.tokens.push(id);
        self.unchecked = true;
        Ok(())
    }

    /// Waits for the logits of the last token. Where they are not finite, the token is no longer accepted,
    /// and the error names the first layer that is not.
    ///
    /// # Errors
    /// [`Code::NonFinite`] with that layer, and errors of the device.
    pub fn settle(&mut self) -> Result<()> {
        if self.unchecked && !self.engine.is_finite()? {
            let id = self.tokens.pop().unwrap_or_default();
            self.unchecked = false;
            return Err(self.find_non_finite(&[id], Logits::Last));
        }
        self.unchecked = false;
        Ok(())
    }

    /// Logits of the last accepted token, `[vocab]`; sampling may change them in place.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    pub fn logits(&mut self) -> Result<&mut [f32]> {
        self.settle()?;
        self.engine.logits()
    }

    /// The most likely next token; the lowest id of several. On a device nothing but the id leaves it.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    pub fn greedy(&mut self) -> Result<u32> {
        let _span = tracing::debug_span!("sample", position = self.tokens.len()).entered();
        let id = self.engine.greedy();
        self.settle()?;
        id
    }

    /// The next token by `sampler`, whose penalty applies to all accepted tokens. On a device nothing but the
    /// id leaves it, unless tokens are penalised at temperature 0.
    ///
    /// # Errors
    /// As [`settle`](Self::settle) and [`Sampler::sample`].
    pub fn sample(&mut self, sampler: &mut Sampler) -> Result<u32> {
        let _span = tracing::debug_span!("sample", position = self.tokens.len()).entered();
        let id = self.engine.sample(sampler, &self.tokens);
        self.settle()?; // says more than the sampler about logits it refuses
        id
    }

    /// The same from logits that `bind` has changed in host memory, wherever they were computed; `None` where
    /// it says that there is nothing to draw.
    ///
    /// # Errors
    /// As [`sample`](Self::sample), and those of `bind`.
    pub fn sample_bound(
        &mut self,
        sampler: &mut Sampler,
        bind: &mut dyn FnMut(&mut [f32]) -> Result<bool>,
    ) -> Result<Option<u32>> {
        let _span = tracing::debug_span!("sample", position = self.tokens.len()).entered();
        self.settle()?;
        let logits = self.engine.logits()?;
        if !bind(logits)? {
            return Ok(None);
        }
        sampler.sample(logits, &self.tokens).map(Some)
    }

    /// Runs `ids` and hands the logits of every position to `sink`, `[rows, vocab]` a step. The engine must
    /// have been made with as many logit rows as steps have rows.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn accept_all(&mut self, ids: &[u32], sink: &mut dyn FnMut(&[f32])) -> Result<()> {
        let _span = self.prefill(ids);
        self.settle()?;
        self.room_for(ids.len())?;
        for step in ids.chunks(self.chunk) {
            self.step(step, Logits::All)?;
            sink(self.engine.logits()?);
        }
        Ok(())
    }

    /// Runs `ids` as [`accept_all`](Self::accept_all) does and hands every value of every step to `each`, who
    /// alone looks whether they are finite.
    ///
    /// # Errors
    /// As [`accept`](Self::accept), [`Code::NonFinite`] excepted.
    pub fn accept_watched(&mut self, ids: &[u32], each: Each) -> Result<()> {
        let _span = self.prefill(ids);
        self.settle()?;
        self.room_for(ids.len())?;
        self.engine.watch(Watch::Each(each));
        let steps = ids.chunks(self.chunk).try_for_each(|step| {
            self.engine.step(step, Logits::All)?;
            self.tokens.extend_from_slice(step);
            Ok(())
        });
        self.engine.watch(Watch::Nothing);
        steps
    }

    /// Forgets everything behind the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.unchecked &= len >= self.tokens.len();
        self.tokens.truncate(len);
        self.engine.truncate(len);
    }

    fn prefill(&self, ids: &[u32]) -> EnteredSpan {
        let (position, rows) = (self.tokens.len(), self.chunk);
        tracing::info_span!("prefill", tokens = ids.len(), position, rows).entered()
    }

    fn room_for(&self, rows: usize) -> Result<()> {
        let (len, capacity) = (self.engine.len(), self.engine.capacity());
        if len + rows > capacity {
            return Err(Error::new(Code::ContextFull, "the context is full")
                .need(format!("{} positions", len + rows))
                .have(format!("{capacity} positions"))
                .fix("raise --context up to max_position_embeddings of config.json, or start a new conversation"));
        }
        Ok(())
    }

    fn step(&mut self, ids: &[u32], which: Logits<'_>) -> Result<()> {
        self.room_for(ids.len())?;
        self.engine.step(ids, which)?;
        if which != Logits::Skip && !self.engine.is_finite()? {
            return Err(self.find_non_finite(ids, which));
        }
        self.tokens.extend_from_slice(ids);
        Ok(())
    }

    /// Repeats the step and names the first layer whose output is not finite.
    fn find_non_finite(&mut self, ids: &[u32], which: Logits<'_>) -> Error {
        self.engine.truncate(self.tokens.len());
        self.engine.watch(Watch::NonFinite);
        let again = self.engine.step(ids, which);
        self.engine.watch(Watch::Nothing);
        self.engine.truncate(self.tokens.len());
        again.err().unwrap_or_else(|| {
            Error::new(Code::NonFinite, "logits are not finite")
                .need("finite logits")
                .have("values that differ between two runs")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::go_on;

    /// Its logits say that the next token is the number of positions; those of `bad` positions are NaN.
    struct Counter {
        len: usize,
        bad: usize,
        logits: [f32; 8],
        /// Looked at behind what a step computes.
        stop: Option<&'static AtomicBool>,
    }

    impl Engine for Counter {
        fn step(&mut self, ids: &[u32], _which: Logits<'_>) -> Result<()> {
            self.len += ids.len();
            self.logits = [0.0; 8];
            self.logits[self.len] = if self.len == self.bad { f32::NAN } else { 1.0 };
            self.stop.map_or(Ok(()), go_on)
        }
        fn logits(&mut self) -> Result<&mut [f32]> {
            Ok(&mut self.logits)
        }
        fn is_finite(&mut self) -> Result<bool> {
            Ok(self.logits.iter().all(|v| v.is_finite()))
        }
        fn len(&self) -> usize {
            self.len
        }
        fn capacity(&self) -> usize {
            7
        }
        fn truncate(&mut self, len: usize) {
            self.len = self.len.min(len);
        }
        fn watch(&mut self, watch: Watch) {
            self.stop = if let Watch::Unless(stop) = watch { Some(stop) } else { None };
        }
    }

    fn runner(bad: usize) -> Runner {
        Runner::new(Box::new(Counter { len: 0, bad, logits: [0.0; 8], stop: None }), 4)
    }

    #[test]
    fn who_needs_the_logits_of_a_decoded_token_finds_them_finite_or_an_error() -> Result<()> {
        type Call = fn(&mut Runner) -> Result<()>;
        let calls: [(&str, Call); 6] = [
            ("settle", Runner::settle),
            ("logits", |r| r.logits().map(drop)),
            ("greedy", |r| r.greedy().map(drop)),
            ("decode", |r| r.decode(1)),
            ("accept", |r| r.accept(&[1, 2])),
            ("accept_all", |r| r.accept_all(&[1], &mut |_| {})),
        ];
        for (name, call) in calls {
            let mut r = runner(3);
            r.accept(&[1, 1])?;
            r.decode(2)?;
            assert_eq!(r.tokens(), [1, 1, 2], "{name}: accepted until it is looked at");
            assert_eq!(call(&mut r).expect_err(name).code(), Code::NonFinite);
            assert_eq!((r.tokens(), r.engine.len()), (&[1u32, 1][..], 2), "{name}: no longer accepted");
        }
        let mut r = runner(3);
        r.accept(&[1, 1])?;
        r.decode(2)?;
        r.truncate(2);
        r.accept(&[1, 1])?; // what was forgotten is nobody's trouble
        assert_eq!((r.greedy()?, r.tokens().len()), (4, 4));
        assert_eq!(runner(3).accept(&[1, 1, 1]).expect_err("in a prompt").code(), Code::NonFinite);
        Ok(())
    }

    #[test]
    fn a_prompt_that_is_stopped_is_not_there() -> Result<()> {
        static STOP: AtomicBool = AtomicBool::new(false);
        let mut r = runner(8);
        assert!(r.accept_unless(&[1], Some(&STOP))?);
        STOP.store(true, Ordering::Relaxed);
        assert!(!r.accept_unless(&[2; 5], Some(&STOP))?);
        assert_eq!((r.tokens(), r.engine.len()), (&[1u32][..], 1));
        r.accept(&[3; 5])?; // nobody can stop it now
        assert_eq!(r.tokens().len(), 6);
        let full = r.accept_unless(&[4; 5], None).expect_err("11 of 7 positions");
        assert_eq!(full.code(), Code::ContextFull);
        Ok(())
    }
}
