//! The kernels in AVX-512: one register is one row block. Integer products exist twice, with and without VNNI; both are
//! exact, so they differ in speed only.
use super::{
    Acc, Blocks, FloatRows, FloatTile, GROUP_BYTES, GROUPS, Kernels, LANES, OFFSET, PAIR, Product, SCALES_AT,
    TILE_BYTES, TILE_K, portable,
};
use q4_core::formats::e2m1;
use std::arch::x86_64::*;

/// AVX-512 F, BW, DQ and VL with FMA and F16C.
pub static PLAIN: Kernels = Kernels { float: FLOAT, bytes: plain::BYTES, axpy };
/// The same with VNNI.
pub static VNNI: Kernels = Kernels { float: FLOAT, bytes: vnni::BYTES, axpy };

const FLOAT: Product<FloatRows, FloatTile> = Product { direct, direct_rows: 4, unpack, panel };

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

/// How far ahead of the arithmetic packed weights are fetched: 4 tiles, about 2 KiB in each of two streams.
const AHEAD: usize = 4 * TILE_BYTES;

macro_rules! by_shape {
    ($rows:expr, $count:expr, $f:ident($($a:expr),*)) => {
        match ($rows, $count) {
            (1, 1) => $f::<1, 1>($($a),*),
            (2, 1) => $f::<2, 1>($($a),*),
            (3, 1) => $f::<3, 1>($($a),*),
            (_, 1) => $f::<4, 1>($($a),*),
            (1, _) => $f::<1, 2>($($a),*),
            (2, _) => $f::<2, 2>($($a),*),
            (3, _) => $f::<3, 2>($($a),*),
            _ => $f::<4, 2>($($a),*),
        }
    };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn direct(w: Blocks, x: FloatRows, acc: *mut Acc) {
    // SAFETY: same contract.
    unsafe { by_shape!(x.rows, w.count, direct_shape(w, x, acc)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn direct_shape<const M: usize, const C: usize>(w: Blocks, x: FloatRows, out: *mut Acc) {
    // SAFETY: by the contract of `Kernels`, M rows of 16 * groups floats and C row blocks of that many groups exist.
    unsafe {
        let table = _mm512_loadu_ps(e2m1::VALUES.as_ptr());
        let zero = _mm512_setzero_ps();
        let mut acc = [[zero; C]; M];
        for g in 0..w.groups {
            let tile = w.tiles.add(g / GROUPS * TILE_BYTES);
            if g % GROUPS == 0 {
                prefetch::<C>(tile, w.stride);
            }
            let mut chains = [[[zero; 2]; C]; M];
            for half in 0..2 {
                let mut codes = [_mm512_setzero_si512(); C];
                for c in 0..C {
                    codes[c] = load(tile.add(c * w.stride + g % GROUPS * GROUP_BYTES + half * 64));
                }
                for nibble in 0..8 {
                    let k = 16 * g + 8 * half + nibble / 2 + 4 * (nibble % 2);
                    for c in 0..C {
                        // The permutation looks at four bits of a lane, so the rest need not be cleared.
                        let value = _mm512_permutexvar_ps(codes[c], table);
                        codes[c] = _mm512_srli_epi32::<4>(codes[c]);
                        for r in 0..M {
                            let s = &mut chains[r][c][nibble % 2];
                            *s = _mm512_fmadd_ps(_mm512_set1_ps(*x.x.add(r * x.ld + k)), value, *s);
                        }
                    }
                }
            }
            for c in 0..C {
                let scale = scales(tile.add(c * w.stride), g % GROUPS);
                for r in 0..M {
                    let [a, b] = chains[r][c];
                    acc[r][c] = _mm512_fmadd_ps(_mm512_add_ps(a, b), scale, acc[r][c]);
                }
            }
        }
        put(&acc, out);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn unpack(tile: *const u8, out: *mut FloatTile) {
    // SAFETY: a tile and its buffer, by the contract of `Kernels`.
    unsafe {
        let table = _mm512_loadu_ps(e2m1::VALUES.as_ptr());
        for half in 0..TILE_K / 8 {
            let mut codes = load(tile.add(half * 64));
            for nibble in 0..8 {
                let k = 8 * half + nibble / 2 + 4 * (nibble % 2);
                _mm512_store_ps((*out).values[k].as_mut_ptr(), _mm512_permutexvar_ps(codes, table));
                codes = _mm512_srli_epi32::<4>(codes);
            }
        }
        for g in 0..GROUPS {
            _mm512_store_ps((*out).scales[g].as_mut_ptr(), scales(tile, g));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn panel(tiles: *const FloatTile, count: usize, groups: usize, x: FloatRows, acc: *mut Acc) {
    for r in (0..x.rows).step_by(4) {
        // SAFETY: same contract; rows r to r + 3 or the last one exist.
        unsafe {
            by_shape!(x.rows - r, count, panel_shape(tiles, groups, x.x.add(r * x.ld), x.ld, acc.add(r)))
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn panel_shape<const M: usize, const C: usize>(
    tiles: *const FloatTile,
    groups: usize,
    x: *const f32,
    ld: usize,
    out: *mut Acc,
) {
    // SAFETY: by the contract of `Kernels`, M rows and sums and C tiles with `groups` groups exist.
    unsafe {
        let mut acc = get::<M, C>(out);
        for g in 0..groups {
            let low = chain::<M, C>(tiles, 16 * g, x, ld);
            let high = chain::<M, C>(tiles, 16 * g + 4, x, ld);
            for c in 0..C {
                let scale = _mm512_load_ps((*tiles.add(c)).scales[g].as_ptr());
                for r in 0..M {
                    acc[r][c] = _mm512_fmadd_ps(_mm512_add_ps(low[r][c], high[r][c]), scale, acc[r][c]);
                }
            }
        }
        put(&acc, out);
    }
}

/// The sums over `k` to `k + 3` and `k + 8` to `k + 11`: one chain at a time keeps all of them in registers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn chain<const M: usize, const C: usize>(
    tiles: *const FloatTile,
    k: usize,
    x: *const f32,
    ld: usize,
) -> [[__m512; C]; M] {
    let mut sums = [[_mm512_setzero_ps(); C]; M];
    for j in 0..8 {
        let k = k + j + (j & 4);
        let mut value = [_mm512_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: C tiles exist.
            value[c] = unsafe { _mm512_load_ps((*tiles.add(c)).values[k].as_ptr()) };
        }
        for r in 0..M {
            // SAFETY: M rows reach to the end of the group.
            let x = _mm512_set1_ps(unsafe { *x.add(r * ld + k) });
            for c in 0..C {
                sums[r][c] = _mm512_fmadd_ps(x, value[c], sums[r][c]);
            }
        }
    }
    sums
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn axpy(dy: &[[f32; LANES]], w: &[[f32; TILE_K]; LANES], dx: &mut [[f32; TILE_K]]) {
    portable::axpy_body(dy, w, dx, f32::mul_add);
}

/// The integer kernels around one dot product of four bytes a lane.
macro_rules! integer_kernels {
    ($name:ident, $features:literal, $dot:path) => {
        mod $name {
            use super::super::{ByteRows, ByteTile};
            use super::*;

            pub const BYTES: Product<ByteRows, ByteTile> = Product { direct, direct_rows: 4, unpack, panel };

            #[target_feature(enable = $features)]
            unsafe fn direct(w: Blocks, x: ByteRows, acc: *mut Acc) {
                // SAFETY: same contract.
                unsafe { by_shape!(x.rows, w.count, direct_shape(w, x, acc)) }
            }

            #[target_feature(enable = $features)]
            unsafe fn direct_shape<const M: usize, const C: usize>(w: Blocks, x: ByteRows, out: *mut Acc) {
                // SAFETY: by the contract of `Kernels`, M rows and C row blocks of `groups` groups exist.
                unsafe {
                    let table = table();
                    let mut acc = [[_mm512_setzero_ps(); C]; M];
                    for g in 0..w.groups {
                        let tile = w.tiles.add(g / GROUPS * TILE_BYTES);
                        if g % GROUPS == 0 {
                            prefetch::<C>(tile, w.stride);
                        }
                        for c in 0..C {
                            let codes = decode(tile.add(c * w.stride + g % GROUPS * GROUP_BYTES), table);
                            let scale = scales(tile.add(c * w.stride), g % GROUPS);
                            for r in 0..M {
                                add(&mut acc[r][c], codes, scale, row(x, r, g));
                            }
                        }
                    }
                    put(&acc, out);
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn unpack(tile: *const u8, out: *mut ByteTile) {
                // SAFETY: a tile and its buffer, by the contract of `Kernels`.
                unsafe {
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
            unsafe fn panel(tiles: *const ByteTile, count: usize, groups: usize, x: ByteRows, acc: *mut Acc) {
                for r in (0..x.rows).step_by(4) {
                    // SAFETY: same contract; rows r to r + 3 or the last one exist.
                    unsafe { by_shape!(x.rows - r, count, panel_shape(tiles, groups, x, r, acc.add(r))) }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn panel_shape<const M: usize, const C: usize>(
                tiles: *const ByteTile,
                groups: usize,
                x: ByteRows,
                first: usize,
                out: *mut Acc,
            ) {
                // SAFETY: by the contract of `Kernels`, M rows and sums and C tiles with `groups` groups exist.
                unsafe {
                    let mut acc = get::<M, C>(out);
                    for g in 0..groups {
                        for c in 0..C {
                            let tile = &*tiles.add(c);
                            let mut codes = [_mm512_setzero_si512(); 4];
                            for j in 0..4 {
                                codes[j] = load(tile.codes[4 * g + j].as_ptr().cast());
                            }
                            let scale = _mm512_load_ps(tile.scales[g].as_ptr());
                            for r in 0..M {
                                add(&mut acc[r][c], codes, scale, row(x, first + r, g));
                            }
                        }
                    }
                    put(&acc, out);
                }
            }

            /// One group of one activation row: four words of four codes, scale, bias.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn row(x: ByteRows, r: usize, g: usize) -> (*const i32, f32, i32) {
                let s = r * (x.ld / 16) + g;
                // SAFETY: row and group exist, by the contract of `Kernels`.
                unsafe { (x.q.add(r * x.ld + 16 * g).cast(), *x.scales.add(s), *x.bias.add(s)) }
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add(
                acc: &mut __m512,
                codes: [__m512i; 4],
                scale: __m512,
                (q, a, bias): (*const i32, f32, i32),
            ) {
                let mut words = [_mm512_setzero_si512(); 4];
                for j in 0..4 {
                    // SAFETY: a group has 16 codes.
                    words[j] = _mm512_set1_epi32(unsafe { q.add(j).read_unaligned() });
                }
                let dot = $dot(_mm512_set1_epi32(bias), codes, words);
                *acc =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, _mm512_set1_ps(a)), *acc);
            }
        }
    };
}

integer_kernels!(plain, "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c", dot_words);
integer_kernels!(vnni, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c", dot_vnni);

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn dot_vnni(start: __m512i, codes: [__m512i; 4], words: [__m512i; 4]) -> __m512i {
    let mut sum = start;
    for j in 0..4 {
        sum = _mm512_dpbusd_epi32(sum, codes[j], words[j]);
    }
    sum
}

/// Eight products of at most 24 * 127 fit 16 bits, so the sums of pairs do not saturate.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn dot_words(start: __m512i, codes: [__m512i; 4], words: [__m512i; 4]) -> __m512i {
    let mut pairs = _mm512_maddubs_epi16(codes[0], words[0]);
    for j in 1..4 {
        pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(codes[j], words[j]));
    }
    _mm512_add_epi32(start, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
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

/// Scales of group `g` of a tile, times 2^-8.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn scales(tile: *const u8, g: usize) -> __m512 {
    // SAFETY: a tile has 64 bytes of scales.
    let bytes = unsafe { _mm_load_si128(tile.add(SCALES_AT + LANES * g).cast()) };
    _mm512_cvtph_ps(_mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(bytes)))
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(p: *const u8) -> __m512i {
    // SAFETY: 64 aligned bytes, by the layout.
    unsafe { _mm512_load_si512(p.cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn prefetch<const C: usize>(tile: *const u8, stride: usize) {
    for c in 0..C {
        for line in 0..TILE_BYTES / 64 {
            _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(c * stride + AHEAD + 64 * line).cast());
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn get<const M: usize, const C: usize>(acc: *const Acc) -> [[__m512; C]; M] {
    let mut out = [[_mm512_setzero_ps(); C]; M];
    for r in 0..M {
        for c in 0..C.min(PAIR) {
            // SAFETY: M sums of two row blocks exist.
            out[r][c] = unsafe { _mm512_loadu_ps((*acc.add(r))[c].as_ptr()) };
        }
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put<const M: usize, const C: usize>(acc: &[[__m512; C]; M], out: *mut Acc) {
    for r in 0..M {
        for c in 0..C.min(PAIR) {
            // SAFETY: M sums of two row blocks exist.
            unsafe { _mm512_storeu_ps((*out.add(r))[c].as_mut_ptr(), acc[r][c]) };
        }
    }
}
