//! Device memory of a step's activations: one allocation, in which slots that are never alive together share
//! bytes.
use super::CudaTensor;
use crate::executor::{Shape, Sizes, Slots};
use q4_core::{DType, Result};
use q4_cuda::{Buffer, Gpu};
use std::sync::Arc;

/// Where everything lies, in bytes from the start.
pub struct Layout<'a> {
    shape: &'a Shape,
    dtype: DType,
    rows: usize,
    logit_rows: usize,
    gate_up_rows: usize,
    places: Places,
}

struct Places {
    hidden: usize,
    normed: usize,
    product: usize,
    picked: usize,
    logits: usize,
    /// Of attention: dead when the MLP starts.
    qkv: usize,
    context: usize,
    queries: usize,
    /// Of the MLP: dead when the next layer's attention starts.
    gated: usize,
    gate_up: usize,
    end: usize,
}

/// The parts of one step's memory that are not slots of the graph.
pub struct Scratch {
    /// Rows of the residual stream that logits are kept of, or the head's input, f32 `[logit rows, hidden]`.
    pub picked: CudaTensor,
    /// Rotated queries of a step, `[rows, q]`, where attention is a kernel of its own.
    pub queries: u64,
}

/// Bytes of activations and logits, and of scratch and tables, that a context takes at most: where every gate
/// is a product of its own.
pub fn context_bytes(s: &Shape, dtype: DType, sizes: &Sizes) -> (u64, u64) {
    let slots = Layout::of((s, dtype), sizes.rows, sizes.logit_rows, sizes.rows).bytes();
    ((slots + 4 * s.vocab) as u64, other_bytes(s, sizes))
}

/// Bytes that the executor allocates besides its slots, predicted: scratch of products, rotations, sums of
/// attention of many sequences, and small things.
pub(super) fn other_bytes(s: &Shape, sizes: &Sizes) -> u64 {
    let heads = s.kv_heads * (s.heads / s.kv_heads).div_ceil(8);
    let sums = (sizes.sequences - 1) * heads * 16 * s.head_dim * 4;
    (sizes.workspace + sizes.context * s.head_dim * 4 + sums + (8 << 20)) as u64
}

impl<'a> Layout<'a> {
    /// For steps of up to `rows` rows, with logits of `logit_rows`; of `gate_up_rows` a gate is a product of
    /// its own.
    pub fn of((s, dtype): (&'a Shape, DType), rows: usize, logit_rows: usize, gate_up_rows: usize) -> Self {
        let (size, narrow) = (dtype.size(), DType::F32.size());
        // The byte behind `rows` rows from byte `at`, where the next slot may start.
        let behind = |at: usize, rows: usize, width: usize, size: usize| {
            at + (rows * width * size).next_multiple_of(256)
        };
        let hidden = 0;
        let normed = behind(hidden, rows, s.hidden, narrow);
        let product = behind(normed, rows, s.hidden, size);
        let picked = behind(product, rows, s.hidden, size);
        let logits = behind(picked, logit_rows, s.hidden, narrow);
        let qkv = behind(logits, logit_rows, s.vocab, narrow);
        let context = behind(qkv, rows, s.qkv(), size);
        let queries = behind(context, rows, s.q(), size);
        let gated = qkv;
        let gate_up = behind(gated, rows, s.intermediate, size);
        let end =
            behind(queries, rows, s.q(), size).max(behind(gate_up, gate_up_rows, 2 * s.intermediate, size));
        let places =
            Places { hidden, normed, product, picked, logits, qkv, context, queries, gated, gate_up, end };
        Self { shape: s, dtype, rows, logit_rows, gate_up_rows, places }
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> usize {
        self.places.end
    }

    /// Allocates it.
    pub fn allocate(&self, gpu: &Arc<Gpu>) -> Result<(Slots<CudaTensor>, Scratch)> {
        let (memory, s, p) = (Arc::new(Buffer::new(gpu, self.bytes())?), self.shape, &self.places);
        let slot = |at, width, dtype| CudaTensor::new(&memory, at, self.rows, width, dtype);
        let slots = Slots {
            hidden: slot(p.hidden, s.hidden, DType::F32),
            normed: slot(p.normed, s.hidden, self.dtype),
            qkv: slot(p.qkv, s.qkv(), self.dtype),
            context: slot(p.context, s.q(), self.dtype),
            gate_up: CudaTensor::new(&memory, p.gate_up, self.gate_up_rows, 2 * s.intermediate, self.dtype),
            gated: slot(p.gated, s.intermediate, self.dtype),
            product: slot(p.product, s.hidden, self.dtype),
            logits: CudaTensor::new(&memory, p.logits, self.logit_rows, s.vocab, DType::F32),
        };
        let picked = CudaTensor::new(&memory, p.picked, self.logit_rows, s.hidden, DType::F32);
        Ok((slots, Scratch { picked, queries: memory.ptr() + p.queries as u64 }))
    }
}
