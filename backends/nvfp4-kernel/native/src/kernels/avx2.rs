//! The kernels in AVX2 with FMA and F16C: two registers are one row block. Float sums are those of the
//! AVX-512 kernels, bit for bit, because chains and fused roundings are the same.
mod activations;
mod floats;

use super::{
    AHEAD, ANCHOR, Acc, Blocks, ByteBlock, ByteRows, ByteTile, GROUP_BYTES, GROUPS, Kernels, LANES, OFFSET,
    PANEL_ROWS, Product, SCALES_AT, SHIFTS, TILE_BYTES, TILE_K, by_rows, lanes, prefetch,
};
use q4_core::formats::e2m1;
use q4_simd::{Avx2, Vector};
use std::arch::x86_64::*;

/// AVX2 with FMA and F16C.
pub static KERNELS: Kernels = Kernels {
    float: floats::FLOAT,
    bytes: Product {
        direct: direct_bytes,
        direct_rows: 4,
        panel_rows: PANEL_ROWS,
        unpack: unpack_bytes,
        panel: panel_bytes,
        reorder: None,
    },
    int8: activations::int8,
    nvfp4: activations::nvfp4,
    amax: lanes::amax::<Avx2>,
    finish: lanes::finish::<Avx2>,
    gate: lanes::gate::<Avx2>,
    decode: decode_tile,
    axpy: lanes::axpy::<Avx2>,
    pack: super::pack::avx2,
};

/// Rows of a register, and registers of a row block.
const HALF: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn direct_bytes(w: Blocks, x: ByteRows, out: *mut Acc) {
    // SAFETY: same contract.
    unsafe { by_rows!(x.rows, [1 2 3; 4], direct_bytes_rows(w, x, out)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn direct_bytes_rows<const M: usize>(w: Blocks, x: ByteRows, out: *mut Acc) {
    for c in 0..w.count {
        // SAFETY: by the contract of `Kernels`, M rows of `groups` groups and `count` row blocks exist.
        unsafe {
            let table = unsigned();
            let mut acc = [[_mm256_setzero_ps(); 2]; M];
            for t in 0..w.groups.div_ceil(GROUPS) {
                let tile = w.tiles.add(c * w.stride + t * TILE_BYTES);
                prefetch::<Avx2>(tile, AHEAD);
                for g in 0..GROUPS {
                    let scale = scales(tile, g);
                    let offset = offsets(scale);
                    for side in 0..2 {
                        let scale = [[scale[side], offset[side]]];
                        let codes = [decode(tile.add(g * GROUP_BYTES + side * 4 * HALF), table)];
                        for r in 0..M {
                            let row = x.blocks.add(t * x.ld + r);
                            [acc[r][side]] = add([acc[r][side]], codes, scale, row, g);
                        }
                    }
                }
            }
            for r in 0..M {
                Avx2::store(acc[r], (*out.add(r))[c].as_mut_ptr());
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_bytes(tile: *const u8, ahead: usize, out: *mut ByteTile) {
    // SAFETY: a tile and its buffer, by the contract of `Kernels`.
    unsafe {
        prefetch::<Avx2>(tile, ahead);
        let table = unsigned();
        for g in 0..GROUPS {
            for side in 0..2 {
                let codes = decode(tile.add(g * GROUP_BYTES + side * 4 * HALF), table);
                for j in 0..4 {
                    let to = (*out).codes[4 * g + j].as_mut_ptr().add(side * HALF);
                    _mm256_store_si256(to.cast(), codes[j]);
                }
            }
            let scale = scales(tile, g);
            Avx2::store(scale, (*out).scales[g].as_mut_ptr());
            Avx2::store(offsets(scale), (*out).offsets[g].as_mut_ptr());
        }
    }
}

/// The codes of a group stay in registers while rows of x pass by, those of all lanes: each load of x is of use
/// twice.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel_bytes(tiles: *const ByteTile, count: usize, _: usize, x: ByteRows, acc: *mut Acc) {
    for c in 0..count {
        for g in 0..GROUPS {
            // SAFETY: by the contract of `Kernels`, `count` tiles and `rows` rows and sums exist.
            unsafe {
                let tile = &*tiles.add(c);
                let mut codes = [[_mm256_setzero_si256(); 4]; 2];
                for side in 0..2 {
                    for j in 0..4 {
                        let from = tile.codes[4 * g + j].as_ptr().add(side * HALF);
                        codes[side][j] = _mm256_load_si256(from.cast());
                    }
                }
                let scale = Avx2::load(tile.scales[g].as_ptr());
                let offset = Avx2::load(tile.offsets[g].as_ptr());
                let scales = [[scale[0], offset[0]], [scale[1], offset[1]]];
                for r in 0..x.rows {
                    let lanes = (*acc.add(r))[c].as_mut_ptr();
                    Avx2::store(add(Avx2::load(lanes), codes, scales, x.blocks.add(r), g), lanes);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn decode_tile(tile: *const u8, steps: &[[f32; GROUPS]; LANES], out: &mut [[f32; TILE_K]; LANES]) {
    // SAFETY: a tile has eight halves of 16 words, by the contract of `Kernels`; tables and rows have what is
    // read.
    unsafe {
        let shifts = _mm256_loadu_si256(SHIFTS.as_ptr().cast());
        let magnitudes = _mm256_loadu_ps(e2m1::VALUES.as_ptr());
        for (lane, out) in out.iter_mut().enumerate() {
            for half in 0..2 * GROUPS {
                let word = _mm256_set1_epi32(*tile.cast::<i32>().add(half * LANES + lane));
                let codes = _mm256_srlv_epi32(word, shifts);
                // The permutation looks at three bits of a lane; the fourth is the sign.
                let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(codes), _mm256_set1_epi32(i32::MIN));
                let values = _mm256_permutevar8x32_ps(magnitudes, codes);
                let values = _mm256_xor_ps(values, _mm256_castsi256_ps(sign));
                let step = _mm256_set1_ps(steps[lane][half / 2]);
                _mm256_storeu_ps(out.as_mut_ptr().add(8 * half), _mm256_mul_ps(values, step));
            }
        }
    }
}

/// `acc + (dot * scale) * activation scale` for group `g` of an activation row, from scales and their offsets,
/// of so many times eight lanes. Eight products of at most 24 * 127 fit 16 bits, so the sums of pairs do not
/// saturate.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add<const SIDES: usize>(
    mut acc: [__m256; SIDES],
    codes: [[__m256i; 4]; SIDES],
    scales: [[__m256; 2]; SIDES],
    row: *const ByteBlock,
    g: usize,
) -> [__m256; SIDES] {
    // SAFETY: the block exists, by the contract of `Kernels`; a group has 16 codes.
    unsafe {
        let q = (*row).q.as_ptr().add(16 * g).cast::<i32>();
        let mut pairs = [_mm256_setzero_si256(); SIDES];
        for j in 0..4 {
            let x = _mm256_set1_epi32(*q.add(j));
            for side in 0..SIDES {
                pairs[side] = _mm256_add_epi16(pairs[side], _mm256_maddubs_epi16(codes[side][j], x));
            }
        }
        let (start, scale) = (_mm256_set1_epi32((*row).start[g]), _mm256_set1_ps((*row).scales[g]));
        for side in 0..SIDES {
            let dot = _mm256_madd_epi16(pairs[side], _mm256_set1_epi16(1));
            let dot = _mm256_castsi256_ps(_mm256_add_epi32(dot, start));
            let product = _mm256_fmadd_ps(dot, scales[side][0], scales[side][1]);
            acc[side] = _mm256_fmadd_ps(product, scale, acc[side]);
        }
        acc
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

/// Their offsets.
#[inline]
#[target_feature(enable = "avx2")]
fn offsets(scales: [__m256; 2]) -> [__m256; 2] {
    scales.map(|s| _mm256_mul_ps(s, _mm256_set1_ps(-ANCHOR)))
}
