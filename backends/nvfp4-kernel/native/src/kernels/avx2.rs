//! The kernels in AVX2 with FMA and F16C: two registers are one row block. Float sums are those of the AVX-512 kernels, bit
//! for bit, because chains and fused roundings are the same.
use super::{
    Acc, Blocks, ByteRows, ByteTile, FloatRows, FloatTile, GROUP_BYTES, GROUPS, Kernels, LANES, OFFSET,
    Product, SCALES_AT, TILE_BYTES, TILE_K, portable,
};
use q4_core::formats::e2m1;
use std::arch::x86_64::*;

/// AVX2 with FMA and F16C.
pub static KERNELS: Kernels = Kernels {
    float: Product { direct, direct_rows: 1, unpack, panel },
    bytes: Product { direct: direct_bytes, direct_rows: 1, unpack: unpack_bytes, panel: panel_bytes },
    axpy,
};

/// Rows of a register, and registers of a row block.
const HALF: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn direct(w: Blocks, x: FloatRows, out: *mut Acc) {
    for c in 0..w.count {
        // SAFETY: by the contract of `Kernels`, a row of 16 * groups floats and `count` row blocks exist.
        unsafe {
            let table = doubled();
            let mut acc = [_mm256_setzero_ps(); 2];
            for g in 0..w.groups {
                let tile = w.tiles.add(c * w.stride + g / GROUPS * TILE_BYTES);
                let x = x.x.add(16 * g);
                let scale = half_scales(tile, g % GROUPS);
                for side in 0..2 {
                    let mut chains = [_mm256_setzero_ps(); 2];
                    let codes = decode(tile.add(g % GROUPS * GROUP_BYTES + side * 4 * HALF), table);
                    for (j, &four) in codes.iter().enumerate() {
                        let chain = &mut chains[j % 2];
                        for (i, value) in floats(four).into_iter().enumerate() {
                            *chain = _mm256_fmadd_ps(_mm256_set1_ps(*x.add(4 * j + i)), value, *chain);
                        }
                    }
                    acc[side] = _mm256_fmadd_ps(_mm256_add_ps(chains[0], chains[1]), scale[side], acc[side]);
                }
            }
            put(acc, &mut (*out)[c]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack(tile: *const u8, out: *mut FloatTile) {
    // SAFETY: a tile and its buffer, by the contract of `Kernels`.
    unsafe {
        let table = doubled();
        for g in 0..GROUPS {
            for side in 0..2 {
                let codes = decode(tile.add(g * GROUP_BYTES + side * 4 * HALF), table);
                for (j, &four) in codes.iter().enumerate() {
                    for (i, value) in floats(four).into_iter().enumerate() {
                        _mm256_store_ps(
                            (*out).values[16 * g + 4 * j + i].as_mut_ptr().add(side * HALF),
                            value,
                        );
                    }
                }
            }
            put(half_scales(tile, g), &mut (*out).scales[g]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel(tiles: *const FloatTile, count: usize, groups: usize, x: FloatRows, acc: *mut Acc) {
    for r in (0..x.rows).step_by(4) {
        for c in 0..count {
            // SAFETY: same contract; rows r to r + 3 or the last one exist.
            unsafe {
                let (tile, x0, acc) = (&*tiles.add(c), x.x.add(r * x.ld), acc.add(r));
                match x.rows - r {
                    1 => panel_rows::<1>(tile, groups, x0, x.ld, acc, c),
                    2 => panel_rows::<2>(tile, groups, x0, x.ld, acc, c),
                    3 => panel_rows::<3>(tile, groups, x0, x.ld, acc, c),
                    _ => panel_rows::<4>(tile, groups, x0, x.ld, acc, c),
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel_rows<const M: usize>(
    tile: &FloatTile,
    groups: usize,
    x: *const f32,
    ld: usize,
    out: *mut Acc,
    c: usize,
) {
    // SAFETY: by the contract of `Kernels`, M rows and sums exist.
    unsafe {
        for g in 0..groups {
            let low = chain::<M>(tile, 16 * g, x, ld);
            let high = chain::<M>(tile, 16 * g + 4, x, ld);
            let scale = get(&tile.scales[g]);
            for r in 0..M {
                let lanes = &mut (*out.add(r))[c];
                let mut acc = get(lanes);
                for side in 0..2 {
                    let sum = _mm256_add_ps(low[r][side], high[r][side]);
                    acc[side] = _mm256_fmadd_ps(sum, scale[side], acc[side]);
                }
                put(acc, lanes);
            }
        }
    }
}

/// The sums over `k` to `k + 3` and `k + 8` to `k + 11`: one chain at a time keeps all of them in registers.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn chain<const M: usize>(tile: &FloatTile, k: usize, x: *const f32, ld: usize) -> [[__m256; 2]; M] {
    let mut sums = [[_mm256_setzero_ps(); 2]; M];
    for j in 0..8 {
        let k = k + j + (j & 4);
        let value = get(&tile.values[k]);
        for r in 0..M {
            // SAFETY: M rows reach to the end of the group.
            let x = _mm256_set1_ps(unsafe { *x.add(r * ld + k) });
            for side in 0..2 {
                sums[r][side] = _mm256_fmadd_ps(x, value[side], sums[r][side]);
            }
        }
    }
    sums
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn direct_bytes(w: Blocks, x: ByteRows, out: *mut Acc) {
    for c in 0..w.count {
        // SAFETY: by the contract of `Kernels`, a row of `groups` groups and `count` row blocks exist.
        unsafe {
            let table = unsigned();
            let mut acc = [_mm256_setzero_ps(); 2];
            for g in 0..w.groups {
                let tile = w.tiles.add(c * w.stride + g / GROUPS * TILE_BYTES);
                let scale = scales(tile, g % GROUPS);
                for side in 0..2 {
                    let codes = decode(tile.add(g % GROUPS * GROUP_BYTES + side * 4 * HALF), table);
                    acc[side] = add(acc[side], codes, scale[side], x, 0, g);
                }
            }
            put(acc, &mut (*out)[c]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_bytes(tile: *const u8, out: *mut ByteTile) {
    // SAFETY: a tile and its buffer, by the contract of `Kernels`.
    unsafe {
        let table = unsigned();
        for g in 0..GROUPS {
            for side in 0..2 {
                let codes = decode(tile.add(g * GROUP_BYTES + side * 4 * HALF), table);
                for j in 0..4 {
                    let to = (*out).codes[4 * g + j].as_mut_ptr().add(side * HALF);
                    _mm256_store_si256(to.cast(), codes[j]);
                }
            }
            put(scales(tile, g), &mut (*out).scales[g]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel_bytes(tiles: *const ByteTile, count: usize, groups: usize, x: ByteRows, acc: *mut Acc) {
    for c in 0..count {
        for g in 0..groups {
            // SAFETY: by the contract of `Kernels`, `count` tiles and `rows` rows and sums exist.
            unsafe {
                let tile = &*tiles.add(c);
                let scale = get(&tile.scales[g]);
                for side in 0..2 {
                    let mut codes = [_mm256_setzero_si256(); 4];
                    for j in 0..4 {
                        codes[j] = _mm256_load_si256(tile.codes[4 * g + j].as_ptr().add(side * HALF).cast());
                    }
                    for r in 0..x.rows {
                        let lanes = (*acc.add(r))[c].as_mut_ptr().add(side * HALF);
                        _mm256_storeu_ps(lanes, add(_mm256_loadu_ps(lanes), codes, scale[side], x, r, g));
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn axpy(dy: &[[f32; LANES]], w: &[[f32; TILE_K]; LANES], dx: &mut [[f32; TILE_K]]) {
    portable::axpy_body(dy, w, dx, f32::mul_add);
}

/// `acc + dot * (scale * activation scale)` for group `g` of row `r`. Eight products of at most 24 * 127 fit 16 bits, so the
/// sums of pairs do not saturate.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add(acc: __m256, codes: [__m256i; 4], scale: __m256, x: ByteRows, r: usize, g: usize) -> __m256 {
    let s = r * (x.ld / 16) + g;
    // SAFETY: row and group exist, by the contract of `Kernels`.
    unsafe {
        let q = x.q.add(r * x.ld + 16 * g).cast::<i32>();
        let mut pairs = _mm256_setzero_si256();
        for j in 0..4 {
            let word = _mm256_set1_epi32(q.add(j).read_unaligned());
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes[j], word));
        }
        let dot = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        let dot = _mm256_cvtepi32_ps(_mm256_add_epi32(dot, _mm256_set1_epi32(*x.bias.add(s))));
        _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, _mm256_set1_ps(*x.scales.add(s))), acc)
    }
}

/// The 16 k of a group of eight rows as four registers of 4 k.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn decode(group: *const u8, table: __m256i) -> [__m256i; 4] {
    let nibble = _mm256_set1_epi8(15);
    // SAFETY: a group has 128 bytes, 32 of each half for eight rows.
    let (a, b) = unsafe { (_mm256_load_si256(group.cast()), _mm256_load_si256(group.add(64).cast())) };
    let low = |z| _mm256_shuffle_epi8(table, _mm256_and_si256(z, nibble));
    let high = |z| _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(z), nibble));
    [low(a), high(a), low(b), high(b)]
}

/// Four signed bytes a lane as four registers of floats.
#[inline]
#[target_feature(enable = "avx2")]
fn floats(four: __m256i) -> [__m256; 4] {
    [
        _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(four))),
        _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<16>(four))),
        _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<8>(four))),
        _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(four)),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn doubled() -> __m256i {
    // SAFETY: the table has 16 bytes.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(e2m1::DOUBLED.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2")]
fn unsigned() -> __m256i {
    _mm256_add_epi8(doubled(), _mm256_set1_epi8(OFFSET as i8))
}

/// Scales of group `g` of a tile, times 2^-8.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn scales(tile: *const u8, g: usize) -> [__m256; 2] {
    // SAFETY: a tile has 64 bytes of scales.
    let bytes = unsafe { _mm_load_si128(tile.add(SCALES_AT + LANES * g).cast()) };
    let halves = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(bytes));
    [_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))]
}

/// The same for doubled values.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn half_scales(tile: *const u8, g: usize) -> [__m256; 2] {
    // SAFETY: same contract.
    let [a, b] = unsafe { scales(tile, g) };
    let half = _mm256_set1_ps(0.5);
    [_mm256_mul_ps(a, half), _mm256_mul_ps(b, half)]
}

#[inline]
#[target_feature(enable = "avx2")]
fn get(lanes: &[f32; LANES]) -> [__m256; 2] {
    // SAFETY: 16 floats.
    unsafe { [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(HALF))] }
}

#[inline]
#[target_feature(enable = "avx2")]
fn put(halves: [__m256; 2], lanes: &mut [f32; LANES]) {
    // SAFETY: 16 floats.
    unsafe {
        _mm256_storeu_ps(lanes.as_mut_ptr(), halves[0]);
        _mm256_storeu_ps(lanes.as_mut_ptr().add(HALF), halves[1]);
    }
}
