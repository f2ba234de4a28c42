//! Launchers of `cuda/gemm.cu`: products of many rows on sm_90, with any fusion.
use super::Weight;
use super::forward::{Call, Fast, Fuse};
use super::simple::{self, Stored};
use crate::call::Mat;
use q4_core::{ActGlobal, Activations, Code, DType, Error, FuseSet, Result};
use q4_cuda::{Gpu, Kernel, Launch, Source, TensorMap, args};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, OnceLock};

macro_rules! source {
    ($name:literal, $($file:literal),+) => {
        Source {
            name: $name,
            text: concat!(
                include_str!("../../cuda/layout.cu"),
                include_str!("../../cuda/elements.cu"),
                $(include_str!(concat!("../../cuda/", $file))),+
            ),
        }
    };
}
const GEMM: Source = source!("nvfp4-gemm", "wgmma.cu", "copy.cu", "work.cu", "output.cu", "gemm.cu");
const ORDER: Source = source!("nvfp4-order", "order.cu");
/// Calls of fewer rows are for others.
const LEAST: usize = 17;
/// Rows of x of a tile; each compiles to kernels of its own.
const TOKENS: [usize; 4] = [32, 64, 128, 256];
/// The most pairs of blocks that share a tile through memory, as in gemm.cu.
const SHARES: usize = 8;
/// Bytes of outputs that a warp puts together, as in gemm.cu.
const WRITTEN: usize = 2048;
/// Blocks of a cluster that share k, as in gemm.cu; each compiles to kernels of its own.
const PIECES: [usize; 3] = [1, 2, 4];
/// Of 66 pairs of blocks, how many tiles that many pairs may share without another round: clusters leave a few
/// multiprocessors of a group of them alone.
const FITTING: [usize; 3] = [66, 30, 14];
/// Rows of x of a tile whose sums they send each other.
const SENT: usize = 64;

/// The two functions of gemm.cu.
struct Pair {
    plain: Kernel,
    gate: Kernel,
}

/// Kernels for calls of many rows. A size is compiled when a call first needs it.
pub struct Kernels {
    gpu: Arc<Gpu>,
    quantise: simple::Kernels,
    /// By size, then pieces, then bf16 and f16.
    pairs: [[[OnceLock<Pair>; 2]; PIECES.len()]; TOKENS.len()],
    order: [Kernel; 5],
    order_codes: [Kernel; 2],
    /// What a flag of gemm.cu is when it is set: 64 random bits, which no workspace has before.
    key: u64,
}

/// Index into [`TOKENS`] of a call of `m` rows.
fn size_of(m: usize) -> usize {
    TOKENS.iter().position(|t| m <= *t).unwrap_or(TOKENS.len() - 1)
}

/// `SETS` of gemm.cu.
fn sets_of(tokens: usize) -> usize {
    if tokens <= 64 { 2 } else { 1 }
}

/// `SHARED` of gemm.cu.
fn shared_of(tokens: usize, pieces: usize) -> u32 {
    let sets = sets_of(tokens);
    let packs = if tokens == 256 { 5 } else { 8 };
    let meeting = if sets == 2 { 512 * tokens } else { 0 };
    let arriving = (pieces - 1) * (tokens / pieces) * 512;
    let others = 16 + 8 * WRITTEN + meeting + arriving + packs * (9216 + 16);
    let stage = tokens * 128 + 16;
    let stages = ((232_448 - others) / stage / sets * sets).min(16);
    (stages * stage + others) as u32
}

/// `THREADS` of gemm.cu: the warpgroups that multiply, and one that brings.
fn threads_of(tokens: usize) -> u32 {
    256 * sets_of(tokens) as u32 + 128
}

/// Where the parts of the workspace lie, in bytes.
struct Room {
    ordered: usize,
    partial: usize,
    flags: usize,
    q: usize,
    steps: usize,
    global: usize,
    all: usize,
}

impl Kernels {
    /// Compiles or finds them; `None` where the device has no wgmma.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Option<Self>> {
        if gpu.capability != (9, 0) {
            return Ok(None);
        }
        let all = q4_cuda::Kernels::load(gpu, &ORDER, &[])?;
        let names = ["order_bf16", "order_f16", "order_f32_bf16", "order_f32_f16", "order_f32_parts"];
        let mut order = Vec::new();
        for name in names {
            order.push(all.get(name)?);
        }
        let order = order.try_into().map_err(|_| Error::new(Code::Internal, "kernels that order x"))?;
        let order_codes = [all.get("order_codes")?, all.get("order_codes_parts")?];
        let quantise = simple::Kernels::load(gpu)?;
        let key = RandomState::new().build_hasher().finish();
        Ok(Some(Self { gpu: gpu.clone(), quantise, pairs: Default::default(), order, order_codes, key }))
    }

    fn pair(&self, size: usize, pieces: usize, half: bool) -> Result<&Pair> {
        let place = &self.pairs[size][pieces][usize::from(half)];
        if let Some(pair) = place.get() {
            return Ok(pair);
        }
        let element = if half { "-DELEMENT=f16" } else { "-DELEMENT=bf16" };
        let [tokens, pieces] = [TOKENS[size], PIECES[pieces]];
        let options = [&format!("-DTN={tokens}"), &format!("-DKS={pieces}"), element];
        let all = q4_cuda::Kernels::load(&self.gpu, &GEMM, &options)?;
        let get = |name: &str| {
            let kernel = all.get(name)?;
            kernel.allow_shared(shared_of(tokens, pieces))?;
            Ok::<_, Error>(kernel)
        };
        let pair = Pair { plain: get("gemm")?, gate: get("gemm_gate")? };
        Ok(place.get_or_init(|| pair))
    }

    fn room(&self, w: &Weight, m: usize) -> Room {
        let next = |from: usize, bytes: usize| (from + bytes).next_multiple_of(256);
        let ordered = 0;
        let partial = next(ordered, m * w.slabs * 64 * parts(w) * 2);
        let blocks = self.gpu.processors as usize;
        let flags = next(partial, blocks * 128 * TOKENS[size_of(m)] * 4);
        let q = next(flags, blocks * 128);
        let quantised = if w.activations == Activations::Native { 0 } else { m * w.k };
        let steps = next(q, quantised);
        let global = next(steps, quantised / 4);
        Room { ordered, partial, flags, q, steps, global, all: next(global, 4) }
    }

    /// x as the copy engine can read it: as it is, or written to the workspace.
    unsafe fn stage(&self, w: &Weight, c: &Call, room: &Room) -> Result<Staged> {
        let how = |grid: usize| Launch {
            grid: [grid as u32, 1, 1],
            block: [256, 1, 1],
            shared: 0,
            stream: c.stream,
            overlap: true,
        };
        let (m, k, padded) = (c.x.rows, w.k as u32, (w.slabs * 64) as u32);
        let out = c.workspace + room.ordered as u64;
        let (q, steps, global) =
            (c.workspace + room.q as u64, c.workspace + room.steps as u64, c.workspace + room.global as u64);
        let element = if is_half(w) { DType::F16 } else { DType::BF16 };
        let columns = padded as usize * parts(w);
        let written =
            |global, convention| Staged { x: out, element, shape: [m, columns, columns], global, convention };
        // SAFETY: forwarded; the arguments are those of the kernels.
        unsafe {
            if w.activations == Activations::Native {
                let is_readable = c.x.address() % 16 == 0 && (m == 1 || c.x.ld * 2 % 16 == 0);
                if c.fuse.norm.is_none() && c.x.dtype == element && is_readable {
                    let shape = [m, w.k, c.x.ld.next_multiple_of(8)];
                    return Ok(Staged { x: c.x.address(), element, shape, global: 0, convention: 0 });
                }
                let kernel = match (c.x.dtype, w.x) {
                    (DType::BF16, _) => 0,
                    (DType::F16, _) => 1,
                    (_, DType::BF16) => 2,
                    (_, DType::F16) => 3,
                    _ => 4,
                };
                let (weight, eps) = c.fuse.norm.unwrap_or((0, 0.0));
                let ld = c.x.ld as u64;
                let x = c.x.address();
                self.order[kernel].launch(how(m), args![x, ld, k, out, padded, weight, eps])?;
                return Ok(written(0, 0));
            }
            let (kernel, factor, at, convention) = match w.activations {
                Activations::Nvfp4(act) => {
                    let at = match act.global {
                        ActGlobal::None => 0,
                        ActGlobal::Static(g) => {
                            self.quantise.set_global(g, global, c.stream)?;
                            global
                        }
                        ActGlobal::PerCall => {
                            self.quantise.global_of(&c.x, act.rule, w.x, global, c.stream)?;
                            global
                        }
                    };
                    let to = Stored { q, steps, ..Stored::default() };
                    self.quantise.nvfp4(&c.x, act.rule, w.x, at, &to, c.stream)?;
                    let convention = if at == 0 { 0 } else { simple::convention(act.rule) };
                    (&self.order_codes[0], 0.5f32, at, convention)
                }
                _ => {
                    self.quantise.int8(&c.x, q, steps, c.stream)?;
                    (&self.order_codes[1], 1.0f32, 0, 0)
                }
            };
            kernel.launch(how(m), args![q, steps, k, out, padded, factor])?;
            Ok(written(at, convention))
        }
    }
}

/// x as the copy engine reads it: address, type, `[rows, columns, elements between rows]`, and the address and convention of
/// its per-tensor scale.
struct Staged {
    x: u64,
    element: DType,
    shape: [usize; 3],
    global: u64,
    convention: u32,
}

/// Whether products are of f16 numbers.
fn is_half(w: &Weight) -> bool {
    w.activations == Activations::Native && w.x == DType::F16
}

/// Summands of x in bf16: f32 needs three to be exact, and so do integers with f32 scales.
fn parts(w: &Weight) -> usize {
    match (w.activations, w.x) {
        (Activations::Native, DType::F32) | (Activations::Int8, _) => 3,
        _ => 1,
    }
}

/// Whether 16 bytes of y can be written at once, wherever eight rows of a token start.
fn aligned(y: &Mat) -> bool {
    y.address() % 16 == 0 && y.ld * y.dtype.size() % 16 == 0
}

/// Gate and up rows start a group each.
fn has_gate(w: &Weight) -> bool {
    let half = w.n / 2;
    w.n % 2 == 0 && (half % 16 == 0 || (w.spans.len() == 2 && w.spans[0].end == half))
}

impl Fast for Kernels {
    fn takes(&self, w: &Weight, m: usize, set: FuseSet) -> bool {
        let fuse = |part: FuseSet| set.0 & part.0 != 0;
        m >= LEAST
            && (!fuse(FuseSet::GATE) || has_gate(w))
            && (!fuse(FuseSet::NORM) || w.activations == Activations::Native)
    }

    fn workspace(&self, w: &Weight, m: usize) -> usize {
        if m < LEAST { 0 } else { self.room(w, m).all }
    }

    unsafe fn forward(&self, w: &Weight, c: &Call) -> Result<()> {
        let room = self.room(w, c.x.rows);
        let clusters = self.gpu.processors as usize / 2;
        let m = c.x.rows;
        let size = size_of(m);
        let tokens = TOKENS[size];
        let Fuse { gate, accumulate, .. } = c.fuse;
        let (groups, units, parts) = (w.padded / 16, w.slabs / 2, parts(w));
        let pairs = if gate { (groups / 2).div_ceil(8) } else { groups.div_ceil(16) };
        let token_tiles = m.div_ceil(tokens);
        let Deal { grid, whole, shares, pieces } = deal(pairs * token_tiles, units * parts, clusters, tokens);
        // SAFETY: forwarded.
        let x = unsafe { self.stage(w, c, &room)? };
        let out: u32 = match (accumulate, c.y.dtype) {
            (true, _) => 1,
            (_, DType::BF16) => 2,
            (_, DType::F16) => 3,
            _ => 0,
        };
        let pair = self.pair(size, pieces, is_half(w))?;
        let kernel = if gate { &pair.gate } else { &pair.plain };
        let x_map = TensorMap::new(x.x, x.element, x.shape, [64, tokens / 2])?;
        let units_map =
            TensorMap::of_words(w.codes, [groups, units, 144], [if gate { 4 } else { 8 }, 1, 144])?;
        let how = Launch {
            grid: [(2 * PIECES[pieces] * grid) as u32, 1, 1],
            block: [threads_of(tokens), 1, 1],
            shared: shared_of(tokens, PIECES[pieces]),
            stream: c.stream,
            overlap: true,
        };
        let (partial, flags) = (c.workspace + room.partial as u64, c.workspace + room.flags as u64);
        let (y, ldy, aligned) = (c.y.address(), c.y.ld as u64, u32::from(aligned(&c.y)));
        let [m, groups, units, parts, whole, shares, pairs, token_tiles] =
            [m, groups, units, parts, whole, shares, pairs, token_tiles].map(|v| v as u32);
        // SAFETY: forwarded; the arguments are those of `gemm_*`, the workspace has the size that was asked for.
        unsafe {
            kernel.launch(
                how,
                args![
                    x_map,
                    units_map,
                    w.groups,
                    y,
                    ldy,
                    m,
                    groups,
                    units,
                    parts,
                    whole,
                    shares,
                    pairs,
                    token_tiles,
                    partial,
                    flags,
                    self.key,
                    out,
                    aligned,
                    x.global,
                    x.convention
                ],
            )
        }
    }
}

/// How pairs of tiles are dealt to clusters: pairs of blocks, or as many pairs as there are pieces.
#[derive(Debug)]
struct Deal {
    /// Clusters.
    grid: usize,
    /// Pairs of tiles that are dealt whole.
    whole: usize,
    /// Pairs of blocks that do each of the others together, as their last work.
    shares: usize,
    /// Index into [`PIECES`]: pairs of blocks of a cluster, which share the k of a tile.
    pieces: usize,
}

/// What sharing sums through memory takes longer than within a cluster, in units of k: measured.
const DETOUR: usize = 3;

fn deal(tiles: usize, units: usize, clusters: usize, tokens: usize) -> Deal {
    let rest = tiles % clusters;
    let shares = clusters.checked_div(rest).map_or(1, |s| s.min(SHARES).min(units));
    if tokens == SENT && tiles < clusters && shares > 1 {
        let fits = |p: usize| tiles * 66 <= FITTING[p] * clusters && PIECES[p] <= units;
        let alone = units.div_ceil(shares) + DETOUR;
        let best = (1..PIECES.len()).filter(|p| fits(*p)).max();
        if let Some(pieces) = best.filter(|p| units.div_ceil(PIECES[*p]) < alone) {
            return Deal { grid: tiles, whole: tiles, shares: 1, pieces };
        }
    }
    let whole = if shares == 1 { tiles } else { tiles - rest };
    Deal { grid: if tiles < clusters { tiles * shares } else { clusters }, whole, shares, pieces: 0 }
}

#[test]
fn every_unit_is_dealt_once() {
    for tiles in 1..300 {
        for units in [1, 2, 5, 20, 76] {
            for tokens in TOKENS {
                let d = deal(tiles, units, 66, tokens);
                let (rest, pieces) = (tiles - d.whole, PIECES[d.pieces]);
                assert!(d.grid * pieces <= 66 && rest * d.shares <= d.grid, "{tiles} {units} {d:?}");
                assert!(
                    d.whole >= d.grid || (d.whole == 0 && rest * d.shares == d.grid),
                    "{tiles} {units} {d:?}"
                );
                assert!((1..=SHARES.min(units)).contains(&d.shares), "{tiles} {units} {d:?}");
                assert!(pieces == 1 || (d.whole == tiles && pieces <= units), "{tiles} {units} {d:?}");
            }
        }
    }
}
