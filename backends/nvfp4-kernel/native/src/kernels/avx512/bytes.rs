//! Products with int8 activations in AVX-512, around one dot product of four bytes a lane. Weights are looked
//! up as unsigned bytes, and a sum starts at what that adds too much.
use super::{PANEL, get, load, prefetch, put, scales, together};
use crate::kernels::{
    AHEAD, ANCHOR, Acc, Blocks, ByteBlock, ByteRows, ByteTile, GROUP_BYTES, GROUPS, OFFSET, PANEL_ROWS,
    Product, TILE_BYTES, by_rows,
};
use q4_core::formats::e2m1;
use std::arch::x86_64::*;

pub const PLAIN: Product<ByteRows, ByteTile> = plain::BYTES;
pub const VNNI: Product<ByteRows, ByteTile> = vnni::BYTES;
pub const NEAR: Product<ByteRows, ByteTile> = near::BYTES;
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
    ($name:ident, $features:literal, $dot:path, $decode:path, $hint:path) => {
        mod $name {
            use super::*;

            pub const BYTES: Product<ByteRows, ByteTile> = Product { direct, direct_rows: 8, panel_rows: PANEL_ROWS, unpack, panel, reorder: None };

            #[target_feature(enable = $features)]
            unsafe fn direct(w: Blocks, x: ByteRows, acc: *mut Acc) {
                // SAFETY: same contract.
                unsafe {
                    by_rows!(x.rows, [1 2 3 4 5 6 7; 8], direct_rows(w, x, acc))
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn direct_rows<const M: usize>(w: Blocks, x: ByteRows, out: *mut Acc) {
                for c in 0..w.count {
                    // SAFETY: by the contract of `Kernels`, M rows and `count` row blocks of `groups` groups
                    // exist.
                    unsafe {
                        let table = table();
                        let mut acc = [[_mm512_setzero_ps()]; M];
                        for t in 0..w.groups.div_ceil(GROUPS) {
                            let tile = w.tiles.add(c * w.stride + t * TILE_BYTES);
                            prefetch::<{ $hint }>(tile, AHEAD);
                            let rows = x.blocks.add(t * x.ld);
                            for g in 0..GROUPS {
                                let codes = $decode(tile.add(g * GROUP_BYTES), table);
                                let scale = with_offset(scales(tile, g));
                                for r in 0..M {
                                    acc[r][0] = add(acc[r][0], codes, scale, rows.add(r), g);
                                }
                            }
                        }
                        put(&acc, c, out);
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn unpack(tile: *const u8, ahead: usize, out: *mut ByteTile) {
                // SAFETY: a tile and its buffer, by the contract of `Kernels`.
                unsafe {
                    prefetch::<_MM_HINT_T0>(tile, ahead);
                    let table = table();
                    for g in 0..GROUPS {
                        let codes = $decode(tile.add(g * GROUP_BYTES), table);
                        for j in 0..4 {
                            _mm512_store_si512((*out).codes[4 * g + j].as_mut_ptr().cast(), codes[j]);
                        }
                        let [scale, offset] = with_offset(scales(tile, g));
                        _mm512_store_ps((*out).scales[g].as_mut_ptr(), scale);
                        _mm512_store_ps((*out).offsets[g].as_mut_ptr(), offset);
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
                let mut r = 0;
                while r < x.rows {
                    let some = together(x.rows - r);
                    // SAFETY: same contract; so many rows from r on exist.
                    unsafe {
                        // The same rows in the next tile of k lie in another page, where nothing fetches
                        // ahead by itself.
                        let next = x.blocks.wrapping_add(x.ld + r).cast::<u8>();
                        for line in 0..PANEL * size_of::<ByteBlock>() / 64 {
                            _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(64 * line).cast());
                        }
                        let (rows, acc) = (x.blocks.add(r), acc.add(r));
                        match some {
                            1 => panel_shape::<1, C>(tiles, rows, acc),
                            2 => panel_shape::<2, C>(tiles, rows, acc),
                            3 => panel_shape::<3, C>(tiles, rows, acc),
                            4 => panel_shape::<4, C>(tiles, rows, acc),
                            5 => panel_shape::<5, C>(tiles, rows, acc),
                            _ => panel_shape::<PANEL, C>(tiles, rows, acc),
                        }
                    }
                    r += some;
                }
            }

            /// All M * C dots of a group advance together. Six rows and two row blocks fill the registers,
            /// and load least.
            #[target_feature(enable = $features)]
            unsafe fn panel_shape<const M: usize, const C: usize>(
                tiles: *const ByteTile,
                rows: *const ByteBlock,
                out: *mut Acc,
            ) {
                // SAFETY: by the contract of `Kernels`, M rows and sums and C tiles exist.
                unsafe {
                    let mut acc = get::<M, C>(out);
                    for g in 0..GROUPS {
                        let mut dot = [[_mm512_setzero_si512(); C]; M];
                        for r in 0..M {
                            dot[r] = [_mm512_set1_epi32((*rows.add(r)).start[g]); C];
                        }
                        for j in 0..4 {
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
                        let mut scale = [[_mm512_setzero_ps(); 2]; C];
                        for c in 0..C {
                            let (scales, offsets) = (&(*tiles.add(c)).scales[g], &(*tiles.add(c)).offsets[g]);
                            scale[c] = [_mm512_load_ps(scales.as_ptr()), _mm512_load_ps(offsets.as_ptr())];
                        }
                        for r in 0..M {
                            for c in 0..C {
                                acc[r][c] = add_dot(acc[r][c], dot[r][c], scale[c], (*rows.add(r)).scales[g]);
                            }
                        }
                    }
                    put(&acc, 0, out);
                }
            }

            /// `acc + (dot * scale) * activation scale` for group `g` of an activation row.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add(
                acc: __m512,
                codes: [__m512i; 4],
                scale: [__m512; 2],
                row: *const ByteBlock,
                g: usize,
            ) -> __m512 {
                // SAFETY: the block exists; a group has 16 codes.
                unsafe {
                    let q = (*row).q.as_ptr().add(16 * g).cast::<i32>();
                    let mut dot = _mm512_set1_epi32((*row).start[g]);
                    for j in 0..4 {
                        dot = $dot(dot, codes[j], _mm512_set1_epi32(*q.add(j)));
                    }
                    add_dot(acc, dot, scale, (*row).scales[g])
                }
            }
        }
    };
}

kernels!(plain, "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c", dot_words, shuffle, _MM_HINT_T0);
kernels!(
    vnni,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c",
    _mm512_dpbusd_epi32,
    shuffle,
    _MM_HINT_T0
);
kernels!(
    near,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma,f16c",
    _mm512_dpbusd_epi32,
    permute,
    _MM_HINT_T0
);
kernels!(
    far,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma,f16c",
    _mm512_dpbusd_epi32,
    permute,
    _MM_HINT_T1
);

/// Two products of at most 24 * 127 fit 16 bits, so their sum does not saturate.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn dot_words(sum: __m512i, codes: __m512i, word: __m512i) -> __m512i {
    let pairs = _mm512_maddubs_epi16(codes, word);
    _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
}

/// `acc + (dot * scale) * activation scale` of a dot that started at the anchor.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_dot(acc: __m512, dot: __m512i, [scale, offset]: [__m512; 2], activation_scale: f32) -> __m512 {
    let product = _mm512_fmadd_ps(_mm512_castsi512_ps(dot), scale, offset);
    _mm512_fmadd_ps(product, _mm512_set1_ps(activation_scale), acc)
}

/// Scales and what makes up for starting at the anchor.
#[inline]
#[target_feature(enable = "avx512f")]
fn with_offset(scale: __m512) -> [__m512; 2] {
    [scale, _mm512_mul_ps(scale, _mm512_set1_ps(-ANCHOR))]
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
unsafe fn shuffle(group: *const u8, table: __m512i) -> [__m512i; 4] {
    let nibble = _mm512_set1_epi8(15);
    // SAFETY: a group has 128 bytes.
    let (a, b) = unsafe { (load(group), load(group.add(64))) };
    let low = |z| _mm512_shuffle_epi8(table, _mm512_and_si512(z, nibble));
    let high = |z| _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(z), nibble));
    [low(a), high(a), low(b), high(b)]
}

/// The same with a table of 64 bytes, four times the 16: bits above a code pick one of four equals and need
/// not be cleared.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn permute(group: *const u8, table: __m512i) -> [__m512i; 4] {
    // SAFETY: a group has 128 bytes.
    let (a, b) = unsafe { (load(group), load(group.add(64))) };
    let low = |z| _mm512_permutexvar_epi8(z, table);
    let high = |z| _mm512_permutexvar_epi8(_mm512_srli_epi16::<4>(z), table);
    [low(a), high(a), low(b), high(b)]
}
