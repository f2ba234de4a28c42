//! Launchers of `cuda/simple.cu`: every shape, type and activation format, without hurry.
use super::{FILES, Weight};
use crate::call::Mat;
use q4_core::Result;
use q4_cuda::{Gpu, Kernel, Launch, Matrix, RowKernels, Source, check, driver, mirror, over_rows};
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
    /// What quantises activations.
    pub rows: RowKernels,
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
        let how = Launch::new([(slabs * 4).div_ceil(32), padded / 16, 1], [32, 8, 1], 0);
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
        let how = Launch::new(over_rows(w.k.div_ceil(256), w.n), [256, 1, 1], stream);
        // SAFETY: by contract.
        unsafe { self.dequantize.launch(how, Dequantize { w: packed(w), out: matrix(out) }) }
    }

    /// `dx = dy W`.
    ///
    /// # Safety
    /// Both are device memory.
    pub unsafe fn backward(&self, w: &Weight, dy: &Mat, dx: &Mat, stream: usize) -> Result<()> {
        for (first, dx) in matrix(dx).parts() {
            let dy = matrix(dy).rows_from(first, dx.rows as usize);
            let how = Launch::new([w.k.div_ceil(32), dx.rows as usize, 1], [32, 16, 1], stream);
            // SAFETY: by contract.
            unsafe { self.backward.launch(how, Backward { w: packed(w), dy, dx })? };
        }
        Ok(())
    }

    /// `y = x W^T` with x as it is.
    ///
    /// # Safety
    /// Both are device memory.
    pub unsafe fn forward_float(&self, w: &Weight, x: &Mat, y: &Mat, stream: usize) -> Result<()> {
        for (first, y) in matrix(y).parts() {
            let x = matrix(x).rows_from(first, y.rows as usize);
            // SAFETY: by contract.
            unsafe { self.forward_float.launch(tiles(w, y, stream), ForwardFloat { w: packed(w), x, y })? };
        }
        Ok(())
    }

    /// `y = q W^T`.
    ///
    /// # Safety
    /// `q` has the rows of y.
    pub unsafe fn forward_int(&self, w: &Weight, q: Quantised, y: &Mat, stream: usize) -> Result<()> {
        for (first, y) in matrix(y).parts() {
            let args = ForwardInt {
                w: packed(w),
                q: q.q + (first * w.k) as u64,
                steps: q.steps + (first * (w.k / 16) * 4) as u64,
                act_global: q.global,
                act_convention: q.convention,
                factor: q.factor,
                y,
            };
            // SAFETY: by contract.
            unsafe { self.forward_int.launch(tiles(w, y, stream), args)? };
        }
        Ok(())
    }
}

/// A warp for each row of the weight and four of y.
fn tiles(w: &Weight, y: Matrix, stream: usize) -> Launch {
    Launch::new([w.n.div_ceil(8), (y.rows as usize).div_ceil(4), 1], [32, 8, 1], stream)
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    SOURCE.takes::<Pack>("q4_pack")?;
    SOURCE.takes::<Dequantize>("q4_dequantize")?;
    SOURCE.takes::<Backward>("q4_backward")?;
    SOURCE.takes::<ForwardFloat>("q4_forward_float")?;
    SOURCE.takes::<ForwardInt>("q4_forward_int")
}
