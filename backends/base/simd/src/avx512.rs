//! AVX-512 F, BW, DQ and VL, beside what AVX2 has.
use crate::{Vector, avx2};
use half::{bf16, f16};
use q4_core::isa::Isa;
use std::arch::asm;
use std::arch::x86_64::*;

/// One 512-bit register; the table is one register too.
pub struct Avx512;

// SAFETY of every block: the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Avx512 {
    type F = __m512;
    type Words = __m512i;
    type Table = __m512;
    const ISA: Isa = Isa::Avx512;
    const FUSED: bool = true;
    const SUMS: usize = 16;
    const ROWS: usize = 4;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn run<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> __m512 {
        unsafe { _mm512_set1_ps(v) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> __m512 {
        unsafe { widen_f16(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> __m512 {
        unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())), 16))
        }
    }
    #[inline(always)]
    unsafe fn load_e8m0(p: *const u8) -> __m512 {
        unsafe {
            let bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())), 23);
            _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x0040_0000)))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store(v: __m512, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
            avx2::tree(_mm256_add_ps(_mm512_castps512_ps256(v), high))
        }
    }
    #[inline(always)]
    unsafe fn table(values: &[f32; 16]) -> __m512 {
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn words(p: *const u32) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    /// The permutation looks at the low four bits of every index only.
    #[inline(always)]
    unsafe fn look_up(table: __m512, words: __m512i, j: i32) -> __m512 {
        unsafe { _mm512_permutexvar_ps(_mm512_srlv_epi32(words, _mm512_set1_epi32(4 * j)), table) }
    }
    #[inline(always)]
    unsafe fn signed(words: __m512i, j: i32) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(upper_byte(words, j))) }
    }
    /// Exponent and mantissa are put where an f32 has them. Below the normal range that makes
    /// `2^-7 (1 + m/8)`, and twice that less `2^-6` is `2^-6 m/8`.
    #[inline(always)]
    unsafe fn e4m3(words: __m512i, j: i32) -> __m512 {
        unsafe {
            let byte = upper_byte(words, j);
            let bits = _mm512_and_si512(_mm512_srli_epi32::<4>(byte), _mm512_set1_epi32(0x07f0_0000));
            let value = _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(120 << 23)));
            let small = _mm512_testn_epi32_mask(byte, _mm512_set1_epi32(0x7800_0000));
            let (two, least) = (_mm512_set1_ps(2.0), _mm512_set1_ps(-0.015_625));
            let value = _mm512_castps_si512(_mm512_mask_fmadd_ps(value, small, two, least));
            let sign = _mm512_and_si512(byte, _mm512_set1_epi32(i32::MIN));
            _mm512_castsi512_ps(_mm512_or_si512(value, sign))
        }
    }
    #[inline(always)]
    unsafe fn prefetch<T>(p: *const T) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_far<T>(p: *const T) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

/// Byte `j` of every word where the highest is.
#[inline(always)]
unsafe fn upper_byte(words: __m512i, j: i32) -> __m512i {
    // SAFETY: called by `Avx512` only.
    unsafe { _mm512_sllv_epi32(words, _mm512_set1_epi32(24 - 8 * j)) }
}

/// The intrinsic converts a register, which on Intel's processors takes the port of shuffles too.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn widen_f16(p: *const f16) -> __m512 {
    let v;
    // SAFETY: sixteen readable elements, as the trait asks.
    unsafe {
        asm!("vcvtph2ps {v}, ymmword ptr [{p}]", v = lateout(zmm_reg) v, p = in(reg) p,
             options(pure, readonly, nostack, preserves_flags));
    }
    v
}
