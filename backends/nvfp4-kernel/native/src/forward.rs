//! The product: activations into the form the kernels read, then row blocks over the caller's threads. Every
//! output is summed by one task in one order, so neither threads nor other rows can change its bits.
use crate::activations::{self, Quantised};
use crate::call::{Mat, Threads, on_host, scratch};
use crate::kernels::rounding::Rounding;
use crate::kernels::{FloatRows, GROUPS, LANES, MOST_ROWS, PAIR, Product, Rows, TILE_BYTES, Tile};
use crate::output::{self, Output};
use crate::probe::refused;
use crate::weight::Weight;
use crate::{backward, wide};
use q4_core::formats::nvfp4;
use q4_core::isa::Isa;
use q4_core::{
    ActGlobal, Activations, DType, ExecContext, FuseSet, Fusion, GlobalScale, LinearSpec, PreparedInfo,
    PreparedWeight, Result, TensorView, TensorViewMut,
};

/// Most rows of a direct kernel.
const DIRECT: usize = 8;
/// Tasks for each thread: the last one is what threads wait for, and processors that others use too are not
/// equally fast.
const TASKS: usize = 16;

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        let bytes = workspace(self.isa, &self.activations, self.x, self.k, m as u64);
        bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.product(&x, FuseSet::NONE, y, cx)
    }

    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        set == FuseSet::NONE || output::fuses(self, m, set)
    }

    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        self.product(&x, fusion.set(), y, cx)
    }

    fn backward_input(
        &self,
        dy: TensorView<'_>,
        mut dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        on_host(&[&dy, &dx.as_view()])?;
        let dy = Mat::input(&dy, "dy", self.n, self.y)?;
        let dx = Mat::output(&mut dx, "dx", self.k, self.x)?;
        // SAFETY: views of host memory, dx a unique one.
        unsafe { backward::backward_input(self, dy, dx, &Threads(cx.threads)) }
    }

    fn dequantize(&self, mut out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        on_host(&[&out.as_view()])?;
        let dtype = out.as_view().dtype();
        let out = Mat::output(&mut out, "decoded weight", self.k, dtype)?;
        // SAFETY: a unique view of host memory.
        unsafe { backward::dequantize(self, out, &Threads(cx.threads)) }
    }
}

impl Weight {
    /// `y = x W^T`, fused with `set`.
    fn product(
        &self,
        x: &TensorView<'_>,
        set: FuseSet,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        on_host(&[x, &y.as_view()])?;
        let (columns, y_type) = output::shape(self, set);
        let x = Mat::input(x, "x", self.k, self.x)?;
        let y = Output::new(self, &x, set, Mat::output(&mut y, "y", columns, y_type)?)?;
        let need = workspace(self.isa, &self.activations, self.x, self.k, x.rows as u64);
        let scratch = scratch(cx, need, 64)?;
        // SAFETY: views of host memory, y and the scratch unique ones; the scratch has the size of
        // `workspace`.
        unsafe { forward(self, x, &y, scratch, &Threads(cx.threads)) }
    }
}

/// Scratch bytes of a product with `m` rows; `None` when that overflows.
fn workspace(isa: Isa, activations: &Activations, x: DType, k: usize, m: u64) -> Option<u64> {
    rows_bytes(activations, x, k, m)?.checked_add(wide::workspace(isa, activations, k, m)?)
}

/// That of the largest call of a weight of `spec`.
pub fn most_workspace(spec: &LinearSpec, isa: Isa) -> u64 {
    workspace(isa, &spec.activations, spec.x, spec.k, spec.max_m as u64).unwrap_or(u64::MAX)
}

/// Those of the inputs in the form of the kernels, whole cache lines.
fn rows_bytes(activations: &Activations, x: DType, k: usize, m: u64) -> Option<u64> {
    let bytes = match activations {
        Activations::Native if x == DType::F32 => 0,
        Activations::Native => m.checked_mul(k as u64)?.checked_mul(4)?,
        _ => Quantised::bytes(m, k)?,
    };
    bytes.checked_next_multiple_of(64)
}

unsafe fn forward(w: &Weight, x: Mat, y: &Output<'_>, scratch: *mut u8, threads: &Threads<'_>) -> Result<()> {
    let rows = rows_bytes(&w.activations, w.x, w.k, x.rows as u64).unwrap_or(0);
    let unit = scratch.wrapping_add(rows as usize);
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
                        activations::widen(&x, scratch.cast(), threads)
                    };
                    multiply(&kernels.float, rows, y, 1.0, threads);
                };
                match wide::multiply(w, wide::Inputs::Floats(x), y, 1.0, unit, threads) {
                    None => rows(0, x.rows),
                    Some(refused) => refused.into_iter().for_each(|row| rows(row, 1)),
                }
            }
            Activations::Fp8(_) => return Err(refused(&w.activations)),
            Activations::Int8 => {
                let q = Quantised::new(scratch, x.rows);
                q.int8(&x, kernels, threads)?;
                multiply(&kernels.bytes, q.rows(), y, 0.5, threads);
            }
            Activations::Nvfp4(act) => {
                let global = match act.global {
                    ActGlobal::None => None,
                    ActGlobal::Static(g) => Some(g),
                    ActGlobal::PerCall => {
                        let amax = activations::amax(&x, kernels, threads)?;
                        Some(nvfp4::global_from_amax(act.rule, amax, w.x)?)
                    }
                };
                let rounding = Rounding::new(nvfp4::Quantizer { rule: act.rule, global, source: w.x });
                let q = Quantised::new(scratch, x.rows);
                q.nvfp4(&x, &rounding, kernels, threads)?;
                // Only the inputs are doubled there.
                let factor = nvfp4_factor(global);
                let on_unit = wide::multiply(w, wide::Inputs::Bytes(q), y, 2.0 * factor, unit, threads);
                if on_unit.is_none() {
                    multiply(&kernels.bytes, q.rows(), y, factor, threads);
                }
            }
        }
    }
    Ok(())
}

/// What undoubles weights and NVFP4 activations and applies the activations' per-tensor scale.
fn nvfp4_factor(global: Option<GlobalScale>) -> f64 {
    0.25 * global.map_or(1.0, GlobalScale::multiplier)
}

/// Sums over k, each made `factor * global * 2^8` times itself, to y, pair by pair of row blocks.
fn multiply<X: Rows, T: Tile>(
    kernels: &Product<X, T>,
    x: X,
    y: &Output<'_>,
    factor: f64,
    threads: &Threads<'_>,
) {
    let pairs = y.pairs();
    let is_direct = x.rows() <= kernels.direct_rows;
    threads.each(threads.tasks_of(TASKS, pairs), pairs, |pairs| {
        // SAFETY: x has the rows it states, and this task alone writes the columns of its row blocks.
        unsafe {
            if is_direct {
                few_rows(kernels, x, y, factor, pairs);
            } else {
                many_rows(kernels, x, y, factor, pairs);
            }
        }
    });
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
    for first in (0..x.rows()).step_by(kernels.panel_rows) {
        let acc = &mut acc[..kernels.panel_rows.min(x.rows() - first)];
        for pair in pairs.clone() {
            let b = y.blocks(pair);
            acc.as_flattened_mut().as_flattened_mut().fill(0.0); // becomes memset
            for t in 0..b.groups.div_ceil(GROUPS) {
                // SAFETY: by contract; tile and groups are inside the row blocks.
                unsafe {
                    let ahead = b.ahead(t, b.count);
                    for c in 0..b.count {
                        (kernels.unpack)(b.tiles.add(c * b.stride + t * TILE_BYTES), ahead, &mut tiles[c]);
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
