//! Weights made up in blocks.
use super::{Apart, Blocks, encoding};
use crate::formats::sample::{Draw, Edge, uniform};
use crate::{DType, OwnedParts, Part};
use half::f16;

/// Changes every block.
pub(super) fn edit(blocks: Blocks, bytes: &mut [u8], mut change: impl FnMut(&mut Apart)) {
    for block in bytes.chunks_exact_mut(blocks.bytes()) {
        let mut apart = blocks.apart(block);
        change(&mut apart);
        blocks.put(&apart, block);
    }
}

fn parts(blocks: Blocks, [rows, k]: [usize; 2], bytes: Vec<u8>) -> OwnedParts {
    OwnedParts::default().with(Part::Codes, DType::U8, &[rows, blocks.row(k)], bytes)
}

/// Any codes and scales of groups under scales of both signs, such that weights are below 1.
pub(super) fn random(blocks: Blocks, shape: [usize; 2], draw: &Draw) -> OwnedParts {
    let mut bytes = draw.codes(2 * shape[0] * blocks.row(shape[1]));
    let largest = f32::from(blocks.largest_scale());
    let codes = (1u32 << blocks.bits()) as f32;
    for (i, block) in bytes.chunks_exact_mut(blocks.bytes()).enumerate() {
        let word = draw.word(i);
        let size = 0.1f32.powf(1.0 + 2.0 * uniform(word));
        let scale = size / (largest * codes) * if word & 1 == 0 { 16.0 } else { -16.0 };
        let min = size / largest * uniform(word << 20) * if word & 2 == 0 { 8.0 } else { -8.0 };
        for (at, value) in blocks.floats().iter().zip([scale, min]) {
            block[*at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
        }
    }
    parts(blocks, shape, bytes)
}

/// Any codes; scales of groups in the upper half of what they can be, minima that put codes about zero.
pub(super) fn plausible(blocks: Blocks, shape: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> OwnedParts {
    let mut bytes = vec![0; shape[0] * blocks.row(shape[1])];
    fill(&mut bytes);
    let codes = (1u32 << blocks.bits()) as f32;
    let middle = 0.5 * (codes - 1.0);
    // Evenly spread codes are 0.29 of their range in size.
    let size = 1.0 / (0.29 * codes * 0.75 * f32::from(blocks.largest_scale()));
    let scale = f16::from_f32(size / (shape[1] as f32).sqrt());
    edit(blocks, &mut bytes, |apart| {
        let largest = blocks.largest_scale();
        for (scale, min) in apart.scales.iter_mut().zip(&mut apart.mins) {
            if largest > 1 {
                *scale = *scale & (largest / 2) | (largest / 2 + 1);
            }
            *min = if blocks.has_mins() { scale.cast_unsigned() } else { 0 };
        }
        (apart.scale, apart.min) = (scale, f16::from_f32(scale.to_f32() * middle));
    });
    parts(blocks, shape, bytes)
}

/// f16 of both signs: nothing, the least, subnormal, usual and the largest.
const FLOATS: [f32; 10] = [0.001, -0.0005, 0.0, 6e-8, -3e-5, 6.104e-5, -1.0, 1.0009766, 300.0, -65504.0];

/// Every code at every place of a group under every scale of groups, every minimum, and f16 of all sizes.
pub(super) fn every_code(blocks: Blocks, [n_factor, k_factor]: [usize; 2]) -> Edge {
    // Codes turn from row to row, scales with every group of a row, and both with each other: 64 or 256
    // scales over 8 or 16 groups of a block.
    let (codes, elements) = (1usize << blocks.bits(), blocks.elements());
    let scales = 2 * (usize::from(blocks.largest_scale().cast_unsigned()) + 1);
    let rows = codes.max(scales).next_multiple_of(n_factor);
    let k = (1..=k_factor).map(|i| i * elements).find(|k| k.is_multiple_of(k_factor)).unwrap_or(elements);
    let make = move || {
        let mut bytes = vec![0; rows * blocks.row(k)];
        let mut at = 0;
        edit(blocks, &mut bytes, |apart| {
            let (row, block) = (at / (k / elements), at % (k / elements));
            at += 1;
            for (i, code) in apart.codes.iter_mut().enumerate() {
                *code = ((i + row + block) % codes) as u8;
            }
            for (g, scale) in apart.scales.iter_mut().enumerate() {
                let turn = row * 5 + g * 13 + block * 29;
                match blocks {
                    Blocks::Q80 => {}
                    Blocks::Q6K => *scale = (turn as u8).cast_signed(),
                    Blocks::Q4K | Blocks::Q5K => {
                        *scale = (turn % 64) as i8;
                        apart.mins[g] = ((row * 3 + g * 7 + block) % 64) as u8;
                    }
                }
            }
            apart.scale = f16::from_f32(FLOATS[(row + block) % FLOATS.len()]);
            if blocks.has_mins() {
                apart.min = f16::from_f32(FLOATS[(row / FLOATS.len() + row + 3 * block) % FLOATS.len()]);
            }
        });
        Ok(parts(blocks, [rows, k], bytes))
    };
    let id = format!("every-code/{}", blocks.name());
    Edge { id, schema: encoding(blocks), shape: [rows, k], is_rare: false, parts: Box::new(make) }
}

/// Every code, and scales and minima at the ends of what they can be.
pub(super) fn edges(name: &str, factors: [usize; 2]) -> Vec<Edge> {
    let named = Blocks::ALL.into_iter().filter(|blocks| blocks.name() == name);
    named.map(|blocks| every_code(blocks, factors)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_code_and_scale_is_there() -> crate::Result<()> {
        for blocks in Blocks::ALL {
            let edge = every_code(blocks, [1, 1]);
            let weight = (edge.parts)()?;
            let all: Vec<_> =
                weight.bytes(Part::Codes).chunks(blocks.bytes()).map(|block| blocks.apart(block)).collect();
            let group = blocks.group();
            let place = |i: usize, a: &Apart| (a.codes[i], i % group);
            let codes: BTreeSet<_> =
                all.iter().flat_map(|a| (0..blocks.elements()).map(move |i| place(i, a))).collect();
            assert_eq!(codes.len(), group << blocks.bits(), "{blocks:?}");
            let groups = blocks.elements() / group;
            let scales: BTreeSet<_> = all.iter().flat_map(|a| a.scales[..groups].to_vec()).collect();
            let mins: BTreeSet<_> = all.iter().flat_map(|a| a.mins[..groups].to_vec()).collect();
            let (want_scales, want_mins) = match blocks {
                Blocks::Q80 => (1, 1),
                Blocks::Q6K => (256, 1),
                _ => (64, 64),
            };
            assert_eq!((scales.len(), mins.len()), (want_scales, want_mins), "{blocks:?}");
        }
        Ok(())
    }

    #[test]
    fn plausible_weights_are_of_their_size() -> crate::Result<()> {
        for blocks in Blocks::ALL {
            let mut at = 0;
            let mut fill = |bytes: &mut [u8]| {
                bytes.iter_mut().for_each(|b| {
                    at += 1;
                    *b = crate::formats::sample::mix(at) as u8;
                });
            };
            let weight = plausible(blocks, [64, 1024], &mut fill);
            let mut row = vec![0.0f32; 64 * 1024];
            blocks.decode(weight.bytes(Part::Codes), &mut row);
            let square = row.iter().map(|v| v * v).sum::<f32>() / 64.0;
            assert!((0.5..2.0).contains(&square), "{blocks:?}: {square}");
        }
        Ok(())
    }
}
