//! The product: activations into the form the kernels read, then row blocks over the caller's threads. Every output is
//! summed by one task in one order, so neither threads nor other rows can change its bits.
use crate::activations::{self, Quantised};
use crate::call::{Exec, Fail, Mat, Outcome, part};
use crate::kernels::rounding::Rounding;
use crate::kernels::{
    Acc, FloatRows, GROUPS, LANES, MOST_ROWS, PAIR, Product, Rows, SCALE_FACTOR, TILE_BYTES, Tile,
};
use crate::weight::{Weight, check_rows};
use crate::wide;
use q4_core::formats::nvfp4;
use q4_core::{ActGlobal, Activations, DType, GlobalScale};

/// Most rows of a direct kernel.
const DIRECT: usize = 8;
/// Tasks for each thread in a product of few rows. One takes microseconds, and the last one is what threads wait for.
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

/// `y = x W^T`.
///
/// # Safety
/// The matrices are readable and writable, do not overlap, and `exec` is the caller's.
pub unsafe fn forward(w: &Weight, x: Mat, y: Mat, exec: &Exec) -> Outcome {
    check_rows(w, &x, &y, ["x", "y"])?;
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
                    let (x, y) = (x.rows_from(first, count), y.rows_from(first, count));
                    let rows = if w.x == DType::F32 {
                        FloatRows { x: x.floats(), ld: x.ld, rows: x.rows }
                    } else {
                        activations::widen(&x, scratch.cast(), exec)?
                    };
                    multiply(w, &kernels.float, rows, y, 1.0, exec)
                };
                match wide::multiply(w, wide::Inputs::Floats(x), y, 1.0, unit, exec)? {
                    None => rows(0, x.rows),
                    Some(refused) => refused.into_iter().try_for_each(|row| rows(row, 1)),
                }
            }
            Activations::Int8 => {
                let q = Quantised::new(scratch, x.rows);
                q.int8(&x, kernels, exec)?;
                multiply(w, &kernels.bytes, q.rows(), y, 0.5, exec)
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
                multiply(w, &kernels.bytes, q.rows(), y, factor, exec)
            }
        }
    }
}

/// What undoubles weights and NVFP4 activations and applies the activations' per-tensor scale.
pub fn nvfp4_factor(global: Option<GlobalScale>) -> f64 {
    0.25 * global.map_or(1.0, GlobalScale::multiplier)
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
    let is_direct = x.rows() <= kernels.direct_rows;
    let tasks = if is_direct { exec.tasks_of(TASKS, pairs) } else { exec.tasks(pairs) };
    exec.run(tasks, |t| {
        let pairs = part(pairs, tasks, t);
        // SAFETY: x has the rows it states, and this task alone writes the columns of its row blocks.
        unsafe {
            if is_direct {
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
    let mut acc = [[[0.0; LANES]; PAIR]; DIRECT];
    for pair in pairs {
        let count = PAIR.min(w.row_blocks() - pair * PAIR);
        // SAFETY: by contract; `direct_rows` is at most DIRECT.
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
    let (mut acc, mut tiles) = ([[[0.0; LANES]; PAIR]; MOST_ROWS], [T::BLANK; PAIR]);
    for first in (0..x.rows()).step_by(T::ROWS) {
        let acc = &mut acc[..T::ROWS.min(x.rows() - first)];
        for pair in pairs.clone() {
            let count = PAIR.min(w.row_blocks() - pair * PAIR);
            let b = w.blocks(pair * PAIR, count);
            acc.as_flattened_mut().as_flattened_mut().fill(0.0); // becomes memset
            for t in 0..w.tiles() {
                // SAFETY: by contract; tile and groups are inside the row blocks.
                unsafe {
                    for c in 0..count {
                        (kernels.unpack)(b.tiles.add(c * b.stride + t * TILE_BYTES), &mut tiles[c]);
                    }
                    let x = x.window(first, acc.len(), t);
                    let groups = GROUPS.min(b.groups - t * GROUPS);
                    (kernels.panel)(tiles.as_ptr(), count, groups, x, acc.as_mut_ptr());
                }
            }
            // SAFETY: by contract.
            unsafe { store(w, y, factor, pair, first, acc) };
        }
    }
}

/// Writes the sums of `acc.len()` rows from `first` on with a pair of row blocks.
///
/// # Safety
/// y has these rows, and nobody else touches the columns.
pub unsafe fn store(w: &Weight, y: Mat, factor: f64, pair: usize, first: usize, acc: &[Acc]) {
    let column = pair * PAIR * LANES;
    let len = (w.n - column).min(PAIR * LANES);
    let factors = factors(w, column, len, factor * SCALE_FACTOR);
    let finish = w.kernels().finish;
    if y.dtype == DType::F32 && len == PAIR * LANES {
        // SAFETY: the kernels run on this processor; the rows exist and the columns are this task's.
        unsafe { finish(acc, &factors, y.floats().cast_mut().add(first * y.ld + column), y.ld) };
        return;
    }
    let mut out = [[0.0; PAIR * LANES]; DIRECT];
    for (i, acc) in acc.chunks(DIRECT).enumerate() {
        // SAFETY: as above.
        unsafe {
            finish(acc, &factors, out.as_mut_ptr().cast(), PAIR * LANES);
            for (r, out) in out[..acc.len()].iter().enumerate() {
                y.store(first + i * DIRECT + r, column, &out[..len]);
            }
        }
    }
}

/// What sums of `len` columns from `column` on are multiplied with: mostly one number.
fn factors(w: &Weight, column: usize, len: usize, factor: f64) -> [f64; PAIR * LANES] {
    let of = |global: Option<GlobalScale>| global.map_or(1.0, GlobalScale::multiplier) * factor;
    let mut out = [0.0; PAIR * LANES];
    let mut from = 0;
    for span in w.spans.iter().filter(|s| s.end > column) {
        let to = (span.end - column).min(len);
        out[from..to].fill(of(span.global));
        from = to;
        if to == len {
            break;
        }
    }
    out
}
