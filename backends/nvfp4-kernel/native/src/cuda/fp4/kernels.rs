//! Launchers of `cuda/fp4.cu`.
use super::super::FILES;
use super::super::simple::{Raw, matrix};
use crate::call::Mat;
use q4_core::Result;
use q4_core::formats::swizzle::TILE_ROWS;
use q4_cuda::{Gpu, Kernel, Launch, Matrix, Mirror, Source, mirror, over_rows};
use std::sync::Arc;

pub(super) const SOURCE: Source =
    Source { name: "nvfp4-fp4", text: include_str!("../../../cuda/fp4.cu"), files: FILES };

/// Where kernels run: on a device, or on the CPU where tests run them.
pub trait Place {
    /// A function that takes the fields of `A`.
    type Kernel<A: Mirror>;
    /// Runs or enqueues it.
    ///
    /// # Safety
    /// What `args` address is valid where it runs.
    unsafe fn run<A: Mirror>(kernel: &Self::Kernel<A>, how: Launch, args: A) -> Result<()>;
}

/// The device that they are loaded on.
pub struct OnDevice;

impl Place for OnDevice {
    type Kernel<A: Mirror> = Kernel<A>;
    unsafe fn run<A: Mirror>(kernel: &Kernel<A>, how: Launch, args: A) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { kernel.launch(how, args) }
    }
}

/// The functions of `fp4.cu`.
pub struct Kernels<P: Place = OnDevice> {
    pub(super) pack: P::Kernel<Pack>,
    pub(super) operand: P::Kernel<ToOperand>,
    pub(super) finish: P::Kernel<Finish>,
    pub(super) dequantize: P::Kernel<Dequantize>,
    pub(super) backward: P::Kernel<Backward>,
}

mirror! {
    /// `Fp4` of `fp4.cu`: a weight as an operand.
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

    /// Of `q4_fp4_pack`.
    pub struct Pack {
        codes: u64, scales: u64, is_tiled: u32, rows: u32, groups: u32, bad: u64, first: u32,
        out_groups: u32, out_codes: u64, out_scales: u64,
    }
    /// Of `q4_fp4_operand`.
    pub struct ToOperand {
        codes: u64, scales: u64, steps: u64, rows: u32, groups: u32, code_rows: u32, out_groups: u32,
        out_codes: u64, out_scales: u64, bad: u64, spans: u64, span_count: u32, act_global: u64,
        act_convention: u32, factors: u64,
    }
    /// Of `q4_fp4_finish`.
    pub struct Finish { sums: u64, ld: u64, bad: u64, spans: u64, factors: u64, y: Matrix }
    /// Of `q4_fp4_dequantize`.
    pub struct Dequantize { w: Operand, out: Matrix }
    /// Of `q4_fp4_backward`.
    pub struct Backward { w: Operand, dy: Matrix, dx: Matrix }
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

impl<P: Place> Kernels<P> {
    /// Stored rows to rows `first` and on of the operand, whose memory is zero; on the default stream.
    ///
    /// # Safety
    /// All addresses are of memory of the sizes the layout says.
    pub unsafe fn pack(&self, raw: &Raw, first: usize, to: &Operand) -> Result<()> {
        let how = Launch::new([raw.groups.div_ceil(32), raw.rows.div_ceil(8), 1], [32, 8, 1], 0);
        let args = Pack {
            codes: raw.codes,
            scales: raw.scales,
            is_tiled: raw.is_tiled.into(),
            rows: raw.rows as u32,
            groups: raw.groups as u32,
            bad: raw.bad,
            first: first as u32,
            out_groups: to.groups,
            out_codes: to.codes,
            out_scales: to.scales,
        };
        // SAFETY: by contract.
        unsafe { P::run(&self.pack, how, args) }
    }

    /// Quantised rows to an operand, padding included, and the factors of a product with `w`.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn operand(&self, w: &Operand, x: &Rows, to: &Laid, stream: usize) -> Result<()> {
        let scale_rows = to.rows.next_multiple_of(TILE_ROWS);
        let how = Launch::new([(w.groups as usize).div_ceil(32), scale_rows / 8, 1], [32, 8, 1], stream);
        let args = ToOperand {
            codes: x.codes,
            scales: x.scales,
            steps: x.steps,
            rows: x.rows as u32,
            groups: w.k / 16,
            code_rows: to.rows as u32,
            out_groups: w.groups,
            out_codes: to.codes,
            out_scales: to.scales,
            bad: to.bad,
            spans: w.spans,
            span_count: w.span_count,
            act_global: x.global,
            act_convention: x.convention,
            factors: to.factors,
        };
        // SAFETY: by contract.
        unsafe { P::run(&self.operand, how, args) }
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
        let how = Launch::new([y.cols.div_ceil(256), y.rows, 1], [256, 1, 1], stream);
        let args =
            Finish { sums, ld: ld as u64, bad: x.bad, spans: w.spans, factors: x.factors, y: matrix(y) };
        // SAFETY: by contract.
        unsafe { P::run(&self.finish, how, args) }
    }

    /// The decoded matrix.
    ///
    /// # Safety
    /// `out` is memory where the weight is.
    pub unsafe fn dequantize(&self, w: &Operand, out: &Mat, stream: usize) -> Result<()> {
        let grid = over_rows((w.k as usize).div_ceil(256), w.n as usize);
        let how = Launch::new(grid, [256, 1, 1], stream);
        // SAFETY: by contract.
        unsafe { P::run(&self.dequantize, how, Dequantize { w: *w, out: matrix(out) }) }
    }

    /// `dx = dy W`.
    ///
    /// # Safety
    /// Both are memory where the weight is.
    pub unsafe fn backward(&self, w: &Operand, dy: &Mat, dx: &Mat, stream: usize) -> Result<()> {
        for (first, dx) in matrix(dx).parts() {
            let dy = matrix(dy).rows_from(first, dx.rows as usize);
            let grid = [(w.k as usize).div_ceil(128), dx.rows as usize, 1];
            let how = Launch::new(grid, [128, 1, 1], stream);
            // SAFETY: by contract.
            unsafe { P::run(&self.backward, how, Backward { w: *w, dy, dx })? };
        }
        Ok(())
    }
}
