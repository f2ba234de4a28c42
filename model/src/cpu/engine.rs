//! The CPU's side of a [`Runner`](crate::runner::Runner).
use super::{CpuExecutor, CpuTensor, KvCache};
use crate::executor::{Logits, Slots};
use crate::graph::Qwen3;
use crate::runner::Engine;
use crate::watch::Watch;
use q4_core::Result;
use std::sync::Arc;

/// A shared model with a context of its own.
pub struct CpuEngine {
    /// The graph with its weights.
    pub model: Arc<Qwen3<CpuExecutor>>,
    /// Scratch and threads.
    pub executor: CpuExecutor,
    /// Keys and values.
    pub cache: KvCache,
    /// Activations of a step; one row of logits at least.
    pub slots: Slots<CpuTensor>,
}

impl Engine for CpuEngine {
    fn step(&mut self, ids: &[u32], which: Logits) -> Result<()> {
        self.model.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which)
    }
    fn logits(&mut self) -> Result<&mut [f32]> {
        Ok(self.slots.logits.data_mut())
    }
    fn is_finite(&mut self) -> Result<bool> {
        Ok(self.slots.logits.data().iter().all(|v| v.is_finite()))
    }
    fn len(&self) -> usize {
        self.cache.len()
    }
    fn capacity(&self) -> usize {
        self.cache.capacity()
    }
    fn truncate(&mut self, len: usize) {
        self.cache.truncate(len);
    }
    fn watch(&mut self, watch: Watch) {
        self.executor.set_watch(watch);
    }
}
