//! The calls on a native weight.
//!
//! cuBLASLt writes f32 sums to the workspace, not y itself: segments have per-tensor scales of their own, y
//! has any stride and alignment, a row that cannot be quantised must become NaN, and the scales of both
//! operands together may leave the range of f32.
use super::Weight;
use super::kernels::{Laid, Rows};
use crate::call::{Exec, Fail, Mat, Outcome};
use crate::weight::check_shape;
use q4_core::formats::swizzle;
use q4_core::{ActGlobal, Code, Error, Result};
use q4_cuda::{Fp4Operands, Fp4Product, Stored, check, convention, driver};

/// Bytes of f32 sums between the product and y, about. A call of more rows goes in parts.
const SUMS: usize = 32 << 20;
/// Rows of the largest part.
const MOST: usize = 2048;

/// Rows of a part, for a weight of so many padded rows.
pub fn part_rows(n: usize) -> usize {
    (SUMS / (4 * n) / 128 * 128).clamp(128, MOST)
}

/// First bytes of the workspace, for the per-tensor scale of x.
const GLOBAL: u64 = 256;

/// Where the other parts of the workspace lie, in bytes. No sum overflows: a weight of that width is on the
/// device.
pub struct Room {
    /// `Factor` of every segment.
    pub factors: u64,
    /// u32 a row.
    pub bad: u64,
    /// Quantised rows: codes.
    pub codes: u64,
    /// Their scales.
    pub scales: u64,
    /// Their scales in f32.
    pub steps: u64,
    /// The operand: codes.
    pub laid: u64,
    /// Its scales in tiles.
    pub tiles: u64,
    /// f32 `[padded rows, padded n]`.
    pub sums: u64,
    /// cuBLASLt's.
    pub scratch: u64,
    /// All bytes.
    pub all: u64,
}

impl Room {
    /// For `m` rows that are padded to `rows`, and a weight of `segments` and `[n, k]`, padded to `[padded_n,
    /// padded_k]`.
    pub fn new(m: usize, rows: usize, segments: usize, k: usize, [padded_n, padded_k]: [usize; 2]) -> Self {
        let mut at = GLOBAL;
        let mut take = |bytes: usize| {
            let here = at;
            at = (at + bytes as u64).next_multiple_of(256);
            here
        };
        Self {
            factors: take(8 * segments),
            bad: take(4 * m),
            codes: take(m * k / 2),
            scales: take(m * k / 16),
            steps: take(m * k / 4),
            laid: take(rows * padded_k / 2),
            tiles: take(swizzle::blocked_len(rows, padded_k / 16)),
            sums: take(4 * rows * padded_n),
            scratch: take(Fp4Product::scratch()),
            all: at,
        }
    }
}

/// Scratch bytes of a call of `m` rows; `None` where there is no kernel for that many.
pub fn workspace(w: &Weight, m: u64) -> Option<u64> {
    let m = usize::try_from(m).ok()?.clamp(1, part_rows(w.padded[0]));
    Some(room(w, m).ok()?.1.all)
}

/// Padded rows of a part of `m` rows, and its workspace.
fn room(w: &Weight, m: usize) -> Result<(usize, Room)> {
    let none = || Error::new(Code::Unsupported, format!("cuBLASLt has no FP4 kernel for {m} rows"));
    let rows = w.product.rows(m)?.ok_or_else(none)?;
    Ok((rows, Room::new(m, rows, w.spans.len(), w.k, w.padded)))
}

/// `y = x W^T`.
///
/// # Safety
/// The matrices are device memory and do not overlap; `exec` is the caller's.
pub unsafe fn forward(w: &Weight, x: Mat, y: Mat, exec: &Exec) -> Outcome {
    check_shape([w.max_m, x.rows, y.rows], ["x", "y"])?;
    let need = workspace(w, x.rows as u64)
        .ok_or_else(|| Fail::invalid("x", "a number of rows cuBLASLt has a kernel for", x.rows))?;
    let at = exec.scratch_aligned(need, 256)?.addr() as u64;
    // SAFETY: forwarded; the workspace has the size that was asked for.
    unsafe { in_parts(w, &x, &y, at, exec.stream()) }.map_err(|e| w.shaped(e, "product", x.rows))
}

unsafe fn in_parts(w: &Weight, x: &Mat, y: &Mat, workspace: u64, stream: usize) -> Result<()> {
    let simple = &w.engine.simple;
    let global = match w.act.global {
        ActGlobal::None => 0,
        _ => workspace,
    };
    // SAFETY: forwarded.
    unsafe {
        match w.act.global {
            ActGlobal::None => {}
            ActGlobal::Static(g) => simple.set_global(g, global, stream)?,
            // From all rows, not from those of a part.
            ActGlobal::PerCall => simple.global_of(x, w.act.rule, w.x, global, stream)?,
        }
        let most = part_rows(w.padded[0]);
        for first in (0..x.rows).step_by(most) {
            let m = most.min(x.rows - first);
            part(w, &x.rows_from(first, m), &y.rows_from(first, m), workspace, global, stream)?;
        }
    }
    Ok(())
}

/// The product of as many rows as fit the workspace.
unsafe fn part(w: &Weight, x: &Mat, y: &Mat, workspace: u64, global: u64, stream: usize) -> Result<()> {
    let (rows, room) = room(w, x.rows)?;
    let at = |offset: u64| workspace + offset;
    let stored =
        Stored { codes: at(room.codes), scales: at(room.scales), steps: at(room.steps), ..Stored::default() };
    let quantised = Rows {
        codes: stored.codes,
        scales: stored.scales,
        steps: stored.steps,
        rows: x.rows,
        global,
        convention: convention(w.act.rule),
    };
    let laid = Laid {
        codes: at(room.laid),
        scales: at(room.tiles),
        rows,
        bad: at(room.bad),
        factors: at(room.factors),
    };
    let operands = Fp4Operands {
        w: w.operand.codes,
        w_scales: w.operand.scales,
        x: laid.codes,
        x_scales: laid.scales,
        y: at(room.sums),
    };
    w.engine.gpu.bind()?;
    // SAFETY: the workspace has room for every part of it; the queue keeps the order.
    unsafe {
        let status = driver::cuMemsetD32Async(laid.bad, 0, x.rows, stream as driver::CUstream);
        check(status, "cuMemsetD32Async")?;
        w.engine.simple.nvfp4(x, w.act.rule, w.x, global, &stored, stream)?;
        w.kernels.operand(&w.operand, &quantised, &laid, stream)?;
        w.product.run(&operands, rows, at(room.scratch), stream)?;
        w.kernels.finish(&w.operand, &laid, operands.y, w.padded[0], y, stream)
    }
}

/// `dx = dy W` with the decoded weight, on a plain kernel.
///
/// # Safety
/// As for [`forward`].
pub unsafe fn backward_input(w: &Weight, dy: Mat, dx: Mat, exec: &Exec) -> Outcome {
    check_shape([w.max_m, dy.rows, dx.rows], ["dy", "dx"])?;
    // SAFETY: forwarded.
    unsafe { w.kernels.backward(&w.operand, &dy, &dx, exec.stream()) }
        .map_err(|e| w.shaped(e, "gradient", dy.rows))
}

/// The whole matrix.
///
/// # Safety
/// The matrix is device memory.
pub unsafe fn dequantize(w: &Weight, out: Mat, exec: &Exec) -> Outcome {
    // SAFETY: forwarded.
    unsafe { w.kernels.dequantize(&w.operand, &out, exec.stream()) }.map_err(|e| w.shaped(e, "decoding", w.n))
}
