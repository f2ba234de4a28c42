//! The calls on a native weight.
//!
//! cuBLASLt writes f32 sums to the workspace, not y itself: segments have per-tensor scales of their own, y
//! has any stride and alignment, a row that cannot be quantised must become NaN, and the scales of both
//! operands together may leave the range of f32.
use super::Weight;
use super::kernels::{Laid, Rows};
use crate::call::{Mat, check_rows, invalid, scratch};
use crate::cuda::forward::placed;
use crate::cuda::simple::matrix;
use q4_core::formats::swizzle;
use q4_core::{Code, Error, ExecContext, PreparedInfo, PreparedWeight, Result, TensorView, TensorViewMut};
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
fn workspace(w: &Weight, m: u64) -> Option<u64> {
    let m = usize::try_from(m).ok()?.clamp(1, part_rows(w.padded[0]));
    Some(room(w, m).ok()?.1.all)
}

/// Padded rows of a part of `m` rows, and its workspace.
fn room(w: &Weight, m: usize) -> Result<(usize, Room)> {
    let none = || Error::new(Code::Unsupported, format!("cuBLASLt has no FP4 kernel for {m} rows"));
    let rows = w.product.rows(m)?.ok_or_else(none)?;
    Ok((rows, Room::new(m, rows, w.spans.len(), w.k, w.padded)))
}

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        let bytes = workspace(self, m as u64);
        bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }

    fn forward(&self, x: TensorView<'_>, mut y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        placed(&[&x, &y.as_view()], cx)?;
        let x = Mat::input(&x, "x", self.k, self.x)?;
        let y = Mat::output(&mut y, "y", self.n, self.y)?;
        check_rows(self.max_m, &x, &y)?;
        let at = scratch(cx, workspace(self, x.rows as u64), 256)?.addr() as u64;
        // SAFETY: views of memory of this device, y and the scratch unique ones; the scratch has the size
        // that was asked for.
        unsafe { in_parts(self, &x, &y, at, cx.stream) }.map_err(|e| self.shaped(e, "product", x.rows))
    }

    /// `dx = dy W` with the decoded weight, on a plain kernel.
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        mut dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        placed(&[&dy, &dx.as_view()], cx)?;
        let dy = Mat::input(&dy, "dy", self.n, self.y)?;
        let dx = Mat::output(&mut dx, "dx", self.k, self.x)?;
        check_rows(self.max_m, &dy, &dx)?;
        // SAFETY: as in `forward`.
        unsafe { self.kernels.backward(&self.operand, &dy, &dx, cx.stream) }
            .map_err(|e| self.shaped(e, "gradient", dy.rows))
    }

    fn dequantize(&self, mut out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        placed(&[&out.as_view()], cx)?;
        let dtype = out.as_view().dtype();
        let out = Mat::output(&mut out, "decoded weight", self.k, dtype)?;
        if out.rows != self.n {
            return Err(invalid("decoded weight", format!("{} rows", self.n), out.rows));
        }
        // SAFETY: as in `forward`.
        unsafe { self.kernels.dequantize(&self.operand, &out, cx.stream) }
            .map_err(|e| self.shaped(e, "decoding", self.n))
    }
}

unsafe fn in_parts(w: &Weight, x: &Mat, y: &Mat, workspace: u64, stream: usize) -> Result<()> {
    // SAFETY: forwarded.
    unsafe {
        // From all rows, not from those of a part.
        let global = w.engine.simple.rows.scale(matrix(x), &w.act, w.x, workspace, stream)?;
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
        w.engine.simple.rows.nvfp4(matrix(x), w.act.rule, w.x, global, &stored, stream)?;
        w.kernels.operand(&w.operand, &quantised, &laid, stream)?;
        w.product.run(&operands, rows, at(room.scratch), stream)?;
        w.kernels.finish(&w.operand, &laid, operands.y, w.padded[0], y, stream)
    }
}
