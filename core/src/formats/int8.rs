//! The activation format of W4A8: int8 with an f32 scale per 16 elements, so that block products are
//! integers.
//!
//! `value = q * scale`. The block is that of NVFP4, so one weight scale and one activation scale cover each
//! integer sum.
use crate::{Code, Error, Result, wide};

/// Elements per scale.
pub const BLOCK: usize = 16;

/// Quantises `x` (length `k`, a multiple of 16) into `q` (length `k`) and `scales` (length `k / 16`).
///
/// Per block, in f32: `scale = amax / 127`, `q = round_half_even(x * (127 / amax))`, so `|q| <= 127`. A block
/// whose amax is zero, or so small (below 3.8e-37) that `127 / amax` overflows, gets scale 0 and q 0.
///
/// # Errors
/// `ShapeMismatch` if the lengths do not fit together, `ValueInvalid` if an element is NaN or infinite.
pub fn quantize_row(x: &[f32], q: &mut [i8], scales: &mut [f32]) -> Result<()> {
    let (blocks, rest) = x.as_chunks::<BLOCK>();
    if !rest.is_empty() || q.len() != x.len() || scales.len() != blocks.len() {
        return Err(Error::new(Code::ShapeMismatch, "int8 activation row")
            .need(format!("k % {BLOCK} == 0, k codes and k/{BLOCK} scales for k = {}", x.len()))
            .have(format!("{} codes and {} scales", q.len(), scales.len())));
    }
    quantize_blocks(blocks, q.as_chunks_mut::<BLOCK>().0, scales)
}

/// 1.5 * 2^23: what is added to it is rounded to an integer, ties to even, in its lowest bits.
const ROUNDER: f32 = 12_582_912.0;

wide! {
    fn quantize_blocks(x: &[[f32; BLOCK]], q: &mut [[i8; BLOCK]], scales: &mut [f32]) -> Result<()> {
        for (b, ((block, q), scale)) in x.iter().zip(q).zip(scales).enumerate() {
            // Bits of magnitudes order as these do, infinity and NaN last.
            let bits = block.iter().fold(0, |most, v| v.abs().to_bits().max(most));
            if bits >= f32::INFINITY.to_bits() {
                let i = block.iter().position(|v| !v.is_finite()).unwrap_or(0);
                return Err(super::nvfp4::not_finite(b * BLOCK + i, block[i]));
            }
            let amax = f32::from_bits(bits);
            let inverse = 127.0 / amax;
            if inverse.is_finite() {
                *scale = amax / 127.0;
                for (q, v) in q.iter_mut().zip(block) {
                    *q = (v * inverse + ROUNDER).to_bits() as i8;
                }
            } else {
                *scale = 0.0;
                q.fill(0);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(x: [f32; BLOCK]) -> ([i8; BLOCK], f32) {
        let (mut q, mut s) = ([1; BLOCK], [1.0]);
        quantize_row(&x, &mut q, &mut s).expect("finite, right lengths");
        (q, s[0])
    }

    #[test]
    fn ties_round_to_even_and_the_extremes_are_127() {
        let mut x = [0.0; BLOCK];
        x[..8].copy_from_slice(&[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.4]);
        let (q, s) = block(x);
        assert_eq!((q[..8].to_vec(), s), (vec![127, -127, 0, 2, 2, 0, -2, 3], 1.0));
    }

    #[test]
    fn every_block_has_its_own_scale_and_the_error_is_half_a_step() {
        let x: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32 - 31.3) * 10f32.powi(i / 16 - 2)).collect();
        let (mut q, mut s) = (vec![0; 64], vec![0.0; 4]);
        quantize_row(&x, &mut q, &mut s).expect("finite");
        for i in 0..64 {
            let (value, step) = (f64::from(q[i]) * f64::from(s[i / 16]), f64::from(s[i / 16]));
            assert!((value - f64::from(x[i])).abs() <= step * 0.5 * (1.0 + 1e-4), "element {i}");
        }
        assert!(s.windows(2).all(|w| w[0] < w[1]), "{s:?}");
    }

    #[test]
    fn zero_and_vanishing_blocks_are_zero() {
        assert_eq!(block([0.0; BLOCK]), ([0; BLOCK], 0.0));
        assert_eq!(block([-0.0; BLOCK]), ([0; BLOCK], 0.0));
        assert_eq!(block([1e-40; BLOCK]), ([0; BLOCK], 0.0));
        assert_eq!(block([f32::MAX; BLOCK]).0, [127; BLOCK]);
        assert_eq!(block([1e-36; BLOCK]).0, [127; BLOCK]);
    }

    #[test]
    fn what_cannot_be_quantised_is_refused() {
        let (mut q, mut s) = ([0; 16], [0.0; 1]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 16];
            x[15] = bad;
            assert_eq!(quantize_row(&x, &mut q, &mut s).expect_err("not finite").code(), Code::ValueInvalid);
        }
        assert_eq!(quantize_row(&[0.0; 17], &mut q, &mut s).expect_err("ragged").code(), Code::ShapeMismatch);
        assert_eq!(
            quantize_row(&[0.0; 16], &mut q[..15], &mut s).expect_err("short").code(),
            Code::ShapeMismatch
        );
        assert_eq!(quantize_row(&[0.0; 16], &mut q, &mut []).expect_err("short").code(), Code::ShapeMismatch);
    }
}
