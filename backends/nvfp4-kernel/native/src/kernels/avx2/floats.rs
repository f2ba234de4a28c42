//! Products of f32 activations in AVX2. A weight is a number of bf16 here, so that two look-ups of bytes find
//! 32 of them, and an interleaving, a shift and a mask make sixteen of those floats.
use crate::kernels::{
    AHEAD, Acc, Blocks, FloatRows, FloatTile, GROUP_BYTES, GROUPS, LANES, PANEL_ROWS, Product, Reorder,
    SCALES_AT, TILE_BYTES, by_rows, prefetch,
};
use q4_core::formats::e2m1;
use q4_simd::planes::{Planes, SHORT, by_byte, by_word, codes, tables, upper_codes};
use q4_simd::{Avx2, Vector};
use std::arch::x86_64::*;
use std::hint;

/// With f32 activations.
pub const FLOAT: Product<FloatRows, FloatTile> =
    Product { direct, direct_rows: 4, panel_rows: PANEL_ROWS, unpack, panel, reorder: Some(REORDER) };

/// Weights without their scales.
static TABLES: [[u8; 16]; SHORT] = tables(&e2m1::VALUES);
/// Rows of a register, and registers of a row block.
const HALF: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn direct(w: Blocks, x: FloatRows, out: *mut Acc) {
    // SAFETY: same contract.
    unsafe { by_rows!(x.rows, [1 2 3; 4], direct_rows(w, x, out)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn direct_rows<const M: usize>(w: Blocks, x: FloatRows, out: *mut Acc) {
    for c in 0..w.count {
        // SAFETY: by the contract of `Kernels`, M rows of 16 * groups floats and `count` row blocks exist.
        unsafe {
            let planes = Planes::load(&TABLES);
            let mut scales = Scales::BLANK;
            let mut acc = [[_mm256_setzero_ps(); 2]; M];
            for g in 0..w.groups {
                let tile = w.tiles.add(c * w.stride + g / GROUPS * TILE_BYTES);
                if g % GROUPS == 0 {
                    prefetch::<Avx2>(tile, AHEAD);
                    scales = Scales::of(tile);
                }
                let group = tile.add(g % GROUPS * GROUP_BYTES);
                let x = FloatRows { x: x.x.add(16 * g), ..x };
                let (mut low, mut high) = ([[_mm256_setzero_ps(); 2]; M], [[_mm256_setzero_ps(); 2]; M]);
                if M <= TOGETHER {
                    four_k(&planes, group, x, 0, 0, &mut low);
                    four_k(&planes, group, x, 0, 1, &mut high);
                    four_k(&planes, group, x, 1, 0, &mut low);
                    four_k(&planes, group, x, 1, 1, &mut high);
                } else {
                    four_k(&planes, group, x, 0, 0, &mut low);
                    four_k(&planes, group, x, 1, 0, &mut low);
                    four_k(&planes, group, x, 0, 1, &mut high);
                    four_k(&planes, group, x, 1, 1, &mut high);
                }
                let scale = scales.group(g % GROUPS);
                for r in 0..M {
                    acc[r] = Avx2::fma(Avx2::add(low[r], high[r]), scale, acc[r]);
                }
            }
            for r in 0..M {
                Avx2::store(acc[r], (*out.add(r))[c].as_mut_ptr());
            }
        }
    }
}

/// Rows whose sums of both chains fit into the registers.
const TOGETHER: usize = 2;

/// Adds the products over four k of a chain, in half a group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn four_k<const M: usize>(
    planes: &Planes<SHORT>,
    group: *const u8,
    x: FloatRows,
    half: usize,
    chain: usize,
    sums: &mut [[__m256; 2]; M],
) {
    // SAFETY: the caller's: M rows of 16 floats.
    unsafe {
        let values = [four(planes, group, half, chain), four(planes, group.add(4 * HALF), half, chain)];
        for j in 0..4 {
            for r in 0..M {
                let x = _mm256_set1_ps(*x.x.add(r * x.ld + 8 * half + 4 * chain + j));
                for side in 0..2 {
                    sums[r][side] = _mm256_fmadd_ps(x, values[side][j], sums[r][side]);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack(tile: *const u8, ahead: usize, out: *mut FloatTile) {
    // SAFETY: a tile and its buffer, by the contract of `Kernels`.
    unsafe {
        prefetch::<Avx2>(tile, ahead);
        let planes = Planes::load(&TABLES);
        let scales = Scales::of(tile);
        for g in 0..GROUPS {
            let group = tile.add(g * GROUP_BYTES);
            for (half, chain) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                for side in 0..2 {
                    let group = group.add(4 * HALF * side);
                    for (j, value) in four(&planes, group, half, chain).into_iter().enumerate() {
                        let k = 16 * g + 8 * half + 4 * chain + j;
                        _mm256_store_ps((*out).values[k].as_mut_ptr().add(side * HALF), value);
                    }
                }
            }
            Avx2::store(scales.group(g), (*out).scales[g].as_mut_ptr());
        }
    }
}

/// Bytes that [`four`] looks up together lie as it wants them, so that it need not bring them there.
const REORDER: Reorder = Reorder { to, back };

#[target_feature(enable = "avx2")]
unsafe fn to(tiles: *mut u8, count: usize) {
    // SAFETY: the caller's, and the processor's.
    unsafe { each_eight(tiles, count, |eight| by_byte::<SHORT>(eight)) }
}

#[target_feature(enable = "avx2")]
unsafe fn back(tiles: *mut u8, count: usize) {
    // SAFETY: as above.
    unsafe { each_eight(tiles, count, |eight| by_word(eight)) }
}

/// Of each eight lanes the words of half a group.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn each_eight(tiles: *mut u8, count: usize, order: impl Fn(__m256i) -> __m256i) {
    for t in 0..count {
        for at in (0..SCALES_AT).step_by(4 * HALF) {
            // SAFETY: `count` aligned tiles, by the contract of `Kernels`.
            unsafe {
                let p = tiles.add(t * TILE_BYTES + at).cast();
                _mm256_store_si256(p, order(_mm256_load_si256(p)));
            }
        }
    }
}

/// Weights of half a group and eight rows, four k of a chain.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn four(planes: &Planes<SHORT>, group: *const u8, half: usize, chain: usize) -> [__m256; 4] {
    // SAFETY: a group has two halves of 64 bytes, of which eight rows have 32.
    unsafe {
        let bytes = _mm256_load_si256(group.add(64 * half).cast());
        planes.four(if chain == 0 { codes(bytes) } else { upper_codes(bytes) })
    }
}

/// The scales of a tile as f16, times 2^-8: widening reads memory, for of a register it costs twice as much.
#[repr(C, align(32))]
struct Scales([[u16; LANES]; GROUPS]);

impl Scales {
    const BLANK: Self = Self([[0; LANES]; GROUPS]);

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn of(tile: *const u8) -> Self {
        let mut scales = Self::BLANK;
        for (g, to) in scales.0.iter_mut().enumerate() {
            // SAFETY: a tile has 64 bytes of scales.
            let bytes = unsafe { _mm_load_si128(tile.add(SCALES_AT + LANES * g).cast()) };
            let halves = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(bytes));
            // SAFETY: sixteen of two bytes.
            unsafe { _mm256_store_si256(to.as_mut_ptr().cast(), halves) };
        }
        scales
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn group(&self, g: usize) -> [__m256; 2] {
        // SAFETY: eight of two bytes each.
        [0, HALF].map(|side| unsafe { _mm256_cvtph_ps(_mm_load_si128(self.0[g][side..].as_ptr().cast())) })
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel(tiles: *const FloatTile, count: usize, groups: usize, x: FloatRows, acc: *mut Acc) {
    // Two of them; a compiler that knows lays a chain out and mixes its k, and sums go through memory.
    let loops = [groups, hint::black_box(2)];
    for r in (0..x.rows).step_by(3) {
        for c in 0..count {
            // SAFETY: same contract; rows r to r + 2 or the last one exist.
            unsafe {
                let (tile, rows) = (&*tiles.add(c), FloatRows { x: x.x.add(r * x.ld), ..x });
                by_rows!(x.rows - r, [1 2; 3], panel_rows(tile, loops, rows, acc.add(r), c))
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel_rows<const M: usize>(
    tile: &FloatTile,
    [groups, halves]: [usize; 2],
    x: FloatRows,
    out: *mut Acc,
    c: usize,
) {
    // SAFETY: by the contract of `Kernels`, M rows and sums exist, and groups of two halves.
    unsafe {
        for g in 0..groups {
            // Both chains of three rows are twelve sums, more than hide the latency of a multiply-add; weights
            // and an input take the other registers.
            let mut sums = [[[_mm256_setzero_ps(); 2]; 2]; M];
            for half in 0..halves {
                for chain in 0..2 {
                    for j in 0..4 {
                        let k = 16 * g + 8 * half + 4 * chain + j;
                        let value = Avx2::load(tile.values.as_ptr().add(k).cast());
                        for r in 0..M {
                            let x = Avx2::splat(*x.x.add(r * x.ld + k));
                            sums[r][chain] = Avx2::fma(x, value, sums[r][chain]);
                        }
                    }
                }
            }
            let scale = Avx2::load(tile.scales.as_ptr().add(g).cast());
            for r in 0..M {
                let lanes = (*out.add(r))[c].as_mut_ptr();
                let sum = Avx2::add(sums[r][0], sums[r][1]);
                Avx2::store(Avx2::fma(sum, scale, Avx2::load(lanes)), lanes);
            }
        }
    }
}
