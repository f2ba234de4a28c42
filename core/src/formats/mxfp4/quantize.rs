//! Quantising to MXFP4.
use super::{BLOCK, ENCODING, LARGEST, dequantize_row, sample};
use crate::formats::nvfp4::{Method, not_finite};
use crate::formats::quantize::{Encoder, PIECE, Rows, parallel};
use crate::formats::storage::Layout;
use crate::formats::{e2m1, e8m0};
use crate::{Code, Error, OwnedParts, Q4Schema, Result, ThreadPool};
use serde::Serialize;

/// E2M1 codes with a power of two per 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ToMxfp4 {
    /// Choice of the block scale: [`Method::Rtn`] rounds as compressed-tensors does, [`Method::Search`] takes
    /// that scale, its half or its double, whichever has the smallest squared error.
    pub method: Method,
}

impl ToMxfp4 {
    /// `None`: a search.
    pub fn new(method: Option<Method>) -> Self {
        Self { method: method.unwrap_or(Method::Search) }
    }
}

impl Encoder for ToMxfp4 {
    fn in_words(&self) -> String {
        "mxfp4, rounded as compressed-tensors does".to_owned()
    }
    fn schema(&self) -> Q4Schema {
        ENCODING
    }
    fn invalid(&self) -> Option<&'static str> {
        (self.method == Method::FourOverSix).then_some(
            "another method: the scale that maps a block to 4 is no power of two, which scales of mxfp4 are",
        )
    }
    fn fits(&self, layout: Layout) -> bool {
        layout == Layout::CompressedTensors
    }
    fn fix(&self) -> &'static str {
        match self.method {
            Method::FourOverSix => "--method search or rtn; or --format nvfp4",
            _ => "--layout compressed-tensors; or --format nvfp4",
        }
    }
    fn lacks(&self, _: Layout, _: usize, k: usize) -> Option<&'static str> {
        (k % BLOCK != 0).then_some("in features divisible by 32 for MXFP4")
    }
    fn encode(&self, rows: &Rows<'_>, _: Option<f32>, threads: &ThreadPool) -> Result<OwnedParts> {
        let (n, k) = (rows.n, rows.k);
        if let Some(need) = self.lacks(Layout::CompressedTensors, n, k) {
            return Err(Error::new(Code::TensorShape, rows.name)
                .need(need)
                .have(format!("[{n}, {k}]"))
                .fix("exclude this layer, or use --format nf4"));
        }
        let elements = n * k;
        let (mut codes, mut scales) = (vec![0u8; elements / 2], vec![0u8; elements / BLOCK]);
        let pieces: Vec<_> =
            codes.chunks_mut(PIECE / 2).zip(scales.chunks_mut(PIECE / BLOCK)).enumerate().collect();
        parallel(threads, pieces, |(i, (codes, scales))| {
            let mut x = vec![0f32; codes.len() * 2];
            rows.read(i * PIECE, &mut x)?;
            quantize(&x, self.method, codes, scales)
        })?;
        Ok(sample::parts([n, k], codes, scales))
    }
}

/// Quantises whole blocks: `codes` takes `x.len() / 2` bytes, low nibble first, `scales` `x.len() / 32`.
///
/// The scale is `2^(e - 2)` where `2^e` is the power of two below the largest magnitude, rounded to one bit
/// of mantissa before (2.5.4 of the OCP text leaves the choice open; torchao calls this one EVEN). Codes are
/// the nearest to `x / scale`, ties to even.
///
/// # Errors
/// `ShapeMismatch` if the lengths do not fit together, `ValueInvalid` if an element is NaN or infinite.
pub fn quantize(x: &[f32], method: Method, codes: &mut [u8], scales: &mut [u8]) -> Result<()> {
    if x.len() != BLOCK * scales.len() || x.len() != 2 * codes.len() {
        return Err(Error::new(Code::ShapeMismatch, "MXFP4 row")
            .need(format!("k % {BLOCK} == 0, k/2 bytes of codes and k/{BLOCK} scales for k = {}", x.len()))
            .have(format!("{} bytes of codes and {} scales", codes.len(), scales.len())));
    }
    if let Some(i) = x.iter().position(|v| !v.is_finite()) {
        return Err(not_finite(i, x[i]));
    }
    let blocks = x.as_chunks::<BLOCK>().0.iter().zip(codes.as_chunks_mut::<{ BLOCK / 2 }>().0);
    for ((x, codes), scale) in blocks.zip(scales) {
        let amax = x.iter().fold(0f32, |a, v| a.max(v.abs()));
        *scale = even(amax);
        encode(x, *scale, codes);
        if method == Method::Search && amax > 0.0 {
            let mut least = error(x, codes, *scale);
            for other in [scale.saturating_sub(1), (*scale + 1).min(LARGEST)] {
                let mut tried = [0; BLOCK / 2];
                encode(x, other, &mut tried);
                let have = error(x, &tried, other);
                if have < least {
                    (least, *scale, *codes) = (have, other, tried);
                }
            }
        }
    }
    Ok(())
}

/// The scale of a block with this amax; the least one for zeros.
fn even(amax: f32) -> u8 {
    let exponent = (amax.to_bits() + (1 << 21)) >> 23;
    (exponent.saturating_sub(2) as u8).min(LARGEST)
}

fn encode(x: &[f32; BLOCK], scale: u8, codes: &mut [u8; BLOCK / 2]) {
    let step = e8m0::decode(scale);
    for (byte, v) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
        *byte = e2m1::pair(e2m1::encode(v[0] / step), e2m1::encode(v[1] / step));
    }
}

fn error(x: &[f32; BLOCK], codes: &[u8; BLOCK / 2], scale: u8) -> f64 {
    let mut values = [0.0; BLOCK];
    dequantize_row(codes, &[scale], &mut values);
    x.iter().zip(values).map(|(&a, b)| (f64::from(a) - f64::from(b)).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_of_the_amax_rounded_to_a_bit() -> Result<()> {
        for (amax, power) in
            [(4.0, 0), (6.0, 0), (6.99, 0), (7.0, 1), (8.0, 1), (1.0, -2), (1.75, -1), (3.4, -1)]
        {
            assert_eq!(i32::from(even(amax)) - 127, power, "{amax}");
        }
        assert_eq!((even(0.0), even(f32::MIN_POSITIVE), even(f32::MAX)), (0, 0, LARGEST));
        let x = [f32::MAX; BLOCK];
        let (mut codes, mut scales, mut back) = ([0; 16], [0], [0.0; BLOCK]);
        quantize(&x, Method::Search, &mut codes, &mut scales)?;
        dequantize_row(&codes, &scales, &mut back);
        assert!(back.iter().all(|v| v.is_finite()), "{back:?}");
        Ok(())
    }

    #[test]
    fn a_search_is_never_worse() -> Result<()> {
        for seed in 0..200u64 {
            let draw = crate::formats::sample::Draw { seed, tame: true };
            let x: [f32; BLOCK] = std::array::from_fn(|i| {
                let u = crate::formats::sample::uniform(draw.word(i)) - 0.5;
                u * u * u * 2f32.powi(seed as i32 % 40 - 20)
            });
            let total = |method| -> Result<f64> {
                let (mut codes, mut scales) = ([0; BLOCK / 2], [0]);
                quantize(&x, method, &mut codes, &mut scales)?;
                Ok(error(&x, &codes, scales[0]))
            };
            assert!(total(Method::Search)? <= total(Method::Rtn)?, "seed {seed}");
        }
        Ok(())
    }

    #[test]
    fn what_cannot_be_quantised_is_refused() {
        let (mut codes, mut scales) = ([0; 16], [0]);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = [1.0; BLOCK];
            x[7] = bad;
            assert!(quantize(&x, Method::Rtn, &mut codes, &mut scales).is_err());
        }
        assert!(quantize(&[1.0; 31], Method::Rtn, &mut codes, &mut scales).is_err());
        assert!(ToMxfp4::new(Some(Method::FourOverSix)).invalid().is_some());
    }
}
