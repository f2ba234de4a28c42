//! Several sequences on the CPU: one cache in pages, steps with rows of many.
use super::{CpuExecutor, CpuTensor, KvCache, KvShape, slot_bytes, slots};
use crate::batch::{PAGE, Sequences};
use crate::executor::{Logits, Slots};
use crate::graph::Decoder;
use crate::places::Part;
use crate::runner::Context;
use q4_core::Result;
use std::sync::Arc;

/// A shared model with a cache for many.
pub struct CpuSequences {
    model: Arc<Decoder<CpuExecutor>>,
    executor: CpuExecutor,
    cache: KvCache,
    slots: Slots<CpuTensor>,
}

impl CpuSequences {
    /// `cx.sizes.sequences` sequences of up to `cx.sizes.context` positions, which share `pages` pages.
    pub fn new(model: Arc<Decoder<CpuExecutor>>, cx: Context<'_>, pages: usize) -> Result<Self> {
        let Context { sizes, kv, dtype, threads, rotation, budget } = cx;
        let (s, shape) = (&model.shape, KvShape::of(&model.shape));
        budget.reserve(KvCache::bytes(kv, shape, pages * PAGE), "the KV cache")?;
        budget.reserve(slot_bytes(s, sizes.rows, sizes.logit_rows), "the activations")?;
        budget.reserve(CpuExecutor::bytes(s, threads.threads(), dtype, &sizes), "the workspace")?;
        let executor = CpuExecutor::new(s.clone(), threads, dtype, &sizes, rotation)?;
        let cache = KvCache::paged(kv, shape, (PAGE, pages), &sizes);
        let slots = slots(s, sizes.rows, sizes.logit_rows);
        Ok(Self { model, executor, cache, slots })
    }
}

impl Sequences for CpuSequences {
    fn step(&mut self, ids: &[u32], parts: &[Part], logits: &[usize]) -> Result<()> {
        self.cache.places.place(parts)?;
        let which = if logits.is_empty() { Logits::Skip } else { Logits::Rows(logits) };
        self.model.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which)
    }
    fn logits(&mut self, i: usize) -> Result<&mut [f32]> {
        let vocab = self.model.shape.vocab;
        Ok(&mut self.slots.logits.data_mut()[i * vocab..][..vocab])
    }
    fn vocab(&self) -> usize {
        self.model.shape.vocab
    }
    fn add_page(&mut self, sequence: usize, page: u32) {
        self.cache.places.add_page(sequence, page);
    }
    fn adopt(&mut self, sequence: usize, len: usize) {
        self.cache.places.adopt(sequence, len);
    }
    fn clear(&mut self, sequence: usize) {
        self.cache.places.clear(sequence);
    }
}
