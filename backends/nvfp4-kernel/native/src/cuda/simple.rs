//! Launchers of `cuda/simple.cu`: every shape, type and activation format, without hurry.
use super::Weight;
use crate::abi;
use crate::call::Mat;
use q4_core::{DType, GlobalScale, Result, Rule};
use q4_cuda::{Gpu, Kernel, Launch, Source, args, check, driver};
use std::sync::Arc;

const SOURCE: Source = Source {
    name: "nvfp4-simple",
    text: concat!(include_str!("../../cuda/layout.cu"), include_str!("../../cuda/simple.cu")),
};

/// The functions of `simple.cu`.
pub struct Kernels {
    gpu: Arc<Gpu>,
    pack: Kernel,
    dequantize: Kernel,
    backward: Kernel,
    forward_float: Kernel,
    forward_int: Kernel,
    amax: Kernel,
    global: Kernel,
    int8: Kernel,
    nvfp4: Kernel,
    expand: Kernel,
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

/// `Weight` of `simple.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Packed {
    codes: u64,
    scales: u64,
    spans: u64,
    n: u32,
    k: u32,
    slabs: u32,
    unused: u32,
}

/// `Matrix` of `simple.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Matrix {
    data: u64,
    ld: u64,
    rows: u32,
    cols: u32,
    dtype: u32,
    unused: u32,
}

impl Matrix {
    fn new(m: &Mat) -> Self {
        Self {
            data: m.address(),
            ld: m.ld as u64,
            rows: m.rows as u32,
            cols: m.cols as u32,
            dtype: dtype(m.dtype),
            unused: 0,
        }
    }
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

fn dtype(d: DType) -> u32 {
    match d {
        DType::F16 => abi::F16,
        DType::BF16 => abi::BF16,
        _ => abi::F32,
    }
}

/// The number of a rule in `simple.cu`, which is that of the header.
pub fn rule(r: Rule) -> u32 {
    match r {
        Rule::TorchAo => abi::RULE_TORCHAO,
        Rule::ModelOpt => abi::RULE_MODELOPT,
        Rule::CompressedTensors => abi::RULE_COMPRESSED_TENSORS,
        Rule::TransformerEngine => abi::RULE_TRANSFORMER_ENGINE,
        _ => abi::RULE_RUNTIME,
    }
}

/// The number of a convention.
pub fn convention(r: Rule) -> u32 {
    match r.convention() {
        q4_core::Convention::Multiply => abi::CONVENTION_MULTIPLY,
        q4_core::Convention::Divide => abi::CONVENTION_DIVIDE,
    }
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
        let all = q4_cuda::Kernels::load(gpu, &SOURCE, &[])?;
        Ok(Self {
            gpu: gpu.clone(),
            pack: all.get("q4_pack")?,
            dequantize: all.get("q4_dequantize")?,
            backward: all.get("q4_backward")?,
            forward_float: all.get("q4_forward_float")?,
            forward_int: all.get("q4_forward_int")?,
            amax: all.get("q4_amax")?,
            global: all.get("q4_global")?,
            int8: all.get("q4_int8")?,
            nvfp4: all.get("q4_nvfp4")?,
            expand: all.get("q4_expand")?,
        })
    }

    /// Writes one u64; waits.
    ///
    /// # Safety
    /// `at` is device memory of ours.
    pub unsafe fn set_u64(&self, at: u64, value: u64) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: by contract; the value has left host memory when the call returns.
        check(unsafe { driver::cuMemcpyHtoD_v2(at, (&raw const value).cast(), 8) }, "cuMemcpyHtoD")
    }

    /// Reads one u64 after all work of the default stream.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn get_u64(&self, at: u64) -> Result<u64> {
        let mut value = 0u64;
        self.gpu.bind()?;
        // SAFETY: by contract.
        let status = unsafe { driver::cuMemcpyDtoH_v2((&raw mut value).cast(), at, 8) };
        self.gpu.blame(check(status, "cuMemcpyDtoH"))?;
        Ok(value)
    }

    /// Packs a segment whose first padded row is `first`, on the default stream.
    ///
    /// # Safety
    /// All addresses are of device memory of the sizes the layout says.
    pub unsafe fn pack(&self, raw: &Raw, first: usize, slabs: usize, codes: u64, scales: u64) -> Result<()> {
        let padded = raw.rows.next_multiple_of(16);
        let how = grid((slabs * 4).div_ceil(32), padded / 8, [32, 8, 1], 0);
        let (tiled, rows, groups) = (u32::from(raw.is_tiled), raw.rows as u32, raw.groups as u32);
        let (first, slabs) = (first as u32, slabs as u32);
        // SAFETY: by contract; the arguments are those of `q4_pack`.
        unsafe {
            self.pack.launch(
                how,
                args![raw.codes, raw.scales, tiled, rows, groups, first, slabs, codes, scales, raw.bad],
            )
        }
    }

    /// The decoded matrix.
    ///
    /// # Safety
    /// `out` is device memory.
    pub unsafe fn dequantize(&self, w: &Weight, out: &Mat, stream: usize) -> Result<()> {
        let mut how = grid(w.k.div_ceil(256), w.n.min(32768), [256, 1, 1], stream);
        how.grid[2] = w.n.div_ceil(32768) as u32;
        // SAFETY: by contract; the arguments are those of `q4_dequantize`.
        unsafe { self.dequantize.launch(how, args![packed(w), Matrix::new(out)]) }
    }

    /// `dx = dy W`.
    ///
    /// # Safety
    /// Both are device memory.
    pub unsafe fn backward(&self, w: &Weight, dy: &Mat, dx: &Mat, stream: usize) -> Result<()> {
        each_rows(dy, dx, MAX_ROWS, |dy, dx| {
            let how = grid(w.k.div_ceil(32), dy.rows, [32, 16, 1], stream);
            // SAFETY: by contract; the arguments are those of `q4_backward`.
            unsafe { self.backward.launch(how, args![packed(w), Matrix::new(dy), Matrix::new(dx)]) }
        })
    }

    /// `y = x W^T` with x as it is.
    ///
    /// # Safety
    /// Both are device memory.
    pub unsafe fn forward_float(&self, w: &Weight, x: &Mat, y: &Mat, stream: usize) -> Result<()> {
        each_rows(x, y, MAX_ROWS, |x, y| {
            let how = grid(w.n.div_ceil(8), y.rows.div_ceil(4), [32, 8, 1], stream);
            // SAFETY: by contract; the arguments are those of `q4_forward_float`.
            unsafe { self.forward_float.launch(how, args![packed(w), Matrix::new(x), Matrix::new(y)]) }
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
            let (codes, steps) = (q.q + (first * w.k) as u64, q.steps + (first * (w.k / 16) * 4) as u64);
            // SAFETY: by contract; the arguments are those of `q4_forward_int`.
            unsafe {
                self.forward_int.launch(
                    how,
                    args![packed(w), codes, steps, q.global, q.convention, q.factor, Matrix::new(&y)],
                )?;
            }
        }
        Ok(())
    }

    /// The per-tensor scale of all rows of x, to the f32 at `out`.
    ///
    /// # Safety
    /// x and `out` are device memory.
    pub unsafe fn global_of(&self, x: &Mat, r: Rule, source: DType, out: u64, stream: usize) -> Result<()> {
        self.gpu.bind()?;
        let (number, source) = (rule(r), dtype(source));
        // SAFETY: by contract; the arguments are those of `q4_amax` and `q4_global`.
        unsafe {
            check(driver::cuMemsetD32Async(out, 0, 1, stream as driver::CUstream), "cuMemsetD32Async")?;
            self.amax.launch(grid(x.rows, 1, [256, 1, 1], stream), args![Matrix::new(x), out])?;
            self.global.launch(grid(1, 1, [1, 1, 1], stream), args![out, number, source])
        }
    }

    /// A per-tensor scale to the f32 at `out`.
    ///
    /// # Safety
    /// `out` is device memory.
    pub unsafe fn set_global(&self, g: GlobalScale, out: u64, stream: usize) -> Result<()> {
        self.gpu.bind()?;
        let bits = g.value().to_bits();
        // SAFETY: by contract.
        check(unsafe { driver::cuMemsetD32Async(out, bits, 1, stream as driver::CUstream) }, "cuMemsetD32Async")
    }

    /// Rows to int8.
    ///
    /// # Safety
    /// x is device memory, `q` and `steps` have room for its rows.
    pub unsafe fn int8(&self, x: &Mat, q: u64, steps: u64, stream: usize) -> Result<()> {
        for first in (0..x.rows).step_by(MAX_ROWS) {
            let part = x.rows_from(first, MAX_ROWS.min(x.rows - first));
            let how = grid((x.cols / 16).div_ceil(128), part.rows, [128, 1, 1], stream);
            let (q, steps) = (q + (first * x.cols) as u64, steps + (first * (x.cols / 16) * 4) as u64);
            // SAFETY: by contract; the arguments are those of `q4_int8`.
            unsafe { self.int8.launch(how, args![Matrix::new(&part), q, steps])? };
        }
        Ok(())
    }

    /// Rows to NVFP4; outputs at 0 are left out. Fails for more rows than a grid has.
    ///
    /// # Safety
    /// x is device memory, the outputs have room for its rows.
    pub unsafe fn nvfp4(&self, x: &Mat, r: Rule, source: DType, global: u64, to: &Stored, stream: usize) -> Result<()> {
        let (number, source) = (rule(r), dtype(source));
        let groups = x.cols / 16;
        for first in (0..x.rows).step_by(MAX_ROWS) {
            let part = x.rows_from(first, MAX_ROWS.min(x.rows - first));
            let how = grid(groups.div_ceil(128), part.rows, [128, 1, 1], stream);
            let at = |base: u64, bytes: usize| if base == 0 { 0 } else { base + (first * bytes) as u64 };
            let (q, steps) = (at(to.q, x.cols), at(to.steps, groups * 4));
            let (codes, bytes) = (at(to.codes, x.cols / 2), at(to.scales, groups));
            // SAFETY: by contract; the arguments are those of `q4_nvfp4`.
            unsafe {
                self.nvfp4.launch(
                    how,
                    args![Matrix::new(&part), number, source, global, q, steps, codes, bytes, to.bad],
                )?;
            }
        }
        Ok(())
    }

    /// Stored rows to what a product needs.
    ///
    /// # Safety
    /// All addresses are of device memory of the sizes that follow from rows and groups.
    pub unsafe fn expand(&self, raw: &Raw, q: u64, steps: u64) -> Result<()> {
        let how = grid(raw.groups.div_ceil(128), raw.rows, [128, 1, 1], 0);
        let (tiled, groups) = (u32::from(raw.is_tiled), raw.groups as u32);
        // SAFETY: by contract; the arguments are those of `q4_expand`.
        unsafe { self.expand.launch(how, args![raw.codes, raw.scales, tiled, groups, q, steps, raw.bad]) }
    }
}

/// Where `nvfp4` writes; 0: nowhere.
#[derive(Clone, Copy, Default)]
pub struct Stored {
    /// Doubled values, int8.
    pub q: u64,
    /// Block scales, f32.
    pub steps: u64,
    /// Packed codes.
    pub codes: u64,
    /// E4M3 block scales.
    pub scales: u64,
    /// A u32 that gets the first row that cannot be quantised.
    pub bad: u64,
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
