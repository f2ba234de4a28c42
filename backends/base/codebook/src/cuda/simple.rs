//! Launchers of `cuda/simple.cu`: packing, decoding, gradients, and the product that takes every shape.
use super::{Coding, FILES, Packed, load};
use q4_core::Result;
use q4_cuda::{Gpu, Kernel, Launch, Matrix, Source, mirror, over_rows};
use std::sync::Arc;

pub const SOURCE: Source =
    Source { name: "levels-simple", text: include_str!("../../cuda/simple.cu"), files: FILES };
/// Rows of x that one pass over the weight serves, as `ROWS` in the source.
const ROWS: usize = 8;

/// One segment on the device: stored codes, words of scales and, where they are not in units, of zero points.
pub struct Raw {
    pub codes: u64,
    pub scales: u64,
    pub zeros: u64,
    pub is_high_first: bool,
    pub rows: usize,
}

/// The functions of simple.cu.
pub struct Kernels {
    pack: Kernel<Pack>,
    forward: Kernel<Forward>,
    backward: Kernel<Backward>,
    dequantize: Kernel<Dequantize>,
}

mirror! {
    struct Pack { codes: u64, scales: u64, zeros: u64, high_first: u32, rows: u32, first: u32, w: Packed }
    struct Forward { w: Packed, x: Matrix, y: Matrix }
    struct Backward { w: Packed, dy: Matrix, dx: Matrix }
    struct Dequantize { w: Packed, out: Matrix }
}

impl Kernels {
    /// Compiles or finds them.
    pub fn load(gpu: &Arc<Gpu>, coding: Coding) -> Result<Self> {
        let all = load(gpu, &SOURCE, coding, &[])?;
        Ok(Self {
            pack: all.get("levels_pack")?,
            forward: all.get("levels_forward")?,
            backward: all.get("levels_backward")?,
            dequantize: all.get("levels_dequantize")?,
        })
    }

    /// Packs a segment into rows `first` on of `w`, whose memory is zero.
    ///
    /// # Safety
    /// The addresses are device memory of the sizes the shapes say, until the default queue is waited for.
    pub unsafe fn pack(&self, raw: &Raw, first: usize, w: &Packed) -> Result<()> {
        let grid = over_rows((w.k as usize / 8).div_ceil(128), raw.rows);
        let &Raw { codes, scales, zeros, is_high_first, rows } = raw;
        let (high_first, rows, first) = (is_high_first.into(), rows as u32, first as u32);
        let args = Pack { codes, scales, zeros, high_first, rows, first, w: *w };
        // SAFETY: by contract.
        unsafe { self.pack.launch(Launch::new(grid, [128, 1, 1], 0), args) }
    }

    /// `y = x W^T`.
    ///
    /// # Safety
    /// The matrices are device memory that fits the weight, and do not overlap.
    pub unsafe fn forward(&self, w: &Packed, x: Matrix, y: Matrix, stream: usize) -> Result<()> {
        for (first, y) in y.parts() {
            let rows = y.rows as usize;
            let x = x.rows_from(first, rows);
            let grid = [(w.n as usize).div_ceil(8), rows.div_ceil(ROWS), 1];
            // SAFETY: by contract.
            unsafe { self.forward.launch(Launch::new(grid, [32, 8, 1], stream), Forward { w: *w, x, y })? };
        }
        Ok(())
    }

    /// `dx = dy W`.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward(&self, w: &Packed, dy: Matrix, dx: Matrix, stream: usize) -> Result<()> {
        for (first, dx) in dx.parts() {
            let dy = dy.rows_from(first, dx.rows as usize);
            let grid = [(w.k as usize).div_ceil(32), dx.rows as usize, 1];
            // SAFETY: by contract.
            unsafe {
                self.backward.launch(Launch::new(grid, [32, 16, 1], stream), Backward { w: *w, dy, dx })?
            };
        }
        Ok(())
    }

    /// The decoded weight.
    ///
    /// # Safety
    /// `out` is device memory that fits the weight.
    pub unsafe fn dequantize(&self, w: &Packed, out: Matrix, stream: usize) -> Result<()> {
        let grid = over_rows((w.k as usize).div_ceil(256), w.n as usize);
        // SAFETY: by contract.
        unsafe { self.dequantize.launch(Launch::new(grid, [256, 1, 1], stream), Dequantize { w: *w, out }) }
    }
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    SOURCE.takes::<Pack>("levels_pack")?;
    SOURCE.takes::<Forward>("levels_forward")?;
    SOURCE.takes::<Backward>("levels_backward")?;
    SOURCE.takes::<Dequantize>("levels_dequantize")
}
