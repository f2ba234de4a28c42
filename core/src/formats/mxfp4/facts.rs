//! What an MXFP4 matrix amounts to.
use super::{BLOCK, LARGEST};
use crate::formats::facts::{Facts, even};
use crate::formats::{e2m1, e8m0};

/// Powers of two below the largest block scale at which a block of zeros may be: writers give it the least
/// scale there is, or 1.
const NEAR: u8 = 24;

pub(super) fn facts(codes: &[u8], scales: &[u8]) -> Facts {
    let square: [f32; 256] = std::array::from_fn(|b| {
        let [lo, hi] = [b as u8 & 15, b as u8 >> 4].map(e2m1::decode);
        lo * lo + hi * hi
    });
    let mut counts = [0u64; 16];
    let mut used = [0u64; 256];
    let mut empty = [0u64; 256];
    let (mut amax, mut squares) = (0.0f64, 0.0f64);
    for (block, scale) in codes.as_chunks::<{ BLOCK / 2 }>().0.iter().zip(scales) {
        let (mut magnitude, mut sum) = (0u8, 0.0f32);
        for b in block {
            magnitude = magnitude.max(b & 7).max(b >> 4 & 7);
            sum += square[usize::from(*b)];
            counts[usize::from(b & 15)] += 1;
            counts[usize::from(b >> 4)] += 1;
        }
        let of = if magnitude == 0 { &mut empty } else { &mut used };
        of[usize::from(*scale)] += 1;
        let value = f64::from(e8m0::decode(*scale));
        amax = amax.max(f64::from(e2m1::decode(magnitude)) * value);
        squares += f64::from(sum) * value * value;
    }
    let present = || used.iter().enumerate().take(usize::from(LARGEST) + 1).filter(|(_, n)| **n > 0);
    let count: u64 = present().map(|(_, n)| n).sum();
    let all = scales.len() as u64;
    let mut odd = Vec::new();
    let Some((largest, _)) = present().next_back() else {
        odd.push(("codes-zero", "every code is zero, so is every weight".to_owned()));
        return Facts { all_zero: true, odd, ..Facts::default() };
    };
    let least = largest.saturating_sub(usize::from(NEAR));
    let lost: u64 = (least..=largest).filter(|s| *s != 127).map(|s| empty[s]).sum();
    if lost > 3 && lost * 1000 > all {
        odd.push((
            "codes-empty",
            format!("{lost} of {all} blocks have a scale and no code that is not zero"),
        ));
    }
    odd.extend(even(&counts));
    let mean_of =
        |f: &dyn Fn(f64) -> f64| present().map(|(b, n)| f(b as f64) * *n as f64).sum::<f64>() / count as f64;
    let mean = mean_of(&|x| x);
    let deviation = mean_of(&|x| (x - mean).powi(2)).sqrt();
    if deviation > 3.0 && count >= 64 {
        let message = format!(
            "block scales differ by {deviation:.1} powers of two in the mean, those of weights by less than two: another type?"
        );
        odd.push(("scales-spread", message));
    }
    Facts { amax, mean_square: squares / (all.max(1) as f64 * BLOCK as f64), lost: 0, all_zero: false, odd }
}
