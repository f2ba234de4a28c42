//! Weights the suite makes for itself: seeded ones, and ones that hold every code under every scale.
//!
//! They are owned, so that a case can destroy the bytes once a backend has prepared them.
use crate::guarded::{Memory, bytes_of};
use q4_core::formats::{nf4, swizzle};
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    Absmax, Convention, DType, GlobalScale, NibbleOrder, Q4Schema, Q4Weight, Result, ScaleLayout, Segment,
    SegmentData, TensorView,
};
use std::ops::Range;

/// A weight of one or more segments.
#[derive(Clone)]
pub struct Stored {
    /// Encoding.
    pub schema: Q4Schema,
    /// In features.
    pub k: usize,
    pub(crate) parts: Vec<Part>,
}

#[derive(Clone)]
pub(crate) struct Part {
    pub rows: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub absmax: Vec<f32>,
    pub nested: Option<Nested>,
    pub global: Option<GlobalScale>,
    pub dense: Vec<u8>,
}

#[derive(Clone)]
pub(crate) struct Nested {
    pub codes: Vec<u8>,
    pub absmax: Vec<f32>,
    pub offset: f32,
    pub map: Vec<f32>,
    /// Codes per second scale.
    pub block: usize,
}

impl Nested {
    fn new(codes: Vec<u8>, absmax: Vec<f32>, offset: f32) -> Self {
        Self { codes, absmax, offset, map: nf4::dynamic_map().to_vec(), block: 256 }
    }
}

impl Stored {
    /// Random codes and scales, segment by segment. NVFP4 scales are every byte that is neither NaN nor
    /// negative; with `tame`, and where no per-tensor scale makes them small, only those whose sums fit
    /// f16.
    pub fn random(schema: Q4Schema, rows: &[usize], k: usize, tame: bool, seed: u64) -> Self {
        let parts = rows.iter().enumerate();
        let parts =
            parts.map(|(i, &rows)| Part::random(schema, rows, k, tame, seed << 8 | i as u64)).collect();
        Self { schema, k, parts }
    }

    /// Every NVFP4 code under each of the bytes `scales` at every place of a block: `[rows, k]`, at least as
    /// many rows as scales and 256 columns.
    pub fn every_nvfp4(
        layout: ScaleLayout,
        global: Option<GlobalScale>,
        scales: &[u8],
        [rows, k]: [usize; 2],
    ) -> Self {
        let blocks = k / 16;
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
        let stored = match layout {
            ScaleLayout::RowMajor => linear,
            ScaleLayout::Swizzled128x4 => padded(&linear, rows, blocks),
        };
        let schema = Q4Schema::Nvfp4 { scale_layout: layout, global: global.map(GlobalScale::convention) };
        Self {
            schema,
            k: 16 * blocks,
            parts: vec![Part { codes, scales: stored, global, ..Part::empty(rows) }],
        }
    }

    /// Every NF4 code, both nibbles, under absmax from subnormal to huge; `[rows, k]`, one row for each of
    /// several rotations of the codes.
    pub fn every_nf4(order: NibbleOrder, block: u32, nested: bool, rows: usize, k: usize) -> Self {
        const EDGES: [f32; 10] =
            [0.0, 1e-45, 1e-40, f32::MIN_POSITIVE, 1e-20, 0.1, 1.0, 1.0 + f32::EPSILON, 3.3e20, f32::MAX];
        let elements = rows * k;
        let codes = (0..elements.div_ceil(2))
            .map(|i| (i as u8).wrapping_mul(0x11).wrapping_add((i / 16) as u8))
            .collect();
        let blocks = elements.div_ceil(block as usize);
        let mut part = Part { codes, ..Part::empty(rows) };
        if nested {
            // Every 8-bit code of the map occurs, each under several second scales.
            let count = blocks.div_ceil(256);
            part.nested = Some(Nested::new(
                (0..blocks).map(|i| (i * 7 + 3) as u8).collect(),
                (0..count).map(|i| 0.013 * (i + 1) as f32).collect(),
                0.37,
            ));
        } else {
            part.absmax = (0..blocks).map(|i| EDGES[i % EDGES.len()]).collect();
        }
        let schema = Q4Schema::Nf4 { nibble_order: order, block, nested: nested.then_some(256) };
        Self { schema, k, parts: vec![part] }
    }

    /// Per-tensor scales from 1/100 000 to some units, each its own.
    pub(crate) fn spread_globals(&mut self, seed: u64) {
        for (i, part) in self.parts.iter_mut().enumerate() {
            let value = 2f32.powi(-16 + (mix(seed ^ i as u64) % 18) as i32) * (1.0 + uniform(mix(seed)));
            part.global = part.global.and_then(|g| match g.convention() {
                Convention::Multiply => GlobalScale::multiply(value).ok(),
                Convention::Divide => GlobalScale::divide(1.0 / value).ok(),
            });
        }
    }

    /// The largest code of either sign everywhere, but for the last row, which is zero, as a pruned one is.
    pub(crate) fn loudest(&mut self) {
        let is_nf4 = matches!(self.schema, Q4Schema::Nf4 { .. });
        let nibble = |c: u8| match is_nf4 {
            true if c & 8 == 0 => 0,
            true => 15,
            false => c | 7,
        };
        for code in self.parts.iter_mut().flat_map(|p| &mut p.codes) {
            *code = nibble(*code & 15) | nibble(*code >> 4) << 4;
        }
        if let Some(part) = self.parts.last_mut() {
            let from = part.codes.len().saturating_sub(self.k / 2);
            part.codes[from..].fill(if is_nf4 { 0x77 } else { 0 });
        }
    }

    /// Every absmax below zero.
    pub(crate) fn negate_absmax(&mut self) {
        self.parts.iter_mut().flat_map(|p| &mut p.absmax).for_each(|a| *a = -*a);
    }

    /// Second scales in blocks of `block` codes, under a map that is nobody's, with a mean below zero.
    pub(crate) fn nest_otherwise(&mut self, block: usize) {
        if let Q4Schema::Nf4 { nested: Some(of), .. } = &mut self.schema {
            *of = block as u32;
        }
        for nested in self.parts.iter_mut().filter_map(|p| p.nested.as_mut()) {
            nested.absmax =
                (0..nested.codes.len().div_ceil(block)).map(|i| 0.02 * (1 + i % 17) as f32).collect();
            nested.map.iter_mut().enumerate().for_each(|(i, v)| *v = (i as f32 - 100.0) / 77.0);
            (nested.offset, nested.block) = (-0.043, block);
        }
    }

    /// Out features of the segments.
    pub fn rows(&self) -> Vec<usize> {
        self.parts.iter().map(|p| p.rows).collect()
    }
    /// Out features in all.
    pub fn n(&self) -> usize {
        self.parts.iter().map(|p| p.rows).sum()
    }

    /// Lends the weight to `body`.
    pub fn lend<R>(&self, body: impl FnOnce(&Q4Weight<'_>) -> Result<R>) -> Result<R> {
        let parts = self.parts.iter().map(|p| (p, p.fields()));
        lend(self.schema, self.k, parts, body)
    }

    /// The same with every array in read-only memory of its own, its last byte before a page that nobody may
    /// touch; bytes `shift` earlier, for only floats have an alignment.
    pub(crate) fn placed(self, shift: usize) -> Placed {
        let place = |(field, bytes): (usize, &[u8])| {
            let shift = if FLOATS.contains(&field) { 0 } else { shift };
            let mut memory = Memory::before_a_hole((bytes.len() + shift).max(1), 0);
            let at = memory.len() - bytes.len() - shift;
            memory[at..][..bytes.len()].copy_from_slice(bytes);
            memory.seal();
            (memory, at..at + bytes.len())
        };
        let each = |p: &Part| -> Fields<(Memory, Range<usize>)> {
            let fields = p.fields();
            std::array::from_fn(|i| place((i, fields[i])))
        };
        let memory = self.parts.iter().map(each).collect();
        Placed { stored: self, memory }
    }

    /// Takes the bytes of another weight of the same shape and encoding, where they are.
    pub(crate) fn overwrite(&mut self, other: &Self) {
        for (own, other) in self.parts.iter_mut().zip(&other.parts) {
            own.codes.copy_from_slice(&other.codes);
            own.scales.copy_from_slice(&other.scales);
            own.absmax.copy_from_slice(&other.absmax);
            own.dense.copy_from_slice(&other.dense);
            own.global = other.global;
            if let Some((own, other)) = own.nested.as_mut().zip(other.nested.as_ref()) {
                own.codes.copy_from_slice(&other.codes);
                own.absmax.copy_from_slice(&other.absmax);
                own.offset = other.offset;
            }
        }
    }

    /// Overwrites every byte: what was prepared before must not care.
    pub fn destroy(&mut self) {
        for p in &mut self.parts {
            p.codes.fill(0x55);
            p.scales.fill(0x01);
            p.absmax.fill(1e30);
            p.dense.fill(0x3c);
            if let Some(n) = &mut p.nested {
                n.codes.fill(1);
                n.absmax.fill(1e30);
            }
        }
    }
}

/// A weight whose bytes end where memory ends.
pub(crate) struct Placed {
    stored: Stored,
    memory: Vec<Fields<(Memory, Range<usize>)>>,
}

impl Placed {
    /// Lends the weight to `body`.
    pub fn lend<R>(&self, body: impl FnOnce(&Q4Weight<'_>) -> Result<R>) -> Result<R> {
        let fields = self.memory.iter().map(|f| f.each_ref().map(|m| &m.0[m.1.clone()]));
        lend(self.stored.schema, self.stored.k, self.stored.parts.iter().zip(fields), body)
    }
}

/// The arrays of a part: codes, scales, absmax, nested codes, nested absmax, dense.
type Fields<T> = [T; 6];
/// Those that hold floats.
const FLOATS: [usize; 3] = [2, 4, 5];

fn lend<'a, R>(
    schema: Q4Schema,
    k: usize,
    parts: impl Iterator<Item = (&'a Part, Fields<&'a [u8]>)>,
    body: impl FnOnce(&Q4Weight<'_>) -> Result<R>,
) -> Result<R> {
    let segments = parts.map(|(p, fields)| p.segment(schema, k, fields)).collect::<Result<Vec<_>>>()?;
    body(&Q4Weight { schema, k, segments: &segments })
}

impl Part {
    fn fields(&self) -> Fields<&[u8]> {
        let nested = self.nested.as_ref();
        [
            &self.codes,
            &self.scales,
            bytemuck::cast_slice(&self.absmax),
            nested.map_or(&[], |n| &n.codes),
            nested.map_or(&[], |n| bytemuck::cast_slice(&n.absmax)),
            &self.dense,
        ]
    }

    fn empty(rows: usize) -> Self {
        Self {
            rows,
            codes: Vec::new(),
            scales: Vec::new(),
            absmax: Vec::new(),
            nested: None,
            global: None,
            dense: Vec::new(),
        }
    }

    fn random(schema: Q4Schema, rows: usize, k: usize, tame: bool, seed: u64) -> Self {
        let word = |i: usize| mix(seed.wrapping_mul(0x1_0000_01b3) ^ (i as u64) << 20);
        let mut out = Self::empty(rows);
        match schema {
            Q4Schema::Nvfp4 { scale_layout, global } => {
                let range = if tame && global.is_none() { 0x49 } else { 0x7f };
                let linear: Vec<u8> = (0..rows * k / 16).map(|i| (word(i) >> 16) as u8 % range).collect();
                out.scales = match scale_layout {
                    ScaleLayout::RowMajor => linear,
                    ScaleLayout::Swizzled128x4 => padded(&linear, rows, k / 16),
                };
                // Far apart between segments: taking the neighbour's must show.
                let value = (0.002 + uniform(word(0)) / 100.0) * (1.0 + (seed & 3) as f32);
                out.global = global.and_then(|c| match c {
                    Convention::Multiply => GlobalScale::multiply(value).ok(),
                    Convention::Divide => GlobalScale::divide(1.0 / value).ok(),
                });
            }
            Q4Schema::Nf4 { block, nested, .. } => {
                let blocks = (rows * k).div_ceil(block as usize);
                out.absmax = (0..blocks).map(|i| 0.01 + uniform(word(i))).collect();
                out.nested = nested.map(|_| {
                    let (codes, absmax, offset) = nf4::nest(&out.absmax);
                    Nested::new(codes, absmax, offset)
                });
            }
            Q4Schema::Dense { dtype } => {
                // Row by row: a whole model's product in f32 is more memory than its bytes.
                let mut row = vec![0.0; k];
                out.dense.reserve_exact(rows * k * dtype.size());
                for r in 0..rows {
                    row.iter_mut().enumerate().for_each(|(i, v)| *v = uniform(word(r * k + i)) - 0.5);
                    out.dense.extend(bytes_of(&IoBuffer::new(dtype, &row)));
                }
                return out;
            }
            _ => {}
        }
        let bytes = (rows * k).div_ceil(2);
        out.codes = (0..bytes.div_ceil(8)).flat_map(|i| word(i).to_le_bytes()).take(bytes).collect();
        out
    }

    fn segment<'a>(&'a self, schema: Q4Schema, k: usize, fields: Fields<&'a [u8]>) -> Result<Segment<'a>> {
        let [codes, scales, absmax, nested_codes, nested_absmax, dense] = fields;
        let codes = TensorView::of(codes, &[codes.len()])?;
        let f32s = |bytes: &'a [u8]| TensorView::of_bytes(bytes, DType::F32, &[bytes.len() / 4]);
        let data = match schema {
            Q4Schema::Nvfp4 { .. } => SegmentData::Nvfp4 {
                codes,
                scales: TensorView::of_bytes(scales, DType::F8E4M3, &[scales.len()])?,
                global: self.global,
            },
            Q4Schema::Nf4 { .. } => SegmentData::Nf4 {
                codes,
                absmax: match &self.nested {
                    None => Absmax::Plain(f32s(absmax)?),
                    Some(n) => Absmax::Nested {
                        codes: TensorView::of(nested_codes, &[nested_codes.len()])?,
                        map: TensorView::of(&n.map, &[256])?,
                        absmax: f32s(nested_absmax)?,
                        offset: n.offset,
                        block: n.block,
                    },
                },
            },
            Q4Schema::Dense { dtype } => {
                SegmentData::Dense { weight: TensorView::of_bytes(dense, dtype, &[self.rows, k])? }
            }
            _ => SegmentData::Dense { weight: TensorView::of_bytes(dense, DType::F32, &[self.rows, k])? },
        };
        Ok(Segment { rows: self.rows, data })
    }
}

/// Tiles of scales, NaN where they hold none: what the padding holds does not matter.
fn padded(linear: &[u8], rows: usize, blocks: usize) -> Vec<u8> {
    let mut tiles = vec![0x7f; swizzle::blocked_len(rows, blocks)];
    for (i, scale) in linear.iter().enumerate() {
        tiles[swizzle::offset(i / blocks, i % blocks, blocks)] = *scale;
    }
    tiles
}

/// Counter-based: the value of an index never depends on how many were drawn before.
pub(crate) fn mix(i: u64) -> u64 {
    let mut z = i.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// `[0, 1)` from the upper bits.
pub(crate) fn uniform(word: u64) -> f32 {
    (word >> 40) as f32 / (1u32 << 24) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_code_meets_every_scale_at_every_place() -> Result<()> {
        let scales: Vec<u8> = (0..0x7f).collect();
        let w = Stored::every_nvfp4(ScaleLayout::RowMajor, None, &scales, [127, 256]);
        let part = &w.parts[0];
        let seen: BTreeSet<(u8, u8, usize)> = (0..part.rows * w.k)
            .map(|i| (part.codes[i / 2] >> (4 * (i % 2)) & 15, part.scales[i / 16], i % 16))
            .collect();
        assert_eq!(seen.len(), 16 * 127 * 16);
        w.lend(|w| w.validate())
    }

    #[test]
    fn every_nf4_code_occurs_in_both_nibbles() -> Result<()> {
        for (order, block, nested) in [
            (NibbleOrder::HighFirst, 32, false),
            (NibbleOrder::LowFirst, 4096, true),
            (NibbleOrder::HighFirst, 64, true),
        ] {
            let w = Stored::every_nf4(order, block, nested, 17, 512);
            let low: BTreeSet<u8> = w.parts[0].codes.iter().map(|b| b & 15).collect();
            let high: BTreeSet<u8> = w.parts[0].codes.iter().map(|b| b >> 4).collect();
            assert_eq!((low.len(), high.len()), (16, 16));
            w.lend(|w| w.validate())?;
        }
        Ok(())
    }

    #[test]
    fn a_seed_is_all_that_makes_a_weight() {
        let schema =
            Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Multiply) };
        let make = |seed| Stored::random(schema, &[3, 5], 64, false, seed);
        assert_eq!(make(1).parts[1].codes, make(1).parts[1].codes);
        assert_ne!(make(1).parts[1].codes, make(2).parts[1].codes);
        assert_ne!(make(1).parts[0].global, make(1).parts[1].global);
    }
}
