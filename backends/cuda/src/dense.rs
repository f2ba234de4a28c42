//! Dense products by cuBLASLt, which is opened at run time like everything else.
use crate::cublaslt::{self as lt, cublasStatus_t as Status, cudaDataType_t as Kind};
use crate::{Found, Gpu, libraries};
use q4_core::{Code, DType, Error, Result};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::sync::{Arc, Mutex};

/// Scratch cuBLASLt may use.
const SCRATCH: usize = 4 << 20;

/// cuBLASLt on one device.
pub struct Blas {
    gpu: Arc<Gpu>,
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

/// `y[m, n] = x[m, k] W[n, k]^T` with f32 sums and f32 y, for one type and one n and k. W has `k` columns, contiguous rows
/// and is aligned to 256, as are x and y.
pub struct DenseProduct {
    blas: Arc<Blas>,
    kind: Kind,
    n: usize,
    k: usize,
    /// What was chosen, by m: a call of the same shape runs the same kernel.
    chosen: Mutex<BTreeMap<usize, lt::cublasLtMatmulAlgo_t>>,
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
    /// The addresses are device memory of the sizes above, aligned to 256; `scratch` has [`scratch`](Self::scratch) bytes.
    pub unsafe fn run(&self, w: u64, x: u64, y: u64, m: usize, scratch: u64, stream: usize) -> Result<()> {
        self.blas.gpu.bind()?;
        let (one, zero) = (1f32, 0f32);
        let shapes = Shapes::new(self, m)?;
        let mut chosen = self.chosen.lock().unwrap_or_else(|e| e.into_inner());
        let algorithm = match chosen.get(&m) {
            Some(a) => *a,
            None => {
                let a = shapes.choose(self, m)?;
                chosen.insert(m, a);
                a
            }
        };
        drop(chosen);
        // SAFETY: by contract; the descriptions live until the call returns.
        let status = unsafe {
            lt::cublasLtMatmul(
                self.blas.handle,
                shapes.call,
                from_ref(&one).cast(),
                w as *const c_void,
                shapes.w,
                x as *const c_void,
                shapes.x,
                from_ref(&zero).cast(),
                y as *const c_void,
                shapes.y,
                y as *mut c_void,
                shapes.y,
                &algorithm,
                scratch as *mut c_void,
                SCRATCH,
                stream as lt::cudaStream_t,
            )
        };
        ok(status, "cublasLtMatmul").map_err(|e| self.within(e, m))
    }

    fn within(&self, e: Error, m: usize) -> Error {
        e.within(format!("dense product of [{m}, {}] by [{}, {}] ({:?})", self.k, self.n, self.k, self.kind))
    }
}

/// cuBLASLt's descriptions of one call; column-major, so y is `W x^T` there.
struct Shapes {
    call: lt::cublasLtMatmulDesc_t,
    w: lt::cublasLtMatrixLayout_t,
    x: lt::cublasLtMatrixLayout_t,
    y: lt::cublasLtMatrixLayout_t,
}

impl Shapes {
    fn new(p: &DenseProduct, m: usize) -> Result<Self> {
        let mut s = Self { call: null_mut(), w: null_mut(), x: null_mut(), y: null_mut() };
        const TRANSPOSE: i32 = 1; // CUBLAS_OP_T
        let transpose = TRANSPOSE;
        let (n, k) = (p.n as u64, p.k as u64);
        // SAFETY: out pointers are valid; the attribute is read before the call returns.
        unsafe {
            let kind = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            ok(
                lt::cublasLtMatmulDescCreate(&mut s.call, kind, Kind::CUDA_R_32F),
                "cublasLtMatmulDescCreate",
            )?;
            let which = lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            let size = size_of_val(&transpose);
            ok(
                lt::cublasLtMatmulDescSetAttribute(s.call, which, from_ref(&transpose).cast(), size),
                "cublasLtMatmulDescSetAttribute",
            )?;
            for (layout, kind, rows, cols) in [
                (&mut s.w, p.kind, k, n),
                (&mut s.x, p.kind, k, m as u64),
                (&mut s.y, Kind::CUDA_R_32F, n, m as u64),
            ] {
                let status = lt::cublasLtMatrixLayoutCreate(layout, kind, rows, cols, rows as i64);
                ok(status, "cublasLtMatrixLayoutCreate")?;
            }
        }
        Ok(s)
    }

    fn choose(&self, p: &DenseProduct, m: usize) -> Result<lt::cublasLtMatmulAlgo_t> {
        let (mut preference, mut found) = (null_mut(), 0);
        // SAFETY: all-zero is a valid result; out pointers are valid.
        unsafe {
            let mut best: lt::cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            ok(lt::cublasLtMatmulPreferenceCreate(&mut preference), "cublasLtMatmulPreferenceCreate")?;
            let which = lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let set =
                lt::cublasLtMatmulPreferenceSetAttribute(preference, which, from_ref(&SCRATCH).cast(), 8);
            let asked = lt::cublasLtMatmulAlgoGetHeuristic(
                p.blas.handle,
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
            ok(set, "cublasLtMatmulPreferenceSetAttribute")?;
            ok(asked, "cublasLtMatmulAlgoGetHeuristic").map_err(|e| p.within(e, m))?;
            if found == 0 {
                return Err(p.within(Error::new(Code::Unsupported, "cuBLASLt has no kernel"), m));
            }
            Ok(best.algo)
        }
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
