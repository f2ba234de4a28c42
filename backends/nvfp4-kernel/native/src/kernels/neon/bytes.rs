//! Products with int8 activations in NEON, around the exact dot of 16 codes. Dots of signed bytes need no
//! offset, so weights are looked up as they are.
use super::{QUARTER, nibbles, scales};
use crate::kernels::{
    AHEAD, Acc, Blocks, ByteBlock, ByteRows, ByteTile, GROUP_BYTES, GROUPS, LANES, PANEL_ROWS, Product,
    TILE_BYTES, by_rows, prefetch,
};
use q4_core::formats::e2m1;
use q4_simd::{Neon, Vector};
use std::arch::aarch64::*;
use std::arch::asm;

pub const PLAIN: Product<ByteRows, ByteTile> = plain::BYTES;
pub const DOTPROD: Product<ByteRows, ByteTile> = dotprod::BYTES;
pub const I8MM: Product<ByteRows, ByteTile> = Product { unpack: i8mm::unpack, panel: i8mm::panel, ..DOTPROD };

macro_rules! kernels {
    ($name:ident, $features:literal, $dot:path) => {
        mod $name {
            use super::*;

            pub const BYTES: Product<ByteRows, ByteTile> = Product { direct, direct_rows: 4, panel_rows: PANEL_ROWS, unpack, panel, reorder: None };

            #[target_feature(enable = $features)]
            unsafe fn direct(w: Blocks, x: ByteRows, out: *mut Acc) {
                // SAFETY: same contract.
                unsafe {
                    by_rows!(x.rows, [1 2 3; 4], direct_rows(w, x, out))
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn direct_rows<const M: usize>(w: Blocks, x: ByteRows, out: *mut Acc) {
                for c in 0..w.count {
                    // SAFETY: by the contract of `Kernels`, M rows of `groups` groups and `count` row blocks
                    // exist.
                    unsafe {
                        let table = table();
                        let mut acc = [[vdupq_n_f32(0.0); QUARTER]; M];
                        for t in 0..w.groups.div_ceil(GROUPS) {
                            let tile = w.tiles.add(c * w.stride + t * TILE_BYTES);
                            prefetch::<Neon>(tile, AHEAD);
                            let rows: [&ByteBlock; M] = std::array::from_fn(|r| &*x.blocks.add(t * x.ld + r));
                            for g in 0..GROUPS {
                                let scale = scales(tile, g);
                                for q in 0..QUARTER {
                                    let codes = decode(tile.add(g * GROUP_BYTES + 16 * q), table);
                                    for r in 0..M {
                                        acc[r][q] = add(acc[r][q], codes, scale[q], rows[r], g);
                                    }
                                }
                            }
                        }
                        for r in 0..M {
                            Neon::store(acc[r], (*out.add(r))[c].as_mut_ptr());
                        }
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn unpack(tile: *const u8, ahead: usize, out: *mut ByteTile) {
                // SAFETY: a tile and its buffer, by the contract of `Kernels`.
                unsafe {
                    prefetch::<Neon>(tile, ahead);
                    let table = table();
                    for g in 0..GROUPS {
                        for q in 0..QUARTER {
                            let codes = decode(tile.add(g * GROUP_BYTES + 16 * q), table);
                            for j in 0..4 {
                                let to = (*out).codes[4 * g + j].as_mut_ptr().add(QUARTER * q);
                                vst1q_s8(to.cast(), codes[j]);
                            }
                        }
                        Neon::store(scales(tile, g), (*out).scales[g].as_mut_ptr());
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn panel(tiles: *const ByteTile, count: usize, _: usize, x: ByteRows, acc: *mut Acc) {
                for r in (0..x.rows).step_by(4) {
                    for c in 0..count {
                        // SAFETY: same contract; rows r to r + 3 or the last one exist.
                        unsafe {
                            let (tile, rows, acc) = (&*tiles.add(c), x.blocks.add(r), acc.add(r));
                            by_rows!(x.rows - r, [1 2 3; 4], panel_rows(tile, rows, acc, c))
                        }
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn panel_rows<const M: usize>(
                tile: &ByteTile,
                rows: *const ByteBlock,
                out: *mut Acc,
                c: usize,
            ) {
                // SAFETY: by the contract of `Kernels`, M rows and sums exist.
                unsafe {
                    let rows: [&ByteBlock; M] = std::array::from_fn(|r| &*rows.add(r));
                    let mut acc: [_; M] = std::array::from_fn(|r| Neon::load((*out.add(r))[c].as_ptr()));
                    for g in 0..GROUPS {
                        let scale = Neon::load(tile.scales[g].as_ptr());
                        for q in 0..QUARTER {
                            let at = |j: usize| tile.codes[4 * g + j].as_ptr().add(QUARTER * q);
                            let codes = std::array::from_fn(|j| vld1q_s8(at(j).cast()));
                            for r in 0..M {
                                acc[r][q] = add(acc[r][q], codes, scale[q], rows[r], g);
                            }
                        }
                    }
                    for r in 0..M {
                        Neon::store(acc[r], (*out.add(r))[c].as_mut_ptr());
                    }
                }
            }

            /// `acc + (dot * scale) * activation scale` for group `g` of an activation row.
            #[inline]
            #[target_feature(enable = $features)]
            fn add(
                acc: float32x4_t,
                codes: [int8x16_t; 4],
                scale: float32x4_t,
                row: &ByteBlock,
                g: usize,
            ) -> float32x4_t {
                // SAFETY: a group has 16 codes.
                let x = unsafe { vld1q_s8(row.q.as_ptr().add(16 * g)) };
                vfmaq_n_f32(acc, vmulq_f32(vcvtq_f32_s32($dot(codes, x)), scale), row.scales[g])
            }
        }
    };
}

kernels!(plain, "neon", dot_words);
kernels!(dotprod, "neon,dotprod", dot_bytes);

/// Dots of four rows with 16 codes, of which `codes[j]` has k 4j to 4j + 3. Four products of at most 12 * 127
/// fit 16 bits.
#[inline]
#[target_feature(enable = "neon")]
fn dot_words(codes: [int8x16_t; 4], x: int8x16_t) -> int32x4_t {
    let x = vreinterpretq_s32_s8(x);
    let x =
        [vdupq_laneq_s32::<0>(x), vdupq_laneq_s32::<1>(x), vdupq_laneq_s32::<2>(x), vdupq_laneq_s32::<3>(x)]
            .map(|v| vreinterpretq_s8_s32(v));
    let mut low = vmull_s8(vget_low_s8(codes[0]), vget_low_s8(x[0]));
    let mut high = vmull_high_s8(codes[0], x[0]);
    for j in 1..4 {
        low = vmlal_s8(low, vget_low_s8(codes[j]), vget_low_s8(x[j]));
        high = vmlal_high_s8(high, codes[j], x[j]);
    }
    vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))
}

/// The same with the dot product instruction.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot_bytes(codes: [int8x16_t; 4], x: int8x16_t) -> int32x4_t {
    let dot = sdot::<0>(vdupq_n_s32(0), codes[0], x);
    let dot = sdot::<1>(dot, codes[1], x);
    let dot = sdot::<2>(dot, codes[2], x);
    sdot::<3>(dot, codes[3], x)
}

/// Adds the dot of each four bytes of `a` with word `WORD` of `x`. Rust has no stable name for the
/// instruction.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot<const WORD: usize>(mut sum: int32x4_t, a: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: arithmetic on three registers; the feature is enabled.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {x:v}.4b[{word}]",
            sum = inout(vreg) sum, a = in(vreg) a, x = in(vreg) x, word = const WORD,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Doubled values by code.
#[inline]
#[target_feature(enable = "neon")]
fn table() -> int8x16_t {
    // SAFETY: the table has 16 bytes.
    unsafe { vld1q_s8(e2m1::DOUBLED.as_ptr()) }
}

/// The 16 k of a group of four rows as four registers of 4 k.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn decode(group: *const u8, table: int8x16_t) -> [int8x16_t; 4] {
    // SAFETY: a group has two halves of 64 bytes, 16 of each for four rows.
    let (a, b) = unsafe { (nibbles(vld1q_u8(group)), nibbles(vld1q_u8(group.add(64)))) };
    [a[0], a[1], b[0], b[1]].map(|codes| vqtbl1q_s8(table, codes))
}

/// Two rows of weights and two of activations over 8 k at a time: half the instructions for products with
/// many rows.
mod i8mm {
    use super::*;

    /// The codes of a tile: of four rows, 8 k of the first two, of the other two, and the other 8 k likewise.
    type Codes = [[[[i8; 16]; 4]; QUARTER]; GROUPS];
    const _: () = assert!(size_of::<Codes>() == LANES * GROUPS * 16);

    #[target_feature(enable = "neon,dotprod,i8mm")]
    pub unsafe fn unpack(tile: *const u8, ahead: usize, out: *mut ByteTile) {
        // SAFETY: a tile and its buffer, by the contract of `Kernels`; both forms of the codes have one size.
        unsafe {
            prefetch::<Neon>(tile, ahead);
            let table = table();
            let to = &mut *(&raw mut (*out).codes).cast::<Codes>();
            for g in 0..GROUPS {
                for q in 0..QUARTER {
                    let words =
                        decode(tile.add(g * GROUP_BYTES + 16 * q), table).map(|v| vreinterpretq_s32_s8(v));
                    for half in 0..2 {
                        let (a, b) = (words[2 * half], words[2 * half + 1]);
                        for (pair, rows) in [vzip1q_s32(a, b), vzip2q_s32(a, b)].into_iter().enumerate() {
                            vst1q_s8(to[g][q][2 * half + pair].as_mut_ptr(), vreinterpretq_s8_s32(rows));
                        }
                    }
                }
                Neon::store(scales(tile, g), (*out).scales[g].as_mut_ptr());
            }
        }
    }

    #[target_feature(enable = "neon,dotprod,i8mm")]
    pub unsafe fn panel(tiles: *const ByteTile, count: usize, _: usize, x: ByteRows, acc: *mut Acc) {
        for r in (0..x.rows).step_by(4) {
            for c in 0..count {
                // SAFETY: same contract; rows r to r + 3 or the last one exist.
                unsafe {
                    let (tile, rows, acc) = (&*tiles.add(c), x.blocks.add(r), acc.add(r));
                    match x.rows - r {
                        1 => panel_rows::<1, 1>(tile, rows, acc, c),
                        2 => panel_rows::<2, 1>(tile, rows, acc, c),
                        3 => panel_rows::<3, 2>(tile, rows, acc, c),
                        _ => panel_rows::<4, 2>(tile, rows, acc, c),
                    }
                }
            }
        }
    }

    /// M rows in P pairs, the last of which may be one row twice.
    #[target_feature(enable = "neon,dotprod,i8mm")]
    unsafe fn panel_rows<const M: usize, const P: usize>(
        tile: &ByteTile,
        rows: *const ByteBlock,
        out: *mut Acc,
        c: usize,
    ) {
        // SAFETY: by the contract of `Kernels`, M rows and sums exist; both forms of the codes have one size.
        unsafe {
            let codes = &*(&raw const tile.codes).cast::<Codes>();
            let row = |i: usize| i.min(M - 1);
            // Sums of a pair and four lanes: those of the first two lanes of both rows, and of the other two.
            let mut acc = [[[vdupq_n_f32(0.0); 2]; QUARTER]; P];
            for p in 0..P {
                let first = Neon::load((*out.add(2 * p))[c].as_ptr());
                let second = Neon::load((*out.add(row(2 * p + 1)))[c].as_ptr());
                for q in 0..QUARTER {
                    acc[p][q] = exchange(first[q], second[q]);
                }
            }
            for g in 0..GROUPS {
                let (mut x, mut factors) = ([[vdupq_n_s8(0); 2]; P], [vdupq_n_f32(0.0); P]);
                for p in 0..P {
                    let (a, b) = (&*rows.add(2 * p), &*rows.add(row(2 * p + 1)));
                    let load = |r: &ByteBlock| vreinterpretq_s64_s8(vld1q_s8(r.q.as_ptr().add(16 * g)));
                    let (first, second) = (load(a), load(b));
                    x[p] = [vzip1q_s64(first, second), vzip2q_s64(first, second)]
                        .map(|v| vreinterpretq_s8_s64(v));
                    factors[p] = vcombine_f32(vdup_n_f32(a.scales[g]), vdup_n_f32(b.scales[g]));
                }
                let scale = Neon::load(tile.scales[g].as_ptr());
                for q in 0..QUARTER {
                    let scale = exchange(scale[q], scale[q]);
                    let w: [_; 4] = std::array::from_fn(|i| vld1q_s8(codes[g][q][i].as_ptr()));
                    for p in 0..P {
                        for i in 0..2 {
                            let dot = smmla(smmla(vdupq_n_s32(0), x[p][0], w[i]), x[p][1], w[2 + i]);
                            let product = vmulq_f32(vcvtq_f32_s32(dot), scale[i]);
                            acc[p][q][i] = vfmaq_f32(acc[p][q][i], product, factors[p]);
                        }
                    }
                }
            }
            for p in 0..P {
                let sums = acc[p].map(|[a, b]| exchange(a, b));
                Neon::store(sums.map(|s| s[0]), (*out.add(2 * p))[c].as_mut_ptr());
                if 2 * p + 1 < M {
                    Neon::store(sums.map(|s| s[1]), (*out.add(2 * p + 1))[c].as_mut_ptr());
                }
            }
        }
    }

    /// Lower halves beside each other, and upper halves; undoes itself.
    #[inline]
    #[target_feature(enable = "neon")]
    fn exchange(a: float32x4_t, b: float32x4_t) -> [float32x4_t; 2] {
        let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        [vzip1q_f64(a, b), vzip2q_f64(a, b)].map(|v| vreinterpretq_f32_f64(v))
    }

    /// Adds the dots of two rows of 8 bytes of `x` with two of `w`: `[x0 w0, x0 w1, x1 w0, x1 w1]`. Rust has
    /// no stable name for the instruction.
    #[inline]
    #[target_feature(enable = "neon,i8mm")]
    fn smmla(mut sum: int32x4_t, x: int8x16_t, w: int8x16_t) -> int32x4_t {
        // SAFETY: arithmetic on three registers; the feature is enabled.
        unsafe {
            asm!(
                "smmla {sum:v}.4s, {x:v}.16b, {w:v}.16b",
                sum = inout(vreg) sum, x = in(vreg) x, w = in(vreg) w,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sum
    }
}
