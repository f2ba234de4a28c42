//! The sums in NEON: what has many registers' worth of lanes goes quarter by quarter, where the registers
//! suffice.
use crate::encoding::{Encoding, Offset, is_wide};
use crate::layout::{CODES, LANES};
use crate::shape::{Codes, Group};
use crate::simd::{self, Lanes, Span, Tables};
use q4_simd::{Neon, Vector};
use std::arch::aarch64::*;

/// Lanes of a register, and registers of 16 lanes.
const QUARTER: usize = 4;

impl Lanes for Neon {
    const ACCUMULATORS: usize = 2;

    #[inline(always)]
    unsafe fn chain<E: Encoding, const B: usize, const M: usize>(
        tables: &Tables<Self>,
        span: &Span<E>,
        x: [*const f32; M],
        totals: &mut [[Self::F; B]; M],
    ) {
        // SAFETY: the trait's contract.
        unsafe {
            if !by_quarters::<E>() {
                return simd::chain::<Self, E, B, M>(tables, span, x, totals);
            }
            for b in 0..B {
                let place = span.place.beside(b);
                let group: Group<Self> = place.group(span.group, span.len);
                let codes = &place.codes;
                for i in span.words.clone() {
                    codes.fetch::<Self, E>(i);
                }
                for q in 0..QUARTER {
                    let mut acc = [[vdupq_n_f32(0.0); 2]; M];
                    for i in span.words.clone() {
                        let four = codes.low.add(i * codes.step + QUARTER * q);
                        let [even, odd] = eight::<E>(tables.low, group.offset[q], four);
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
                        let sum = vaddq_f32(acc[r][0], acc[r][1]);
                        totals[r][b][q] = vfmaq_f32(totals[r][b][q], group.scale[q], sum);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack<E: Encoding>(
        tables: &Tables<Self>,
        group: &Group<Self>,
        codes: &Codes,
        word: usize,
        out: *mut f32,
    ) {
        // SAFETY: the trait's contract.
        unsafe {
            if !by_quarters::<E>() {
                return simd::unpack::<Self, E>(tables, group, codes, word, out);
            }
            let p = codes.low.add(word * codes.step);
            for q in 0..QUARTER {
                let [even, odd] = eight::<E>(tables.low, group.offset[q], p.add(QUARTER * q));
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

/// Whether all that a code is worth is in one table.
const fn by_quarters<E: Encoding>() -> bool {
    !is_wide::<E>() && !matches!(E::OFFSET, Offset::Minimum | Offset::Bias)
}

/// Values of the 8 codes of four words at `p`, with `offset` if there are zero points: of even, and of odd k.
/// Bytes of the four tables are put beside each other, by two and by four.
#[inline(always)]
unsafe fn eight<E: Encoding>(t: uint8x16x4_t, offset: float32x4_t, p: *const u32) -> [[float32x4_t; 4]; 2] {
    // SAFETY: called by `Neon` only; four words are readable.
    unsafe {
        let w = vld1q_u8(p.cast());
        let both = [values(t, vandq_u8(w, vdupq_n_u8(15))), values(t, vshrq_n_u8::<4>(w))];
        if matches!(E::OFFSET, Offset::Zero) {
            both.map(|four| four.map(|v| vaddq_f32(v, offset)))
        } else {
            both
        }
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
