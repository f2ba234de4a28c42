//! Models of the published sizes with random packed weights, for measuring without a download.
mod write;

use crate::arch::qwen3::QWEN3;
use crate::arch::{self, Size};
use crate::assemble::{Form, Source, assemble};
use crate::checkpoint::{Bytes, Elements};
use crate::config::{Rope, RopeScaling, Rotation};
use crate::executor::Shape;
use crate::load::{DeviceMemory, Loaded};
use crate::plan::{head_type, input_type};
use crate::weights::{Linear, Part, StoredTable};
use q4_core::memory::Budget;
use q4_core::{
    Activations, Code, DType, Device, Dispatch, Error, LinearSpec, OpSet, Q4Schema, Q4Weight, Result,
    Segment, SegmentSpec, ThreadPool,
};
use std::sync::Arc;
pub use write::{WRITTEN, write};

/// A published size; upper and lower case are one, as publishers write both.
///
/// # Errors
/// [`Code::Usage`] for a name that none has.
pub fn size(name: &str) -> Result<&'static Size> {
    let all = || arch::ALL.iter().flat_map(|a| a.sizes);
    all().find(|s| s.name.eq_ignore_ascii_case(name)).ok_or_else(|| {
        let names: Vec<_> = all().map(|s| s.name).collect();
        let e = Error::new(Code::Usage, format!("no shape is named `{name}`"))
            .need(format!("one of {}", names.join(", ")));
        let end = format!("-{}", name.to_ascii_lowercase());
        match names.iter().find(|known| known.ends_with(&end)) {
            Some(near) => e.fix(format!("--shape {near}")),
            None => e,
        }
    })
}

/// The sizes of a published model.
///
/// # Errors
/// As [`size`].
pub fn shape(name: &str) -> Result<Shape> {
    let &Size { layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, .. } = size(name)?;
    Ok(Shape { hidden, heads, kv_heads, head_dim, intermediate, vocab, layers })
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

#[cfg(test)]
impl Recipe {
    /// NF4 with blocks of 64.
    pub(crate) const NF4: Q4Schema = Q4Schema::Nf4(q4_core::Nf4 {
        nibble_order: q4_core::NibbleOrder::HighFirst,
        block: 64,
        nested: None,
    });
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

/// Builds a Qwen3 in memory, one product in flight at a time, the head first because it is the largest.
///
/// # Errors
/// As [`load`](crate::load::load), but for files: there are none.
pub fn build(
    shape: &Shape,
    recipe: &Recipe,
    dispatch: &Dispatch,
    threads: Arc<ThreadPool>,
    budget: &Budget,
) -> Result<Loaded> {
    let device = DeviceMemory::of(recipe.device, budget)?;
    let budget = device.as_ref().map_or(budget, |d| &d.budget);
    let (workspace, random) = (0, Random::new());
    let mut b = Builder { shape, recipe, dispatch, threads: &threads, budget, workspace, random, head: None };
    b.head = Some(b.linear(&[(QWEN3.names.head.into(), shape.vocab)], shape.hidden)?);
    let to = (recipe.device, recipe.dtype, dispatch.policy().unified_memory);
    let model = assemble(Form { arch: &QWEN3, shape, eps: 1e-6 }, to, &mut b)?;
    let workspace = b.workspace;
    let (inv_freq, factor) = Rope { theta: 1e6, scaling: RopeScaling::None }.inv_freq(shape.head_dim);
    let rotation = Rotation { inv_freq, factor, pairs: QWEN3.rotary.pairs };
    Ok(Loaded::new(model, threads, recipe.dtype, rotation, workspace, device))
}

struct Builder<'a> {
    shape: &'a Shape,
    recipe: &'a Recipe,
    dispatch: &'a Dispatch,
    threads: &'a ThreadPool,
    budget: &'a Budget,
    workspace: usize,
    random: Random,
    head: Option<Linear>,
}

impl Source for Builder<'_> {
    fn products(&mut self, layer: usize) -> Result<[Linear; 4]> {
        let (s, n) = (self.shape, &QWEN3.names);
        let of = |name, rows| (n.of(layer, name), rows);
        Ok([
            self.linear(&[of(n.q, s.q()), of(n.k, s.kv()), of(n.v, s.kv())], s.hidden)?,
            self.linear(&[of(n.o, s.hidden)], s.q())?,
            self.linear(&[of(n.gate, s.intermediate), of(n.up, s.intermediate)], s.hidden)?,
            self.linear(&[of(n.down, s.hidden)], s.intermediate)?,
        ])
    }
    fn head(&mut self) -> Result<Option<Linear>> {
        Ok(self.head.take())
    }
    fn embedding(&mut self) -> Result<StoredTable> {
        let (rows, width) = (self.shape.vocab, self.shape.hidden);
        self.budget.reserve((rows * width * 2) as u64, "the embeddings")?;
        let bytes = self.random.embedding(rows * width);
        let range = 0..bytes.len();
        let (bytes, name) = (Bytes::from(bytes), QWEN3.names.embedding.into());
        Ok(StoredTable {
            bytes,
            range,
            elements: Elements::Floats(DType::BF16),
            rows,
            width,
            name,
            whole: false,
        })
    }
    fn dense_head(&mut self) -> Result<Option<StoredTable>> {
        Ok(None)
    }
    fn norm(&mut self, _name: &str, width: usize) -> Result<Vec<f32>> {
        Ok(vec![1.0; width])
    }
}

impl Builder<'_> {
    fn linear(&mut self, members: &[(String, usize)], k: usize) -> Result<Linear> {
        let head = members[0].0 == QWEN3.names.head;
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
        let part = Part { product: linear, column: 0, order: None };
        Ok(Linear { n: spec.n(), parts: vec![part], bias: None })
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
