//! Products with int8 activations in AVX-512, around one dot product of four bytes a lane. Weights are looked up as unsigned
//! bytes, and a sum starts at what that adds too much.
use super::{get, load, prefetch, put, scales};
use crate::kernels::{
    Acc, Blocks, ByteBlock, ByteRows, ByteTile, GROUP_BYTES, GROUPS, OFFSET, Product, TILE_BYTES,
};
use q4_core::formats::e2m1;
use std::arch::x86_64::*;

pub const PLAIN: Product<ByteRows, ByteTile> = plain::BYTES;
pub const VNNI: Product<ByteRows, ByteTile> = vnni::BYTES;
pub const FAR: Product<ByteRows, ByteTile> = far::BYTES;

/// Doubled values + 12 by code.
static UNSIGNED: [u8; 16] = {
    let mut table = [0; 16];
    let mut code = 0;
    while code < 16 {
        table[code] = (e2m1::DOUBLED[code] as i32 + OFFSET) as u8;
        code += 1;
    }
    table
};

macro_rules! kernels {
    ($name:ident, $features:literal, $dot:path, $hint:path) => {
        mod $name {
            use super::*;

            pub const BYTES: Product<ByteRows, ByteTile> = Product { direct, direct_rows: 8, unpack, panel };

            #[target_feature(enable = $features)]
            unsafe fn direct(w: Blocks, x: ByteRows, acc: *mut Acc) {
                // SAFETY: same contract.
                unsafe {
                    match x.rows {
                        1 => direct_rows::<1>(w, x, acc),
                        2 => direct_rows::<2>(w, x, acc),
                        3 => direct_rows::<3>(w, x, acc),
                        4 => direct_rows::<4>(w, x, acc),
                        5 => direct_rows::<5>(w, x, acc),
                        6 => direct_rows::<6>(w, x, acc),
                        7 => direct_rows::<7>(w, x, acc),
                        _ => direct_rows::<8>(w, x, acc),
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn direct_rows<const M: usize>(w: Blocks, x: ByteRows, out: *mut Acc) {
                for c in 0..w.count {
                    // SAFETY: by the contract of `Kernels`, M rows and `count` row blocks of `groups` groups exist.
                    unsafe {
                        let table = table();
                        let mut acc = [[_mm512_setzero_ps()]; M];
                        for t in 0..w.groups.div_ceil(GROUPS) {
                            let tile = w.tiles.add(c * w.stride + t * TILE_BYTES);
                            prefetch::<{ $hint }>(tile);
                            let rows = x.blocks.add(t * x.ld);
                            for g in 0..GROUPS {
                                let codes = [decode(tile.add(g * GROUP_BYTES), table)];
                                let scale = [scales(tile, g)];
                                for r in 0..M {
                                    add(&mut acc[r], &codes, &scale, rows.add(r), g);
                                }
                            }
                        }
                        put(&acc, c, out);
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn unpack(tile: *const u8, out: *mut ByteTile) {
                // SAFETY: a tile and its buffer, by the contract of `Kernels`.
                unsafe {
                    prefetch::<_MM_HINT_T0>(tile);
                    let table = table();
                    for g in 0..GROUPS {
                        let codes = decode(tile.add(g * GROUP_BYTES), table);
                        for j in 0..4 {
                            _mm512_store_si512((*out).codes[4 * g + j].as_mut_ptr().cast(), codes[j]);
                        }
                        _mm512_store_ps((*out).scales[g].as_mut_ptr(), scales(tile, g));
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn panel(tiles: *const ByteTile, count: usize, _: usize, x: ByteRows, acc: *mut Acc) {
                // SAFETY: same contract.
                unsafe {
                    match count {
                        1 => panel_rows::<1>(tiles, x, acc),
                        _ => panel_rows::<2>(tiles, x, acc),
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn panel_rows<const C: usize>(tiles: *const ByteTile, x: ByteRows, acc: *mut Acc) {
                for r in (0..x.rows).step_by(4) {
                    // SAFETY: same contract; rows r to r + 3 or the last one exist.
                    unsafe {
                        // The same rows in the next tile of k lie in another page, where nothing fetches ahead by itself.
                        let next = x.blocks.wrapping_add(x.ld + r).cast::<u8>();
                        for line in 0..4 * size_of::<ByteBlock>() / 64 {
                            _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(64 * line).cast());
                        }
                        let (rows, acc) = (x.blocks.add(r), acc.add(r));
                        match x.rows - r {
                            1 => panel_shape::<1, C>(tiles, rows, acc),
                            2 => panel_shape::<2, C>(tiles, rows, acc),
                            3 => panel_shape::<3, C>(tiles, rows, acc),
                            _ => panel_shape::<4, C>(tiles, rows, acc),
                        }
                    }
                }
            }

            /// All M * C dots of a group advance together, and between them the dots of the group before are added to the
            /// sums, so that no processor has to look far ahead for work.
            #[target_feature(enable = $features)]
            unsafe fn panel_shape<const M: usize, const C: usize>(
                tiles: *const ByteTile,
                rows: *const ByteBlock,
                out: *mut Acc,
            ) {
                // SAFETY: by the contract of `Kernels`, M rows and sums and C tiles exist.
                unsafe {
                    let mut acc = get::<M, C>(out);
                    let mut done = [[_mm512_setzero_si512(); C]; M];
                    for g in 0..=GROUPS {
                        let mut dot = [[_mm512_setzero_si512(); C]; M];
                        if g < GROUPS {
                            for r in 0..M {
                                dot[r] = [_mm512_set1_epi32((*rows.add(r)).bias[g]); C];
                            }
                        }
                        for j in 0..4 {
                            if g < GROUPS {
                                let mut codes = [_mm512_setzero_si512(); C];
                                for c in 0..C {
                                    codes[c] = load((*tiles.add(c)).codes[4 * g + j].as_ptr().cast());
                                }
                                for r in 0..M {
                                    let word = (*rows.add(r)).q.as_ptr().add(16 * g).cast::<i32>().add(j);
                                    for c in 0..C {
                                        dot[r][c] = $dot(dot[r][c], codes[c], _mm512_set1_epi32(*word));
                                    }
                                }
                            }
                            if g > 0 && j < M {
                                let a = _mm512_set1_ps((*rows.add(j)).scales[g - 1]);
                                for c in 0..C {
                                    let scale = _mm512_load_ps((*tiles.add(c)).scales[g - 1].as_ptr());
                                    let sum = _mm512_cvtepi32_ps(done[j][c]);
                                    acc[j][c] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, a), acc[j][c]);
                                }
                            }
                        }
                        done = dot;
                    }
                    put(&acc, 0, out);
                }
            }

            /// Adds group `g` of one activation row times C row blocks.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add<const C: usize>(
                acc: &mut [__m512; C],
                codes: &[[__m512i; 4]; C],
                scale: &[__m512; C],
                row: *const ByteBlock,
                g: usize,
            ) {
                // SAFETY: the block exists; a group has 16 codes.
                unsafe {
                    let q = (*row).q.as_ptr().add(16 * g).cast::<i32>();
                    let bias = _mm512_set1_epi32((*row).bias[g]);
                    let a = _mm512_set1_ps((*row).scales[g]);
                    let mut dot = [bias; C];
                    for j in 0..4 {
                        let word = _mm512_set1_epi32(*q.add(j));
                        for c in 0..C {
                            dot[c] = $dot(dot[c], codes[c][j], word);
                        }
                    }
                    for c in 0..C {
                        acc[c] =
                            _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[c]), _mm512_mul_ps(scale[c], a), acc[c]);
                    }
                }
            }
        }
    };
}

kernels!(plain, "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c", dot_words, _MM_HINT_T0);
kernels!(vnni, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c", _mm512_dpbusd_epi32, _MM_HINT_T0);
kernels!(far, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c", _mm512_dpbusd_epi32, _MM_HINT_T1);

/// Two products of at most 24 * 127 fit 16 bits, so their sum does not saturate.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn dot_words(sum: __m512i, codes: __m512i, word: __m512i) -> __m512i {
    let pairs = _mm512_maddubs_epi16(codes, word);
    _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn table() -> __m512i {
    // SAFETY: the table has 16 bytes.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(UNSIGNED.as_ptr().cast()) })
}

/// The 16 k of a group as four registers of 4 k.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn decode(group: *const u8, table: __m512i) -> [__m512i; 4] {
    let nibble = _mm512_set1_epi8(15);
    // SAFETY: a group has 128 bytes.
    let (a, b) = unsafe { (load(group), load(group.add(64))) };
    let low = |z| _mm512_shuffle_epi8(table, _mm512_and_si512(z, nibble));
    let high = |z| _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(z), nibble));
    [low(a), high(a), low(b), high(b)]
}
