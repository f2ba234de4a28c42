//! NEON with its fused multiply-add, which every aarch64 has.
use crate::{LANES, Vector};
use half::{bf16, f16};
use q4_core::isa::Isa;
use std::arch::aarch64::*;
use std::arch::asm;
use std::array;

/// Four registers. A value has four bytes, so four tables of 16 bytes are looked up.
pub struct Neon;

/// Lanes of a register.
const QUARTER: usize = 4;

// SAFETY of every block: the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Neon {
    type F = [float32x4_t; LANES / QUARTER];
    type Words = [uint32x4_t; LANES / QUARTER];
    /// The first bytes of the values, then the second, third and fourth.
    type Table = uint8x16x4_t;
    const ISA: Isa = Isa::Neon;
    const FUSED: bool = true;
    const SUMS: usize = 4;
    const ROWS: usize = 4;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn run<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self::F {
        unsafe { [vdupq_n_f32(v); 4] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        array::from_fn(|q| unsafe { vld1q_f32(p.add(QUARTER * q)) })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self::F {
        array::from_fn(|q| unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.add(QUARTER * q).cast()))) })
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self::F {
        array::from_fn(|q| unsafe {
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(QUARTER * q).cast())))
        })
    }
    #[inline(always)]
    unsafe fn load_e8m0(p: *const u8) -> Self::F {
        unsafe {
            let least = vdupq_n_u32(0x0040_0000);
            fours(p).map(|four| vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32::<23>(four), least)))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::F {
        unsafe { fours(p).map(|four| vcvtq_f32_u32(four)) }
    }
    #[inline(always)]
    unsafe fn store(v: Self::F, p: *mut f32) {
        for (q, v) in v.into_iter().enumerate() {
            unsafe { vst1q_f32(p.add(QUARTER * q), v) };
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        array::from_fn(|q| unsafe { vaddq_f32(a[q], b[q]) })
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        array::from_fn(|q| unsafe { vmulq_f32(a[q], b[q]) })
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        array::from_fn(|q| unsafe { vfmaq_f32(c[q], a[q], b[q]) })
    }
    #[inline(always)]
    unsafe fn sum([a, b, c, d]: Self::F) -> f32 {
        unsafe {
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }
    #[inline(always)]
    unsafe fn table(values: &[f32; 16]) -> uint8x16x4_t {
        unsafe { vld4q_u8(values.as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn words(p: *const u32) -> Self::Words {
        array::from_fn(|q| unsafe { vld1q_u32(p.add(QUARTER * q)) })
    }
    #[inline(always)]
    unsafe fn look_up(table: uint8x16x4_t, words: Self::Words, j: i32) -> Self::F {
        words.map(|w| unsafe {
            // Four times the code, each time with its table.
            let code = vandq_u32(vshlq_u32(w, vdupq_n_s32(-4 * j)), vdupq_n_u32(15));
            let index = vmlaq_n_u32(vdupq_n_u32(0x3020_1000), code, 0x0101_0101);
            vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(index)))
        })
    }
    #[inline(always)]
    unsafe fn signed(words: Self::Words, j: i32) -> Self::F {
        words.map(|w| unsafe { vcvtq_f32_s32(vshrq_n_s32::<24>(vreinterpretq_s32_u32(upper_byte(w, j)))) })
    }
    /// As with AVX-512.
    #[inline(always)]
    unsafe fn e4m3(words: Self::Words, j: i32) -> Self::F {
        words.map(|w| unsafe {
            let byte = upper_byte(w, j);
            let bits = vandq_u32(vshrq_n_u32::<4>(byte), vdupq_n_u32(0x07f0_0000));
            let value = vreinterpretq_f32_u32(vaddq_u32(bits, vdupq_n_u32(120 << 23)));
            let normal = vtstq_u32(byte, vdupq_n_u32(0x7800_0000));
            let of_small = vfmaq_f32(vdupq_n_f32(-0.015_625), value, vdupq_n_f32(2.0));
            let value = vreinterpretq_u32_f32(vbslq_f32(normal, value, of_small));
            vreinterpretq_f32_u32(vbslq_u32(vdupq_n_u32(0x8000_0000), byte, value))
        })
    }
    #[inline(always)]
    unsafe fn prefetch<T>(p: *const T) {
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) p, options(readonly, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn prefetch_far<T>(p: *const T) {
        unsafe { asm!("prfm pldl2keep, [{}]", in(reg) p, options(readonly, nostack, preserves_flags)) }
    }
}

/// Byte `j` of every word where the highest is.
#[inline(always)]
unsafe fn upper_byte(words: uint32x4_t, j: i32) -> uint32x4_t {
    // SAFETY: called by `Neon` only.
    unsafe { vshlq_u32(words, vdupq_n_s32(24 - 8 * j)) }
}

/// Sixteen bytes, four to a register.
#[inline(always)]
unsafe fn fours(p: *const u8) -> [uint32x4_t; LANES / QUARTER] {
    // SAFETY: called by `Neon` only; sixteen bytes are readable.
    unsafe {
        let bytes = vld1q_u8(p);
        let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
        [
            vmovl_u16(vget_low_u16(low)),
            vmovl_high_u16(low),
            vmovl_u16(vget_low_u16(high)),
            vmovl_high_u16(high),
        ]
    }
}
