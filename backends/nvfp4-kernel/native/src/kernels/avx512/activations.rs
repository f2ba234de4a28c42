//! Activations to int8 and NVFP4 in AVX-512: a register is a group, and the four of a block are quantised
//! together.
use crate::kernels::rounding::{Rounding, start};
use crate::kernels::{ByteBlock, GROUPS, OFFSET};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
pub unsafe fn int8(x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Int8Fn`, the groups and their blocks exist.
    unsafe {
        let mut largest = _mm512_setzero_si512();
        let infinity = _mm512_set1_ps(f32::INFINITY);
        for t in 0..groups.div_ceil(GROUPS) {
            let v = load(x, GROUPS * t, groups);
            let amax = amax(v, &mut largest);
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
            put(q, first_of_quarters(_mm512_castps_si512(scale)), out.add(t * ld));
        }
        is_finite(largest)
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
pub unsafe fn nvfp4(r: &Rounding, x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Nvfp4Fn`, the groups and their blocks exist; `steps` has four registers.
    unsafe {
        let mut largest = _mm512_setzero_si512();
        let steps = [0, 1, 2, 3].map(|i| _mm512_loadu_si512(r.steps.as_ptr().add(16 * i).cast()));
        for t in 0..groups.div_ceil(GROUPS) {
            let v = load(x, GROUPS * t, groups);
            let amax = first_of_quarters(_mm512_castps_si512(amax(v, &mut largest)));
            let (mut amaxes, mut scales) = ([0.0; GROUPS], [0.0; GROUPS]);
            _mm_storeu_si128(amaxes.as_mut_ptr().cast(), amax);
            let mut q = [_mm_setzero_si128(); GROUPS];
            for g in 0..GROUPS.min(groups - GROUPS * t) {
                let (scale, factor) = r.block(amaxes[g]);
                let factor = _mm512_set1_ps(factor);
                let y = if r.divides { _mm512_div_ps(v[g], factor) } else { _mm512_mul_ps(v[g], factor) };
                (scales[g], q[g]) = (scale, codes(y, steps));
            }
            put(q, _mm_loadu_si128(scales.as_ptr().cast()), out.add(t * ld));
        }
        is_finite(largest)
    }
}

/// Four groups from `first` of `groups` on, zeros behind the last.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(x: *const f32, first: usize, groups: usize) -> [__m512; GROUPS] {
    let mut v = [_mm512_setzero_ps(); GROUPS];
    for (g, v) in v.iter_mut().enumerate().take(groups - first) {
        // SAFETY: the group exists, by the contract of the callers.
        *v = unsafe { _mm512_loadu_ps(x.add(16 * (first + g))) };
    }
    v
}

/// The largest magnitude of each group, in all lanes of a quarter; `largest` collects them as bits, which
/// order as magnitudes do.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn amax(v: [__m512; GROUPS], largest: &mut __m512i) -> __m512 {
    let amax = quarters(v.map(|v| _mm512_castps_si512(_mm512_abs_ps(v))));
    *largest = _mm512_max_epi32(*largest, amax);
    _mm512_castsi512_ps(amax)
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

/// Doubled values of `y`, by [`Rounding::steps`]. NaN has code zero: both its conversions are the smallest
/// integer.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn codes(y: __m512, steps: [__m512i; 4]) -> __m128i {
    const UP: i32 = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
    // NaN passes as the second operand.
    let quarters = _mm512_min_ps(_mm512_set1_ps(31.0), _mm512_mul_ps(_mm512_abs_ps(y), _mm512_set1_ps(4.0)));
    let step = _mm512_add_epi32(_mm512_cvttps_epi32(quarters), _mm512_cvt_roundps_epi32::<UP>(quarters));
    let low = _mm512_permutex2var_epi32(steps[0], step, steps[1]);
    let high = _mm512_permutex2var_epi32(steps[2], step, steps[3]);
    let codes = _mm512_mask_mov_epi32(low, _mm512_test_epi32_mask(step, _mm512_set1_epi32(32)), high);
    let negative = _mm512_movepi32_mask(_mm512_castps_si512(y));
    _mm512_cvtepi32_epi8(_mm512_mask_sub_epi32(codes, negative, _mm512_setzero_si512(), codes))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn is_finite(largest: __m512i) -> bool {
    (_mm512_reduce_max_epi32(largest) as u32) < f32::INFINITY.to_bits()
}

/// Writes a block. Sums are taken of codes + 128, which are unsigned bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn put(q: [__m128i; GROUPS], scales: __m128i, out: *mut ByteBlock) {
    let q = _mm512_inserti64x4::<1>(
        _mm512_castsi256_si512(_mm256_inserti128_si256::<1>(_mm256_castsi128_si256(q[0]), q[1])),
        _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(q[2]), q[3]),
    );
    let halves = _mm512_sad_epu8(_mm512_xor_si512(q, _mm512_set1_epi8(-128)), _mm512_setzero_si512());
    let sums = _mm512_add_epi32(halves, _mm512_shuffle_epi32::<_MM_PERM_BADC>(halves));
    let sums = _mm512_mullo_epi32(sums, _mm512_set1_epi32(-OFFSET));
    let starts = _mm512_add_epi32(sums, _mm512_set1_epi32(start(-16 * 128)));
    // SAFETY: the block exists, by the contract of the callers.
    unsafe {
        let block = &mut *out;
        _mm512_storeu_si512(block.q.as_mut_ptr().cast(), q);
        _mm_storeu_si128(block.scales.as_mut_ptr().cast(), scales);
        _mm_storeu_si128(block.start.as_mut_ptr().cast(), first_of_quarters(starts));
    }
}
