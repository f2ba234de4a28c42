//! Launchers of `cuda/fp4.cu`.
use super::super::FILES;
use super::super::simple::{Raw, matrix};
use crate::call::Mat;
use q4_core::Result;
use q4_core::formats::swizzle::TILE_ROWS;
use q4_cuda::{Gpu, Kernel, Launch, Source, args};
use std::ffi::c_void;
use std::sync::Arc;

pub(super) const SOURCE: Source =
    Source { name: "nvfp4-fp4", text: include_str!("../../../cuda/fp4.cu"), files: FILES };

/// A kernel wherever it runs: on a device, or on the CPU where tests run it.
pub trait Run {
    /// Runs or enqueues it.
    ///
    /// # Safety
    /// `args` points to one value of the right type per parameter; what they address is valid where it runs.
    unsafe fn run(&self, how: Launch, args: &mut [*mut c_void]) -> Result<()>;
}

impl Run for Kernel {
    unsafe fn run(&self, how: Launch, args: &mut [*mut c_void]) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.launch(how, args) }
    }
}

/// The functions of `fp4.cu`.
pub struct Kernels<K = Kernel> {
    pub(super) pack: K,
    pub(super) operand: K,
    pub(super) finish: K,
    pub(super) dequantize: K,
    pub(super) backward: K,
}

/// `Fp4` of `fp4.cu`: a weight as an operand.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Device address of the codes.
    pub codes: u64,
    /// That of the block scales.
    pub scales: u64,
    /// That of the row segments (`simple::Span`).
    pub spans: u64,
    /// Rows.
    pub n: u32,
    /// Columns.
    pub k: u32,
    /// Blocks a row, padding included.
    pub groups: u32,
    /// Row segments; the kernels that take the struct need no count.
    pub span_count: u32,
}

/// Quantised rows of x on their way to the operand; device addresses.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Packed codes `[rows][k/2]`.
    pub codes: u64,
    /// E4M3 block scales `[rows][k/16]`.
    pub scales: u64,
    /// The same in f32, NaN where a row cannot be quantised.
    pub steps: u64,
    /// Rows.
    pub rows: usize,
    /// Per-tensor scale, or 0.
    pub global: u64,
    /// Its convention, 1 or 2.
    pub convention: u32,
}

/// The operand made of them, and what the end of the product needs.
#[derive(Clone, Copy, Debug)]
pub struct Laid {
    /// Codes of `rows` rows.
    pub codes: u64,
    /// Scales in tiles.
    pub scales: u64,
    /// Rows, padding included.
    pub rows: usize,
    /// A u32 a row, zero beforehand: not zero where it cannot be quantised.
    pub bad: u64,
    /// `Factor` of every segment of the weight.
    pub factors: u64,
}

fn grid(x: usize, y: usize, block: [u32; 2], stream: usize) -> Launch {
    Launch {
        grid: [x as u32, y as u32, 1],
        block: [block[0], block[1], 1],
        shared: 0,
        stream,
        overlap: false,
    }
}

impl Kernels {
    /// Compiles or finds them for `gpu`.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let all = q4_cuda::Kernels::load(gpu, &SOURCE, &[])?;
        Ok(Self {
            pack: all.get("q4_fp4_pack")?,
            operand: all.get("q4_fp4_operand")?,
            finish: all.get("q4_fp4_finish")?,
            dequantize: all.get("q4_fp4_dequantize")?,
            backward: all.get("q4_fp4_backward")?,
        })
    }
}

impl<K: Run> Kernels<K> {
    /// Stored rows to rows `first` and on of the operand, whose memory is zero; on the default stream.
    ///
    /// # Safety
    /// All addresses are of memory of the sizes the layout says.
    pub unsafe fn pack(&self, raw: &Raw, first: usize, to: &Operand) -> Result<()> {
        let how = grid(raw.groups.div_ceil(32), raw.rows.div_ceil(8), [32, 8], 0);
        let (tiled, rows, groups) = (u32::from(raw.is_tiled), raw.rows as u32, raw.groups as u32);
        let first = first as u32;
        // SAFETY: by contract; the arguments are those of `q4_fp4_pack`.
        unsafe {
            self.pack.run(
                how,
                args![
                    raw.codes, raw.scales, tiled, rows, groups, raw.bad, first, to.groups, to.codes,
                    to.scales
                ],
            )
        }
    }

    /// Quantised rows to an operand, padding included, and the factors of a product with `w`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn operand(&self, w: &Operand, x: &Rows, to: &Laid, stream: usize) -> Result<()> {
        let scale_rows = to.rows.next_multiple_of(TILE_ROWS);
        let how = grid((w.groups as usize).div_ceil(32), scale_rows / 8, [32, 8], stream);
        let (rows, groups, code_rows) = (x.rows as u32, w.k / 16, to.rows as u32);
        // SAFETY: by contract; the arguments are those of `q4_fp4_operand`.
        unsafe {
            self.operand.run(
                how,
                args![
                    x.codes,
                    x.scales,
                    x.steps,
                    rows,
                    groups,
                    code_rows,
                    w.groups,
                    to.codes,
                    to.scales,
                    to.bad,
                    w.spans,
                    w.span_count,
                    x.global,
                    x.convention,
                    to.factors
                ],
            )
        }
    }

    /// f32 sums at `sums`, `ld` a row, to y.
    ///
    /// # Safety
    /// As above; `x` is what [`operand`](Self::operand) made.
    pub unsafe fn finish(
        &self,
        w: &Operand,
        x: &Laid,
        sums: u64,
        ld: usize,
        y: &Mat,
        stream: usize,
    ) -> Result<()> {
        let how = grid(y.cols.div_ceil(256), y.rows, [256, 1], stream);
        // SAFETY: by contract; the arguments are those of `q4_fp4_finish`.
        unsafe { self.finish.run(how, args![sums, ld as u64, x.bad, w.spans, x.factors, matrix(y)]) }
    }

    /// The decoded matrix.
    ///
    /// # Safety
    /// `out` is memory where the weight is.
    pub unsafe fn dequantize(&self, w: &Operand, out: &Mat, stream: usize) -> Result<()> {
        let (n, k) = (w.n as usize, w.k as usize);
        let mut how = grid(k.div_ceil(256), n.min(MAX_ROWS), [256, 1], stream);
        how.grid[2] = n.div_ceil(MAX_ROWS) as u32;
        // SAFETY: by contract; the arguments are those of `q4_fp4_dequantize`.
        unsafe { self.dequantize.run(how, args![*w, matrix(out)]) }
    }

    /// `dx = dy W`.
    ///
    /// # Safety
    /// Both are memory where the weight is.
    pub unsafe fn backward(&self, w: &Operand, dy: &Mat, dx: &Mat, stream: usize) -> Result<()> {
        for first in (0..dy.rows).step_by(MAX_ROWS) {
            let rows = MAX_ROWS.min(dy.rows - first);
            let how = grid((w.k as usize).div_ceil(128), rows, [128, 1], stream);
            let (dy, dx) = (dy.rows_from(first, rows), dx.rows_from(first, rows));
            // SAFETY: by contract; the arguments are those of `q4_fp4_backward`.
            unsafe { self.backward.run(how, args![*w, matrix(&dy), matrix(&dx)])? };
        }
        Ok(())
    }
}

/// Rows of one launch: what the second dimension of a grid holds, rounded down.
const MAX_ROWS: usize = 32768;
