//! Activations to int8 and NVFP4 in AVX-512: one register is one group.
use crate::kernels::rounding::{GAINS, Rounding, pad};
use crate::kernels::{ByteBlock, GROUPS, OFFSET};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
pub unsafe fn int8(x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Int8Fn`, the groups and their blocks exist.
    unsafe {
        let mut largest = _mm512_setzero_si512();
        for g in 0..groups {
            let v = _mm512_loadu_ps(x.add(16 * g));
            let amax = amax(v, &mut largest);
            let inverse = 127.0 / amax;
            let (inverse, scale) = if inverse.is_finite() { (inverse, amax / 127.0) } else { (0.0, 0.0) };
            let codes = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse)));
            put(codes, scale, g, out, ld);
        }
        pad(groups, out, ld);
        is_finite(largest)
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
pub unsafe fn nvfp4(r: &Rounding, x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Nvfp4Fn`, the groups and their blocks exist.
    unsafe {
        let mut largest = _mm512_setzero_si512();
        for g in 0..groups {
            let v = _mm512_loadu_ps(x.add(16 * g));
            let (scale, factor) = r.block(amax(v, &mut largest));
            let factor = _mm512_set1_ps(factor);
            let y = if r.divides { _mm512_div_ps(v, factor) } else { _mm512_mul_ps(v, factor) };
            let magnitude = _mm512_abs_ps(y);
            let mut codes = _mm512_setzero_si512();
            for (threshold, gain) in r.thresholds.into_iter().zip(GAINS) {
                // False for NaN, whose code is zero.
                let reached = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(magnitude, _mm512_set1_ps(threshold));
                codes = _mm512_mask_add_epi32(codes, reached, codes, _mm512_set1_epi32(gain));
            }
            let negative = _mm512_movepi32_mask(_mm512_castps_si512(y));
            codes = _mm512_mask_sub_epi32(codes, negative, _mm512_setzero_si512(), codes);
            put(codes, scale, g, out, ld);
        }
        pad(groups, out, ld);
        is_finite(largest)
    }
}

/// Largest magnitude of a group; `largest` collects those of all groups by lane, as bits, which order as magnitudes do.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn amax(v: __m512, largest: &mut __m512i) -> f32 {
    let magnitude = _mm512_castps_si512(_mm512_abs_ps(v));
    *largest = _mm512_max_epi32(*largest, magnitude);
    f32::from_bits(_mm512_reduce_max_epi32(magnitude) as u32)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn is_finite(largest: __m512i) -> bool {
    (_mm512_reduce_max_epi32(largest) as u32) < f32::INFINITY.to_bits()
}

/// Writes group `g`. Sums are taken of codes + 128, which are unsigned bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn put(codes: __m512i, scale: f32, g: usize, out: *mut ByteBlock, ld: usize) {
    let codes = _mm512_cvtepi32_epi8(codes);
    let halves = _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    let sum = _mm_cvtsi128_si32(_mm_add_epi32(halves, _mm_unpackhi_epi64(halves, halves))) - 16 * 128;
    // SAFETY: the block exists, by the contract of the callers.
    unsafe {
        let block = &mut *out.add(g / GROUPS * ld);
        _mm_store_si128(block.q.as_mut_ptr().add(16 * (g % GROUPS)).cast(), codes);
        block.scales[g % GROUPS] = scale;
        block.bias[g % GROUPS] = -OFFSET * sum;
    }
}
