//! [`Executor`] on the CPU: dense operations here, every 4-bit product through [`Q4Linear`].
use super::attention::{self, Scores};
use super::tensor::{Disjoint, each_row};
use super::{CpuTensor, KvCache, simd};
use crate::checkpoint::Bytes;
use crate::executor::{Executor, Logits, Shape, Slots};
use crate::watch::{Site, Watch, Written, go_on};
use half::{bf16, f16};
use q4_core::{
    Code, DType, Element, Error, ExecContext, FuseSet, Fusion, Q4Linear, Result, TensorView, TensorViewMut,
    ThreadPool, read_floats,
};
use q4_simd::{Vectors, Widen};
use std::ops::Range;
use std::sync::Arc;

/// A norm's weight and epsilon.
pub struct CpuNorm {
    /// `[width]`.
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Token embeddings or a dense head, `[rows, width]`, left where the checkpoint has them.
#[derive(Clone)]
pub struct CpuTable {
    /// The file.
    pub bytes: Bytes,
    /// The stored elements in it, aligned for their type.
    pub range: Range<usize>,
    /// f32, f16 or bf16.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Layer name, for messages.
    pub name: String,
    /// Every element is read in every step; else only the rows of a step's tokens, whose pages of a mapped
    /// file are given back from time to time.
    pub whole: bool,
}

/// Rows that are read of a table before its pages are given back.
const GATHERED: usize = 8;

impl CpuTable {
    /// Their bytes.
    pub fn elements(&self) -> &[u8] {
        &self.bytes[self.range.clone()]
    }

    /// Bytes of memory that a table of `len` bytes takes where it is read from `bytes`, at most.
    pub(crate) fn resident(bytes: &Bytes, len: usize, whole: bool) -> u64 {
        let all = whole || !bytes.is_mapped();
        (if all { len } else { len.min(Bytes::mapped_by(GATHERED)) }) as u64
    }
}

/// One or more products that share their input and write side by side.
pub struct CpuLinear {
    /// The products and the column each starts at.
    pub parts: Vec<(Q4Linear, usize)>,
    /// Out features of all parts.
    pub n: usize,
}

/// The head.
pub enum CpuHead {
    /// A dense matrix, tied to the embeddings or not.
    Dense(CpuTable),
    /// A 4-bit product.
    Q4(CpuLinear),
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
    /// `cos` and `sin` of every position, `[context, head_dim / 2]` each.
    rope: (Vec<f32>, Vec<f32>),
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
    /// Allocates everything a step of up to `rows` rows over `context` positions needs.
    /// `workspace` is the largest need of any product at that many rows; `rope` the inverse frequencies and
    /// the factor on cos and sin.
    ///
    /// # Errors
    /// `Q4_ISA` names an instruction set that is unknown or that this processor lacks.
    pub fn new(
        shape: Shape,
        threads: Arc<ThreadPool>,
        y: DType,
        rows: usize,
        context: usize,
        workspace: usize,
        rope: (&[f32], f32),
    ) -> Result<Self> {
        let widest = shape.qkv().max(2 * shape.intermediate).max(shape.hidden).max(shape.vocab);
        let lanes = attention::tasks(&shape, rows).min(threads.threads());
        let scores = Scores::new(lanes, context);
        Ok(Self {
            vectors: Vectors::named()?,
            staging: if y == DType::F32 { Vec::new() } else { vec![0; rows * widest] },
            workspace: vec![0; workspace + 64],
            rope: rotations(rope.0, rope.1, context),
            watch: Watch::Nothing,
            gathered: 0,
            scores,
            shape,
            threads,
            y,
        })
    }

    /// Bytes `new` allocates, predicted.
    pub fn bytes(
        shape: &Shape,
        threads: usize,
        y: DType,
        rows: usize,
        context: usize,
        workspace: usize,
    ) -> u64 {
        let widest = shape.qkv().max(2 * shape.intermediate).max(shape.hidden).max(shape.vocab);
        let staging = if y == DType::F32 { 0 } else { rows * widest * 2 };
        let lanes = attention::tasks(shape, rows).min(threads);
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
    type Linear = CpuLinear;
    type Norm = CpuNorm;
    type Table = CpuTable;
    type Head = CpuHead;
    type Cache = KvCache;

    fn embed(&mut self, table: &CpuTable, ids: &[u32], out: &mut CpuTensor) -> Result<()> {
        out.set_rows(ids.len());
        let (width, row_bytes) = (table.width, table.width * table.dtype.size());
        for (id, row) in ids.iter().zip(out.data_mut().chunks_exact_mut(width)) {
            let at = *id as usize * row_bytes;
            let Some(bytes) =
                table.elements().get(at..at + row_bytes).filter(|_| (*id as usize) < table.rows)
            else {
                return Err(Error::new(Code::ValueInvalid, "token id")
                    .need(format!("below {}", table.rows))
                    .have(id.to_string()));
            };
            read_floats(bytes, table.dtype, row);
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

    fn linear(&mut self, x: &CpuTensor, weight: &CpuLinear, out: &mut CpuTensor) -> Result<()> {
        let m = x.rows();
        out.set_rows(m);
        self.product(x.data(), m, weight, &Fusion::default(), out.data_mut())
    }

    fn add(&mut self, x: &CpuTensor, residual: &mut CpuTensor) -> Result<()> {
        let (v, width) = (self.vectors, x.width());
        each_row(residual.data_mut(), width, &self.threads, |r, row| simd::add(v, x.row(r), row));
        Ok(())
    }

    fn silu_mul(&mut self, gate_up: &CpuTensor, out: &mut CpuTensor) -> Result<()> {
        out.set_rows(gate_up.rows());
        let (v, half) = (self.vectors, out.width());
        each_row(out.data_mut(), half, &self.threads, |r, row| {
            let (gate, up) = gate_up.row(r).split_at(half);
            simd::silu_mul(v, gate, up, row);
        });
        Ok(())
    }

    fn rope_append(
        &mut self,
        qkv: &mut CpuTensor,
        q_norm: &CpuNorm,
        k_norm: &CpuNorm,
        cache: &mut KvCache,
        layer: usize,
    ) -> Result<()> {
        cache.room_for(qkv.rows())?;
        let (s, past, width) = (&self.shape, cache.len(), qkv.width());
        let (d, half) = (s.head_dim, s.head_dim / 2);
        let (vectors, rope) = (self.vectors, &self.rope);
        let cache = cache.writer(layer);
        each_row(qkv.data_mut(), width, &self.threads, |r, row| {
            let at = (past + r) * half;
            let (cos, sin) = (&rope.0[at..at + half], &rope.1[at..at + half]);
            let (q, kv) = row.split_at_mut(s.q());
            let (k, v) = kv.split_at_mut(s.kv());
            for (heads, norm) in [(q, q_norm), (&mut *k, k_norm)] {
                for head in heads.chunks_exact_mut(d) {
                    rms_norm_in_place(vectors, head, norm);
                    simd::rotate(vectors, head, cos, sin);
                }
            }
            // SAFETY: a row is a position of its own, and the cache is read by nobody before all are written.
            unsafe { cache.write(past + r, k, v) };
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
        attention::run(self.vectors, &self.shape, qkv, cache, layer, &mut self.scores, out, &self.threads);
        Ok(())
    }

    fn head(
        &mut self,
        x: &CpuTensor,
        norm: &CpuNorm,
        head: &CpuHead,
        which: Logits,
        scratch: &mut CpuTensor,
        out: &mut CpuTensor,
    ) -> Result<()> {
        let first = if which == Logits::All { 0 } else { x.rows() - 1 };
        let (m, width) = (x.rows() - first, x.width());
        scratch.set_rows(m);
        for (x, o) in
            x.data()[first * width..].chunks_exact(width).zip(scratch.data_mut().chunks_exact_mut(width))
        {
            rms_norm(self.vectors, x, norm, o);
        }
        out.set_rows(m);
        match head {
            CpuHead::Q4(linear) => {
                self.product(scratch.data(), m, linear, &Fusion::default(), out.data_mut())
            }
            CpuHead::Dense(table) => {
                dense_head(self.vectors, table, scratch.data(), out.data_mut(), &self.threads)
            }
        }
    }

    fn commit(&mut self, cache: &mut KvCache, rows: usize) -> Result<()> {
        cache.advance(rows)
    }

    fn linear_add(
        &mut self,
        x: &CpuTensor,
        weight: &CpuLinear,
        scratch: &mut CpuTensor,
        residual: &mut CpuTensor,
    ) -> Result<()> {
        if self.fuses(weight, x.rows(), FuseSet::ACCUMULATE) {
            let fusion = Fusion { accumulate: true, ..Fusion::default() };
            return self.product(x.data(), x.rows(), weight, &fusion, residual.data_mut());
        }
        self.linear(x, weight, scratch)?;
        self.add(scratch, residual)
    }

    fn gated(&mut self, norm: &CpuNorm, gate_up: &CpuLinear, s: &mut Slots<CpuTensor>) -> Result<()> {
        let rows = s.hidden.rows();
        // Gate and up in one weight, or there is nothing to fuse.
        if gate_up.parts.len() == 1 && self.fuses(gate_up, rows, FuseSet::GATE) {
            self.norm(&s.hidden, norm, &mut s.normed)?;
            s.gated.set_rows(rows);
            let fusion = Fusion { gate: true, ..Fusion::default() };
            return self.product(s.normed.data(), rows, gate_up, &fusion, s.gated.data_mut());
        }
        self.norm_linear(&s.hidden, norm, gate_up, &mut s.normed, &mut s.gate_up)?;
        self.silu_mul(&s.gate_up, &mut s.gated)
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
                let Some(at) = slot.data().iter().position(|v| !v.is_finite()) else { return Ok(()) };
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
    /// Whether all parts of a product take `set` along; what is rounded to a narrower type in between cannot.
    fn fuses(&self, weight: &CpuLinear, m: usize, set: FuseSet) -> bool {
        self.y == DType::F32 && weight.parts.iter().all(|(part, _)| part.fuses(m, set))
    }

    fn product(
        &mut self,
        x: &[f32],
        m: usize,
        weight: &CpuLinear,
        fusion: &Fusion<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let pad = self.workspace.as_ptr().align_offset(64);
        let len = self.workspace.len() - pad;
        let narrower = if fusion.gate { 2 } else { 1 };
        for (part, column) in &weight.parts {
            let (n, k) = (part.info().n / narrower, part.info().k);
            let (width, column) = (weight.n / narrower, *column);
            let mut cx = ExecContext::cpu(&self.threads);
            cx.workspace = Some(TensorViewMut::of(&mut self.workspace[pad..], &[len])?);
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

/// `y = w * (x * rsqrt(mean(x²) + eps))`, f32 (Qwen3RMSNorm).
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
pub(crate) fn rotations(inv_freq: &[f32], factor: f32, context: usize) -> (Vec<f32>, Vec<f32>) {
    let angles = (0..context).flat_map(|p| inv_freq.iter().map(move |f| p as f32 * f));
    angles.map(|a| (a.cos() * factor, a.sin() * factor)).unzip()
}

/// `out[r, v] = x[r] · table[v]`, rows of the table in parallel, each read once for all rows of x.
fn dense_head(v: Vectors, table: &CpuTable, x: &[f32], out: &mut [f32], threads: &ThreadPool) -> Result<()> {
    let bytes = table.elements();
    match table.dtype {
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
    table: &CpuTable,
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
