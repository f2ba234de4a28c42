//! The native path: NVFP4 weights as operands of FP4 tensor cores. cuBLASLt multiplies; here x is quantised,
//! operands are laid out as it reads them, and sums get their per-tensor scales.
mod forward;
mod kernels;
mod prepare;
#[cfg(test)]
mod tests;

pub use prepare::prepare;

use super::Engine;
use super::memory::Memory;
use crate::weight::Span;
use kernels::{Kernels, Operand};
use q4_core::{ActQuant, DType, Error, PreparedInfo, Reject, RejectCode};
use q4_cuda::{Blas, FP4_COLUMNS, FP4_ROWS, Fp4Product, Gpu};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What the native path needs of a device, beside the engine.
pub struct Native {
    kernels: Arc<Kernels>,
    blas: Arc<Blas>,
    /// By padded rows and columns of the weight.
    products: Mutex<BTreeMap<[usize; 2], Arc<Fp4Product>>>,
}

/// A weight as an operand of FP4 tensor cores.
pub struct Weight {
    info: PreparedInfo,
    engine: Arc<Engine>,
    kernels: Arc<Kernels>,
    product: Arc<Fp4Product>,
    _memory: Memory,
    operand: Operand,
    padded: [usize; 2],
    spans: Vec<Span>,
    act: ActQuant,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Type of x.
    pub x: DType,
    /// Type of y.
    pub y: DType,
    max_m: usize,
}

impl Native {
    /// Opens it on `gpu`; Err holds the first reason why it cannot be.
    pub fn open(gpu: &Arc<Gpu>) -> std::result::Result<Self, Reject> {
        use RejectCode::{DeviceArch, KernelImageMissing, LibraryMissing};
        let no = |code, need: String, have: String| Err(Reject::new(code, need, have));
        if !gpu.arch.fp4 {
            return no(DeviceArch, "FP4 tensor cores for the native path".into(), gpu.arch.target());
        }
        let blas = match Fp4Product::check().and_then(|()| Blas::open(gpu)) {
            Ok(blas) => blas,
            Err(e) => return no(LibraryMissing, "cuBLASLt with FP4 products".into(), super::parts(&e)),
        };
        // Any shape would do: after padding, shapes differ in nothing that a kernel could refuse.
        let probe = Fp4Product::new(&blas, 4096, 4096);
        let need = || format!("block-scaled FP4 kernels for {} in cuBLASLt", gpu.arch.target());
        match probe.lacks(128) {
            Ok(None) => {}
            Ok(Some(m)) => return no(KernelImageMissing, need(), format!("none for {m} rows")),
            Err(e) => return no(KernelImageMissing, need(), super::parts(&e)),
        }
        match Kernels::load(gpu) {
            Ok(kernels) => Ok(Self { kernels: Arc::new(kernels), blas, products: Mutex::default() }),
            Err(e) => {
                let need = format!("kernels of libNVFP4 for {}", gpu.arch.target());
                no(KernelImageMissing, need, super::parts(&e))
            }
        }
    }

    /// Why cuBLASLt cannot multiply up to `max_m` rows with a weight of `[n, k]`, if so.
    fn refuse(&self, [n, k, max_m]: [usize; 3]) -> Option<Reject> {
        let padded = padded(n, k);
        let most = max_m.min(forward::part_rows(padded[0]));
        let have = match self.product(padded).lacks(most) {
            Ok(None) => return None,
            Ok(Some(m)) => format!("none for {m} rows of x"),
            Err(e) => super::parts(&e),
        };
        let need = format!("an FP4 kernel of cuBLASLt for [{n}, {k}]");
        Some(Reject::new(RejectCode::ShapeUnsupported, need, have))
    }

    fn product(&self, [n, k]: [usize; 2]) -> Arc<Fp4Product> {
        let mut all = self.products.lock().unwrap_or_else(|e| e.into_inner());
        all.entry([n, k]).or_insert_with(|| Arc::new(Fp4Product::new(&self.blas, n, k))).clone()
    }
}

impl Weight {
    /// Puts the shape of a call into its failure.
    fn shaped(&self, e: Error, what: &str, m: usize) -> Error {
        super::shaped(e, what, m, [self.n, self.k], &self.engine.gpu)
    }
}

/// Rows and columns of the operand of a weight.
fn padded(n: usize, k: usize) -> [usize; 2] {
    [n.next_multiple_of(FP4_ROWS), k.next_multiple_of(FP4_COLUMNS)]
}
