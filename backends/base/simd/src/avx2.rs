//! AVX2 with FMA and F16C.
use crate::Vector;
use crate::planes::{self, Table};
use half::{bf16, f16};
use q4_core::isa::Isa;
use std::arch::x86_64::*;

/// Two 256-bit registers.
pub struct Avx2;

// SAFETY of every block: the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Avx2 {
    type F = [__m256; 2];
    type Words = [__m256i; 2];
    type Table = Table;
    const ISA: Isa = Isa::Avx2;
    const FUSED: bool = true;
    const SUMS: usize = 4;
    const ROWS: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self::F {
        unsafe { [_mm256_set1_ps(v); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self::F {
        unsafe {
            [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self::F {
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)),
            ]
        }
    }
    /// The power below the normal range has the bit below its exponent.
    #[inline(always)]
    unsafe fn load_e8m0(p: *const u8) -> Self::F {
        unsafe {
            let least = _mm256_set1_epi32(0x0040_0000);
            let low = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())), 23);
            let high = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast())), 23);
            let (low, high) = (_mm256_max_epi32(low, least), _mm256_max_epi32(high, least));
            [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::F {
        unsafe {
            let low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn store(v: Self::F, p: *mut f32) {
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn sum(v: Self::F) -> f32 {
        unsafe { tree(_mm256_add_ps(v[0], v[1])) }
    }
    #[inline(always)]
    unsafe fn table(values: &[f32; 16]) -> Self::Table {
        let halves = unsafe { Self::load(values.as_ptr()) };
        let is_short = values.iter().all(|v| v.to_bits() & 0xffff == 0);
        let is_whole = (0..16u8).all(|code| values[usize::from(code)] == values[0] + f32::from(code));
        let least = (is_whole && values[0].fract() == 0.0 && values[0].abs() < 1e6).then_some(values[0]);
        Table { halves, bytes: planes::tables(values), is_short, least }
    }
    #[inline(always)]
    unsafe fn words(p: *const u32) -> Self::Words {
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast())] }
    }
    #[inline(always)]
    unsafe fn look_up(table: Self::Table, words: Self::Words, j: i32) -> Self::F {
        unsafe { [half(table.halves, words[0], j), half(table.halves, words[1], j)] }
    }
    #[inline(always)]
    unsafe fn signed(words: Self::Words, j: i32) -> Self::F {
        unsafe { [eight_signed(words[0], j), eight_signed(words[1], j)] }
    }
    #[inline(always)]
    unsafe fn e4m3(words: Self::Words, j: i32) -> Self::F {
        unsafe { [eight_e4m3(words[0], j), eight_e4m3(words[1], j)] }
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
unsafe fn upper_byte(words: __m256i, j: i32) -> __m256i {
    // SAFETY: called by `Avx2` only.
    unsafe { _mm256_sllv_epi32(words, _mm256_set1_epi32(24 - 8 * j)) }
}

/// Byte `j` of every word, a signed number. No closure: one that is not inlined has no instruction set.
#[inline(always)]
unsafe fn eight_signed(w: __m256i, j: i32) -> __m256 {
    // SAFETY: called by `Avx2` only.
    unsafe { _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(upper_byte(w, j))) }
}

/// Byte `j` of every word, an E4M3, as with AVX-512.
#[inline(always)]
unsafe fn eight_e4m3(w: __m256i, j: i32) -> __m256 {
    // SAFETY: called by `Avx2` only.
    unsafe {
        let byte = upper_byte(w, j);
        let bits = _mm256_and_si256(_mm256_srli_epi32::<4>(byte), _mm256_set1_epi32(0x07f0_0000));
        let value = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(120 << 23)));
        let exponent = _mm256_and_si256(byte, _mm256_set1_epi32(0x7800_0000));
        let small = _mm256_castsi256_ps(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()));
        let of_small = _mm256_fmadd_ps(value, _mm256_set1_ps(2.0), _mm256_set1_ps(-0.015_625));
        let sign = _mm256_castsi256_ps(_mm256_and_si256(byte, _mm256_set1_epi32(i32::MIN)));
        _mm256_or_ps(_mm256_blendv_ps(value, of_small, small), sign)
    }
}

/// Looks the low three bits up in both halves of the table and lets bit 3, moved to the sign, choose.
#[inline(always)]
unsafe fn half(t: [__m256; 2], w: __m256i, j: i32) -> __m256 {
    // SAFETY: called by `Avx2` only.
    unsafe {
        let index = _mm256_srlv_epi32(w, _mm256_set1_epi32(4 * j));
        let (low, high) = (_mm256_permutevar8x32_ps(t[0], index), _mm256_permutevar8x32_ps(t[1], index));
        let bit3 = _mm256_sllv_epi32(w, _mm256_set1_epi32(28 - 4 * j));
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(bit3))
    }
}

/// Halves of eight lanes added until one is left.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn tree(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)))
}
