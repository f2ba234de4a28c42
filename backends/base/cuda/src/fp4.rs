//! Products of NVFP4 matrices on FP4 tensor cores, by cuBLASLt.
use crate::cublaslt::cudaDataType_t as Kind;
use crate::lt::{Algorithm, Blas, Form, SCRATCH, Shapes};
use crate::{Found, libraries};
use q4_core::{Code, Error, Reject, RejectCode, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Why `cublaslt` has no products for FP4 tensor cores, if so.
pub fn fp4_lacks(cublaslt: &Found) -> Option<Reject> {
    let have = match cublaslt {
        Found::Yes(SINCE..) => return None,
        Found::Yes(v) => format!("cuBLASLt {}.{}", v / 10_000, v / 100 % 100),
        Found::No(why) => why.clone(),
    };
    Some(Reject::new(RejectCode::LibraryMissing, "cuBLASLt 12.8 or newer", have))
}

/// The first cuBLASLt with `CUDA_R_4F_E2M1` and scales per 16, as it counts itself.
const SINCE: u32 = 12_08_00;
/// Columns operands are padded to: whole tiles of scales.
pub const FP4_COLUMNS: usize = 64;
/// Rows W is padded to, so that rows of y start on 64 bytes.
pub const FP4_ROWS: usize = 16;

/// `y[m, n] = x[m, k] W[n, k]^T` with f32 y, for one n and k, multiples of [`FP4_ROWS`] and [`FP4_COLUMNS`].
///
/// W and x are E2M1, two columns a byte, the even one low, rows without gaps; their block scales are E4M3
/// without sign, one per 16 columns, in tiles of 128 rows by 4 (`q4_core::formats::swizzle`), the last tile
/// whole. Products of a block's codes and scales are exact; sums are f32, in an order that cuBLASLt does not
/// tell.
pub struct Fp4Product {
    blas: Arc<Blas>,
    n: usize,
    k: usize,
    /// What was chosen, by padded rows; `None`: there is nothing.
    chosen: Mutex<BTreeMap<usize, Option<Algorithm>>>,
}

// SAFETY: algorithms are plain data.
unsafe impl Send for Fp4Product {}
// SAFETY: as above, behind a lock.
unsafe impl Sync for Fp4Product {}

/// Device addresses of a call, each aligned to 256.
#[derive(Clone, Copy, Debug)]
pub struct Fp4Operands {
    /// Codes of W.
    pub w: u64,
    /// Its block scales.
    pub w_scales: u64,
    /// Codes of x.
    pub x: u64,
    /// Its block scales.
    pub x_scales: u64,
    /// f32 `[m, n]`.
    pub y: u64,
}

impl Fp4Product {
    /// Whether the cuBLASLt that is there knows the formats; fails with what is missing.
    pub fn check() -> Result<()> {
        let Some(reason) = fp4_lacks(&libraries().cublaslt) else { return Ok(()) };
        Err(Error::new(Code::BackendFailed, "FP4 products")
            .need(reason.need)
            .have(reason.have)
            .fix("name the folder of libcublasLt.so in Q4_CUDA_LIBS"))
    }

    /// For weights of `n` rows and `k` columns, both padded.
    pub fn new(blas: &Arc<Blas>, n: usize, k: usize) -> Self {
        debug_assert!(n % FP4_ROWS == 0 && k % FP4_COLUMNS == 0);
        Self { blas: blas.clone(), n, k, chosen: Mutex::default() }
    }

    /// Rows a call of `m` rows of x is padded to: few different numbers, and larger ones up to 128 where
    /// there is no kernel for fewer. `None`: there is no kernel.
    pub fn rows(&self, m: usize) -> Result<Option<usize>> {
        padded(m, |rows| Ok(self.algorithm(rows)?.is_some()))
    }

    /// Chooses what runs for every call of up to `m` rows. Returns the first number of rows there is no
    /// kernel for.
    pub fn lacks(&self, m: usize) -> Result<Option<usize>> {
        missing(m, |rows| Ok(self.algorithm(rows)?.is_some()))
    }

    /// Scratch bytes of a call.
    pub const fn scratch() -> usize {
        SCRATCH
    }

    /// Enqueues the product of `m` rows, padded ones included.
    ///
    /// # Safety
    /// The operands are device memory of the sizes above, `m` is one of [`rows`](Self::rows); `scratch` has
    /// [`scratch`](Self::scratch) bytes.
    pub unsafe fn run(&self, o: &Fp4Operands, m: usize, scratch: u64, stream: usize) -> Result<()> {
        let within = |e: Error| {
            let (n, k) = (self.n, self.k);
            e.within(format!("FP4 product of [{m}, {k}] by [{n}, {k}]"))
        };
        let none = || Error::new(Code::Unsupported, "cuBLASLt has no block-scaled FP4 kernel");
        let algorithm = self.algorithm(m).and_then(|a| a.ok_or_else(none)).map_err(within)?;
        let shapes = Shapes::new(&self.form(m, [o.w_scales, o.x_scales]))?;
        // SAFETY: forwarded.
        unsafe { shapes.run(&self.blas, &algorithm, [o.w, o.x, o.y], scratch, stream) }.map_err(within)
    }

    fn form(&self, m: usize, scales: [u64; 2]) -> Form {
        Form { kind: Kind::CUDA_R_4F_E2M1, m, n: self.n, k: self.k, scales: Some(scales) }
    }

    fn algorithm(&self, m: usize) -> Result<Option<Algorithm>> {
        let mut chosen = self.chosen.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(a) = chosen.get(&m) {
            return Ok(*a);
        }
        // Addresses that are not NULL: nothing is read there.
        let a = Shapes::new(&self.form(m, [256; 2]))?.choose(&self.blas)?;
        chosen.insert(m, a);
        Ok(a)
    }
}

/// The numbers of rows that kernels are chosen for: the smallest that holds `m`.
fn step(m: usize) -> usize {
    if m <= 64 { m.next_power_of_two().max(16) } else { m.next_multiple_of(128) }
}

/// As [`Fp4Product::rows`], for kernels that are there for the steps `has` says.
fn padded(m: usize, mut has: impl FnMut(usize) -> Result<bool>) -> Result<Option<usize>> {
    let mut rows = step(m);
    while !has(rows)? {
        rows = step(rows + 1);
        if rows > 128 {
            return Ok(None);
        }
    }
    Ok(Some(rows))
}

/// As [`Fp4Product::lacks`].
fn missing(m: usize, mut has: impl FnMut(usize) -> Result<bool>) -> Result<Option<usize>> {
    let mut rows = step(1);
    while rows <= step(m) {
        if padded(rows, &mut has)?.is_none() {
            return Ok(Some(rows));
        }
        rows = step(rows + 1);
    }
    Ok(None)
}

#[test]
fn rows_go_to_the_next_kernel_there_is_and_no_gap_is_missed() -> Result<()> {
    for m in 1..=400 {
        assert_eq!(padded(m, |_| Ok(true))?, Some(step(m)));
        assert_eq!(padded(m, |r| Ok(r >= 128))?, Some(step(m).max(128)), "as many as kernels want");
        assert_eq!(padded(m, |r| Ok(r != 64))?, Some(if step(m) == 64 { 128 } else { step(m) }));
        assert_eq!(padded(m, |_| Ok(false))?, None);
        assert_eq!(missing(m, |r| Ok(r >= 128))?, None);
        assert_eq!(missing(m, |r| Ok(r <= 256))?, (m > 256).then_some(384));
    }
    // Only small calls have kernels: they are not taken for all.
    assert_eq!(missing(400, |r| Ok(r <= 32))?, Some(64));
    assert_eq!(missing(17, |r| Ok(r <= 32))?, None);
    Ok(())
}

#[test]
fn steps_are_few_and_none_is_left_out() {
    let mut all = std::collections::BTreeSet::new();
    for m in 1..=2048 {
        let rows = step(m);
        assert!(rows >= m && step(rows) == rows, "{m}");
        all.insert(rows);
    }
    let mut rows = step(1);
    for want in &all {
        assert_eq!(rows, *want);
        rows = step(rows + 1);
    }
    assert_eq!(all.len(), 19);
}
