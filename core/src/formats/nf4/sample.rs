//! Weights made up in NF4.
use super::{HighFirst, LowFirst, NESTED_BLOCK, Nf4, dynamic_map, nest};
use crate::formats::sample::{Draw, Edge, uniform};
use crate::{DType, OwnedParts, Part, Q4Schema, Result};

pub(super) fn with_codes(codes: Vec<u8>) -> OwnedParts {
    OwnedParts::default().with(Part::Codes, DType::U8, &[codes.len()], codes)
}

pub(super) fn with_nested(
    parts: OwnedParts,
    codes: Vec<u8>,
    absmax: &[f32],
    map: &[f32],
    offset: f32,
) -> OwnedParts {
    parts
        .with_offset(offset)
        .with(Part::Scales, DType::U8, &[codes.len()], codes)
        .with_f32(Part::Map, map)
        .with_f32(Part::SecondScales, absmax)
}

pub(super) fn random(format: &Nf4, [rows, k]: [usize; 2], draw: &Draw) -> OwnedParts {
    let blocks = (rows * k).div_ceil(format.block as usize);
    let absmax: Vec<f32> = (0..blocks).map(|i| 0.01 + uniform(draw.word(i))).collect();
    let parts = with_codes(draw.codes(rows * k));
    match format.nested {
        None => parts.with_f32(Part::Scales, &absmax),
        Some(_) => {
            let (codes, absmax, offset) = nest(&absmax);
            with_nested(parts, codes, &absmax, dynamic_map(), offset)
        }
    }
}

pub(super) fn plausible(
    format: &Nf4,
    [rows, k]: [usize; 2],
    fill: &mut dyn FnMut(&mut [u8]),
) -> Result<OwnedParts> {
    let mut codes = vec![0; (rows * k).div_ceil(2)];
    fill(&mut codes);
    let absmax = vec![1.5 / (k as f32).sqrt(); (rows * k).div_ceil(format.block as usize)];
    let parts = with_codes(codes);
    Ok(match format.nested {
        None => parts.with_f32(Part::Scales, &absmax),
        Some(_) => {
            let (codes, absmax, offset) = nest(&absmax);
            with_nested(parts, codes, &absmax, dynamic_map(), offset)
        }
    })
}

/// Every code, both nibbles, under absmax from subnormal to huge; `[rows, k]`, one row for each of several
/// rotations of the codes.
fn every(format: &Nf4, [rows, k]: [usize; 2]) -> OwnedParts {
    const EDGES: [f32; 10] =
        [0.0, 1e-45, 1e-40, f32::MIN_POSITIVE, 1e-20, 0.1, 1.0, 1.0 + f32::EPSILON, 3.3e20, f32::MAX];
    let elements = rows * k;
    let codes = (0..elements.div_ceil(2))
        .map(|i| (i as u8).wrapping_mul(0x11).wrapping_add((i / 16) as u8))
        .collect();
    let (parts, blocks) = (with_codes(codes), elements.div_ceil(format.block as usize));
    if format.nested.is_none() {
        let absmax: Vec<f32> = (0..blocks).map(|i| EDGES[i % EDGES.len()]).collect();
        return parts.with_f32(Part::Scales, &absmax);
    }
    // Every 8-bit code of the map occurs, each under several second scales.
    let codes = (0..blocks).map(|i| (i * 7 + 3) as u8).collect();
    let absmax: Vec<f32> = (0..blocks.div_ceil(NESTED_BLOCK)).map(|i| 0.013 * (i + 1) as f32).collect();
    with_nested(parts, codes, &absmax, dynamic_map(), 0.37)
}

/// Second scales in blocks of `block` codes, under a map that is nobody's, with a mean below zero.
fn nested_otherwise(format: &Nf4, shape: [usize; 2], block: usize) -> OwnedParts {
    let parts = every(format, shape);
    let codes = parts.bytes(Part::Scales).to_vec();
    let absmax: Vec<f32> = (0..codes.len().div_ceil(block)).map(|i| 0.02 * (1 + i % 17) as f32).collect();
    let map: Vec<f32> = (0..256).map(|i| (i as f32 - 100.0) / 77.0).collect();
    with_nested(parts, codes, &absmax, &map, -0.043)
}

/// Blocks that checkpoints have.
const BLOCKS: [u32; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];

/// The same encoding in every block and order.
pub(super) fn blocks(nested: Option<u32>) -> Vec<Q4Schema> {
    let each = |nibble_order| BLOCKS.map(move |block| super::encoding(nibble_order, block, nested));
    [HighFirst, LowFirst].into_iter().flat_map(each).collect()
}

/// Every block, and scales that nobody writes: right, or refused.
pub(super) fn edges(name: &str, [n_factor, k_factor]: [usize; 2]) -> Vec<Edge> {
    let is_nested = name == "nf4-dq";
    let nested = is_nested.then_some(NESTED_BLOCK as u32);
    let (n, k) = (24usize.next_multiple_of(n_factor), 512.max(k_factor));
    let mut all = Vec::new();
    for (order, nibble_order) in [("high", HighFirst), ("low", LowFirst)] {
        let edge = |id: String, block: u32, shape, make: fn(&Nf4, [usize; 2]) -> OwnedParts| {
            let format = Nf4 { nibble_order, block, nested };
            let parts = Box::new(move || Ok(make(&format, shape)));
            Edge { id, schema: Q4Schema::Nf4(format), shape, is_rare: false, parts }
        };
        for block in BLOCKS {
            all.push(edge(format!("every-code/{order}/{block}"), block, [n, k], every));
        }
        if !is_nested {
            let signed = edge(format!("signed-scales/{order}"), 64, [n, k], |format, shape| {
                let parts = every(format, shape);
                let negative: Vec<f32> = parts.to_f32(Part::Scales).iter().map(|a| -a).collect();
                parts.with_f32(Part::Scales, &negative)
            });
            all.push(Edge { is_rare: true, ..signed });
            continue;
        }
        for second in [64, 256, 1024] {
            let (id, shape) = (format!("nested-otherwise/{order}/{second}"), [n, 4 * k]);
            let format = Nf4 { nibble_order, block: 64, nested: Some(second) };
            let make = move || {
                let usual = Nf4 { nested, ..format };
                Ok(nested_otherwise(&usual, shape, second as usize))
            };
            all.push(Edge { id, schema: Q4Schema::Nf4(format), shape, is_rare: true, parts: Box::new(make) });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_code_occurs_in_both_nibbles() {
        for (nibble_order, block, nested) in
            [(HighFirst, 32, None), (LowFirst, 4096, Some(256)), (HighFirst, 64, Some(256))]
        {
            let w = every(&Nf4 { nibble_order, block, nested }, [17, 512]);
            let low: BTreeSet<u8> = w.bytes(Part::Codes).iter().map(|b| b & 15).collect();
            let high: BTreeSet<u8> = w.bytes(Part::Codes).iter().map(|b| b >> 4).collect();
            assert_eq!((low.len(), high.len()), (16, 16));
        }
    }
}
