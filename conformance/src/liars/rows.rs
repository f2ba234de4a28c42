//! Decoded rows of the honest backend. What is right for [`STEP`] columns is asked once for them: the suite
//! decodes some hundred millions.
use super::parts::{Block, Element, Element8, Kept, RowAt, Segment};
use q4_core::formats::ggml::{Blocks, Ggml};
use q4_core::formats::int4::{self, Zeros};
use q4_core::formats::mxfp4;
use q4_core::{Fp8, Int4, Nf4, NibbleOrder, Nvfp4, Q4Schema, ScaleLayout};

/// Columns that have their scale in common in every format but FP8 in small tiles.
const STEP: usize = 16;

impl Kept {
    /// A dense copy.
    pub fn dense(&self) -> Vec<f32> {
        let (n, k) = (self.info.n, self.info.k);
        let mut copy = vec![0.0; n * k];
        for (row, out) in copy.chunks_mut(k).enumerate() {
            self.decode(row, out);
        }
        copy
    }

    /// Row `row` of all segments.
    pub fn decode(&self, row: usize, out: &mut [f32]) -> RowAt {
        let (mut at, mut segment) = (row, 0);
        while at >= self.segments[segment].rows {
            at -= self.segments[segment].rows;
            segment += 1;
        }
        let s = &self.segments[segment];
        match self.schema {
            Q4Schema::Ggml(Ggml { blocks }) => self.blocks(blocks, s, at, out),
            Q4Schema::Fp8(format) => self.bytes(format, s, at, out),
            _ => self.nibbles(s, at, out),
        }
        let place = RowAt { row, n: self.info.n, segment, schema: self.schema, global: s.global };
        (self.parts.row)(out, place);
        place
    }

    /// A row of blocks of GGML.
    fn blocks(&self, blocks: Blocks, s: &Segment, row: usize, out: &mut [f32]) {
        let (p, bytes) = (&self.parts, blocks.row(self.info.k));
        let row = &s.codes[row * bytes..][..bytes];
        let all: Vec<_> = row.chunks_exact(blocks.bytes()).map(|block| (p.apart)(blocks, block)).collect();
        for (b, out) in out.chunks_exact_mut(blocks.elements()).enumerate() {
            let (own, floats) = (&all[b], &all[(p.floats_of)(b, all.len())]);
            for (i, out) in out.iter_mut().enumerate() {
                let group = (p.ggml_group)(i, blocks.group());
                *out = (p.ggml)(Element {
                    blocks,
                    code: own.codes[i],
                    zero: blocks.zero(),
                    scale: own.scales[group],
                    min: own.mins[group],
                    of_scales: floats.scale.to_f32(),
                    of_mins: floats.min.to_f32(),
                });
            }
        }
    }

    /// A row of FP8.
    fn bytes(&self, format: Fp8, s: &Segment, row: usize, out: &mut [f32]) {
        let (k, p) = (self.info.k, &self.parts);
        let step = if (format.tile[1] as usize).is_multiple_of(STEP) { STEP } else { 1 };
        let codes = s.codes[row * k..][..k].chunks(step);
        for (i, (out, codes)) in out.chunks_mut(step).zip(codes).enumerate() {
            let e = Element8 { format, row, column: i * step, rows: s.rows, k };
            let scale = s.absmax[(p.tile_of)(e).min(s.absmax.len() - 1)];
            for (out, code) in out.iter_mut().zip(codes) {
                *out = (p.fp8_value)(s.values[usize::from(*code)], scale);
            }
        }
    }

    /// A row of codes of four bits.
    fn nibbles(&self, s: &Segment, row: usize, out: &mut [f32]) {
        let (k, p) = (self.info.k, &self.parts);
        let low_first = match self.schema {
            Q4Schema::Nf4(Nf4 { nibble_order, .. }) => nibble_order == NibbleOrder::LowFirst,
            _ => true,
        };
        let is_tiled =
            matches!(self.schema, Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, .. }));
        let (mut codes, mut absmax, mut values, mut of) = ([0; STEP], 0.0, [0.0; 16], usize::MAX);
        for (step, out) in out.chunks_mut(STEP).enumerate() {
            let (i, codes) = (step * STEP, &mut codes[..out.len()]);
            let flat = row * k + i;
            (p.nibbles)(&s.codes, flat, low_first, codes);
            match self.schema {
                Q4Schema::Nf4(Nf4 { block, .. }) => {
                    for (flat, (out, code)) in (flat..).zip(out.iter_mut().zip(&*codes)) {
                        // Blocks go on from row to row.
                        if flat % STEP == 0 || k % STEP != 0 {
                            let block = (p.absmax_at)(flat, block as usize, k).min(s.absmax.len() - 1);
                            absmax = (p.absmax_used)(s.absmax[block]);
                        }
                        *out = s.values[usize::from(*code & 15)] * absmax;
                    }
                }
                Q4Schema::Int4(Int4 { group, zeros, .. }) => {
                    let (group, groups) = ((p.group_at)(i, group as usize), k / group as usize);
                    if of != group {
                        let b = Block { row, block: group, rows: s.rows, blocks: groups, is_tiled };
                        let scale = s.absmax[(row * groups + group).min(s.absmax.len() - 1)];
                        let zero = |zeros: &[u8]| zeros[(p.zero_at)(b).min(zeros.len() - 1)];
                        values = std::array::from_fn(|code| match zeros {
                            Zeros::Middle => (p.int4)(code as u8, int4::ZERO, scale),
                            Zeros::Points => (p.int4)(code as u8, zero(&s.zeros), scale),
                            Zeros::Biases => {
                                let bias = s.biases[(p.zero_at)(b).min(s.biases.len() - 1)];
                                (p.affine)(code as u8, scale, bias)
                            }
                        });
                        of = group;
                    }
                    out.iter_mut()
                        .zip(&*codes)
                        .for_each(|(out, code)| *out = values[usize::from(*code & 15)]);
                }
                _ => {
                    let at = match self.schema {
                        Q4Schema::Mxfp4(_) => row * (k / mxfp4::BLOCK) + (p.power_at)(i),
                        _ => {
                            (p.scale_at)(Block { row, block: step, rows: s.rows, blocks: k / STEP, is_tiled })
                        }
                    };
                    let scale = usize::from(s.scales[at.min(s.scales.len() - 1)]);
                    let values = &s.values[scale * 16..][..16];
                    out.iter_mut()
                        .zip(&*codes)
                        .for_each(|(out, code)| *out = values[usize::from(*code & 15)]);
                }
            }
        }
    }
}
