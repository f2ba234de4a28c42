//! Weights made up in FP8.
use super::{Fp8, TILES, e4m3};
use crate::formats::sample::{Draw, Edge, bytes_of, uniform};
use crate::{DType, OwnedParts, Part, Q4Schema};

/// The code of 448.
pub(super) const LARGEST: u8 = 0x7e;

fn parts(format: &Fp8, [rows, k]: [usize; 2], codes: Vec<u8>, scale: impl Fn(usize) -> f32) -> OwnedParts {
    let grid = format.grid(rows, k);
    let scales = (0..grid[0] * grid[1]).flat_map(|i| bytes_of(scale(i), format.scales)).collect();
    OwnedParts::default().with(Part::Codes, DType::U8, &[rows, k], codes).with(
        Part::Scales,
        format.scales,
        &grid,
        scales,
    )
}

/// Any bytes, the largest number in place of NaN.
fn numbers(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.iter_mut().filter(|code| e4m3::is_nan(**code)).for_each(|code| *code -= 1);
    bytes
}

/// Scales from 1/50 000 to 1/500: the largest weights are about 1.
pub(super) fn random(format: &Fp8, shape: [usize; 2], draw: &Draw) -> OwnedParts {
    let mut codes = draw.codes(2 * shape[0] * shape[1]);
    codes.truncate(shape[0] * shape[1]);
    parts(format, shape, numbers(codes), |i| 0.002 * 0.1f32.powf(2.0 * uniform(draw.word(i))))
}

pub(super) fn plausible(format: &Fp8, [rows, k]: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> OwnedParts {
    let mut codes = vec![0; rows * k];
    fill(&mut codes);
    // Evenly spread codes are 132 in the root of the mean square.
    let scale = 1.0 / (132.0 * (k as f32).sqrt());
    parts(format, [rows, k], numbers(codes), |i| scale * (0.75 + (i % 8) as f32 / 16.0))
}

/// Scales from nothing to the largest under which every code is finite, of both signs.
const SCALES: [f32; 10] =
    [0.002, 0.0, 1e-45, -1e-40, 6e-8, f32::MIN_POSITIVE, -0.5, 1.0 + f32::EPSILON, 140.0, 7e35];

/// Every code at every place, under each of the scales where there are enough tiles.
pub(super) fn every_code(format: &Fp8, [n_factor, k_factor]: [usize; 2]) -> Edge {
    let format = *format;
    // Of f16, what is beyond it.
    let scale = move |i: usize| match format.scales {
        DType::F16 => SCALES[i % SCALES.len()].clamp(-140.0, 140.0),
        _ => SCALES[i % SCALES.len()],
    };
    let k = (1..=k_factor).map(|i| i * 256).find(|k| k.is_multiple_of(k_factor)).unwrap_or(256);
    // Codes turn by one from row to row, through all of them for each scale that a row may have.
    let rows = (256 * if format.tile == [1, 0] { SCALES.len() } else { 2 }).next_multiple_of(n_factor);
    let make = move || {
        let code = |i: usize| ((i / k + i % k) % 256) as u8;
        let of_tile = |i: usize| if format.tile == [1, 0] { scale(i / 256) } else { scale(i) };
        Ok(parts(&format, [rows, k], numbers((0..rows * k).map(code).collect()), of_tile))
    };
    let id = format!("every-code/{}", &Q4Schema::Fp8(format).label()["fp8.".len()..]);
    Edge { id, schema: Q4Schema::Fp8(format), shape: [rows, k], is_rare: false, parts: Box::new(make) }
}

/// Every tile and type of scales.
pub(super) fn edges(_: &str, factors: [usize; 2]) -> Vec<Edge> {
    let types = [DType::F16, DType::BF16, DType::F32];
    let all = types.into_iter().flat_map(|scales| TILES.map(|tile| Fp8 { tile, scales }));
    all.map(|format| every_code(&format, factors)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_code_meets_every_scale_at_every_place_of_a_word() -> crate::Result<()> {
        let format = Fp8 { tile: [1, 0], scales: DType::F32 };
        let edge = every_code(&format, [1, 1]);
        let ([_, k], w) = (edge.shape, (edge.parts)()?);
        let scales = w.to_f32(Part::Scales);
        let codes = w.bytes(Part::Codes).iter().enumerate();
        let met: BTreeSet<_> = codes.map(|(i, code)| (*code, scales[i / k].to_bits(), i % 8)).collect();
        assert_eq!(met.len(), 254 * SCALES.len() * 8);
        Ok(())
    }

    #[test]
    fn plausible_weights_are_of_their_size() {
        let mut at = 0;
        let mut fill = |bytes: &mut [u8]| {
            bytes.iter_mut().for_each(|b| {
                at += 1;
                *b = crate::formats::sample::mix(at) as u8;
            });
        };
        let format = Fp8 { tile: [1, 0], scales: DType::F32 };
        let weight = plausible(&format, [64, 1024], &mut fill);
        let scales = weight.to_f32(Part::Scales);
        let codes = weight.bytes(Part::Codes).iter().enumerate();
        let square: f32 = codes.map(|(i, c)| (e4m3::decode(*c) * scales[i / 1024]).powi(2)).sum();
        assert!((0.5..2.0).contains(&(square / 64.0)), "{square}");
    }
}
