//! Activations to int8 and NVFP4 in AVX2: two registers are one group.
use crate::kernels::rounding::{GAINS, Rounding, pad, start};
use crate::kernels::{ByteBlock, GROUPS};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn int8(x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Int8Fn`, the groups and their blocks exist.
    unsafe {
        let mut largest = 0;
        for g in 0..groups {
            let v = [_mm256_loadu_ps(x.add(16 * g)), _mm256_loadu_ps(x.add(16 * g + 8))];
            let amax = amax(v, &mut largest);
            let inverse = 127.0 / amax;
            let (inverse, scale) = if inverse.is_finite() { (inverse, amax / 127.0) } else { (0.0, 0.0) };
            let inverse = _mm256_set1_ps(inverse);
            put(v.map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse))), scale, g, out, ld);
        }
        pad(groups, out, ld);
        largest < f32::INFINITY.to_bits()
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn nvfp4(r: &Rounding, x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Nvfp4Fn`, the groups and their blocks exist.
    unsafe {
        let mut largest = 0;
        for g in 0..groups {
            let v = [_mm256_loadu_ps(x.add(16 * g)), _mm256_loadu_ps(x.add(16 * g + 8))];
            let (scale, factor) = r.block(amax(v, &mut largest));
            let factor = _mm256_set1_ps(factor);
            let y = v.map(|v| if r.divides { _mm256_div_ps(v, factor) } else { _mm256_mul_ps(v, factor) });
            put(y.map(|y| encode(y, &r.thresholds)), scale, g, out, ld);
        }
        pad(groups, out, ld);
        largest < f32::INFINITY.to_bits()
    }
}

/// Doubled codes of eight scaled elements.
#[inline]
#[target_feature(enable = "avx2")]
fn encode(y: __m256, thresholds: &[f32; 7]) -> __m256i {
    let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), y);
    let mut codes = _mm256_setzero_si256();
    for (&threshold, gain) in thresholds.iter().zip(GAINS) {
        // False for NaN, whose code is zero.
        let reached = _mm256_cmp_ps::<_CMP_GE_OQ>(magnitude, _mm256_set1_ps(threshold));
        let gain = _mm256_and_si256(_mm256_castps_si256(reached), _mm256_set1_epi32(gain));
        codes = _mm256_add_epi32(codes, gain);
    }
    let negative = _mm256_srai_epi32::<31>(_mm256_castps_si256(y));
    _mm256_sub_epi32(_mm256_xor_si256(codes, negative), negative)
}

/// Largest magnitude of a group; `largest` is that of all groups as bits, which order as magnitudes do.
#[inline]
#[target_feature(enable = "avx2")]
fn amax(v: [__m256; 2], largest: &mut u32) -> f32 {
    let [a, b] = v.map(|v| _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), v)));
    let eight = _mm256_max_epi32(a, b);
    let four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
    let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
    let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
    let bits = _mm_cvtsi128_si32(one) as u32;
    *largest = (*largest).max(bits);
    f32::from_bits(bits)
}

/// Writes group `g`. Sums are taken of codes + 128, which are unsigned bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn put(codes: [__m256i; 2], scale: f32, g: usize, out: *mut ByteBlock, ld: usize) {
    // Packing works within 128-bit halves; the permutation puts the quarters in order.
    let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(codes[0], codes[1]));
    let codes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
    let halves = _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    let sum = _mm_cvtsi128_si32(_mm_add_epi32(halves, _mm_unpackhi_epi64(halves, halves))) - 16 * 128;
    // SAFETY: the block exists, by the contract of the callers.
    unsafe {
        let block = &mut *out.add(g / GROUPS * ld);
        _mm_store_si128(block.q.as_mut_ptr().add(16 * (g % GROUPS)).cast(), codes);
        block.scales[g % GROUPS] = scale;
        block.start[g % GROUPS] = start(sum);
    }
}
