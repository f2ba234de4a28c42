//! CUDA's side of a [`Runner`](crate::runner::Runner): prompts run directly, decode steps replay a graph and
//! run ahead.
use super::ahead::{Course, Stands, Start};
use super::draw::Draw;
use super::executor::Step;
use super::outbox::{Choice, Outbox};
use super::slots::other_bytes;
use super::state::State;
use super::{CudaCache, CudaExecutor, CudaModel, CudaSequences, CudaTensor};
use crate::batch::Sequences;
use crate::config::Rotation;
use crate::executor::{Executor, Logits, Shape, Sizes, Slots};
use crate::places::Part;
use crate::runner::{Context, Engine, Model};
use crate::sampling::Sampler;
use crate::scan;
use crate::watch::Watch;
use crate::weights::Linear;
use q4_core::{Code, DType, Error, Result, ThreadPool};
use q4_cuda::{Buffer, Graph, Pinned};
use std::sync::Arc;

impl Model for CudaModel {
    fn shape(&self) -> &Shape {
        &self.graph.shape
    }
    fn blocks(&self) -> Vec<[&Linear; 4]> {
        self.graph.blocks.iter().map(|b| [&b.qkv, &b.o, &b.gate_up, &b.down]).collect()
    }
    fn head(&self) -> Option<&Linear> {
        self.graph.head.product()
    }
    fn engine(self: Arc<Self>, cx: Context<'_>) -> Result<Box<dyn Engine>> {
        Ok(Box::new(CudaEngine::new(self, cx.threads, cx.sizes, cx.rotation, cx.budget.left())?))
    }
    fn sequences(self: Arc<Self>, cx: Context<'_>, pages: usize) -> Result<Box<dyn Sequences>> {
        Ok(Box::new(CudaSequences::new(self, cx, pages)?))
    }
    fn mixes_rows(&self) -> Option<&'static str> {
        Some(
            "attention on a CUDA device divides positions among more blocks where fewer sequences share a step",
        )
    }
}

/// A shared model with a context of its own.
pub struct CudaEngine {
    model: Arc<CudaModel>,
    executor: CudaExecutor,
    cache: CudaCache,
    slots: Slots<CudaTensor>,
    /// Decode steps take turns with the logits' two places, so that those of the last step asked for are
    /// there while the next one runs ahead. This is the place that is not among the slots.
    spare: CudaTensor,
    /// Which place is: of the two, the first has room for the logits of a prompt.
    side: usize,
    /// The decode step into either place; recorded when every kernel has been loaded.
    pub(super) graphs: [Option<Graph>; 2],
    warm: bool,
    pub(super) course: Course,
    outbox: Outbox,
    logits: Pinned,
    /// Made when a token is first drawn.
    draw: Option<Draw>,
    watching: bool,
}

impl CudaEngine {
    /// Allocates a context on the model's device, if it fits what is free there and `allowed`.
    pub fn new(
        model: Arc<CudaModel>,
        threads: Arc<ThreadPool>,
        sizes: Sizes,
        rotation: &Rotation,
        allowed: u64,
    ) -> Result<Self> {
        let (gpu, s, dtype) = (&model.kernels.gpu, &model.graph.shape, model.kernels.dtype);
        let logit_rows = sizes.logit_rows;
        let layout = model.layout(sizes.rows, logit_rows);
        let rest = (layout.bytes() + 4 * s.vocab) as u64 + other_bytes(s, &sizes);
        model.has_room(sizes.context, rest, allowed)?;
        let cache = CudaCache::alone(gpu, dtype, s, &sizes)?;
        let (slots, scratch) = layout.allocate(gpu)?;
        let spare = CudaTensor::new(&Arc::new(Buffer::new(gpu, 4 * s.vocab)?), 0, 1, s.vocab, DType::F32);
        let outbox = Outbox::new(gpu, 1)?;
        let logits = Pinned::new(gpu, logit_rows * s.vocab * 4)?;
        let state = State::alone(gpu, s.vocab, sizes.rows)?;
        let executor = CudaExecutor::new(&model.kernels, threads, sizes, scratch, rotation, state)?;
        Ok(Self {
            executor,
            cache,
            slots,
            spare,
            side: 0,
            graphs: [None, None],
            warm: false,
            course: Course::new(),
            outbox,
            logits,
            draw: None,
            watching: false,
            model,
        })
    }

    /// Enqueues a step whose ids are on the device.
    fn issue(&mut self, ids: &[u32], which: Logits<'_>) -> Result<()> {
        self.model.graph.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which)?;
        match which {
            Logits::Last => {
                let next = (Some(&self.model.graph.table), ids.len());
                self.executor.choose(&self.slots, next, 1, &self.outbox)
            }
            Logits::Skip | Logits::All | Logits::Rows(_) => Ok(()),
        }
    }

    fn replay(&mut self, ids: &[u32]) -> Result<()> {
        let graph = match &mut self.graphs[self.side] {
            Some(graph) => {
                self.model.products().for_each(q4_core::Q4Linear::replayed);
                graph
            }
            // Recording counts as the first replay: it counts calls and runs none.
            None => {
                let recorded = self.record(ids)?;
                self.graphs[self.side].insert(recorded)
            }
        };
        graph.launch(self.executor.stream.raw())?;
        self.accepted();
        Ok(())
    }

    /// A step of one row ran that nothing was placed for here.
    fn accepted(&mut self) {
        self.cache.places.adopt(0, self.len() + 1);
    }

    fn record(&mut self, ids: &[u32]) -> Result<Graph> {
        self.cache.places.place(&[])?; // nothing runs, so nothing is committed
        self.executor.begin_recording()?;
        let body = self.issue(ids, Logits::Last);
        let graph = self.executor.end_recording();
        body?;
        graph
    }

    /// Launches the step behind the chosen token, which the device has: it need not wait for the host to ask
    /// for it.
    fn run_ahead(&mut self) -> Result<()> {
        let room = self.len() < self.capacity();
        if self.course.stands() != Stands::Ready || !room || self.watching {
            return Ok(());
        }
        let Some(graph) = &mut self.graphs[1 - self.side] else { return Ok(()) };
        graph.launch(self.executor.stream.raw())?;
        self.turn();
        self.outbox.issue(0);
        self.course.ran_ahead();
        Ok(())
    }

    /// Forgets what runs ahead, if anything does.
    fn leave(&mut self) {
        if self.course.leave() {
            self.turn();
        }
    }

    /// The logits' places change places.
    fn turn(&mut self) {
        std::mem::swap(&mut self.slots.logits, &mut self.spare);
        self.side = 1 - self.side;
    }

    /// What the last step chose; waits for it.
    fn choice(&mut self) -> Result<Choice> {
        let choice = match self.course.choice() {
            Some(Ok(choice)) => return Ok(choice),
            Some(Err(ticket)) => self.outbox.wait(0, ticket, &self.executor.stream)?,
            None => {
                return Err(Error::new(Code::Usage, "choosing a token")
                    .need("a step that kept the logits of its last row")
                    .have("one that kept none or all"));
            }
        };
        self.course.knows(choice);
        Ok(choice)
    }
}

impl Engine for CudaEngine {
    fn step(&mut self, ids: &[u32], which: Logits<'_>) -> Result<()> {
        let vocab = self.model.graph.table.rows;
        if let Some(bad) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::new(Code::ValueInvalid, "token id")
                .need(format!("below {vocab}"))
                .have(bad.to_string()));
        }
        let one = ids.len() == 1 && which == Logits::Last && !self.watching;
        let start = if one { self.course.start(ids[0]) } else { Start::Placed };
        if start == Start::Running {
            self.model.products().for_each(q4_core::Q4Linear::replayed);
            self.accepted();
            self.course.asked(Some(self.outbox.last(0)));
            return Ok(());
        }
        self.leave();
        self.course.forget();
        let replays = one && self.warm;
        let mut runs = 0;
        if start == Start::Placed || !replays {
            runs = self.executor.place(ids, self.len())?;
        }
        if one || self.side == 1 {
            self.turn();
        }
        self.executor.step = if one { Step::Decode } else { Step::Prompt { runs } };
        if replays {
            if start == Start::Placed {
                self.executor.embed(&self.model.graph.table, ids, &mut self.slots.hidden)?;
            }
            self.replay(ids)?;
        } else {
            self.cache.places.place(&[Part { sequence: 0, rows: ids.len() }])?;
            self.issue(ids, which)?;
            self.warm |= one;
        }
        let ticket = (which == Logits::Last).then(|| self.outbox.issue(0));
        self.course.asked(ticket);
        Ok(())
    }

    fn logits(&mut self) -> Result<&mut [f32]> {
        let ahead = self.course.stands() == Stands::Ahead;
        let from = if ahead { &self.spare } else { &self.slots.logits };
        let count = from.rows() * from.width();
        // SAFETY: the place holds `count` values and so does the host's copy, which is read after the wait.
        unsafe { self.logits.receive(from.ptr(), count * 4, self.executor.stream.raw())? };
        self.executor.stream.synchronize()?;
        Ok(&mut self.logits.as_mut_slice::<f32>()[..count])
    }

    fn is_finite(&mut self) -> Result<bool> {
        if self.course.choice().is_some() {
            return Ok(self.choice()?.finite);
        }
        Ok(scan::first(self.logits()?, |v| !v.is_finite()).is_none())
    }

    fn greedy(&mut self) -> Result<u32> {
        self.run_ahead()?;
        Ok(self.choice()?.token)
    }

    fn sample(&mut self, sampler: &mut Sampler, recent: &[u32]) -> Result<u32> {
        if sampler.is_greedy() {
            return self.greedy();
        }
        // On the host: the most likely token after a penalty, and other tokens than those chosen before.
        if sampler.params().temperature == 0.0 || self.course.stands() != Stands::Ready {
            return sampler.sample(self.logits()?, recent);
        }
        let (vocab, context) = (self.slots.logits.width(), self.capacity());
        let draw = match &mut self.draw {
            Some(draw) => draw,
            none => none.insert(Draw::new(&self.model.kernels.gpu, vocab, context)?),
        };
        let next = (Some(&self.model.graph.table), 0);
        self.executor.draw(draw, &self.slots, next, (sampler, recent), &self.outbox)?;
        self.course.redrawn(self.outbox.issue(0));
        self.run_ahead()?;
        Ok(self.choice()?.token)
    }

    fn len(&self) -> usize {
        self.cache.places.len(0)
    }
    fn capacity(&self) -> usize {
        self.cache.places.capacity(0)
    }
    fn truncate(&mut self, len: usize) {
        if len < self.len() {
            self.leave();
        }
        self.cache.places.truncate(0, len);
    }
    fn watch(&mut self, watch: Watch) {
        self.leave();
        self.watching = !matches!(watch, Watch::Nothing);
        self.executor.set_watch(watch);
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        // A step may be running, and what it reads and writes is about to go. After a fault nothing runs.
        let _ = self.executor.stream.synchronize();
    }
}
