//! Weights made up in NVFP4.
use super::{BLOCK, Nvfp4, RowMajor, Swizzled128x4};
use crate::formats::sample::{Draw, Edge, uniform};
use crate::formats::swizzle;
use crate::{Convention, DType, GlobalScale, OwnedParts, Part, Q4Schema, Result};

pub(super) fn parts(format: &Nvfp4, [rows, k]: [usize; 2], codes: Vec<u8>, linear: &[u8]) -> OwnedParts {
    let blocks = k / BLOCK;
    let (scales, shape) = match format.scale_layout {
        RowMajor => (linear.to_vec(), vec![rows, blocks]),
        Swizzled128x4 => (padded(linear, rows, blocks), vec![swizzle::blocked_len(rows, blocks)]),
    };
    OwnedParts::default().with(Part::Codes, DType::U8, &[rows, k / 2], codes).with(
        Part::Scales,
        DType::F8E4M3,
        &shape,
        scales,
    )
}

/// Tiles of scales, NaN where they hold none: what the padding holds does not matter.
fn padded(linear: &[u8], rows: usize, blocks: usize) -> Vec<u8> {
    let mut tiles = vec![0x7f; swizzle::blocked_len(rows, blocks)];
    for (i, scale) in linear.iter().enumerate() {
        tiles[swizzle::offset(i / blocks, i % blocks, blocks)] = *scale;
    }
    tiles
}

/// Scales are every byte that is neither NaN nor negative; where sums have to fit f16, and no per-tensor
/// scale makes them small, only those up to 4.
pub(super) fn random(format: &Nvfp4, [rows, k]: [usize; 2], draw: &Draw) -> OwnedParts {
    let range = if draw.tame && format.global.is_none() { 0x49 } else { 0x7f };
    let linear: Vec<u8> = (0..rows * k / BLOCK).map(|i| (draw.word(i) >> 16) as u8 % range).collect();
    // Far apart between segments: taking the neighbour's must show.
    let value = (0.002 + uniform(draw.word(0)) / 100.0) * (1.0 + (draw.seed & 3) as f32);
    let global = format.global.and_then(|c| match c {
        Convention::Multiply => GlobalScale::multiply(value).ok(),
        Convention::Divide => GlobalScale::divide(1.0 / value).ok(),
    });
    parts(format, [rows, k], draw.codes(rows * k), &linear).with_global(global)
}

pub(super) fn plausible(
    format: &Nvfp4,
    [rows, k]: [usize; 2],
    fill: &mut dyn FnMut(&mut [u8]),
) -> Result<OwnedParts> {
    let (mut codes, mut scales) = (vec![0; rows * k / 2], vec![0; rows * k / BLOCK]);
    fill(&mut codes);
    fill(&mut scales);
    scales.iter_mut().for_each(|s| *s = 0x34 + (*s & 7));
    let value = 0.3 / (k as f32).sqrt();
    let global = match format.global {
        None => None,
        Some(Convention::Multiply) => Some(GlobalScale::multiply(value)?),
        Some(Convention::Divide) => Some(GlobalScale::divide(1.0 / value)?),
    };
    Ok(parts(format, [rows, k], codes, &scales).with_global(global))
}

/// Every code under each of the bytes `scales` at every place of a block: `[rows, k]`, at least as many rows
/// as scales and 256 columns.
fn every(format: &Nvfp4, global: Option<GlobalScale>, scales: &[u8], [rows, k]: [usize; 2]) -> OwnedParts {
    let blocks = k / BLOCK;
    let code = |block: usize, at: usize| ((at + block) % 16) as u8;
    let mut codes = Vec::with_capacity(rows * blocks * 8);
    let mut linear = Vec::with_capacity(rows * blocks);
    for r in 0..rows {
        for b in 0..blocks {
            // The blocks of a row have different scales, and each scale meets each rotation of the codes.
            linear.push(scales[(r + 11 * b) % scales.len()]);
            codes.extend((0..8).map(|j| code(b, 2 * j) | code(b, 2 * j + 1) << 4));
        }
    }
    parts(format, [rows, k], codes, &linear).with_global(global)
}

/// Per-tensor scales at the ends of f32: results are subnormal, or nearly overflow, or are rounded twice.
const GLOBALS: [(&str, Option<(Convention, f32)>); 10] = [
    ("single", None),
    ("multiply-one", Some((Convention::Multiply, 1.0))),
    ("multiply-third", Some((Convention::Multiply, 1.0 / 3.0))),
    ("multiply-tiny", Some((Convention::Multiply, 1e-35))),
    ("multiply-subnormal", Some((Convention::Multiply, 1e-40))),
    ("multiply-huge", Some((Convention::Multiply, 1e34))),
    ("divide-one", Some((Convention::Divide, 1.0))),
    ("divide-third", Some((Convention::Divide, 1.0 / 3.0))),
    ("divide-huge", Some((Convention::Divide, 3e38))),
    ("divide-tiny", Some((Convention::Divide, 1e-34))),
];

/// Every scale that is written under each of the per-tensor scales, and those of the other sign.
pub(super) fn edges(_: &str, factors: [usize; 2]) -> Vec<Edge> {
    let mut all = Vec::new();
    for (layout, scale_layout) in [("row-major", RowMajor), ("swizzled", Swizzled128x4)] {
        for (name, global) in GLOBALS {
            let format = Nvfp4 { scale_layout, global: global.map(|g| g.0) };
            let id = format!("every-code/{layout}/{name}");
            all.push(edge(id, format, global, 0..0x7f, factors));
        }
        // A sign on a scale is legal in the encoding and nowhere written: serve it rightly or refuse it.
        let format = Nvfp4 { scale_layout, global: None };
        let signed = edge(format!("signed-scales/{layout}"), format, None, 0x80..0xff, factors);
        all.push(Edge { is_rare: true, ..signed });
    }
    all
}

/// In as many rows and columns as the factors want.
pub(super) fn edge(
    id: String,
    format: Nvfp4,
    global: Option<(Convention, f32)>,
    scales: std::ops::Range<u8>,
    [n_factor, k_factor]: [usize; 2],
) -> Edge {
    let shape = [scales.len().next_multiple_of(n_factor), 256.max(k_factor)];
    let make = move || {
        let global = global.map(|(c, g)| GlobalScale::new(c, g)).transpose()?;
        Ok(every(&format, global, &scales.clone().collect::<Vec<_>>(), shape))
    };
    Edge { id, schema: Q4Schema::Nvfp4(format), shape, is_rare: false, parts: Box::new(make) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_code_meets_every_scale_at_every_place() -> Result<()> {
        let format = Nvfp4 { scale_layout: RowMajor, global: None };
        let edge = edge(String::new(), format, None, 0..0x7f, [1, 1]);
        let ([rows, k], w) = (edge.shape, (edge.parts)()?);
        let (codes, scales) = (w.bytes(Part::Codes), w.bytes(Part::Scales));
        let seen: BTreeSet<(u8, u8, usize)> =
            (0..rows * k).map(|i| (codes[i / 2] >> (4 * (i % 2)) & 15, scales[i / 16], i % 16)).collect();
        assert_eq!(seen.len(), 16 * 127 * 16);
        Ok(())
    }
}
