//! Weights made up in MXFP4.
use super::{BLOCK, ENCODING, LARGEST};
use crate::formats::sample::{Draw, Edge};
use crate::{DType, OwnedParts, Part};
use std::ops::RangeInclusive;

pub(super) fn parts([rows, k]: [usize; 2], codes: Vec<u8>, scales: Vec<u8>) -> OwnedParts {
    let (packed, blocks) = ([rows, k / 2], [rows, k / BLOCK]);
    OwnedParts::default().with(Part::Codes, DType::U8, &packed, codes).with(
        Part::Scales,
        DType::U8,
        &blocks,
        scales,
    )
}

/// Scales from 2^-12 on: up to 2^6, or up to 1 where sums have to fit f16.
pub(super) fn random([rows, k]: [usize; 2], draw: &Draw) -> OwnedParts {
    let range = if draw.tame { 13 } else { 19 };
    let scales = (0..rows * k / BLOCK).map(|i| 115 + (draw.word(i) >> 16) as u8 % range);
    parts([rows, k], draw.codes(rows * k), scales.collect())
}

pub(super) fn plausible([rows, k]: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> OwnedParts {
    let (mut codes, mut scales) = (vec![0; rows * k / 2], vec![0; rows * k / BLOCK]);
    fill(&mut codes);
    fill(&mut scales);
    // Codes are 2.9 in the mean square.
    let power = (0.3 / (k as f32).sqrt()).log2().floor() as i32;
    scales.iter_mut().for_each(|s| *s = (127 + power) as u8 + (*s & 1));
    parts([rows, k], codes, scales)
}

/// Every code under each of the scales at every place of a block, in as many rows and columns as the factors
/// want.
pub(super) fn edge(id: String, scales: RangeInclusive<u8>, [n_factor, k_factor]: [usize; 2]) -> Edge {
    let count = usize::from(scales.end() - scales.start()) + 1;
    let [rows, k] = [count.next_multiple_of(n_factor), 512.max(k_factor)];
    let first = *scales.start();
    let make = move || {
        let blocks = k / BLOCK;
        let code = |block: usize, at: usize| ((at + block) % 16) as u8;
        let (mut codes, mut all) = (Vec::with_capacity(rows * k / 2), Vec::with_capacity(rows * blocks));
        for r in 0..rows {
            for b in 0..blocks {
                // The blocks of a row have different scales, and each scale meets each rotation of the codes.
                all.push(first + ((r + 11 * b) % count) as u8);
                codes.extend((0..BLOCK / 2).map(|j| code(b, 2 * j) | code(b, 2 * j + 1) << 4));
            }
        }
        Ok(parts([rows, k], codes, all))
    };
    Edge { id, schema: ENCODING, shape: [rows, k], is_rare: false, parts: Box::new(make) }
}

pub(super) fn edges(_: &str, factors: [usize; 2]) -> Vec<Edge> {
    vec![edge("every-code".into(), 0..=LARGEST, factors)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_code_meets_every_scale_at_every_place() -> crate::Result<()> {
        let edge = edge(String::new(), 0..=LARGEST, [1, 1]);
        let ([rows, k], w) = (edge.shape, (edge.parts)()?);
        let (codes, scales) = (w.bytes(Part::Codes), w.bytes(Part::Scales));
        let seen: BTreeSet<(u8, u8, usize)> =
            (0..rows * k).map(|i| (codes[i / 2] >> (4 * (i % 2)) & 15, scales[i / 32], i % 32)).collect();
        assert_eq!(seen.len(), 16 * 253 * 32);
        Ok(())
    }
}
