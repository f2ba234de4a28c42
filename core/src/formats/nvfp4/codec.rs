//! NVFP4: E2M1 codes with an E4M3 scale per 16 elements along k and, usually, one f32 scale per tensor.
//!
//! `value = fl32(code * fl32(scale ∘ global))`, where ∘ is × or ÷ by the [`Convention`](crate::Convention) of
//! the scale. Decoding is one rule; quantising is one per library, because they differ in bits and a
//! checkpoint or an activation must round as its producer does.
use crate::formats::{e2m1, e4m3};
use crate::{Code, DType, Error, GlobalScale, Result, Rule};
use half::{bf16, f16};

mod search;

/// Elements per block scale.
pub const BLOCK: usize = 16;

/// Decodes one row: `codes` has `out.len() / 2` bytes, low nibble first, `scales` has `out.len() / 16` E4M3
/// bytes.
///
/// Two roundings to f32, `scale ∘ global` and then `code * that`: bit for bit torchao and ModelOpt (multiply)
/// and compressed-tensors (divide). Without a per-tensor scale the product is exact.
///
/// # Panics
/// If the lengths do not fit together.
pub fn dequantize_row(codes: &[u8], scales: &[u8], global: Option<GlobalScale>, out: &mut [f32]) {
    assert!(
        out.len() == BLOCK * scales.len() && codes.len() == BLOCK / 2 * scales.len(),
        "{} values from {} bytes of codes and {} scales",
        out.len(),
        codes.len(),
        scales.len()
    );
    for ((out, codes), &scale) in out.chunks_exact_mut(BLOCK).zip(codes.chunks_exact(BLOCK / 2)).zip(scales) {
        decode_block(codes, effective(scale, global), out);
    }
}

/// One quantiser: a library's rounding rule and the per-tensor scale it is given.
#[derive(Clone, Copy, Debug)]
pub struct Quantizer {
    /// How scales and elements are rounded.
    pub rule: Rule,
    /// Per-tensor scale, of the rule's convention; `None` for single-level scales.
    pub global: Option<GlobalScale>,
    /// Type the elements had before they were widened to f32: compressed-tensors rounds `amax / 6` to it.
    /// Types other than f16 and bf16 count as f32.
    pub source: DType,
}

impl Quantizer {
    /// Quantises a row of `k` elements into `k / 2` bytes of codes, low nibble first, and `k / 16` E4M3
    /// scales.
    ///
    /// The formula is that of [`Rule`], every operation in f32. Two things no library defines are defined
    /// here: where a scale is so small that an element becomes `0 * inf` or `0 / 0`, its code is zero;
    /// and [`Rule::Runtime`], which has no per-tensor scale of its own, takes one as torchao does (`(am /
    /// 6) / g`) with the step `(scale + 1e-12) * g`.
    ///
    /// # Errors
    /// `ShapeMismatch` if `k % 16 != 0` or a length does not fit; `SchemaInvalid` if `global` has the other
    /// convention than the rule; `ValueInvalid` if an element is NaN or infinite, so no scale is ever
    /// NaN.
    pub fn quantize_row(&self, x: &[f32], codes: &mut [u8], scales: &mut [u8]) -> Result<()> {
        self.each_block(x, codes, scales, |block, amax, codes| {
            let scale = self.block_scale(amax);
            self.encode_block(block, scale, codes);
            scale
        })
    }

    /// As [`quantize_row`](Self::quantize_row), trying two scales per block: one that maps its amax to 6 and
    /// one, 1.5 times as large before it is rounded, that maps it to 4 (arXiv 2512.02010). The one with
    /// the smaller sum of squared errors is kept, on a tie the first. The result is ordinary NVFP4. A
    /// scale above 448 saturates, so a per-tensor scale made for `amax / (6 * 256)` leaves more room for
    /// the second.
    ///
    /// # Errors
    /// As there.
    pub fn quantize_row_four_over_six(&self, x: &[f32], codes: &mut [u8], scales: &mut [u8]) -> Result<()> {
        self.each_block(x, codes, scales, |block, amax, codes| {
            let (six, four) = (self.block_scale(amax), self.block_scale((1.5 * amax).min(f32::MAX)));
            let mut other = [0; BLOCK / 2];
            self.encode_block(block, six, codes);
            self.encode_block(block, four, &mut other);
            if self.squared_error(block, &other, four) < self.squared_error(block, codes, six) {
                codes.copy_from_slice(&other);
                return four;
            }
            six
        })
    }

    fn each_block(
        &self,
        x: &[f32],
        codes: &mut [u8],
        scales: &mut [u8],
        mut quantise: impl FnMut(&[f32; BLOCK], f32, &mut [u8; BLOCK / 2]) -> u8,
    ) -> Result<()> {
        let (blocks, rest) = x.as_chunks::<BLOCK>();
        if !rest.is_empty() || codes.len() != x.len() / 2 || scales.len() != blocks.len() {
            return Err(Error::new(Code::ShapeMismatch, "NVFP4 row")
                .need(format!(
                    "k % {BLOCK} == 0, k/2 bytes of codes and k/{BLOCK} scales for k = {}",
                    x.len()
                ))
                .have(format!("{} bytes of codes and {} scales", codes.len(), scales.len())));
        }
        if let Some(g) = self.global.filter(|g| g.convention() != self.rule.convention()) {
            return Err(Error::new(
                Code::SchemaInvalid,
                format!("per-tensor scale of the {} rule", self.rule.as_str()),
            )
            .need(format!("{:?}", self.rule.convention()))
            .have(format!("{:?}", g.convention())));
        }
        for (b, ((block, codes), scale)) in
            blocks.iter().zip(codes.as_chunks_mut::<{ BLOCK / 2 }>().0).zip(scales).enumerate()
        {
            if let Some(i) = block.iter().position(|v| !v.is_finite()) {
                return Err(not_finite(b * BLOCK + i, block[i]));
            }
            let amax = block.iter().fold(0f32, |a, v| a.max(v.abs()));
            *scale = quantise(block, amax, codes);
        }
        Ok(())
    }

    /// E4M3 byte of a block with this amax.
    fn block_scale(&self, am: f32) -> u8 {
        let g = self.global.map_or(1.0, GlobalScale::value);
        match self.rule {
            Rule::TorchAo => e4m3::encode((am / 6.0 / g).clamp(e4m3::MIN_NORMAL, e4m3::MAX)),
            Rule::ModelOpt => {
                let t = am / (6.0 * g);
                // An amax of zero gives 0 / 0 when 6g underflows.
                let t = if am == 0.0 || t == 0.0 { 1.0 } else { t };
                e4m3::encode(t.clamp(e4m3::MIN_POSITIVE, e4m3::MAX))
            }
            Rule::CompressedTensors => {
                let byte = e4m3::encode(g * round_to(self.source, am / 6.0));
                if byte == 0 { ZERO_SCALE_CT } else { byte }
            }
            Rule::TransformerEngine => e4m3::encode(am * (g * (1.0 / 6.0))),
            Rule::Runtime => e4m3::encode((am / 6.0 / g).clamp(RUNTIME_FLOOR, e4m3::MAX)),
        }
    }

    fn encode_block(&self, x: &[f32; BLOCK], scale: u8, codes: &mut [u8; BLOCK / 2]) {
        let s = e4m3::decode(scale);
        match (self.rule, self.global.map(GlobalScale::value)) {
            (Rule::TorchAo, None) => encode_each(x, codes, |v| v * (1.0 / s)),
            (Rule::TorchAo, Some(g)) => encode_each(x, codes, |v| v * (1.0 / g / s)),
            (Rule::ModelOpt | Rule::CompressedTensors, _) => {
                let step = effective(scale, self.global);
                encode_each(x, codes, |v| v / step);
            }
            (Rule::TransformerEngine, g) => {
                let inverse = (1.0 / (s * (1.0 / g.unwrap_or(1.0)))).min(f32::MAX);
                encode_each(x, codes, |v| v * inverse);
            }
            (Rule::Runtime, g) => {
                let step = (s + 1e-12) * g.unwrap_or(1.0);
                for (byte, v) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
                    *byte =
                        e2m1::pair(e2m1::encode_ties_away(v[0] / step), e2m1::encode_ties_away(v[1] / step));
                }
            }
        }
    }

    fn squared_error(&self, x: &[f32; BLOCK], codes: &[u8; BLOCK / 2], scale: u8) -> f64 {
        let mut values = [0.0; BLOCK];
        decode_block(codes, effective(scale, self.global), &mut values);
        x.iter().zip(values).map(|(&a, b)| (f64::from(a) - f64::from(b)).powi(2)).sum()
    }
}

/// Per-tensor scale for a tensor whose largest magnitude is `amax`, in the rule's convention.
///
/// In f32: torchao, ModelOpt and the runtime rule `amax / 2688`; compressed-tensors `rnd(rnd(1 / max(amax,
/// tiny)) * 2688)` rounded to `source` both times, 1 where that overflows; TransformerEngine `min(2688 /
/// amax, f32::MAX)`. A zero tensor, and one so small that the multiplying scale underflows to zero, gets 1.
///
/// # Errors
/// `ValueInvalid` if `amax` is negative, NaN or infinite.
pub fn global_from_amax(rule: Rule, amax: f32, source: DType) -> Result<GlobalScale> {
    if !(amax.is_finite() && amax >= 0.0) {
        return Err(Error::new(Code::ValueInvalid, "largest magnitude of a tensor")
            .need("a finite value, zero or more")
            .have(amax.to_string()));
    }
    let value = match rule {
        Rule::CompressedTensors => {
            let tiny = if source == DType::F16 { f16::MIN_POSITIVE.to_f32() } else { f32::MIN_POSITIVE };
            let inverse = round_to(source, 1.0 / amax.max(tiny));
            let g = round_to(source, inverse * GlobalScale::RANGE);
            if g.is_finite() { g } else { 1.0 }
        }
        Rule::TransformerEngine if amax == 0.0 => 1.0,
        Rule::TransformerEngine => (GlobalScale::RANGE / amax).min(f32::MAX),
        Rule::TorchAo | Rule::ModelOpt | Rule::Runtime => match amax / GlobalScale::RANGE {
            0.0 => 1.0,
            g => g,
        },
    };
    GlobalScale::new(rule.convention(), value)
}

/// Refusal of element `i` of a tensor.
pub(crate) fn not_finite(i: usize, v: f32) -> Error {
    Error::new(Code::ValueInvalid, format!("element {i} cannot be quantised"))
        .need("finite values")
        .have(v.to_string())
}

/// 0.125: what compressed-tensors stores where a scale underflows.
const ZERO_SCALE_CT: u8 = 0x20;
/// 2^-16, below the smallest E4M3 value, so that scales may round to zero.
const RUNTIME_FLOOR: f32 = 1.0 / 65536.0;

fn effective(scale: u8, global: Option<GlobalScale>) -> f32 {
    let s = e4m3::decode(scale);
    global.map_or(s, |g| g.effective(s))
}

#[inline]
fn decode_block(codes: &[u8], factor: f32, out: &mut [f32]) {
    for (byte, v) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
        *v = [e2m1::decode(*byte) * factor, e2m1::decode(byte >> 4) * factor];
    }
}

#[inline]
fn encode_each(x: &[f32; BLOCK], codes: &mut [u8; BLOCK / 2], y: impl Fn(f32) -> f32) {
    for (byte, v) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
        *byte = e2m1::pair(e2m1::encode(y(v[0])), e2m1::encode(y(v[1])));
    }
}

fn round_to(dtype: DType, v: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(v).to_f32(),
        DType::BF16 => bf16::from_f32(v).to_f32(),
        _ => v,
    }
}

#[cfg(test)]
mod tests;
