//! Dense products by cuBLASLt, which is opened at run time like everything else.
use crate::cublaslt::cudaDataType_t as Kind;
use crate::lt::{Algorithm, Blas, Form, SCRATCH, Shapes};
use q4_core::{Code, DType, Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// `y[m, n] = x[m, k] W[n, k]^T` with f32 sums and f32 y, for one type and one n and k. W has `k` columns,
/// contiguous rows and is aligned to 256, as are x and y.
pub struct DenseProduct {
    blas: Arc<Blas>,
    kind: Kind,
    n: usize,
    k: usize,
    /// What was chosen, by m: a call of the same shape runs the same kernel.
    chosen: Mutex<BTreeMap<usize, Algorithm>>,
}

// SAFETY: algorithms are plain data.
unsafe impl Send for DenseProduct {}
// SAFETY: as above, behind a lock.
unsafe impl Sync for DenseProduct {}

impl DenseProduct {
    /// For operands of `dtype`; `k` is a multiple of 16.
    pub fn new(blas: &Arc<Blas>, dtype: DType, n: usize, k: usize) -> Self {
        let kind = match dtype {
            DType::F16 => Kind::CUDA_R_16F,
            DType::BF16 => Kind::CUDA_R_16BF,
            _ => Kind::CUDA_R_32F,
        };
        Self { blas: blas.clone(), kind, n, k, chosen: Mutex::default() }
    }

    /// Scratch bytes of a call.
    pub const fn scratch() -> usize {
        SCRATCH
    }

    /// Enqueues the product; y has rows of `n` f32.
    ///
    /// # Safety
    /// The addresses are device memory of the sizes above, aligned to 256; `scratch` has
    /// [`scratch`](Self::scratch) bytes.
    pub unsafe fn run(&self, w: u64, x: u64, y: u64, m: usize, scratch: u64, stream: usize) -> Result<()> {
        let within = |e: Error| {
            let (n, k) = (self.n, self.k);
            e.within(format!("dense product of [{m}, {k}] by [{n}, {k}] ({:?})", self.kind))
        };
        let shapes = Shapes::new(&Form { kind: self.kind, m, n: self.n, k: self.k, scales: None })?;
        let mut chosen = self.chosen.lock().unwrap_or_else(|e| e.into_inner());
        let algorithm = match chosen.get(&m) {
            Some(a) => *a,
            None => {
                let none = || Error::new(Code::Unsupported, "cuBLASLt has no kernel");
                let a = shapes.choose(&self.blas).and_then(|a| a.ok_or_else(none)).map_err(within)?;
                chosen.insert(m, a);
                a
            }
        };
        drop(chosen);
        // SAFETY: forwarded.
        unsafe { shapes.run(&self.blas, &algorithm, [w, x, y], scratch, stream) }.map_err(within)
    }
}
