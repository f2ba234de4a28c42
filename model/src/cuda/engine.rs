//! CUDA's side of a [`Runner`](crate::runner::Runner): prompts run directly, decode steps replay a graph.
use super::draw::Draw;
use super::executor::{Step, bytes};
use super::slots::{Layout, Sizes};
use super::{CudaCache, CudaExecutor, CudaModel, CudaTensor};
use crate::executor::{Logits, Slots};
use crate::runner::Engine;
use crate::sampling::Sampler;
use q4_core::{Code, Error, Result, ThreadPool};
use q4_cuda::{Graph, Pinned};
use std::sync::Arc;

/// A shared model with a context of its own.
pub struct CudaEngine {
    model: Arc<CudaModel>,
    executor: CudaExecutor,
    cache: CudaCache,
    slots: Slots<CudaTensor>,
    /// The decode step; recorded at its second run, when every kernel has been loaded.
    graph: Option<Graph>,
    warm: bool,
    /// Tokens and flags of the last step, `[2, sequences]`.
    chosen: Pinned,
    logits: Pinned,
    /// Made when a token is first drawn.
    draw: Option<Draw>,
    watching: bool,
    /// The token a replayed step finds on the device, once it is known here.
    fed_back: bool,
    /// The last step chose a token: `chosen` will hold it.
    chooses: bool,
}

impl CudaEngine {
    /// Allocates a context on the model's device, if it fits what is free there.
    pub fn new(
        model: Arc<CudaModel>,
        threads: Arc<ThreadPool>,
        sizes: Sizes,
        rope: (&[f32], f32),
    ) -> Result<Self> {
        let (gpu, s, dtype) = (&model.gpu, &model.graph.shape, model.dtype);
        let logit_rows = sizes.logit_rows;
        let kv = CudaCache::bytes(dtype, s.layers, s.kv_heads, s.head_dim, sizes.context);
        let kv = kv * sizes.sequences as u64;
        let layout = Layout::new(&model, sizes.rows, logit_rows);
        let rest = layout.bytes() as u64 + bytes(s, &sizes);
        let (free, _) = gpu.memory()?;
        if kv + rest > free {
            let human = q4_core::memory::human;
            return Err(Error::new(Code::OutOfMemory, format!("a context on {}", gpu.device()))
                .need(format!("{} for keys and values, {} for activations", human(kv), human(rest)))
                .have(format!("{} free", human(free)))
                .fix("shorten the context with --context, or choose a smaller model"));
        }
        let cache =
            CudaCache::new(gpu, dtype, (s.layers, s.kv_heads, s.head_dim), sizes.sequences, sizes.context)?;
        let (slots, scratch) = layout.allocate(gpu)?;
        let chosen = Pinned::new(gpu, 8 * sizes.sequences)?;
        let logits = Pinned::new(gpu, logit_rows * s.vocab * 4)?;
        let executor = CudaExecutor::new(&model, threads, sizes, scratch, rope)?;
        Ok(Self {
            executor,
            cache,
            slots,
            graph: None,
            warm: false,
            chosen,
            logits,
            draw: None,
            watching: false,
            fed_back: false,
            chooses: false,
            model,
        })
    }

    /// Enqueues a step whose ids are on the device.
    fn issue(&mut self, ids: &[u32], which: Logits) -> Result<()> {
        self.model.graph.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which)?;
        self.chooses = which == Logits::Last;
        if self.chooses {
            self.executor.choose(&self.slots.logits, &self.chosen)?;
            self.executor.feed_back()?;
        }
        Ok(())
    }

    fn replay(&mut self, ids: &[u32]) -> Result<()> {
        let len = self.cache.len();
        let mut graph = match self.graph.take() {
            Some(graph) => {
                self.model.products().for_each(q4_core::Q4Linear::replayed);
                graph
            }
            // Recording counts as the first replay: it counts calls and runs none.
            None => {
                let recorded = self.record(ids);
                self.cache.truncate(len);
                recorded?
            }
        };
        let outcome = graph.launch(self.executor.stream.raw());
        self.graph = Some(graph);
        outcome?;
        self.chooses = true;
        self.cache.advance(1);
        Ok(())
    }

    fn record(&mut self, ids: &[u32]) -> Result<Graph> {
        self.executor.begin_recording()?;
        let body = self.issue(ids, Logits::Last);
        let graph = self.executor.end_recording();
        body?;
        graph
    }

    fn wait(&self) -> Result<()> {
        self.executor.stream.synchronize()
    }

    fn token(&self) -> u32 {
        self.chosen.as_slice::<u32>()[0]
    }
}

impl Engine for CudaEngine {
    fn step(&mut self, ids: &[u32], which: Logits) -> Result<()> {
        let vocab = self.model.graph.table.rows;
        if let Some(bad) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::new(Code::ValueInvalid, "token id")
                .need(format!("below {vocab}"))
                .have(bad.to_string()));
        }
        let one = ids.len() == 1 && which == Logits::Last && !self.watching;
        // A decoded token that is the one the device chose is there already, and so is its position.
        if !(one && self.fed_back && self.token() == ids[0]) {
            self.executor.place(ids, &[self.cache.len() as u32])?;
        }
        self.fed_back = false;
        self.executor.step = if one { Step::Decode } else { Step::Prompt { sequence: 0 } };
        if one && self.warm {
            self.replay(ids)?;
        } else {
            self.issue(ids, which)?;
            self.warm |= one;
        }
        self.fed_back = one;
        Ok(())
    }

    fn logits(&mut self) -> Result<&mut [f32]> {
        let count = self.slots.logits.rows() * self.slots.logits.width();
        // SAFETY: the slot holds `count` values and so does the host's copy, which is read after the wait.
        unsafe { self.logits.receive(self.slots.logits.ptr(), count * 4, self.executor.stream.raw())? };
        self.wait()?;
        Ok(&mut self.logits.as_mut_slice::<f32>()[..count])
    }

    fn is_finite(&mut self) -> Result<bool> {
        if self.chooses {
            self.wait()?;
            return Ok(self.chosen.as_slice::<u32>()[1] == 0);
        }
        Ok(self.logits()?.iter().all(|v| v.is_finite()))
    }

    fn greedy(&mut self) -> Result<u32> {
        self.wait()?;
        Ok(self.token())
    }

    fn sample(&mut self, sampler: &mut Sampler, recent: &[u32]) -> Result<u32> {
        if sampler.is_greedy() {
            return self.greedy();
        }
        if sampler.params().temperature == 0.0 {
            return sampler.sample(self.logits()?, recent);
        }
        let (vocab, context) = (self.slots.logits.width(), self.cache.capacity());
        let draw = match &mut self.draw {
            Some(draw) => draw,
            none => none.insert(Draw::new(&self.model.gpu, vocab, context)?),
        };
        let id = self.executor.draw(draw, &self.slots.logits, sampler, recent)?;
        self.chosen.as_mut_slice::<u32>()[0] = id;
        Ok(id)
    }

    fn len(&self) -> usize {
        self.cache.len()
    }
    fn capacity(&self) -> usize {
        self.cache.capacity()
    }
    fn truncate(&mut self, len: usize) {
        if len < self.cache.len() {
            self.fed_back = false;
        }
        self.cache.truncate(len);
    }
    fn set_watching(&mut self, on: bool) {
        self.watching = on;
        self.executor.set_watching(on);
    }
}
