//! Masters, optimiser states and adapters of a model, and the values its forward pass computes with.
//!
//! Matrices that share their input (q/k/v, gate/up) are one parameter, as the graph multiplies them and as a
//! per-tensor scale is shared. Values are a pure function of the masters: 4-bit layers are decoded from their
//! NVFP4 code, everything else is rounded to bf16, so that an exported file holds exactly what was trained
//! with.
use super::adapter::{Adapter, Packed};
use super::executor::Weight;
use super::kernels::Kernels;
use super::products::Products;
use super::trained::Trained;
use super::{Tch, slice, slice_mut};
use crate::optim::{MasterFormat, ScaleChoice, Share, StateFormat, StateLayout};
use crate::rng::{Philox, streams};
use half::bf16;
use q4_core::detect::Layout;
use q4_core::formats::nvfp4;
use q4_core::{Code, DType, Error, GlobalScale, Part, Result, Rule, read_floats};
use q4_model::checkpoint::{Checkpoint, Head};
use q4_model::config::DecoderConfig;
use q4_model::quantize::{Method, Rows, Scales, Target, ToNvfp4, amax, power_of_two_amax, quantize};
use tch::{Device, Kind, Tensor};

/// Fills a tensor of a name and a shape.
type Read<'a> = dyn FnMut(&str, &[usize], &mut [f32]) -> Result<()> + 'a;

/// Makes a parameter of modules with their rows, a purpose, and in features where it is a matrix.
type Make<'a> = dyn FnMut(Vec<(String, usize)>, Role, Option<usize>) -> Result<Param> + 'a;

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

/// Where a parameter's values come from.
pub enum Source {
    /// A master.
    Trained(Trained),
    /// A master that does not change.
    Fixed(Tensor),
    /// A packed base and the adapter that is merged into it.
    Adapted(Packed, Adapter),
    /// A base that stays as it is, and the adapter beside it; a head has none.
    Frozen(Weight, Option<Adapter>),
}

impl Source {
    /// What moves of it: a master is part 0, an adapter's matrices are parts 0 and 1.
    pub fn trained(&self, part: usize) -> Option<&Trained> {
        match (self, part) {
            (Self::Trained(t), 0) => Some(t),
            (Self::Adapted(_, adapter) | Self::Frozen(_, Some(adapter)), 0) => Some(&adapter.a),
            (Self::Adapted(_, adapter) | Self::Frozen(_, Some(adapter)), 1) => Some(&adapter.b),
            _ => None,
        }
    }
}

/// What adapters stand beside, where they are not merged.
#[derive(Clone, Copy)]
pub enum Beside<'a> {
    /// The values of the checkpoint's weights, dense.
    Decoded,
    /// The weights as they are stored.
    Packed(&'a Products),
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
    /// Whose moments are kept.
    pub share: Share,
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
pub const FIRST: usize = 1;

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
        let mut make = Maker::new(keep, seed, kernels);
        let tied = matches!(checkpoint.head()?, Head::Tied);
        Self::build(checkpoint.config(), tied, keep, &mut |parts, role, k| {
            make.param(parts, role, k, &mut |module, rows, out| read(checkpoint, module, rows, out))
        })
    }

    /// Adapters beside the weights of a checkpoint, which stay as they are.
    pub fn load_beside(
        checkpoint: &Checkpoint,
        base: Beside<'_>,
        keep: Keep,
        seed: u64,
        kernels: &Kernels,
    ) -> Result<Self> {
        let mut make = Maker::new(keep, seed, kernels);
        let head = checkpoint.bind_head()?;
        let decodes = |role| role == Role::Linear || role == Role::Head && matches!(head, Head::Quantised(_));
        let mut read = |module: &str, rows: &[usize], out: &mut [f32]| read(checkpoint, module, rows, out);
        Self::build(checkpoint.config(), matches!(head, Head::Tied), keep, &mut |parts, role, k| {
            let weight = match base {
                Beside::Packed(products) => products.prepare(checkpoint, &parts[0].0)?.map(Weight::Packed),
                Beside::Decoded if decodes(role) => {
                    let values = make.values(&parts, k, &mut read)?.f_to_kind(kernels.compute()).t()?;
                    Some(Weight::Dense(values.f_to_device(kernels.device()).t()?))
                }
                Beside::Decoded => None,
            };
            match weight {
                Some(weight) => make.frozen(parts, role, k, weight),
                None => make.param(parts, role, k, &mut read),
            }
        })
    }

    /// Normally distributed: 0.02, and `0.02 / sqrt(2 layers)` for what is added to the residual stream;
    /// norms are one.
    pub fn random(config: &DecoderConfig, keep: Keep, seed: u64, kernels: &Kernels) -> Result<Self> {
        let small = 1.0 / (2.0 * config.num_hidden_layers as f32).sqrt();
        let mut stream = 0;
        let mut make = Maker::new(keep, seed, kernels);
        let mut fill = |module: &str, shape: &[usize], out: &mut [f32]| {
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
        };
        Self::build(config, config.tie_word_embeddings, keep, &mut |parts, role, k| {
            make.param(parts, role, k, &mut fill)
        })
    }

    fn build(c: &DecoderConfig, tied: bool, keep: Keep, make: &mut Make<'_>) -> Result<Self> {
        c.arch.plain("training")?;
        let names = &c.arch.names;
        let (h, d) = (c.hidden_size, c.head_dim);
        let (q, kv, i) = (c.num_attention_heads * d, c.num_key_value_heads * d, c.intermediate_size);
        let mut all = vec![make(vec![(names.embedding.into(), c.vocab_size)], Role::Table, Some(h))?];
        for l in 0..c.num_hidden_layers {
            let of = |name: &str, rows| (names.of(l, name), rows);
            let one = |name: &str, rows| vec![of(name, rows)];
            let norms = [names.attention.before, names.mlp.before].map(Option::unwrap_or_default);
            let [q_norm, k_norm] = names.heads.unwrap_or_default();
            all.push(make(one(norms[0], h), Role::Norm, None)?);
            all.push(make(vec![of(names.q, q), of(names.k, kv), of(names.v, kv)], Role::Linear, Some(h))?);
            all.push(make(one(q_norm, d), Role::Norm, None)?);
            all.push(make(one(k_norm, d), Role::Norm, None)?);
            all.push(make(one(names.o, h), Role::Linear, Some(q))?);
            all.push(make(one(norms[1], h), Role::Norm, None)?);
            all.push(make(vec![of(names.gate, i), of(names.up, i)], Role::Linear, Some(h))?);
            all.push(make(one(names.down, h), Role::Linear, Some(i))?);
        }
        all.push(make(vec![(names.final_norm.into(), h)], Role::Norm, None)?);
        if !tied {
            all.push(make(vec![(names.head.into(), c.vocab_size)], Role::Head, Some(h))?);
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
        self.all.iter().flat_map(|p| (0..2).filter_map(|part| p.source.trained(part)))
    }

    /// Elements of everything that moves, and of everything.
    pub fn counts(&self) -> (usize, usize) {
        let all = self.all.iter().map(|p| p.shape.iter().product::<usize>()).sum();
        (self.trained().map(|t| t.master.numel()).sum(), all)
    }

    /// Bytes of base weights that do not move.
    pub fn base_bytes(&self) -> u64 {
        let of = |p: &Param| match &p.source {
            Source::Adapted(base, _) => base.bytes(),
            Source::Frozen(weight, _) => weight.bytes(),
            Source::Trained(_) | Source::Fixed(_) => 0,
        };
        self.all.iter().map(of).sum()
    }

    /// What the forward pass computes with, without a gradient: f32 for norms, else the compute type. Of a
    /// frozen base, what a merge would be.
    pub fn value(&self, index: usize, kernels: &Kernels) -> Result<Tensor> {
        let p = &self.all[index];
        let kind = if p.role == Role::Norm { Kind::Float } else { kernels.compute() };
        match &p.source {
            Source::Fixed(master) | Source::Trained(Trained { master, .. }) => {
                if p.role == Role::Linear && self.keep.quantised {
                    return kernels.quantized(master, p.shape[0], p.shape[1], kind);
                }
                master.f_to_kind(Kind::BFloat16).t()?.f_to_kind(kind).t()
            }
            Source::Adapted(base, adapter) => {
                let sum = adapter.merged(base.decode()?)?;
                kernels.quantized(&sum, p.shape[0], p.shape[1], kind)
            }
            Source::Frozen(weight, adapter) => merge(weight, adapter.as_ref())?.f_to_kind(kind).t(),
        }
    }

    /// Masters of module `part` of a parameter as f32 on the host: what an export quantises. Adapters are
    /// merged.
    pub fn master_rows(&self, index: usize, part: usize) -> Result<Vec<f32>> {
        let p = &self.all[index];
        let whole = match &p.source {
            Source::Trained(t) => t.master.shallow_clone(),
            Source::Fixed(t) => t.shallow_clone(),
            Source::Adapted(base, adapter) => adapter.merged(base.decode()?)?,
            Source::Frozen(weight, adapter) => merge(weight, adapter.as_ref())?,
        };
        let first: usize = p.parts[..part].iter().map(|p| p.1).sum();
        let rows = whole.f_narrow(0, first as i64, p.parts[part].1 as i64).t()?;
        let rows = rows.f_to_device(Device::Cpu).t()?.f_to_kind(Kind::Float).t()?.f_contiguous().t()?;
        Ok(super::floats(&rows)?.to_vec())
    }
}

/// Values of a frozen base with its adapter, f32.
fn merge(weight: &Weight, adapter: Option<&Adapter>) -> Result<Tensor> {
    match adapter {
        Some(adapter) => adapter.merged(weight.decoded()?),
        None => weight.decoded(),
    }
}

/// Extents of all parts together.
fn extents(parts: &[(String, usize)], k: Option<usize>) -> Vec<usize> {
    std::iter::once(parts.iter().map(|p| p.1).sum()).chain(k).collect()
}

/// Makes parameters and what moves of them.
pub(super) struct Maker<'a> {
    keep: Keep,
    seed: u64,
    kernels: &'a Kernels,
    made: u32,
}

impl<'a> Maker<'a> {
    fn new(keep: Keep, seed: u64, kernels: &'a Kernels) -> Self {
        Self { keep, seed, kernels, made: 0 }
    }

    /// For adapters that take the place of others.
    pub(super) fn again(keep: Keep, seed: u64, kernels: &'a Kernels) -> Self {
        Self { made: 1 << 20, ..Self::new(keep, seed, kernels) }
    }

    /// A base that stays as it is; beside a product an adapter.
    fn frozen(
        &mut self,
        parts: Vec<(String, usize)>,
        role: Role,
        k: Option<usize>,
        weight: Weight,
    ) -> Result<Param> {
        let shape = extents(&parts, k);
        let adapter = match self.keep.lora {
            Some((rank, alpha)) if role == Role::Linear => {
                Some(self.adapter(shape[0], shape[1], rank, alpha)?)
            }
            _ => None,
        };
        Ok(Param { parts, role, shape, source: Source::Frozen(weight, adapter) })
    }

    /// Values of all parts, f32 on the host.
    fn values(&self, parts: &[(String, usize)], k: Option<usize>, read: &mut Read<'_>) -> Result<Tensor> {
        let shape: Vec<i64> = extents(parts, k).iter().map(|e| *e as i64).collect();
        let full = Tensor::f_empty(&shape, (Kind::Float, Device::Cpu)).t()?;
        let (values, mut at) = (super::floats_mut(&full)?, 0);
        for (name, rows) in parts {
            let part: Vec<usize> = std::iter::once(*rows).chain(k).collect();
            let len = part.iter().product::<usize>();
            read(name, &part, &mut values[at..at + len])?;
            at += len;
        }
        Ok(full)
    }

    fn param(
        &mut self,
        parts: Vec<(String, usize)>,
        role: Role,
        k: Option<usize>,
        read: &mut Read<'_>,
    ) -> Result<Param> {
        let shape = extents(&parts, k);
        let n = shape[0];
        if role == Role::Linear && k.is_some_and(|k| k % nvfp4::BLOCK != 0) && self.keep.quantised {
            return Err(Error::new(Code::TensorShape, parts[0].0.clone())
                .need("in features divisible by 16 for NVFP4")
                .have(format!("{shape:?}")));
        }
        let full = self.values(&parts, k, read)?;
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
        let whole = StateLayout::choose(state, &shape);
        let own = self.keep.share.range(whole.len());
        let layout = whole.part(&own);
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
            own,
            layout,
            whole,
            format,
            stream,
            decay,
        })
    }

    /// `a` is small noise and `b` zero, so training starts at the base.
    pub(super) fn adapter(&mut self, n: usize, k: usize, rank: usize, alpha: f64) -> Result<Adapter> {
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
            own: None,
        })
    }

    fn packed(&self, full: &Tensor, n: usize, k: usize, parts: &[(String, usize)]) -> Result<Packed> {
        let values = super::floats(full)?;
        let rule = Rule::ModelOpt;
        let target = Target::Nvfp4(ToNvfp4 { rule, scales: Scales::TwoLevel, method: Method::Rtn });
        let pool = self.kernels.pool();
        let (mut codes, mut scales) = (Vec::<u8>::new(), Vec::<u8>::new());
        let mut global = Vec::with_capacity(n);
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
    if module != checkpoint.config().arch.names.embedding {
        let bound = checkpoint.bind(module, n, k)?;
        if bound.detected.layout != Layout::Dense {
            let layer = checkpoint.layer(module, n, k)?;
            let rows = layer.rows()?;
            for (row, out) in out.chunks_exact_mut(k).enumerate() {
                rows.row(row, out);
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
