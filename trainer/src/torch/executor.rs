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

/// Sequences of one length, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// How many.
    pub count: usize,
    /// Tokens of each.
    pub len: usize,
}

/// How the tokens of a step lie.
pub struct TorchCache {
    sequences: Sequences,
    /// `[tokens, 1, head_dim / 2]`, f32.
    cos: Tensor,
    sin: Tensor,
    /// Keys and values: of the layer at work, `[tokens, kv_heads, head_dim]`, or when decoding of every
    /// layer, `[1, kv_heads, past + tokens, head_dim]`.
    layers: Vec<Option<(Tensor, Tensor)>>,
}

/// Which tokens see each other.
enum Sequences {
    /// Those of one sequence, the earlier ones.
    Whole(Vec<Group>),
    /// All of one sequence, step by step, behind as many as were accepted.
    Step { past: i64, tokens: i64 },
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

    /// For the sequences of `groups`, one behind the other. `positions` rotate; tokens see only earlier ones
    /// of their sequence.
    pub fn batch(&self, groups: &[Group], positions: &[i64]) -> Result<TorchCache> {
        let tokens: usize = groups.iter().map(|g| g.count * g.len).sum();
        if tokens != positions.len() {
            return Err(Error::new(Code::Internal, "sequences of a step")
                .need(format!("{} tokens", positions.len()))
                .have(format!("{tokens} in {groups:?}")));
        }
        let positions = Tensor::f_from_slice(positions).t()?.f_to_device(self.device).t()?;
        let (cos, sin) = self.rotation(&positions)?;
        Ok(TorchCache { sequences: Sequences::Whole(groups.to_vec()), cos, sin, layers: Vec::new() })
    }

    /// For one sequence, step by step.
    pub fn sequence(&self) -> Result<TorchCache> {
        let layers = (0..self.shape.layers).map(|_| None).collect();
        let (cos, sin) = (Tensor::new(), Tensor::new());
        Ok(TorchCache { sequences: Sequences::Step { past: 0, tokens: 0 }, cos, sin, layers })
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

/// Tokens of q behind `past` others see those and each other's earlier ones; all are `[n, heads, _, d]`.
fn scores(q: &Tensor, k: &Tensor, v: &Tensor, past: i64) -> Result<Tensor> {
    let tokens = q.size()[2];
    let group = q.size()[1] / k.size()[1];
    let sdpa = |k: &Tensor, v: &Tensor, mask: Option<Tensor>, causal, grouped| {
        Tensor::f_scaled_dot_product_attention(q, k, v, mask, 0.0, causal, None, grouped).t()
    };
    if past == 0 || tokens == 1 {
        return sdpa(k, v, None, past == 0 && tokens > 1, group > 1);
    }
    // A step of several rows on a warm cache: row i sees the cache and rows 0..=i.
    let all = Tensor::f_full([tokens, past + tokens], f64::NEG_INFINITY, (q.kind(), q.device()));
    let mask = all.t()?.f_triu(past + 1).t()?;
    // Kernels that take a mask do not take grouped heads.
    let spread = |t: &Tensor| match group {
        1 => Ok(t.shallow_clone()),
        _ => t.f_repeat_interleave_self_int(group, 1, None).t(),
    };
    sdpa(&spread(k)?, &spread(v)?, Some(mask), false, false)
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
        if let Sequences::Step { past, tokens } = &mut cache.sequences
            && layer == 0
        {
            *tokens = n;
            let positions = Tensor::f_arange_start(*past, *past + n, (Kind::Int64, self.device)).t()?;
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
        let mut k = x.f_narrow(1, heads, kv_heads).t()?;
        let mut v = qkv.f_narrow(1, both * d, kv_heads * d).t()?.f_reshape([n, kv_heads, d]).t()?;
        *qkv = x.f_narrow(1, 0, heads).t()?;
        if let Sequences::Whole(_) = cache.sequences {
            cache.layers.clear();
            cache.layers.push(Some((k, v)));
            return Ok(());
        }
        let heads_first = |t: Tensor| t.f_unsqueeze(0).t()?.f_transpose(1, 2).t();
        (k, v) = (heads_first(k)?, heads_first(v)?);
        if let Some((before_k, before_v)) = cache.layers[layer].take() {
            (k, v) = (Tensor::f_cat(&[before_k, k], 2).t()?, Tensor::f_cat(&[before_v, v], 2).t()?);
        }
        cache.layers[layer] = Some((k, v));
        Ok(())
    }

    fn attention(&mut self, qkv: &Tensor, cache: &TorchCache, layer: usize, out: &mut Tensor) -> Result<()> {
        let (n, width) = (qkv.size()[0], (self.shape.heads * self.shape.head_dim) as i64);
        let at = if let Sequences::Step { .. } = cache.sequences { layer } else { 0 };
        let kept = cache.layers.get(at).and_then(Option::as_ref);
        let (k, v) = kept.ok_or_else(|| Error::new(Code::Internal, "attention before rope_append"))?;
        let groups = match &cache.sequences {
            Sequences::Whole(groups) => groups,
            Sequences::Step { past, .. } => {
                let q = qkv.f_unsqueeze(0).t()?.f_transpose(1, 2).t()?;
                *out = scores(&q, k, v, *past)?.f_transpose(1, 2).t()?.f_reshape([n, width]).t()?;
                return Ok(());
            }
        };
        let sizes: Vec<i64> = groups.iter().map(|g| (g.count * g.len) as i64).collect();
        // Gradients of pieces that are split are put together once; those of narrowed ones each as a whole.
        let split = |t: &Tensor| t.f_split_with_sizes(&sizes, 0).t();
        let (q, k, v) = (split(qkv)?, split(k)?, split(v)?);
        let mut parts = Vec::with_capacity(groups.len());
        for (i, g) in groups.iter().enumerate() {
            let apart = |t: &Tensor| {
                let [_, heads, d] = t.size()[..] else { return Err(Error::new(Code::Internal, "heads")) };
                t.f_reshape([g.count as i64, g.len as i64, heads, d]).t()?.f_transpose(1, 2).t()
            };
            let y = scores(&apart(&q[i])?, &apart(&k[i])?, &apart(&v[i])?, 0)?;
            parts.push(y.f_transpose(1, 2).t()?.f_reshape([sizes[i], width]).t()?);
        }
        *out = Tensor::f_cat(&parts, 0).t()?;
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
        if let Sequences::Step { past, .. } = &mut cache.sequences {
            *past += rows as i64;
        }
        Ok(())
    }
}
