//! The two sums of attention for two or four queries at once in AVX-512: every key and value is loaded and widened once for all of
//! them. The order of each sum is that of [`super::x86`], so that the bits do not depend on who shares a block.
use super::x86::{Load, dots_avx512};
use std::arch::x86_64::*;

/// Sums that advance together, a register each.
const SUMS: usize = 16;

/// `out[i][p] = scale * q[i] · rows[p]` for each query's own number of rows.
///
/// # Safety
/// AVX-512F; all queries have one length, a multiple of 16, and `rows` has as many rows as the longest of `out`.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
pub unsafe fn dots<T: Load, const N: usize>(
    q: [&[f32]; N],
    rows: &[T],
    scale: f32,
    out: &mut [&mut [f32]; N],
) {
    const { assert!(N == 2 || N == 4) }
    let (d, step) = (q[0].len(), SUMS / N);
    let shared = out.iter().map(|o| o.len()).min().unwrap_or(0) / step * step;
    for p in (0..shared).step_by(step) {
        let mut acc = [_mm512_setzero_ps(); SUMS];
        for j in (0..d).step_by(16) {
            let mut x = [_mm512_setzero_ps(); N];
            for (x, q) in x.iter_mut().zip(q) {
                // SAFETY: j + 16 <= d.
                *x = unsafe { _mm512_loadu_ps(q.as_ptr().add(j)) };
            }
            for r in 0..SUMS / N {
                // SAFETY: row p + r exists.
                let row = unsafe { T::load16(rows.as_ptr().add((p + r) * d + j)) };
                for i in 0..N {
                    acc[SUMS / N * i + r] = _mm512_fmadd_ps(x[i], row, acc[SUMS / N * i + r]);
                }
            }
        }
        let sums = _mm512_mul_ps(_mm512_set1_ps(scale), trees(acc));
        let quarters = [
            _mm512_castps512_ps128(sums),
            _mm512_extractf32x4_ps::<1>(sums),
            _mm512_extractf32x4_ps::<2>(sums),
            _mm512_extractf32x4_ps::<3>(sums),
        ];
        for (i, quarter) in quarters.into_iter().enumerate() {
            let (query, at) = (i * N / 4, p + i * 4 % step);
            // SAFETY: at + 4 is at most `shared`, which no line is shorter than.
            unsafe { _mm_storeu_ps(out[query].as_mut_ptr().add(at), quarter) };
        }
    }
    for (q, out) in q.into_iter().zip(out) {
        // SAFETY: forwarded; a sum does not depend on the others of its call.
        unsafe { dots_avx512(q, &rows[shared * d..], scale, &mut out[shared..]) };
    }
}

/// `out[i] = scales[i] * Σ_p weights[i][p] * rows[p]` for each query's own number of rows.
///
/// # Safety
/// AVX-512F; all of `out` have one length, a multiple of 16, and `rows` has as many rows as the longest of `weights`.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
pub unsafe fn weighted_sums<T: Load, const N: usize>(
    weights: [&[f32]; N],
    rows: &[T],
    scales: [f32; N],
    out: &mut [&mut [f32]; N],
) {
    let d = out[0].len();
    let mut column = 0;
    while column < d {
        // SAFETY: forwarded; the columns are inside.
        column += unsafe {
            match (N, d - column) {
                (2, 128..) => columns::<T, N, 8>(weights, rows, d, column, scales, out),
                (_, 64..) => columns::<T, N, 4>(weights, rows, d, column, scales, out),
                _ => columns::<T, N, 1>(weights, rows, d, column, scales, out),
            }
        };
    }
}

/// `16 * C` columns from `column` on; how many those are.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn columns<T: Load, const N: usize, const C: usize>(
    weights: [&[f32]; N],
    rows: &[T],
    d: usize,
    column: usize,
    scales: [f32; N],
    out: &mut [&mut [f32]; N],
) -> usize {
    let shared = weights.iter().map(|w| w.len()).min().unwrap_or(0);
    let mut acc = [[_mm512_setzero_ps(); C]; N];
    for p in 0..shared {
        let mut row = [_mm512_setzero_ps(); C];
        for (c, v) in row.iter_mut().enumerate() {
            // SAFETY: row p exists and the columns are inside.
            *v = unsafe { T::load16(rows.as_ptr().add(p * d + column + 16 * c)) };
        }
        for i in 0..N {
            // SAFETY: p is below the length of all.
            let w = _mm512_set1_ps(unsafe { *weights[i].get_unchecked(p) });
            for c in 0..C {
                acc[i][c] = _mm512_fmadd_ps(w, row[c], acc[i][c]);
            }
        }
    }
    for i in 0..N {
        for (p, w) in weights[i].iter().enumerate().skip(shared) {
            for c in 0..C {
                // SAFETY: as above.
                let v = unsafe { T::load16(rows.as_ptr().add(p * d + column + 16 * c)) };
                acc[i][c] = _mm512_fmadd_ps(_mm512_set1_ps(*w), v, acc[i][c]);
            }
        }
        for c in 0..C {
            let v = _mm512_mul_ps(acc[i][c], _mm512_set1_ps(scales[i]));
            // SAFETY: the columns are inside.
            unsafe { _mm512_storeu_ps(out[i].as_mut_ptr().add(column + 16 * c), v) };
        }
    }
    16 * C
}

/// The sums of sixteen vectors, each added as halves until one lane is left: lane `i` of the result is that of
/// `acc[i]`. Four merges halve the vectors and double what each holds.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn trees(acc: [__m512; SUMS]) -> __m512 {
    // In quarters of a register: halves of a and b added leave a's in the first two quarters, b's in the last two.
    let halves = |a, b| {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
            _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
        )
    };
    // a, b, c and d each with one quarter left.
    let quarters = |a, b| {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
        )
    };
    let mut four = [_mm512_setzero_ps(); 4];
    for (r, four) in four.iter_mut().enumerate() {
        *four = quarters(halves(acc[r], acc[4 + r]), halves(acc[8 + r], acc[12 + r]));
    }
    // Within quarters: lanes 0 and 2, 1 and 3, then those two.
    let pair = |a, b| {
        _mm512_add_ps(_mm512_shuffle_ps::<0b01_00_01_00>(a, b), _mm512_shuffle_ps::<0b11_10_11_10>(a, b))
    };
    let (a, b) = (pair(four[0], four[1]), pair(four[2], four[3]));
    _mm512_add_ps(_mm512_shuffle_ps::<0b10_00_10_00>(a, b), _mm512_shuffle_ps::<0b11_01_11_01>(a, b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::x86::weighted_sum_avx512;
    use half::f16;

    #[test]
    fn a_block_gives_each_query_the_bits_it_gets_alone() {
        if !std::arch::is_x86_feature_detected!("avx512dq") {
            println!("skipped: no AVX-512 here");
            return;
        }
        for d in [16, 64, 80, 128, 144] {
            for n in [1, 3, 4, 7, 8, 17, 40] {
                check(d, [n; 4]);
                check(d, [n, n + 1, n + 2, n + 3]);
                check(d, [n; 2]);
                check(d, [n, n + 1]);
            }
        }
    }

    fn check<const N: usize>(d: usize, counts: [usize; N]) {
        let wave = |n: usize, f: f32| (0..n).map(|i| (i as f32 * f).sin()).collect::<Vec<_>>();
        let rows: Vec<f16> = wave(43 * d, 0.3).into_iter().map(f16::from_f32).collect();
        let queries: [Vec<f32>; N] = std::array::from_fn(|i| wave(d, 0.7 + i as f32));
        let weights: [Vec<f32>; N] = std::array::from_fn(|i| wave(counts[i], 1.3 + i as f32));
        let scales: [f32; N] = std::array::from_fn(|i| [0.5, 1.0, 2.0, 3.0][i]);
        let mut scores = counts.map(|n| vec![0.0; n]);
        let mut sums: [Vec<f32>; N] = std::array::from_fn(|_| vec![0.0; d]);
        // SAFETY: the features were found; the buffers fit.
        unsafe {
            dots(queries.each_ref().map(|q| &q[..]), &rows, 0.5, &mut scores.each_mut().map(|s| &mut s[..]));
            let weights = weights.each_ref().map(|w| &w[..]);
            weighted_sums(weights, &rows, scales, &mut sums.each_mut().map(|s| &mut s[..]));
        }
        for i in 0..N {
            let (mut score, mut sum) = (vec![0.0; counts[i]], vec![0.0; d]);
            // SAFETY: as above.
            unsafe {
                dots_avx512(&queries[i], &rows, 0.5, &mut score);
                weighted_sum_avx512(&weights[i], &rows, scales[i], &mut sum);
            }
            assert_eq!((&scores[i], &sums[i]), (&score, &sum), "query {i} of {counts:?}, d = {d}");
        }
    }
}
