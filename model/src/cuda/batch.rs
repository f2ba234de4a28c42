//! Several sequences that decode together, greedily: one pass over the weights serves all of them.
use super::executor::Step;
use super::slots::{Layout, Sizes};
use super::{CudaCache, CudaExecutor, CudaModel, CudaTensor};
use crate::executor::{Logits, Slots};
use q4_core::{Code, Error, Result, ThreadPool};
use q4_cuda::{Graph, Pinned};
use std::sync::Arc;

/// A batch over a shared model.
pub struct CudaBatch {
    model: Arc<CudaModel>,
    executor: CudaExecutor,
    cache: CudaCache,
    slots: Slots<CudaTensor>,
    graph: Option<Graph>,
    warm: bool,
    /// Tokens and flags, `[2, sequences]`.
    chosen: Pinned,
    /// Positions of every sequence.
    lens: Vec<u32>,
    /// Next token of every sequence, once it is known here.
    next: Vec<u32>,
    chunk: usize,
    /// Ids and positions on the device are those above.
    placed: bool,
}

impl CudaBatch {
    /// `sizes.sequences` sequences of up to `sizes.context` positions; prompts run in steps of `sizes.rows`.
    pub fn new(
        model: Arc<CudaModel>,
        threads: Arc<ThreadPool>,
        sizes: Sizes,
        rope: (&[f32], f32),
    ) -> Result<Self> {
        let (gpu, s, dtype, n) = (&model.gpu, &model.graph.shape, model.dtype, sizes.sequences);
        let dims = (s.layers, s.kv_heads, s.head_dim);
        let (slots, scratch) = Layout::new(&model, sizes.rows.max(n), n).allocate(gpu)?;
        Ok(Self {
            cache: CudaCache::new(gpu, dtype, dims, n, sizes.context)?,
            slots,
            chosen: Pinned::new(gpu, 8 * n)?,
            lens: vec![0; n],
            next: vec![0; n],
            chunk: sizes.rows,
            executor: CudaExecutor::new(&model, threads, sizes, scratch, rope)?,
            graph: None,
            warm: false,
            placed: false,
            model,
        })
    }

    /// Runs a prompt behind what `sequence` holds and chooses its next token.
    pub fn accept(&mut self, sequence: usize, ids: &[u32]) -> Result<u32> {
        let capacity = self.cache.capacity();
        if self.lens[sequence] as usize + ids.len() > capacity || ids.is_empty() {
            return Err(Error::new(Code::ContextFull, format!("sequence {sequence}"))
                .need(format!("1..={} tokens", capacity - self.lens[sequence] as usize))
                .have(ids.len().to_string()));
        }
        let steps = ids.len().div_ceil(self.chunk);
        for (i, step) in ids.chunks(self.chunk).enumerate() {
            self.executor.place(step, &self.lens)?;
            self.executor.step = Step::Prompt { sequence };
            let which = if i + 1 == steps { Logits::Last } else { Logits::Skip };
            self.forward(step, which)?;
            self.lens[sequence] += step.len() as u32;
        }
        self.executor.choose(&self.slots.logits, &self.chosen)?;
        self.read()?;
        self.placed = false;
        self.next[sequence] = self.chosen.as_slice::<u32>()[sequence];
        Ok(self.next[sequence])
    }

    /// Accepts the chosen token of every sequence and chooses the next ones.
    pub fn step(&mut self) -> Result<&[u32]> {
        let capacity = self.cache.capacity();
        if let Some(full) = self.lens.iter().position(|l| *l as usize >= capacity) {
            return Err(Error::new(Code::ContextFull, format!("sequence {full}"))
                .need("one more position")
                .have(format!("{capacity} positions")));
        }
        if !self.placed {
            self.executor.place(&self.next, &self.lens)?;
            self.placed = true;
        }
        self.executor.step = Step::Decode;
        if self.warm {
            self.replay()?;
        } else {
            self.issue()?;
            self.warm = true;
        }
        self.lens.iter_mut().for_each(|l| *l += 1);
        self.read()?;
        let n = self.lens.len();
        self.next.copy_from_slice(&self.chosen.as_slice::<u32>()[..n]);
        Ok(&self.next)
    }

    fn forward(&mut self, ids: &[u32], which: Logits) -> Result<()> {
        self.model.graph.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which)
    }

    fn issue(&mut self) -> Result<()> {
        // The ids are on the device; only their number counts here.
        let ids = std::mem::take(&mut self.next);
        let outcome = self.forward(&ids, Logits::Last);
        self.next = ids;
        outcome?;
        self.executor.choose(&self.slots.logits, &self.chosen)?;
        self.executor.feed_back()
    }

    fn replay(&mut self) -> Result<()> {
        let mut graph = match self.graph.take() {
            Some(graph) => {
                self.model.products().for_each(q4_core::Q4Linear::replayed);
                graph
            }
            None => {
                self.executor.begin_recording()?;
                let body = self.issue();
                let graph = self.executor.end_recording();
                body?;
                graph?
            }
        };
        let outcome = graph.launch(self.executor.stream.raw());
        self.graph = Some(graph);
        outcome
    }

    fn read(&mut self) -> Result<()> {
        self.executor.stream.synchronize()?;
        let n = self.lens.len();
        match self.chosen.as_slice::<u32>()[n..2 * n].iter().position(|f| *f != 0) {
            None => Ok(()),
            Some(sequence) => Err(Error::new(Code::NonFinite, format!("logits of sequence {sequence}"))
                .need("finite logits")
                .have("NaN or infinity")),
        }
    }
}
