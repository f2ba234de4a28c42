//! The product: activations into the form the kernels read, then row blocks over the caller's threads. Every
//! output is summed by one task in one order, so neither threads nor other rows can change its bits.
use crate::activations::{self, Quantised};
use crate::call::{Exec, Fail, Mat, Outcome, part};
use crate::kernels::rounding::Rounding;
use crate::kernels::{FloatRows, GROUPS, LANES, MOST_ROWS, PAIR, Product, Rows, TILE_BYTES, Tile};
use crate::output::Output;
use crate::weight::Weight;
use crate::wide;
use q4_core::formats::nvfp4;
use q4_core::{ActGlobal, Activations, DType, FuseSet, GlobalScale};

/// Most rows of a direct kernel.
const DIRECT: usize = 8;
/// Tasks for each thread: the last one is what threads wait for, and processors that others use too are not
/// equally fast.
const TASKS: usize = 16;

/// Scratch bytes of a product with `m` rows; `None` when that overflows.
pub fn workspace(w: &Weight, m: u64) -> Option<u64> {
    rows_bytes(w, m)?.checked_add(wide::workspace(w, m)?)
}

/// Those of the inputs in the form of the kernels, whole cache lines.
fn rows_bytes(w: &Weight, m: u64) -> Option<u64> {
    let bytes = match w.activations {
        Activations::Native if w.x == DType::F32 => 0,
        Activations::Native => m.checked_mul(w.k as u64)?.checked_mul(4)?,
        _ => Quantised::bytes(m, w.k)?,
    };
    bytes.checked_next_multiple_of(64)
}

/// `y = x W^T`, fused with `set`.
///
/// # Safety
/// The matrices are readable and writable, do not overlap, and `exec` is the caller's.
pub unsafe fn forward(w: &Weight, x: Mat, set: FuseSet, y: Mat, exec: &Exec) -> Outcome {
    let y = &Output::new(w, x.rows, set, y)?;
    let need = workspace(w, x.rows as u64);
    let need = need.ok_or_else(|| Fail::invalid("x", "a workspace that fits the address space", x.rows))?;
    let scratch = exec.scratch(need)?;
    let unit = scratch.wrapping_add(rows_bytes(w, x.rows as u64).unwrap_or(0) as usize);
    let kernels = w.kernels();
    // SAFETY: x is readable, and the workspace has the size that was asked for.
    unsafe {
        match w.activations {
            Activations::Native => {
                let rows = |first, count| {
                    let (x, y) = (x.rows_from(first, count), &y.rows_from(first, count));
                    let rows = if w.x == DType::F32 {
                        FloatRows { x: x.floats(), ld: x.ld, rows: x.rows }
                    } else {
                        activations::widen(&x, scratch.cast(), exec)?
                    };
                    multiply(&kernels.float, rows, y, 1.0, exec)
                };
                match wide::multiply(w, wide::Inputs::Floats(x), y, 1.0, unit, exec)? {
                    None => rows(0, x.rows),
                    Some(refused) => refused.into_iter().try_for_each(|row| rows(row, 1)),
                }
            }
            Activations::Int8 => {
                let q = Quantised::new(scratch, x.rows);
                q.int8(&x, kernels, exec)?;
                multiply(&kernels.bytes, q.rows(), y, 0.5, exec)
            }
            Activations::Nvfp4(act) => {
                let global = match act.global {
                    ActGlobal::None => None,
                    ActGlobal::Static(g) => Some(g),
                    ActGlobal::PerCall => {
                        let amax = activations::amax(&x, kernels, exec)?;
                        Some(nvfp4::global_from_amax(act.rule, amax, w.x)?)
                    }
                };
                let rounding = Rounding::new(nvfp4::Quantizer { rule: act.rule, global, source: w.x });
                let q = Quantised::new(scratch, x.rows);
                q.nvfp4(&x, &rounding, kernels, exec)?;
                // Only the inputs are doubled there.
                let factor = nvfp4_factor(global);
                if wide::multiply(w, wide::Inputs::Bytes(q), y, 2.0 * factor, unit, exec)?.is_some() {
                    return Ok(());
                }
                multiply(&kernels.bytes, q.rows(), y, factor, exec)
            }
        }
    }
}

/// What undoubles weights and NVFP4 activations and applies the activations' per-tensor scale.
pub fn nvfp4_factor(global: Option<GlobalScale>) -> f64 {
    0.25 * global.map_or(1.0, GlobalScale::multiplier)
}

/// Sums over k, each made `factor * global * 2^8` times itself, to y, pair by pair of row blocks.
pub fn multiply<X: Rows, T: Tile>(
    kernels: &Product<X, T>,
    x: X,
    y: &Output<'_>,
    factor: f64,
    exec: &Exec,
) -> Outcome {
    let pairs = y.pairs();
    let is_direct = x.rows() <= kernels.direct_rows;
    let tasks = exec.tasks_of(TASKS, pairs);
    exec.run(tasks, |t| {
        let pairs = part(pairs, tasks, t);
        // SAFETY: x has the rows it states, and this task alone writes the columns of its row blocks.
        unsafe {
            if is_direct {
                few_rows(kernels, x, y, factor, pairs);
            } else {
                many_rows(kernels, x, y, factor, pairs);
            }
        }
    })
}

unsafe fn few_rows<X: Rows, T>(
    kernels: &Product<X, T>,
    x: X,
    y: &Output<'_>,
    factor: f64,
    pairs: std::ops::Range<usize>,
) {
    let mut acc = [[[0.0; LANES]; PAIR]; DIRECT];
    for pair in pairs {
        // SAFETY: by contract; `direct_rows` is at most DIRECT.
        unsafe {
            (kernels.direct)(y.blocks(pair), x, acc.as_mut_ptr());
            y.columns(pair, factor).store(0, &acc[..x.rows()]);
        }
    }
}

unsafe fn many_rows<X: Rows, T: Tile>(
    kernels: &Product<X, T>,
    x: X,
    y: &Output<'_>,
    factor: f64,
    pairs: std::ops::Range<usize>,
) {
    let (mut acc, mut tiles) = ([[[0.0; LANES]; PAIR]; MOST_ROWS], [T::BLANK; PAIR]);
    for first in (0..x.rows()).step_by(MOST_ROWS) {
        let acc = &mut acc[..MOST_ROWS.min(x.rows() - first)];
        for pair in pairs.clone() {
            let b = y.blocks(pair);
            acc.as_flattened_mut().as_flattened_mut().fill(0.0); // becomes memset
            for t in 0..b.groups.div_ceil(GROUPS) {
                // SAFETY: by contract; tile and groups are inside the row blocks.
                unsafe {
                    for c in 0..b.count {
                        (kernels.unpack)(b.tiles.add(c * b.stride + t * TILE_BYTES), &mut tiles[c]);
                    }
                    let x = x.window(first, acc.len(), t);
                    let groups = GROUPS.min(b.groups - t * GROUPS);
                    (kernels.panel)(tiles.as_ptr(), b.count, groups, x, acc.as_mut_ptr());
                }
            }
            // SAFETY: by contract.
            unsafe { y.columns(pair, factor).store(first, acc) };
        }
    }
}
