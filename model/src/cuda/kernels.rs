//! Launching the model's own kernels: everything between two products. `cuda/*.cu` document their arguments.
use crate::batch::PAGE;
use crate::executor::Shape;
use q4_core::{Code, DType, Error, Result};
use q4_cuda::{Gpu, Kernel, Kernels, Launch, Mirror, Source, mirror};
use std::sync::Arc;

macro_rules! source {
    ($name:literal, $file:literal) => {
        Source {
            name: $name,
            text: include_str!(concat!("../../cuda/", $file)),
            files: q4_cuda::files!("../../cuda/", "elements.cuh", "pages.cuh", "runs.cuh", "sample.cu"),
        }
    };
}

const ROWS: Source = source!("rows", "rows.cu");
const ATTENTION: Source = source!("attention", "attention.cu");
const PREFILL: Source = source!("prefill", "prefill.cu");
/// With `wgmma`.
const PREFILL_WIDE: Source = source!("prefill_wide", "prefill_wide.cu");
const HEAD: Source = source!("head", "head.cu");
pub(super) const SAMPLE: Source = source!("sample", "draw.cu");

/// Where a head's rotation is: `cos` and `sin`, f32 `[context, head_dim / 2]` each.
pub type Rope = (u64, u64);

/// Where `argmax` keeps and leaves what it does, for the first of its sequences.
#[derive(Clone, Copy)]
pub struct Chosen {
    /// u64 per sequence and block, zero at first.
    pub keys: u64,
    /// Blocks of a sequence.
    pub blocks: u32,
    /// u32 per sequence, and below: launches.
    pub turns: u64,
    /// What it chooses.
    pub token: u64,
    /// The next step's position.
    pub position: u64,
    /// Why nothing was chosen.
    pub flags: u64,
    /// Records handed over.
    pub records: u64,
    /// Where they go.
    pub out: u64,
    /// Records of half of it.
    pub stride: u32,
    /// The next step's input.
    pub embedding: Embedding,
}

mirror! {
    /// `Embedding` of `cuda/sample.cu`.
    pub struct Embedding { table: u64, hidden: u64, width: i32, kind: i32 }

    /// `Pages` of `cuda/pages.cuh`, the same for every layer of a step.
    pub struct Pages { position: u64, lists: u64, numbers: u64, page_stride: u64, head_stride: u64 }

    /// Of `argmax`.
    pub(super) struct Argmax {
        logits: u64, vocab: i32, rows: u32, keys: u64, turns: u64, token: u64, position: u64, flags: u64,
        records: u64, out: u64, stride: u32, embedding: Embedding,
    }
    struct Embed { table: u64, ids: u64, out: u64, width: i32 }
    struct Norm { x: u64, weight: u64, eps: f32, out: u64, width: i32 }
    struct Finite { x: u64, count: u64, flag: u64 }
    struct Add { x: u64, residual: u64, count: u64 }
    struct Gather { x: u64, order: u64, out: u64, width: i32 }
    struct SiluMul { gate_up: u64, out: u64, width: i32 }
    struct RotateAppend {
        qkv: u64, q_weight: u64, k_weight: u64, eps: f32, cosine: u64, sine: u64, pages: Pages, keys: u64,
        values: u64, q: u64, heads: i32, kv_heads: i32, dim: i32,
    }
    struct Attend {
        q: u64, keys: u64, values: u64, pages: Pages, out: u64, heads: i32, kv_heads: i32, dim: i32, scale: f32,
    }
    struct AttendOne {
        qkv: u64, q_weight: u64, k_weight: u64, eps: f32, cosine: u64, sine: u64, pages: Pages, keys: u64,
        values: u64, partial: u64, out: u64, heads: i32, kv_heads: i32, scale: f32,
    }
    struct AttendMany {
        q: u64, keys: u64, values: u64, pages: Pages, runs: u64, out: u64, heads: i32, kv_heads: i32, scale: f32,
    }
    struct Head { table: u64, x: u64, out: u64, vocab: i32, width: i32, rows: i32 }
    struct HeadExact { table: u64, x: u64, out: u64, vocab: i32, width: i32 }
}

impl Embedding {
    /// Rows of `table` become f32 `[sequences, width]` at `hidden`.
    pub fn new((table, dtype): (u64, DType), hidden: u64, width: usize) -> Self {
        Self { table, hidden, width: width as i32, kind: index(dtype) as i32 + 1 }
    }
    /// Nothing is embedded.
    pub fn none() -> Self {
        Self { table: 0, hidden: 0, width: 0, kind: 0 }
    }
}

impl Pages {
    /// One sequence alone, `capacity` positions: row 0 stands at the word `position`.
    pub fn alone(position: u64, capacity: usize, head_dim: usize) -> Self {
        let head_stride = (capacity * head_dim) as u64;
        Self { position, lists: 0, numbers: 0, page_stride: 0, head_stride }
    }
    /// Many sequences, in pages: the words of every row, and the page numbers their lists are among.
    pub fn shared((position, lists, numbers): (u64, u64, u64), kv_heads: usize, head_dim: usize) -> Self {
        let head_stride = (PAGE * head_dim) as u64;
        Self { position, lists, numbers, page_stride: kv_heads as u64 * head_stride, head_stride }
    }
    /// The rows from `row` on, of many sequences.
    pub fn behind(self, row: usize) -> Self {
        let by = 4 * row as u64;
        Self { position: self.position + by, lists: self.lists + by, ..self }
    }
}

/// Blocks of `argmax` for each of `sequences` sequences: what the device runs at once, at most a load a
/// thread.
pub(super) fn argmax_blocks(gpu: &Gpu, vocab: usize, sequences: usize) -> u32 {
    (8 * gpu.processors as usize / sequences).clamp(1, vocab.div_ceil(1024)) as u32
}

/// See [`ModelKernels::argmax`].
///
/// # Safety
/// As there.
pub(super) unsafe fn launch_argmax(
    argmax: &Kernel<Argmax>,
    (logits, vocab): (u64, usize),
    rows: usize,
    to: Chosen,
    sequences: usize,
    stream: usize,
) -> Result<()> {
    let (vocab, rows) = (vocab as i32, rows as u32);
    let how = Launch::overlapping([to.blocks as usize, sequences, 1], 256, 0, stream);
    let Chosen { keys, turns, token, position, flags, records, out, stride, embedding, .. } = to;
    let args =
        Argmax { logits, vocab, rows, keys, turns, token, position, flags, records, out, stride, embedding };
    // SAFETY: by contract.
    unsafe { argmax.launch(how, args) }
}

/// The kernels of one model, for one element type.
pub struct ModelKernels {
    pub(super) gpu: Arc<Gpu>,
    pub(super) shape: Shape,
    /// What products read and write.
    pub(super) dtype: DType,
    embed: [Kernel<Embed>; 3],
    norm: [Kernel<Norm>; 3],
    finite: [Kernel<Finite>; 3],
    add: Kernel<Add>,
    gather: Kernel<Gather>,
    silu_mul: Kernel<SiluMul>,
    rotate_append: Kernel<RotateAppend>,
    attention: Kernel<Attend>,
    /// Tensor-core attention: one token of each sequence, and many rows of some.
    fast: Option<(Decode, Prefill)>,
    head: [Kernel<Head>; 4],
    head_f16: [Kernel<Head>; 4],
    head_exact: [Kernel<HeadExact>; 3],
    argmax: Kernel<Argmax>,
}

/// Attention of one token of each sequence.
struct Decode {
    kernel: Kernel<AttendOne>,
    shared: u32,
}

impl Decode {
    /// Bytes of a warp's 16 positions.
    fn tile(head_dim: usize) -> usize {
        32 * (2 * head_dim + if head_dim.is_multiple_of(64) { 0 } else { 16 })
    }
    /// Tiles a warp has room for: two, or one where the device has too little beside q, the new token and
    /// what warps share.
    fn slots(gpu: &Gpu, head_dim: usize) -> usize {
        let room = (gpu.shared as usize).saturating_sub(20 * head_dim + 1024);
        (room / (8 * Self::tile(head_dim))).clamp(1, 2)
    }
    fn load(gpu: &Arc<Gpu>, attention: &Kernels, head_dim: usize, t: &str) -> Result<Self> {
        let shared = (8 * Self::slots(gpu, head_dim) * Self::tile(head_dim)) as u32;
        Ok(Self { kernel: attention.get_with(&format!("decode_{t}"), shared)?, shared })
    }
}

/// Attention of many rows of sequences, 128 rows of a head a block.
struct Prefill {
    kernel: Kernel<AttendMany>,
    threads: u32,
    shared: u32,
}

impl Prefill {
    fn load(gpu: &Arc<Gpu>, head_dim: usize, option: &str, t: &str) -> Result<Self> {
        let wide = gpu.arch.wgmma && matches!(head_dim, 64 | 128);
        let (source, stem, threads, shared) = match wide {
            true => (&PREFILL_WIDE, "prefill_wide", 384, 1024 + 5 * 256 * head_dim + 1152),
            false => (&PREFILL, "prefill", 256, 4 * 64 * (2 * head_dim + 16)),
        };
        let (kernels, shared) = (Kernels::load(gpu, source, &[option])?, shared as u32);
        Ok(Self { kernel: kernels.get_with(&format!("{stem}_{t}"), shared)?, threads, shared })
    }
}

fn not_fast() -> Error {
    Error::new(Code::Internal, "attention on tensor cores for a head size they do not have")
}

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn name(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::BF16 => Ok("bf16"),
        DType::F16 => Ok("f16"),
        other => {
            Err(Error::new(Code::TensorType, "activations").need("f32, f16 or bf16").have(other.as_str()))
        }
    }
}

fn index(dtype: DType) -> usize {
    TYPES.iter().position(|t| *t == dtype).unwrap_or(0)
}

/// By [`index`].
fn of<A: Mirror>(kernels: &Kernels, stem: &str) -> Result<[Kernel<A>; 3]> {
    let get = |t| kernels.get(&format!("{stem}_{t}"));
    Ok([get("f32")?, get("bf16")?, get("f16")?])
}

impl ModelKernels {
    /// Compiles or loads them. `dtype` is the element type of what products read and write.
    pub fn load(gpu: &Arc<Gpu>, shape: &Shape, dtype: DType) -> Result<Self> {
        let t = name(dtype)?;
        let dim = format!("-DHEAD_DIM={}", shape.head_dim);
        let tensor_cores = matches!(shape.head_dim, 64 | 80 | 96 | 128) && dtype != DType::F32;
        let slots = format!("-DSLOTS={}", Decode::slots(gpu, shape.head_dim));
        let options = [dim.as_str(), slots.as_str()];
        let options = if tensor_cores { &options[..] } else { &[] };
        let sources = [(&ROWS, &[][..]), (&ATTENTION, options), (&HEAD, &[]), (&SAMPLE, &[])];
        // What is not on disk yet compiles side by side.
        let (loaded, prefill) = std::thread::scope(|scope| {
            let start = |(source, options)| scope.spawn(move || Kernels::load(gpu, source, options));
            let loads = sources.map(start);
            let prefill = tensor_cores.then(|| Prefill::load(gpu, shape.head_dim, &dim, t)).transpose();
            (loads.map(|l| l.join().map_err(|_| Error::new(Code::Internal, "loading kernels"))), prefill)
        });
        let [rows, attention, head, sample] = loaded;
        let (rows, attention, head, sample) = (rows??, attention??, head??, sample??);
        let fast = match prefill? {
            Some(prefill) => Some((Decode::load(gpu, &attention, shape.head_dim, t)?, prefill)),
            None => None,
        };
        let heads = |t: &str| -> Result<[Kernel<Head>; 4]> {
            let one = |n: u32| head.get(&format!("head_{t}_{n}"));
            Ok([one(1)?, one(2)?, one(4)?, one(8)?])
        };
        Ok(Self {
            gpu: gpu.clone(),
            shape: shape.clone(),
            dtype,
            embed: of(&rows, "embed")?,
            norm: of(&rows, "norm")?,
            finite: of(&rows, "finite")?,
            add: rows.get(&format!("add_{t}"))?,
            gather: rows.get(&format!("gather_{t}"))?,
            silu_mul: rows.get(&format!("silu_mul_{t}"))?,
            rotate_append: rows.get(&format!("rotate_append_{t}"))?,
            attention: attention.get(&format!("attention_{t}"))?,
            fast,
            head: heads("bf16")?,
            head_f16: heads("f16")?,
            head_exact: of(&head, "head_exact")?,
            argmax: sample.get("argmax")?,
        })
    }

    /// Heads of queries, of keys and values, and the size of one, as kernels take them.
    fn heads(&self) -> [i32; 3] {
        [self.shape.heads, self.shape.kv_heads, self.shape.head_dim].map(|n| n as i32)
    }

    /// What scores are multiplied with.
    fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    /// Query heads of one key/value head that a block of `decode` takes, at most 8, make a group.
    fn groups(&self) -> usize {
        (self.shape.heads / self.shape.kv_heads).div_ceil(8)
    }

    /// Pieces a sequence's positions are cut into, so that a step fills the device.
    fn splits(&self, sequences: usize) -> usize {
        (self.gpu.processors as usize / (self.shape.kv_heads * self.groups() * sequences)).clamp(1, 32)
    }

    /// Bytes of partial results that [`ModelKernels::attend_one`] needs for up to so many sequences; they
    /// start at zero.
    pub fn attention_scratch(&self, sequences: usize) -> usize {
        let heads = self.shape.kv_heads * self.groups();
        let of = |n: usize| n * heads * (self.splits(n) * 16 * self.shape.head_dim + 4) * 4;
        (1..=sequences).map(of).max().unwrap_or(0)
    }

    /// Whether [`ModelKernels::attend_one`] and [`ModelKernels::attend_many`] can be used.
    pub fn attends_fast(&self) -> bool {
        self.fast.is_some()
    }

    /// `out[r] = table[ids[r]]`; ids below the table's rows were checked by the host.
    ///
    /// # Safety
    /// Addresses are of device memory of the sizes `embed_T` documents; so below.
    pub unsafe fn embed(
        &self,
        (table, dtype): (u64, DType),
        ids: u64,
        out: u64,
        rows: usize,
        s: usize,
    ) -> Result<()> {
        let width = self.shape.hidden;
        let how = Launch::overlapping([rows, width.div_ceil(1024), 1], 256, 0, s);
        let width = width as i32;
        // SAFETY: by contract.
        unsafe { self.embed[index(dtype)].launch(how, Embed { table, ids, out, width }) }
    }

    /// `out = T(x / rms(x) * weight)`, `[rows, width]`; in place where both are the same.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn norm(
        &self,
        x: u64,
        (weight, eps): (u64, f32),
        (out, dtype): (u64, DType),
        (rows, width): (usize, usize),
        s: usize,
    ) -> Result<()> {
        let how = Launch::overlapping([rows, 1, 1], 256, 0, s);
        let width = width as i32;
        // SAFETY: by contract.
        unsafe { self.norm[index(dtype)].launch(how, Norm { x, weight, eps, out, width }) }
    }

    /// `residual += x`, `count` elements.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn add(&self, x: u64, residual: u64, count: usize, s: usize) -> Result<()> {
        let how = Launch::overlapping([count.div_ceil(1024), 1, 1], 256, 0, s);
        let count = count as u64;
        // SAFETY: by contract.
        unsafe { self.add.launch(how, Add { x, residual, count }) }
    }

    /// `out[r, i] = x[r, order[i]]`, `[rows, width]` of what products read.
    ///
    /// # Safety
    /// As above; the order's numbers are below `width`, and out is not x.
    pub unsafe fn gather(
        &self,
        x: u64,
        order: u64,
        out: u64,
        (rows, width): (usize, usize),
        s: usize,
    ) -> Result<()> {
        let how = Launch::overlapping([width.div_ceil(1024), rows, 1], 256, 0, s);
        let width = width as i32;
        // SAFETY: by contract.
        unsafe { self.gather.launch(how, Gather { x, order, out, width }) }
    }

    /// `out[rows, width] = silu(gate) * up`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn silu_mul(&self, gate_up: u64, out: u64, rows: usize, width: usize, s: usize) -> Result<()> {
        let how = Launch::overlapping([width.div_ceil(1024), rows, 1], 256, 0, s);
        let width = width as i32;
        // SAFETY: by contract.
        unsafe { self.silu_mul.launch(how, SiluMul { gate_up, out, width }) }
    }

    /// Norms and rotates q and k, writes q to `q`, appends k and v.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn rotate_append(
        &self,
        qkv: u64,
        (q_weight, k_weight, eps): (u64, u64, f32),
        ((cosine, sine), pages): (Rope, Pages),
        (keys, values): (u64, u64),
        q: u64,
        rows: usize,
        s: usize,
    ) -> Result<()> {
        let [heads, kv_heads, dim] = self.heads();
        let grid = [rows, (self.shape.heads + 2 * self.shape.kv_heads).div_ceil(8), 1];
        let how = Launch::overlapping(grid, 256, 0, s);
        let args = RotateAppend {
            qkv,
            q_weight,
            k_weight,
            eps,
            cosine,
            sine,
            pages,
            keys,
            values,
            q,
            heads,
            kv_heads,
            dim,
        };
        // SAFETY: by contract.
        unsafe { self.rotate_append.launch(how, args) }
    }

    /// Attention of `rows` queries whose keys and values were appended, one by one.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn attend(
        &self,
        q: u64,
        pages: Pages,
        (keys, values): (u64, u64),
        out: u64,
        rows: usize,
        s: usize,
    ) -> Result<()> {
        let [heads, kv_heads, dim] = self.heads();
        let how = Launch::overlapping([self.shape.heads, rows, 1], 256, 0, s);
        let args = Attend { q, keys, values, pages, out, heads, kv_heads, dim, scale: self.scale() };
        // SAFETY: by contract.
        unsafe { self.attention.launch(how, args) }
    }

    /// The same, of `count` `Run`s of `cuda/runs.cuh` at `runs`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn attend_many(
        &self,
        q: u64,
        pages: Pages,
        (keys, values): (u64, u64),
        out: u64,
        (runs, count): (u64, usize),
        s: usize,
    ) -> Result<()> {
        let Some((_, prefill)) = &self.fast else { return Err(not_fast()) };
        let [heads, kv_heads, _] = self.heads();
        let how = Launch::overlapping([self.shape.heads, count, 1], prefill.threads, prefill.shared, s);
        let args = AttendMany { q, keys, values, pages, runs, out, heads, kv_heads, scale: self.scale() };
        // SAFETY: by contract.
        unsafe { prefill.kernel.launch(how, args) }
    }

    /// One token of each of `sequences` sequences: norms, rotation, append and attention in one kernel.
    ///
    /// # Safety
    /// As above; `partial` has the size of [`ModelKernels::attention_scratch`].
    pub unsafe fn attend_one(
        &self,
        qkv: u64,
        (q_weight, k_weight, eps): (u64, u64, f32),
        ((cosine, sine), pages): (Rope, Pages),
        (keys, values): (u64, u64),
        partial: u64,
        out: u64,
        sequences: usize,
        s: usize,
    ) -> Result<()> {
        let Some((decode, _)) = &self.fast else { return Err(not_fast()) };
        let [heads, kv_heads, _] = self.heads();
        let grid = [self.splits(sequences), self.shape.kv_heads * self.groups(), sequences];
        let how = Launch::overlapping(grid, 256, decode.shared, s);
        let args = AttendOne {
            qkv,
            q_weight,
            k_weight,
            eps,
            cosine,
            sine,
            pages,
            keys,
            values,
            partial,
            out,
            heads,
            kv_heads,
            scale: self.scale(),
        };
        // SAFETY: by contract.
        unsafe { decode.kernel.launch(how, args) }
    }

    /// `out = x table^T` with 16-bit `x` of the table's type, or f32 `x`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn head(
        &self,
        (table, dtype): (u64, DType),
        (x, x_type): (u64, DType),
        out: u64,
        rows: usize,
        s: usize,
    ) -> Result<()> {
        let (vocab, width) = (self.shape.vocab as i32, self.shape.hidden as i32);
        if x_type == DType::F32 {
            let how = Launch::overlapping([self.shape.vocab.div_ceil(8), rows, 1], 256, 0, s);
            let args = HeadExact { table, x, out, vocab, width };
            // SAFETY: by contract.
            return unsafe { self.head_exact[index(dtype)].launch(how, args) };
        }
        let which = [1usize, 2, 4, 8].iter().position(|n| 8 * n >= rows).unwrap_or(3);
        let kernel = if dtype == DType::F16 { &self.head_f16[which] } else { &self.head[which] };
        let per_block = 8usize << which;
        let grid = [self.shape.vocab.div_ceil(128), rows.div_ceil(per_block), 1];
        let how = Launch::overlapping(grid, 256, 0, s);
        let rows = rows as i32;
        // SAFETY: by contract.
        unsafe { kernel.launch(how, Head { table, x, out, vocab, width, rows }) }
    }

    /// The largest logit of every sequence: writes and embeds `token`, steps `position` by `rows`, sets
    /// `flags`, and hands the token over.
    ///
    /// # Safety
    /// As above; see `argmax` for the sizes.
    pub unsafe fn argmax(
        &self,
        logits: u64,
        rows: usize,
        to: Chosen,
        sequences: usize,
        s: usize,
    ) -> Result<()> {
        // SAFETY: by contract.
        unsafe { launch_argmax(&self.argmax, (logits, self.shape.vocab), rows, to, sequences, s) }
    }

    /// Sets `flag` to 1 when one of `count` elements is not finite.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn finite(&self, (x, dtype): (u64, DType), count: usize, flag: u64, s: usize) -> Result<()> {
        let how = Launch::overlapping([count.div_ceil(1024).clamp(1, 1024), 1, 1], 256, 0, s);
        let count = count as u64;
        // SAFETY: by contract.
        unsafe { self.finite[index(dtype)].launch(how, Finite { x, count, flag }) }
    }
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    for t in ["bf16", "f16"] {
        let of = |stem: &str| format!("{stem}_{t}");
        ROWS.takes::<Embed>(&of("embed"))?;
        ROWS.takes::<Norm>(&of("norm"))?;
        ROWS.takes::<Finite>(&of("finite"))?;
        ROWS.takes::<Add>(&of("add"))?;
        ROWS.takes::<Gather>(&of("gather"))?;
        ROWS.takes::<SiluMul>(&of("silu_mul"))?;
        ROWS.takes::<RotateAppend>(&of("rotate_append"))?;
        ATTENTION.takes::<Attend>(&of("attention"))?;
        ATTENTION.takes::<AttendOne>(&of("decode"))?;
        PREFILL.takes::<AttendMany>(&of("prefill"))?;
        PREFILL_WIDE.takes::<AttendMany>(&of("prefill_wide"))?;
        HEAD.takes::<Head>(&format!("head_{t}_8"))?;
        HEAD.takes::<HeadExact>(&of("head_exact"))?;
    }
    SAMPLE.takes::<Argmax>("argmax")
}

#[test]
fn pages_have_as_many_positions_there() {
    assert!(include_str!("../../cuda/pages.cuh").contains(&format!("constexpr u32 PAGE = {PAGE};")));
}

#[test]
fn kernels_compile_for_old_devices_and_new() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    for arch in q4_cuda::Arch::majors().filter(q4_cuda::Arch::is_known) {
        for source in [&ROWS, &HEAD, &SAMPLE, &ATTENTION] {
            source.compile(&arch, &[])?;
        }
        for dim in [64, 80, 96, 128] {
            let dim = format!("-DHEAD_DIM={dim}");
            for slots in ["-DSLOTS=1", "-DSLOTS=2"] {
                ATTENTION.compile(&arch, &[&dim, slots])?;
            }
            PREFILL.compile(&arch, &[&dim])?;
        }
    }
    for dim in ["-DHEAD_DIM=64", "-DHEAD_DIM=128"] {
        PREFILL_WIDE.compile(&q4_cuda::HOPPER, &[dim])?;
    }
    Ok(())
}
