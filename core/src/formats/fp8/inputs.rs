//! The activation format of W8A8: E4M3 under an f32 scale for a row, for 128 of it, or for all rows, as
//! compressed-tensors (`token` and `tensor`), ModelOpt and transformers (`fp8`) declare it.
//!
//! `value = e4m3(code) * scale`, where a code is the nearest to `x / scale`; divisions are f32.
use super::e4m3;
use crate::{Fp8Inputs, Result, wide};

/// In features under one scale of [`Fp8Inputs::PerBlock`].
pub const BLOCK: usize = 128;

/// In features under one scale, of `k`.
pub fn reach(inputs: Fp8Inputs, k: usize) -> usize {
    if inputs == Fp8Inputs::PerBlock { BLOCK } else { k.max(1) }
}

/// Replaces a row of x by what FP8 keeps of it: each value is rounded once to f32.
///
/// # Errors
/// As of [`quantize_block`]; blocks before the one that has the element are replaced then.
pub fn round_row(x: &mut [f32], inputs: Fp8Inputs) -> Result<()> {
    let reach = reach(inputs, x.len());
    for (b, block) in x.chunks_mut(reach).enumerate() {
        let scale = quantize_block(block, inputs).map_err(|e| e.within(format!("block {b}")))?;
        scaled(block, scale);
    }
    Ok(())
}

/// Replaces elements that share a scale by the values of their codes, and returns the scale: what is stored,
/// or `amax / 448`. Beyond the range of a stored scale codes are 448. Where a dynamic one is zero, for an
/// amax below 3.1e-43, codes are zero.
///
/// # Errors
/// [`Code::ValueInvalid`](crate::Code::ValueInvalid) if an element is NaN or infinite.
pub fn quantize_block(x: &mut [f32], inputs: Fp8Inputs) -> Result<f32> {
    let amax = amax(x);
    if !amax.is_finite() {
        let i = x.iter().position(|v| !v.is_finite()).unwrap_or(0);
        return Err(crate::formats::nvfp4::not_finite(i, x[i]));
    }
    let scale = match inputs {
        Fp8Inputs::Static(scale) => scale.effective(1.0),
        Fp8Inputs::PerRow | Fp8Inputs::PerBlock => amax / e4m3::MAX,
    };
    if scale == 0.0 {
        x.fill(0.0);
    } else {
        codes(x, scale);
    }
    Ok(scale)
}

wide! {
    /// Infinite or NaN where an element is.
    fn amax(x: &[f32]) -> f32 {
        // Bits of magnitudes order as these do, infinity and NaN last.
        f32::from_bits(x.iter().fold(0, |most, v| v.abs().to_bits().max(most)))
    }
}

wide! {
    fn codes(x: &mut [f32], scale: f32) -> () {
        x.iter_mut().for_each(|v| *v = e4m3::round(*v / scale));
    }
}

wide! {
    fn scaled(x: &mut [f32], scale: f32) -> () {
        x.iter_mut().for_each(|v| *v *= scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Code, GlobalScale};

    #[test]
    fn the_largest_of_a_row_is_448_and_ties_round_to_even() -> Result<()> {
        let mut x = [896.0f32, -896.0, 17.0 * 2.0, 19.0 * 2.0, -0.0, 2f32.powi(-9), 1.0, 3.4];
        assert_eq!(quantize_block(&mut x, Fp8Inputs::PerRow)?, 2.0);
        // 17 is between 16 and 18, 19 between 18 and 20, and half of the smallest value is nothing.
        assert_eq!(x, [448.0, -448.0, 16.0, 20.0, -0.0, 0.0, 0.5, 1.75]);
        Ok(())
    }

    #[test]
    fn blocks_have_scales_of_their_own_and_the_last_may_be_short() -> Result<()> {
        let of = |i: usize| if i < 128 { 1.0 + i as f32 } else { 1000.0 + i as f32 };
        let x: Vec<f32> = (0..144).map(of).collect();
        let (mut by_block, mut by_row) = (x.clone(), x.clone());
        round_row(&mut by_block, Fp8Inputs::PerBlock)?;
        round_row(&mut by_row, Fp8Inputs::PerRow)?;
        // Of three bits of fraction no value is off by more than a sixteenth, beside subnormal ones.
        assert!(x.iter().zip(&by_block).all(|(x, y)| (x - y).abs() <= x / 16.0), "{by_block:?}");
        assert_ne!(by_block[..128], by_row[..128]);
        assert_eq!((by_block[127], by_row[143]), (128.0, 1143.0));
        Ok(())
    }

    #[test]
    fn a_stored_scale_saturates() -> Result<()> {
        let stored = Fp8Inputs::Static(GlobalScale::multiply(0.5)?);
        let mut x = [1e30f32, -300.0, 224.0, 0.25];
        round_row(&mut x, stored)?;
        assert_eq!(x, [224.0, -224.0, 224.0, 0.25]);
        Ok(())
    }

    #[test]
    fn what_vanishes_is_zero_and_what_is_not_finite_is_refused() -> Result<()> {
        for amax in [0.0f32, -0.0, 1e-45, 3e-43] {
            let mut x = [amax, -amax, 0.0];
            assert_eq!(quantize_block(&mut x, Fp8Inputs::PerRow)?, 0.0, "{amax}");
            assert_eq!(x, [0.0; 3]);
        }
        let mut x = [f32::MAX, f32::MIN];
        round_row(&mut x, Fp8Inputs::PerRow)?;
        assert_eq!(x, [f32::MAX, f32::MIN]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let e = round_row(&mut [1.0, bad], Fp8Inputs::PerBlock).expect_err("not finite");
            assert_eq!(e.code(), Code::ValueInvalid);
        }
        Ok(())
    }
}
