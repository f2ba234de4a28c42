//! From a checkpoint and a plan to a model that runs: one layer in flight at a time, every large allocation
//! predicted.
use crate::assemble::{Form, Source, assemble};
use crate::batch::{PAGE, Sequences};
use crate::checkpoint::{Bytes, Checkpoint, Matrix};
use crate::config::Rotation;
use crate::cpu::{CpuTable, KvType};
use crate::executor::{Shape, Sizes};
use crate::plan::{HeadPlan, Plan, PlanOptions, Product};
use crate::quantize::{self, Quantized, Rows};
use crate::runner::{Context, Model, Runner};
use crate::weights::{Inputs, Linear, Part, StoredTable};
use q4_core::memory::Budget;
use q4_core::{Code, DType, Device, Dispatch, Error, Q4Linear, Q4Weight, Result, Segment, ThreadPool};
use std::sync::Arc;
use tracing::{Span, field::Empty};

/// Sizes of a context.
#[derive(Clone, Copy, Debug)]
pub struct ContextOptions {
    /// Positions of the cache.
    pub context: usize,
    /// Rows of the largest step; at most the plan's `max_rows`.
    pub chunk: usize,
    /// Keep logits of every row of a step, not of the last one only.
    pub all_logits: bool,
    /// How keys and values are cached.
    pub kv: KvType,
    /// Several sequences that share the cache; none for one that has it alone.
    pub many: Option<Many>,
}

/// Sequences that share a cache.
#[derive(Clone, Copy, Debug)]
pub struct Many {
    /// How many at most are computed at once.
    pub sequences: usize,
    /// Pages of the cache, of [`PAGE`] positions each.
    pub pages: usize,
}

/// Rows of a step of several sequences that logits are kept of, at least: of prompts whose own tokens are
/// weighed.
const WEIGHED: usize = 32;

impl ContextOptions {
    /// What a context with them takes of everything; `workspace` is the largest need of any product.
    pub fn sizes(&self, workspace: usize) -> Sizes {
        let sequences = self.many.map_or(1, |many| many.sequences);
        Sizes { rows: self.chunk, logit_rows: self.logit_rows(), sequences, context: self.context, workspace }
    }
    /// Rows of a step that logits are kept of.
    pub fn logit_rows(&self) -> usize {
        match self.many {
            Some(many) => many.sequences.max(WEIGHED).min(self.chunk),
            None if self.all_logits => self.chunk,
            None => 1,
        }
    }
    /// Positions of the cache.
    pub fn positions(&self) -> usize {
        self.many.map_or(self.context, |many| many.pages * PAGE)
    }
}

/// A loaded model and what is needed to make contexts over it.
pub struct Loaded {
    /// The graph with its weights.
    pub model: Arc<dyn Model>,
    /// Threads all contexts share.
    pub threads: Arc<ThreadPool>,
    dtype: DType,
    pub(crate) rotation: Rotation,
    pub(crate) workspace: usize,
    device: Option<DeviceMemory>,
}

/// What the memory of a device is to this process.
pub(crate) struct DeviceMemory {
    ordinal: u32,
    /// Bytes that were free before anything was loaded.
    free: u64,
    /// What may be allocated there.
    pub(crate) budget: Budget,
}

/// Fails where products can run and a model cannot.
///
/// # Errors
/// `Unsupported` for a device that a plugin brings.
pub fn require_executor(device: Device) -> Result<()> {
    match device {
        Device::Cpu | Device::Cuda(_) => Ok(()),
        other => Err(Error::new(Code::Unsupported, format!("a model on {other}"))
            .need("a device with an executor: cpu or cuda:N")
            .have(format!("products alone: q4 conformance, explain and diagnose take --device {other}"))
            .fix("--device cpu, or leave the option out")),
    }
}

/// Prepares every product of `plan` and maps the rest. `progress` is called with (done, all) products.
///
/// # Errors
/// [`Code::Unsupported`] for a device without an executor, as [`Plan::require`], [`Code::OutOfMemory`] for
/// what does not fit into `budget`, as [`Dispatch::prepare`], damage of the files, and errors of the device.
pub fn load(
    checkpoint: &Checkpoint,
    plan: &Plan,
    dispatch: &Dispatch,
    options: &PlanOptions,
    threads: Arc<ThreadPool>,
    budget: &Budget,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Loaded> {
    let (model, layers) = (checkpoint.name(), plan.layers.len());
    let span = tracing::info_span!("load", model, layers, device = %options.device, bytes = Empty);
    let _in = span.enter();
    require_executor(options.device)?;
    plan.require(dispatch)?;
    let (c, shape) = (checkpoint.config(), shape(checkpoint));
    let device = DeviceMemory::of(options.device, budget)?;
    let budget = device.as_ref().map_or(budget, |d| &d.budget);
    let before = budget.reserved();
    let mut source = FromCheckpoint {
        checkpoint,
        plan,
        dispatch,
        options,
        threads: &threads,
        budget,
        workspace: 0,
        done: 0,
        all: plan.products().count(),
        progress,
    };
    let form = Form { arch: c.arch, shape: &shape, eps: c.rms_norm_eps };
    let to = (options.device, options.dtype, dispatch.policy().unified_memory);
    let model = assemble(form, to, &mut source)?;
    let workspace = source.workspace;
    Span::current().record("bytes", budget.reserved().saturating_sub(before));
    // Whatever is needed again is read again: a few rows, or a table that every step reads.
    checkpoint.release_files();
    Ok(Loaded::new(model, threads, options.dtype, c.rotation(), workspace, device))
}

impl DeviceMemory {
    /// What may be allocated on a CUDA device: what is free there, less 5 %, and no more than is left of a
    /// limit that was named. `None`: weights stay in host memory.
    pub(crate) fn of(device: Device, budget: &Budget) -> Result<Option<Self>> {
        let Device::Cuda(ordinal) = device else { return Ok(None) };
        let (free, _) = q4_cuda::Gpu::open(ordinal)?.memory()?;
        let named = if budget.is_named() { budget.left() } else { u64::MAX };
        Ok(Some(Self { ordinal, free, budget: Budget::new(named.min(free - free / 20)) }))
    }
}

/// Bytes that are free on a CUDA device; `None` on the CPU.
///
/// # Errors
/// [`Code::DeviceMissing`] for a device that cannot be opened.
pub fn device_free(device: Device) -> Result<Option<u64>> {
    let Device::Cuda(ordinal) = device else { return Ok(None) };
    Ok(Some(q4_cuda::Gpu::open(ordinal)?.memory()?.0))
}

/// Sizes of the graph of a checkpoint.
pub fn shape(checkpoint: &Checkpoint) -> Shape {
    let c = checkpoint.config();
    Shape {
        hidden: c.hidden_size,
        heads: c.num_attention_heads,
        kv_heads: c.num_key_value_heads,
        head_dim: c.head_dim,
        intermediate: c.intermediate_size,
        vocab: c.vocab_size,
        layers: c.num_hidden_layers,
    }
}

impl Loaded {
    /// `workspace` is the largest need of any product but the head.
    pub(crate) fn new(
        model: Arc<dyn Model>,
        threads: Arc<ThreadPool>,
        dtype: DType,
        rotation: Rotation,
        workspace: usize,
        device: Option<DeviceMemory>,
    ) -> Self {
        Self { model, threads, dtype, rotation, workspace, device }
    }

    /// What the device has less of than before this model was loaded; `None` on the CPU.
    pub fn device_bytes(&self) -> Option<u64> {
        let device = self.device.as_ref()?;
        let (free, _) = q4_cuda::Gpu::open(device.ordinal).and_then(|gpu| gpu.memory()).ok()?;
        Some(device.free.saturating_sub(free))
    }

    /// Largest need of any product in steps whose head has `logit_rows` rows.
    pub(crate) fn workspace(&self, logit_rows: usize) -> usize {
        let parts = self.model.head().into_iter().flat_map(|linear| &linear.parts);
        parts.map(|part| part.workspace(logit_rows)).fold(self.workspace, usize::max)
    }

    /// A context of its own over this model, inside `budget`.
    ///
    /// # Errors
    /// [`Code::OutOfMemory`] for a cache or activations that do not fit into `budget`; errors of the device.
    pub fn runner(&self, options: ContextOptions, budget: &Budget) -> Result<Runner> {
        let sizes = options.sizes(self.workspace(options.logit_rows()));
        let engine = self.model.clone().engine(self.context(sizes, options.kv, budget))?;
        Ok(Runner::new(engine, options.chunk))
    }

    /// Several sequences that share a cache over this model, inside `budget`.
    ///
    /// # Errors
    /// As [`runner`](Self::runner).
    pub fn sequences(
        &self,
        options: ContextOptions,
        many: Many,
        budget: &Budget,
    ) -> Result<Box<dyn Sequences>> {
        let options = ContextOptions { many: Some(many), ..options };
        let sizes = options.sizes(self.workspace(options.logit_rows()));
        self.model.clone().sequences(self.context(sizes, options.kv, budget), many.pages)
    }

    fn context<'a>(&'a self, sizes: Sizes, kv: KvType, budget: &'a Budget) -> Context<'a> {
        let budget = self.device.as_ref().map_or(budget, |d| &d.budget);
        Context {
            sizes,
            kv,
            dtype: self.dtype,
            threads: self.threads.clone(),
            rotation: &self.rotation,
            budget,
        }
    }
}

struct FromCheckpoint<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a Plan,
    dispatch: &'a Dispatch,
    options: &'a PlanOptions,
    threads: &'a ThreadPool,
    budget: &'a Budget,
    workspace: usize,
    done: usize,
    all: usize,
    progress: &'a mut dyn FnMut(usize, usize),
}

impl Source for FromCheckpoint<'_> {
    fn products(&mut self, layer: usize) -> Result<[Linear; 4]> {
        let plan = self.plan;
        let l = &plan.layers[layer];
        Ok([self.linear(&l.qkv)?, self.linear(&l.o)?, self.linear(&l.gate_up)?, self.linear(&l.down)?])
    }
    fn head(&mut self) -> Result<Option<Linear>> {
        let plan = self.plan;
        match &plan.head {
            HeadPlan::Product(p) => self.linear(std::slice::from_ref(&**p)).map(Some),
            HeadPlan::Dense { .. } => Ok(None),
        }
    }
    fn embedding(&mut self) -> Result<StoredTable> {
        let tied = matches!(self.plan.head, HeadPlan::Dense { tied: true, .. });
        self.table(self.checkpoint.config().arch.names.embedding, tied)
    }
    fn dense_head(&mut self) -> Result<Option<StoredTable>> {
        let own = matches!(self.plan.head, HeadPlan::Dense { tied: false, .. });
        own.then(|| self.table(self.checkpoint.config().arch.names.head, true)).transpose()
    }
    fn norm(&mut self, name: &str, width: usize) -> Result<Vec<f32>> {
        self.checkpoint.norm(name, width)
    }
}

impl FromCheckpoint<'_> {
    /// `whole`: every step reads all of it.
    fn table(&self, module: &str, whole: bool) -> Result<StoredTable> {
        let c = self.checkpoint.config();
        let (rows, width) = (c.vocab_size, c.hidden_size);
        let Matrix { name, elements, bytes: stored, .. } =
            self.checkpoint.matrix_in_passing(module, self.threads)?;
        let missing = || Error::new(Code::TensorMissing, format!("`{name}`"));
        let (bytes, range) = self.checkpoint.store().place(&name).ok_or_else(missing)?;
        // A table may lie at any offset of its file; loads of its elements may not.
        let aligned = stored.as_ptr().align_offset(elements.align()) == 0;
        let kept = match self.options.device {
            Device::Cpu if aligned => CpuTable::resident(&bytes, range.len(), whole),
            Device::Cpu => range.len() as u64,
            _ => (rows * width * elements.dtype().size()) as u64,
        };
        self.budget.reserve(kept, &name)?;
        let (bytes, range) = if aligned {
            (bytes, range)
        } else {
            let copy = Bytes::from(stored.to_vec());
            bytes.release(range.clone());
            (copy, 0..range.len())
        };
        Ok(StoredTable { bytes, range, elements, rows, width, name, whole })
    }

    fn linear(&mut self, products: &[Product]) -> Result<Linear> {
        let mut parts = Vec::with_capacity(products.len());
        let (mut n, mut bias) = (0, None);
        for p in products {
            let mut at = n;
            for s in &p.spec.segments {
                if let Some(own) = self.checkpoint.bias(&s.name, s.rows)? {
                    let all = products.iter().map(|p| p.spec.n()).sum();
                    bias.get_or_insert_with(|| vec![0.0; all])[at..at + s.rows].copy_from_slice(&own);
                }
                at += s.rows;
            }
            parts.push(self.prepare(p, n)?);
            n += p.spec.n();
            self.done += 1;
            (self.progress)(self.done, self.all);
        }
        Ok(Linear { parts, n, bias })
    }

    fn prepare(&mut self, p: &Product, column: usize) -> Result<Part> {
        let spec = &p.spec;
        let name = spec.name();
        let selection = p.choice.as_ref().map_err(|e| Error::from(e.clone()))?;
        let predicted = selection.backend.footprint(spec, selection.path).resident;
        self.budget.reserve(predicted, &name)?;
        let linear = if p.quantized_on_load {
            let owned = self.quantized(p)?;
            let segments = owned.iter().map(Quantized::segment).collect::<Result<Vec<_>>>()?;
            let linear = self.product(&segments, p)?;
            spec.segments.iter().for_each(|s| self.checkpoint.release_tensor(&format!("{}.weight", s.name)));
            linear
        } else {
            let layers = spec
                .segments
                .iter()
                .map(|s| self.checkpoint.layer_on(self.threads, &s.name, s.rows, spec.k))
                .collect::<Result<Vec<_>>>()?;
            let segments: Vec<Segment<'_>> = layers.iter().map(|l| l.segment.clone()).collect();
            let linear = self.product(&segments, p)?;
            layers.iter().for_each(|l| self.checkpoint.release(&l.detected));
            linear
        };
        let actual = linear.info().resident_bytes;
        if actual > predicted {
            self.budget.reserve(actual - predicted, &name)?;
        } else {
            self.budget.release(predicted - actual);
        }
        self.budget.reserve(p.order_bytes(), &name)?;
        let part = Part { product: linear, column, order: p.order.clone().map(Inputs::Host) };
        // The head's depends on the rows whose logits somebody keeps.
        if spec.segments[0].name != self.checkpoint.config().arch.names.head {
            self.workspace = self.workspace.max(part.workspace(self.options.max_rows));
        }
        Ok(part)
    }

    fn product(&self, segments: &[Segment<'_>], p: &Product) -> Result<Q4Linear> {
        let weight = Q4Weight { schema: p.spec.schema, k: p.spec.k, segments };
        let selection = p.choice.as_ref().map_err(|e| Error::from(e.clone()))?;
        self.dispatch.prepare(&weight, &p.spec, selection, self.threads)
    }

    fn quantized(&self, p: &Product) -> Result<Vec<Quantized>> {
        let target = self
            .options
            .quantize
            .as_ref()
            .ok_or_else(|| Error::new(Code::Internal, "no target to quantise to"))?;
        let quantize = |s: &q4_core::SegmentSpec| {
            let stored = self.checkpoint.floats_on(
                self.threads,
                &format!("{}.weight", s.name),
                &[s.rows, p.spec.k],
            )?;
            let rows = Rows::new(&s.name, stored.bytes, stored.dtype, s.rows, p.spec.k)?;
            quantize::quantize(&rows, target, None, self.threads)
        };
        p.spec.segments.iter().map(quantize).collect()
    }
}
