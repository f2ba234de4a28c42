//! Dots of bytes in NEON: the instruction that processors of 2018 and later have, and what there is without.
use super::Dot;
use q4_simd::{LANES, Neon, Vector};
use std::arch::aarch64::*;
use std::arch::asm;

/// NEON, which every aarch64 has.
pub(super) struct NeonPlain;
/// With dot products.
pub(super) struct NeonDot;

/// What both have in common: `four` adds the products of four bytes in each lane of a register.
macro_rules! neon {
    ($set:ty, $features:literal, $four:path) => {
        // SAFETY of every block: the trait's contract.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl Dot for $set {
            type On = Neon;
            type Sums = [int32x4_t; 4];
            type Table = uint8x16_t;
            const ROWS: Option<usize> = Some(2);

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn run<R>(f: impl FnOnce() -> R) -> R {
                f()
            }
            #[inline(always)]
            unsafe fn start<const BITS: u32>(v: i32) -> Self::Sums {
                unsafe { [vdupq_n_s32(v); 4] }
            }
            #[inline(always)]
            unsafe fn dot<const BITS: u32>(s: Self::Sums, w: [uint32x4_t; 4], x: i32) -> Self::Sums {
                unsafe {
                    let x = vreinterpretq_s8_s32(vdupq_n_s32(x));
                    [$four(s[0], w[0], x), $four(s[1], w[1], x), $four(s[2], w[2], x), $four(s[3], w[3], x)]
                }
            }
            #[inline(always)]
            unsafe fn numbers<const BITS: u32>(s: Self::Sums) -> <Neon as Vector>::F {
                unsafe {
                    [vcvtq_f32_s32(s[0]), vcvtq_f32_s32(s[1]), vcvtq_f32_s32(s[2]), vcvtq_f32_s32(s[3])]
                }
            }
            /// The instruction shifts to the left, or to the right by a negative number.
            #[inline(always)]
            unsafe fn pick(w: [uint32x4_t; 4], shift: i32, mask: u32) -> [uint32x4_t; 4] {
                unsafe {
                    let (by, mask) = (vdupq_n_s32(-shift), vdupq_n_u32(mask));
                    [
                        vandq_u32(vshlq_u32(w[0], by), mask),
                        vandq_u32(vshlq_u32(w[1], by), mask),
                        vandq_u32(vshlq_u32(w[2], by), mask),
                        vandq_u32(vshlq_u32(w[3], by), mask),
                    ]
                }
            }
            #[inline(always)]
            unsafe fn or(a: [uint32x4_t; 4], b: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
                unsafe {
                    [
                        vorrq_u32(a[0], b[0]),
                        vorrq_u32(a[1], b[1]),
                        vorrq_u32(a[2], b[2]),
                        vorrq_u32(a[3], b[3]),
                    ]
                }
            }
            #[inline(always)]
            unsafe fn bytes(words: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
                words
            }
            #[inline(always)]
            unsafe fn table(table: &[u8; LANES]) -> uint8x16_t {
                unsafe { vld1q_u8(table.as_ptr()) }
            }
            #[inline(always)]
            unsafe fn look_up(t: uint8x16_t, w: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
                unsafe { [find(t, w[0]), find(t, w[1]), find(t, w[2]), find(t, w[3])] }
            }
            #[inline(always)]
            unsafe fn store(w: [uint32x4_t; 4], p: *mut u32) {
                unsafe {
                    vst1q_u32(p, w[0]);
                    vst1q_u32(p.add(4), w[1]);
                    vst1q_u32(p.add(8), w[2]);
                    vst1q_u32(p.add(12), w[3]);
                }
            }
        }
    };
}

neon!(NeonPlain, "neon", by_pairs);
neon!(NeonDot, "neon,dotprod", sdot);

/// Two products of 128 * 127 fit 16 bits.
#[inline(always)]
unsafe fn by_pairs(sums: int32x4_t, weights: uint32x4_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: called by sets of NEON only.
    unsafe {
        let w = vreinterpretq_s8_u32(weights);
        let (low, high) = (vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x));
        vpadalq_s16(sums, vpaddq_s16(low, high))
    }
}

/// Rust has no stable name for the instruction, and the assembler wants the feature wherever it meets it.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sdot(mut sums: int32x4_t, weights: uint32x4_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: arithmetic on three registers; called by `NeonDot` only.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {w:v}.16b, {x:v}.16b",
            sums = inout(vreg) sums, w = in(vreg) weights, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

#[inline(always)]
unsafe fn find(table: uint8x16_t, words: uint32x4_t) -> uint32x4_t {
    // SAFETY: called by sets of NEON only.
    unsafe { vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(words))) }
}
