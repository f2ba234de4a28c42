//! Masters, optimiser states and adapters of a model, and the values its forward pass computes with.
//!
//! Matrices that share their input (q/k/v, gate/up) are one parameter, as the graph multiplies them and as a
//! per-tensor scale is shared. Values are a pure function of the masters: 4-bit layers are decoded from their
//! NVFP4 code, everything else is rounded to bf16, so that an exported file holds exactly what was trained
//! with.
use super::kernels::Kernels;
use super::{Tch, slice, slice_mut};
use crate::optim::{Hyper, MasterFormat, ScaleChoice, StateFormat, StateLayout};
use crate::rng::{Philox, streams};
use half::bf16;
use q4_core::detect::Layout;
use q4_core::formats::{e2m1, nvfp4};
use q4_core::{Code, DType, Error, GlobalScale, Part, Q4Weight, Result, RowDecoder, Rule, read_floats};
use q4_model::checkpoint::{Checkpoint, Head, names};
use q4_model::config::Qwen3Config;
use q4_model::quantize::{Method, Rows, Scales, Target, ToNvfp4, amax, power_of_two_amax, quantize};
use tch::{Device, Kind, Tensor};

/// Fills a tensor of a name and a shape.
type Read<'a> = dyn FnMut(&str, &[usize], &mut [f32]) -> Result<()> + 'a;

/// What a parameter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// RMS norm, `[width]`.
    Norm,
    /// Token embeddings, and the head where tied, `[vocab, hidden]`.
    Table,
    /// A head of its own, `[vocab, hidden]`.
    Head,
    /// Products, `[n, k]`; 4-bit.
    Linear,
}

/// A tensor the optimiser moves.
pub struct Trained {
    /// f32 or bf16.
    pub master: Tensor,
    /// Moments, as bytes.
    pub state: Tensor,
    /// How.
    pub layout: StateLayout,
    /// Of the master.
    pub format: MasterFormat,
    /// Random stream of its stochastic rounding.
    pub stream: u32,
    /// Weight decay.
    pub decay: f32,
}

/// A low-rank correction: the layer computes with `Q(base + scale * b a)`, so a merged file is what was
/// trained.
pub struct Adapter {
    /// `[rank, k]`.
    pub a: Trained,
    /// `[n, rank]`.
    pub b: Trained,
    /// alpha / rank.
    pub scale: f64,
}

/// NVFP4 base of an adapter, `[n, k]`.
pub struct Packed {
    codes: Tensor,
    scales: Tensor,
    /// Per-tensor scale of every row, `[n, 1]`.
    global: Tensor,
}

/// Where a parameter's values come from.
pub enum Source {
    /// A master.
    Trained(Trained),
    /// bf16 that does not change.
    Fixed(Tensor),
    /// A packed base and its adapter.
    Adapted(Packed, Adapter),
}

/// One parameter of the graph.
pub struct Param {
    /// Modules it is made of and their rows.
    pub parts: Vec<(String, usize)>,
    /// Purpose.
    pub role: Role,
    /// Extents.
    pub shape: Vec<usize>,
    /// Values.
    pub source: Source,
}

/// How parameters are kept.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// Optimiser states.
    pub state: StateFormat,
    /// Masters.
    pub master: MasterFormat,
    /// `Some`: adapters of this rank and alpha; nothing else moves.
    pub lora: Option<(usize, f64)>,
    /// Linear layers compute in NVFP4.
    pub quantised: bool,
    /// Weight decay.
    pub decay: Decay,
}

/// Decoupled weight decay, by purpose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Decay {
    /// Of products and adapters.
    pub linear: f32,
    /// Of norms.
    pub norm: f32,
    /// Of embeddings and the head.
    pub table: f32,
}

impl Decay {
    fn of(&self, role: Role) -> f32 {
        match role {
            Role::Linear => self.linear,
            Role::Norm => self.norm,
            Role::Table | Role::Head => self.table,
        }
    }
}

/// Parameters of a block, in the order of [`Params::block`].
pub const BLOCK: usize = 8;
/// Before the blocks: the table.
const FIRST: usize = 1;

/// All parameters: the table, the blocks, the last norm, and a head where it is not tied.
pub struct Params {
    /// In the order of the forward pass.
    pub all: Vec<Param>,
    layers: usize,
    /// How.
    pub keep: Keep,
}

impl Params {
    /// From a checkpoint, dense or 4-bit.
    pub fn load(checkpoint: &Checkpoint, keep: Keep, seed: u64, kernels: &Kernels) -> Result<Self> {
        let tied = matches!(checkpoint.head()?, Head::Tied);
        Self::build(checkpoint.config(), tied, keep, seed, kernels, &mut |module, rows, out| {
            read(checkpoint, module, rows, out)
        })
    }

    /// Normally distributed: 0.02, and `0.02 / sqrt(2 layers)` for what is added to the residual stream;
    /// norms are one.
    pub fn random(config: &Qwen3Config, keep: Keep, seed: u64, kernels: &Kernels) -> Result<Self> {
        let small = 1.0 / (2.0 * config.num_hidden_layers as f32).sqrt();
        let mut stream = 0;
        Self::build(config, config.tie_word_embeddings, keep, seed, kernels, &mut |module, shape, out| {
            if shape.len() == 1 {
                out.fill(1.0);
                return Ok(());
            }
            let rng = Philox::new(seed, 0, streams::INIT + stream);
            stream += 1;
            let residual = module.ends_with("o_proj") || module.ends_with("down_proj");
            let std = if residual { 0.02 * small } else { 0.02 };
            kernels.fill(out, &|i| rng.normal(i) * std);
            Ok(())
        })
    }

    fn build(
        c: &Qwen3Config,
        tied: bool,
        keep: Keep,
        seed: u64,
        kernels: &Kernels,
        read: &mut Read<'_>,
    ) -> Result<Self> {
        let mut make = Maker { keep, seed, kernels, read, made: 0 };
        let (h, d) = (c.hidden_size, c.head_dim);
        let (q, kv, i) = (c.num_attention_heads * d, c.num_key_value_heads * d, c.intermediate_size);
        let mut all =
            vec![make.param(vec![(names::EMBEDDING.into(), c.vocab_size)], Role::Table, Some(h))?];
        for l in 0..c.num_hidden_layers {
            let one = |name: String, rows| vec![(name, rows)];
            all.push(make.param(one(names::input_norm(l), h), Role::Norm, None)?);
            all.push(make.param(
                vec![(names::q(l), q), (names::k(l), kv), (names::v(l), kv)],
                Role::Linear,
                Some(h),
            )?);
            all.push(make.param(one(names::q_norm(l), d), Role::Norm, None)?);
            all.push(make.param(one(names::k_norm(l), d), Role::Norm, None)?);
            all.push(make.param(one(names::o(l), h), Role::Linear, Some(q))?);
            all.push(make.param(one(names::post_attention_norm(l), h), Role::Norm, None)?);
            all.push(make.param(vec![(names::gate(l), i), (names::up(l), i)], Role::Linear, Some(h))?);
            all.push(make.param(one(names::down(l), h), Role::Linear, Some(i))?);
        }
        all.push(make.param(vec![(names::FINAL_NORM.into(), h)], Role::Norm, None)?);
        if !tied {
            all.push(make.param(vec![(names::HEAD.into(), c.vocab_size)], Role::Head, Some(h))?);
        }
        Ok(Self { all, layers: c.num_hidden_layers, keep })
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers
    }
    /// Index of the first parameter of layer `i`.
    pub fn block(&self, i: usize) -> usize {
        FIRST + i * BLOCK
    }
    /// Index of the last norm.
    pub fn norm(&self) -> usize {
        self.block(self.layers)
    }
    /// Index of the head; 0, the table, where tied.
    pub fn head(&self) -> usize {
        if self.norm() + 1 < self.all.len() { self.norm() + 1 } else { 0 }
    }

    /// Everything the optimiser moves, in one order.
    pub fn trained(&self) -> impl Iterator<Item = &Trained> {
        self.all.iter().flat_map(|p| {
            let (one, two) = match &p.source {
                Source::Trained(t) => (Some(t), None),
                Source::Adapted(_, adapter) => (Some(&adapter.a), Some(&adapter.b)),
                Source::Fixed(_) => (None, None),
            };
            one.into_iter().chain(two)
        })
    }

    /// Elements of everything that moves, and of everything.
    pub fn counts(&self) -> (usize, usize) {
        let all = self.all.iter().map(|p| p.shape.iter().product::<usize>()).sum();
        (self.trained().map(|t| t.master.numel()).sum(), all)
    }

    /// What the forward pass computes with, without a gradient: f32 for norms, else the compute type.
    pub fn value(&self, index: usize, kernels: &Kernels) -> Result<Tensor> {
        let p = &self.all[index];
        let kind = if p.role == Role::Norm { Kind::Float } else { kernels.compute() };
        match &p.source {
            Source::Fixed(t) => t.f_to_kind(kind).t(),
            Source::Trained(t) if p.role == Role::Linear && self.keep.quantised => {
                kernels.quantized(&t.master, p.shape[0], p.shape[1], kind)
            }
            Source::Trained(t) => t.master.f_to_kind(Kind::BFloat16).t()?.f_to_kind(kind).t(),
            Source::Adapted(base, adapter) => {
                let sum = adapter.merged(base)?;
                kernels.quantized(&sum, p.shape[0], p.shape[1], kind)
            }
        }
    }

    /// Masters of module `part` of a parameter as f32 on the host: what an export quantises. Adapters are
    /// merged.
    pub fn master_rows(&self, index: usize, part: usize) -> Result<Vec<f32>> {
        let p = &self.all[index];
        let whole = match &p.source {
            Source::Trained(t) => t.master.shallow_clone(),
            Source::Fixed(t) => t.shallow_clone(),
            Source::Adapted(base, adapter) => adapter.merged(base)?,
        };
        let first: usize = p.parts[..part].iter().map(|p| p.1).sum();
        let rows = whole.f_narrow(0, first as i64, p.parts[part].1 as i64).t()?;
        let rows = rows.f_to_device(Device::Cpu).t()?.f_to_kind(Kind::Float).t()?.f_contiguous().t()?;
        Ok(super::floats(&rows)?.to_vec())
    }
}

impl Trained {
    /// One optimiser step with `grad`, in place.
    pub fn update(&self, hyper: &Hyper, grad: &Tensor, seed: u64, kernels: &Kernels) -> Result<()> {
        let hyper = Hyper { weight_decay: self.decay, ..*hyper };
        kernels.adamw(&hyper, self, &grad.f_contiguous().t()?, Philox::new(seed, hyper.step, self.stream))
    }
}

impl Adapter {
    fn merged(&self, base: &Packed) -> Result<Tensor> {
        let (a, b) = (self.a.master.f_to_kind(Kind::Float).t()?, self.b.master.f_to_kind(Kind::Float).t()?);
        base.decode()?.f_add_(&b.f_matmul(&a).t()?.f_mul_scalar(self.scale).t()?).t()
    }

    /// From `dL/dW` of the layer to the gradients of `a` and `b` (straight through the quantiser).
    pub fn gradients(&self, grad: &Tensor) -> Result<(Tensor, Tensor)> {
        let grad = grad.f_to_kind(Kind::Float).t()?;
        let (a, b) = (self.a.master.f_to_kind(Kind::Float).t()?, self.b.master.f_to_kind(Kind::Float).t()?);
        let da = b.f_tr().t()?.f_matmul(&grad).t()?.f_mul_scalar(self.scale).t()?;
        let db = grad.f_matmul(&a.f_tr().t()?).t()?.f_mul_scalar(self.scale).t()?;
        Ok((da, db))
    }
}

impl Packed {
    /// Rows decoded at a time: 4 Mi elements, so that the indices stay small beside the result.
    fn decode(&self) -> Result<Tensor> {
        let [n, half] = self.codes.size()[..] else { return Err(Error::new(Code::Internal, "packed base")) };
        let device = self.codes.device();
        let out = Tensor::f_empty([n, 2 * half], (Kind::Float, device)).t()?;
        let table: Vec<f32> = (0..16).map(e2m1::decode).collect();
        let table = Tensor::f_from_slice(&table).t()?.f_to_device(device).t()?;
        let step = ((4 << 20) / (2 * half)).max(1);
        for first in (0..n).step_by(step as usize) {
            let rows = step.min(n - first);
            let codes = self.codes.f_narrow(0, first, rows).t()?;
            let both = [codes.f_bitwise_and(15).t()?, codes.f_bitwise_right_shift_tensor_scalar(4).t()?];
            let index = Tensor::f_stack(&both, -1).t()?.f_to_kind(Kind::Int).t()?.f_view([-1]).t()?;
            let values = table.f_index_select(0, &index).t()?.f_view([rows, half / 8, 16]).t()?;
            let scales = self.scales.f_narrow(0, first, rows).t()?.f_view_dtype(Kind::Float8e4m3fn).t()?;
            let scales =
                scales.f_to_kind(Kind::Float).t()?.f_mul(&self.global.f_narrow(0, first, rows).t()?).t()?;
            let values = values.f_mul(&scales.f_unsqueeze(-1).t()?).t()?.f_view([rows, 2 * half]).t()?;
            out.f_narrow(0, first, rows).t()?.f_copy_(&values).t()?;
        }
        Ok(out)
    }
}

struct Maker<'a> {
    keep: Keep,
    seed: u64,
    kernels: &'a Kernels,
    read: &'a mut Read<'a>,
    made: u32,
}

impl Maker<'_> {
    fn param(&mut self, parts: Vec<(String, usize)>, role: Role, k: Option<usize>) -> Result<Param> {
        let n: usize = parts.iter().map(|p| p.1).sum();
        let shape: Vec<usize> = std::iter::once(n).chain(k).collect();
        if role == Role::Linear && k.is_some_and(|k| k % nvfp4::BLOCK != 0) && self.keep.quantised {
            return Err(Error::new(Code::TensorShape, parts[0].0.clone())
                .need("in features divisible by 16 for NVFP4")
                .have(format!("{shape:?}")));
        }
        let extents: Vec<i64> = shape.iter().map(|e| *e as i64).collect();
        let full = Tensor::f_empty(&extents, (Kind::Float, Device::Cpu)).t()?;
        let (values, mut at) = (super::floats_mut(&full)?, 0);
        for (name, rows) in &parts {
            let part: Vec<usize> = std::iter::once(*rows).chain(k).collect();
            let len = part.iter().product::<usize>();
            (self.read)(name, &part, &mut values[at..at + len])?;
            at += len;
        }
        let source = match self.keep.lora {
            None => Source::Trained(self.trained(
                full,
                self.keep.state,
                self.keep.master,
                self.keep.decay.of(role),
            )?),
            Some((rank, alpha)) if role == Role::Linear => {
                let base = self.packed(&full, n, shape[1], &parts)?;
                Source::Adapted(base, self.adapter(n, shape[1], rank, alpha)?)
            }
            Some(_) => {
                Source::Fixed(full.f_to_kind(Kind::BFloat16).t()?.f_to_device(self.kernels.device()).t()?)
            }
        };
        Ok(Param { parts, role, shape, source })
    }

    fn trained(
        &mut self,
        values: Tensor,
        state: StateFormat,
        format: MasterFormat,
        decay: f32,
    ) -> Result<Trained> {
        let shape: Vec<usize> = values.size().iter().map(|e| *e as usize).collect();
        let layout = StateLayout::choose(state, &shape);
        let device = self.kernels.device();
        // One-dimensional tensors are too small to save on, and a norm's gain moves by less than a step of
        // bf16.
        let format = if shape.len() == 1 { MasterFormat::F32 } else { format };
        let kind = if format == MasterFormat::Bf16 { Kind::BFloat16 } else { Kind::Float };
        let stream = self.made;
        self.made += 1;
        Ok(Trained {
            master: values.f_to_kind(kind).t()?.f_to_device(device).t()?,
            state: Tensor::f_zeros([layout.bytes() as i64], (Kind::Uint8, device)).t()?,
            layout,
            format,
            stream,
            decay,
        })
    }

    /// `a` is small noise and `b` zero, so training starts at the base.
    fn adapter(&mut self, n: usize, k: usize, rank: usize, alpha: f64) -> Result<Adapter> {
        let a = Tensor::f_empty([rank as i64, k as i64], (Kind::Float, Device::Cpu)).t()?;
        let rng = Philox::new(self.seed, 0, streams::INIT + 0x0100_0000 + self.made);
        let std = 1.0 / (k as f32).sqrt();
        self.kernels.fill(super::floats_mut(&a)?, &|i| rng.normal(i) * std);
        let b = Tensor::f_zeros([n as i64, rank as i64], (Kind::Float, Device::Cpu)).t()?;
        let (state, master) = (StateFormat::F32, MasterFormat::F32);
        Ok(Adapter {
            a: self.trained(a, state, master, self.keep.decay.linear)?,
            b: self.trained(b, state, master, self.keep.decay.linear)?,
            scale: alpha / rank as f64,
        })
    }

    fn packed(&self, full: &Tensor, n: usize, k: usize, parts: &[(String, usize)]) -> Result<Packed> {
        let values = super::floats(full)?;
        let rule = Rule::ModelOpt;
        let target = Target::Nvfp4(ToNvfp4 { rule, scales: Scales::TwoLevel, method: Method::Rtn });
        let pool = self.kernels.pool();
        let (mut codes, mut scales, mut global) = (Vec::new(), Vec::new(), Vec::with_capacity(n));
        let mut first = 0;
        for (name, rows) in parts {
            let bytes = bytemuck::cast_slice(&values[first * k..(first + rows) * k]);
            let part = Rows::new(name, bytes, DType::F32, *rows, k)?;
            let own = amax(&part, pool)?;
            let shared = match self.kernels.scale() {
                ScaleChoice::PowerOfTwo => power_of_two_amax(rule, own),
                ScaleChoice::Free => own,
            };
            let packed = quantize(&part, &target, Some(shared), pool)?;
            codes.extend(packed.parts.bytes(Part::Codes));
            scales.extend(packed.parts.bytes(Part::Scales));
            global.extend(std::iter::repeat_n(packed.parts.global.map_or(1.0, GlobalScale::value), *rows));
            first += rows;
        }
        let on = |t: Result<Tensor, tch::TchError>, shape: [i64; 2]| {
            t.and_then(|t| t.f_view(shape)).and_then(|t| t.f_to_device(self.kernels.device())).t()
        };
        let (n, k) = (n as i64, k as i64);
        Ok(Packed {
            codes: on(Tensor::f_from_slice(&codes), [n, k / 2])?,
            scales: on(Tensor::f_from_slice(&scales), [n, k / 16])?,
            global: on(Tensor::f_from_slice(&global), [n, 1])?,
        })
    }
}

/// A module's weight as f32, decoded where it is 4-bit.
fn read(checkpoint: &Checkpoint, module: &str, shape: &[usize], out: &mut [f32]) -> Result<()> {
    let name = format!("{module}.weight");
    let [n, k] = *shape else {
        out.copy_from_slice(&checkpoint.norm(module, shape[0])?);
        return Ok(());
    };
    if module != names::EMBEDDING {
        let bound = checkpoint.bind(module, n, k)?;
        if bound.detected.layout != Layout::Dense {
            let layer = checkpoint.layer(module, n, k)?;
            let segments = [layer.segment.clone()];
            let decoder =
                RowDecoder::new(&Q4Weight { schema: layer.detected.schema, k, segments: &segments })?;
            for (row, out) in out.chunks_exact_mut(k).enumerate() {
                decoder.row(row, out);
            }
            return Ok(());
        }
    }
    let stored = checkpoint.floats(&name, shape)?;
    read_floats(stored.bytes, stored.dtype, out);
    Ok(())
}

/// The bytes of a tensor on the host, for a checkpoint.
pub fn bytes(t: &Tensor) -> Result<Vec<u8>> {
    let t = t.f_to_device(Device::Cpu).t()?.f_contiguous().t()?;
    Ok(match t.kind() {
        Kind::Float => bytemuck::cast_slice(slice::<f32>(&t, Kind::Float)?).to_vec(),
        Kind::BFloat16 => bytemuck::cast_slice(slice::<bf16>(&t, Kind::BFloat16)?).to_vec(),
        _ => slice::<u8>(&t, Kind::Uint8)?.to_vec(),
    })
}

/// Puts bytes from a checkpoint back; the length must fit.
pub fn restore(t: &Tensor, from: &[u8]) -> Result<()> {
    let host = Tensor::f_empty(t.size(), (t.kind(), Device::Cpu)).t()?;
    let to: &mut [u8] = match t.kind() {
        Kind::Float => bytemuck::cast_slice_mut(slice_mut::<f32>(&host, Kind::Float)?),
        Kind::BFloat16 => bytemuck::cast_slice_mut(slice_mut::<bf16>(&host, Kind::BFloat16)?),
        _ => slice_mut::<u8>(&host, Kind::Uint8)?,
    };
    if to.len() != from.len() {
        return Err(Error::new(Code::Container, "checkpoint: a tensor")
            .need(format!("{} bytes", to.len()))
            .have(format!("{} bytes", from.len()))
            .fix("resume with the configuration the checkpoint was written with"));
    }
    to.copy_from_slice(from);
    t.shallow_clone().f_copy_(&host).t()
}
