//! NEON for the loops a compiler turns inside out when left to itself: registers for the sums of attention,
//! and dots of rows in the order of the portable code, sixteen lanes along the row, then a tree.
use super::simd::Widen;
use super::sums::Vector;
use std::arch::aarch64::*;
use std::array;

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

/// Sixteen lanes for the sums of attention.
#[derive(Clone, Copy)]
pub struct Lanes16([float32x4_t; QUARTERS]);

impl<T: Load> Vector<T> for Lanes16 {
    const SUMS: usize = 4;
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        // SAFETY: the target has NEON, here and below.
        Self(unsafe { [vdupq_n_f32(v); QUARTERS] })
    }
    #[inline(always)]
    unsafe fn widen(p: *const T) -> Self {
        // SAFETY: the caller's.
        Self(array::from_fn(|i| unsafe { T::load4(p.add(4 * i)) }))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as above.
        Self(array::from_fn(|i| unsafe { vfmaq_f32(c.0[i], self.0[i], b.0[i]) }))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: as above.
        Self(array::from_fn(|i| unsafe { vmulq_f32(self.0[i], b.0[i]) }))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        for i in 0..QUARTERS {
            // SAFETY: the caller's.
            unsafe { vst1q_f32(p.add(4 * i), self.0[i]) };
        }
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
                let q = wave(d, 0.7);
                let rows: Vec<T> = wave(count * d, 0.3).into_iter().map(&round).collect();
                let mut dot = vec![0.0; count];
                // SAFETY: the target has NEON; the buffers fit.
                unsafe { dots(&q, &rows, 0.5, &mut dot) };
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
            }
        }
    }

    #[test]
    fn dots_have_their_order_for_every_type() {
        check(|v| v);
        check(f16::from_f32);
        check(bf16::from_f32);
    }
}
