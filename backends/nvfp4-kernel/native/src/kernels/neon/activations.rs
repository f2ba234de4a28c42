//! Activations to int8 and NVFP4 in NEON: four registers are one group.
use crate::kernels::rounding::{GAINS, Rounding, pad, start};
use crate::kernels::{ByteBlock, GROUPS};
use q4_simd::{Neon, Vector};
use std::arch::aarch64::*;

#[target_feature(enable = "neon")]
pub unsafe fn int8(x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Int8Fn`, the groups and their blocks exist.
    unsafe {
        let mut largest = 0;
        for g in 0..groups {
            let v = Neon::load(x.add(16 * g));
            let amax = amax(v, &mut largest);
            let inverse = 127.0 / amax;
            let (inverse, scale) = if inverse.is_finite() { (inverse, amax / 127.0) } else { (0.0, 0.0) };
            put(v.map(|v| vcvtnq_s32_f32(vmulq_n_f32(v, inverse))), scale, g, out, ld);
        }
        pad(groups, out, ld);
        largest < f32::INFINITY.to_bits()
    }
}

#[target_feature(enable = "neon")]
pub unsafe fn nvfp4(r: &Rounding, x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Nvfp4Fn`, the groups and their blocks exist.
    unsafe {
        let mut largest = 0;
        for g in 0..groups {
            let v = Neon::load(x.add(16 * g));
            let (scale, factor) = r.block(amax(v, &mut largest));
            let factor = vdupq_n_f32(factor);
            let y = v.map(|v| if r.divides { vdivq_f32(v, factor) } else { vmulq_f32(v, factor) });
            put(y.map(|y| encode(y, &r.thresholds)), scale, g, out, ld);
        }
        pad(groups, out, ld);
        largest < f32::INFINITY.to_bits()
    }
}

/// Doubled codes of four scaled elements.
#[inline]
#[target_feature(enable = "neon")]
fn encode(y: float32x4_t, thresholds: &[f32; 7]) -> int32x4_t {
    let magnitude = vabsq_f32(y);
    let mut codes = vdupq_n_s32(0);
    for (&threshold, gain) in thresholds.iter().zip(GAINS) {
        // False for NaN, whose code is zero.
        let reached = vreinterpretq_s32_u32(vcgeq_f32(magnitude, vdupq_n_f32(threshold)));
        codes = vaddq_s32(codes, vandq_s32(reached, vdupq_n_s32(gain)));
    }
    let negative = vshrq_n_s32::<31>(vreinterpretq_s32_f32(y));
    vsubq_s32(veorq_s32(codes, negative), negative)
}

/// Largest magnitude of a group; `largest` is that of all groups as bits, which order as magnitudes do.
#[inline]
#[target_feature(enable = "neon")]
fn amax(v: [float32x4_t; 4], largest: &mut u32) -> f32 {
    let [a, b, c, d] = v.map(|v| vreinterpretq_u32_f32(vabsq_f32(v)));
    let bits = vmaxvq_u32(vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d)));
    *largest = (*largest).max(bits);
    f32::from_bits(bits)
}

/// Writes group `g`. Codes fit a byte.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn put(codes: [int32x4_t; 4], scale: f32, g: usize, out: *mut ByteBlock, ld: usize) {
    let [a, b, c, d] = codes.map(|v| vreinterpretq_s16_s32(v));
    let words = [vuzp1q_s16(a, b), vuzp1q_s16(c, d)].map(|v| vreinterpretq_s8_s16(v));
    let codes = vuzp1q_s8(words[0], words[1]);
    // SAFETY: the block exists, by the contract of the callers.
    unsafe {
        let block = &mut *out.add(g / GROUPS * ld);
        vst1q_s8(block.q.as_mut_ptr().add(16 * (g % GROUPS)), codes);
        block.scales[g % GROUPS] = scale;
        block.start[g % GROUPS] = start(i32::from(vaddlvq_s8(codes)));
    }
}
