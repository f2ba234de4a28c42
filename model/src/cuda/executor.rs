//! [`Executor`] on CUDA: everything between products in kernels of its own, every product through
//! [`Q4Linear`].
use super::draw::Draw;
use super::kernels::{Embedding, ModelKernels, Pages, Rope};
use super::outbox::Outbox;
use super::slots::Scratch;
use super::state::{RUN, Staged, State};
use super::{CudaCache, CudaTensor};
use crate::arch::Activation;
use crate::config::Rotation;
use crate::executor::{Executor, Logits, Sizes, Slots};
use crate::sampling::Sampler;
use crate::watch::{Site, Watch, Written, go_on};
use crate::weights::{Head, Inputs, Linear};
use q4_core::{Code, DType, Error, ExecContext, FuseSet, Fusion, Result, RmsNorm, TensorView, ThreadPool};
use q4_cuda::{Buffer, Graph, Stream, view, view_mut};
use std::sync::Arc;

/// A norm's weight on the device.
pub struct CudaNorm {
    /// f32 `[width]`.
    pub weight: Buffer,
    /// Added to the mean square.
    pub eps: f32,
}

impl CudaNorm {
    fn pair(&self) -> (u64, f32) {
        (self.weight.ptr(), self.eps)
    }
    fn fused(&self) -> Result<RmsNorm<'_>> {
        Ok(RmsNorm { weight: view(&self.weight, 0, DType::F32, &[self.weight.len() / 4])?, eps: self.eps })
    }
}

/// Token embeddings or a dense head, `[rows, width]`, on the device in the stored type.
#[derive(Clone)]
pub struct CudaTable {
    /// The elements.
    pub buffer: Arc<Buffer>,
    /// f32, f16 or bf16.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
}

/// Stream, scratch and small state of one context.
pub struct CudaExecutor {
    /// Everything of a context is issued here.
    pub stream: Stream,
    kernels: Arc<ModelKernels>,
    threads: Arc<ThreadPool>,
    /// What the rows of the next step are.
    pub(super) step: Step,
    /// A decode step of one sequence is recorded: without its embedding, which is there when it is replayed.
    recording: bool,
    workspace: Buffer,
    rope: Buffer,
    rope_half: u64,
    scratch: Scratch,
    partial: Buffer,
    state: State,
    watch: Watch,
}

/// What the rows of a step are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Consecutive tokens of one sequence, in so many runs.
    Prompt { runs: usize },
    /// One token of one sequence.
    Decode,
    /// Of many sequences: `singles` rows of as many first, then `runs` runs.
    Many { singles: usize, runs: usize },
}

impl CudaExecutor {
    /// Allocates everything a step needs.
    pub(super) fn new(
        kernels: &Arc<ModelKernels>,
        threads: Arc<ThreadPool>,
        sizes: Sizes,
        scratch: Scratch,
        rotation: &Rotation,
        state: State,
    ) -> Result<Self> {
        let (gpu, kernels) = (&kernels.gpu, kernels.clone());
        let Sizes { sequences, context, workspace, .. } = sizes;
        let (cos, sin) = crate::cpu::rotations(rotation, context);
        let table = Buffer::new(gpu, (cos.len() + sin.len()) * 4)?;
        table.upload(0, &cos)?;
        table.upload(cos.len() * 4, &sin)?;
        let partial = kernels.attention_scratch(sequences);
        Ok(Self {
            stream: Stream::new(gpu)?,
            workspace: Buffer::new(gpu, workspace + 256)?,
            rope_half: (cos.len() * 4) as u64,
            rope: table,
            scratch,
            partial: Buffer::zeroed(gpu, partial)?,
            state,
            kernels,
            threads,
            step: Step::Decode,
            recording: false,
            watch: Watch::Nothing,
        })
    }

    /// What is done between operations from now on.
    pub fn set_watch(&mut self, watch: Watch) {
        self.watch = watch;
    }

    /// Starts recording the step that is issued next; that of one sequence behind its embedding.
    pub(super) fn begin_recording(&mut self) -> Result<()> {
        self.stream.begin_capture()?;
        self.recording = self.step == Step::Decode;
        Ok(())
    }
    /// What was issued since.
    pub(super) fn end_recording(&mut self) -> Result<Graph> {
        self.recording = false;
        self.stream.end_capture()
    }

    /// Puts on the device where the one sequence stands and the ids of its next step, which are below the
    /// table's rows. The runs they make.
    pub(super) fn place(&mut self, ids: &[u32], position: usize) -> Result<usize> {
        self.stream.synchronize()?; // the staging memory may still be read
        let staged = self.state.stage();
        staged.position[0] = position as u32;
        staged.ids[..ids.len()].copy_from_slice(ids);
        let runs = lay_runs(staged.runs, 0, ids.len(), position, 0);
        // SAFETY: the next stage is behind the wait above.
        unsafe { self.state.send_rows(ids.len(), self.stream.raw())? };
        Ok(runs)
    }

    /// The same for a step of many sequences: `fill` says it, and how many page numbers there are.
    pub(super) fn place_many(&mut self, fill: impl FnOnce(Staged<'_>) -> usize) -> Result<()> {
        self.stream.synchronize()?; // as above
        let numbers = fill(self.state.stage());
        // SAFETY: as above.
        unsafe { self.state.send_all(numbers, self.stream.raw()) }
    }

    /// Chooses the next tokens of the first `count` rows whose logits are there and hands them over. Where
    /// there is a `table`, behind a step of `rows` rows, its embedding is the next step's input, at the
    /// position after them.
    pub(super) fn choose(
        &mut self,
        slots: &Slots<CudaTensor>,
        (table, rows): (Option<&CudaTable>, usize),
        count: usize,
        outbox: &Outbox,
    ) -> Result<()> {
        let to = self.state.chosen(0, outbox, embedding(table, &slots.hidden));
        // SAFETY: sizes as `State`, the outbox and the slots have them.
        unsafe { self.kernels.argmax(slots.logits.ptr(), rows, to, count, self.stream.raw()) }
    }

    /// Draws the next token of row `row` of the logits instead of the chosen one and hands it over. Where
    /// there is a `table`, its embedding is the next step's input.
    pub(super) fn draw(
        &self,
        draw: &mut Draw,
        slots: &Slots<CudaTensor>,
        (table, row): (Option<&CudaTable>, usize),
        (sampler, recent): (&mut Sampler, &[u32]),
        outbox: &Outbox,
    ) -> Result<()> {
        let to = self.state.chosen(row, outbox, embedding(table, &slots.hidden));
        let (logits, s) = (slots.logits.row(row), self.stream.raw());
        // SAFETY: a row of logits of the vocabulary's size, of which `choose` chose last, and one word each.
        unsafe { draw.draw(logits, sampler, recent, to, s) }
    }

    fn rope(&self) -> Rope {
        (self.rope.ptr(), self.rope.ptr() + self.rope_half)
    }

    /// Where the rows of the step are in the cache.
    fn pages(&self, cache: &CudaCache) -> Pages {
        let (state, shape) = (&self.state, &self.kernels.shape);
        match self.step {
            Step::Prompt { .. } | Step::Decode => {
                Pages::alone(state.position(), cache.places.capacity(0), shape.head_dim)
            }
            Step::Many { .. } => {
                let words = (state.position(), state.lists(), state.numbers());
                Pages::shared(words, shape.kv_heads, shape.head_dim)
            }
        }
    }

    /// Attention of the step's runs, whose queries were rotated.
    fn attend_runs(&self, pages: Pages, cache: (u64, u64), runs: usize, out: &CudaTensor) -> Result<()> {
        let (queries, runs) = (self.scratch.queries, (self.state.runs(), runs));
        // SAFETY: the runs are inside the step, whose keys and values are in the cache.
        unsafe { self.kernels.attend_many(queries, pages, cache, out.ptr(), runs, self.stream.raw()) }
    }

    /// Norms, rotates and appends the rows from `first` on.
    fn append(
        &self,
        qkv: &CudaTensor,
        norms: Option<&[CudaNorm; 2]>,
        pages: Pages,
        cache: (u64, u64),
        first: usize,
    ) -> Result<()> {
        let queries = self.scratch.queries + (first * self.kernels.shape.q() * qkv.dtype().size()) as u64;
        let (at, rows, s) = ((self.rope(), pages), qkv.rows() - first, self.stream.raw());
        // SAFETY: there is room in the cache for what was placed; slots and queries hold all rows.
        unsafe { self.kernels.rotate_append(qkv.row(first), of_heads(norms)?, at, cache, queries, rows, s) }
    }

    /// Attention of the first `count` rows, each a sequence's only one, with norms, rotation and append.
    fn attend_singles(
        &self,
        qkv: &CudaTensor,
        norms: Option<&[CudaNorm; 2]>,
        pages: Pages,
        cache: (u64, u64),
        count: usize,
        out: &CudaTensor,
    ) -> Result<()> {
        let (at, s) = ((self.rope(), pages), self.stream.raw());
        let (partial, out) = (self.partial.ptr(), out.ptr());
        // SAFETY: `partial` has the size the kernels asked for; the rest as above.
        unsafe { self.kernels.attend_one(qkv.ptr(), of_heads(norms)?, at, cache, partial, out, count, s) }
    }

    /// Rows of x with their elements in the order of a weight's columns, at the start of the scratch.
    fn gather(&self, order: &Inputs, x: &TensorView<'_>, [m, k]: [usize; 2]) -> Result<TensorView<'_>> {
        let Inputs::Cuda(order) = order else {
            return Err(Error::new(Code::Internal, "an order of inputs that is not on the device"));
        };
        let (from, to) = (x.as_ptr() as u64, self.workspace.ptr());
        // SAFETY: x is `[m, k]`, dense, an order has k in features, and the scratch begins with room for the
        // rows.
        unsafe { self.kernels.gather(from, order.ptr(), to, (m, k), self.stream.raw())? };
        view(&self.workspace, 0, x.dtype(), &[m, k])
    }

    fn products(
        &mut self,
        x: TensorView<'_>,
        weight: &Linear,
        fusion: &Fusion<'_>,
        out: &mut CudaTensor,
    ) -> Result<()> {
        for part in &weight.parts {
            let (m, gpu) = (out.rows(), &self.kernels.gpu);
            let (order, column, rows) = (&part.order, part.column, part.gathered(m));
            let (part, info) = (&part.product, part.product.info());
            let n = info.n / if fusion.gate { 2 } else { 1 };
            let x = match order {
                Some(order) => self.gather(order, &x, [m, info.k])?,
                None => x,
            };
            let mut cx = ExecContext::on(gpu.device(), self.stream.raw(), &self.threads);
            let scratch = self.workspace.len() - rows;
            cx.workspace = Some(view_mut(&self.workspace, rows, DType::U8, &[scratch])?);
            gpu.enqueues(format_args!("`{}`, [{m}, {}] by [{}, {}]", part.name(), info.k, info.n, info.k));
            let y = out.view_mut(column, n)?;
            match fusion.set() {
                FuseSet::NONE => part.forward(x, y, &mut cx)?,
                _ => part.forward_fused(x, fusion, y, &mut cx)?,
            }
        }
        Ok(())
    }
}

fn embedding(table: Option<&CudaTable>, hidden: &CudaTensor) -> Embedding {
    let of = |t: &CudaTable| Embedding::new((t.buffer.ptr(), t.dtype), hidden.ptr(), hidden.width());
    table.map_or_else(Embedding::none, of)
}

/// Rows `first..first + rows` of a step, at `position` on, as runs; the longest first. How many they are.
pub(super) fn lay_runs(
    runs: &mut [[u32; 4]],
    first: usize,
    rows: usize,
    position: usize,
    list: usize,
) -> usize {
    let count = rows.div_ceil(RUN);
    for (run, at) in runs[..count].iter_mut().zip((0..count).rev().map(|i| i * RUN)) {
        let words = [first + at, RUN.min(rows - at), position + at, list];
        *run = words.map(|word| word as u32);
    }
    count
}

/// The norms of query and key heads; models without were refused where they were loaded.
fn of_heads(norms: Option<&[CudaNorm; 2]>) -> Result<(u64, u64, f32)> {
    let [q, k] = norms.ok_or_else(|| Error::new(Code::Unsupported, "heads without norms on CUDA"))?;
    Ok((q.weight.ptr(), k.weight.ptr(), q.eps))
}

impl Executor for CudaExecutor {
    type Tensor = CudaTensor;
    type Linear = Linear;
    type Norm = CudaNorm;
    type Table = CudaTable;
    type Head = Head<CudaTable>;
    type Cache = CudaCache;

    fn embed(&mut self, table: &CudaTable, ids: &[u32], out: &mut CudaTensor) -> Result<()> {
        out.set_rows(ids.len());
        if self.recording {
            return Ok(());
        }
        let (from, s) = (self.state.ids(), self.stream.raw());
        // SAFETY: the ids on the device are `ids`; slots have the sizes asked for.
        unsafe { self.kernels.embed((table.buffer.ptr(), table.dtype), from, out.ptr(), ids.len(), s) }
    }

    fn norm(&mut self, x: &CudaTensor, weight: &CudaNorm, out: &mut CudaTensor) -> Result<()> {
        out.set_rows(x.rows());
        let to = (out.ptr(), out.dtype());
        // SAFETY: both slots are `[rows, width]` and the weight `[width]`.
        unsafe { self.kernels.norm(x.ptr(), weight.pair(), to, (x.rows(), x.width()), self.stream.raw()) }
    }

    fn linear(&mut self, x: &CudaTensor, weight: &Linear, out: &mut CudaTensor) -> Result<()> {
        out.set_rows(x.rows());
        self.products(x.view(0, x.rows())?, weight, &Fusion::default(), out)
    }

    fn add(&mut self, x: &CudaTensor, residual: &mut CudaTensor) -> Result<()> {
        // SAFETY: both slots have the same rows and width.
        unsafe { self.kernels.add(x.ptr(), residual.ptr(), x.rows() * x.width(), self.stream.raw()) }
    }

    fn gate(&mut self, activation: Activation, gate_up: &CudaTensor, out: &mut CudaTensor) -> Result<()> {
        if activation != Activation::Silu {
            return Err(Error::new(Code::Unsupported, activation.as_str()).need("silu on CUDA"));
        }
        out.set_rows(gate_up.rows());
        let (rows, width) = (out.rows(), out.width());
        // SAFETY: gate_up is `[rows, 2 width]`.
        unsafe { self.kernels.silu_mul(gate_up.ptr(), out.ptr(), rows, width, self.stream.raw()) }
    }

    fn rope_append(
        &mut self,
        qkv: &mut CudaTensor,
        norms: Option<&[CudaNorm; 2]>,
        cache: &mut CudaCache,
        layer: usize,
    ) -> Result<()> {
        self.append(qkv, norms, self.pages(cache), cache.layer(layer), 0)
    }

    fn attention(
        &mut self,
        qkv: &CudaTensor,
        cache: &CudaCache,
        layer: usize,
        out: &mut CudaTensor,
    ) -> Result<()> {
        out.set_rows(qkv.rows());
        let (pages, layer) = (self.pages(cache), cache.layer(layer));
        if let (Step::Prompt { runs }, true) = (self.step, self.kernels.attends_fast()) {
            return self.attend_runs(pages, layer, runs, out);
        }
        let (queries, rows, s) = (self.scratch.queries, qkv.rows(), self.stream.raw());
        // SAFETY: as above.
        unsafe { self.kernels.attend(queries, pages, layer, out.ptr(), rows, s) }
    }

    fn rope_attention(
        &mut self,
        qkv: &mut CudaTensor,
        norms: Option<&[CudaNorm; 2]>,
        cache: &mut CudaCache,
        layer: usize,
        out: &mut CudaTensor,
    ) -> Result<()> {
        let (singles, runs) = match self.step {
            Step::Decode if self.kernels.attends_fast() => (1, 0),
            Step::Many { singles, runs } if self.kernels.attends_fast() => (singles, runs),
            _ => {
                self.rope_append(qkv, norms, cache, layer)?;
                return self.attention(qkv, cache, layer, out);
            }
        };
        out.set_rows(qkv.rows());
        let (pages, layer) = (self.pages(cache), cache.layer(layer));
        if singles > 0 {
            self.attend_singles(qkv, norms, pages, layer, singles, out)?;
        }
        if runs > 0 {
            self.append(qkv, norms, pages.behind(singles), layer, singles)?;
            self.attend_runs(pages, layer, runs, out)?;
        }
        Ok(())
    }

    fn head(
        &mut self,
        x: &CudaTensor,
        norm: &CudaNorm,
        head: &Head<CudaTable>,
        which: Logits<'_>,
        scratch: &mut CudaTensor,
        out: &mut CudaTensor,
    ) -> Result<()> {
        let (rows, s) = (which.rows(x.rows()), self.stream.raw());
        let lie_apart = (1..rows).any(|i| which.row(i, x.rows()) != which.row(0, x.rows()) + i);
        let mut picked = self.scratch.picked.clone();
        picked.set_rows(rows);
        let (x, first) = match lie_apart {
            false => (x, which.row(0, x.rows())),
            true => {
                let (from, to) = ((x.ptr(), DType::F32), picked.ptr());
                // SAFETY: the step was placed with these rows as its picks; they are below those of x.
                unsafe { self.kernels.embed(from, self.state.picks(), to, rows, s)? };
                (&picked, 0)
            }
        };
        scratch.set_rows(rows);
        out.set_rows(rows);
        match head {
            Head::Product(linear) => {
                let fused = Fusion { norm: Some(norm.fused()?), ..Fusion::default() };
                if linear.fuses(rows, fused.set()) {
                    return self.products(x.view(first, rows)?, linear, &fused, out);
                }
                let to = (scratch.ptr(), scratch.dtype());
                // SAFETY: rows `first..` of x, and as many of scratch.
                unsafe { self.kernels.norm(x.row(first), norm.pair(), to, (rows, x.width()), s)? };
                self.products(scratch.view(0, rows)?, linear, &Fusion::default(), out)
            }
            Head::Dense(table) => {
                // Tensor cores multiply two values of one type, so x takes the table's, unless f32 was asked
                // for.
                let exact = self.kernels.dtype == DType::F32 || table.dtype == DType::F32;
                let to = match exact {
                    true => (self.scratch.picked.ptr(), DType::F32),
                    false => (scratch.ptr(), table.dtype),
                };
                // SAFETY: as above; the table is `[vocab, hidden]`.
                unsafe {
                    self.kernels.norm(x.row(first), norm.pair(), to, (rows, x.width()), s)?;
                    self.kernels.head((table.buffer.ptr(), table.dtype), to, out.ptr(), rows, s)
                }
            }
        }
    }

    fn commit(&mut self, cache: &mut CudaCache, _rows: usize) -> Result<()> {
        cache.places.commit();
        Ok(())
    }

    fn watch(&mut self, site: Site, slot: &mut CudaTensor) -> Result<()> {
        match &mut self.watch {
            Watch::Nothing => return Ok(()),
            Watch::Unless(stop) => return go_on(stop),
            Watch::NonFinite => {}
            Watch::Each(each) => {
                self.stream.synchronize()?;
                let mut values = slot.download()?;
                each(Written { site, rows: slot.rows(), values: &mut values })?;
                return slot.upload(&values);
            }
        }
        let flag = self.state.clear_non_finite()?;
        let count = slot.rows() * slot.width();
        // SAFETY: the slot holds `count` elements.
        unsafe { self.kernels.finite((slot.ptr(), slot.dtype()), count, flag, self.stream.raw())? };
        self.stream.synchronize()?;
        if !self.state.is_non_finite()? {
            return Ok(());
        }
        Err(Error::new(Code::NonFinite, format!("{site}: a value is not finite"))
            .need("finite activations")
            .have(format!("NaN or infinity among {count} values of {}", slot.dtype()))
            .fix("`q4 verify MODEL` checks the scales; --dtype bfloat16 has the range of float32"))
    }

    fn fuses(&self, x: &CudaTensor, weight: &Linear, set: FuseSet) -> bool {
        weight.fuses(x.rows(), set)
    }

    fn fused(
        &mut self,
        x: &CudaTensor,
        norm: Option<&CudaNorm>,
        weight: &Linear,
        set: FuseSet,
        out: &mut CudaTensor,
    ) -> Result<()> {
        out.set_rows(x.rows());
        let norm = norm.map(CudaNorm::fused).transpose()?;
        let (gate, accumulate) = (set.contains(FuseSet::GATE), set.contains(FuseSet::ACCUMULATE));
        self.products(x.view(0, x.rows())?, weight, &Fusion { norm, gate, accumulate }, out)
    }
}
