//! Quantising to int4 without zero points.
use super::{Int4, ZERO, Zeros, encoding, sample, storage};
use crate::formats::nvfp4::Method;
use crate::formats::quantize::{Encoder, Rows, parallel};
use crate::formats::storage::Layout;
use crate::{Code, DType, Error, OwnedParts, Q4Schema, Result, ThreadPool};
use half::{bf16, f16};
use serde::Serialize;

/// int4 codes about 8, a scale per group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ToInt4 {
    /// Elements along k under one scale.
    pub group: u32,
    /// Choice of the scale: [`Method::Rtn`] takes the one of compressed-tensors, [`Method::Search`] the one
    /// of 13, down to 5/8 of that, with the smallest squared error.
    pub method: Method,
    /// Type of the scales: bf16, or f16 where the layout has no other.
    pub scales: DType,
}

/// Scales that a search tries, in 32nds of the first.
const STEPS: std::ops::RangeInclusive<u32> = 20..=32;

/// The nearest scale of this type under which every code is finite.
fn rounded(scale: f32, scales: DType) -> f32 {
    match scales {
        DType::F16 => f16::from_f32(scale.min(f16::MAX.to_f32())).to_f32(),
        _ => bf16::from_f32(scale).to_f32().min(f32::from_bits(0x7dff_0000)),
    }
}

impl ToInt4 {
    fn format(&self) -> Int4 {
        Int4 { group: self.group, scales: self.scales, zeros: Zeros::Middle }
    }
}

impl Encoder for ToInt4 {
    fn in_words(&self) -> String {
        format!("int4 with scales for groups of {}", self.group)
    }
    fn schema(&self) -> Q4Schema {
        encoding(self.group, self.scales, Zeros::Middle)
    }
    fn invalid(&self) -> Option<&'static str> {
        if self.group == 0 || !self.group.is_multiple_of(16) {
            return Some("a block size of a multiple of 16");
        }
        if !matches!(self.scales, DType::F16 | DType::BF16) {
            return Some("scales of float16 or bfloat16");
        }
        (self.method == Method::FourOverSix)
            .then_some("another method: codes of int4 are evenly spaced, so no scale that maps to 4 helps")
    }
    fn fits(&self, layout: Layout) -> bool {
        match layout {
            Layout::CompressedTensors => true,
            Layout::Gptq | Layout::Awq => self.scales == DType::F16 && storage::GROUPS.contains(&self.group),
            _ => false,
        }
    }
    fn fix(&self) -> &'static str {
        match self.method {
            Method::FourOverSix => "--method search or rtn; or --format nvfp4",
            _ if !storage::GROUPS.contains(&self.group) => {
                "--layout compressed-tensors; or --block-size 16, 32, 64 or 128"
            }
            _ => "--layout compressed-tensors, gptq or awq; or --format nvfp4",
        }
    }
    fn lacks(&self, layout: Layout, n: usize, k: usize) -> Option<&'static str> {
        if !k.is_multiple_of((self.group as usize).max(1)) {
            return Some("in features divisible by the block size");
        }
        storage::lacks_shape(&self.format(), layout, [n, k]).map(|(_, need)| need)
    }
    fn encode(&self, rows: &Rows<'_>, _: Option<f32>, threads: &ThreadPool) -> Result<OwnedParts> {
        let ([n, k], group) = (rows.shape(), self.group as usize);
        let need = self.invalid().or_else(|| self.lacks(Layout::CompressedTensors, n, k));
        if let Some(need) = need {
            return Err(Error::new(Code::TensorShape, rows.name())
                .need(need)
                .have(format!("[{n}, {k}], blocks of {group}"))
                .fix("exclude this layer, or another --block-size"));
        }
        let (mut codes, mut scales) = (vec![0u8; n * k / 2], vec![0f32; n * k / group]);
        let pieces = codes.chunks_mut(k / 2).zip(scales.chunks_mut(k / group)).enumerate().collect();
        parallel(threads, pieces, |(row, (codes, scales))| {
            let mut x = vec![0f32; k];
            rows.read(row * k, &mut x)?;
            let groups = x.chunks_exact(group).zip(codes.chunks_exact_mut(group / 2));
            groups.zip(scales).for_each(|((x, codes), scale)| *scale = quantize(x, self, codes));
            Ok(())
        })?;
        Ok(sample::parts(&self.format(), [n, k], codes, |i| scales[i], |_| ZERO))
    }
}

/// Quantises one group of finite values to `x.len() / 2` bytes of codes, low nibble first, and returns its
/// scale: the largest magnitude over 7.5, which maps it to the middle of the last step, or less of it. Codes
/// are the nearest to `x / scale`, ties to even.
fn quantize(x: &[f32], to: &ToInt4, codes: &mut [u8]) -> f32 {
    let amax = x.iter().fold(0f32, |a, v| a.max(v.abs()));
    let rounded = |scale: f32| rounded(scale, to.scales);
    let mut best = rounded(amax / 7.5);
    encode(x, best, codes);
    if to.method == Method::Search && best > 0.0 {
        let (mut least, mut tried) = (error(x, codes, best), vec![0; codes.len()]);
        for step in STEPS.rev().skip(1) {
            let scale = rounded(amax / 7.5 * step as f32 / 32.0);
            encode(x, scale, &mut tried);
            let have = error(x, &tried, scale);
            if have < least {
                (least, best) = (have, scale);
                codes.copy_from_slice(&tried);
            }
        }
    }
    best
}

fn encode(x: &[f32], scale: f32, codes: &mut [u8]) {
    // Of a scale that is zero, or so small that a quotient is infinite: zeros, and the ends.
    let code =
        |v: f32| if v == 0.0 { ZERO } else { ((v / scale).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8 };
    for (byte, v) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
        *byte = code(v[0]) | code(v[1]) << 4;
    }
}

fn error(x: &[f32], codes: &[u8], scale: f32) -> f64 {
    let value = |code: u8| f64::from((f32::from(code) - f32::from(ZERO)) * scale);
    let of = |(v, byte): (&[f32; 2], &u8)| {
        (f64::from(v[0]) - value(byte & 15)).powi(2) + (f64::from(v[1]) - value(byte >> 4)).powi(2)
    };
    x.as_chunks::<2>().0.iter().zip(codes).map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::sample::{Draw, uniform};

    const SCALES: [DType; 2] = [DType::BF16, DType::F16];

    #[test]
    fn codes_are_the_nearest_and_a_search_is_never_worse() {
        for (seed, scales) in (0..200u64).flat_map(|seed| SCALES.map(|scales| (seed, scales))) {
            let draw = Draw { seed, tame: true };
            let x: Vec<f32> = (0..64)
                .map(|i| (uniform(draw.word(i)) - 0.5).powi(3) * 2f32.powi(seed as i32 % 60 - 30))
                .collect();
            let total = |method| {
                let mut codes = vec![0; 32];
                let scale = quantize(&x, &ToInt4 { group: 64, method, scales }, &mut codes);
                for (i, v) in x.iter().enumerate() {
                    let code = codes[i / 2] >> (4 * (i % 2)) & 15;
                    let far = |code: u8| (f64::from(*v) - (f64::from(code) - 8.0) * f64::from(scale)).abs();
                    let nearest = (0..16).map(far).fold(f64::INFINITY, f64::min);
                    assert!(
                        far(code) <= nearest * (1.0 + 1e-6),
                        "seed {seed}, {i}: {v} as {code} of {scale}"
                    );
                }
                error(&x, &codes, scale)
            };
            assert!(total(Method::Search) <= total(Method::Rtn), "seed {seed}");
        }
    }

    #[test]
    fn groups_at_the_ends_of_floats_stay_finite() {
        for (v, code) in [(0.0, 8), (-0.0, 8), (f32::MAX, 15), (-f32::MAX, 0), (1e-45, 15)] {
            for scales in SCALES {
                let (x, mut codes) = ([v; 16], [0; 8]);
                let scale = quantize(&x, &ToInt4 { group: 16, method: Method::Search, scales }, &mut codes);
                assert!((8.0 * scale).is_finite(), "{v}: {scale}");
                assert!(codes.iter().all(|c| *c == code | code << 4), "{v}: {codes:?} of {scale}");
            }
        }
    }

    #[test]
    fn what_cannot_be_quantised_is_refused() {
        let bytes: Vec<u8> = [1.0f32; 96].iter().flat_map(|v| v.to_le_bytes()).collect();
        let rows = Rows::new("w", &bytes, DType::F32, 2, 48).expect("a matrix");
        let encode = |group, method| {
            ToInt4 { group, method, scales: DType::BF16 }.encode(&rows, None, &ThreadPool::new(1))
        };
        assert!(encode(16, Method::Rtn).is_ok());
        for (group, method) in
            [(32, Method::Rtn), (0, Method::Rtn), (24, Method::Rtn), (16, Method::FourOverSix)]
        {
            assert!(encode(group, method).is_err(), "{group} {method:?}");
        }
    }
}
