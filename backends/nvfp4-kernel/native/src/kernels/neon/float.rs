//! Products with f32 activations in NEON.
use super::{QUARTER, nibbles, scales, values};
use crate::kernels::{
    AHEAD, Acc, Blocks, FloatRows, FloatTile, GROUP_BYTES, GROUPS, PANEL_ROWS, Product, TILE_BYTES, by_rows,
    prefetch,
};
use q4_simd::{Neon, Vector};
use std::arch::aarch64::*;

pub const FLOAT: Product<FloatRows, FloatTile> =
    Product { direct, direct_rows: 4, panel_rows: PANEL_ROWS, unpack, panel, reorder: None };

/// The chains of M rows: over `k mod 8 < 4`, and over the rest.
type Chains<const M: usize> = [[float32x4_t; 2]; M];

#[target_feature(enable = "neon")]
unsafe fn direct(w: Blocks, x: FloatRows, out: *mut Acc) {
    // SAFETY: same contract.
    unsafe { by_rows!(x.rows, [1 2 3; 4], direct_rows(w, x, out)) }
}

#[target_feature(enable = "neon")]
unsafe fn direct_rows<const M: usize>(w: Blocks, x: FloatRows, out: *mut Acc) {
    for c in 0..w.count {
        // SAFETY: by the contract of `Kernels`, M rows of 16 * groups floats and `count` row blocks exist.
        unsafe {
            let table = values();
            let mut acc = [[vdupq_n_f32(0.0); QUARTER]; M];
            for g in 0..w.groups {
                let tile = w.tiles.add(c * w.stride + g / GROUPS * TILE_BYTES);
                if g % GROUPS == 0 {
                    prefetch::<Neon>(tile, AHEAD);
                }
                let scale = scales(tile, g % GROUPS);
                for q in 0..QUARTER {
                    let mut chains = [[vdupq_n_f32(0.0); 2]; M];
                    for half in 0..2 {
                        let bytes = vld1q_u8(tile.add(g % GROUPS * GROUP_BYTES + 64 * half + 16 * q));
                        for (side, codes) in nibbles(bytes).into_iter().enumerate() {
                            let value = floats(codes, table);
                            for r in 0..M {
                                let x = vld1q_f32(x.x.add(r * x.ld + 16 * g + 8 * half + 4 * side));
                                chains[r][side] = four(chains[r][side], value, x);
                            }
                        }
                    }
                    for r in 0..M {
                        let sum = vaddq_f32(chains[r][0], chains[r][1]);
                        acc[r][q] = vfmaq_f32(acc[r][q], sum, scale[q]);
                    }
                }
            }
            for r in 0..M {
                Neon::store(acc[r], (*out.add(r))[c].as_mut_ptr());
            }
        }
    }
}

#[target_feature(enable = "neon")]
unsafe fn unpack(tile: *const u8, ahead: usize, out: *mut FloatTile) {
    // SAFETY: a tile and its buffer, by the contract of `Kernels`.
    unsafe {
        prefetch::<Neon>(tile, ahead);
        let table = values();
        for half in 0..2 * GROUPS {
            for q in 0..QUARTER {
                let bytes = vld1q_u8(tile.add(64 * half + 16 * q));
                for (side, codes) in nibbles(bytes).into_iter().enumerate() {
                    for (i, value) in floats(codes, table).into_iter().enumerate() {
                        let to = (*out).values[8 * half + 4 * side + i].as_mut_ptr();
                        vst1q_f32(to.add(QUARTER * q), value);
                    }
                }
            }
        }
        for g in 0..GROUPS {
            Neon::store(scales(tile, g), (*out).scales[g].as_mut_ptr());
        }
    }
}

#[target_feature(enable = "neon")]
unsafe fn panel(tiles: *const FloatTile, count: usize, groups: usize, x: FloatRows, acc: *mut Acc) {
    for r in (0..x.rows).step_by(4) {
        for c in 0..count {
            // SAFETY: same contract; rows r to r + 3 or the last one exist.
            unsafe {
                let (tile, x0, acc) = (&*tiles.add(c), x.x.add(r * x.ld), acc.add(r));
                by_rows!(x.rows - r, [1 2 3; 4], panel_rows(tile, groups, x0, x.ld, acc, c))
            }
        }
    }
}

#[target_feature(enable = "neon")]
unsafe fn panel_rows<const M: usize>(
    tile: &FloatTile,
    groups: usize,
    x: *const f32,
    ld: usize,
    out: *mut Acc,
    c: usize,
) {
    for g in 0..groups {
        // SAFETY: 16 lanes.
        let scale = unsafe { Neon::load(tile.scales[g].as_ptr()) };
        for side in 0..2 {
            // Both chains of four rows and eight lanes are 16 sums, which hide the latency of a multiply-add.
            let mut chains: [Chains<M>; 2] = [[[vdupq_n_f32(0.0); 2]; M]; 2];
            for i in 0..4 {
                let k = 16 * g + 4 * i;
                for q in 0..2 {
                    // SAFETY: 16 lanes; by the contract of `Kernels`, M rows of `groups` groups exist.
                    unsafe {
                        let at = |j: usize| tile.values[k + j].as_ptr().add(QUARTER * (2 * side + q));
                        let value = std::array::from_fn(|j| vld1q_f32(at(j)));
                        for r in 0..M {
                            let chain = &mut chains[q][r][i % 2];
                            *chain = four(*chain, value, vld1q_f32(x.add(r * ld + k)));
                        }
                    }
                }
            }
            for r in 0..M {
                // SAFETY: M sums exist, by the contract of `Kernels`.
                let lanes = unsafe { &mut (*out.add(r))[c] };
                for q in 0..2 {
                    let sum = vaddq_f32(chains[q][r][0], chains[q][r][1]);
                    // SAFETY: 16 lanes.
                    unsafe {
                        let lanes = lanes.as_mut_ptr().add(QUARTER * (2 * side + q));
                        vst1q_f32(lanes, vfmaq_f32(vld1q_f32(lanes), sum, scale[2 * side + q]));
                    }
                }
            }
        }
    }
}

/// Adds four k to a chain, ascending.
#[inline]
#[target_feature(enable = "neon")]
fn four(chain: float32x4_t, value: [float32x4_t; 4], x: float32x4_t) -> float32x4_t {
    let chain = vfmaq_laneq_f32::<0>(chain, value[0], x);
    let chain = vfmaq_laneq_f32::<1>(chain, value[1], x);
    let chain = vfmaq_laneq_f32::<2>(chain, value[2], x);
    vfmaq_laneq_f32::<3>(chain, value[3], x)
}

/// Four codes of each of four rows as values, a register for each k. In the 32 bits of a row, bytes of the
/// low table beside bytes of the high one are two values, of which shifting keeps one and masking the other.
#[inline]
#[target_feature(enable = "neon")]
fn floats(codes: uint8x16_t, table: [uint8x16_t; 2]) -> [float32x4_t; 4] {
    let [low, high] = table.map(|t| vqtbl1q_u8(t, codes));
    let even = vreinterpretq_u32_u8(vtrn1q_u8(low, high));
    let odd = vreinterpretq_u32_u8(vtrn2q_u8(low, high));
    let first = |pair| vreinterpretq_f32_u32(vshlq_n_u32::<16>(pair));
    let second = |pair| vreinterpretq_f32_u32(vandq_u32(pair, vdupq_n_u32(0xffff_0000)));
    [first(even), first(odd), second(even), second(odd)]
}
