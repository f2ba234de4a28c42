//! AVX-512 and AVX2 for the loops a compiler turns inside out when left to itself: registers for the sums of
//! attention, and dots of rows in the order of the portable code, sixteen lanes along the row, then a tree.
use super::simd::Widen;
use super::sums::{self, Vector};
use std::arch::asm;
use std::arch::x86_64::*;

/// Loads of sixteen or eight elements, widened to f32.
pub trait Load: Widen {
    /// # Safety
    /// Sixteen readable elements; AVX-512F.
    unsafe fn load16(p: *const Self) -> __m512;
    /// # Safety
    /// Eight readable elements; AVX2 and F16C.
    unsafe fn load8(p: *const Self) -> __m256;
}

impl Load for f32 {
    #[inline(always)]
    unsafe fn load16(p: *const Self) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load8(p: *const Self) -> __m256 {
        // SAFETY: the caller's.
        unsafe { _mm256_loadu_ps(p) }
    }
}

impl Load for half::f16 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load16(p: *const Self) -> __m512 {
        let v;
        // The intrinsic converts a register, which on Intel's processors takes the port of shuffles too.
        // SAFETY: the caller's.
        unsafe {
            asm!("vcvtph2ps {v}, ymmword ptr [{p}]", v = lateout(zmm_reg) v, p = in(reg) p,
                 options(pure, readonly, nostack, preserves_flags));
        }
        v
    }
    #[inline(always)]
    unsafe fn load8(p: *const Self) -> __m256 {
        // SAFETY: the caller's.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
}

impl Load for half::bf16 {
    #[inline(always)]
    unsafe fn load16(p: *const Self) -> __m512 {
        // SAFETY: the caller's.
        unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())), 16))
        }
    }
    #[inline(always)]
    unsafe fn load8(p: *const Self) -> __m256 {
        // SAFETY: the caller's.
        unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())), 16))
        }
    }
}

/// `out[p] = scale * q · rows[p]`; `q.len()` is a multiple of 16.
///
/// # Safety
/// AVX-512F; `rows` holds `out.len() * q.len()` elements.
#[target_feature(enable = "avx512f,avx2,fma")]
pub unsafe fn dots_avx512<T: Load>(q: &[f32], rows: &[T], scale: f32, out: &mut [f32]) {
    let d = q.len();
    let (groups, rest) = out.as_chunks_mut::<4>();
    let mut row = rows.as_ptr();
    for o in groups {
        let mut acc = [_mm512_setzero_ps(); 4];
        for j in (0..d).step_by(16) {
            // SAFETY: j + 16 <= d, and four rows are left.
            unsafe {
                let x = _mm512_loadu_ps(q.as_ptr().add(j));
                acc[0] = _mm512_fmadd_ps(x, T::load16(row.add(j)), acc[0]);
                acc[1] = _mm512_fmadd_ps(x, T::load16(row.add(d + j)), acc[1]);
                acc[2] = _mm512_fmadd_ps(x, T::load16(row.add(2 * d + j)), acc[2]);
                acc[3] = _mm512_fmadd_ps(x, T::load16(row.add(3 * d + j)), acc[3]);
            }
        }
        for (o, a) in o.iter_mut().zip(acc) {
            *o = scale * tree16(a);
        }
        // SAFETY: at most one past the end.
        row = unsafe { row.add(4 * d) };
    }
    for o in rest {
        let mut acc = _mm512_setzero_ps();
        for j in (0..d).step_by(16) {
            // SAFETY: j + 16 <= d, and a row is left.
            acc = unsafe { _mm512_fmadd_ps(_mm512_loadu_ps(q.as_ptr().add(j)), T::load16(row.add(j)), acc) };
        }
        *o = scale * tree16(acc);
        // SAFETY: at most one past the end.
        row = unsafe { row.add(d) };
    }
}

/// As [`dots_avx512`] with eight lanes twice.
///
/// # Safety
/// AVX2, FMA and F16C; `rows` holds `out.len() * q.len()` elements.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn dots_avx2<T: Load>(q: &[f32], rows: &[T], scale: f32, out: &mut [f32]) {
    let d = q.len();
    let (groups, rest) = out.as_chunks_mut::<2>();
    let mut row = rows.as_ptr();
    let pair = |row: *const T, o: &mut [f32]| {
        let mut acc = [_mm256_setzero_ps(); 4];
        // The second row is the first again where there is only one: its sum is not stored.
        let second = if o.len() == 2 { d } else { 0 };
        for j in (0..d).step_by(16) {
            // SAFETY: j + 16 <= d, and the rows are there.
            unsafe {
                let (lo, hi) = (_mm256_loadu_ps(q.as_ptr().add(j)), _mm256_loadu_ps(q.as_ptr().add(j + 8)));
                acc[0] = _mm256_fmadd_ps(lo, T::load8(row.add(j)), acc[0]);
                acc[1] = _mm256_fmadd_ps(hi, T::load8(row.add(j + 8)), acc[1]);
                acc[2] = _mm256_fmadd_ps(lo, T::load8(row.add(second + j)), acc[2]);
                acc[3] = _mm256_fmadd_ps(hi, T::load8(row.add(second + j + 8)), acc[3]);
            }
        }
        for (i, o) in o.iter_mut().enumerate() {
            *o = scale * tree8(_mm256_add_ps(acc[2 * i], acc[2 * i + 1]));
        }
    };
    for o in groups {
        pair(row, o);
        // SAFETY: at most one past the end.
        row = unsafe { row.add(2 * d) };
    }
    if !rest.is_empty() {
        pair(row, rest);
    }
}

/// Sixteen lanes in AVX-512.
impl<T: Load> Vector<T> for __m512 {
    const SUMS: usize = 16;
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        // SAFETY: the caller's, here and below.
        unsafe { _mm512_set1_ps(v) }
    }
    #[inline(always)]
    unsafe fn widen(p: *const T) -> Self {
        // SAFETY: as above.
        unsafe { T::load16(p) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(self, b, c) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(self, b) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(p, self) }
    }
}

/// Sixteen lanes in AVX2.
#[derive(Clone, Copy)]
pub struct Halves([__m256; 2]);

impl<T: Load> Vector<T> for Halves {
    const SUMS: usize = 4;
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        // SAFETY: the caller's, here and below.
        Self(unsafe { [_mm256_set1_ps(v); 2] })
    }
    #[inline(always)]
    unsafe fn widen(p: *const T) -> Self {
        // SAFETY: as above.
        Self(unsafe { [T::load8(p), T::load8(p.add(8))] })
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe {
            [_mm256_fmadd_ps(self.0[0], b.0[0], c.0[0]), _mm256_fmadd_ps(self.0[1], b.0[1], c.0[1])]
        })
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { [_mm256_mul_ps(self.0[0], b.0[0]), _mm256_mul_ps(self.0[1], b.0[1])] })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: as above.
        unsafe {
            _mm256_storeu_ps(p, self.0[0]);
            _mm256_storeu_ps(p.add(8), self.0[1]);
        }
    }
}

/// The sums of [`super::sums`] compiled for an instruction set.
macro_rules! sums {
    ($name:ident, $vector:ident, $features:literal) => {
        pub mod $name {
            use super::{Load, sums};
            /// # Safety
            /// The processor has the set; else as [`sums::all_scores`].
            #[target_feature(enable = $features)]
            pub unsafe fn scores<T: Load, const N: usize>(
                q: [&[f32]; N],
                keys: &[T],
                scale: f32,
                out: &mut [&mut [f32]; N],
            ) {
                // SAFETY: the caller's.
                unsafe { sums::all_scores::<super::$vector, T, N>(q, keys, scale, out) }
            }
            /// # Safety
            /// The processor has the set; else as [`sums::all_columns`].
            #[target_feature(enable = $features)]
            pub unsafe fn weighted<T: Load, const N: usize>(
                weights: [&[f32]; N],
                values: &[T],
                scales: [f32; N],
                out: &mut [&mut [f32]; N],
            ) {
                // SAFETY: the caller's.
                unsafe { sums::all_columns::<super::$vector, T, N>(weights, values, scales, out) }
            }
        }
    };
}
sums!(avx512, __m512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
sums!(avx2, Halves, "avx2,fma,f16c");

/// Halves added until one is left, as the portable sum does.
#[target_feature(enable = "avx512f,avx2")]
fn tree16(v: __m512) -> f32 {
    let high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    tree8(_mm256_add_ps(_mm512_castps512_ps256(v), high))
}

#[target_feature(enable = "avx2")]
fn tree8(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn check<T: Load>(round: impl Fn(f32) -> T) {
        let wave = |n: usize, f: f32| (0..n).map(|i| (i as f32 * f).sin()).collect::<Vec<_>>();
        for d in [16, 64, 80, 128] {
            for count in 1..10 {
                let q = wave(d, 0.7);
                let rows: Vec<T> = wave(count * d, 0.3).into_iter().map(&round).collect();
                let value = |p: usize, j: usize| f64::from(rows[p * d + j].widen());
                let (mut a, mut b) = (vec![0.0; count], vec![0.0; count]);
                // SAFETY: the caller found the features; the buffers fit.
                unsafe {
                    dots_avx512(&q, &rows, 0.5, &mut a);
                    dots_avx2(&q, &rows, 0.5, &mut b);
                }
                assert_eq!(a, b, "the two sets differ at d = {d}, {count} rows");
                for p in 0..count {
                    let exact: f64 = (0..d).map(|j| f64::from(q[j]) * value(p, j)).sum::<f64>() * 0.5;
                    assert!((f64::from(a[p]) - exact).abs() < 1e-5, "d = {d}, row {p} of {count}");
                }
            }
        }
    }

    #[test]
    fn both_sets_give_the_same_bits_and_the_right_dots() {
        let has =
            std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("f16c");
        if !has {
            println!("skipped: no AVX-512 here");
            return;
        }
        check(|v| v);
        check(f16::from_f32);
        check(bf16::from_f32);
    }
}
