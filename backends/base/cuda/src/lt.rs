//! One call of cuBLASLt: its descriptions, the algorithm chosen for them, and the call itself.
use crate::cublaslt::{self as lt, cublasStatus_t as Status, cudaDataType_t as Kind};
use crate::{Found, Gpu, libraries};
use q4_core::{Code, Error, Result};
use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

/// Scratch cuBLASLt may use, in bytes.
pub(crate) const SCRATCH: usize = 4 << 20;

/// cuBLASLt on one device.
pub struct Blas {
    pub(crate) gpu: Arc<Gpu>,
    handle: lt::cublasLtHandle_t,
}

// SAFETY: the handle may be used from any thread at once, by cuBLASLt's contract.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Blas {
    /// Fails with what is missing.
    pub fn check() -> Result<()> {
        match &libraries().cublaslt {
            Found::Yes(_) => Ok(()),
            Found::No(why) => Err(Error::new(Code::BackendFailed, "dense products on CUDA")
                .need("cuBLASLt")
                .have(why.clone())
                .fix("name the folder of libcublasLt.so in Q4_CUDA_LIBS")),
        }
    }

    /// On `gpu`; fails as [`check`](Self::check) does.
    pub fn open(gpu: &Arc<Gpu>) -> Result<Arc<Self>> {
        Self::check()?;
        gpu.bind()?;
        let mut handle = null_mut();
        // SAFETY: the library is present; a context is current; the out pointer is valid.
        ok(unsafe { lt::cublasLtCreate(&mut handle) }, "cublasLtCreate")?;
        Ok(Arc::new(Self { gpu: gpu.clone(), handle }))
    }
}

/// What is multiplied: `y[m, n] = x[m, k] W[n, k]^T` with f32 sums and f32 y, row-major without gaps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub kind: Kind,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Device addresses of the block scales of W and x (E4M3, one per 16 of k, in tiles of 128 rows by 4),
    /// if they have any. The search for an algorithm refuses NULL and reads nothing there.
    pub scales: Option<[u64; 2]>,
}

/// cuBLASLt's descriptions of one call; column-major, so y is `W x^T` there.
pub(crate) struct Shapes {
    call: lt::cublasLtMatmulDesc_t,
    w: lt::cublasLtMatrixLayout_t,
    x: lt::cublasLtMatrixLayout_t,
    y: lt::cublasLtMatrixLayout_t,
}

/// What cuBLASLt runs for one form: plain data.
pub(crate) type Algorithm = lt::cublasLtMatmulAlgo_t;

impl Shapes {
    pub fn new(f: &Form) -> Result<Self> {
        use lt::cublasLtMatmulDescAttributes_t as A;
        use lt::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 as PER_16;
        let mut s = Self { call: null_mut(), w: null_mut(), x: null_mut(), y: null_mut() };
        const TRANSPOSE: i32 = 1; // CUBLAS_OP_T
        let (n, k, m) = (f.n as u64, f.k as u64, f.m as u64);
        // SAFETY: out pointers are valid.
        unsafe {
            let kind = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            ok(
                lt::cublasLtMatmulDescCreate(&mut s.call, kind, Kind::CUDA_R_32F),
                "cublasLtMatmulDescCreate",
            )?;
            s.set(A::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSE)?;
            if let Some([w, x]) = f.scales {
                s.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &PER_16)?;
                s.set(A::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &PER_16)?;
                s.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &w)?;
                s.set(A::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x)?;
            }
            for (layout, kind, rows, cols) in
                [(&mut s.w, f.kind, k, n), (&mut s.x, f.kind, k, m), (&mut s.y, Kind::CUDA_R_32F, n, m)]
            {
                let status = lt::cublasLtMatrixLayoutCreate(layout, kind, rows, cols, rows as i64);
                ok(status, "cublasLtMatrixLayoutCreate")?;
            }
        }
        Ok(s)
    }

    fn set<T: Copy>(&self, which: lt::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the description is alive; the value is read before the call returns.
        let status = unsafe {
            lt::cublasLtMatmulDescSetAttribute(self.call, which, from_ref(value).cast(), size_of::<T>())
        };
        ok(status, "cublasLtMatmulDescSetAttribute").map_err(|e| e.need(format!("{which:?}")))
    }

    /// The algorithm cuBLASLt holds best; `None` where it has none.
    pub fn choose(&self, blas: &Blas) -> Result<Option<Algorithm>> {
        blas.gpu.bind()?;
        let (mut preference, mut found) = (null_mut(), 0);
        // SAFETY: all-zero is a valid result; out pointers are valid.
        let (set, asked, best) = unsafe {
            let mut best: lt::cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            ok(lt::cublasLtMatmulPreferenceCreate(&mut preference), "cublasLtMatmulPreferenceCreate")?;
            let which = lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let set =
                lt::cublasLtMatmulPreferenceSetAttribute(preference, which, from_ref(&SCRATCH).cast(), 8);
            let asked = lt::cublasLtMatmulAlgoGetHeuristic(
                blas.handle,
                self.call,
                self.w,
                self.x,
                self.y,
                self.y,
                preference,
                1,
                &mut best,
                &mut found,
            );
            lt::cublasLtMatmulPreferenceDestroy(preference);
            (set, asked, best)
        };
        ok(set, "cublasLtMatmulPreferenceSetAttribute")?;
        if asked == Status::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(None);
        }
        ok(asked, "cublasLtMatmulAlgoGetHeuristic")?;
        Ok((found > 0 && best.state == Status::CUBLAS_STATUS_SUCCESS).then_some(best.algo))
    }

    /// Enqueues the product of `[w, x]` to `y`.
    ///
    /// # Safety
    /// The addresses are device memory of the sizes described, aligned to 256; `scratch` has [`SCRATCH`]
    /// bytes.
    pub unsafe fn run(
        &self,
        blas: &Blas,
        algorithm: &Algorithm,
        [w, x, y]: [u64; 3],
        scratch: u64,
        stream: usize,
    ) -> Result<()> {
        blas.gpu.bind()?;
        let (one, zero) = (1f32, 0f32);
        // SAFETY: by contract; the descriptions live until the call returns.
        let status = unsafe {
            lt::cublasLtMatmul(
                blas.handle,
                self.call,
                from_ref(&one).cast(),
                w as *const c_void,
                self.w,
                x as *const c_void,
                self.x,
                from_ref(&zero).cast(),
                y as *const c_void,
                self.y,
                y as *mut c_void,
                self.y,
                algorithm,
                scratch as *mut c_void,
                SCRATCH,
                stream as lt::cudaStream_t,
            )
        };
        ok(status, "cublasLtMatmul")
    }
}

impl Drop for Shapes {
    fn drop(&mut self) {
        // SAFETY: created by `new` or still NULL, destroyed once.
        unsafe {
            for layout in [self.w, self.x, self.y].into_iter().filter(|l| !l.is_null()) {
                lt::cublasLtMatrixLayoutDestroy(layout);
            }
            if !self.call.is_null() {
                lt::cublasLtMatmulDescDestroy(self.call);
            }
        }
    }
}

fn ok(status: Status, doing: &str) -> Result<()> {
    match status {
        Status::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => {
            Err(Error::new(Code::BackendFailed, format!("cuBLASLt: {doing}")).have(format!("{other:?}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An attribute as the library has it; the sizes it refuses are errors.
    fn get<T: Copy + Default>(s: &Shapes, which: lt::cublasLtMatmulDescAttributes_t) -> Result<T> {
        let (mut value, mut written) = (T::default(), 0);
        // SAFETY: a live description; the out pointers are valid for the size stated.
        let status = unsafe {
            let to = (&raw mut value).cast();
            lt::cublasLtMatmulDescGetAttribute(s.call, which, to, size_of::<T>(), &mut written)
        };
        ok(status, "cublasLtMatmulDescGetAttribute")?;
        assert_eq!(written, size_of::<T>());
        Ok(value)
    }

    #[test]
    fn the_library_takes_every_attribute_of_a_block_scaled_call() -> Result<()> {
        use lt::cublasLtMatmulDescAttributes_t as A;
        if let Err(e) = Blas::check() {
            println!("skipped: {e}");
            return Ok(());
        }
        let scales = Some([0x1_0000_0100, 0x2_0000_0200]);
        let form = Form { kind: Kind::CUDA_R_4F_E2M1, m: 128, n: 4096, k: 4096, scales };
        let s = Shapes::new(&form)?;
        assert_eq!(get::<i32>(&s, A::CUBLASLT_MATMUL_DESC_TRANSA)?, 1);
        assert_eq!(get::<i32>(&s, A::CUBLASLT_MATMUL_DESC_A_SCALE_MODE)?, 1);
        assert_eq!(get::<i32>(&s, A::CUBLASLT_MATMUL_DESC_B_SCALE_MODE)?, 1);
        assert_eq!(get::<u64>(&s, A::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER)?, 0x1_0000_0100);
        assert_eq!(get::<u64>(&s, A::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER)?, 0x2_0000_0200);
        // The library does look at sizes.
        assert!(s.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &1u64).is_err());
        assert!(s.set(A::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &1u32).is_err());
        let plain = Shapes::new(&Form { kind: Kind::CUDA_R_16BF, scales: None, ..form })?;
        assert_eq!(get::<i32>(&plain, A::CUBLASLT_MATMUL_DESC_A_SCALE_MODE)?, 0);
        Ok(())
    }
}
