//! The kernels in NEON: four registers are one row block. Float sums are those of the AVX kernels, bit for
//! bit, because chains and fused roundings are the same. Integer products exist three times, with what an
//! aarch64 has for them; all are exact, so they differ in speed only.
mod activations;
mod bytes;
mod float;

use super::{GROUPS, Kernels, LANES, SCALES_AT, TILE_K, lanes};
use q4_core::formats::e2m1;
use q4_simd::Neon;
use std::arch::aarch64::*;

/// NEON as every aarch64 has it.
pub static PLAIN: Kernels = table(bytes::PLAIN);
/// The same with dot products.
pub static DOTPROD: Kernels = table(bytes::DOTPROD);
/// The same with 8-bit matrix products for many rows.
pub static I8MM: Kernels = table(bytes::I8MM);

const fn table(bytes: super::Product<super::ByteRows, super::ByteTile>) -> Kernels {
    Kernels {
        float: float::FLOAT,
        bytes,
        int8: activations::int8,
        nvfp4: activations::nvfp4,
        amax: lanes::amax::<Neon>,
        finish: lanes::finish::<Neon>,
        gate: lanes::gate::<Neon>,
        decode,
        axpy,
        pack: super::pack::neon,
    }
}

/// Rows of a register, and registers of a row block.
const QUARTER: usize = 4;

#[target_feature(enable = "neon")]
unsafe fn decode(tile: *const u8, steps: &[[f32; GROUPS]; LANES], out: &mut [[f32; TILE_K]; LANES]) {
    let table = values();
    for half in 0..2 * GROUPS {
        for (q, rows) in out.as_chunks_mut::<QUARTER>().0.iter_mut().enumerate() {
            // SAFETY: a tile has eight halves of 64 bytes, by the contract of `Kernels`.
            let bytes = unsafe { vld1q_u8(tile.add(64 * half + 16 * q)) };
            for (side, codes) in nibbles(bytes).into_iter().enumerate() {
                // Values of four k of two rows each, as bf16.
                let [low, high] = table.map(|t| vqtbl1q_u8(t, codes));
                let pairs = [vzip1q_u8(low, high), vzip2q_u8(low, high)].map(|v| vreinterpretq_u16_u8(v));
                for (i, row) in rows.iter_mut().enumerate() {
                    let (pair, zero) = (pairs[i / 2], vdupq_n_u16(0));
                    let row_values = if i % 2 == 0 { vzip1q_u16(zero, pair) } else { vzip2q_u16(zero, pair) };
                    let scaled =
                        vmulq_n_f32(vreinterpretq_f32_u16(row_values), steps[QUARTER * q + i][half / 2]);
                    // SAFETY: four columns of a row of 64.
                    unsafe { vst1q_f32(row.as_mut_ptr().add(8 * half + 4 * side), scaled) };
                }
            }
        }
    }
}

#[target_feature(enable = "neon")]
unsafe fn axpy(dy: &[[f32; LANES]], w: &[[f32; TILE_K]; LANES], dx: &mut [[f32; TILE_K]]) {
    // Half the columns at a time leave registers for what is loaded.
    const HALF: usize = TILE_K / QUARTER / 2;
    for (dy, dx) in dy.iter().zip(dx) {
        for first in [0, TILE_K / 2] {
            // SAFETY: 32 columns from `first` on are inside a row of 64.
            unsafe {
                let to = dx.as_mut_ptr().add(first);
                let mut sums: [_; HALF] = std::array::from_fn(|i| vld1q_f32(to.add(QUARTER * i)));
                for (&d, w) in dy.iter().zip(w) {
                    let w = w.as_ptr().add(first);
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = vfmaq_n_f32(*sum, vld1q_f32(w.add(QUARTER * i)), d);
                    }
                }
                for (i, sum) in sums.into_iter().enumerate() {
                    vst1q_f32(to.add(QUARTER * i), sum);
                }
            }
        }
    }
}

/// The codes of the first and of the second four k in 16 bytes of a half.
#[inline]
#[target_feature(enable = "neon")]
fn nibbles(bytes: uint8x16_t) -> [uint8x16_t; 2] {
    [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
}

/// Values are bf16 numbers: the tables of their low and of their high byte by code.
#[inline]
#[target_feature(enable = "neon")]
fn values() -> [uint8x16_t; 2] {
    const BYTES: [[u8; 16]; 2] = {
        let mut bytes = [[0; 16]; 2];
        let mut code = 0;
        while code < 16 {
            let bits = e2m1::VALUES[code].to_bits();
            assert!(bits & 0xffff == 0);
            (bytes[0][code], bytes[1][code]) = ((bits >> 16) as u8, (bits >> 24) as u8);
            code += 1;
        }
        bytes
    };
    // SAFETY: tables of 16 bytes.
    unsafe { [vld1q_u8(BYTES[0].as_ptr()), vld1q_u8(BYTES[1].as_ptr())] }
}

/// Scales of group `g` of a tile, times 2^-8.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn scales(tile: *const u8, g: usize) -> [float32x4_t; QUARTER] {
    // SAFETY: a tile has 64 bytes of scales.
    let bytes = unsafe { vld1q_u8(tile.add(SCALES_AT + LANES * g)) };
    let a = vreinterpretq_f16_u16(vshll_n_u8::<7>(vget_low_u8(bytes)));
    let b = vreinterpretq_f16_u16(vshll_high_n_u8::<7>(bytes));
    [vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)]
}
