//! The two sums of attention for four queries at once in AVX-512: every key and value is loaded and widened once for all of
//! them. The order of each sum is that of [`super::x86`], so that the bits do not depend on who shares a block.
use super::x86::{Load, dots_avx512};
use std::arch::x86_64::*;

/// Queries of a block, and rows that are multiplied with all of them at a time.
pub const QUERIES: usize = 4;

/// `out[i][p] = scale * q[i] · rows[p]` for each query's own number of rows.
///
/// # Safety
/// AVX-512F; all queries have one length, a multiple of 16, and `rows` has as many rows as the longest of `out`.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
pub unsafe fn dots<T: Load>(q: [&[f32]; QUERIES], rows: &[T], scale: f32, out: &mut [&mut [f32]; QUERIES]) {
    let d = q[0].len();
    let shared = out.iter().map(|o| o.len()).min().unwrap_or(0) / QUERIES * QUERIES;
    for p in (0..shared).step_by(QUERIES) {
        let mut acc = [[_mm512_setzero_ps(); QUERIES]; QUERIES];
        for j in (0..d).step_by(16) {
            let mut x = [_mm512_setzero_ps(); QUERIES];
            for (x, q) in x.iter_mut().zip(q) {
                // SAFETY: j + 16 <= d.
                *x = unsafe { _mm512_loadu_ps(q.as_ptr().add(j)) };
            }
            for r in 0..QUERIES {
                // SAFETY: row p + r exists.
                let row = unsafe { T::load16(rows.as_ptr().add((p + r) * d + j)) };
                for i in 0..QUERIES {
                    acc[i][r] = _mm512_fmadd_ps(x[i], row, acc[i][r]);
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
        for (out, sums) in out.iter_mut().zip(quarters) {
            // SAFETY: p + 4 is at most `shared`, which no line is shorter than.
            unsafe { _mm_storeu_ps(out.as_mut_ptr().add(p), sums) };
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
pub unsafe fn weighted_sums<T: Load>(
    weights: [&[f32]; QUERIES],
    rows: &[T],
    scales: [f32; QUERIES],
    out: &mut [&mut [f32]; QUERIES],
) {
    let d = out[0].len();
    let mut column = 0;
    while column < d {
        // SAFETY: forwarded; the columns are inside.
        unsafe {
            if column + 64 <= d {
                columns::<T, 4>(weights, rows, d, column, scales, out);
                column += 64;
            } else {
                columns::<T, 1>(weights, rows, d, column, scales, out);
                column += 16;
            }
        }
    }
}

/// `16 * C` columns from `column` on.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn columns<T: Load, const C: usize>(
    weights: [&[f32]; QUERIES],
    rows: &[T],
    d: usize,
    column: usize,
    scales: [f32; QUERIES],
    out: &mut [&mut [f32]; QUERIES],
) {
    let shared = weights.iter().map(|w| w.len()).min().unwrap_or(0);
    let mut acc = [[_mm512_setzero_ps(); C]; QUERIES];
    for p in 0..shared {
        let mut row = [_mm512_setzero_ps(); C];
        for (c, v) in row.iter_mut().enumerate() {
            // SAFETY: row p exists and the columns are inside.
            *v = unsafe { T::load16(rows.as_ptr().add(p * d + column + 16 * c)) };
        }
        for i in 0..QUERIES {
            // SAFETY: p is below the length of all.
            let w = _mm512_set1_ps(unsafe { *weights[i].get_unchecked(p) });
            for c in 0..C {
                acc[i][c] = _mm512_fmadd_ps(w, row[c], acc[i][c]);
            }
        }
    }
    for i in 0..QUERIES {
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
}

/// The sums of sixteen vectors, each added as halves until one lane is left: lane `4 i + r` of the result is that of
/// `acc[i][r]`. Four merges halve the vectors and double what each holds.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn trees(acc: [[__m512; QUERIES]; QUERIES]) -> __m512 {
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
    let mut four = [_mm512_setzero_ps(); QUERIES];
    for (r, four) in four.iter_mut().enumerate() {
        *four = quarters(halves(acc[0][r], acc[1][r]), halves(acc[2][r], acc[3][r]));
    }
    // Within quarters, which are queries: lanes 0 and 2, 1 and 3, then those two.
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
        let wave = |n: usize, f: f32| (0..n).map(|i| (i as f32 * f).sin()).collect::<Vec<_>>();
        for d in [16, 64, 80, 128] {
            for counts in [[1, 1, 1, 1], [3, 4, 5, 6], [4, 4, 4, 4], [17, 17, 18, 18], [40, 40, 40, 41]] {
                let rows: Vec<f16> = wave(41 * d, 0.3).into_iter().map(f16::from_f32).collect();
                let queries: [Vec<f32>; 4] = std::array::from_fn(|i| wave(d, 0.7 + i as f32));
                let weights: [Vec<f32>; 4] = std::array::from_fn(|i| wave(counts[i], 1.3 + i as f32));
                let mut scores = counts.map(|n| vec![0.0; n]);
                let mut sums: [Vec<f32>; 4] = std::array::from_fn(|_| vec![0.0; d]);
                // SAFETY: the features were found; the buffers fit.
                unsafe {
                    dots(
                        queries.each_ref().map(|q| &q[..]),
                        &rows,
                        0.5,
                        &mut scores.each_mut().map(|s| &mut s[..]),
                    );
                    weighted_sums(
                        weights.each_ref().map(|w| &w[..]),
                        &rows,
                        [0.5, 1.0, 2.0, 3.0],
                        &mut sums.each_mut().map(|s| &mut s[..]),
                    );
                }
                for (i, scale) in [0.5, 1.0, 2.0, 3.0].into_iter().enumerate() {
                    let (mut score, mut sum) = (vec![0.0; counts[i]], vec![0.0; d]);
                    // SAFETY: as above.
                    unsafe {
                        dots_avx512(&queries[i], &rows, 0.5, &mut score);
                        weighted_sum_avx512(&weights[i], &rows, scale, &mut sum);
                    }
                    assert_eq!((&scores[i], &sums[i]), (&score, &sum), "query {i} of {counts:?}, d = {d}");
                }
            }
        }
    }
}
