//! Blocks of GGML with scales of scales, and those of bytes: what GGUF files of llama.cpp hold most of.
//!
//! A matrix has one part, its blocks as they lie in the file. Blocks of Q4_0 are [`int4`](super::int4) in
//! groups of 32 and have no encoding here.
mod blocks;
mod facts;
mod sample;
mod storage;

pub use self::blocks::{Apart, Blocks, LONGEST};
use super::facts::Facts;
use super::sample::{Draw, Edge};
use super::storage::Layout;
use super::{Decode, Format, Kind, PartSpec, Q4Schema, Test, ValueRule, Wire};
use crate::{Convention, DType, NibbleOrder, OwnedParts, Part, Result, SchemaId, SegmentData};
use half::f16;
use serde::Serialize;

/// Codes of 4, 5, 6 or 8 bits in blocks of [`Blocks`], which say what an element is worth ([`Apart`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Ggml {
    /// Their type.
    pub blocks: Blocks,
}

const fn encoding(blocks: Blocks) -> Q4Schema {
    Q4Schema::Ggml(Ggml { blocks })
}

/// Blocks of each type.
pub static KIND: Kind = Kind {
    names: &[("q4_k", 8), ("q5_k", 9), ("q6_k", 10), ("q8_0", 11)],
    usual: &[encoding(Blocks::Q4K), encoding(Blocks::Q6K), encoding(Blocks::Q80)],
    rarer: &[encoding(Blocks::Q5K)],
    from_wire: |name, _| {
        let named = Blocks::ALL.into_iter().find(|blocks| blocks.name() == name);
        named.map(encoding).ok_or("name")
    },
    quantization: None,
    edges: sample::edges,
    rules: &storage::RULES,
};

impl Format for Ggml {
    fn id(&self) -> SchemaId {
        SchemaId { name: self.blocks.name(), revision: 1 }
    }
    fn label(&self) -> String {
        self.blocks.name().to_owned()
    }
    fn code_bits(&self) -> u32 {
        self.blocks.bits()
    }

    fn k_block(&self) -> usize {
        self.blocks.elements()
    }
    fn block(&self) -> usize {
        self.blocks.group()
    }

    fn parts(&self, rows: usize, k: usize) -> Vec<PartSpec> {
        vec![PartSpec::new(Part::Codes, "blocks", DType::U8, &[rows, self.blocks.row(k)])]
    }
    fn stored_bytes(&self, n: usize, k: usize) -> u64 {
        n as u64 * self.blocks.row(k) as u64
    }
    fn check(&self, k: usize, problem: &mut dyn FnMut(String)) {
        let elements = self.blocks.elements();
        if !k.is_multiple_of(elements) {
            problem(format!("need k % {elements} == 0; have k = {k}"));
        }
    }

    fn decoder<'a>(&self, [_, k]: [usize; 2], data: &SegmentData<'a>) -> Result<Box<dyn Decode + 'a>> {
        Ok(Box::new(Rows { blocks: self.blocks, bytes: data.need(Part::Codes)?.as_bytes()?, k }))
    }

    fn values(&self) -> Vec<ValueRule> {
        let test = Test::Blocks { bytes: self.blocks.bytes(), floats: self.blocks.floats() };
        vec![ValueRule { part: Part::Codes, need: "finite scales of every block", test }]
    }
    fn facts(&self, shape: [usize; 2], data: &SegmentData<'_>, _: &[u8]) -> Result<Option<Facts>> {
        Ok(Some(facts::facts(self.blocks, shape, data.need(Part::Codes)?.as_bytes()?)))
    }

    fn plain(&self, _: Layout, _: Option<Convention>) -> Q4Schema {
        Q4Schema::Ggml(*self)
    }

    fn wire(&self) -> Wire {
        let block = self.blocks.group() as u32;
        Wire { nibble_order: Some(NibbleOrder::LowFirst), block, ..Wire::default() }
    }

    fn sample(&self, shape: [usize; 2], draw: &Draw) -> OwnedParts {
        sample::random(self.blocks, shape, draw)
    }
    fn plausible(&self, shape: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> Result<OwnedParts> {
        Ok(sample::plausible(self.blocks, shape, fill))
    }
    fn every_code(&self, factors: [usize; 2]) -> Option<Edge> {
        Some(sample::every_code(self.blocks, factors))
    }
    fn loudest(&self, parts: &mut OwnedParts) {
        let (blocks, most) = (self.blocks, ((1u32 << self.blocks.bits()) - 1) as u8);
        sample::edit(blocks, parts.bytes_mut(Part::Codes), |apart| {
            let is_above = |code: u8| code > most / 2;
            apart.codes.iter_mut().for_each(|code| *code = if is_above(*code) { most } else { 0 });
        });
    }
    fn silence(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        let of_row = blocks::row(self.blocks, row, k);
        sample::edit(self.blocks, &mut parts.bytes_mut(Part::Codes)[of_row], |apart| {
            apart.codes.fill(self.blocks.zero());
            apart.mins.fill(0);
        });
    }
    fn spoil(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        let first = blocks::row(self.blocks, row, k).start..;
        let block = &mut parts.bytes_mut(Part::Codes)[first][..self.blocks.bytes()];
        block[self.blocks.floats()[0]..][..2].copy_from_slice(&f16::NAN.to_le_bytes());
    }
}

struct Rows<'a> {
    blocks: Blocks,
    bytes: &'a [u8],
    k: usize,
}

impl Decode for Rows<'_> {
    fn row(&self, r: usize, out: &mut [f32]) {
        self.blocks.decode(&self.bytes[blocks::row(self.blocks, r, self.k)], out);
    }
}
