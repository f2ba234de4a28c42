//! Sixteen lanes in NEON: four registers. A value has four bytes, so four tables of 16 bytes are looked up
//! for 16 codes at a time, and what has many of them goes quarter by quarter, where the registers suffice.
use crate::layout::{CODES, LANES};
use crate::simd::{AHEAD, Lanes};
use std::arch::aarch64::*;
use std::arch::asm;

/// NEON with its fused multiply-add, which every aarch64 has.
pub(crate) struct Neon;

/// Lanes of a register, and registers of 16 lanes.
const QUARTER: usize = 4;

impl Lanes for Neon {
    type F = [float32x4_t; QUARTER];
    type W = [uint32x4_t; QUARTER];
    /// The first bytes of the values, then the second, third and fourth.
    type T = uint8x16x4_t;
    const ACCUMULATORS: usize = 2;
    const ROWS: usize = 4;
    const BLOCKS: usize = 1;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self::F {
        // SAFETY: the trait's contract: NEON is there.
        unsafe { [vdupq_n_f32(v); QUARTER] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the trait's contract.
        unsafe { [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))] }
    }
    #[inline(always)]
    unsafe fn store(v: Self::F, p: *mut f32) {
        for q in 0..QUARTER {
            // SAFETY: the trait's contract.
            unsafe { vst1q_f32(p.add(QUARTER * q), v[q]) };
        }
    }
    #[inline(always)]
    unsafe fn add(mut a: Self::F, b: Self::F) -> Self::F {
        for q in 0..QUARTER {
            // SAFETY: the trait's contract.
            a[q] = unsafe { vaddq_f32(a[q], b[q]) };
        }
        a
    }
    #[inline(always)]
    unsafe fn mul(mut a: Self::F, b: Self::F) -> Self::F {
        for q in 0..QUARTER {
            // SAFETY: the trait's contract.
            a[q] = unsafe { vmulq_f32(a[q], b[q]) };
        }
        a
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, mut c: Self::F) -> Self::F {
        for q in 0..QUARTER {
            // SAFETY: the trait's contract.
            c[q] = unsafe { vfmaq_f32(c[q], a[q], b[q]) };
        }
        c
    }
    #[inline(always)]
    unsafe fn table(values: &[f32; 16]) -> uint8x16x4_t {
        // SAFETY: the trait's contract; the array has 64 bytes.
        unsafe { vld4q_u8(values.as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn words(p: *const u32) -> Self::W {
        // SAFETY: the trait's contract.
        unsafe { [vld1q_u32(p), vld1q_u32(p.add(4)), vld1q_u32(p.add(8)), vld1q_u32(p.add(12))] }
    }
    #[inline(always)]
    unsafe fn decode(t: uint8x16x4_t, mut w: Self::W, j: i32) -> Self::F {
        // SAFETY: the trait's contract.
        unsafe {
            for w in &mut w {
                // Four times the code, each time with its table.
                let code = vandq_u32(vshlq_u32(*w, vdupq_n_s32(-4 * j)), vdupq_n_u32(15));
                let index = vmlaq_n_u32(vdupq_n_u32(0x3020_1000), code, 0x0101_0101);
                *w = vreinterpretq_u32_u8(vqtbl4q_u8(t, vreinterpretq_u8_u32(index)));
            }
            [
                vreinterpretq_f32_u32(w[0]),
                vreinterpretq_f32_u32(w[1]),
                vreinterpretq_f32_u32(w[2]),
                vreinterpretq_f32_u32(w[3]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u32) {
        // SAFETY: a hint that never faults.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) p, options(readonly, nostack, preserves_flags)) }
    }

    #[inline(always)]
    unsafe fn chain<const B: usize, const M: usize>(
        t: uint8x16x4_t,
        codes: [*const u32; B],
        step: usize,
        count: usize,
        x: [*const f32; M],
        word: usize,
    ) -> [[[Self::F; 2]; B]; M] {
        // SAFETY: the trait's contract.
        unsafe {
            let mut out = [[[Self::splat(0.0); 2]; B]; M];
            for b in 0..B {
                for i in word..word + count {
                    Self::prefetch(codes[b].wrapping_add(i * step + AHEAD));
                }
                for q in 0..QUARTER {
                    let mut acc = [[vdupq_n_f32(0.0); 2]; M];
                    for i in word..word + count {
                        let [even, odd] = eight(t, codes[b].add(i * step + QUARTER * q));
                        for r in 0..M {
                            let (low, high) =
                                (vld1q_f32(x[r].add(i * CODES)), vld1q_f32(x[r].add(i * CODES + 4)));
                            acc[r][0] = vfmaq_laneq_f32::<0>(acc[r][0], even[0], low);
                            acc[r][1] = vfmaq_laneq_f32::<1>(acc[r][1], odd[0], low);
                            acc[r][0] = vfmaq_laneq_f32::<2>(acc[r][0], even[1], low);
                            acc[r][1] = vfmaq_laneq_f32::<3>(acc[r][1], odd[1], low);
                            acc[r][0] = vfmaq_laneq_f32::<0>(acc[r][0], even[2], high);
                            acc[r][1] = vfmaq_laneq_f32::<1>(acc[r][1], odd[2], high);
                            acc[r][0] = vfmaq_laneq_f32::<2>(acc[r][0], even[3], high);
                            acc[r][1] = vfmaq_laneq_f32::<3>(acc[r][1], odd[3], high);
                        }
                    }
                    for r in 0..M {
                        (out[r][b][0][q], out[r][b][1][q]) = (acc[r][0], acc[r][1]);
                    }
                }
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn unpack(t: uint8x16x4_t, p: *const u32, out: *mut f32) {
        // SAFETY: the trait's contract.
        unsafe {
            for q in 0..QUARTER {
                let [even, odd] = eight(t, p.add(QUARTER * q));
                for i in 0..CODES / 2 {
                    vst1q_f32(out.add(2 * i * LANES + QUARTER * q), even[i]);
                    vst1q_f32(out.add((2 * i + 1) * LANES + QUARTER * q), odd[i]);
                }
            }
        }
    }

    /// Eight lanes of all rows of a tile at a time.
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(
        tiles: [*const f32; C],
        len: usize,
        x: [*const f32; R],
    ) -> [[[Self::F; 2]; C]; R] {
        // SAFETY: the trait's contract; `len` is a multiple of 4.
        unsafe {
            let mut out = [[[Self::splat(0.0); 2]; C]; R];
            for (c, side) in (0..C).flat_map(|c| [(c, 0), (c, 1)]) {
                let mut acc = [[[vdupq_n_f32(0.0); 2]; 2]; R];
                for i in (0..len).step_by(4) {
                    for q in 0..2 {
                        let at = tiles[c].add(i * LANES + QUARTER * (2 * side + q));
                        let (a0, a1) = (vld1q_f32(at), vld1q_f32(at.add(LANES)));
                        let (a2, a3) = (vld1q_f32(at.add(2 * LANES)), vld1q_f32(at.add(3 * LANES)));
                        for r in 0..R {
                            let x = vld1q_f32(x[r].add(i));
                            acc[r][0][q] = vfmaq_laneq_f32::<0>(acc[r][0][q], a0, x);
                            acc[r][1][q] = vfmaq_laneq_f32::<1>(acc[r][1][q], a1, x);
                            acc[r][0][q] = vfmaq_laneq_f32::<2>(acc[r][0][q], a2, x);
                            acc[r][1][q] = vfmaq_laneq_f32::<3>(acc[r][1][q], a3, x);
                        }
                    }
                }
                for r in 0..R {
                    for q in 0..2 {
                        out[r][c][0][2 * side + q] = acc[r][0][q];
                        out[r][c][1][2 * side + q] = acc[r][1][q];
                    }
                }
            }
            out
        }
    }
}

/// Values of the 8 codes of four words at `p`: of even, and of odd k. Bytes of the four tables are put beside
/// each other, by two and by four.
#[inline(always)]
unsafe fn eight(t: uint8x16x4_t, p: *const u32) -> [[float32x4_t; 4]; 2] {
    // SAFETY: called by `Neon` only; four words are readable.
    unsafe {
        let w = vld1q_u8(p.cast());
        [values(t, vandq_u8(w, vdupq_n_u8(15))), values(t, vshrq_n_u8::<4>(w))]
    }
}

/// Values of four codes in each of four words, a register for each.
#[inline(always)]
unsafe fn values(t: uint8x16x4_t, codes: uint8x16_t) -> [float32x4_t; 4] {
    // SAFETY: called by `Neon` only.
    unsafe {
        let (a, b) = (vqtbl1q_u8(t.0, codes), vqtbl1q_u8(t.1, codes));
        let (c, d) = (vqtbl1q_u8(t.2, codes), vqtbl1q_u8(t.3, codes));
        let (low, high) = (vreinterpretq_u16_u8(vtrn1q_u8(a, b)), vreinterpretq_u16_u8(vtrn1q_u8(c, d)));
        let (low2, high2) = (vreinterpretq_u16_u8(vtrn2q_u8(a, b)), vreinterpretq_u16_u8(vtrn2q_u8(c, d)));
        [
            vreinterpretq_f32_u16(vtrn1q_u16(low, high)),
            vreinterpretq_f32_u16(vtrn1q_u16(low2, high2)),
            vreinterpretq_f32_u16(vtrn2q_u16(low, high)),
            vreinterpretq_f32_u16(vtrn2q_u16(low2, high2)),
        ]
    }
}
