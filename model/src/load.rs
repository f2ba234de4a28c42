//! From a checkpoint and a plan to a model that runs: one layer in flight at a time, every large allocation
//! predicted.
use crate::checkpoint::{Bytes, Checkpoint, names};
use crate::cpu::{
    CpuEngine, CpuExecutor, CpuHead, CpuLinear, CpuNorm, CpuTable, KvCache, KvType, slot_bytes, slots,
};
use crate::cuda::{CudaBatch, CudaEngine, CudaModel, Sizes};
use crate::executor::Shape;
use crate::graph::{Block, Qwen3};
use crate::plan::{HeadPlan, Plan, PlanOptions, Product};
use crate::quantize::{self, Quantized, Rows, Target};
use crate::runner::Runner;
use q4_core::memory::{Budget, UnifiedMemory};
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
}

/// A loaded model and what is needed to make contexts over it.
pub struct Loaded {
    /// The graph with its weights.
    pub model: Model,
    /// Threads all contexts share.
    pub threads: Arc<ThreadPool>,
    dtype: DType,
    pub(crate) rope: (Vec<f32>, f32),
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

/// The graph with its weights, where it computes.
pub enum Model {
    /// On the CPU.
    Cpu(Arc<Qwen3<CpuExecutor>>),
    /// On a CUDA device.
    Cuda(Arc<CudaModel>),
}

impl Model {
    /// Sizes of the graph.
    pub fn shape(&self) -> &Shape {
        match self {
            Self::Cpu(m) => &m.shape,
            Self::Cuda(m) => &m.graph.shape,
        }
    }
}

/// Prepares every product of `plan` and maps the rest. `progress` is called with (done, all) products.
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
    plan.require(dispatch)?;
    let shape = shape(checkpoint);
    std::thread::scope(|scope| {
        // On a device, kernels that are not on disk yet compile while weights are prepared.
        let kernels = match options.device {
            Device::Cuda(n) => Some(scope.spawn({
                let shape = &shape;
                move || CudaModel::kernels(n, shape, options.dtype)
            })),
            _ => None,
        };
        let device = DeviceMemory::of(options.device, budget)?;
        let allowed = device.as_ref().map_or(budget, |d| &d.budget);
        let (model, workspace) = weights(checkpoint, plan, dispatch, options, &threads, allowed, progress)?;
        let kernels = kernels.map(|k| k.join().map_err(|_| Error::new(Code::Internal, "loading kernels")));
        let _held = kernels.transpose()?.transpose()?;
        let c = checkpoint.config();
        let memory = dispatch.policy().unified_memory;
        let rope = c.rope.inv_freq(c.head_dim);
        let computed = (options.device, options.dtype);
        let loaded = Loaded::new(model, computed, threads, rope, workspace, memory, device);
        // Whatever is needed again is read again: a few rows, or a table that every step reads.
        checkpoint.release_files();
        loaded
    })
}

fn weights(
    checkpoint: &Checkpoint,
    plan: &Plan,
    dispatch: &Dispatch,
    options: &PlanOptions,
    threads: &ThreadPool,
    budget: &Budget,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(Qwen3<CpuExecutor>, usize)> {
    let (all, before) = (plan.products().count(), budget.reserved());
    let mut loader =
        Loader { checkpoint, dispatch, options, threads, budget, workspace: 0, done: 0, all, progress };
    let c = checkpoint.config();
    let shape = shape(checkpoint);
    let mut blocks = Vec::with_capacity(c.num_hidden_layers);
    for (i, layer) in plan.layers.iter().enumerate() {
        blocks.push(Block {
            input_norm: loader.norm(&names::input_norm(i), c.hidden_size)?,
            qkv: loader.linear(&layer.qkv)?,
            q_norm: loader.norm(&names::q_norm(i), c.head_dim)?,
            k_norm: loader.norm(&names::k_norm(i), c.head_dim)?,
            o: loader.linear(&layer.o)?,
            post_norm: loader.norm(&names::post_attention_norm(i), c.hidden_size)?,
            gate_up: loader.linear(&layer.gate_up)?,
            down: loader.linear(&layer.down)?,
        });
    }
    let tied = matches!(plan.head, HeadPlan::Dense { tied: true, .. });
    let table = loader.table(names::EMBEDDING, c.vocab_size, c.hidden_size, tied)?;
    let head = match &plan.head {
        HeadPlan::Dense { tied: true, .. } => CpuHead::Dense(table.clone()),
        HeadPlan::Dense { tied: false, .. } => {
            CpuHead::Dense(loader.table(names::HEAD, c.vocab_size, c.hidden_size, true)?)
        }
        HeadPlan::Product(p) => CpuHead::Q4(loader.linear(std::slice::from_ref(&**p))?),
    };
    let norm = loader.norm(names::FINAL_NORM, c.hidden_size)?;
    let workspace = loader.workspace;
    Span::current().record("bytes", budget.reserved().saturating_sub(before));
    Ok((Qwen3 { shape, table, blocks, norm, head }, workspace))
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
    /// From parts, whose products were prepared on the device that computes them, with outputs of a type;
    /// the rest moves there. `workspace` is the largest need of any product but the head.
    pub(crate) fn new(
        model: Qwen3<CpuExecutor>,
        (computes, dtype): (Device, DType),
        threads: Arc<ThreadPool>,
        rope: (Vec<f32>, f32),
        workspace: usize,
        memory: UnifiedMemory,
        device: Option<DeviceMemory>,
    ) -> Result<Self> {
        let model = match computes {
            Device::Cuda(ordinal) => Model::Cuda(Arc::new(CudaModel::upload(model, ordinal, dtype, memory)?)),
            _ => Model::Cpu(Arc::new(model)),
        };
        Ok(Self { model, threads, dtype, rope, workspace, device })
    }

    /// What the device has less of than before this model was loaded; `None` on the CPU.
    pub fn device_bytes(&self) -> Option<u64> {
        let device = self.device.as_ref()?;
        let (free, _) = q4_cuda::Gpu::open(device.ordinal).and_then(|gpu| gpu.memory()).ok()?;
        Some(device.free.saturating_sub(free))
    }

    /// Largest need of any product in steps whose head has `logit_rows` rows.
    pub(crate) fn workspace(&self, logit_rows: usize) -> usize {
        let head = match &self.model {
            Model::Cpu(model) => match &model.head {
                CpuHead::Q4(linear) => Some(linear),
                CpuHead::Dense(_) => None,
            },
            Model::Cuda(model) => model.head(),
        };
        let parts = head.iter().flat_map(|linear| &linear.parts);
        parts.map(|(part, _)| part.workspace(logit_rows)).fold(self.workspace, usize::max)
    }

    /// A context of its own over this model, inside `budget`.
    pub fn runner(&self, options: ContextOptions, budget: &Budget) -> Result<Runner> {
        let (rows, context) = (options.chunk, options.context);
        let logit_rows = if options.all_logits { rows } else { 1 };
        let rope = (self.rope.0.as_slice(), self.rope.1);
        let model = match &self.model {
            Model::Cpu(model) => model,
            Model::Cuda(model) => {
                let workspace = self.workspace(logit_rows);
                let sizes = Sizes { rows, logit_rows, sequences: 1, context, workspace };
                let allowed = self.device.as_ref().map_or(u64::MAX, |d| d.budget.left());
                let engine = CudaEngine::new(model.clone(), self.threads.clone(), sizes, rope, allowed)?;
                return Ok(Runner::new(Box::new(engine), rows));
            }
        };
        let s = &model.shape;
        let kind = options.kv;
        budget.reserve(KvCache::bytes(kind, s.layers, s.kv_heads, s.head_dim, context), "the KV cache")?;
        budget.reserve(slot_bytes(s, rows, logit_rows), "the activations")?;
        let (threads, workspace) = (self.threads.threads(), self.workspace(logit_rows));
        let scratch = CpuExecutor::bytes(s, threads, self.dtype, rows, context, workspace);
        budget.reserve(scratch, "the workspace")?;
        let threads = self.threads.clone();
        let executor = CpuExecutor::new(s.clone(), threads, self.dtype, rows, context, workspace, rope)?;
        let cache = KvCache::new(kind, s.layers, s.kv_heads, s.head_dim, context);
        let slots = slots(s, rows, logit_rows);
        let engine = CpuEngine { model: model.clone(), executor, cache, slots };
        Ok(Runner::new(Box::new(engine), rows))
    }
}

impl Loaded {
    /// `sequences` contexts of `context` positions that decode together, on a CUDA device.
    pub fn batch(&self, sequences: usize, context: usize, chunk: usize) -> Result<CudaBatch> {
        let Model::Cuda(model) = &self.model else {
            return Err(Error::new(Code::Unsupported, "several sequences at once")
                .need("a CUDA device")
                .have("the CPU"));
        };
        let workspace = self.workspace(sequences);
        let sizes = Sizes { rows: chunk, logit_rows: sequences, sequences, context, workspace };
        let rope = (self.rope.0.as_slice(), self.rope.1);
        CudaBatch::new(model.clone(), self.threads.clone(), sizes, rope)
    }
}

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    dispatch: &'a Dispatch,
    options: &'a PlanOptions,
    threads: &'a ThreadPool,
    budget: &'a Budget,
    workspace: usize,
    done: usize,
    all: usize,
    progress: &'a mut dyn FnMut(usize, usize),
}

impl Loader<'_> {
    fn norm(&self, name: &str, width: usize) -> Result<CpuNorm> {
        Ok(CpuNorm { weight: self.checkpoint.norm(name, width)?, eps: self.checkpoint.config().rms_norm_eps })
    }

    /// `whole`: every step reads all of it.
    fn table(&self, module: &str, rows: usize, width: usize, whole: bool) -> Result<CpuTable> {
        let name = format!("{module}.weight");
        let stored = self.checkpoint.floats_in_passing(self.threads, &name, &[rows, width])?;
        let missing = || Error::new(Code::TensorMissing, format!("`{name}`"));
        let (bytes, range) = self.checkpoint.store().place(&name).ok_or_else(missing)?;
        // A table may lie at any offset of its file; loads of its elements may not.
        let aligned = stored.bytes.as_ptr().align_offset(stored.dtype.size()) == 0;
        let kept = match self.options.device {
            Device::Cpu if aligned => CpuTable::resident(&bytes, range.len(), whole),
            _ => range.len() as u64,
        };
        self.budget.reserve(kept, &name)?;
        let (bytes, range) = if aligned {
            (bytes, range)
        } else {
            let copy = Bytes::from(stored.bytes.to_vec());
            bytes.release(range.clone());
            (copy, 0..range.len())
        };
        Ok(CpuTable { bytes, range, dtype: stored.dtype, rows, width, name, whole })
    }

    fn linear(&mut self, products: &[Product]) -> Result<CpuLinear> {
        let mut parts = Vec::with_capacity(products.len());
        let mut n = 0;
        for p in products {
            parts.push((self.prepare(p)?, n));
            n += p.spec.n();
            self.done += 1;
            (self.progress)(self.done, self.all);
        }
        Ok(CpuLinear { parts, n })
    }

    fn prepare(&mut self, p: &Product) -> Result<Q4Linear> {
        let spec = &p.spec;
        let name = spec.name();
        let selection = p.choice.as_ref().map_err(|e| Error::from(e.clone()))?;
        let predicted = selection.backend.footprint(spec, selection.path).resident;
        self.budget.reserve(predicted, &name)?;
        let linear = if p.quantized_on_load {
            let owned = self.quantized(p)?;
            let segments = owned.iter().map(Quantized::segment).collect::<Result<Vec<_>>>()?;
            let linear = self.seam(&segments, p)?;
            spec.segments.iter().for_each(|s| self.checkpoint.release_tensor(&format!("{}.weight", s.name)));
            linear
        } else {
            let layers = spec
                .segments
                .iter()
                .map(|s| self.checkpoint.layer_on(self.threads, &s.name, s.rows, spec.k))
                .collect::<Result<Vec<_>>>()?;
            let segments: Vec<Segment<'_>> = layers.iter().map(|l| l.segment.clone()).collect();
            let linear = self.seam(&segments, p)?;
            layers.iter().for_each(|l| self.checkpoint.release(&l.detected));
            linear
        };
        let actual = linear.info().resident_bytes;
        if actual > predicted {
            self.budget.reserve(actual - predicted, &name)?;
        } else {
            self.budget.release(predicted - actual);
        }
        // The head's depends on the rows whose logits somebody keeps.
        if spec.segments[0].name != names::HEAD {
            self.workspace = self.workspace.max(linear.workspace(self.options.max_rows));
        }
        Ok(linear)
    }

    fn seam(&self, segments: &[Segment<'_>], p: &Product) -> Result<Q4Linear> {
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

/// What `--quantize` makes of a dense projection.
pub fn default_target(format: &str) -> Result<Target> {
    match format {
        "nvfp4" => Ok(Target::Nvfp4 {
            rule: q4_core::Rule::ModelOpt,
            scales: quantize::Scales::TwoLevel,
            method: quantize::Method::Search,
        }),
        "nf4" => Ok(Target::Nf4 { block: 64, double: false }),
        other => Err(Error::new(Code::Usage, format!("--quantize {other}")).need("nvfp4 or nf4")),
    }
}
