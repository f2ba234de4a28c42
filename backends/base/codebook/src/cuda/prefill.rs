//! Launchers of `cuda/gemm.cu`: products of many rows on sm_90, with any fusion.
use super::{Call, Coding, FILES, Levels, Packed, load};
use q4_core::{FuseSet, Result};
use q4_cuda::{Gpu, HOPPER, Kernel, Kernels as Module, Launch, Source, mirror, output};
use std::sync::{Arc, OnceLock};

const GEMM: Source = Source { name: "levels-gemm", text: include_str!("../../cuda/gemm.cu"), files: FILES };
const ORDER: Source =
    Source { name: "levels-order", text: include_str!("../../cuda/order.cu"), files: FILES };
/// Bytes of 128 tokens by 64 of k.
const BLOCK: usize = 16384;
/// Rows of the weight in a tile.
const ROWS: usize = 128;
/// Tokens of a tile, by what a call needs.
const TOKENS: [usize; 4] = [32, 64, 128, 256];
/// From this k on the bound has room for the widest tiles of NF4, whose operands are within 2^-17 of the
/// weight, and for additions.
const LEAST_FOLDED: u32 = 2048;

mirror! {
    struct Gemm {
        units: u64, x: u64, y: u64, ldy: u64, tokens: i32, n: i32, row_units: i32, parts: i32,
        split_tiles: i32, row_tiles: i32, token_tiles: i32, partial: u64, flags: u64, out: i32, aligned: i32,
    }
    struct Order {
        x: u64, ld: u64, k: i32, row_units: i32, out: u64, weight: u64, eps: f32, rounding: u32, flags: u64,
        flag_count: i32,
    }
}

/// The two functions of gemm.cu.
struct Pair {
    plain: Kernel<Gemm>,
    gate: Kernel<Gemm>,
}

/// Kernels for calls of many rows. A size is compiled when a call first needs it.
pub struct Kernels {
    gpu: Arc<Gpu>,
    coding: Coding,
    pairs: [OnceLock<Pair>; TOKENS.len()],
    /// x of f32, f16 and bf16; then normed rows, rounded to those.
    order: [[Kernel<Order>; 3]; 2],
}

/// Index into [`TOKENS`] of a call of `m` rows. The widest tiles need enough of them, by rows of x or of the
/// weight, and scales that go into the operands.
fn size_of(levels: Levels, w: &Packed, m: usize) -> usize {
    let folds = match levels {
        Levels::Nf4 => w.k >= LEAST_FOLDED,
        Levels::Int4 | Levels::E4m3 => false,
        Levels::E2m1 => true,
    };
    let widest = if folds && (m > 256 || w.n as usize >= 132 * ROWS) { 3 } else { 2 };
    TOKENS.iter().position(|t| m <= *t).unwrap_or(widest).min(widest)
}

/// `SHARED` of gemm.cu.
fn shared_of(levels: Levels, tokens: usize) -> u32 {
    let table = if levels == Levels::E4m3 { 0 } else { 32_768 };
    let (pieces, stage) = (2 * 9216, 256 * tokens + 8 * levels.unit());
    let stages = ((HOPPER.shared - table - pieces - 256) / stage).min(10);
    (stages * stage + table + pieces + 16 * stages) as u32
}

/// Summands of x in bf16, exact: by the number of its type.
fn parts(source: u32) -> usize {
    [3, 2, 1][source as usize - 1]
}

/// Where the parts of the workspace lie, in bytes.
struct Room {
    partial: usize,
    flags: usize,
    all: usize,
}

impl Kernels {
    /// Finds what orders x; `None` where the device has no wgmma, or scales lie too close for it.
    pub fn load(gpu: &Arc<Gpu>, coding: Coding) -> Result<Option<Self>> {
        // A sum of whole numbers has one scale.
        if !gpu.arch.wgmma || coding.has_halves() && coding.levels == Levels::Int4 {
            return Ok(None);
        }
        let all = Module::load(gpu, &ORDER, &[])?;
        let get = |name: &str| all.get(&format!("levels_order_{name}"));
        let order = [
            [get("f32")?, get("f16")?, get("bf16")?],
            [get("f32")?, get("normed_f16")?, get("normed_bf16")?],
        ];
        Ok(Some(Self { gpu: gpu.clone(), coding, pairs: Default::default(), order }))
    }

    fn pair(&self, size: usize) -> Result<&Pair> {
        if let Some(pair) = self.pairs[size].get() {
            return Ok(pair);
        }
        let tokens = TOKENS[size];
        let all = load(&self.gpu, &GEMM, self.coding, &[&format!("-DTN={tokens}")])?;
        let get = |name| all.get_with(name, shared_of(self.coding.levels, tokens));
        let pair = Pair { plain: get("levels_gemm")?, gate: get("levels_gemm_gate")? };
        Ok(self.pairs[size].get_or_init(|| pair))
    }

    fn size(&self, w: &Packed, m: usize) -> usize {
        size_of(self.coding.levels, w, m)
    }

    fn room(&self, w: &Packed, source: u32, m: usize) -> Room {
        let next = |from: usize, bytes: usize| (from + bytes).next_multiple_of(256);
        let partial = next(0, m.div_ceil(128) * 2 * w.units as usize * parts(source) * BLOCK);
        let blocks = self.gpu.processors as usize;
        let flags = next(partial, blocks * ROWS * TOKENS[self.size(w, m)] * 4);
        Room { partial, flags, all: next(flags, blocks * 8) }
    }

    /// Whether they take such calls. Gate and up rows start a group each.
    pub fn takes(&self, w: &Packed, m: usize, set: FuseSet) -> bool {
        w.units > 0 && m > q4_cuda::FEW_ROWS && (!set.contains(FuseSet::GATE) || w.n % 32 == 0)
    }

    /// Scratch bytes of calls they take.
    pub fn workspace(&self, w: &Packed, source: u32, m: usize) -> usize {
        if self.takes(w, m, FuseSet::NONE) { self.room(w, source, m).all } else { 0 }
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The matrices are device memory that fits the weight, and do not overlap; the workspace has the size
    /// asked for.
    pub unsafe fn forward(&self, w: &Packed, call: &Call) -> Result<()> {
        let m = call.x.rows as usize;
        let room = self.room(w, call.source, m);
        let (groups, units, parts) = ((w.n as usize).div_ceil(16), w.units as usize, parts(call.source));
        let tokens = TOKENS[self.size(w, m)];
        let row_tiles = if call.gate { (groups / 2).div_ceil(4) } else { groups.div_ceil(8) };
        let token_tiles = m.div_ceil(tokens);
        let columns = if tokens == TOKENS[3] { token_tiles } else { usize::MAX };
        let processors = self.gpu.processors as usize;
        let (grid, split) = deal(row_tiles * token_tiles, columns, units * parts, processors);
        let (partial, flags) = (call.workspace + room.partial as u64, call.workspace + room.flags as u64);
        let (weight, eps) = call.norm;
        let order = &self.order[usize::from(weight != 0)][call.source as usize - 1];
        let args = Order {
            x: call.x.data,
            ld: call.x.ld,
            k: w.k as i32,
            row_units: w.units as i32,
            out: call.workspace,
            weight,
            eps,
            rounding: call.source,
            flags,
            flag_count: 2 * self.gpu.processors as i32,
        };
        // With a norm every block sums a whole row: as few as there are rows.
        let pieces = if weight == 0 { (8 * units).div_ceil(256) } else { 1 };
        // SAFETY: by contract.
        unsafe { order.launch(Launch::overlapping([m, pieces, 1], 256, 0, call.stream), args)? };
        let (size, whole) = (call.y.size(), |bytes: u64| bytes % 16 == 0);
        let is_aligned =
            whole(call.y.data) && whole(call.y.ld * size) && whole(u64::from(call.y.cols) * size);
        let pair = self.pair(self.size(w, m))?;
        let kernel = if call.gate { &pair.gate } else { &pair.plain };
        let how = Launch::overlapping([grid, 1, 1], 384, shared_of(self.coding.levels, tokens), call.stream);
        let [tokens, row_units, parts, split_tiles, row_tiles, token_tiles] =
            [m, units, parts, split, row_tiles, token_tiles].map(|v| v as i32);
        let args = Gemm {
            units: w.codes,
            x: call.workspace,
            y: call.y.data,
            ldy: call.y.ld,
            tokens,
            n: w.n as i32,
            row_units,
            parts,
            split_tiles,
            row_tiles,
            token_tiles,
            partial,
            flags,
            out: output(call.accumulate, call.y.dtype),
            aligned: is_aligned.into(),
        };
        // SAFETY: by contract.
        unsafe { kernel.launch(how, args) }
    }
}

/// Blocks, and the tiles whose k is shared out among all of them. `columns`: tiles side by side in x.
fn deal(tiles: usize, columns: usize, units: usize, processors: usize) -> (usize, usize) {
    if 2 * tiles <= processors {
        // As many blocks a tile as there is room for: each then has one piece of one tile.
        return (tiles * (processors / tiles).min(units), tiles);
    }
    if tiles < 3 * processors || columns <= 2 {
        return (processors.min(tiles * units), tiles);
    }
    // Those that would not fill a last round of whole tiles.
    let rest = tiles % processors;
    (processors, if rest * 100 > processors * 92 { 0 } else { rest })
}

#[test]
fn every_block_has_work() {
    for tiles in 1..400 {
        for units in [1, 2, 20, 76] {
            for columns in [1, 16] {
                let (grid, split) = deal(tiles, columns, units, 132);
                assert!(
                    grid <= 132 && split <= tiles && split * units + (tiles - split) >= grid,
                    "{tiles} {columns} {units}"
                );
            }
        }
    }
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    GEMM.takes::<Gemm>("levels_gemm")?;
    GEMM.takes::<Gemm>("levels_gemm_gate")?;
    for name in ["f32", "f16", "bf16", "normed_f16", "normed_bf16"] {
        ORDER.takes::<Order>(&format!("levels_order_{name}"))?;
    }
    Ok(())
}

#[test]
fn every_size_compiles() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    // Of whole numbers one of each kind: scales of f16 and of bf16 differ in a conversion.
    for (coding, most) in [(0, 4), (1, 3), (4, 3), (6, 4), (7, 3)] {
        for tokens in &TOKENS[..most] {
            super::compile(&GEMM, &HOPPER, super::CODINGS[coding], &[&format!("-DTN={tokens}")])?;
        }
    }
    ORDER.compile(&HOPPER, &[]).map(drop)
}
