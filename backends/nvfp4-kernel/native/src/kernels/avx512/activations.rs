//! Activations to int8 and NVFP4 in AVX-512: a register is a group, and int8 takes the four of a block together.
use crate::kernels::rounding::{GAINS, Rounding, pad, start};
use crate::kernels::{ByteBlock, GROUPS, OFFSET};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
pub unsafe fn int8(x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Int8Fn`, the groups and their blocks exist.
    unsafe {
        let mut largest = _mm512_setzero_si512();
        let infinity = _mm512_set1_ps(f32::INFINITY);
        for t in 0..groups.div_ceil(GROUPS) {
            let mut v = [_mm512_setzero_ps(); GROUPS];
            for (g, v) in v.iter_mut().enumerate().take(groups - GROUPS * t) {
                *v = _mm512_loadu_ps(x.add(16 * (GROUPS * t + g)));
            }
            // Bits of magnitudes order as magnitudes do.
            let amax = quarters(v.map(|v| _mm512_castps_si512(_mm512_abs_ps(v))));
            largest = _mm512_max_epi32(largest, amax);
            let amax = _mm512_castsi512_ps(amax);
            let inverse = _mm512_div_ps(_mm512_set1_ps(127.0), amax);
            let usable = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(inverse, infinity);
            let inverse = _mm512_maskz_mov_ps(usable, inverse);
            let scale = _mm512_maskz_div_ps(usable, amax, _mm512_set1_ps(127.0));
            let q = [
                bytes(v[0], _mm512_shuffle_f32x4::<0b00_00_00_00>(inverse, inverse)),
                bytes(v[1], _mm512_shuffle_f32x4::<0b01_01_01_01>(inverse, inverse)),
                bytes(v[2], _mm512_shuffle_f32x4::<0b10_10_10_10>(inverse, inverse)),
                bytes(v[3], _mm512_shuffle_f32x4::<0b11_11_11_11>(inverse, inverse)),
            ];
            let q = _mm512_inserti64x4::<1>(
                _mm512_castsi256_si512(_mm256_inserti128_si256::<1>(_mm256_castsi128_si256(q[0]), q[1])),
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(q[2]), q[3]),
            );
            // Sums are taken of codes + 128, which are unsigned bytes.
            let halves = _mm512_sad_epu8(_mm512_xor_si512(q, _mm512_set1_epi8(-128)), _mm512_setzero_si512());
            let sums = _mm512_add_epi32(halves, _mm512_shuffle_epi32::<_MM_PERM_BADC>(halves));
            let sums = _mm512_mullo_epi32(sums, _mm512_set1_epi32(-OFFSET));
            let starts = _mm512_add_epi32(sums, _mm512_set1_epi32(start(-16 * 128)));
            let block = &mut *out.add(t * ld);
            _mm512_storeu_si512(block.q.as_mut_ptr().cast(), q);
            let scale = first_of_quarters(_mm512_castps_si512(scale));
            _mm_storeu_si128(block.scales.as_mut_ptr().cast(), scale);
            _mm_storeu_si128(block.start.as_mut_ptr().cast(), first_of_quarters(starts));
        }
        is_finite(largest)
    }
}

/// The largest of each of four vectors, in all lanes of a quarter of the result.
#[inline]
#[target_feature(enable = "avx512f")]
fn quarters(v: [__m512i; GROUPS]) -> __m512i {
    let [a, b, c, d] = v;
    let halves = |a, b| {
        _mm512_max_epi32(
            _mm512_shuffle_i32x4::<0b01_00_01_00>(a, b),
            _mm512_shuffle_i32x4::<0b11_10_11_10>(a, b),
        )
    };
    let (ab, cd) = (halves(a, b), halves(c, d));
    let four = _mm512_max_epi32(
        _mm512_shuffle_i32x4::<0b10_00_10_00>(ab, cd),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(ab, cd),
    );
    let two = _mm512_max_epi32(four, _mm512_shuffle_epi32::<_MM_PERM_BADC>(four));
    _mm512_max_epi32(two, _mm512_shuffle_epi32::<_MM_PERM_CDAB>(two))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn first_of_quarters(v: __m512i) -> __m128i {
    let first = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    _mm512_castsi512_si128(_mm512_permutexvar_epi32(first, v))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn bytes(v: __m512, inverse: __m512) -> __m128i {
    _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, inverse)))
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
        block.start[g % GROUPS] = start(sum);
    }
}
