//! [`Executor`] on CUDA: everything between products in kernels of its own, every product through
//! [`Q4Linear`].
use super::draw::Draw;
use super::kernels::{Chosen, Embedding, ModelKernels, Place, argmax_blocks};
use super::outbox::Outbox;
use super::slots::Scratch;
use super::{CudaCache, CudaTensor};
use crate::arch::Activation;
use crate::config::Rotation;
use crate::executor::{Executor, Logits, Sizes, Slots};
use crate::sampling::Sampler;
use crate::watch::{Site, Watch, Written, go_on};
use crate::weights::{Head, Linear};
use q4_core::{Code, DType, Error, ExecContext, FuseSet, Fusion, Result, RmsNorm, TensorView, ThreadPool};
use q4_cuda::{Buffer, Gpu, Graph, Pinned, Stream, view, view_mut};
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
    /// Sequences that decode together.
    sequences: usize,
    /// What the rows of the next step are.
    pub(super) step: Step,
    /// What is issued is recorded: a decode step without its embedding, which is there when a step is
    /// replayed.
    recording: bool,
    workspace: Buffer,
    rope: Buffer,
    rope_half: u64,
    scratch: Scratch,
    partial: Buffer,
    state: State,
    ids: Pinned,
    watch: Watch,
}

/// What the rows of a step are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Consecutive tokens of one sequence.
    Prompt { sequence: usize },
    /// One token of each sequence.
    Decode,
}

/// Small arrays of u32 on the device, side by side: what a replayed step reads and leaves.
struct State {
    buffer: Buffer,
    sequences: usize,
    rows: usize,
    /// Blocks that choose for a sequence, and u64 for each.
    blocks: u32,
    keys: Buffer,
}

impl State {
    fn new(gpu: &Arc<Gpu>, vocab: usize, sequences: usize, rows: usize) -> Result<Self> {
        let words = 5 * sequences + rows + 1;
        let blocks = argmax_blocks(gpu, vocab, sequences);
        let keys = Buffer::zeroed(gpu, 8 * sequences * blocks as usize)?;
        Ok(Self { buffer: Buffer::zeroed(gpu, words * 4)?, sequences, rows, blocks, keys })
    }
    fn word(&self, at: usize) -> u64 {
        self.buffer.ptr() + 4 * at as u64
    }
    /// What choosing needs, from sequence `first` on.
    fn chosen(&self, first: usize, outbox: &Outbox, embedding: Embedding) -> Chosen {
        let of = |array| self.word(array * self.sequences + first);
        Chosen {
            keys: self.keys.ptr() + 8 * first as u64 * u64::from(self.blocks),
            blocks: self.blocks,
            turns: of(0),
            token: of(1),
            flags: of(2),
            records: of(3),
            position: of(4),
            out: outbox.address() + 8 * first as u64,
            stride: outbox.sequences() as u32,
            embedding,
        }
    }
    /// Of every sequence; the ids of a step lie behind.
    fn position(&self) -> u64 {
        self.word(4 * self.sequences)
    }
    fn ids(&self) -> u64 {
        self.word(5 * self.sequences)
    }
    fn non_finite(&self) -> u64 {
        self.word(5 * self.sequences + self.rows)
    }
}

impl CudaExecutor {
    /// Allocates everything a step needs.
    pub fn new(
        kernels: &Arc<ModelKernels>,
        threads: Arc<ThreadPool>,
        sizes: Sizes,
        scratch: Scratch,
        rotation: &Rotation,
    ) -> Result<Self> {
        let (gpu, kernels) = (&kernels.gpu, kernels.clone());
        let Sizes { rows, sequences, context, workspace, .. } = sizes;
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
            state: State::new(gpu, kernels.shape.vocab, sequences, rows.max(sequences))?,
            ids: Pinned::new(gpu, (rows.max(sequences) + sequences) * 4)?,
            kernels,
            threads,
            sequences,
            step: Step::Prompt { sequence: 0 },
            recording: false,
            watch: Watch::Nothing,
        })
    }

    /// What is done between operations from now on.
    pub fn set_watch(&mut self, watch: Watch) {
        self.watch = watch;
    }

    /// Starts recording the decode step that is issued next, behind its embedding.
    pub(super) fn begin_recording(&mut self) -> Result<()> {
        self.stream.begin_capture()?;
        self.recording = true;
        Ok(())
    }
    /// What was issued since.
    pub(super) fn end_recording(&mut self) -> Result<Graph> {
        self.recording = false;
        self.stream.end_capture()
    }

    /// Puts on the device where every sequence stands and the ids of the next step, which are below the
    /// table's rows.
    pub(super) fn place(&mut self, ids: &[u32], positions: &[u32]) -> Result<()> {
        self.stream.synchronize()?; // the staging memory may still be read
        let staged = self.ids.as_mut_slice::<u32>();
        staged[..positions.len()].copy_from_slice(positions);
        staged[positions.len()..][..ids.len()].copy_from_slice(ids);
        let bytes = 4 * (positions.len() + ids.len());
        // SAFETY: both fit by the engine's chunk, the staging memory and the state have room for them, one
        // behind the other, and nobody writes the staging memory before the next wait above.
        unsafe { self.ids.send(0, self.state.position(), bytes, self.stream.raw()) }
    }

    /// Chooses the next token of the rows whose logits are there and hands it over. Behind a step of `rows`
    /// rows its embedding is the next step's input, at the position after them.
    pub(super) fn choose(
        &mut self,
        slots: &Slots<CudaTensor>,
        table: &CudaTable,
        rows: usize,
        outbox: &Outbox,
    ) -> Result<()> {
        let (first, count) = match self.step {
            Step::Prompt { sequence } => (sequence, 1),
            Step::Decode => (0, self.sequences),
        };
        let to = self.state.chosen(first, outbox, embedding(table, &slots.hidden, first));
        // SAFETY: sizes as `State`, the outbox and the slots have them.
        unsafe { self.kernels.argmax(slots.logits.ptr(), rows, to, count, self.stream.raw()) }
    }

    /// Draws the first sequence's next token instead of the chosen one: hands it over, and its embedding is
    /// the next step's input.
    pub(super) fn draw(
        &self,
        draw: &mut Draw,
        slots: &Slots<CudaTensor>,
        table: &CudaTable,
        (sampler, recent): (&mut Sampler, &[u32]),
        outbox: &Outbox,
    ) -> Result<()> {
        let to = self.state.chosen(0, outbox, embedding(table, &slots.hidden, 0));
        let (logits, s) = (slots.logits.ptr(), self.stream.raw());
        // SAFETY: one row of logits of the vocabulary's size, of which `choose` chose last, and one word
        // each.
        unsafe { draw.draw(logits, sampler, recent, to, s) }
    }

    fn position(&self, cache: &CudaCache) -> Place {
        let sequence = match self.step {
            Step::Prompt { sequence } => sequence,
            Step::Decode => 0,
        };
        Place {
            rope: (self.rope.ptr(), self.rope.ptr() + self.rope_half),
            position: self.state.position() + 4 * sequence as u64,
            batch: self.step == Step::Decode && self.sequences > 1,
            strides: (cache.head_stride(), cache.sequence_stride()),
        }
    }

    /// Keys and values of the sequence a step writes to, or of the first.
    fn layer(&self, cache: &CudaCache, layer: usize) -> (u64, u64) {
        let (keys, values) = cache.layer(layer);
        let skip = match self.step {
            Step::Prompt { sequence } => {
                sequence as u64 * cache.sequence_stride() * cache.dtype().size() as u64
            }
            Step::Decode => 0,
        };
        (keys + skip, values + skip)
    }

    fn products(
        &mut self,
        x: TensorView<'_>,
        weight: &Linear,
        fusion: &Fusion<'_>,
        out: &mut CudaTensor,
    ) -> Result<()> {
        for (part, column) in &weight.parts {
            let n = part.info().n / if fusion.gate { 2 } else { 1 };
            let gpu = &self.kernels.gpu;
            let mut cx = ExecContext::on(gpu.device(), self.stream.raw(), &self.threads);
            cx.workspace = Some(view_mut(&self.workspace, 0, DType::U8, &[self.workspace.len()])?);
            let (m, info) = (out.rows(), part.info());
            gpu.enqueues(format_args!("`{}`, [{m}, {}] by [{}, {}]", part.name(), info.k, info.n, info.k));
            let y = out.view_mut(*column, n)?;
            match fusion.set() {
                FuseSet::NONE => part.forward(x, y, &mut cx)?,
                _ => part.forward_fused(x, fusion, y, &mut cx)?,
            }
        }
        Ok(())
    }
}

fn embedding(table: &CudaTable, hidden: &CudaTensor, first: usize) -> Embedding {
    Embedding::new((table.buffer.ptr(), table.dtype), hidden.row(first), hidden.width())
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
        self.products(x.view(0)?, weight, &Fusion::default(), out)
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
        let norms = of_heads(norms)?;
        let (place, rows) = (self.position(cache), qkv.rows());
        let s = self.stream.raw();
        // SAFETY: the engine left room in the cache; slots and queries hold `rows` rows.
        unsafe {
            self.kernels.rotate_append(
                qkv.ptr(),
                norms,
                place,
                self.layer(cache, layer),
                self.scratch.queries,
                rows,
                s,
            )
        }
    }

    fn attention(
        &mut self,
        qkv: &CudaTensor,
        cache: &CudaCache,
        layer: usize,
        out: &mut CudaTensor,
    ) -> Result<()> {
        out.set_rows(qkv.rows());
        let place = self.position(cache);
        let (queries, rows, s) = (self.scratch.queries, qkv.rows(), self.stream.raw());
        // SAFETY: as above.
        unsafe { self.kernels.attend(queries, place, self.layer(cache, layer), out.ptr(), rows, s) }
    }

    fn rope_attention(
        &mut self,
        qkv: &mut CudaTensor,
        norms: Option<&[CudaNorm; 2]>,
        cache: &mut CudaCache,
        layer: usize,
        out: &mut CudaTensor,
    ) -> Result<()> {
        if self.step != Step::Decode || !self.kernels.attends_one() {
            self.rope_append(qkv, norms, cache, layer)?;
            return self.attention(qkv, cache, layer, out);
        }
        out.set_rows(qkv.rows());
        let norms = of_heads(norms)?;
        let place = self.position(cache);
        let (n, s) = (self.sequences, self.stream.raw());
        // SAFETY: `partial` has the size the kernels asked for; the rest as above.
        unsafe {
            self.kernels.attend_one(
                qkv.ptr(),
                norms,
                place,
                self.layer(cache, layer),
                self.partial.ptr(),
                out.ptr(),
                n,
                s,
            )
        }
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
        if let Logits::Rows(_) = which {
            return Err(Error::new(Code::Unsupported, "logits of some rows of a step on a CUDA device"));
        }
        let every = which == Logits::All || self.step == Step::Decode;
        let first = if every { 0 } else { x.rows() - 1 };
        let rows = x.rows() - first;
        scratch.set_rows(rows);
        out.set_rows(rows);
        let s = self.stream.raw();
        match head {
            Head::Product(linear) => {
                let fused = Fusion { norm: Some(norm.fused()?), ..Fusion::default() };
                if linear.fuses(rows, fused.set()) {
                    return self.products(x.view(first)?, linear, &fused, out);
                }
                let to = (scratch.ptr(), scratch.dtype());
                // SAFETY: rows `first..` of x, and as many of scratch.
                unsafe { self.kernels.norm(x.row(first), norm.pair(), to, (rows, x.width()), s)? };
                self.products(scratch.view(0)?, linear, &Fusion::default(), out)
            }
            Head::Dense(table) => {
                // Tensor cores multiply two values of one type, so x takes the table's, unless f32 was asked
                // for.
                let exact = self.kernels.dtype == DType::F32 || table.dtype == DType::F32;
                let to = match exact {
                    true => (self.scratch.exact, DType::F32),
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

    fn commit(&mut self, cache: &mut CudaCache, rows: usize) -> Result<()> {
        // Sequences that share a cache have lengths of their own, which their engine keeps.
        if self.sequences == 1 {
            cache.advance(rows);
        }
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
        let mut flag = [0u32];
        let at = (self.state.non_finite() - self.state.buffer.ptr()) as usize;
        self.state.buffer.upload(at, &flag)?;
        let count = slot.rows() * slot.width();
        // SAFETY: the slot holds `count` elements.
        unsafe {
            let x = (slot.ptr(), slot.dtype());
            self.kernels.finite(x, count, self.state.non_finite(), self.stream.raw())?;
        }
        self.stream.synchronize()?;
        self.state.buffer.download(at, &mut flag)?;
        if flag == [0] {
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
        self.products(x.view(0)?, weight, &Fusion { norm, gate, accumulate }, out)
    }
}
