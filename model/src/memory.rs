//! What a run takes, in one table and one total, before anything large is taken.
//!
//! ```text
//! program      executable, libraries, tokenizer and lists of tensors; at least what is resident by then
//! weights      every product as its backend will keep it: packed, or a dense copy; and norms
//! embedding    pages of the file that are read in every step, or those of a few rows
//! head         a dense one of its own
//! file         the rest of a model inside the executable, whose pages stay
//! cache        keys and values of every position
//! activations  slots of the largest step, logits, candidates of the sampler
//! workspace    scratch of the largest product, scores and rotations of the context
//! loading      where preparing the largest product takes more than the three above, the rest of it
//! ```
//! On the CPU everything is host memory. On a device, `loading` and pinned logits are the host's, and what is
//! not `program` or `loading` is the device's.
use crate::checkpoint::{Checkpoint, Container, Elements, SCANNED, names};
use crate::config::DecoderConfig;
use crate::cpu::{CpuExecutor, CpuTable, KvCache, KvShape, slot_bytes};
use crate::cuda;
use crate::load::{ContextOptions, shape};
use crate::plan::{HeadPlan, Plan, PlanOptions, Product};
use q4_core::memory::{Budget, human};
use q4_core::{Code, Device, Error, Footprint, Q4Schema, Result, selfcheck};
use serde::Serialize;
use std::fmt;

/// Largest parts that a refusal names.
const NAMED: usize = 4;
/// Positions below which another context is no advice.
const LEAST_CONTEXT: u64 = 64;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The machine's.
    Host,
    /// That of the device that computes.
    Device,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// What it is.
    pub name: &'static str,
    /// Whose memory.
    pub place: Place,
    /// Bytes.
    pub bytes: u64,
}

/// Everything a run takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    parts: Vec<Part>,
    #[serde(skip)]
    context: u64,
    #[serde(skip)]
    position: u64,
}

/// Bytes of one product.
struct Taken {
    kept: Footprint,
    /// Of the host, while it is prepared.
    passing: u64,
}

impl MemoryPlan {
    /// What `plan` takes with a context of these sizes on `threads` threads. `program` is what the process
    /// has without the model. Reads no weight.
    ///
    /// # Errors
    /// The refusal of a layer that nobody can serve, and damage of the checkpoint.
    pub fn new(
        checkpoint: &Checkpoint,
        plan: &Plan,
        options: &PlanOptions,
        context: &ContextOptions,
        threads: usize,
        program: u64,
    ) -> Result<Self> {
        let (c, shape) = (checkpoint.config(), shape(checkpoint));
        let logit_rows = context.logit_rows();
        let head = match &plan.head {
            HeadPlan::Product(p) => Some(&**p),
            HeadPlan::Dense { .. } => None,
        };
        let mut weights = small(c);
        let (mut workspace, mut passing) = (0, 0);
        for p in plan.products() {
            let is_head = head.is_some_and(|h| std::ptr::eq(h, p));
            let taken = Taken::of(p, is_head.then_some(logit_rows))?;
            weights += taken.kept.resident;
            workspace = workspace.max(taken.kept.workspace);
            passing = passing.max(taken.passing);
        }
        let tied = matches!(plan.head, HeadPlan::Dense { tied: true, .. });
        let device = options.device;
        let embedding = table(checkpoint, c.arch.names.embedding, tied, device)?;
        let own_head = match plan.head {
            HeadPlan::Dense { tied: false, .. } => table(checkpoint, c.arch.names.head, true, device)?,
            _ => Table::default(),
        };
        passing = passing.max(embedding.passing).max(own_head.passing);

        let cache = |positions| match device {
            Device::Cpu => KvCache::bytes(context.kv, KvShape::of(&shape), positions),
            _ => {
                cuda::CudaCache::bytes(options.dtype, shape.layers, shape.kv_heads, shape.head_dim, positions)
            }
        };
        let (rows, positions, workspace) = (context.chunk, context.positions(), workspace as usize);
        let sizes = context.sizes(workspace);
        let sampler = (16 * sizes.sequences * shape.vocab) as u64;
        let mut parts = Vec::new();
        let mut add = |name, place, bytes| parts.push(Part { name, place, bytes });
        let place = if device == Device::Cpu { Place::Host } else { Place::Device };
        add("program", Place::Host, program);
        add("weights", place, weights + pages(plan, device, weights));
        add("embedding", place, embedding.kept);
        add("head", place, own_head.kept);
        // Of a built-in model the tables are read where they lie; of GGUF only what was taken apart is
        // unmapped.
        let is_apart = checkpoint.store().container() == Container::Gguf;
        let tables = if device == Device::Cpu && !is_apart { embedding.kept + own_head.kept } else { 0 };
        add("file", Place::Host, checkpoint.store().unmapped().saturating_sub(tables));
        add("cache", place, cache(positions));
        let with_context = match device {
            Device::Cpu => {
                let activations = slot_bytes(&shape, rows, logit_rows) + sampler;
                let workspace = CpuExecutor::bytes(&shape, threads, options.dtype, &sizes);
                add("activations", place, activations);
                add("workspace", place, workspace);
                cache(positions) + activations + workspace
            }
            _ => {
                let (activations, workspace) = cuda::context_bytes(&shape, options.dtype, &sizes);
                add("activations", place, activations);
                add("workspace", place, workspace + cuda::KERNELS);
                let pinned = (4 * logit_rows * shape.vocab) as u64 + sampler;
                add("activations", Place::Host, pinned);
                pinned
            }
        };
        add("loading", Place::Host, passing.saturating_sub(with_context));
        parts.retain(|p| p.bytes > 0);
        let position = cache(1024).saturating_sub(cache(512)) / 512;
        Ok(Self { parts, context: positions as u64, position })
    }

    /// The same with something else that the caller keeps on the host.
    pub fn with(mut self, name: &'static str, bytes: u64) -> Self {
        self.parts.push(Part { name, place: Place::Host, bytes });
        self
    }

    /// Both at once, in one process, loaded one after the other.
    pub fn beside(mut self, other: &Self) -> Self {
        for part in &other.parts {
            let once = matches!(part.name, "program" | "loading");
            match self.parts.iter_mut().find(|p| (p.name, p.place) == (part.name, part.place)) {
                Some(own) if once => own.bytes = own.bytes.max(part.bytes),
                Some(own) => own.bytes += part.bytes,
                None => self.parts.push(part.clone()),
            }
        }
        self.position += other.position;
        self
    }

    /// The table.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Bytes in one place.
    pub fn bytes(&self, place: Place) -> u64 {
        self.parts.iter().filter(|p| p.place == place).map(|p| p.bytes).sum()
    }

    /// Bytes in all.
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }

    /// Compares it with a limit that the user named, all of it; else the host's part with what the machine
    /// has, and the device's with `device_free` less 5 %.
    ///
    /// # Errors
    /// [`Code::OutOfMemory`] with the total, the largest parts, and a context that would fit.
    pub fn check(&self, budget: &Budget, device_free: Option<u64>) -> Result<()> {
        let device_free = device_free.map(|free| free - free / 20);
        if budget.is_named() && self.total() > budget.limit() {
            return Err(self.refused(self.total(), budget.limit(), "--memory-limit"));
        }
        let (host, device) = (self.bytes(Place::Host), self.bytes(Place::Device));
        if !budget.is_named() && host > budget.limit() {
            return Err(self.refused(host, budget.limit(), "free memory"));
        }
        match device_free.filter(|free| device > *free) {
            Some(free) => Err(self.refused(device, free, "free memory of the device")),
            None => Ok(()),
        }
    }

    fn refused(&self, need: u64, limit: u64, what: &str) -> Error {
        let mut parts: Vec<_> = self.parts.iter().collect();
        parts.sort_by_key(|p| std::cmp::Reverse(p.bytes));
        let mut named: Vec<_> =
            parts.iter().take(NAMED).map(|p| format!("{} {}", p.name, human(p.bytes))).collect();
        let rest: u64 = parts.iter().skip(NAMED).map(|p| p.bytes).sum();
        if rest > 0 {
            named.push(format!("the rest {}", human(rest)));
        }
        let raised = match what {
            "--memory-limit" => format!("--memory-limit {}MiB", need.div_ceil(1 << 20)),
            _ => "free some memory, or choose a smaller model".to_owned(),
        };
        // Cache lines are whole blocks of positions.
        let spared = (need - limit).div_ceil(self.position.max(1)).next_multiple_of(LEAST_CONTEXT);
        let fix = match self.context.checked_sub(spared).filter(|left| *left >= LEAST_CONTEXT) {
            Some(left) => format!("--context {left}, or {raised}"),
            None => raised,
        };
        Error::new(Code::OutOfMemory, format!("the model does not fit into {what}"))
            .need(format!("{} in all: {}", human(need), named.join(", ")))
            .have(human(limit))
            .fix(fix)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on_device = self.parts.iter().any(|p| p.place == Place::Device);
        for part in &self.parts {
            let place = match part.place {
                Place::Host if on_device => "  host",
                Place::Device => "  device",
                Place::Host => "",
            };
            writeln!(f, "{:<12}{:>12}{place}", part.name, human(part.bytes))?;
        }
        write!(f, "{:<12}{:>12}  planned", "memory", human(self.total()))
    }
}

impl Taken {
    /// Of a product whose calls have at most `rows` rows, if that is less than it is planned for.
    fn of(p: &Product, rows: Option<usize>) -> Result<Self> {
        let selection = p.choice.as_ref().map_err(|e| Error::from(e.clone()))?;
        let mut spec = p.spec.clone();
        spec.max_m = rows.map_or(spec.max_m, |rows| rows.min(spec.max_m));
        let mut kept = selection.backend.footprint(&spec, selection.path);
        kept.workspace += p.gathered(spec.max_m) as u64;
        kept.resident += p.order_bytes();
        let (n, k) = (spec.n(), spec.k);
        let packed = spec.schema.stored_bytes(n, k);
        // Dense values that are quantised on the way are read, packed, and looked at once more.
        let stored = if p.quantized_on_load { packed + 4 * (n * k) as u64 } else { packed };
        // Scales and codes in another order, decoded or padded.
        let decoded = (n * k / 8) as u64;
        let staged = if spec.device == Device::Cpu { 0 } else { 2 * kept.resident };
        let check = selfcheck::bytes(&p.spec, selection.path) + kept.workspace;
        Ok(Self { kept, passing: stored + (decoded + staged).max(check) })
    }
}

#[derive(Default)]
struct Table {
    kept: u64,
    passing: u64,
}

/// A table of the file: `whole` where every step reads all of it.
fn table(checkpoint: &Checkpoint, module: &str, whole: bool, device: Device) -> Result<Table> {
    let floats = format!("{module}.weight");
    let is_embedding = module == checkpoint.config().arch.names.embedding;
    let (name, elements) = match if is_embedding { Some(checkpoint.embedding_elements()?) } else { None } {
        Some(elements @ Elements::Blocks(blocks)) => (blocks.tensor(&floats), elements),
        _ => (floats.clone(), Elements::Floats(checkpoint.tensor(&floats)?.dtype)),
    };
    let stored = checkpoint.tensor(&name)?;
    let missing = || Error::new(Code::TensorMissing, format!("`{name}`"));
    let (bytes, _) = checkpoint.store().place(&name).ok_or_else(missing)?;
    let len = stored.bytes.len() as u64;
    if device != Device::Cpu {
        let c = checkpoint.config();
        let kept = (c.vocab_size * c.hidden_size * elements.dtype().size()) as u64;
        return Ok(Table { kept, passing: len.max(kept) });
    }
    let aligned = stored.bytes.as_ptr().align_offset(elements.align()) == 0;
    if !aligned {
        return Ok(Table { kept: len, passing: len });
    }
    let kept = CpuTable::resident(&bytes, stored.bytes.len(), whole);
    Ok(Table { kept, passing: len.min(SCANNED as u64) })
}

/// Norms and biases.
fn small(c: &DecoderConfig) -> u64 {
    let norms: usize = names::norms(c, 0).iter().map(|(_, len)| len).sum();
    let linears = names::linears(c, 0);
    let biases: usize = linears.iter().filter(|(name, ..)| c.arch.is_biased(name)).map(|(_, n, _)| n).sum();
    (4 * (c.num_hidden_layers * (norms + biases) + c.hidden_size)) as u64
}

/// What packing weights side by side on huge pages adds: the rest of the last page of each run of them.
fn pages(plan: &Plan, device: Device, weights: u64) -> u64 {
    const HUGE: u64 = 2 << 20;
    let packed = |p: &Product| matches!(p.spec.schema, Q4Schema::Nvfp4(_));
    if device == Device::Cpu && plan.products().any(packed) { HUGE + weights / 24 } else { 0 }
}
