//! Launchers of `cuda/gemm.cu`: products of many rows on sm_90, with any fusion.
use super::Weight;
use super::forward::{Call, Fast, Fuse};
use super::simple::{self, Stored};
use crate::call::Mat;
use q4_core::{ActGlobal, Activations, Code, DType, Error, FuseSet, Result};
use q4_cuda::{Gpu, Kernel, Launch, Source, args};
use std::sync::{Arc, OnceLock};

macro_rules! source {
    ($name:literal, $file:literal) => {
        Source {
            name: $name,
            text: concat!(
                include_str!("../../cuda/layout.cu"),
                include_str!("../../cuda/elements.cu"),
                include_str!(concat!("../../cuda/", $file))
            ),
        }
    };
}
const GEMM: Source = source!("nvfp4-gemm", "gemm.cu");
const ORDER: Source = source!("nvfp4-order", "order.cu");
/// Calls of fewer rows are for others.
const LEAST: usize = 17;
/// Bytes of 128 tokens by 64 of k.
const BLOCK: usize = 16384;
/// What a choice of sizes compiles to: tokens and blocks of 64 rows of a warpgroup.
const SIZES: [(usize, usize); 4] = [(32, 1), (64, 1), (128, 1), (256, 1)];

/// The two functions of gemm.cu.
struct Pair {
    plain: Kernel,
    gate: Kernel,
}

/// Kernels for calls of many rows. A size is compiled when a call first needs it.
pub struct Kernels {
    gpu: Arc<Gpu>,
    quantise: simple::Kernels,
    /// By size, then bf16 and f16.
    pairs: [[OnceLock<Pair>; 2]; SIZES.len()],
    order: [Kernel; 5],
    order_codes: [Kernel; 2],
}

/// Index into [`SIZES`] of a call of `m` rows.
fn size_of(m: usize) -> usize {
    SIZES.iter().position(|s| m <= s.0).unwrap_or(SIZES.len() - 1)
}

/// `SHARED` of gemm.cu.
fn shared_of(tokens: usize) -> u32 {
    let stage = tokens * 128;
    let stages = (131_072 / stage).min(16);
    (stages * stage + 2 * 36_864 + 16 * stages) as u32
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
        Ok(Some(Self { gpu: gpu.clone(), quantise, pairs: Default::default(), order, order_codes }))
    }

    fn pair(&self, size: usize, half: bool) -> Result<&Pair> {
        let place = &self.pairs[size][usize::from(half)];
        if let Some(pair) = place.get() {
            return Ok(pair);
        }
        let (tokens, blocks) = SIZES[size];
        let element = if half { "-DELEMENT=f16" } else { "-DELEMENT=bf16" };
        let options = [format!("-DTN={tokens}"), format!("-DMB={blocks}")];
        let all = q4_cuda::Kernels::load(&self.gpu, &GEMM, &[&options[0], &options[1], element])?;
        let get = |name: &str| {
            let kernel = all.get(name)?;
            kernel.allow_shared(shared_of(tokens))?;
            Ok::<_, Error>(kernel)
        };
        let pair = Pair { plain: get("gemm")?, gate: get("gemm_gate")? };
        Ok(place.get_or_init(|| pair))
    }

    fn room(&self, w: &Weight, m: usize) -> Room {
        let next = |from: usize, bytes: usize| (from + bytes).next_multiple_of(256);
        let ordered = 0;
        let partial = next(ordered, m.div_ceil(128) * w.slabs * parts(w) * BLOCK);
        let blocks = self.gpu.processors as usize;
        let (tokens, rows) = SIZES[size_of(m)];
        let flags = next(partial, blocks * 128 * rows * tokens * 4);
        let q = next(flags, blocks * 8);
        let quantised = if w.activations == Activations::Native { 0 } else { m * w.k };
        let steps = next(q, quantised);
        let global = next(steps, quantised / 4);
        Room { ordered, partial, flags, q, steps, global, all: next(global, 4) }
    }

    /// x to tiles in the order of the layout. Returns the address and convention of its per-tensor scale.
    unsafe fn stage(&self, w: &Weight, c: &Call, room: &Room, flag_count: u32) -> Result<(u64, u32)> {
        let how = |grid: usize| Launch {
            grid: [grid as u32, 1, 1],
            block: [256, 1, 1],
            shared: 0,
            stream: c.stream,
            overlap: true,
        };
        let (m, k, units) = (c.x.rows, w.k as u32, (w.slabs / 2) as u32);
        let (out, flags) = (c.workspace + room.ordered as u64, c.workspace + room.flags as u64);
        let (q, steps, global) =
            (c.workspace + room.q as u64, c.workspace + room.steps as u64, c.workspace + room.global as u64);
        // SAFETY: forwarded; the arguments are those of the kernels.
        unsafe {
            if w.activations == Activations::Native {
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
                self.order[kernel]
                    .launch(how(m), args![x, ld, k, units, out, weight, eps, flags, flag_count])?;
                return Ok((0, 0));
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
            kernel.launch(how(m), args![q, steps, k, units, out, factor, flags, flag_count])?;
            Ok((at, convention))
        }
    }
}

/// Summands of x in bf16: f32 needs three to be exact, and so do integers with f32 scales.
fn parts(w: &Weight) -> usize {
    match (w.activations, w.x) {
        (Activations::Native, DType::F32) | (Activations::Int8, _) => 3,
        _ => 1,
    }
}

/// Rows of y that one bulk copy can bring: whole pieces of 16 bytes.
fn aligned(w: &Weight, y: &Mat, gate: bool) -> bool {
    let size = y.dtype.size();
    let rows_full = w.is_plain() && (!gate || w.n % 32 == 0);
    rows_full && y.address() % 16 == 0 && y.ld * size % 16 == 0 && y.cols * size % 16 == 0
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
        let processors = self.gpu.processors as usize;
        let m = c.x.rows;
        let (tokens, blocks) = SIZES[size_of(m)];
        let Fuse { gate, accumulate, .. } = c.fuse;
        let (groups, units, parts) = (w.padded / 16, w.slabs / 2, parts(w));
        let row_tiles = if gate { (groups / 2).div_ceil(4 * blocks) } else { groups.div_ceil(8 * blocks) };
        let token_tiles = m.div_ceil(tokens);
        let (grid, split) = deal(row_tiles * token_tiles, units * parts, processors);
        // SAFETY: forwarded.
        let (global, convention) = unsafe { self.stage(w, c, &room, 2 * processors as u32)? };
        let out: u32 = match (accumulate, c.y.dtype) {
            (true, _) => 1,
            (_, DType::BF16) => 2,
            (_, DType::F16) => 3,
            _ => 0,
        };
        let pair = self.pair(size_of(m), w.activations == Activations::Native && w.x == DType::F16)?;
        let kernel = if gate { &pair.gate } else { &pair.plain };
        let how = Launch {
            grid: [grid as u32, 1, 1],
            block: [384, 1, 1],
            shared: shared_of(tokens),
            stream: c.stream,
            overlap: true,
        };
        let (x, partial, flags) = (
            c.workspace + room.ordered as u64,
            c.workspace + room.partial as u64,
            c.workspace + room.flags as u64,
        );
        let (y, ldy, aligned) = (c.y.address(), c.y.ld as u64, u32::from(aligned(w, &c.y, gate)));
        let [m, groups, units, parts, split, row_tiles, token_tiles] =
            [m, groups, units, parts, split, row_tiles, token_tiles].map(|v| v as u32);
        // SAFETY: forwarded; the arguments are those of `gemm_*`, the workspace has the size that was asked for.
        unsafe {
            kernel.launch(
                how,
                args![
                    w.codes,
                    w.groups,
                    x,
                    y,
                    ldy,
                    m,
                    groups,
                    units,
                    parts,
                    split,
                    row_tiles,
                    token_tiles,
                    partial,
                    flags,
                    out,
                    aligned,
                    global,
                    convention
                ],
            )
        }
    }
}

/// Blocks, and the tiles whose k is shared out among all of them: those that would not fill a last round of whole tiles.
fn deal(tiles: usize, units: usize, processors: usize) -> (usize, usize) {
    if tiles < processors {
        // As many blocks a tile as there is room for: each then has one piece of one tile.
        return (tiles * (processors / tiles).min(units), if processors / tiles > 1 { tiles } else { 0 });
    }
    let rest = tiles % processors;
    (processors, if rest * 100 > processors * 92 { 0 } else { rest })
}

#[test]
fn every_block_has_work() {
    for tiles in 1..400 {
        for units in [1, 2, 20, 76] {
            let (grid, split) = deal(tiles, units, 132);
            assert!(
                grid <= 132 && split <= tiles && split * units + (tiles - split) >= grid,
                "{tiles} {units}"
            );
        }
    }
}
