//! Several sequences that decode together, greedily: one pass over the weights serves all of them.
use super::ahead::Stands;
use super::executor::Step;
use super::outbox::{Choice, Outbox, Ticket};
use super::{CudaCache, CudaExecutor, CudaModel, CudaTensor};
use crate::config::Rotation;
use crate::executor::{Executor, Logits, Sizes, Slots};
use q4_core::{Code, Error, Result, ThreadPool};
use q4_cuda::Graph;
use std::sync::Arc;

/// A batch over a shared model.
pub struct CudaBatch {
    model: Arc<CudaModel>,
    pub(super) executor: CudaExecutor,
    cache: CudaCache,
    slots: Slots<CudaTensor>,
    graph: Option<Graph>,
    warm: bool,
    outbox: Outbox,
    /// Where the device stands behind the last step.
    pub(super) stands: Stands,
    /// The last record of every sequence that was asked for.
    asked: Vec<Ticket>,
    /// Positions of every sequence.
    lens: Vec<u32>,
    /// Next token of every sequence, once it is known here.
    next: Vec<u32>,
    chunk: usize,
}

impl CudaBatch {
    /// `sizes.sequences` sequences of up to `sizes.context` positions; prompts run in steps of `sizes.rows`.
    pub fn new(
        model: Arc<CudaModel>,
        threads: Arc<ThreadPool>,
        sizes: Sizes,
        rotation: &Rotation,
    ) -> Result<Self> {
        let (gpu, dtype) = (&model.kernels.gpu, model.kernels.dtype);
        let (s, n) = (&model.graph.shape, sizes.sequences);
        let dims = (s.layers, s.kv_heads, s.head_dim);
        let (slots, scratch) = model.layout(sizes.rows.max(n), n).allocate(gpu)?;
        Ok(Self {
            cache: CudaCache::new(gpu, dtype, dims, n, sizes.context)?,
            slots,
            stands: Stands::Elsewhere,
            asked: Vec::with_capacity(n),
            outbox: Outbox::new(gpu, n)?,
            lens: vec![0; n],
            next: vec![0; n],
            chunk: sizes.rows,
            executor: CudaExecutor::new(&model.kernels, threads, sizes, scratch, rotation)?,
            graph: None,
            warm: false,
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
        self.stands = Stands::Elsewhere;
        let steps = ids.len().div_ceil(self.chunk);
        for (i, step) in ids.chunks(self.chunk).enumerate() {
            self.executor.place(step, &self.lens)?;
            self.executor.step = Step::Prompt { sequence };
            if i + 1 == steps {
                self.forward(step, Logits::Last)?;
                self.executor.choose(&self.slots, &self.model.graph.table, step.len(), &self.outbox)?;
            } else {
                self.forward(step, Logits::Skip)?;
            }
            self.lens[sequence] += step.len() as u32;
        }
        let ticket = self.outbox.issue(sequence);
        self.next[sequence] = self.read(sequence, ticket)?;
        Ok(self.next[sequence])
    }

    /// Accepts the chosen token of every sequence and chooses the next ones. The step after it is already
    /// running then, in case it is asked for.
    pub fn step(&mut self) -> Result<&[u32]> {
        let capacity = self.cache.capacity();
        if let Some(full) = self.lens.iter().position(|l| *l as usize >= capacity) {
            return Err(Error::new(Code::ContextFull, format!("sequence {full}"))
                .need("one more position")
                .have(format!("{capacity} positions")));
        }
        match self.stands {
            Stands::Ahead => self.model.products().for_each(q4_core::Q4Linear::replayed),
            Stands::Ready => self.enqueue()?,
            Stands::Elsewhere => {
                self.executor.place(&self.next, &self.lens)?;
                if self.warm {
                    self.executor.embed(&self.model.graph.table, &self.next, &mut self.slots.hidden)?;
                }
                self.enqueue()?;
            }
        }
        self.stands = Stands::Ready;
        self.lens.iter_mut().for_each(|l| *l += 1);
        self.asked.clear();
        self.asked.extend((0..self.lens.len()).map(|i| self.outbox.last(i)));
        self.run_ahead()?;
        for sequence in 0..self.lens.len() {
            self.next[sequence] = self.read(sequence, self.asked[sequence])?;
        }
        Ok(&self.next)
    }

    /// Enqueues a step whose positions are on the device, and its ids: embedded, unless it is the first.
    fn enqueue(&mut self) -> Result<()> {
        self.stands = Stands::Elsewhere; // until it is enqueued
        self.executor.step = Step::Decode;
        if self.warm {
            self.replay()?;
        } else {
            self.issue()?;
            self.warm = true;
        }
        self.issued();
        Ok(())
    }

    fn run_ahead(&mut self) -> Result<()> {
        let capacity = self.cache.capacity();
        let Some(graph) = self.graph.as_mut().filter(|_| self.lens.iter().all(|l| (*l as usize) < capacity))
        else {
            return Ok(());
        };
        graph.launch(self.executor.stream.raw())?;
        self.issued();
        self.stands = Stands::Ahead;
        Ok(())
    }

    fn issued(&mut self) {
        for sequence in 0..self.lens.len() {
            self.outbox.issue(sequence);
        }
    }

    fn forward(&mut self, ids: &[u32], which: Logits<'_>) -> Result<()> {
        self.model.graph.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which)
    }

    fn issue(&mut self) -> Result<()> {
        // The ids are on the device, or embedded; only their number counts here.
        let ids = std::mem::take(&mut self.next);
        let outcome = self.forward(&ids, Logits::Last);
        self.next = ids;
        outcome?;
        self.executor.choose(&self.slots, &self.model.graph.table, 1, &self.outbox)
    }

    fn replay(&mut self) -> Result<()> {
        let graph = match &mut self.graph {
            Some(graph) => {
                self.model.products().for_each(q4_core::Q4Linear::replayed);
                graph
            }
            None => {
                self.executor.begin_recording()?;
                let body = self.issue();
                let graph = self.executor.end_recording();
                body?;
                self.graph.insert(graph?)
            }
        };
        graph.launch(self.executor.stream.raw())
    }

    fn read(&mut self, sequence: usize, ticket: Ticket) -> Result<u32> {
        match self.outbox.wait(sequence, ticket, &self.executor.stream)? {
            Choice { token, finite: true } => Ok(token),
            Choice { finite: false, .. } => {
                Err(Error::new(Code::NonFinite, format!("logits of sequence {sequence}"))
                    .need("finite logits")
                    .have("NaN or infinity"))
            }
        }
    }
}

impl Drop for CudaBatch {
    fn drop(&mut self) {
        // A step may be running, and what it reads and writes is about to go. After a fault nothing runs.
        let _ = self.executor.stream.synchronize();
    }
}
