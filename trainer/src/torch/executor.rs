//! The model's executor over libtorch: the same forward pass, differentiable.
//!
//! A slot is a handle that every operation replaces, so that autograd sees one pure function. Slots of the
//! residual stream are f32; inputs and outputs of products have the compute type (f32 on the CPU, bf16 on
//! CUDA).
use super::frozen::Frozen;
use super::{Tch, activations};
use q4_core::{Activations, Code, Error, Result};
use q4_model::arch::Activation;
use q4_model::config::DecoderConfig;
use q4_model::executor::{Executor, Logits, Shape, Slots};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// Computes one batch after another.
pub struct TorchExecutor {
    shape: Shape,
    device: Device,
    compute: Kind,
    activations: Activations,
    /// `[head_dim / 2]`.
    inv_freq: Tensor,
    /// Factor on cos and sin.
    rope_factor: f64,
}

/// A norm's weight, f32 `[width]`, and epsilon.
pub struct TorchNorm {
    /// `[width]`.
    pub weight: Tensor,
    /// Added to the mean square.
    pub eps: f64,
}

/// What a product multiplies by, `[n, k]`.
pub enum Weight {
    /// Values in the compute type, decoded where they were 4-bit; a gradient may be taken.
    Dense(Tensor),
    /// Packed weights that share their input; outputs lie side by side.
    Packed(Vec<Arc<Frozen>>),
}

/// A product of the graph.
pub struct TorchLinear {
    /// The weight.
    pub weight: Weight,
    /// What is added: `scale * (x a^T) b^T`.
    pub adapter: Option<LowRank>,
}

/// An adapter in the graph, in the compute type.
pub struct LowRank {
    /// `[rank, k]`.
    pub a: Tensor,
    /// `[n, rank]`.
    pub b: Tensor,
    /// alpha / rank.
    pub scale: f64,
}

/// How the rows of a step lie: `rows` sequences of `seq` positions, one behind the other.
pub struct TorchCache {
    rows: i64,
    seq: i64,
    /// `[rows * seq, 1, head_dim / 2]`, f32.
    cos: Tensor,
    sin: Tensor,
    /// `[rows, 1, seq, seq]` in the compute type, 0 or -inf; `None`: plain causal.
    mask: Option<Tensor>,
    /// Keys and values of the layer at work, or of every layer when decoding.
    layers: Vec<Option<(Tensor, Tensor)>>,
    /// Accepted positions.
    past: i64,
    decoding: bool,
}

impl TorchExecutor {
    /// For a model of `config`.
    pub fn new(
        config: &DecoderConfig,
        shape: Shape,
        device: Device,
        activations: Activations,
    ) -> Result<Self> {
        let (inv_freq, factor) = config.rope.inv_freq(config.head_dim);
        Ok(Self {
            shape,
            device,
            compute: if device.is_cuda() { Kind::BFloat16 } else { Kind::Float },
            activations,
            inv_freq: Tensor::f_from_slice(&inv_freq).t()?.f_to_device(device).t()?,
            rope_factor: f64::from(factor),
        })
    }

    /// Type of products' operands.
    pub fn compute(&self) -> Kind {
        self.compute
    }

    /// Where it computes.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Sizes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Slots; they hold nothing before the first operation writes them.
    pub fn slots() -> Slots<Tensor> {
        Slots {
            hidden: Tensor::new(),
            normed: Tensor::new(),
            qkv: Tensor::new(),
            context: Tensor::new(),
            gate_up: Tensor::new(),
            gated: Tensor::new(),
            product: Tensor::new(),
            logits: Tensor::new(),
        }
    }

    /// For `rows` packed sequences of `seq` tokens. `positions` rotate; tokens see only earlier ones of the
    /// same row and document. Without `documents` a row is one document.
    pub fn batch(
        &self,
        rows: usize,
        seq: usize,
        positions: &[i64],
        documents: Option<&[i32]>,
    ) -> Result<TorchCache> {
        let (rows, seq) = (rows as i64, seq as i64);
        let on = |t: Result<Tensor, tch::TchError>| t.and_then(|t| t.f_to_device(self.device)).t();
        let mask = match documents {
            None => None,
            Some(d) => {
                let d = on(Tensor::f_from_slice(d))?.f_view([rows, 1, seq]).t()?;
                let same = d.f_unsqueeze(-1).t()?.f_eq_tensor(&d.f_unsqueeze(-2).t()?).t()?;
                let causal = on(Tensor::f_ones([seq, seq], (Kind::Bool, Device::Cpu)))?.f_tril(0).t()?;
                let hidden = same.f_logical_and(&causal).t()?.f_logical_not().t()?;
                let zero = Tensor::f_zeros([rows, 1, seq, seq], (self.compute, self.device)).t()?;
                Some(zero.f_masked_fill(&hidden, f64::NEG_INFINITY).t()?)
            }
        };
        let (cos, sin) = self.rotation(&on(Tensor::f_from_slice(positions))?)?;
        Ok(TorchCache { rows, seq, cos, sin, mask, layers: Vec::new(), past: 0, decoding: false })
    }

    /// For one sequence, step by step.
    pub fn sequence(&self) -> Result<TorchCache> {
        let layers = (0..self.shape.layers).map(|_| None).collect();
        let (cos, sin) = (Tensor::new(), Tensor::new());
        Ok(TorchCache { rows: 1, seq: 0, cos, sin, mask: None, layers, past: 0, decoding: true })
    }

    fn rotation(&self, positions: &Tensor) -> Result<(Tensor, Tensor)> {
        let angles = positions.f_to_kind(Kind::Float).t()?.f_unsqueeze(-1).t()?.f_mul(&self.inv_freq).t()?;
        let angles = angles.f_unsqueeze(1).t()?;
        let scaled =
            |t: Tensor| if self.rope_factor == 1.0 { Ok(t) } else { t.f_mul_scalar(self.rope_factor).t() };
        Ok((scaled(angles.f_cos().t()?)?, scaled(angles.f_sin().t()?)?))
    }

    fn product(&self, x: &Tensor, linear: &TorchLinear) -> Result<Tensor> {
        let y = match (&linear.weight, &self.activations) {
            (Weight::Dense(_), Activations::Nvfp4(act)) => {
                let x = activations::straight_through(x, act)?;
                linear.weight.product(&x.f_to_kind(self.compute).t()?)?
            }
            // A backend rounds its inputs itself.
            _ => linear.weight.product(&x.f_to_kind(self.compute).t()?)?,
        };
        let Some(LowRank { a, b, scale }) = &linear.adapter else { return Ok(y) };
        let low = x.f_to_kind(self.compute).t()?.f_linear(a, None::<&Tensor>).t()?;
        y.f_add(&low.f_mul_scalar(*scale).t()?.f_linear(b, None::<&Tensor>).t()?).t()
    }
}

impl Weight {
    /// `x W^T`; x is `[m, k]` in the compute type.
    pub fn product(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(values) => x.f_linear(values, None::<&Tensor>).t(),
            Self::Packed(parts) => match parts.as_slice() {
                [one] => one.product(x),
                several => {
                    let parts = several.iter().map(|p| p.product(x)).collect::<Result<Vec<_>>>()?;
                    Tensor::f_cat(&parts, 1).t()
                }
            },
        }
    }

    /// The same weight again.
    pub fn share(&self) -> Self {
        match self {
            Self::Dense(values) => Self::Dense(values.shallow_clone()),
            Self::Packed(parts) => Self::Packed(parts.clone()),
        }
    }

    /// Values, f32 on the host.
    pub fn decoded(&self) -> Result<Tensor> {
        match self {
            Self::Dense(values) => {
                let mut copy = Tensor::f_empty(values.size(), (Kind::Float, Device::Cpu)).t()?;
                copy.f_copy_(values).t()?;
                Ok(copy)
            }
            Self::Packed(parts) => {
                let parts = parts.iter().map(|p| p.decoded()).collect::<Result<Vec<_>>>()?;
                Tensor::f_cat(&parts, 0).t()
            }
        }
    }

    /// Bytes it keeps, as its backend says where it is packed.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Dense(values) => (values.numel() * values.kind().elt_size_in_bytes()) as u64,
            Self::Packed(parts) => parts.iter().map(|p| p.linear().info().resident_bytes).sum(),
        }
    }
}

impl TorchCache {
    /// Tokens of a step.
    pub fn tokens(&self) -> i64 {
        self.rows * self.seq
    }

    fn scores(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let single = self.decoding && self.seq == 1;
        let causal = self.mask.is_none() && !single && self.past == 0;
        let mask = match &self.mask {
            Some(mask) => Some(mask.shallow_clone()),
            // A step of several rows on a warm cache: row i sees the cache and rows 0..=i.
            None if !single && !causal => {
                let all = Tensor::f_full(
                    [self.seq, self.past + self.seq],
                    f64::NEG_INFINITY,
                    (q.kind(), q.device()),
                );
                Some(all.t()?.f_triu(self.past + 1).t()?)
            }
            None => None,
        };
        // Kernels that take a mask do not take grouped heads.
        let group = q.size()[1] / k.size()[1];
        let spread = |t: &Tensor| {
            if mask.is_some() && group > 1 {
                t.f_repeat_interleave_self_int(group, 1, None).t()
            } else {
                Ok(t.shallow_clone())
            }
        };
        let (k, v) = (spread(k)?, spread(v)?);
        let grouped = group > 1 && mask.is_none();
        Tensor::f_scaled_dot_product_attention(q, &k, &v, mask, 0.0, causal, None, grouped).t()
    }
}

impl Executor for TorchExecutor {
    type Tensor = Tensor;
    type Linear = TorchLinear;
    type Norm = TorchNorm;
    /// `[vocab, hidden]` in the compute type.
    type Table = Tensor;
    type Head = Weight;
    type Cache = TorchCache;

    fn embed(&mut self, table: &Tensor, ids: &[u32], out: &mut Tensor) -> Result<()> {
        let vocab = table.size()[0];
        if let Some(id) = ids.iter().find(|id| i64::from(**id) >= vocab) {
            return Err(Error::new(Code::ValueInvalid, "token id")
                .need(format!("below {vocab}"))
                .have(id.to_string()));
        }
        let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
        let ids = Tensor::f_from_slice(&ids).t()?.f_to_device(self.device).t()?;
        *out = Tensor::f_embedding(table, &ids, -1, false, false).t()?.f_to_kind(Kind::Float).t()?;
        Ok(())
    }

    fn norm(&mut self, x: &Tensor, norm: &TorchNorm, out: &mut Tensor) -> Result<()> {
        *out = x
            .f_rms_norm(norm.weight.size(), Some(&norm.weight), norm.eps)
            .t()?
            .f_to_kind(self.compute)
            .t()?;
        Ok(())
    }

    fn linear(&mut self, x: &Tensor, weight: &TorchLinear, out: &mut Tensor) -> Result<()> {
        *out = self.product(x, weight)?;
        Ok(())
    }

    fn add(&mut self, x: &Tensor, residual: &mut Tensor) -> Result<()> {
        *residual = residual.f_add(x).t()?;
        Ok(())
    }

    fn gate(&mut self, _silu: Activation, gate_up: &Tensor, out: &mut Tensor) -> Result<()> {
        let half = gate_up.size()[1] / 2;
        let (gate, up) = (gate_up.f_narrow(1, 0, half).t()?, gate_up.f_narrow(1, half, half).t()?);
        *out = gate.f_silu().t()?.f_mul(&up).t()?;
        Ok(())
    }

    /// Leaves the rotated q alone in the slot; k and v are in the cache.
    fn rope_append(
        &mut self,
        qkv: &mut Tensor,
        norms: Option<&[TorchNorm; 2]>,
        cache: &mut TorchCache,
        layer: usize,
    ) -> Result<()> {
        let n = qkv.size()[0];
        if cache.decoding && layer == 0 {
            cache.seq = n;
            let positions =
                Tensor::f_arange_start(cache.past, cache.past + n, (Kind::Int64, self.device)).t()?;
            (cache.cos, cache.sin) = self.rotation(&positions)?;
        }
        let s = &self.shape;
        let (d, heads, kv_heads) = (s.head_dim as i64, s.heads as i64, s.kv_heads as i64);
        let (both, half) = (heads + kv_heads, d / 2);
        let x = qkv.f_narrow(1, 0, both * d).t()?.f_view([n, both, d]).t()?.f_to_kind(Kind::Float).t()?;
        let spread = |w: &Tensor, heads| w.f_unsqueeze(0).t()?.f_expand([heads, d], false).t();
        let [q_norm, k_norm] = norms.ok_or_else(|| Error::new(Code::Unsupported, "heads without norms"))?;
        let weights = [spread(&q_norm.weight, heads)?, spread(&k_norm.weight, kv_heads)?];
        let x = x
            .f_rms_norm([d], None::<&Tensor>, q_norm.eps)
            .t()?
            .f_mul(&Tensor::f_cat(&weights, 0).t()?)
            .t()?;
        let (a, b) = (x.f_narrow(2, 0, half).t()?, x.f_narrow(2, half, half).t()?);
        let (cos, sin) = (&cache.cos, &cache.sin);
        let turned = [
            a.f_mul(cos).t()?.f_sub(&b.f_mul(sin).t()?).t()?,
            b.f_mul(cos).t()?.f_add(&a.f_mul(sin).t()?).t()?,
        ];
        let x = Tensor::f_cat(&turned, 2).t()?.f_to_kind(self.compute).t()?;
        let (rows, seq) = (cache.rows, cache.seq);
        let heads_first = |t: Tensor, h| t.f_reshape([rows, seq, h, d]).t()?.f_transpose(1, 2).t();
        let mut k = heads_first(x.f_narrow(1, heads, kv_heads).t()?, kv_heads)?;
        let mut v = heads_first(qkv.f_narrow(1, both * d, kv_heads * d).t()?, kv_heads)?;
        *qkv = x.f_narrow(1, 0, heads).t()?;
        if cache.decoding {
            if let Some((before_k, before_v)) = cache.layers[layer].take() {
                (k, v) = (Tensor::f_cat(&[before_k, k], 2).t()?, Tensor::f_cat(&[before_v, v], 2).t()?);
            }
            cache.layers[layer] = Some((k, v));
        } else {
            cache.layers.clear();
            cache.layers.push(Some((k, v)));
        }
        Ok(())
    }

    fn attention(&mut self, qkv: &Tensor, cache: &TorchCache, layer: usize, out: &mut Tensor) -> Result<()> {
        let s = &self.shape;
        let (rows, seq, heads, d) = (cache.rows, cache.seq, s.heads as i64, s.head_dim as i64);
        let kept = cache.layers.get(if cache.decoding { layer } else { 0 }).and_then(Option::as_ref);
        let (k, v) = kept.ok_or_else(|| Error::new(Code::Internal, "attention before rope_append"))?;
        let q = qkv.f_reshape([rows, seq, heads, d]).t()?.f_transpose(1, 2).t()?;
        let y = cache.scores(&q, k, v)?;
        *out = y.f_transpose(1, 2).t()?.f_reshape([rows * seq, heads * d]).t()?;
        Ok(())
    }

    fn head(
        &mut self,
        x: &Tensor,
        norm: &TorchNorm,
        head: &Weight,
        which: Logits<'_>,
        scratch: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<()> {
        let rows = x.size()[0];
        let x = match which {
            Logits::All => x.shallow_clone(),
            Logits::Last | Logits::Skip => x.f_narrow(0, rows - 1, 1).t()?,
            Logits::Rows(_) => return Err(Error::new(Code::Unsupported, "logits of some rows of a step")),
        };
        self.norm(&x, norm, scratch)?;
        *out = head.product(scratch)?;
        Ok(())
    }

    fn commit(&mut self, cache: &mut TorchCache, rows: usize) -> Result<()> {
        cache.past += rows as i64;
        Ok(())
    }
}
