//! Weights the suite makes for itself: seeded ones, and those at the edges of a format.
//!
//! They are owned, so that a case can destroy the bytes once a backend has prepared them.
use crate::guarded::Memory;
use q4_core::formats::sample::{Draw, Edge};
pub(crate) use q4_core::formats::sample::{mix, uniform};
use q4_core::{
    Convention, DType, GlobalScale, OwnedParts, Part, Q4Schema, Q4Weight, Result, Segment, SegmentData,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// A weight of one or more segments.
#[derive(Clone)]
pub struct Stored {
    /// Encoding.
    pub schema: Q4Schema,
    /// In features.
    pub k: usize,
    pub(crate) parts: Vec<StoredSegment>,
}

/// One segment.
#[derive(Clone)]
pub(crate) struct StoredSegment {
    pub rows: usize,
    pub data: OwnedParts,
}

impl Stored {
    /// Random codes and scales, segment by segment; with `tame`, and where no per-tensor scale makes them
    /// small, only those whose sums fit f16.
    pub fn random(schema: Q4Schema, rows: &[usize], k: usize, tame: bool, seed: u64) -> Self {
        let part = |(i, &rows): (usize, &usize)| {
            let draw = Draw { seed: seed << 8 | i as u64, tame };
            StoredSegment { rows, data: schema.sample([rows, k], &draw) }
        };
        Self { schema, k, parts: rows.iter().enumerate().map(part).collect() }
    }

    /// The weight at an edge of a format.
    pub fn of(edge: &Edge) -> Result<Self> {
        let [rows, k] = edge.shape;
        Ok(Self { schema: edge.schema, k, parts: vec![StoredSegment { rows, data: (edge.parts)()? }] })
    }

    /// Per-tensor scales from 1/100 000 to some units, each its own.
    pub(crate) fn spread_globals(&mut self, seed: u64) {
        for (i, part) in self.parts.iter_mut().enumerate() {
            let value = 2f32.powi(-16 + (mix(seed ^ i as u64) % 18) as i32) * (1.0 + uniform(mix(seed)));
            part.data.global = part.data.global.and_then(|g| match g.convention() {
                Convention::Multiply => GlobalScale::multiply(value).ok(),
                Convention::Divide => GlobalScale::divide(1.0 / value).ok(),
            });
        }
    }

    /// The largest code of either sign everywhere, but for the last row, which is zero, as a pruned one is.
    pub(crate) fn loudest(&mut self) {
        if !self.schema.is_packed() {
            return;
        }
        let schema = self.schema;
        self.parts.iter_mut().for_each(|p| schema.loudest(&mut p.data));
        if let Some(part) = self.parts.last_mut() {
            schema.silence(&mut part.data, part.rows - 1, self.k);
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
        lend(self, self.parts.iter().map(|p| p.data.lend()), body)
    }

    /// The same with every part in read-only memory of its own, its last byte before a page that nobody may
    /// touch; bytes `shift` earlier, for only floats have an alignment.
    pub(crate) fn placed(self, shift: usize) -> Placed {
        let place = |data: &OwnedParts, part: Part| {
            let bytes = data.bytes(part);
            let is_float = data.dtype(part).is_some_and(DType::is_io);
            let shift = if is_float { 0 } else { shift };
            let mut memory = Memory::before_a_hole((bytes.len() + shift).max(1), 0);
            let at = memory.len() - bytes.len() - shift;
            memory[at..][..bytes.len()].copy_from_slice(bytes);
            memory.seal();
            (memory, at..at + bytes.len())
        };
        let each = |p: &StoredSegment| -> BTreeMap<Part, (Memory, Range<usize>)> {
            Part::ALL.map(|part| (part, place(&p.data, part))).into_iter().collect()
        };
        let memory = self.parts.iter().map(each).collect();
        Placed { stored: self, memory }
    }

    /// Takes the bytes of another weight of the same shape and encoding, where they are.
    pub(crate) fn overwrite(&mut self, other: &Self) {
        self.parts.iter_mut().zip(&other.parts).for_each(|(own, other)| own.data.overwrite(&other.data));
    }

    /// Overwrites every byte: what was prepared before must not care.
    pub fn destroy(&mut self) {
        for p in &mut self.parts {
            for part in Part::ALL {
                match p.data.dtype(part) {
                    Some(DType::F32) if part != Part::Codes => {
                        (0..p.data.bytes(part).len() / 4).for_each(|i| p.data.set_f32(part, i, 1e30));
                    }
                    _ if part == Part::Codes && self.schema.is_packed() => p.data.bytes_mut(part).fill(0x55),
                    _ if part == Part::Codes => p.data.bytes_mut(part).fill(0x3c),
                    _ => p.data.bytes_mut(part).fill(0x01),
                }
            }
        }
    }
}

/// A weight whose bytes end where memory ends.
pub(crate) struct Placed {
    stored: Stored,
    memory: Vec<BTreeMap<Part, (Memory, Range<usize>)>>,
}

impl Placed {
    /// Lends the weight to `body`.
    pub fn lend<R>(&self, body: impl FnOnce(&Q4Weight<'_>) -> Result<R>) -> Result<R> {
        let places = self.stored.parts.iter().zip(&self.memory).map(|(p, memory)| {
            p.data.lend_at(|part| memory.get(&part).map_or(&[][..], |(bytes, at)| &bytes[at.clone()]))
        });
        lend(&self.stored, places, body)
    }
}

fn lend<'a, R>(
    stored: &Stored,
    data: impl Iterator<Item = Result<SegmentData<'a>>>,
    body: impl FnOnce(&Q4Weight<'_>) -> Result<R>,
) -> Result<R> {
    let segment =
        |(p, data): (&StoredSegment, Result<SegmentData<'a>>)| Ok(Segment { rows: p.rows, data: data? });
    let segments = stored.parts.iter().zip(data).map(segment).collect::<Result<Vec<_>>>()?;
    body(&Q4Weight { schema: stored.schema, k: stored.k, segments: &segments })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lattice;

    #[test]
    fn a_seed_is_all_that_makes_a_weight() {
        for schema in lattice::usual().into_iter().filter(|s| s.is_packed()) {
            let k = 64usize.next_multiple_of(schema.k_block());
            let make = |seed| Stored::random(schema, &[3, 5], k, false, seed);
            let codes = |seed| make(seed).parts[1].data.bytes(Part::Codes).to_vec();
            assert_eq!(codes(1), codes(1));
            assert_ne!(codes(1), codes(2));
            let globals = make(1).parts.iter().map(|p| p.data.global).collect::<Vec<_>>();
            assert!(globals[0].is_none() || globals[0] != globals[1]);
        }
    }

    #[test]
    fn every_encoding_and_every_edge_has_its_parts() -> Result<()> {
        for name in q4_core::formats::names() {
            for schema in q4_core::formats::encodings(name) {
                let k = 64usize.next_multiple_of(schema.k_block());
                Stored::random(schema, &[3, 5], k, true, 9).lend(|w| w.validate())?;
            }
            for edge in q4_core::formats::kind(name).into_iter().flat_map(|kind| (kind.edges)(name, [1, 1])) {
                Stored::of(&edge)?.lend(|w| w.validate())?;
            }
        }
        Ok(())
    }
}
