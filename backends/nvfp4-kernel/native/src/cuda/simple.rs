//! Launchers of `cuda/simple.cu`: every shape, type and activation format, without hurry.
use super::{FILES, Weight};
use crate::call::Mat;
use q4_core::{DType, GlobalScale, Result, Rule};
use q4_cuda::{Gpu, Kernel, Launch, Matrix, RowKernels, Source, check, driver, mirror};
pub use q4_cuda::{Stored, convention, number as dtype, rule};
use std::sync::Arc;

pub(super) const SOURCE: Source =
    Source { name: "nvfp4-simple", text: include_str!("../../cuda/simple.cu"), files: FILES };

/// The functions of `simple.cu`.
pub struct Kernels {
    gpu: Arc<Gpu>,
    pack: Kernel<Pack>,
    dequantize: Kernel<Dequantize>,
    backward: Kernel<Backward>,
    forward_float: Kernel<ForwardFloat>,
    forward_int: Kernel<ForwardInt>,
    rows: RowKernels,
}

/// `Span` of `simple.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Span {
    /// First row behind it.
    pub end: u32,
    /// Padding rows before it.
    pub skip: u32,
    /// 0, 1 (multiply) or 2 (divide).
    pub convention: u32,
    /// Per-tensor scale.
    pub global: f32,
}

impl Span {
    /// As the device reads them.
    pub fn bytes(all: &[Self]) -> &[u8] {
        // SAFETY: plain old data without padding.
        unsafe { std::slice::from_raw_parts(all.as_ptr().cast(), size_of_val(all)) }
    }
}

mirror! {
    /// `Weight` of `simple.cu`.
    struct Packed { codes: u64, scales: u64, spans: u64, n: u32, k: u32, slabs: u32, unused: u32 }

    struct Pack {
        codes: u64, scales: u64, is_tiled: u32, rows: u32, groups: u32, first: u32, slabs: u32,
        out_codes: u64, out_scales: u64, bad: u64,
    }
    struct Dequantize { w: Packed, out: Matrix }
    struct Backward { w: Packed, dy: Matrix, dx: Matrix }
    struct ForwardFloat { w: Packed, x: Matrix, y: Matrix }
    struct ForwardInt {
        w: Packed, q: u64, steps: u64, act_global: u64, act_convention: u32, factor: f64, y: Matrix,
    }
}

/// A checked matrix as kernels take it.
pub fn matrix(m: &Mat) -> Matrix {
    Matrix::new(m.address(), m.dtype, m.rows, m.cols, m.ld)
}

/// Stored bytes of one segment on the device.
pub struct Raw {
    /// Codes.
    pub codes: u64,
    /// Scales.
    pub scales: u64,
    /// Scales in tiles.
    pub is_tiled: bool,
    /// Rows.
    pub rows: usize,
    /// k / 16.
    pub groups: usize,
    /// Where the first bad scale is counted: a u64, all ones beforehand.
    pub bad: u64,
}

/// Quantised rows on the device.
#[derive(Clone, Copy)]
pub struct Quantised {
    /// int8 `[m, k]`.
    pub q: u64,
    /// f32 `[m, k / 16]`.
    pub steps: u64,
    /// Address of a per-tensor scale, or 0.
    pub global: u64,
    /// Its convention, 1 or 2.
    pub convention: u32,
    /// What sums are multiplied with beside the per-tensor scales.
    pub factor: f64,
}

fn packed(w: &Weight) -> Packed {
    Packed {
        codes: w.codes,
        scales: w.scales,
        spans: w.spans_at,
        n: w.n as u32,
        k: w.k as u32,
        slabs: w.slabs as u32,
        unused: 0,
    }
}

fn grid(x: usize, y: usize, block: [u32; 3], stream: usize) -> Launch {
    Launch { grid: [x as u32, y as u32, 1], block, shared: 0, stream, overlap: false }
}

impl Kernels {
    /// Compiles or finds them for `gpu`.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        // Those that are not on disk yet compile side by side.
        let (all, rows) = std::thread::scope(|scope| {
            let rows = scope.spawn(|| RowKernels::load(gpu));
            (q4_cuda::Kernels::load(gpu, &SOURCE, &[]), super::joined(rows))
        });
        let (all, rows) = (all?, rows?);
        Ok(Self {
            gpu: gpu.clone(),
            pack: all.get("q4_pack")?,
            dequantize: all.get("q4_dequantize")?,
            backward: all.get("q4_backward")?,
            forward_float: all.get("q4_forward_float")?,
            forward_int: all.get("q4_forward_int")?,
            rows,
        })
    }

    /// Sets u64s to their largest value, on the default stream.
    ///
    /// # Safety
    /// `at` is device memory of ours.
    pub unsafe fn set_largest(&self, at: u64, count: usize) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: by contract.
        let status = unsafe { driver::cuMemsetD32Async(at, u32::MAX, 2 * count, std::ptr::null_mut()) };
        check(status, "cuMemsetD32Async")
    }

    /// Reads u64s after all work of the default stream.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn get_words(&self, at: u64, count: usize) -> Result<Vec<u64>> {
        let mut values = vec![0u64; count];
        self.gpu.bind()?;
        // SAFETY: by contract.
        let status = unsafe { driver::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), at, 8 * count) };
        self.gpu.blame(check(status, "cuMemcpyDtoH"))?;
        Ok(values)
    }

    /// Packs a segment whose first padded row is `first`, on the default stream.
    ///
    /// # Safety
    /// All addresses are of device memory of the sizes the layout says.
    pub unsafe fn pack(&self, raw: &Raw, first: usize, slabs: usize, codes: u64, scales: u64) -> Result<()> {
        let padded = raw.rows.next_multiple_of(16);
        let how = grid((slabs * 4).div_ceil(32), padded / 16, [32, 8, 1], 0);
        let args = Pack {
            codes: raw.codes,
            scales: raw.scales,
            is_tiled: raw.is_tiled.into(),
            rows: raw.rows as u32,
            groups: raw.groups as u32,
            first: first as u32,
            slabs: slabs as u32,
            out_codes: codes,
            out_scales: scales,
            bad: raw.bad,
        };
        // SAFETY: by contract.
        unsafe { self.pack.launch(how, args) }
    }

    /// The decoded matrix.
    ///
    /// # Safety
    /// `out` is device memory.
    pub unsafe fn dequantize(&self, w: &Weight, out: &Mat, stream: usize) -> Result<()> {
        let mut how = grid(w.k.div_ceil(256), w.n.min(32768), [256, 1, 1], stream);
        how.grid[2] = w.n.div_ceil(32768) as u32;
        // SAFETY: by contract.
        unsafe { self.dequantize.launch(how, Dequantize { w: packed(w), out: matrix(out) }) }
    }

    /// `dx = dy W`.
    ///
    /// # Safety
    /// Both are device memory.
    pub unsafe fn backward(&self, w: &Weight, dy: &Mat, dx: &Mat, stream: usize) -> Result<()> {
        each_rows(dy, dx, MAX_ROWS, |dy, dx| {
            let how = grid(w.k.div_ceil(32), dy.rows, [32, 16, 1], stream);
            // SAFETY: by contract.
            unsafe { self.backward.launch(how, Backward { w: packed(w), dy: matrix(dy), dx: matrix(dx) }) }
        })
    }

    /// `y = x W^T` with x as it is.
    ///
    /// # Safety
    /// Both are device memory.
    pub unsafe fn forward_float(&self, w: &Weight, x: &Mat, y: &Mat, stream: usize) -> Result<()> {
        each_rows(x, y, MAX_ROWS, |x, y| {
            let how = grid(w.n.div_ceil(8), y.rows.div_ceil(4), [32, 8, 1], stream);
            // SAFETY: by contract.
            unsafe {
                self.forward_float.launch(how, ForwardFloat { w: packed(w), x: matrix(x), y: matrix(y) })
            }
        })
    }

    /// `y = q W^T`.
    ///
    /// # Safety
    /// `q` has the rows of y.
    pub unsafe fn forward_int(&self, w: &Weight, q: Quantised, y: &Mat, stream: usize) -> Result<()> {
        for first in (0..y.rows).step_by(MAX_ROWS) {
            let y = y.rows_from(first, MAX_ROWS.min(y.rows - first));
            let how = grid(w.n.div_ceil(8), y.rows.div_ceil(4), [32, 8, 1], stream);
            let args = ForwardInt {
                w: packed(w),
                q: q.q + (first * w.k) as u64,
                steps: q.steps + (first * (w.k / 16) * 4) as u64,
                act_global: q.global,
                act_convention: q.convention,
                factor: q.factor,
                y: matrix(&y),
            };
            // SAFETY: by contract.
            unsafe { self.forward_int.launch(how, args)? };
        }
        Ok(())
    }

    /// The per-tensor scale of all rows of x, to the f32 at `out`.
    ///
    /// # Safety
    /// x and `out` are device memory.
    pub unsafe fn global_of(&self, x: &Mat, r: Rule, source: DType, out: u64, stream: usize) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.rows.global_of(matrix(x), r, source, out, stream) }
    }

    /// A per-tensor scale to the f32 at `out`.
    ///
    /// # Safety
    /// `out` is device memory.
    pub unsafe fn set_global(&self, g: GlobalScale, out: u64, stream: usize) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.rows.set_global(g, out, stream) }
    }

    /// Rows to int8.
    ///
    /// # Safety
    /// x is device memory, `q` and `steps` have room for its rows.
    pub unsafe fn int8(&self, x: &Mat, q: u64, steps: u64, stream: usize) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.rows.int8(matrix(x), q, steps, stream) }
    }

    /// Rows to NVFP4; outputs at 0 are left out.
    ///
    /// # Safety
    /// x is device memory, the outputs have room for its rows.
    pub unsafe fn nvfp4(
        &self,
        x: &Mat,
        r: Rule,
        source: DType,
        global: u64,
        to: &Stored,
        stream: usize,
    ) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.rows.nvfp4(matrix(x), r, source, global, to, stream) }
    }
}

/// Rows of one launch: what the second dimension of a grid holds.
const MAX_ROWS: usize = 32768;

fn each_rows(a: &Mat, b: &Mat, step: usize, mut run: impl FnMut(&Mat, &Mat) -> Result<()>) -> Result<()> {
    for first in (0..a.rows).step_by(step) {
        let rows = step.min(a.rows - first);
        run(&a.rows_from(first, rows), &b.rows_from(first, rows))?;
    }
    Ok(())
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    SOURCE.takes::<Pack>("q4_pack")?;
    SOURCE.takes::<Dequantize>("q4_dequantize")?;
    SOURCE.takes::<Backward>("q4_backward")?;
    SOURCE.takes::<ForwardFloat>("q4_forward_float")?;
    SOURCE.takes::<ForwardInt>("q4_forward_int")
}
