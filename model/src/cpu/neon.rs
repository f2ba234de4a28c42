//! The two sums of attention in NEON, in the order of the other instruction sets: sixteen lanes along the row, then a tree.
//! A sum does not depend on which other rows share a call.
use super::simd::Widen;
use std::arch::aarch64::*;

/// Loads of four elements, widened to f32.
pub trait Load: Widen {
    /// # Safety
    /// Four readable elements; NEON.
    unsafe fn load4(p: *const Self) -> float32x4_t;
}

impl Load for f32 {
    #[inline(always)]
    unsafe fn load4(p: *const Self) -> float32x4_t {
        // SAFETY: the caller's.
        unsafe { vld1q_f32(p) }
    }
}

impl Load for half::f16 {
    #[inline(always)]
    unsafe fn load4(p: *const Self) -> float32x4_t {
        // SAFETY: the caller's.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.cast()))) }
    }
}

impl Load for half::bf16 {
    #[inline(always)]
    unsafe fn load4(p: *const Self) -> float32x4_t {
        // SAFETY: the caller's.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.cast()))) }
    }
}

/// Registers of sixteen lanes.
const QUARTERS: usize = 4;

/// `out[p] = scale * q · rows[p]`; `q.len()` is a multiple of 16.
///
/// # Safety
/// NEON; `rows` holds `out.len() * q.len()` elements.
#[target_feature(enable = "neon")]
pub unsafe fn dots<T: Load>(q: &[f32], rows: &[T], scale: f32, out: &mut [f32]) {
    let (d, mut row) = (q.len(), rows.as_ptr());
    let (groups, rest) = out.as_chunks_mut::<4>();
    for o in groups {
        // SAFETY: four rows are left, and then at most one past the end.
        unsafe {
            *o = some_dots::<T, 4>(q, row).map(|dot| scale * dot);
            row = row.add(4 * d);
        }
    }
    for o in rest {
        // SAFETY: a row is left.
        unsafe {
            *o = scale * some_dots::<T, 1>(q, row)[0];
            row = row.add(d);
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
unsafe fn some_dots<T: Load, const R: usize>(q: &[f32], rows: *const T) -> [f32; R] {
    let d = q.len();
    let mut acc = [[vdupq_n_f32(0.0); QUARTERS]; R];
    for j in (0..d).step_by(4 * QUARTERS) {
        for i in 0..QUARTERS {
            // SAFETY: j + 16 <= d, and R rows are there.
            unsafe {
                let x = vld1q_f32(q.as_ptr().add(j + 4 * i));
                for r in 0..R {
                    acc[r][i] = vfmaq_f32(acc[r][i], x, T::load4(rows.add(r * d + j + 4 * i)));
                }
            }
        }
    }
    // Halves added until one is left, as the portable sum does.
    acc.map(|[a, b, c, d]| {
        let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
        vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
    })
}

/// `out[j] = scale * Σ_p weights[p] * rows[p, j]`; `out.len()` is a multiple of 16.
///
/// # Safety
/// NEON; `rows` holds `weights.len() * out.len()` elements.
#[target_feature(enable = "neon")]
pub unsafe fn weighted_sum<T: Load>(weights: &[f32], rows: &[T], scale: f32, out: &mut [f32]) {
    let mut column = 0;
    while column < out.len() {
        // SAFETY: the columns are inside.
        unsafe {
            if column + 64 <= out.len() {
                columns::<T, 16>(weights, rows, column, scale, out);
                column += 64;
            } else {
                columns::<T, 4>(weights, rows, column, scale, out);
                column += 16;
            }
        }
    }
}

/// `4 * C` columns from `column` on.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn columns<T: Load, const C: usize>(
    weights: &[f32],
    rows: &[T],
    column: usize,
    scale: f32,
    out: &mut [f32],
) {
    let mut acc = [vdupq_n_f32(0.0); C];
    for (p, w) in weights.iter().enumerate() {
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: row p exists and has these columns.
            let row = unsafe { T::load4(rows.as_ptr().add(p * out.len() + column + 4 * i)) };
            *acc = vfmaq_n_f32(*acc, row, *w);
        }
    }
    for (i, acc) in acc.into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { vst1q_f32(out.as_mut_ptr().add(column + 4 * i), vmulq_n_f32(acc, scale)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// The order that the module promises, in scalar code.
    fn check<T: Load>(round: impl Fn(f32) -> T) {
        let wave = |n: usize, f: f32| (0..n).map(|i| (i as f32 * f).sin()).collect::<Vec<_>>();
        for d in [16, 64, 80, 128] {
            for count in 1..10 {
                let (q, weights) = (wave(d, 0.7), wave(count, 1.3));
                let rows: Vec<T> = wave(count * d, 0.3).into_iter().map(&round).collect();
                let (mut dot, mut sum) = (vec![0.0; count], vec![0.0; d]);
                // SAFETY: the target has NEON; the buffers fit.
                unsafe {
                    dots(&q, &rows, 0.5, &mut dot);
                    weighted_sum(&weights, &rows, 0.5, &mut sum);
                }
                for p in 0..count {
                    let mut lanes = [0f32; 16];
                    for j in 0..d {
                        lanes[j % 16] = q[j].mul_add(rows[p * d + j].widen(), lanes[j % 16]);
                    }
                    for half in [8, 4, 2, 1] {
                        for l in 0..half {
                            lanes[l] += lanes[l + half];
                        }
                    }
                    assert_eq!(dot[p], 0.5 * lanes[0], "d = {d}, row {p} of {count}");
                }
                for j in 0..d {
                    let want = (0..count).fold(0f32, |s, p| weights[p].mul_add(rows[p * d + j].widen(), s));
                    assert_eq!(sum[j], 0.5 * want, "d = {d}, column {j}");
                }
            }
        }
    }

    #[test]
    fn sums_have_their_order_for_every_type() {
        check(|v| v);
        check(f16::from_f32);
        check(bf16::from_f32);
    }
}
