//! What training and inspection need of a weight on a device.
use super::Weight;
use crate::call::{Exec, Mat, Outcome};
use crate::weight::check_shape;

/// `dx = dy W` with the decoded weight.
///
/// # Safety
/// The matrices are device memory and do not overlap.
pub unsafe fn backward_input(w: &Weight, dy: Mat, dx: Mat, exec: &Exec) -> Outcome {
    check_shape([w.max_m, dy.rows, dx.rows], ["dy", "dx"])?;
    // SAFETY: forwarded.
    unsafe { w.engine.simple.backward(w, &dy, &dx, exec.stream()) }
        .map_err(|e| w.shaped(e, "gradient", dy.rows))
}

/// The whole matrix.
///
/// # Safety
/// The matrix is device memory.
pub unsafe fn dequantize(w: &Weight, out: Mat, exec: &Exec) -> Outcome {
    // SAFETY: forwarded.
    unsafe { w.engine.simple.dequantize(w, &out, exec.stream()) }.map_err(|e| w.shaped(e, "decoding", w.n))
}
