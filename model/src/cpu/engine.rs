//! The CPU's side of a [`Runner`](crate::runner::Runner).
use super::sequences::CpuSequences;
use super::{CpuExecutor, CpuTensor, KvCache, KvShape, slot_bytes, slots};
use crate::batch::Sequences;
use crate::executor::{Logits, Shape, Slots};
use crate::graph::Decoder;
use crate::places::Part;
use crate::runner::{Context, Engine, Model};
use crate::scan;
use crate::watch::Watch;
use crate::weights::Linear;
use q4_core::Result;
use std::sync::Arc;

impl Model for Decoder<CpuExecutor> {
    fn shape(&self) -> &Shape {
        &self.shape
    }
    fn blocks(&self) -> Vec<[&Linear; 4]> {
        self.blocks.iter().map(|b| [&b.qkv, &b.o, &b.gate_up, &b.down]).collect()
    }
    fn head(&self) -> Option<&Linear> {
        self.head.product()
    }
    fn engine(self: Arc<Self>, cx: Context<'_>) -> Result<Box<dyn Engine>> {
        let Context { sizes, kv, dtype, threads, rotation, budget } = cx;
        let (s, rows) = (&self.shape, sizes.rows);
        budget.reserve(KvCache::bytes(kv, KvShape::of(s), sizes.context), "the KV cache")?;
        budget.reserve(slot_bytes(s, rows, sizes.logit_rows), "the activations")?;
        let scratch = CpuExecutor::bytes(s, threads.threads(), dtype, &sizes);
        budget.reserve(scratch, "the workspace")?;
        let executor = CpuExecutor::new(s.clone(), threads, dtype, &sizes, rotation)?;
        let cache = KvCache::new(kv, KvShape::of(s), sizes.context, rows);
        let slots = slots(s, rows, sizes.logit_rows);
        Ok(Box::new(CpuEngine { model: self, executor, cache, slots }))
    }
    fn sequences(self: Arc<Self>, cx: Context<'_>, pages: usize) -> Result<Box<dyn Sequences>> {
        Ok(Box::new(CpuSequences::new(self, cx, pages)?))
    }
}

/// A shared model with a context of its own.
pub struct CpuEngine {
    /// The graph with its weights.
    pub model: Arc<Decoder<CpuExecutor>>,
    /// Scratch and threads.
    pub executor: CpuExecutor,
    /// Keys and values.
    pub cache: KvCache,
    /// Activations of a step; one row of logits at least.
    pub slots: Slots<CpuTensor>,
}

impl Engine for CpuEngine {
    fn step(&mut self, ids: &[u32], which: Logits<'_>) -> Result<()> {
        self.cache.places.place(&[Part { sequence: 0, rows: ids.len() }])?;
        self.model.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which)
    }
    fn logits(&mut self) -> Result<&mut [f32]> {
        Ok(self.slots.logits.data_mut())
    }
    fn is_finite(&mut self) -> Result<bool> {
        Ok(scan::first(self.slots.logits.data(), |v| !v.is_finite()).is_none())
    }
    fn len(&self) -> usize {
        self.cache.places.len(0)
    }
    fn capacity(&self) -> usize {
        self.cache.places.capacity(0)
    }
    fn truncate(&mut self, len: usize) {
        self.cache.places.truncate(0, len);
    }
    fn watch(&mut self, watch: Watch) {
        self.executor.set_watch(watch);
    }
}
