//! The product on a matrix unit: inputs are laid out as it reads them, panel by panel, weights are decoded
//! once per panel, and the unit's sums over part of k are added up here, in ascending order.
//!
//! A result depends neither on the number of threads nor on the other rows of a call.
use crate::activations::Quantised;
use crate::call::{Mat, Threads};
use crate::kernels::amx::{self, FLOAT_PARTS, ROWS, Register, STEP, Sums, Unit};
use crate::kernels::{Acc, LANES, PAIR, Rows, TILE_BYTES, TILE_K};
use crate::output::Output;
use crate::weight::Weight;
use q4_core::Activations;
use q4_core::isa::Isa;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU16, Ordering};

/// Fewest rows of x; fewer are for the other kernels.
const MIN_ROWS: u64 = 9;
/// Tiles of k that the unit adds up: two row blocks of them, decoded, are 32 KiB.
const CHUNK: usize = 4;
/// Registers of a row block's chunk.
const CHUNK_STEPS: usize = CHUNK * TILE_K / STEP;
/// Rows of a panel at most.
const LARGEST_PANEL: usize = 512;
/// Rows of sums of a task: 256 KiB.
const SUMS: usize = 2048;

/// Inputs in the form of the unit.
#[derive(Clone, Copy)]
pub enum Inputs {
    /// f32 or what widens to it.
    Floats(Mat),
    /// NVFP4, in blocks.
    Bytes(Quantised),
}

impl Inputs {
    /// bf16 numbers of an input.
    const fn parts(bytes: bool) -> usize {
        if bytes { 1 } else { FLOAT_PARTS }
    }
    /// Rows of a panel: what of them one chunk of k takes stays in the second cache.
    const fn panel(bytes: bool) -> usize {
        if bytes { LARGEST_PANEL } else { LARGEST_PANEL / 2 }
    }
    fn is_bytes(&self) -> bool {
        matches!(self, Self::Bytes(_))
    }
    fn rows(&self) -> usize {
        match self {
            Self::Floats(x) => x.rows,
            Self::Bytes(q) => q.rows().rows,
        }
    }
}

/// Scratch bytes of a product with `m` rows, 0 where it is not for the unit; `None` when that overflows.
pub fn workspace(isa: Isa, activations: &Activations, k: usize, m: u64) -> Option<u64> {
    let bytes = match activations {
        Activations::Native => false,
        Activations::Nvfp4(_) => true,
        // Their scales have 24 bits: the dots of the vector units are exact and cost less than three
        // products. Dots of bytes on the unit are no faster than those: every 16 of k have a scale, so all
        // sums of 16 pass through memory (60 products a cycle of a Xeon, where VNNI has 55).
        Activations::Int8 | Activations::Fp8(_) => return Some(0),
    };
    if !takes(isa, m) {
        return Some(0);
    }
    let rows = m.min(Inputs::panel(bytes) as u64).next_multiple_of(2 * ROWS as u64);
    rows.checked_mul((k.checked_next_multiple_of(TILE_K)? * 2 * Inputs::parts(bytes)) as u64)
}

fn takes(isa: Isa, m: u64) -> bool {
    isa == Isa::Amx && m >= MIN_ROWS
}

/// Sums over k, each made `factor * global * 2^8` times itself, to y, except for the rows it returns, whose
/// inputs are out of the unit's range. None if the call is not for the unit at all.
///
/// # Safety
/// x is readable and y writable, and `scratch`, aligned to 64 bytes, is of [`workspace`].
pub unsafe fn multiply(
    w: &Weight,
    x: Inputs,
    y: &Output<'_>,
    factor: f64,
    scratch: *mut u8,
    threads: &Threads<'_>,
) -> Option<Vec<usize>> {
    if !takes(w.isa, x.rows() as u64) {
        return None;
    }
    let panel = Inputs::panel(x.is_bytes());
    let pairs = y.pairs();
    let tasks = threads.tasks(pairs);
    let mut refused = Vec::new();
    for first in (0..x.rows()).step_by(panel) {
        let rows = panel.min(x.rows() - first);
        let a = Panel { at: scratch.cast(), first, rows, tiles: w.tiles(), bytes: x.is_bytes() };
        let bits = [const { AtomicU16::new(0) }; LARGEST_PANEL / ROWS];
        let blocks = rows.div_ceil(2 * ROWS) * 2;
        threads.each(threads.tasks(blocks), blocks, |blocks| {
            for block in blocks {
                // SAFETY: by contract; a row block of the panel is one task's.
                bits[block].store(unsafe { a.lay_out(&x, w.k, block) }, Ordering::Relaxed);
            }
        });
        let bits = bits.map(AtomicU16::into_inner);
        refused.extend((0..rows).filter(|r| bits[r / ROWS] >> (r % ROWS) & 1 == 1).map(|r| first + r));
        threads.each(tasks, pairs, |pairs| {
            // SAFETY: by contract; this task alone writes the columns of its row blocks.
            unsafe { columns(w, &a, &bits, y, factor, pairs) };
        });
    }
    Some(refused)
}

/// Some rows of x, `[16 rows][step of k][part]` registers.
struct Panel {
    at: *mut Register,
    first: usize,
    rows: usize,
    tiles: usize,
    bytes: bool,
}

// SAFETY: an address; tasks write disjoint blocks, and read only after all have written.
unsafe impl Sync for Panel {}

impl Panel {
    /// Registers of 16 rows from tile `tile` of k on.
    fn block(&self, block: usize, tile: usize) -> *mut Register {
        let per_tile = TILE_K / STEP * Inputs::parts(self.bytes);
        self.at.wrapping_add((block * self.tiles + tile) * per_tile)
    }

    /// Fills 16 rows; those behind the last one are zeros. Returns a bit for each that the unit cannot take.
    unsafe fn lay_out(&self, x: &Inputs, k: usize, block: usize) -> u16 {
        let mut refused = 0;
        for row in 0..ROWS {
            let at = block * ROWS + row;
            for tile in 0..self.tiles {
                let out = self.block(block, tile);
                // SAFETY: the row is inside x, or nothing is read of it; the registers are in the panel.
                unsafe {
                    match x {
                        Inputs::Bytes(_) if at >= self.rows => amx::widen(&Quantised::ZERO, row, out),
                        Inputs::Bytes(q) => {
                            let block = q.rows().window(self.first + at, 1, tile).blocks;
                            amx::widen(&*block, row, out)
                        }
                        Inputs::Floats(x) => {
                            let mut buffer = [0.0; TILE_K];
                            let len = TILE_K.min(k - tile * TILE_K);
                            if at < self.rows {
                                x.load(self.first + at, tile * TILE_K, &mut buffer[..len]);
                            }
                            for (i, half) in buffer.chunks(STEP).enumerate() {
                                let fits = amx::split(half, row, out.add(i * FLOAT_PARTS));
                                refused |= u16::from(!fits) << row;
                            }
                        }
                    }
                }
            }
        }
        refused
    }
}

/// The columns of some pairs of row blocks, as many at a time as there is room for sums.
unsafe fn columns(
    w: &Weight,
    a: &Panel,
    refused: &[u16],
    y: &Output<'_>,
    factor: f64,
    pairs: std::ops::Range<usize>,
) {
    let mut sums = [const { MaybeUninit::<Acc>::uninit() }; SUMS];
    let mut decoded = [const { MaybeUninit::<Register>::uninit() }; PAIR * CHUNK_STEPS];
    let padded = a.rows.next_multiple_of(2 * ROWS);
    // SAFETY: the instruction set has the unit.
    let unit = unsafe { Unit::new() };
    for group in pairs.clone().step_by(SUMS / padded) {
        let group = group..pairs.end.min(group + SUMS / padded);
        for tile in (0..w.tiles()).step_by(CHUNK) {
            let tiles = CHUNK.min(w.tiles() - tile);
            for pair in group.clone() {
                let blocks = y.blocks(pair);
                let b: *mut Register = decoded.as_mut_ptr().cast();
                // A last row block without a partner is multiplied twice and stored once.
                let b = [b, b.wrapping_add((blocks.count - 1) * CHUNK_STEPS)];
                for (c, b) in b.into_iter().enumerate().take(blocks.count) {
                    for t in 0..tiles {
                        // SAFETY: tile and registers exist.
                        unsafe {
                            let packed = blocks.tiles.add(c * blocks.stride + (tile + t) * TILE_BYTES);
                            amx::decode(packed, b.add(t * TILE_K / STEP));
                        }
                    }
                }
                let sums = &mut sums[(pair - group.start) * padded..][..padded];
                // SAFETY: the registers of the panel and of both row blocks were written.
                unsafe { chunk(&unit, a, tile, tiles, b.map(|b| b.cast_const()), sums) };
            }
        }
        for pair in group.clone() {
            let sums = &sums[(pair - group.start) * padded..][..a.rows];
            // SAFETY: every chunk wrote or added to these sums, the first one wrote; the columns are this
            // task's.
            unsafe {
                let sums = std::slice::from_raw_parts(sums.as_ptr().cast::<Acc>(), sums.len());
                let columns = y.columns(pair, factor);
                for rows in runs(a.rows, |r| refused[r / ROWS] >> (r % ROWS) & 1 == 0) {
                    columns.store(a.first + rows.start, &sums[rows]);
                }
            }
        }
    }
}

/// The longest ranges below `end` whose members all pass.
fn runs(end: usize, passes: impl Fn(usize) -> bool) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let start = (next..end).find(|&i| passes(i))?;
        next = (start..end).find(|&i| !passes(i)).unwrap_or(end);
        Some(start..next)
    })
}

/// Adds the products over `tiles` tiles of k from `tile` on; the first writes.
unsafe fn chunk(
    unit: &Unit,
    a: &Panel,
    tile: usize,
    tiles: usize,
    b: [*const Register; PAIR],
    sums: &mut [MaybeUninit<Acc>],
) {
    let steps = tiles * TILE_K / STEP;
    let mut out = Sums::BLANK;
    let each = if a.bytes { 2 * ROWS } else { ROWS };
    for (i, sums) in sums.chunks_exact_mut(each).enumerate() {
        // SAFETY: the registers exist, by contract.
        unsafe {
            if a.bytes {
                unit.bytes(
                    [a.block(2 * i, tile), a.block(2 * i + 1, tile)].map(|a| a.cast_const()),
                    b,
                    steps,
                    &mut out,
                );
            } else {
                unit.floats(a.block(i, tile), b, steps, &mut out);
            }
            amx::add(&out, a.bytes, tile == 0, sums);
        }
    }
}

const _: () = assert!(LANES == ROWS);
