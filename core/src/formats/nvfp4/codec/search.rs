//! The block scale with the least squared error: neighbours of the one that maps the largest value to 6 are
//! tried. The result is ordinary NVFP4.
use super::{BLOCK, Quantizer, effective};
use crate::Result;
use crate::formats::e4m3;

/// Neighbours on either side, in E4M3 codes: from about half of the first scale to twice it.
const REACH: u8 = 8;
/// The largest finite E4M3 code.
const LAST: u8 = 0x7e;

impl Quantizer {
    /// As [`quantize_row`](Self::quantize_row), with the one of 17 neighbouring E4M3 scales per block that
    /// has the smallest sum of squared errors; the scale of [`quantize_row`](Self::quantize_row) where
    /// none is better. No error of a block is ever larger than there.
    ///
    /// # Errors
    /// As there.
    pub fn quantize_row_search(&self, x: &[f32], codes: &mut [u8], scales: &mut [u8]) -> Result<()> {
        self.each_block(x, codes, scales, |block, amax, codes| {
            let first = self.block_scale(amax);
            self.encode_block(block, first, codes);
            if amax == 0.0 || first == 0 {
                return first;
            }
            let best = self.likely_best(block, first);
            if best == first {
                return first;
            }
            // The candidates were compared in fewer steps than a library's rule has: what counts is what it
            // writes.
            let mut other = [0; BLOCK / 2];
            self.encode_block(block, best, &mut other);
            if self.squared_error(block, &other, best) < self.squared_error(block, codes, first) {
                codes.copy_from_slice(&other);
                return best;
            }
            first
        })
    }

    /// The scale around `first` with the smallest error; the nearest to it of several.
    fn likely_best(&self, block: &[f32; BLOCK], first: u8) -> u8 {
        let magnitudes = block.map(f32::abs);
        let amax = magnitudes.iter().fold(0f32, |a, v| a.max(*v));
        let (mut best, mut least) = (first, error(&magnitudes, effective(first, self.global)));
        for distance in 1..=REACH {
            for code in [first.saturating_sub(distance), first.saturating_add(distance)] {
                // Libraries keep small scales off zero and denormals in ways of their own: nothing below is
                // tried.
                if code < e4m3::encode(e4m3::MIN_NORMAL) || code > LAST {
                    continue;
                }
                let step = effective(code, self.global);
                // What the largest value loses alone may be too much already.
                let cut = amax - 6.0 * step;
                if cut > 0.0 && cut * cut >= least {
                    continue;
                }
                let have = error(&magnitudes, step);
                if have < least {
                    (best, least) = (code, have);
                }
            }
        }
        best
    }
}

/// Sum of squared errors of magnitudes under a step; infinite where the step is of no use. Whole vectors at a
/// time, so that a search costs a few times what one encoding does.
#[inline]
fn error(magnitudes: &[f32; BLOCK], step: f32) -> f32 {
    // Adding and taking away 1.5 * 2^23 rounds to a whole number, ties to even.
    const ROUND: f32 = 12_582_912.0;
    let inverse = 1.0 / step;
    if !inverse.is_finite() || !step.is_normal() {
        return f32::INFINITY;
    }
    let mut sums = [0f32; 4];
    for (i, magnitude) in magnitudes.iter().enumerate() {
        let y = magnitude * inverse;
        // E2M1 is even-spaced below 2, from 2 to 4, and above: 0.5, 1 and 2.
        let (to, back) = if y < 2.0 {
            (2.0, 0.5)
        } else if y < 4.0 {
            (1.0, 1.0)
        } else {
            (0.5, 2.0)
        };
        let rounded = ((y * to + ROUND) - ROUND) * back;
        let off = (y - rounded.min(6.0)) * step;
        sums[i % 4] += off * off;
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}
