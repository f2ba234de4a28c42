//! Weights made up in int4.
use super::{Int4, Zeros, zeros_of};
use crate::formats::sample::{Draw, Edge, bytes_of, uniform};
use crate::{DType, OwnedParts, Part, Q4Schema};

/// Groups that checkpoints have; the last stands for one scale per out feature.
pub(super) const GROUPS: [u32; 5] = [16, 32, 64, 128, 256];

/// `zero` gives the zero point of a group, or near which one its bias puts zero.
pub(super) fn parts(
    format: &Int4,
    [rows, k]: [usize; 2],
    codes: Vec<u8>,
    scale: impl Fn(usize) -> f32,
    zero: impl Fn(usize) -> u8,
) -> OwnedParts {
    let shape = [rows, format.groups(k)];
    let groups = 0..shape[0] * shape[1];
    let scales = groups.clone().flat_map(|i| bytes_of(scale(i), format.scales)).collect();
    let parts = OwnedParts::default().with(Part::Codes, DType::U8, &[rows, k / 2], codes).with(
        Part::Scales,
        format.scales,
        &shape,
        scales,
    );
    match format.zeros {
        Zeros::Middle => parts,
        Zeros::Points => parts.with(Part::Zeros, DType::U8, &shape, groups.map(zero).collect()),
        Zeros::Biases => {
            // Off every code.
            let bias = |i| bytes_of(-(f32::from(zero(i)) + 0.25) * scale(i), format.scales);
            parts.with(Part::Zeros, format.scales, &shape, groups.flat_map(bias).collect())
        }
    }
}

/// Scales from 1/1000 to 1/10, zero points all over.
pub(super) fn random(format: &Int4, shape: [usize; 2], draw: &Draw) -> OwnedParts {
    let zero = |i| (draw.word(i) >> 8) as u8 % 16;
    let scale = |i| 0.1f32.powf(1.0 + 2.0 * uniform(draw.word(i)));
    parts(format, shape, draw.codes(shape[0] * shape[1]), scale, zero)
}

pub(super) fn plausible(format: &Int4, [rows, k]: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> OwnedParts {
    let (mut codes, mut some) = (vec![0; rows * k / 2], vec![0; rows * format.groups(k)]);
    fill(&mut codes);
    fill(&mut some);
    // Codes are 21 in the mean square about their zero.
    let scale = 0.2 / (k as f32).sqrt();
    parts(format, [rows, k], codes, |i| scale * (1.0 + f32::from(some[i]) / 256.0), |i| 7 + (some[i] & 1))
}

/// Scales from nothing to the largest under which every code is finite, of both signs.
const SCALES: [f32; 11] =
    [0.0, 1e-45, 6e-8, -1e-40, 1e-5, f32::MIN_POSITIVE, 0.01, -1.0, 1.0 + f32::EPSILON, 4000.0, 2e37];

/// Every code at every place of a group under each of the scales and each zero point.
pub(super) fn every_code(format: &Int4, [n_factor, k_factor]: [usize; 2]) -> Edge {
    let format = *format;
    // Of f16, what is beyond it.
    let scale = move |i: usize| match format.scales {
        DType::F16 => SCALES[i % SCALES.len()].clamp(-4000.0, 4000.0),
        _ => SCALES[i % SCALES.len()],
    };
    let wide = format.group as usize * if format.group > 128 { 1 } else { 4 };
    let k = (1..=k_factor).map(|i| i * wide).find(|k| k.is_multiple_of(k_factor)).unwrap_or(wide);
    // A group's codes turn by one from row to row: after 16 rows each was everywhere.
    let rows = (16 * SCALES.len()).next_multiple_of(n_factor);
    let make = move || {
        let groups = format.groups(k);
        let code = |row: usize, at: usize| ((at + row) % 16) as u8;
        let codes = (0..rows * k / 2).map(|i| {
            let (row, at) = (2 * i / k, 2 * i % k);
            code(row, at) | code(row, at + 1) << 4
        });
        // 16 rows have a scale together where there are zero points to go through.
        let scale = |i: usize| scale(i / groups / 16 + i % groups);
        let zero = |i: usize| ((i / groups) * 5 + i % groups + groups * (i / groups / 16)) as u8 % 16;
        Ok(parts(&format, [rows, k], codes.collect(), scale, zero))
    };
    let id = format!("every-code/{}", format.group);
    Edge { id, schema: Q4Schema::Int4(format), shape: [rows, k], is_rare: false, parts: Box::new(make) }
}

/// Every group and type of scales, and zero points at the ends.
pub(super) fn edges(name: &str, factors: [usize; 2]) -> Vec<Edge> {
    let zeros = zeros_of(name);
    let mut all = Vec::new();
    for scales in [DType::F16, DType::BF16, DType::F32] {
        for group in GROUPS {
            let edge = every_code(&Int4 { group, scales, zeros }, factors);
            all.push(Edge { id: format!("{}/{scales}", edge.id), ..edge });
        }
    }
    for zero in [0, 15].into_iter().filter(|_| zeros.are_stored()) {
        let format = Int4 { group: 128, scales: DType::F16, zeros };
        let shape = [16usize.next_multiple_of(factors[0]), 256usize.next_multiple_of(factors[1])];
        let make = move || {
            let draw = Draw { seed: 0x1274, tame: true };
            Ok(parts(&format, shape, draw.codes(shape[0] * shape[1]), |_| 0.25, move |_| zero))
        };
        let (id, schema) = (format!("zero-points-of-{zero}"), Q4Schema::Int4(format));
        all.push(Edge { id, schema, shape, is_rare: false, parts: Box::new(make) });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_code_meets_every_zero_point_and_scale_at_every_place() -> crate::Result<()> {
        let format = Int4 { group: 32, scales: DType::F32, zeros: Zeros::Points };
        let edge = every_code(&format, [1, 1]);
        let ([rows, k], w) = (edge.shape, (edge.parts)()?);
        let (codes, zeros) = (w.bytes(Part::Codes), w.bytes(Part::Zeros));
        let scales = w.to_f32(Part::Scales);
        let at = |i: usize| (i / k) * (k / 32) + i % k / 32;
        let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
        let with_zero: BTreeSet<_> = (0..rows * k).map(|i| (code(i), zeros[at(i)], i % 32)).collect();
        assert_eq!(with_zero.len(), 16 * 16 * 32);
        let with_scale: BTreeSet<_> =
            (0..rows * k).map(|i| (code(i), scales[at(i)].to_bits(), i % 32)).collect();
        assert_eq!(with_scale.len(), 16 * SCALES.len() * 32);
        Ok(())
    }
}
