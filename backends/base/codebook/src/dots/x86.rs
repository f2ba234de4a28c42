//! Dots of bytes on x86-64: one instruction with VNNI, else sums of 16 bits, as far as they cannot overflow.
use super::Dot;
use crate::integers::{NARROW, WIDE};
use q4_simd::{Avx2, Avx512};
use std::arch::x86_64::*;

/// AVX-512 with VNNI: the dot is one instruction.
pub(super) struct Vnni;

/// What the sets of AVX-512 have in common.
macro_rules! avx512 {
    ($set:ty, $features:literal, $($dots:item),*) => {
        // SAFETY of every block: the trait's contract.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl Dot for $set {
            type On = Avx512;
            type Sums = __m512i;
            type Table = __m512i;
            const ROWS: Option<usize> = Some(4);

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn run<R>(f: impl FnOnce() -> R) -> R {
                f()
            }
            $($dots)*
            #[inline(always)]
            unsafe fn pick(words: __m512i, shift: i32, mask: u32) -> __m512i {
                unsafe {
                    let by = _mm512_set1_epi32(shift.abs());
                    let shifted = match shift {
                        0 => words,
                        ..0 => _mm512_sllv_epi32(words, by),
                        _ => _mm512_srlv_epi32(words, by),
                    };
                    _mm512_and_si512(shifted, _mm512_set1_epi32(mask.cast_signed()))
                }
            }
            #[inline(always)]
            unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
                unsafe { _mm512_or_si512(a, b) }
            }
            #[inline(always)]
            unsafe fn bytes(words: __m512i) -> __m512i {
                unsafe { _mm512_xor_si512(words, _mm512_set1_epi8(-128)) }
            }
            #[inline(always)]
            unsafe fn table(table: &[u8; 16]) -> __m512i {
                unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())) }
            }
            #[inline(always)]
            unsafe fn look_up(table: __m512i, bytes: __m512i) -> __m512i {
                unsafe { _mm512_shuffle_epi8(table, bytes) }
            }
            #[inline(always)]
            unsafe fn store(words: __m512i, p: *mut u32) {
                unsafe { _mm512_storeu_si512(p.cast(), words) }
            }
        }
    };
}

avx512!(
    Vnni,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c",
    #[inline(always)]
    unsafe fn start<const BITS: u32>(v: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(v) }
    },
    #[inline(always)]
    unsafe fn dot<const BITS: u32>(sums: __m512i, weights: __m512i, x: i32) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(x)) }
    },
    #[inline(always)]
    unsafe fn numbers<const BITS: u32>(sums: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
);

avx512!(
    Avx512,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c",
    #[inline(always)]
    unsafe fn start<const BITS: u32>(v: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(v) }
    },
    /// Narrow products stay sums of 16 bits, all four; of bytes the two halves have their own.
    #[inline(always)]
    unsafe fn dot<const BITS: u32>(sums: __m512i, weights: __m512i, x: i32) -> __m512i {
        unsafe {
            let x = _mm512_set1_epi32(x);
            match BITS {
                NARROW => return _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, x)),
                WIDE => {}
                _ => return _mm512_add_epi32(sums, four_512(weights, x)),
            }
            let nibble = _mm512_set1_epi8(15);
            let low = four_512(_mm512_and_si512(weights, nibble), x);
            let high = four_512(_mm512_and_si512(_mm512_srli_epi16::<4>(weights), nibble), x);
            _mm512_add_epi32(sums, _mm512_add_epi32(low, _mm512_slli_epi32::<4>(high)))
        }
    },
    #[inline(always)]
    unsafe fn numbers<const BITS: u32>(sums: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(if BITS == NARROW { pairs_512(sums) } else { sums }) }
    }
);

// SAFETY of every block: the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Dot for Avx2 {
    type On = Self;
    type Sums = [__m256i; 2];
    type Table = __m256i;
    const ROWS: Option<usize> = None;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    unsafe fn start<const BITS: u32>(v: i32) -> Self::Sums {
        unsafe { [_mm256_set1_epi32(v); 2] }
    }
    /// As that of AVX-512, and so the rest.
    #[inline(always)]
    unsafe fn dot<const BITS: u32>(sums: Self::Sums, weights: [__m256i; 2], x: i32) -> Self::Sums {
        unsafe {
            let x = _mm256_set1_epi32(x);
            [add_256::<BITS>(sums[0], weights[0], x), add_256::<BITS>(sums[1], weights[1], x)]
        }
    }
    #[inline(always)]
    unsafe fn numbers<const BITS: u32>(mut sums: Self::Sums) -> [__m256; 2] {
        unsafe {
            if BITS == NARROW {
                sums = [pairs_256(sums[0]), pairs_256(sums[1])];
            }
            [_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])]
        }
    }
    #[inline(always)]
    unsafe fn pick(words: [__m256i; 2], shift: i32, mask: u32) -> [__m256i; 2] {
        unsafe {
            let (by, mask) = (_mm256_set1_epi32(shift.abs()), _mm256_set1_epi32(mask.cast_signed()));
            let [a, b] = match shift {
                0 => words,
                ..0 => [_mm256_sllv_epi32(words[0], by), _mm256_sllv_epi32(words[1], by)],
                _ => [_mm256_srlv_epi32(words[0], by), _mm256_srlv_epi32(words[1], by)],
            };
            [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)]
        }
    }
    #[inline(always)]
    unsafe fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn bytes(words: [__m256i; 2]) -> [__m256i; 2] {
        unsafe {
            let most = _mm256_set1_epi8(-128);
            [_mm256_xor_si256(words[0], most), _mm256_xor_si256(words[1], most)]
        }
    }
    #[inline(always)]
    unsafe fn table(table: &[u8; 16]) -> __m256i {
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) }
    }
    #[inline(always)]
    unsafe fn look_up(table: __m256i, bytes: [__m256i; 2]) -> [__m256i; 2] {
        unsafe { [_mm256_shuffle_epi8(table, bytes[0]), _mm256_shuffle_epi8(table, bytes[1])] }
    }
    #[inline(always)]
    unsafe fn store(words: [__m256i; 2], p: *mut u32) {
        unsafe {
            _mm256_storeu_si256(p.cast(), words[0]);
            _mm256_storeu_si256(p.add(8).cast(), words[1]);
        }
    }
}

#[inline(always)]
unsafe fn four_512(weights: __m512i, x: __m512i) -> __m512i {
    // SAFETY: called by sets of AVX-512 only.
    unsafe { pairs_512(_mm512_maddubs_epi16(weights, x)) }
}

/// Sums of the two of 16 bits in each lane.
#[inline(always)]
unsafe fn pairs_512(sums: __m512i) -> __m512i {
    // SAFETY: called by sets of AVX-512 only.
    unsafe { _mm512_madd_epi16(sums, _mm512_set1_epi16(1)) }
}

#[inline(always)]
unsafe fn add_256<const BITS: u32>(sums: __m256i, weights: __m256i, x: __m256i) -> __m256i {
    // SAFETY: called by `Avx2` only.
    unsafe {
        match BITS {
            NARROW => return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, x)),
            WIDE => {}
            _ => return _mm256_add_epi32(sums, four_256(weights, x)),
        }
        let nibble = _mm256_set1_epi8(15);
        let low = four_256(_mm256_and_si256(weights, nibble), x);
        let high = four_256(_mm256_and_si256(_mm256_srli_epi16::<4>(weights), nibble), x);
        _mm256_add_epi32(sums, _mm256_add_epi32(low, _mm256_slli_epi32::<4>(high)))
    }
}

#[inline(always)]
unsafe fn four_256(weights: __m256i, x: __m256i) -> __m256i {
    // SAFETY: as above.
    unsafe { pairs_256(_mm256_maddubs_epi16(weights, x)) }
}

#[inline(always)]
unsafe fn pairs_256(sums: __m256i) -> __m256i {
    // SAFETY: as above.
    unsafe { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) }
}
