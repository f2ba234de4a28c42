//! Models of the published sizes with random packed weights, for measuring without a download.
mod write;

use crate::checkpoint::{Bytes, names};
use crate::config::{Rope, RopeScaling};
use crate::cpu::{CpuExecutor, CpuHead, CpuLinear, CpuNorm, CpuTable};
use crate::executor::Shape;
use crate::graph::{Block, Qwen3};
use crate::load::{DeviceMemory, Loaded};
use crate::plan::{head_type, input_type};
use q4_core::memory::Budget;
use q4_core::{
    Activations, Code, Convention, DType, Device, Dispatch, Error, LinearSpec, Nf4, NibbleOrder, Nvfp4,
    OpSet, Q4Schema, Q4Weight, Result, ScaleLayout, Segment, SegmentSpec, ThreadPool,
};
use std::sync::Arc;
pub use write::write;

/// Dense Qwen3 sizes as published: name, layers, hidden, intermediate, heads, kv heads, tied embeddings.
pub const SIZES: [(&str, usize, usize, usize, usize, usize, bool); 6] = [
    ("qwen3-0.6b", 28, 1024, 3072, 16, 8, true),
    ("qwen3-1.7b", 28, 2048, 6144, 16, 8, true),
    ("qwen3-4b", 36, 2560, 9728, 32, 8, true),
    ("qwen3-8b", 36, 4096, 12288, 32, 8, false),
    ("qwen3-14b", 40, 5120, 17408, 40, 8, false),
    ("qwen3-32b", 64, 5120, 25600, 64, 8, false),
];

/// The sizes of a published model.
pub fn shape(name: &str) -> Result<Shape> {
    let known = SIZES.iter().find(|s| s.0 == name).ok_or_else(|| {
        let all: Vec<_> = SIZES.iter().map(|s| s.0).collect();
        Error::new(Code::Usage, format!("no shape is named `{name}`"))
            .need(format!("one of {}", all.join(", ")))
    })?;
    let &(_, layers, hidden, intermediate, heads, kv_heads, _) = known;
    Ok(Shape { hidden, heads, kv_heads, head_dim: 128, intermediate, vocab: 151_936, layers })
}

/// What a random model is made of.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// Encoding of every product, the head included.
    pub schema: Q4Schema,
    /// Activation format.
    pub activations: Activations,
    /// Output type.
    pub dtype: DType,
    /// Rows of the largest step.
    pub max_rows: usize,
    /// Where it computes.
    pub device: Device,
}

impl Recipe {
    /// NVFP4 with two-level scales.
    pub const NVFP4: Q4Schema =
        Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Multiply) });
    /// NF4 with blocks of 64.
    pub const NF4: Q4Schema =
        Q4Schema::Nf4(Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: None });
}

/// Bytes of a random model: packed products with the head, and the embedding in bf16.
pub fn bytes(shape: &Shape, schema: &Q4Schema) -> (u64, u64) {
    let product = |n, k| schema.stored_bytes(n, k);
    let layer = product(shape.qkv(), shape.hidden)
        + product(shape.hidden, shape.q())
        + product(2 * shape.intermediate, shape.hidden)
        + product(shape.hidden, shape.intermediate);
    let embedding = (shape.vocab * shape.hidden * 2) as u64;
    (layer * shape.layers as u64 + product(shape.vocab, shape.hidden), embedding)
}

/// Multiply-accumulates of the products for one token, the head aside and with it.
pub fn macs(shape: &Shape) -> (u64, u64) {
    let layer = shape.hidden * (shape.qkv() + shape.q() + 3 * shape.intermediate);
    let body = (layer * shape.layers) as u64;
    (body, body + (shape.hidden * shape.vocab) as u64)
}

/// Builds the model in memory, one product in flight at a time, the head first because it is the largest.
pub fn build(
    shape: &Shape,
    recipe: &Recipe,
    dispatch: &Dispatch,
    threads: Arc<ThreadPool>,
    budget: &Budget,
) -> Result<Loaded> {
    let device = DeviceMemory::of(recipe.device, budget)?;
    let budget = device.as_ref().map_or(budget, |d| &d.budget);
    let mut b = Builder { recipe, dispatch, threads: &threads, budget, workspace: 0, random: Random::new() };
    let s = shape;
    let head = b.linear(&[(names::HEAD.into(), s.vocab)], s.hidden)?;
    let mut blocks: Vec<Block<CpuExecutor>> = Vec::with_capacity(s.layers);
    for i in 0..s.layers {
        let qkv = [(names::q(i), s.q()), (names::k(i), s.kv()), (names::v(i), s.kv())];
        blocks.push(Block {
            input_norm: ones(s.hidden),
            qkv: b.linear(&qkv, s.hidden)?,
            q_norm: ones(s.head_dim),
            k_norm: ones(s.head_dim),
            o: b.linear(&[(names::o(i), s.hidden)], s.q())?,
            post_norm: ones(s.hidden),
            gate_up: b
                .linear(&[(names::gate(i), s.intermediate), (names::up(i), s.intermediate)], s.hidden)?,
            down: b.linear(&[(names::down(i), s.hidden)], s.intermediate)?,
        });
    }
    budget.reserve((s.vocab * s.hidden * 2) as u64, "the embeddings")?;
    let table = b.random.embedding(s.vocab * s.hidden);
    let range = 0..table.len();
    let table = CpuTable {
        bytes: Bytes::from(table),
        range,
        dtype: DType::BF16,
        rows: s.vocab,
        width: s.hidden,
        name: names::EMBEDDING.into(),
        whole: false,
    };
    let workspace = b.workspace;
    let model = Qwen3 { shape: s.clone(), table, blocks, norm: ones(s.hidden), head: CpuHead::Q4(head) };
    let rope = Rope { theta: 1e6, scaling: RopeScaling::None }.inv_freq(s.head_dim);
    let memory = dispatch.policy().unified_memory;
    Loaded::new(model, (recipe.device, recipe.dtype), threads, rope, workspace, memory, device)
}

fn ones(width: usize) -> CpuNorm {
    CpuNorm { weight: vec![1.0; width], eps: 1e-6 }
}

struct Builder<'a> {
    recipe: &'a Recipe,
    dispatch: &'a Dispatch,
    threads: &'a ThreadPool,
    budget: &'a Budget,
    workspace: usize,
    random: Random,
}

impl Builder<'_> {
    fn linear(&mut self, members: &[(String, usize)], k: usize) -> Result<CpuLinear> {
        let head = members[0].0 == names::HEAD;
        let spec = LinearSpec {
            segments: members
                .iter()
                .map(|(name, rows)| SegmentSpec { name: name.clone(), rows: *rows })
                .collect(),
            schema: self.recipe.schema,
            k,
            max_m: self.recipe.max_rows,
            x: input_type(self.recipe.device, self.recipe.dtype),
            y: if head { head_type(self.recipe.device, self.recipe.dtype) } else { self.recipe.dtype },
            activations: self.recipe.activations,
            device: self.recipe.device,
            ops: OpSet::FORWARD,
        };
        let selection = self.dispatch.select(&spec)?;
        let bytes = selection.backend.footprint(&spec, selection.path).resident;
        self.budget.reserve(bytes, &spec.name())?;
        let schema = &self.recipe.schema;
        let mut part = |rows| schema.plausible([rows, k], &mut |bytes| self.random.fill(bytes));
        let parts = members.iter().map(|(_, rows)| part(*rows)).collect::<Result<Vec<_>>>()?;
        let segments = parts
            .iter()
            .zip(members)
            .map(|(part, (_, rows))| Ok(Segment { rows: *rows, data: part.lend()? }));
        let segments = segments.collect::<Result<Vec<_>>>()?;
        let weight = Q4Weight { schema: spec.schema, k, segments: &segments };
        let linear = self.dispatch.prepare(&weight, &spec, &selection, self.threads)?;
        if !head {
            self.workspace = self.workspace.max(linear.workspace(spec.max_m));
        }
        Ok(CpuLinear { n: spec.n(), parts: vec![(linear, 0)] })
    }
}

/// A stream of bytes that is the same on every machine.
struct Random {
    seed: u64,
}

impl Random {
    fn new() -> Self {
        Self { seed: 1 }
    }

    /// bf16 between 1 and 2 in size, of both signs: the first norm gives them the right one.
    fn embedding(&mut self, len: usize) -> Vec<u8> {
        let mut table = vec![0u8; len * 2];
        self.fill(&mut table);
        for pair in table.as_chunks_mut::<2>().0 {
            pair[1] = pair[1] & 0x80 | 0x3f;
            pair[0] |= 0x80;
        }
        table
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        let mut x = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for chunk in bytes.chunks_mut(8) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            chunk.copy_from_slice(&x.to_le_bytes()[..chunk.len()]);
        }
        self.seed = self.seed.wrapping_add(1);
    }
}
