//! The product: activations into the form the kernels read, then row blocks over the caller's threads. Every output is
//! summed by one task in one order, so neither threads nor other rows can change its bits.
use crate::call::{Exec, Fail, Mat, Outcome, part};
use crate::kernels::{
    Acc, ByteRows, FloatRows, GROUPS, LANES, OFFSET, PAIR, Product, Rows, SCALE_FACTOR, TILE_BYTES, Tile,
};
use crate::weight::{Weight, check_rows};
use q4_core::formats::{e2m1, e4m3, int8, nvfp4};
use q4_core::{ActGlobal, Activations, DType, GlobalScale};
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Activation rows that run against one decoded tile: its cost is spread over them while their sums stay in L1.
const ROWS: usize = 64;
/// Elements of k that are quantised at once: small enough for the stack, large enough for a task.
const CHUNK: usize = 1024;

/// Scratch bytes of a product with `m` rows; `None` when that overflows.
pub fn workspace(w: &Weight, m: u64) -> Option<u64> {
    let elements = m.checked_mul(w.k as u64)?;
    match w.activations {
        Activations::Native if w.x == DType::F32 => Some(0),
        Activations::Native => elements.checked_mul(4),
        _ => Some(Quantised::sizes(elements)?.iter().sum()),
    }
}

/// `y = x W^T`.
///
/// # Safety
/// The matrices are readable and writable, do not overlap, and `exec` is the caller's.
pub unsafe fn forward(w: &Weight, x: Mat, y: Mat, exec: &Exec) -> Outcome {
    check_rows(w, &x, &y, ["x", "y"])?;
    let need = workspace(w, x.rows as u64);
    let need = need.ok_or_else(|| Fail::invalid("x", "a workspace that fits the address space", x.rows))?;
    let scratch = exec.scratch(need)?;
    let elements = (x.rows * x.cols) as u64;
    match w.activations {
        Activations::Native => {
            let rows = if w.x == DType::F32 {
                FloatRows { x: x.floats(), ld: x.ld, rows: x.rows }
            } else {
                // SAFETY: the workspace holds m * k floats.
                unsafe { widen(&x, scratch.cast(), exec)? }
            };
            multiply(w, &w.kernels().float, rows, y, 1.0, exec)
        }
        Activations::Int8 => {
            let q = Quantised::new(scratch, elements, x.cols);
            each_chunk(&x, exec, |row, col, values| {
                // SAFETY: every chunk is its own part of the workspace.
                let (codes, scales, bias) = unsafe { q.chunk(row, col, values.len()) };
                int8::quantize_row(values, codes, scales).map_err(drop)?;
                sums(codes, bias);
                Ok(())
            })?;
            multiply(w, &w.kernels().bytes, q.rows(x.rows), y, 0.5, exec)
        }
        Activations::Nvfp4(act) => {
            let global = match act.global {
                ActGlobal::None => None,
                ActGlobal::Static(g) => Some(g),
                ActGlobal::PerCall => {
                    // SAFETY: x is readable.
                    let amax = unsafe { amax(&x, exec)? };
                    Some(nvfp4::global_from_amax(act.rule, amax, w.x)?)
                }
            };
            let quantizer = nvfp4::Quantizer { rule: act.rule, global, source: w.x };
            let q = Quantised::new(scratch, elements, x.cols);
            each_chunk(&x, exec, |row, col, values| {
                let (mut codes, mut scales) = ([0; CHUNK / 2], [0; CHUNK / 16]);
                let (codes, scales) = (&mut codes[..values.len() / 2], &mut scales[..values.len() / 16]);
                quantizer.quantize_row(values, codes, scales).map_err(drop)?;
                // SAFETY: every chunk is its own part of the workspace.
                unsafe { q.expand(row, col, codes, scales) };
                Ok(())
            })?;
            multiply(w, &w.kernels().bytes, q.rows(x.rows), y, nvfp4_factor(global), exec)
        }
    }
}

/// What undoubles weights and NVFP4 activations and applies the activations' per-tensor scale.
pub fn nvfp4_factor(global: Option<GlobalScale>) -> f64 {
    0.25 * global.map_or(1.0, GlobalScale::multiplier)
}

/// Quantised activations in scratch memory, rows without gaps.
#[derive(Clone, Copy)]
pub struct Quantised {
    q: *mut i8,
    scales: *mut f32,
    bias: *mut i32,
    k: usize,
}

// SAFETY: addresses; tasks touch disjoint chunks, and read only after all have written.
unsafe impl Send for Quantised {}
// SAFETY: as above.
unsafe impl Sync for Quantised {}

impl Quantised {
    /// Bytes of codes, scales and biases of `elements`, each a multiple of 64.
    pub fn sizes(elements: u64) -> Option<[u64; 3]> {
        let words = (elements / 16).checked_mul(4)?.checked_next_multiple_of(64)?;
        let codes = elements.checked_next_multiple_of(64)?;
        codes.checked_add(words)?.checked_add(words)?;
        Some([codes, words, words])
    }

    /// Cuts `scratch`, of at least the sum of [`sizes`](Self::sizes) bytes, for rows of `k`.
    pub fn new(scratch: *mut u8, elements: u64, k: usize) -> Self {
        let [codes, words, _] = Self::sizes(elements).unwrap_or_default();
        let scales = scratch.wrapping_add(codes as usize);
        Self { q: scratch.cast(), scales: scales.cast(), bias: scales.wrapping_add(words as usize).cast(), k }
    }

    /// As the kernels see them.
    pub fn rows(&self, rows: usize) -> ByteRows {
        ByteRows { q: self.q, scales: self.scales, bias: self.bias, ld: self.k, rows }
    }

    /// Expands packed NVFP4 codes and scales from (`row`, `col`) on.
    ///
    /// # Safety
    /// They are inside and this task's alone.
    pub unsafe fn expand(&self, row: usize, col: usize, packed: &[u8], bytes: &[u8]) {
        // SAFETY: forwarded.
        let (codes, scales, bias) = unsafe { self.chunk(row, col, 2 * packed.len()) };
        for (q, byte) in codes.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
            *q = [e2m1::DOUBLED[usize::from(byte & 15)], e2m1::DOUBLED[usize::from(byte >> 4)]];
        }
        for (scale, &byte) in scales.iter_mut().zip(bytes) {
            *scale = e4m3::decode(byte);
        }
        sums(codes, bias);
    }

    #[allow(clippy::mut_from_ref)] // scratch memory, cut by the caller
    unsafe fn chunk(&self, row: usize, col: usize, len: usize) -> (&mut [i8], &mut [f32], &mut [i32]) {
        let at = row * self.k + col;
        // SAFETY: inside the workspace and unaliased, by the contract of the callers.
        unsafe {
            (
                slice::from_raw_parts_mut(self.q.add(at), len),
                slice::from_raw_parts_mut(self.scales.add(at / 16), len / 16),
                slice::from_raw_parts_mut(self.bias.add(at / 16), len / 16),
            )
        }
    }
}

fn sums(codes: &[i8], bias: &mut [i32]) {
    for (bias, group) in bias.iter_mut().zip(codes.as_chunks::<16>().0) {
        *bias = -OFFSET * group.iter().map(|&q| i32::from(q)).sum::<i32>();
    }
}

/// Widens x to f32.
unsafe fn widen(x: &Mat, to: *mut f32, exec: &Exec) -> Outcome<FloatRows> {
    let out = Shared(to);
    let per_row = x.cols.div_ceil(CHUNK);
    let items = x.rows * per_row;
    let tasks = exec.tasks(items);
    exec.run(tasks, |t| {
        for i in part(items, tasks, t) {
            let (row, col) = (i / per_row, i % per_row * CHUNK);
            let len = CHUNK.min(x.cols - col);
            // SAFETY: inside x, and every chunk is its own part of the m * k floats.
            unsafe { x.load(row, col, slice::from_raw_parts_mut(out.get().add(row * x.cols + col), len)) };
        }
    })?;
    Ok(FloatRows { x: to, ld: x.cols, rows: x.rows })
}

/// An address that tasks write disjoint parts of.
struct Shared(*mut f32);
// SAFETY: as said.
unsafe impl Sync for Shared {}
impl Shared {
    fn get(&self) -> *mut f32 {
        self.0
    }
}

/// Calls `quantise(row, column, values)` for every chunk of x; fails with the first row that it refuses.
fn each_chunk(
    x: &Mat,
    exec: &Exec,
    quantise: impl Fn(usize, usize, &[f32]) -> Result<(), ()> + Sync,
) -> Outcome {
    let per_row = x.cols.div_ceil(CHUNK);
    let items = x.rows * per_row;
    let refused = AtomicUsize::new(usize::MAX);
    let tasks = exec.tasks(items);
    exec.run(tasks, |t| {
        let mut values = [0.0; CHUNK];
        for i in part(items, tasks, t) {
            let (row, col) = (i / per_row, i % per_row * CHUNK);
            let values = &mut values[..CHUNK.min(x.cols - col)];
            // SAFETY: inside x, which is readable.
            unsafe { x.load(row, col, values) };
            if quantise(row, col, values).is_err() {
                refused.fetch_min(row, Ordering::Relaxed);
            }
        }
    })?;
    match refused.into_inner() {
        usize::MAX => Ok(()),
        row => Err(not_finite(row)),
    }
}

fn not_finite(row: usize) -> Fail {
    Fail::invalid(format!("x: row {row}"), "finite values to quantise", "NaN or infinity")
}

/// Largest magnitude of x.
///
/// # Safety
/// x is readable.
pub unsafe fn amax(x: &Mat, exec: &Exec) -> Outcome<f32> {
    // Magnitudes order as their bits do, infinity and NaN last.
    let bits = AtomicU32::new(0);
    each_chunk(x, exec, |_, _, values| {
        let amax = values.iter().fold(0, |a, v| a.max(v.abs().to_bits()));
        bits.fetch_max(amax, Ordering::Relaxed);
        if amax < f32::INFINITY.to_bits() { Ok(()) } else { Err(()) }
    })?;
    Ok(f32::from_bits(bits.into_inner()))
}

/// `y[i][n] = factor * global(n) * 2^8 * sum`, over pairs of row blocks.
pub fn multiply<X: Rows, T: Tile>(
    w: &Weight,
    kernels: &Product<X, T>,
    x: X,
    y: Mat,
    factor: f64,
    exec: &Exec,
) -> Outcome {
    let pairs = w.row_blocks().div_ceil(PAIR);
    let tasks = exec.tasks(pairs);
    exec.run(tasks, |t| {
        let pairs = part(pairs, tasks, t);
        // SAFETY: x has the rows it states, and this task alone writes the columns of its row blocks.
        unsafe {
            if x.rows() <= kernels.direct_rows {
                few_rows(w, kernels, x, y, factor, pairs);
            } else {
                many_rows(w, kernels, x, y, factor, pairs);
            }
        }
    })
}

unsafe fn few_rows<X: Rows, T>(
    w: &Weight,
    kernels: &Product<X, T>,
    x: X,
    y: Mat,
    factor: f64,
    pairs: std::ops::Range<usize>,
) {
    let mut acc = [[[0.0; LANES]; PAIR]; 4];
    for pair in pairs {
        let count = PAIR.min(w.row_blocks() - pair * PAIR);
        // SAFETY: by contract; `direct_rows` is at most 4.
        unsafe {
            (kernels.direct)(w.blocks(pair * PAIR, count), x, acc.as_mut_ptr());
            store(w, y, factor, pair, 0, &acc[..x.rows()]);
        }
    }
}

unsafe fn many_rows<X: Rows, T: Tile>(
    w: &Weight,
    kernels: &Product<X, T>,
    x: X,
    y: Mat,
    factor: f64,
    pairs: std::ops::Range<usize>,
) {
    let (mut acc, mut tiles) = ([[[0.0; LANES]; PAIR]; ROWS], [T::BLANK; PAIR]);
    for first in (0..x.rows()).step_by(ROWS) {
        let acc = &mut acc[..ROWS.min(x.rows() - first)];
        for pair in pairs.clone() {
            let count = PAIR.min(w.row_blocks() - pair * PAIR);
            let b = w.blocks(pair * PAIR, count);
            acc.fill([[0.0; LANES]; PAIR]);
            for t in 0..w.tiles() {
                // SAFETY: by contract; tile and groups are inside the row blocks.
                unsafe {
                    for c in 0..count {
                        (kernels.unpack)(b.tiles.add(c * b.stride + t * TILE_BYTES), &mut tiles[c]);
                    }
                    let x = x.window(first, acc.len(), t * GROUPS);
                    let groups = GROUPS.min(b.groups - t * GROUPS);
                    (kernels.panel)(tiles.as_ptr(), count, groups, x, acc.as_mut_ptr());
                }
            }
            // SAFETY: by contract.
            unsafe { store(w, y, factor, pair, first, acc) };
        }
    }
}

unsafe fn store(w: &Weight, y: Mat, factor: f64, pair: usize, first: usize, acc: &[Acc]) {
    let column = pair * PAIR * LANES;
    let len = (w.n - column).min(PAIR * LANES);
    let mut factors = [0.0; PAIR * LANES];
    for (i, f) in factors[..len].iter_mut().enumerate() {
        *f = w.global(column + i).map_or(1.0, GlobalScale::multiplier) * (factor * SCALE_FACTOR);
    }
    for (r, sums) in acc.iter().enumerate() {
        let mut out = [0.0; PAIR * LANES];
        for ((o, &s), f) in out.iter_mut().zip(sums.as_flattened()).zip(factors) {
            *o = (f64::from(s) * f) as f32;
        }
        // SAFETY: the row exists and the columns are this task's.
        unsafe { y.store(first + r, column, &out[..len]) };
    }
}
