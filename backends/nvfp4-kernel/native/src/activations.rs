//! Activations in the form the kernels read: widened or quantised once per call into the caller's scratch, by
//! several threads where that pays.
use crate::call::{Mat, Threads};
use crate::kernels::rounding::{Rounding, start};
use crate::kernels::{ByteBlock, ByteRows, FloatRows, GROUPS, Kernels, TILE_K};
use q4_core::{Code, DType, Error, Result};
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Elements of k that are worked on at once: small enough for the stack, large enough for a task.
const CHUNK: usize = 1024;
/// Elements that one thread is done with before another has woken.
const SERIAL: usize = 16 * CHUNK;

/// Quantised activations in scratch memory.
#[derive(Clone, Copy)]
pub struct Quantised {
    blocks: *mut ByteBlock,
    rows: usize,
}

// SAFETY: an address; tasks write disjoint blocks, and read only after all have written.
unsafe impl Send for Quantised {}
// SAFETY: as above.
unsafe impl Sync for Quantised {}

impl Quantised {
    /// Scratch bytes for `rows` rows of `k`; `None` when that overflows.
    pub fn bytes(rows: u64, k: usize) -> Option<u64> {
        rows.checked_mul(k.div_ceil(TILE_K) as u64)?.checked_mul(size_of::<ByteBlock>() as u64)
    }

    /// A block of zeros.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // a matrix unit reads whole registers of rows
    pub const ZERO: ByteBlock =
        ByteBlock { q: [0; TILE_K], scales: [0.0; GROUPS], start: [start(0); GROUPS] };

    /// In `scratch`, 64-byte aligned and of [`bytes`](Self::bytes).
    pub fn new(scratch: *mut u8, rows: usize) -> Self {
        Self { blocks: scratch.cast(), rows }
    }

    /// As the kernels see them.
    pub fn rows(&self) -> ByteRows {
        ByteRows { blocks: self.blocks, ld: self.rows, rows: self.rows }
    }

    /// Where the block of tile `tile` of `row` is.
    fn at(&self, row: usize, tile: usize) -> *mut ByteBlock {
        self.blocks.wrapping_add(tile * self.rows + row)
    }

    /// Quantises x to int8.
    ///
    /// # Safety
    /// x is readable and has the rows of this scratch, which nobody else uses.
    pub unsafe fn int8(&self, x: &Mat, kernels: &Kernels, threads: &Threads<'_>) -> Result<()> {
        // SAFETY: forwarded; every chunk is blocks of its own.
        unsafe {
            each_chunk(x, threads, |row, tile, values| {
                (kernels.int8)(values.as_ptr(), values.len() / 16, self.at(row, tile), self.rows)
            })
        }
    }

    /// Quantises x to NVFP4.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn nvfp4(
        &self,
        x: &Mat,
        rounding: &Rounding,
        kernels: &Kernels,
        threads: &Threads<'_>,
    ) -> Result<()> {
        // SAFETY: forwarded; every chunk is blocks of its own.
        unsafe {
            each_chunk(x, threads, |row, tile, values| {
                (kernels.nvfp4)(rounding, values.as_ptr(), values.len() / 16, self.at(row, tile), self.rows)
            })
        }
    }
}

/// Widens x to f32.
///
/// # Safety
/// x is readable, `to` has room for it and is nobody else's.
pub unsafe fn widen(x: &Mat, to: *mut f32, threads: &Threads<'_>) -> FloatRows {
    let out = Shared(to);
    let (items, per_row) = chunks(x);
    threads.each(tasks(x, threads, items), items, |chunks| {
        for i in chunks {
            let (row, col) = (i / per_row, i % per_row * CHUNK);
            let len = CHUNK.min(x.cols - col);
            // SAFETY: inside x, and every chunk is its own part of the m * k floats.
            unsafe { x.load(row, col, slice::from_raw_parts_mut(out.get().add(row * x.cols + col), len)) };
        }
    });
    FloatRows { x: to, ld: x.cols, rows: x.rows }
}

/// Largest magnitude of x.
///
/// # Safety
/// x is readable.
pub unsafe fn amax(x: &Mat, kernels: &Kernels, threads: &Threads<'_>) -> Result<f32> {
    let bits = AtomicU32::new(0);
    // SAFETY: forwarded; the kernels run on this processor.
    unsafe {
        each_chunk(x, threads, |_, _, values| {
            let amax = (kernels.amax)(values);
            bits.fetch_max(amax, Ordering::Relaxed);
            amax < f32::INFINITY.to_bits()
        })?;
    }
    Ok(f32::from_bits(bits.into_inner()))
}

/// Calls `body(row, tile, values)` for every chunk of x, values in f32; fails with the first row that it
/// refuses.
unsafe fn each_chunk(
    x: &Mat,
    threads: &Threads<'_>,
    body: impl Fn(usize, usize, &[f32]) -> bool + Sync,
) -> Result<()> {
    let refused = AtomicUsize::new(usize::MAX);
    let (items, per_row) = chunks(x);
    threads.each(tasks(x, threads, items), items, |chunks| {
        let mut buffer = [0.0; CHUNK];
        for i in chunks {
            let (row, col) = (i / per_row, i % per_row * CHUNK);
            let len = CHUNK.min(x.cols - col);
            // SAFETY: inside x, which is readable.
            let values = unsafe {
                if x.dtype == DType::F32 {
                    slice::from_raw_parts(x.floats().add(row * x.ld + col), len)
                } else {
                    x.load(row, col, &mut buffer[..len]);
                    &buffer[..len]
                }
            };
            if !body(row, col / TILE_K, values) {
                refused.fetch_min(row, Ordering::Relaxed);
            }
        }
    });
    match refused.into_inner() {
        usize::MAX => Ok(()),
        // SAFETY: forwarded.
        row => Err(unsafe { not_finite(x, row) }),
    }
}

/// Names what of a row cannot be quantised.
unsafe fn not_finite(x: &Mat, row: usize) -> Error {
    let error = Error::new(Code::NonFinite, "activations of a product").need("finite values");
    for col in 0..x.cols {
        let mut value = [0.0];
        // SAFETY: inside x, which is readable.
        unsafe { x.load(row, col, &mut value) };
        if !value[0].is_finite() {
            return error.have(format!("x[{row}, {col}] = {}", value[0]));
        }
    }
    error.have(format!("a row {row} that overflows"))
}

/// Chunks of x, and of one of its rows.
fn chunks(x: &Mat) -> (usize, usize) {
    let per_row = x.cols.div_ceil(CHUNK);
    (x.rows * per_row, per_row)
}

fn tasks(x: &Mat, threads: &Threads<'_>, items: usize) -> usize {
    if x.rows * x.cols <= SERIAL { 1 } else { threads.tasks(items) }
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
