//! How a rule rounds one block of activations, cut into the scalar part here and the element-wise part of the
//! kernels, so that every instruction set gives the bits of `q4_core::formats::nvfp4`.
#![cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))] // portable kernels use the codecs themselves
use super::{ANCHOR, ByteBlock, GROUPS, OFFSET, TILE_K};
use half::{bf16, f16};
use q4_core::formats::{e4m3, nvfp4::Quantizer};
use q4_core::{DType, GlobalScale, Rule};
use std::array;

/// What a doubled magnitude gains at each of the thresholds.
pub const GAINS: [i32; 7] = [1, 1, 1, 1, 2, 2, 4];
/// Magnitudes from which on the next code is nearer, ties to the even code.
const EVEN: [f32; 7] =
    [0.25f32.next_up(), 0.75, 1.25f32.next_up(), 1.75, 2.5f32.next_up(), 3.5, 5.0f32.next_up()];
/// The same, ties away from zero.
const AWAY: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];

/// 0.125: what compressed-tensors stores where a scale underflows.
const ZERO_SCALE_CT: u8 = 0x20;
/// 2^-16, the smallest block scale of the runtime rule before it is rounded.
const RUNTIME_FLOOR: f32 = 1.0 / 65536.0;

/// A quantiser, ready for blocks.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// The definition.
    pub quantizer: Quantizer,
    /// Whether an element is divided by a block's factor; else it is multiplied with it.
    pub divides: bool,
    /// Magnitudes at which the code changes, upper side included.
    pub thresholds: [f32; 7],
    /// Doubled magnitudes by `floor(4 v) + ceil(4 v)`, which tells quarters, where codes change, from what
    /// lies between.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // AVX-512 looks codes up in it
    pub steps: [i32; 64],
}

impl Rounding {
    /// Of a quantiser whose per-tensor scale, if any, has the rule's convention.
    pub fn new(quantizer: Quantizer) -> Self {
        let thresholds = if quantizer.rule == Rule::Runtime { AWAY } else { EVEN };
        let divides = !matches!(quantizer.rule, Rule::TorchAo | Rule::TransformerEngine);
        let step = |i: usize| {
            let passed = thresholds.iter().zip(GAINS).filter(|(t, _)| i as f32 / 8.0 >= **t);
            passed.map(|(_, gain)| gain).sum()
        };
        Self { quantizer, divides, thresholds, steps: array::from_fn(step) }
    }

    /// Block scale and element factor of a block whose largest magnitude is `amax`, which is finite.
    #[inline(always)]
    pub fn block(&self, amax: f32) -> (f32, f32) {
        let global = self.quantizer.global;
        let g = global.map_or(1.0, GlobalScale::value);
        match self.quantizer.rule {
            Rule::TorchAo => {
                let s = rounded((amax / 6.0 / g).clamp(e4m3::MIN_NORMAL, e4m3::MAX));
                (s, if global.is_some() { 1.0 / g / s } else { 1.0 / s })
            }
            Rule::ModelOpt => {
                let t = amax / (6.0 * g);
                let t = if amax == 0.0 || t == 0.0 { 1.0 } else { t };
                let s = rounded(t.clamp(e4m3::MIN_POSITIVE, e4m3::MAX));
                (s, global.map_or(s, |g| g.effective(s)))
            }
            Rule::CompressedTensors => {
                let sixth = match self.quantizer.source {
                    DType::F16 => f16::from_f32(amax / 6.0).to_f32(),
                    DType::BF16 => bf16::from_f32(amax / 6.0).to_f32(),
                    _ => amax / 6.0,
                };
                let byte = e4m3::encode(g * sixth);
                let s = e4m3::decode(if byte == 0 { ZERO_SCALE_CT } else { byte });
                (s, global.map_or(s, |g| g.effective(s)))
            }
            Rule::TransformerEngine => {
                let s = rounded(amax * (g * (1.0 / 6.0)));
                (s, (1.0 / (s * (1.0 / g))).min(f32::MAX))
            }
            Rule::Runtime => {
                let s = rounded((amax / 6.0 / g).clamp(RUNTIME_FLOOR, e4m3::MAX));
                (s, (s + 1e-12) * g)
            }
            other => unreachable!("{other:?} has no number in the header"),
        }
    }
}

#[inline(always)]
fn rounded(scale: f32) -> f32 {
    e4m3::decode(e4m3::encode(scale))
}

/// What covers the groups behind the last one of a row.
///
/// # Safety
/// `out` has the blocks of `groups` groups, `ld` apart.
#[inline(always)]
pub unsafe fn pad(groups: usize, out: *mut ByteBlock, ld: usize) {
    if groups % GROUPS != 0 {
        // SAFETY: the block of the last group, by contract.
        let last = unsafe { &mut *out.add(groups / GROUPS * ld) };
        last.q[groups % GROUPS * (TILE_K / GROUPS)..].fill(0);
        last.scales[groups % GROUPS..].fill(0.0);
        last.start[groups % GROUPS..].fill(start(0));
    }
}

/// Where dots of unsigned weights with codes of this sum start.
#[inline(always)]
pub const fn start(sum: i32) -> i32 {
    ANCHOR.to_bits() as i32 - OFFSET * sum
}

#[cfg(test)]
mod tests {
    //! Every instruction set against the codecs of q4-core.
    use super::*;
    use crate::kernels::Kernels;
    use q4_core::formats::{e2m1, int8};
    use q4_core::isa::Isa;

    const BLANK: ByteBlock = ByteBlock { q: [77; TILE_K], scales: [7.0; GROUPS], start: [7; GROUPS] };
    type Row = (Vec<i8>, Vec<u32>, Vec<i32>);

    fn unpacked(blocks: &[ByteBlock], ld: usize) -> Row {
        let blocks = || blocks.iter().step_by(ld);
        (
            blocks().flat_map(|b| b.q).collect(),
            blocks().flat_map(|b| b.scales.map(f32::to_bits)).collect(),
            blocks().flat_map(|b| b.start).collect(),
        )
    }

    /// What core says, or nothing where it refuses.
    fn wanted(x: &[f32], quantizer: Option<&Quantizer>) -> Option<Row> {
        let padded = x.len().next_multiple_of(TILE_K);
        let (mut q, mut scales) = (vec![0; padded], vec![0.0; padded / 16]);
        match quantizer {
            None => int8::quantize_row(x, &mut q[..x.len()], &mut scales[..x.len() / 16]).ok()?,
            Some(quantizer) => {
                let (mut codes, mut bytes) = (vec![0; x.len() / 2], vec![0; x.len() / 16]);
                quantizer.quantize_row(x, &mut codes, &mut bytes).ok()?;
                for (i, q) in q[..x.len()].iter_mut().enumerate() {
                    *q = e2m1::DOUBLED[usize::from(codes[i / 2] >> (i % 2 * 4) & 15)];
                }
                scales.iter_mut().zip(bytes).for_each(|(s, b)| *s = e4m3::decode(b));
            }
        }
        let sum = |group: &[i8; 16]| group.iter().map(|&q| i32::from(q)).sum();
        let starts = q.as_chunks().0.iter().map(|group| start(sum(group))).collect();
        Some((q, scales.into_iter().map(f32::to_bits).collect(), starts))
    }

    fn check(kernels: &Kernels, isa: Isa, x: &[f32], rounding: Option<&Rounding>) {
        let (groups, ld) = (x.len() / 16, 1 + x.len() % 3);
        let mut blocks = vec![BLANK; groups.div_ceil(GROUPS) * ld];
        // SAFETY: the instruction set is available and the blocks are `ld` apart.
        let ok = unsafe {
            match rounding {
                None => (kernels.int8)(x.as_ptr(), groups, blocks.as_mut_ptr(), ld),
                Some(r) => (kernels.nvfp4)(r, x.as_ptr(), groups, blocks.as_mut_ptr(), ld),
            }
        };
        let want = wanted(x, rounding.map(|r| &r.quantizer));
        assert_eq!(ok, want.is_some(), "{isa:?} {rounding:?}");
        if let Some(want) = want {
            let have = unpacked(&blocks, ld);
            if let Some(i) = (0..want.0.len()).find(|&i| {
                (want.0[i], want.1[i / 16], want.2[i / 16]) != (have.0[i], have.1[i / 16], have.2[i / 16])
            }) {
                let block = &x.get(i / 16 * 16..i / 16 * 16 + 16);
                panic!("{isa:?} {rounding:?} element {i} of {block:?}: {} is not {}", have.0[i], want.0[i]);
            }
        }
    }

    fn quantizers() -> Vec<Rounding> {
        let values = [1.0f32, 0.003, 333.0, 1e-38, 1e-30, 3e38, 1e-44];
        let mut all = Vec::new();
        for rule in Rule::ALL {
            for source in [DType::F32, DType::F16, DType::BF16] {
                let scales = values.into_iter().map(|v| GlobalScale::new(rule.convention(), v).ok());
                for global in scales.chain([None]) {
                    all.push(Rounding::new(Quantizer { rule, global, source }));
                }
            }
        }
        all
    }

    fn each(mut body: impl FnMut(&Kernels, Isa, Option<&Rounding>)) {
        let all = quantizers();
        for isa in Isa::available() {
            body(Kernels::of(isa), isa, None);
            all.iter().for_each(|r| body(Kernels::of(isa), isa, Some(r)));
        }
    }

    /// Blocks whose amax is 6 or 127 times a power of two or anything else, in every binade.
    fn rows() -> Vec<f32> {
        let mut seed = 9u32;
        let mut next = move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed >> 8
        };
        let mut x = Vec::new();
        for e in -149..128 {
            let unit = 2f64.powi(e);
            for amax in [6.0, 127.0, 1.0 + f64::from(next()) / 2f64.powi(23)] {
                let block = (0..16).map(|i| {
                    // A multiple of an eighth, a little beside it, or anything.
                    let (v, sign) = (f64::from(next()) / 2f64.powi(24) * amax, next() & 1);
                    let v = match next() % 4 {
                        _ if i == 5 => amax,
                        0 => (v * 8.0).round() / 8.0,
                        1 => (v * 8.0).round() / 8.0 * (1.0 + 2f64.powi(-23)),
                        2 => (v * 8.0).round() / 8.0 * (1.0 - 2f64.powi(-24)),
                        _ => v,
                    };
                    let v = (v * unit).min(f64::from(f32::MAX)) as f32;
                    if sign == 1 { -v } else { v }
                });
                x.extend(block);
            }
        }
        x
    }

    #[test]
    fn every_binade_and_every_rule() {
        let x = rows();
        each(|kernels, isa, rounding| check(kernels, isa, &x, rounding));
        for k in [0, 16, 32, 48, 64, 80, 112] {
            each(|kernels, isa, rounding| check(kernels, isa, &x[320..][..k], rounding));
        }
    }

    #[test]
    fn every_half_and_a_stride_of_all_floats_in_blocks_of_every_step() {
        let halves = (0..=u16::MAX).map(|b| f16::from_bits(b).to_f32()).filter(|v| v.is_finite());
        let floats = (0..u32::MAX / 4093).map(|i| f32::from_bits(i * 4093)).filter(|v| v.abs() < 1e4);
        let near = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
            .into_iter()
            .flat_map(|t| [t.next_down(), t, t.next_up(), -t.next_down(), -t, -t.next_up(), 0.0, -0.0]);
        let values: Vec<f32> = halves.chain(floats).chain(near).collect();
        let mut x = Vec::new();
        // The first element makes the step one, or leaves the block to itself.
        for (i, fifteen) in values.chunks(15).enumerate() {
            x.push([6.0, -127.0, 0.0][i % 3]);
            x.extend(fifteen.iter().map(|v| if i % 3 == 2 { *v } else { v.clamp(-6.0, 6.0) }));
            x.resize(x.len().next_multiple_of(16), 0.0);
        }
        for isa in Isa::available() {
            check(Kernels::of(isa), isa, &x, None);
            for rule in Rule::ALL {
                let r = Rounding::new(Quantizer { rule, global: None, source: DType::F32 });
                check(Kernels::of(isa), isa, &x, Some(&r));
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_refused_wherever_it_is() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for i in 0..80 {
                let mut x = [1.0; 80];
                x[i] = bad;
                let r = Rounding::new(Quantizer { rule: Rule::TorchAo, global: None, source: DType::F32 });
                for isa in Isa::available() {
                    check(Kernels::of(isa), isa, &x, None);
                    check(Kernels::of(isa), isa, &x, Some(&r));
                    // SAFETY: the instruction set is available.
                    assert_eq!(unsafe { (Kernels::of(isa).amax)(&x) }, bad.abs().to_bits(), "{isa:?}");
                }
            }
        }
    }
}
