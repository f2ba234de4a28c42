//! [`Executor`] on the CPU: dense operations here, every 4-bit product through [`Q4Linear`].
use super::attention::{self, Scores};
use super::tensor::{Disjoint, each_row};
use super::{CpuTensor, KvCache, simd};
use crate::arch::{Activation, Pairs};
use crate::checkpoint::Bytes;
use crate::config::Rotation;
use crate::executor::{Executor, Logits, Shape, Sizes, Slots};
use crate::scan;
use crate::watch::{Site, Watch, Written, go_on};
use crate::weights::{Head, Home, Inputs, Linear, StoredTable};
use half::{bf16, f16};
use q4_core::{
    Code, DType, Element, Error, ExecContext, FuseSet, Fusion, Q4Linear, Result, TensorView, TensorViewMut,
    ThreadPool,
};
use q4_simd::{Vectors, Widen};
use std::sync::Arc;

/// A norm's weight and epsilon.
pub struct CpuNorm {
    /// `[width]`.
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Token embeddings or a dense head, left where they are stored. Of one that is not read whole in every step,
/// the pages of a mapped file are given back from time to time.
#[derive(Clone)]
pub struct CpuTable {
    /// The elements.
    pub stored: StoredTable,
    /// What rows that are gathered are multiplied by.
    pub scale: f32,
}

/// Rows that are read of a table before its pages are given back.
const GATHERED: usize = 8;

impl CpuTable {
    /// Bytes of memory that a table of `len` bytes takes where it is read from `bytes`, at most.
    pub(crate) fn resident(bytes: &Bytes, len: usize, whole: bool) -> u64 {
        let all = whole || !bytes.is_mapped();
        (if all { len } else { len.min(Bytes::mapped_by(GATHERED)) }) as u64
    }
}

/// Host memory: weights stay as they were read.
pub struct CpuHome {
    /// What embeddings are multiplied by.
    pub embedding_scale: f32,
}

impl Home for CpuHome {
    type Norm = CpuNorm;
    type Table = CpuTable;
    type Executor = CpuExecutor;

    fn norm(&self, weight: Vec<f32>, eps: f32) -> Result<CpuNorm> {
        Ok(CpuNorm { weight, eps })
    }
    fn table(&self, stored: StoredTable) -> Result<CpuTable> {
        Ok(CpuTable { stored, scale: self.embedding_scale })
    }
    fn linear(&self, linear: Linear) -> Result<Linear> {
        Ok(linear)
    }
}

/// Scratch and threads of one context.
pub struct CpuExecutor {
    vectors: Vectors,
    shape: Shape,
    threads: Arc<ThreadPool>,
    /// Element type of products' outputs; f32 slots are rounded through it.
    y: DType,
    staging: Vec<u16>,
    workspace: Vec<u8>,
    scores: Scores,
    /// `cos` and `sin` of every position, `[context, pairs of a head]` each.
    rope: (Vec<f32>, Vec<f32>),
    pairs: (Pairs, usize),
    watch: Watch,
    /// Rows of the embeddings that were read since their pages were given back.
    gathered: usize,
}

/// Slots for steps of up to `rows` rows; logits for `logit_rows` of them.
pub fn slots(shape: &Shape, rows: usize, logit_rows: usize) -> Slots<CpuTensor> {
    let slot = |width| CpuTensor::new(rows, width);
    Slots {
        hidden: slot(shape.hidden),
        normed: slot(shape.hidden),
        qkv: slot(shape.qkv()),
        context: slot(shape.q()),
        gate_up: slot(2 * shape.intermediate),
        gated: slot(shape.intermediate),
        product: slot(shape.hidden),
        logits: CpuTensor::new(logit_rows, shape.vocab),
    }
}

/// Bytes of [`slots`].
pub fn slot_bytes(shape: &Shape, rows: usize, logit_rows: usize) -> u64 {
    let widths = 3 * shape.hidden + shape.qkv() + shape.q() + 3 * shape.intermediate;
    ((rows * widths + logit_rows * shape.vocab) * 4) as u64
}

impl CpuExecutor {
    /// Allocates everything that steps of these sizes need.
    ///
    /// # Errors
    /// `Q4_ISA` names an instruction set that is unknown or that this processor lacks.
    pub fn new(
        shape: Shape,
        threads: Arc<ThreadPool>,
        y: DType,
        &Sizes { rows, sequences, context, workspace, .. }: &Sizes,
        rotation: &Rotation,
    ) -> Result<Self> {
        let widest = shape.qkv().max(2 * shape.intermediate).max(shape.hidden).max(shape.vocab);
        let lanes = attention::tasks(&shape, rows, sequences).min(threads.threads());
        let scores = Scores::new(lanes, context);
        Ok(Self {
            vectors: Vectors::named()?,
            staging: if y == DType::F32 { Vec::new() } else { vec![0; rows * widest] },
            workspace: vec![0; workspace + 64],
            rope: rotations(rotation, context),
            pairs: (rotation.pairs, rotation.inv_freq.len()),
            watch: Watch::Nothing,
            gathered: 0,
            scores,
            shape,
            threads,
            y,
        })
    }

    /// Bytes `new` allocates, predicted.
    pub fn bytes(shape: &Shape, threads: usize, y: DType, sizes: &Sizes) -> u64 {
        let &Sizes { rows, sequences, context, workspace, .. } = sizes;
        let widest = shape.qkv().max(2 * shape.intermediate).max(shape.hidden).max(shape.vocab);
        let staging = if y == DType::F32 { 0 } else { rows * widest * 2 };
        let lanes = attention::tasks(shape, rows, sequences).min(threads);
        (staging + workspace + context * shape.head_dim * 4) as u64 + Scores::bytes(lanes, context)
    }

    /// What is done between operations from now on.
    pub fn set_watch(&mut self, watch: Watch) {
        self.watch = watch;
    }

    /// Threads the products run on.
    pub fn threads(&self) -> &ThreadPool {
        &self.threads
    }
}

impl Executor for CpuExecutor {
    type Tensor = CpuTensor;
    type Linear = Linear;
    type Norm = CpuNorm;
    type Table = CpuTable;
    type Head = Head<CpuTable>;
    type Cache = KvCache;

    fn embed(&mut self, table: &CpuTable, ids: &[u32], out: &mut CpuTensor) -> Result<()> {
        out.set_rows(ids.len());
        let (table, scale) = (&table.stored, table.scale);
        let (width, row_bytes) = (table.width, table.elements.row_bytes(table.width));
        for (id, row) in ids.iter().zip(out.data_mut().chunks_exact_mut(width)) {
            let at = *id as usize * row_bytes;
            let Some(bytes) = table.stored().get(at..at + row_bytes).filter(|_| (*id as usize) < table.rows)
            else {
                return Err(Error::new(Code::ValueInvalid, "token id")
                    .need(format!("below {}", table.rows))
                    .have(id.to_string()));
            };
            table.elements.read(bytes, row);
            if scale != 1.0 {
                row.iter_mut().for_each(|v| *v *= scale);
            }
            self.gathered += 1;
            if self.gathered == GATHERED {
                self.gathered = 0;
                if !table.whole {
                    table.bytes.release(table.range.clone());
                }
            }
        }
        Ok(())
    }

    fn norm(&mut self, x: &CpuTensor, weight: &CpuNorm, out: &mut CpuTensor) -> Result<()> {
        out.set_rows(x.rows());
        let v = self.vectors;
        each_row(out.data_mut(), x.width(), &self.threads, |r, row| rms_norm(v, x.row(r), weight, row));
        Ok(())
    }

    fn linear(&mut self, x: &CpuTensor, weight: &Linear, out: &mut CpuTensor) -> Result<()> {
        let m = x.rows();
        out.set_rows(m);
        self.product(x.data(), m, weight, &Fusion::default(), out.data_mut())?;
        if let Some(bias) = &weight.bias {
            let v = self.vectors;
            each_row(out.data_mut(), weight.n, &self.threads, |_, row| simd::add(v, bias, row));
        }
        Ok(())
    }

    fn add(&mut self, x: &CpuTensor, residual: &mut CpuTensor) -> Result<()> {
        let (v, width) = (self.vectors, x.width());
        each_row(residual.data_mut(), width, &self.threads, |r, row| simd::add(v, x.row(r), row));
        Ok(())
    }

    fn gate(&mut self, activation: Activation, gate_up: &CpuTensor, out: &mut CpuTensor) -> Result<()> {
        out.set_rows(gate_up.rows());
        let (v, half) = (self.vectors, out.width());
        each_row(out.data_mut(), half, &self.threads, |r, row| {
            let (gate, up) = gate_up.row(r).split_at(half);
            match activation {
                Activation::Silu => simd::silu_mul(v, gate, up, row),
                Activation::GeluTanh => gelu_tanh_mul(gate, up, row),
            }
        });
        Ok(())
    }

    fn rope_append(
        &mut self,
        qkv: &mut CpuTensor,
        norms: Option<&[CpuNorm; 2]>,
        cache: &mut KvCache,
        layer: usize,
    ) -> Result<()> {
        let rows = qkv.rows();
        cache.places.rows(rows)?;
        let (s, width) = (&self.shape, qkv.width());
        let (vectors, rope, (pairs, half)) = (self.vectors, &self.rope, self.pairs);
        let cache = cache.writer(layer);
        each_row(qkv.data_mut(), width, &self.threads, |r, row| {
            let at = cache.position(r) * half;
            let (cos, sin) = (&rope.0[at..at + half], &rope.1[at..at + half]);
            let (q, kv) = row.split_at_mut(s.q());
            let (k, v) = kv.split_at_mut(s.kv());
            for (i, heads) in [q, &mut *k].into_iter().enumerate() {
                for head in heads.chunks_exact_mut(s.head_dim) {
                    if let Some(norms) = norms {
                        rms_norm_in_place(vectors, head, &norms[i]);
                    }
                    match pairs {
                        Pairs::Halves => simd::rotate(vectors, &mut head[..2 * half], cos, sin),
                        Pairs::Neighbours => rotate_neighbours(head, cos, sin),
                    }
                }
            }
            // SAFETY: a row has a place of its own, and the cache is read by nobody before all are written.
            unsafe { cache.write(r, k, v) };
        });
        Ok(())
    }

    fn attention(
        &mut self,
        qkv: &CpuTensor,
        cache: &KvCache,
        layer: usize,
        out: &mut CpuTensor,
    ) -> Result<()> {
        out.set_rows(qkv.rows());
        let placed = (cache, cache.places.rows(qkv.rows())?);
        attention::run(self.vectors, &self.shape, qkv, placed, layer, &mut self.scores, out, &self.threads);
        Ok(())
    }

    fn head(
        &mut self,
        x: &CpuTensor,
        norm: &CpuNorm,
        head: &Head<CpuTable>,
        which: Logits<'_>,
        scratch: &mut CpuTensor,
        out: &mut CpuTensor,
    ) -> Result<()> {
        let (m, v) = (which.rows(x.rows()), self.vectors);
        scratch.set_rows(m);
        for (i, o) in scratch.data_mut().chunks_exact_mut(x.width()).enumerate() {
            rms_norm(v, x.row(which.row(i, x.rows())), norm, o);
        }
        out.set_rows(m);
        match head {
            Head::Product(linear) => {
                self.product(scratch.data(), m, linear, &Fusion::default(), out.data_mut())
            }
            Head::Dense(table) => {
                dense_head(self.vectors, &table.stored, scratch.data(), out.data_mut(), &self.threads)
            }
        }
    }

    fn commit(&mut self, cache: &mut KvCache, rows: usize) -> Result<()> {
        cache.places.rows(rows)?;
        cache.places.commit();
        Ok(())
    }

    fn fuses(&self, x: &CpuTensor, weight: &Linear, set: FuseSet) -> bool {
        // What is rounded to a narrower type in between cannot be fused, and norms are computed here.
        self.y == DType::F32 && !set.contains(FuseSet::NORM) && weight.fuses(x.rows(), set)
    }

    fn fused(
        &mut self,
        x: &CpuTensor,
        _norm: Option<&CpuNorm>,
        weight: &Linear,
        set: FuseSet,
        out: &mut CpuTensor,
    ) -> Result<()> {
        out.set_rows(x.rows());
        let (gate, accumulate) = (set.contains(FuseSet::GATE), set.contains(FuseSet::ACCUMULATE));
        let fusion = Fusion { norm: None, gate, accumulate };
        self.product(x.data(), x.rows(), weight, &fusion, out.data_mut())
    }

    fn shows_norms(&self) -> bool {
        matches!(self.watch, Watch::Each(_))
    }

    fn watch(&mut self, site: Site, slot: &mut CpuTensor) -> Result<()> {
        match &mut self.watch {
            Watch::Nothing => Ok(()),
            Watch::Unless(stop) => go_on(stop),
            Watch::Each(each) => each(Written { site, rows: slot.rows(), values: slot.data_mut() }),
            Watch::NonFinite => {
                let Some(at) = scan::first(slot.data(), |v| !v.is_finite()) else { return Ok(()) };
                let (value, row, column) = (slot.data()[at], at / slot.width(), at % slot.width());
                Err(Error::new(Code::NonFinite, format!("{site}: a value is not finite"))
                    .need("finite activations")
                    .have(format!("{value} in row {row}, column {column}"))
                    .fix("`q4 verify MODEL` checks the scales; --activations native rules the activation format out"))
            }
        }
    }
}

impl CpuExecutor {
    fn product(
        &mut self,
        x: &[f32],
        m: usize,
        weight: &Linear,
        fusion: &Fusion<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let pad = self.workspace.as_ptr().align_offset(64);
        let narrower = if fusion.gate { 2 } else { 1 };
        for part in &weight.parts {
            let (order, column, rows) = (&part.order, part.column, part.gathered(m));
            let part = &part.product;
            let (n, k, width) = (part.info().n / narrower, part.info().k, weight.n / narrower);
            let (gathered, scratch) = self.workspace[pad..].split_at_mut(rows);
            let x = match order {
                Some(order) => gather(order, &x[..m * k], k, gathered, &self.threads)?,
                None => x,
            };
            let len = scratch.len();
            let mut cx = ExecContext::cpu(&self.threads);
            cx.workspace = Some(TensorViewMut::of(scratch, &[len])?);
            let x = TensorView::matrix(x, m, k, k)?;
            match self.y {
                DType::F16 => staged::<f16>(part, x, (m, n, width, column), &mut self.staging, out, &mut cx)?,
                DType::BF16 => {
                    staged::<bf16>(part, x, (m, n, width, column), &mut self.staging, out, &mut cx)?
                }
                _ => {
                    let y = TensorViewMut::matrix(&mut out[column..], m, n, width)?;
                    part.forward_fused(x, fusion, y, &mut cx)?;
                }
            }
        }
        Ok(())
    }
}

/// Rows of x, `k` elements each, in the order of a weight's columns: copies, so that a row's bits are its
/// own. `to` has room for them at its start, aligned.
fn gather<'a>(
    order: &Inputs,
    x: &[f32],
    k: usize,
    to: &'a mut [u8],
    threads: &ThreadPool,
) -> Result<&'a [f32]> {
    let Inputs::Host(order) = order else {
        return Err(Error::new(Code::Internal, "an order of inputs that is not in host memory"));
    };
    let to: &mut [f32] = &mut bytemuck::cast_slice_mut::<u8, f32>(to)[..x.len()];
    each_row(to, k, threads, |r, row| order.gather(&x[r * k..][..k], row));
    Ok(to)
}

/// A product whose output type is narrower than the slots': computed into `staging`, widened into `out`.
fn staged<T: Element + Widen + bytemuck::Pod>(
    part: &Q4Linear,
    x: TensorView<'_>,
    (m, n, ld, column): (usize, usize, usize, usize),
    staging: &mut [u16],
    out: &mut [f32],
    cx: &mut ExecContext<'_>,
) -> Result<()> {
    let y: &mut [T] = bytemuck::cast_slice_mut(&mut staging[..m * n]);
    part.forward(x, TensorViewMut::matrix(y, m, n, n)?, cx)?;
    for (r, row) in y.chunks_exact(n).enumerate() {
        for (o, v) in out[r * ld + column..][..n].iter_mut().zip(row) {
            *o = v.widen();
        }
    }
    Ok(())
}

/// `y = w * (x * rsqrt(mean(x²) + eps))`, f32 (transformers' RMSNorm).
fn rms_norm(v: Vectors, x: &[f32], norm: &CpuNorm, out: &mut [f32]) {
    simd::scale_by(v, x, &norm.weight, norm_factor(v, x, norm), out);
}

fn rms_norm_in_place(v: Vectors, x: &mut [f32], norm: &CpuNorm) {
    let factor = norm_factor(v, x, norm);
    simd::scale_in_place(v, x, &norm.weight, factor);
}

fn norm_factor(v: Vectors, x: &[f32], norm: &CpuNorm) -> f32 {
    1.0 / (simd::square_sum(v, x) / x.len() as f32 + norm.eps).sqrt()
}

/// `cos` and `sin` of every position, `[context, frequencies]` each.
pub(crate) fn rotations(r: &Rotation, context: usize) -> (Vec<f32>, Vec<f32>) {
    let angles = (0..context).flat_map(|p| r.inv_freq.iter().map(move |f| p as f32 * f));
    angles.map(|a| (a.cos() * r.factor, a.sin() * r.factor)).unzip()
}

/// `(a, b) -> (a cos - b sin, b cos + a sin)` of elements side by side.
fn rotate_neighbours(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (([a, b], cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// `out[i] = gelu(gate[i]) * up[i]`, by its tanh approximation.
fn gelu_tanh_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    const ROOT: f32 = 0.797_884_6; // sqrt(2 / pi)
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        *o = 0.5 * g * (1.0 + (ROOT * (g + 0.044_715 * g * g * g)).tanh()) * u;
    }
}

/// `out[r, v] = x[r] · table[v]`, rows of the table in parallel, each read once for all rows of x.
fn dense_head(
    v: Vectors,
    table: &StoredTable,
    x: &[f32],
    out: &mut [f32],
    threads: &ThreadPool,
) -> Result<()> {
    let bytes = table.stored();
    match table.elements.dtype() {
        DType::F32 => dense_rows::<f32>(v, bytes, table, x, out, threads),
        DType::F16 => dense_rows::<f16>(v, bytes, table, x, out, threads),
        DType::BF16 => dense_rows::<bf16>(v, bytes, table, x, out, threads),
        other => Err(Error::new(Code::TensorType, table.name.clone())
            .need("f32, f16 or bf16")
            .have(other.to_string())),
    }
}

fn dense_rows<T: Widen + bytemuck::Pod>(
    v: Vectors,
    bytes: &[u8],
    table: &StoredTable,
    x: &[f32],
    out: &mut [f32],
    threads: &ThreadPool,
) -> Result<()> {
    let (k, vocab) = (table.width, table.rows);
    let weights: &[T] = bytemuck::try_cast_slice(bytes).map_err(|_| {
        Error::new(Code::Container, format!("{}: elements are not aligned", table.name))
            .need(format!("{}-byte offsets", align_of::<T>()))
    })?;
    let out = Disjoint::new(out);
    threads.split(vocab, 256, &|start, end| {
        for (r, x) in x.chunks_exact(k).enumerate() {
            // SAFETY: ranges of different tasks do not overlap, and `out` is [rows of x, vocab].
            let line = unsafe { out.slice(r * vocab + start, end - start) };
            simd::dots(v, x, &weights[start * k..end * k], 1.0, line);
        }
    });
    Ok(())
}
