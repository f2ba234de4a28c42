//! What a device must be able to do to run a decoder: coarse operations on slots the caller owns.
//!
//! The graph in [`crate::graph`] is written once over this trait; inference on the CPU, inference on CUDA and
//! training differ in nothing but the executor. A slot is `[rows, width]`; an executor never allocates one
//! inside a step.
use crate::arch::Activation;
use crate::watch::Site;
use q4_core::{Code, Error, FuseSet, Result};

/// Widths and limits of every slot of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Rows of the head.
    pub vocab: usize,
    /// Layers.
    pub layers: usize,
}

impl Shape {
    /// Width of all query heads.
    pub fn q(&self) -> usize {
        self.heads * self.head_dim
    }
    /// Width of all key (or value) heads.
    pub fn kv(&self) -> usize {
        self.kv_heads * self.head_dim
    }
    /// Width of the fused q/k/v product.
    pub fn qkv(&self) -> usize {
        self.q() + 2 * self.kv()
    }
    /// Positions with which attention multiplies as often for a row as a layer's products do:
    /// `hidden (qkv + q + 3 intermediate) / 2 q`.
    pub fn balance(&self) -> usize {
        self.hidden * (self.qkv() + self.q() + 3 * self.intermediate) / (2 * self.q()).max(1)
    }
}

/// Sizes of a context.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Rows of the largest step.
    pub rows: usize,
    /// Rows logits are kept of.
    pub logit_rows: usize,
    /// Sequences that decode together.
    pub sequences: usize,
    /// Positions of the cache.
    pub context: usize,
    /// Largest need of any product at that many rows.
    pub workspace: usize,
}

/// Activations of one step. The caller allocates them once; every operation overwrites what it produces.
pub struct Slots<T> {
    /// Residual stream, `[rows, hidden]`.
    pub hidden: T,
    /// Normalised input of a product, `[rows, hidden]`.
    pub normed: T,
    /// q, k and v side by side, `[rows, q + 2 kv]`.
    pub qkv: T,
    /// Attention output, `[rows, q]`.
    pub context: T,
    /// gate and up side by side, `[rows, 2 intermediate]`.
    pub gate_up: T,
    /// `activation(gate) * up`, `[rows, intermediate]`.
    pub gated: T,
    /// A product on its way into the residual stream, `[rows, hidden]`.
    pub product: T,
    /// `[rows or 1, vocab]`.
    pub logits: T,
}

/// Which rows of a step the head is computed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits<'a> {
    /// None: a chunk of a prompt that others follow.
    Skip,
    /// The last one: what sampling needs.
    Last,
    /// Every row: parity checks, perplexity.
    All,
    /// These, in this order: where a step has rows of several sequences.
    Rows(&'a [usize]),
}

impl Logits<'_> {
    /// How many, of `all` rows.
    pub fn rows(self, all: usize) -> usize {
        match self {
            Self::Skip => 0,
            Self::Last => 1,
            Self::All => all,
            Self::Rows(rows) => rows.len(),
        }
    }
    /// Which row of `all` is number `i`.
    pub fn row(self, i: usize, all: usize) -> usize {
        match self {
            Self::Skip | Self::Last => all - 1,
            Self::All => i,
            Self::Rows(rows) => rows[i],
        }
    }
}

/// A device with kernels.
///
/// # Errors
/// Every operation: those of its products and of the device, and `ContextFull` where the cache has no room
/// for the rows of a step.
pub trait Executor {
    /// A slot.
    type Tensor;
    /// A product, possibly of several matrices that share their input.
    type Linear;
    /// Weight of a norm, `[width]`.
    type Norm;
    /// Token embeddings, `[vocab, hidden]`.
    type Table;
    /// The head: the table again, a dense matrix, or a product.
    type Head;
    /// Keys and values of every layer.
    type Cache;

    /// `out[i] = table[ids[i]]`; sets the rows of the step to `ids.len()`.
    fn embed(&mut self, table: &Self::Table, ids: &[u32], out: &mut Self::Tensor) -> Result<()>;

    /// `out = x / rms(x) * weight`, rows alone; f32 inside.
    fn norm(&mut self, x: &Self::Tensor, weight: &Self::Norm, out: &mut Self::Tensor) -> Result<()>;

    /// `out = x W^T`.
    fn linear(&mut self, x: &Self::Tensor, weight: &Self::Linear, out: &mut Self::Tensor) -> Result<()>;

    /// `residual += x`.
    fn add(&mut self, x: &Self::Tensor, residual: &mut Self::Tensor) -> Result<()>;

    /// `out = activation(gate) * up` of `gate_up`'s two halves. Only SiLU is asked of an executor whose
    /// models are [plain](crate::arch::Arch::plain).
    fn gate(&mut self, activation: Activation, gate_up: &Self::Tensor, out: &mut Self::Tensor) -> Result<()>;

    /// Normalises every q and k head where there are `norms` for them, rotates both, and writes k and v into
    /// the cache behind what it holds.
    fn rope_append(
        &mut self,
        qkv: &mut Self::Tensor,
        norms: Option<&[Self::Norm; 2]>,
        cache: &mut Self::Cache,
        layer: usize,
    ) -> Result<()>;

    /// Causal attention of the step's queries over the cache: row `i` sees the cache and rows `0..=i` of the
    /// step, whether the cache was empty or not.
    fn attention(
        &mut self,
        qkv: &Self::Tensor,
        cache: &Self::Cache,
        layer: usize,
        out: &mut Self::Tensor,
    ) -> Result<()>;

    /// `rope_append`, then `attention`. A device that fuses them overrides this.
    fn rope_attention(
        &mut self,
        qkv: &mut Self::Tensor,
        norms: Option<&[Self::Norm; 2]>,
        cache: &mut Self::Cache,
        layer: usize,
        out: &mut Self::Tensor,
    ) -> Result<()> {
        self.rope_append(qkv, norms, cache, layer)?;
        self.attention(qkv, cache, layer, out)
    }

    /// Final norm and head; `scratch` is a slot as wide as `x`.
    fn head(
        &mut self,
        x: &Self::Tensor,
        norm: &Self::Norm,
        head: &Self::Head,
        which: Logits<'_>,
        scratch: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) -> Result<()>;

    /// Accepts the step's rows into the cache.
    fn commit(&mut self, cache: &mut Self::Cache, rows: usize) -> Result<()>;

    /// Called between operations with what was just written; an executor that was told to
    /// [watch](crate::watch) does so here, all others do nothing.
    fn watch(&mut self, _site: Site, _slot: &mut Self::Tensor) -> Result<()> {
        Ok(())
    }

    /// Whether [`fused`](Self::fused) takes `set` along with a product of `x`.
    fn fuses(&self, _x: &Self::Tensor, _weight: &Self::Linear, _set: FuseSet) -> bool {
        false
    }

    /// A product with a `norm` of its input and the rest of `set` in one pass. A fused gate is SiLU's.
    fn fused(
        &mut self,
        _x: &Self::Tensor,
        _norm: Option<&Self::Norm>,
        _weight: &Self::Linear,
        _set: FuseSet,
        _out: &mut Self::Tensor,
    ) -> Result<()> {
        Err(Error::new(Code::Unsupported, "a fused product"))
    }

    /// Norm, if there is one, then a product.
    fn norm_linear(
        &mut self,
        x: &Self::Tensor,
        norm: Option<&Self::Norm>,
        weight: &Self::Linear,
        scratch: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) -> Result<()> {
        let Some(norm) = norm else { return self.linear(x, weight, out) };
        if self.fuses(x, weight, FuseSet::NORM) {
            return self.fused(x, Some(norm), weight, FuseSet::NORM, out);
        }
        self.norm(x, norm, scratch)?;
        self.linear(scratch, weight, out)
    }

    /// A product, its norm if there is one, added to the residual stream.
    fn linear_add(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Linear,
        norm: Option<&Self::Norm>,
        (product, normed): (&mut Self::Tensor, &mut Self::Tensor),
        residual: &mut Self::Tensor,
    ) -> Result<()> {
        if norm.is_none() && self.fuses(x, weight, FuseSet::ACCUMULATE) {
            return self.fused(x, None, weight, FuseSet::ACCUMULATE, residual);
        }
        self.linear(x, weight, product)?;
        let Some(norm) = norm else { return self.add(product, residual) };
        self.norm(product, norm, normed)?;
        self.add(normed, residual)
    }

    /// `s.gated = activation(gate(x)) * up(x)` of `x = norm(s.hidden)`: in one pass, or in as few as the
    /// weight fuses.
    fn gated(
        &mut self,
        norm: Option<&Self::Norm>,
        gate_up: &Self::Linear,
        activation: Activation,
        s: &mut Slots<Self::Tensor>,
    ) -> Result<()> {
        let gate = FuseSet::GATE;
        if let (Activation::Silu, Some(norm)) = (activation, norm) {
            let both = FuseSet::NORM.with(gate);
            if self.fuses(&s.hidden, gate_up, both) {
                return self.fused(&s.hidden, Some(norm), gate_up, both, &mut s.gated);
            }
            if self.fuses(&s.hidden, gate_up, gate) {
                self.norm(&s.hidden, norm, &mut s.normed)?;
                return self.fused(&s.normed, None, gate_up, gate, &mut s.gated);
            }
        }
        self.norm_linear(&s.hidden, norm, gate_up, &mut s.normed, &mut s.gate_up)?;
        self.gate(activation, &s.gate_up, &mut s.gated)
    }

    /// Whether somebody watches and `s.normed` holds the last norm: where products fuse it, nobody ever
    /// writes it down.
    fn shows_norms(&self) -> bool {
        false
    }
}
