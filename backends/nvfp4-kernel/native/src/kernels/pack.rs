//! Packing: sixteen stored rows side by side, whole tiles at a time. A model is packed at every start, so
//! this runs at the speed of memory.
use super::{GROUPS, LANES, SCALES_AT, TILE_BYTES};

/// Where sixteen rows of a stored weight start.
pub struct StoredRows {
    /// Codes, 32 bytes a tile.
    pub codes: [*const u8; LANES],
    /// Block scales, 4 bytes a tile.
    pub scales: [*const u8; LANES],
    /// Bytes from a row's scales of one tile to those of the next.
    pub scale_step: usize,
}

/// Packs the first `tiles` tiles of the rows to `out`, every byte of them.
pub type PackFn = unsafe fn(rows: &StoredRows, tiles: usize, out: *mut u8);

/// Eight codes in the order of k to the order of a lane: 0 4 1 5 2 6 3 7.
pub fn spread_nibbles(word: u32) -> u32 {
    let part = |half: u32| {
        let bytes = (half | half << 8) & 0x00ff_00ff;
        (bytes | bytes << 4) & 0x0f0f_0f0f
    };
    part(word & 0xffff) | part(word >> 16) << 4
}

/// In plain Rust.
pub unsafe fn portable(rows: &StoredRows, tiles: usize, out: *mut u8) {
    for t in 0..tiles {
        // SAFETY: the tile is inside, by the contract of `Kernels`.
        let tile = unsafe { &mut *out.add(t * TILE_BYTES).cast::<[u8; TILE_BYTES]>() };
        for lane in 0..LANES {
            // SAFETY: the rows have that many tiles.
            let (codes, scales) = unsafe {
                let scales = rows.scales[lane].add(t * rows.scale_step);
                (*rows.codes[lane].add(t * 32).cast::<[[u8; 4]; 8]>(), *scales.cast::<[u8; GROUPS]>())
            };
            for (half, bytes) in codes.into_iter().enumerate() {
                let word = spread_nibbles(u32::from_le_bytes(bytes));
                tile[(half * LANES + lane) * 4..][..4].copy_from_slice(&word.to_le_bytes());
            }
            for (g, scale) in scales.into_iter().enumerate() {
                tile[SCALES_AT + g * LANES + lane] = scale;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::avx2;

#[cfg(target_arch = "aarch64")]
pub use aarch64::neon;

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::{GROUPS, LANES, SCALES_AT, StoredRows, TILE_BYTES};
    use std::arch::aarch64::*;

    /// Four rows at a time: nibbles spread within each row, then transpositions of 4 x 4 words.
    #[target_feature(enable = "neon")]
    pub unsafe fn neon(rows: &StoredRows, tiles: usize, out: *mut u8) {
        for t in 0..tiles {
            // SAFETY: the rows have that many tiles and `out` has room for them, by the contract of
            // `Kernels`.
            unsafe {
                let tile = out.add(t * TILE_BYTES);
                for q in 0..4 {
                    for side in 0..2 {
                        let at = |i: usize| rows.codes[4 * q + i].add(32 * t + 16 * side);
                        let words = std::array::from_fn(|i| spread(vld1q_u8(at(i))));
                        for (half, w) in transpose(words).into_iter().enumerate() {
                            vst1q_u32(tile.add(64 * (4 * side + half) + 16 * q).cast(), w);
                        }
                    }
                }
                let mut scales = [[0u8; GROUPS]; LANES];
                for (lane, scales) in scales.iter_mut().enumerate() {
                    *scales = *rows.scales[lane].add(t * rows.scale_step).cast();
                }
                let by_group = vld4q_u8(scales.as_ptr().cast());
                for (g, s) in [by_group.0, by_group.1, by_group.2, by_group.3].into_iter().enumerate() {
                    vst1q_u8(tile.add(SCALES_AT + LANES * g), s);
                }
            }
        }
    }

    /// `spread_nibbles` of every word.
    #[inline]
    #[target_feature(enable = "neon")]
    fn spread(words: uint8x16_t) -> uint32x4_t {
        const FIRST: [u8; 16] = [0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13];
        const SECOND: [u8; 16] = [2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15];
        // Codes 0 to 3 twice and codes 4 to 7 twice, as bytes of two: even bytes want the low, odd ones the
        // high. SAFETY: tables of 16 bytes.
        let (a, b) = unsafe {
            (vqtbl1q_u8(words, vld1q_u8(FIRST.as_ptr())), vqtbl1q_u8(words, vld1q_u8(SECOND.as_ptr())))
        };
        let even = vreinterpretq_u8_u16(vdupq_n_u16(0x00ff));
        let spread = vbslq_u8(even, vsliq_n_u8::<4>(a, b), vsriq_n_u8::<4>(b, a));
        vreinterpretq_u32_u8(spread)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    fn transpose([a, b, c, d]: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        let pairs = |a, b| [vtrn1q_u32(a, b), vtrn2q_u32(a, b)].map(|v| vreinterpretq_u64_u32(v));
        let ([ab, ba], [cd, dc]) = (pairs(a, b), pairs(c, d));
        [vzip1q_u64(ab, cd), vzip1q_u64(ba, dc), vzip2q_u64(ab, cd), vzip2q_u64(ba, dc)]
            .map(|v| vreinterpretq_u32_u64(v))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{GROUPS, LANES, SCALES_AT, StoredRows, TILE_BYTES};
    use std::arch::x86_64::*;

    /// Eight rows at a time: nibbles spread within each row, then a transposition of 8 x 8 words.
    #[target_feature(enable = "avx2")]
    pub unsafe fn avx2(rows: &StoredRows, tiles: usize, out: *mut u8) {
        for t in 0..tiles {
            // SAFETY: the rows have that many tiles and `out` has room for them, by the contract of
            // `Kernels`.
            unsafe {
                let tile = out.add(t * TILE_BYTES);
                for side in 0..2 {
                    let mut words = [_mm256_setzero_si256(); 8];
                    for (i, w) in words.iter_mut().enumerate() {
                        *w = spread(_mm256_loadu_si256(rows.codes[8 * side + i].add(32 * t).cast()));
                    }
                    for (half, w) in transpose(words).into_iter().enumerate() {
                        _mm256_store_si256(tile.add(64 * half + 32 * side).cast(), w);
                    }
                }
                let four = |i: usize| {
                    let word = |l: usize| {
                        rows.scales[4 * i + l].add(t * rows.scale_step).cast::<i32>().read_unaligned()
                    };
                    _mm_set_epi32(word(3), word(2), word(1), word(0))
                };
                for (g, s) in scales([four(0), four(1), four(2), four(3)]).into_iter().enumerate() {
                    _mm_store_si128(tile.add(SCALES_AT + LANES * g).cast(), s);
                }
            }
        }
    }

    /// `spread_nibbles` of every word.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn spread(words: __m256i) -> __m256i {
        const FIRST: i32 = 0x0101_0000;
        const SECOND: i32 = 0x0303_0202;
        const NEXT: i32 = 0x0404_0404;
        let bytes = |w: i32| {
            let row = _mm_set_epi32(w + 3 * NEXT, w + 2 * NEXT, w + NEXT, w);
            _mm256_broadcastsi128_si256(row)
        };
        // Codes 0 to 3 twice and codes 4 to 7 twice, as bytes of two: even bytes want the low, odd ones the
        // high.
        let (a, b) = (_mm256_shuffle_epi8(words, bytes(FIRST)), _mm256_shuffle_epi8(words, bytes(SECOND)));
        let mask = |m: i16| _mm256_set1_epi16(m);
        let low = _mm256_or_si256(
            _mm256_and_si256(a, mask(0x000f)),
            _mm256_and_si256(_mm256_srli_epi16::<4>(a), mask(0x0f00)),
        );
        let high = _mm256_or_si256(
            _mm256_and_si256(_mm256_slli_epi16::<4>(b), mask(0x00f0)),
            _mm256_and_si256(b, mask(0xf000_u16 as i16)),
        );
        _mm256_or_si256(low, high)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn transpose(r: [__m256i; 8]) -> [__m256i; 8] {
        let (mut a, mut b) = (r, r);
        for i in 0..4 {
            a[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        for i in 0..2 {
            for j in 0..2 {
                b[4 * i + 2 * j] = _mm256_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
                b[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
            }
        }
        for i in 0..4 {
            a[i] = _mm256_permute2x128_si256::<0x20>(b[i], b[4 + i]);
            a[4 + i] = _mm256_permute2x128_si256::<0x31>(b[i], b[4 + i]);
        }
        a
    }

    /// From four scales of each of 16 rows to 16 scales of each of four groups.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn scales(rows: [__m128i; 4]) -> [__m128i; GROUPS] {
        let by_group = _mm_set_epi32(0x0f0b_0703, 0x0e0a_0602, 0x0d09_0501, 0x0c08_0400);
        let [a, b, c, d] = rows.map(|r| _mm_shuffle_epi8(r, by_group));
        let (ab, cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
        let (ef, gh) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
        [
            _mm_unpacklo_epi64(ab, cd),
            _mm_unpackhi_epi64(ab, cd),
            _mm_unpacklo_epi64(ef, gh),
            _mm_unpackhi_epi64(ef, gh),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Kernels, SHIFTS};
    use q4_core::isa::Isa;

    #[test]
    fn nibbles_are_interleaved_as_the_layout_says() {
        assert_eq!(spread_nibbles(0x7654_3210), 0x7362_5140);
        for seed in 0..1000u32 {
            let word = seed.wrapping_mul(2_654_435_761) ^ seed << 7;
            for (k, shift) in SHIFTS.into_iter().enumerate() {
                assert_eq!(spread_nibbles(word) >> shift & 15, word >> (4 * k) & 15);
            }
        }
    }

    #[test]
    fn every_instruction_set_packs_the_same_bytes() {
        const TILES: usize = 3;
        for scale_step in [4, 512] {
            let mut x = 1u32;
            let mut byte = || {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (x >> 24) as u8
            };
            let codes: Vec<u8> = (0..LANES * TILES * 32 + 1).map(|_| byte()).collect();
            let scales: Vec<u8> = (0..LANES * TILES * scale_step).map(|_| byte()).collect();
            let rows = StoredRows {
                // At odd addresses, as files may have them.
                codes: std::array::from_fn(|i| codes[1 + i * TILES * 32..].as_ptr()),
                scales: std::array::from_fn(|i| scales[i * TILES * scale_step..].as_ptr()),
                scale_step,
            };
            #[repr(C, align(64))]
            struct Out([[u8; TILE_BYTES]; TILES]);
            let mut want = Out([[1; TILE_BYTES]; TILES]);
            // SAFETY: rows and buffer have the tiles.
            unsafe { portable(&rows, TILES, want.0.as_mut_ptr().cast()) };
            for isa in Isa::available() {
                let mut have = Out([[2; TILE_BYTES]; TILES]);
                // SAFETY: as above; the instruction set is available.
                unsafe { (Kernels::of(isa).pack)(&rows, TILES, have.0.as_mut_ptr().cast()) };
                assert_eq!(have.0, want.0, "{isa:?}, step {scale_step}");
            }
        }
    }
}
