//! Values by 4-bit codes with AVX2, whose widest look-up finds bytes: 32 of them by tables of 16.
//!
//! Four codes of each of eight lanes are looked up in a table for each byte of a value, and what was found is
//! interleaved until whole values lie beside each other, or numbers of bf16, which a shift and a mask take
//! apart. A permutation of whole values is one of the dearest things a processor does.
use std::arch::{asm, x86_64::*};

/// Bytes of a value that [`Planes`] looks up where the values need no more: numbers of bf16.
pub const SHORT: usize = 2;
/// All of them.
pub const WHOLE: usize = 4;

/// A table for each of the upper `B` bytes of sixteen values, the lowest first.
pub const fn tables<const B: usize>(values: &[f32; 16]) -> [[u8; 16]; B] {
    let mut tables = [[0; 16]; B];
    let mut i = 0;
    while i < 16 * B {
        tables[i / 16][i % 16] = values[i % 16].to_le_bytes()[WHOLE - B + i / 16];
        i += 1;
    }
    tables
}

/// Such tables in registers, of [`SHORT`] or [`WHOLE`] values.
///
/// # Safety of its functions
/// The processor has AVX2.
#[derive(Clone, Copy)]
pub struct Planes<const B: usize>([__m256i; B]);

/// Sixteen values for both kinds of look-up: in registers for one by one, in memory for four by four.
#[derive(Clone, Copy)]
pub struct Table {
    /// The first eight and the last eight.
    pub halves: [__m256; 2],
    /// Their bytes.
    pub bytes: [[u8; 16]; WHOLE],
    /// Whether they are numbers of bf16.
    pub is_short: bool,
    /// The first, where they are whole numbers one after the other.
    pub least: Option<f32>,
}

impl Table {
    /// The tables of the upper `B` bytes.
    #[inline(always)]
    pub fn upper<const B: usize>(&self) -> &[[u8; 16]; B] {
        self.bytes.last_chunk().expect("at most four")
    }
}

#[allow(clippy::missing_safety_doc)] // above, once for all
impl<const B: usize> Planes<B> {
    /// Loads them.
    #[inline(always)]
    pub unsafe fn load(tables: &[[u8; 16]; B]) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let mut planes = [_mm256_setzero_si256(); B];
            for (plane, table) in planes.iter_mut().zip(tables) {
                *plane = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            }
            Self(planes)
        }
    }

    /// Values by the codes in byte 0, 1, 2 and 3 of every lane, as [`codes`] or [`upper_codes`] has them.
    #[inline(always)]
    pub unsafe fn four(&self, codes: __m256i) -> [__m256; 4] {
        // SAFETY: the caller's.
        unsafe {
            let plane = |i: usize| _mm256_shuffle_epi8(self.0[i], codes);
            let high = [plane(B - 2), plane(B - 1)];
            let (c, d) = (_mm256_unpacklo_epi8(high[0], high[1]), _mm256_unpackhi_epi8(high[0], high[1]));
            if B == SHORT {
                let ([c, e], [d, f]) = (upper_halves(c), upper_halves(d));
                return [c, e, d, f];
            }
            let low = [plane(0), plane(1)];
            let (a, b) = (_mm256_unpacklo_epi8(low[0], low[1]), _mm256_unpackhi_epi8(low[0], low[1]));
            [
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(a, c)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(a, c)),
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(b, d)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(b, d)),
            ]
        }
    }
}

/// The lower and the upper half of every lane as numbers of bf16. A shift and a mask, where interleaving with
/// zeros would do: processors have one or two ports that permute, and these leave them to the look-ups.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn upper_halves(lanes: __m256i) -> [__m256; 2] {
    // SAFETY: the caller's; nothing is run.
    unsafe {
        let mut upper = 0xffff_0000_u32;
        // A compiler that knows the mask blends with zero, on some processors by the port that permutes.
        asm!("/* {0:e} */", inout(reg) upper, options(pure, nomem, nostack, preserves_flags));
        let upper = _mm256_set1_epi32(upper.cast_signed());
        [
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(lanes)),
            _mm256_castsi256_ps(_mm256_and_si256(lanes, upper)),
        ]
    }
}

/// What bytes have more, as [`lifted`] makes numbers of them.
pub const LIFT: f32 = 128.0;

/// Byte 0, 1, 2 and 3 of every lane, all below 128, and [`LIFT`]: the seven bits that a number of bf16 has
/// behind its exponent. Nothing is permuted for it.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub unsafe fn lifted(bytes: __m256i) -> [__m256; 4] {
    // SAFETY: the caller's.
    unsafe {
        let exponent = _mm256_set1_epi16((LIFT.to_bits() >> 16) as i16);
        let even = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
        let odd = _mm256_srli_epi16::<8>(bytes);
        let [a, c] = upper_halves(_mm256_or_si256(even, exponent));
        let [b, d] = upper_halves(_mm256_or_si256(odd, exponent));
        [a, b, c, d]
    }
}

/// Eight words of eight codes in the order that look-ups of `B` bytes take: for [`WHOLE`] values byte `i` of
/// the first four and of the last four together, for [`SHORT`] ones bytes 0 and 1 of a word beside each other.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub unsafe fn by_byte<const B: usize>(words: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let order = match B {
            SHORT => _mm_set_epi32(0x0f0e_0b0a, 0x0706_0302, 0x0d0c_0908, 0x0504_0100),
            _ => _mm_set_epi32(0x0f0b_0703, 0x0e0a_0602, 0x0d09_0501, 0x0c08_0400),
        };
        _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(order))
    }
}

/// What `by_byte::<SHORT>` was made of.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub unsafe fn by_word(bytes: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let order = _mm_set_epi32(0x0f0e_0706, 0x0d0c_0504, 0x0b0a_0302, 0x0908_0100);
        _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(order))
    }
}

/// Of words as [`by_byte`] has them the codes in the lower halves of bytes.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub unsafe fn codes(bytes: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_and_si256(bytes, _mm256_set1_epi8(15)) }
}

/// The same in the upper halves.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub unsafe fn upper_codes(bytes: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { codes(_mm256_srli_epi16::<4>(bytes)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Avx2, Isa, LANES, Vector};

    /// Both halves of every byte of words at an odd address, beside the values themselves.
    unsafe fn check<const B: usize>(values: &[f32; 16]) {
        let words: [u32; LANES / 2 + 1] =
            std::array::from_fn(|l| (l as u32).wrapping_mul(2_654_435_761) ^ 0x0123_4567);
        // SAFETY: the caller's; eight words behind the first.
        unsafe {
            let planes = Planes::<B>::load(Avx2::table(values).upper());
            if B == SHORT {
                let mut back = [0; LANES / 2];
                let words: *const __m256i = words[1..].as_ptr().cast();
                let restored = by_word(by_byte::<B>(_mm256_loadu_si256(words)));
                _mm256_storeu_si256(back.as_mut_ptr().cast(), restored);
                assert_eq!(back, *words.cast::<[u32; LANES / 2]>());
            }
            let bytes = by_byte::<B>(_mm256_loadu_si256(words[1..].as_ptr().cast()));
            for (upper, codes) in [codes(bytes), upper_codes(bytes)].into_iter().enumerate() {
                for (i, found) in planes.four(codes).into_iter().enumerate() {
                    let mut lanes = [0.0; 8];
                    _mm256_storeu_ps(lanes.as_mut_ptr(), found);
                    for (lane, found) in lanes.into_iter().enumerate() {
                        let code = words[1 + lane] >> (8 * i + 4 * upper) & 15;
                        let want = values[code as usize];
                        assert_eq!(
                            found.to_bits(),
                            want.to_bits(),
                            "{B}: byte {i}, half {upper}, lane {lane}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn bytes_are_numbers_above_the_lift() {
        if !Isa::Avx2.is_available() {
            println!("skipped: no AVX2 here");
            return;
        }
        for first in (0..128).step_by(32) {
            let bytes: [u8; 32] = std::array::from_fn(|i| first + i as u8);
            // SAFETY: AVX2 was found; 32 bytes, and eight lanes.
            unsafe {
                let found = lifted(_mm256_loadu_si256(bytes.as_ptr().cast()));
                for (i, found) in found.into_iter().enumerate() {
                    let mut lanes = [0.0; 8];
                    _mm256_storeu_ps(lanes.as_mut_ptr(), found);
                    for (lane, found) in lanes.into_iter().enumerate() {
                        assert_eq!(found - LIFT, f32::from(bytes[4 * lane + i]), "byte {i}, lane {lane}");
                    }
                }
            }
        }
    }

    #[test]
    fn values_are_put_together_from_their_bytes() {
        if !Isa::Avx2.is_available() {
            println!("skipped: no AVX2 here");
            return;
        }
        let short: [f32; 16] = std::array::from_fn(|i| [0.0, 0.5, -3.0, 96.0, -0.0][i % 5] * (1 << i) as f32);
        let long: [f32; 16] = std::array::from_fn(|i| (i as f32 * 0.7 - 5.0).sin());
        // SAFETY: AVX2 was found.
        unsafe {
            assert!(Avx2::table(&short).is_short && !Avx2::table(&long).is_short);
            check::<SHORT>(&short);
            check::<WHOLE>(&short);
            check::<WHOLE>(&long);
        }
    }
}
