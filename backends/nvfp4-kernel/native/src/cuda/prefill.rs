//! Launchers of `cuda/gemm.cu`: products of many rows on sm_90, with any fusion.
use super::forward::{Call, Fast, Fuse};
use super::simple::matrix;
use super::tiles::{self, Deal, LEAST_ROWS, SHAPES};
use super::{FILES, Weight};
use crate::call::Mat;
use q4_core::{Activations, DType, FuseSet, Result};
use q4_cuda::{
    Gpu, Kernel, Launch, Matrix, RowKernels, Source, TensorMap, convention, mirror, number, output, rule,
};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, OnceLock};

const GEMM: Source = Source { name: "nvfp4-gemm", text: include_str!("../../cuda/gemm.cu"), files: FILES };
const ORDER: Source = Source { name: "nvfp4-order", text: include_str!("../../cuda/order.cu"), files: FILES };

mirror! {
    struct Gemm {
        x_map: TensorMap, units: TensorMap, groups: u64, y: u64, ldy: u64, tokens: i32, group_count: i32,
        row_units: i32, parts: i32, whole: i32, shares: i32, pairs: i32, token_tiles: i32, partial: u64,
        flags: u64, key: u64, out: i32, aligned: i32, global: u64, convention: i32,
    }
    struct Order { x: u64, ld: u64, k: i32, out: u64, padded: i32, weight: u64, eps: f32 }
    struct OrderNvfp4 { x: Matrix, rule: u32, source: u32, global: u64, out: u64, padded: i32 }
    struct OrderInt8 { x: Matrix, out: u64, padded: i32 }
}

/// The two functions of gemm.cu.
struct Pair {
    plain: Kernel<Gemm>,
    gate: Kernel<Gemm>,
}

/// Kernels for calls of many rows. A shape is compiled when a call first needs it.
pub struct Kernels {
    gpu: Arc<Gpu>,
    quantise: RowKernels,
    /// By shape, then bf16 and f16.
    pairs: [[OnceLock<Pair>; 2]; SHAPES.len()],
    order: [Kernel<Order>; 5],
    order_nvfp4: Kernel<OrderNvfp4>,
    /// As two parts, and as three.
    order_int8: [Kernel<OrderInt8>; 2],
    /// What a flag of gemm.cu is when it is set: 64 random bits, which no workspace has before.
    key: u64,
}

/// Where the parts of the workspace lie, in bytes.
struct Room {
    ordered: usize,
    partial: usize,
    flags: usize,
    global: usize,
    all: usize,
}

/// Threads of a block that quantises x, each sixteen elements; `QUANTISERS` of order.cu.
const QUANTISERS: usize = 64;
/// From this k on the bound has room for int8 inputs as two bf16, 2^-18 off, beside what additions take.
const LEAST_OF_TWO: usize = 2048;

impl Kernels {
    /// Compiles or finds them; `None` where the device has no wgmma.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Option<Self>> {
        if !gpu.arch.wgmma {
            return Ok(None);
        }
        let all = q4_cuda::Kernels::load(gpu, &ORDER, &[])?;
        let get = |name: &str| all.get(&format!("order_{name}"));
        let order = [get("bf16")?, get("f16")?, get("f32_bf16")?, get("f32_f16")?, get("f32_parts")?];
        let order_nvfp4 = all.get("order_nvfp4")?;
        let order_int8 = [all.get("order_int8")?, all.get("order_int8_parts")?];
        let quantise = RowKernels::load(gpu)?;
        let key = RandomState::new().build_hasher().finish();
        let gpu = gpu.clone();
        Ok(Some(Self { gpu, quantise, pairs: Default::default(), order, order_nvfp4, order_int8, key }))
    }

    fn pair(&self, shape: usize, half: bool) -> Result<&Pair> {
        let place = &self.pairs[shape][usize::from(half)];
        if let Some(pair) = place.get() {
            return Ok(pair);
        }
        let shape = &SHAPES[shape];
        let [tokens, groups, pieces] = &shape.options();
        let element = if half { "-DELEMENT=f16" } else { "-DELEMENT=bf16" };
        let all = q4_cuda::Kernels::load(&self.gpu, &GEMM, &[tokens, groups, pieces, element])?;
        let get = |name| all.get_with(name, shape.shared());
        let pair = Pair { plain: get("gemm")?, gate: get("gemm_gate")? };
        Ok(place.get_or_init(|| pair))
    }

    fn room(&self, w: &Weight, m: usize) -> Room {
        let next = |from: usize, bytes: usize| (from + bytes).next_multiple_of(256);
        let ordered = 0;
        let partial = next(ordered, m * w.slabs * 64 * parts(w) * 2);
        let blocks = self.gpu.processors as usize;
        let (sums, warpgroups) = tiles::largest(m);
        let flags = next(partial, blocks * sums * 4);
        let global = next(flags, blocks * warpgroups * 64);
        Room { ordered, partial, flags, global, all: next(global, 4) }
    }

    /// x as the copy engine can read it: as it is, or written to the workspace.
    unsafe fn stage(&self, w: &Weight, c: &Call, room: &Room) -> Result<Staged> {
        let how = Launch::overlapping([c.x.rows, 1, 1], 256, 0, c.stream);
        let (m, k, padded) = (c.x.rows, w.k as i32, (w.slabs * 64) as i32);
        let out = c.workspace + room.ordered as u64;
        let element = if is_half(w) { DType::F16 } else { DType::BF16 };
        let columns = padded as usize * parts(w);
        let written =
            |global, convention| Staged { x: out, element, shape: [m, columns, columns], global, convention };
        // SAFETY: forwarded.
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
                let (x, ld) = (c.x.address(), c.x.ld as u64);
                self.order[kernel].launch(how, Order { x, ld, k, out, padded, weight, eps })?;
                return Ok(written(0, 0));
            }
            let x = matrix(&c.x);
            let blocks = (padded as usize / 16).div_ceil(QUANTISERS);
            let how = Launch::overlapping([c.x.rows, blocks, 1], QUANTISERS as u32, 0, c.stream);
            let Activations::Nvfp4(act) = w.activations else {
                self.order_int8[usize::from(parts(w) > 2)].launch(how, OrderInt8 { x, out, padded })?;
                return Ok(written(0, 0));
            };
            let at = c.workspace + room.global as u64;
            let global = self.quantise.scale(x, &act, w.x, at, c.stream)?;
            let (rule, source) = (rule(act.rule), number(w.x));
            // A scale may have been written by what is no kernel.
            let how = Launch { overlap: global == 0, ..how };
            self.order_nvfp4.launch(how, OrderNvfp4 { x, rule, source, global, out, padded })?;
            Ok(written(global, if global == 0 { 0 } else { convention(act.rule) as i32 }))
        }
    }
}

/// x as the copy engine reads it: address, type, `[rows, columns, elements between rows]`, and the address
/// and convention of its per-tensor scale.
struct Staged {
    x: u64,
    element: DType,
    shape: [usize; 3],
    global: u64,
    convention: i32,
}

/// Whether products are of f16 numbers.
fn is_half(w: &Weight) -> bool {
    w.activations == Activations::Native && w.x == DType::F16
}

/// Summands of x in bf16: f32 needs three to be exact, and so do integers with f32 scales.
fn parts(w: &Weight) -> usize {
    match (w.activations, w.x) {
        (Activations::Int8, _) if w.k >= LEAST_OF_TWO => 2,
        (Activations::Native, DType::F32) | (Activations::Int8, _) => 3,
        _ => 1,
    }
}

/// Whether y can be written 16 bytes at a time: its rows are those of the groups, side by side.
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
        m >= LEAST_ROWS
            && (!fuse(FuseSet::GATE) || has_gate(w))
            && (!fuse(FuseSet::NORM) || w.activations == Activations::Native)
    }

    fn workspace(&self, w: &Weight, m: usize) -> usize {
        if m < LEAST_ROWS { 0 } else { self.room(w, m).all }
    }

    unsafe fn forward(&self, w: &Weight, c: &Call) -> Result<()> {
        let room = self.room(w, c.x.rows);
        let clusters = self.gpu.processors as usize / 2;
        let m = c.x.rows;
        let Fuse { gate, accumulate, .. } = c.fuse;
        let (groups, units, parts) = (w.padded / 16, w.slabs / 2, parts(w));
        let (index, Deal { grid, whole, shares }) =
            tiles::best(m, groups, gate, (units * parts).div_ceil(tiles::ROUND), clusters);
        let shape = &SHAPES[index];
        let (pairs, token_tiles) = (shape.pairs(groups, gate), m.div_ceil(shape.tokens));
        // SAFETY: forwarded.
        let x = unsafe { self.stage(w, c, &room)? };
        let pair = self.pair(index, is_half(w))?;
        let kernel = if gate { &pair.gate } else { &pair.plain };
        let x_map = TensorMap::new(x.x, x.element, x.shape, [64, shape.tokens / 2])?;
        let boxed = shape.rows() / if gate { 32 } else { 16 };
        let units_map = TensorMap::of_words(w.codes, [groups, units, 144], [boxed, 1, 144])?;
        let grid = [2 * shape.pieces * grid, 1, 1];
        let how = Launch::overlapping(grid, shape.threads(), shape.shared(), c.stream);
        let [tokens, group_count, row_units, parts, whole, shares, pairs, token_tiles] =
            [m, groups, units, parts, whole, shares, pairs, token_tiles].map(|v| v as i32);
        let args = Gemm {
            x_map,
            units: units_map,
            groups: w.groups,
            y: c.y.address(),
            ldy: c.y.ld as u64,
            tokens,
            group_count,
            row_units,
            parts,
            whole,
            shares,
            pairs,
            token_tiles,
            partial: c.workspace + room.partial as u64,
            flags: c.workspace + room.flags as u64,
            key: self.key,
            out: output(accumulate, number(c.y.dtype)),
            aligned: aligned(w, &c.y, gate).into(),
            global: x.global,
            convention: x.convention,
        };
        // SAFETY: forwarded; the workspace has the size that was asked for.
        unsafe { kernel.launch(how, args) }
    }
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    GEMM.takes::<Gemm>("gemm")?;
    GEMM.takes::<Gemm>("gemm_gate")?;
    for name in ["order_bf16", "order_f16", "order_f32_bf16", "order_f32_f16", "order_f32_parts"] {
        ORDER.takes::<Order>(name)?;
    }
    ORDER.takes::<OrderNvfp4>("order_nvfp4")?;
    ORDER.takes::<OrderInt8>("order_int8")?;
    ORDER.takes::<OrderInt8>("order_int8_parts")
}

#[test]
fn every_shape_compiles() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    for shape in &SHAPES {
        let [tokens, groups, pieces] = &shape.options();
        for element in ["-DELEMENT=bf16", "-DELEMENT=f16"] {
            GEMM.compile(&q4_cuda::HOPPER, &[tokens, groups, pieces, element])?;
        }
    }
    ORDER.compile(&q4_cuda::HOPPER, &[]).map(drop)
}
