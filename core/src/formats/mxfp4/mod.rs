//! MXFP4: E2M1 codes with a power of two per 32 elements along k, as the Open Compute Project defines it
//! (Microscaling Formats 1.0) and gpt-oss, compressed-tensors and MLX store it.
mod facts;
mod quantize;
mod sample;
mod storage;

pub use self::quantize::{ToMxfp4, quantize};
pub(super) use self::storage::is_compressed_tensors;
use super::facts::Facts;
use super::sample::{Draw, Edge};
use super::storage::{Described, Layout, Tensor};
use super::{
    Decode, Format, Kind, PartSpec, Q4Schema, Quantization, Target, Test, ValueRule, Wire, e2m1, e8m0,
};
use crate::{Convention, DType, NibbleOrder, OwnedParts, Part, Result, SchemaId, SegmentData};
use serde::Serialize;

/// Elements per block scale.
pub const BLOCK: usize = 32;

/// The largest block scale under which every code is finite: `6 * 2^125`.
pub const LARGEST: u8 = 252;

/// E2M1 codes, low nibble first, an E8M0 scale per 32 along k: `value = code * 2^(scale - 127)`, which is
/// exact in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Mxfp4;

const ENCODING: Q4Schema = Q4Schema::Mxfp4(Mxfp4);

/// MXFP4, which has no parameters.
pub static KIND: Kind = Kind {
    names: &[("mxfp4", 5)],
    usual: &[ENCODING],
    rarer: &[],
    from_wire: |_, _| Ok(ENCODING),
    quantization: Some(Quantization {
        about: "E2M1 with a power of two per 32",
        layout: Layout::CompressedTensors,
        options: &["--method"],
        target: |_, choices| Target::Mxfp4(ToMxfp4::new(choices.method)),
        held: |layout| (layout == Layout::CompressedTensors).then_some("mxfp4"),
    }),
    edges: sample::edges,
    rules: &storage::RULES,
};

impl Format for Mxfp4 {
    fn id(&self) -> SchemaId {
        SchemaId { name: "mxfp4", revision: 1 }
    }
    fn label(&self) -> String {
        "mxfp4".to_owned()
    }

    fn k_block(&self) -> usize {
        BLOCK
    }
    fn block(&self) -> usize {
        BLOCK
    }

    fn parts(&self, rows: usize, k: usize) -> Vec<PartSpec> {
        vec![
            PartSpec::new(Part::Codes, "codes", DType::U8, &[rows, k / 2]),
            PartSpec::new(Part::Scales, "block scales", DType::U8, &[rows, k / BLOCK]),
        ]
    }
    fn stored_bytes(&self, n: usize, k: usize) -> u64 {
        let elements = n as u64 * k as u64;
        elements / 2 + elements / BLOCK as u64
    }
    fn check(&self, k: usize, problem: &mut dyn FnMut(String)) {
        if k % BLOCK != 0 {
            problem(format!("need k % 32 == 0; have k = {k}"));
        }
    }

    fn decoder<'a>(&self, [_, k]: [usize; 2], data: &SegmentData<'a>) -> Result<Box<dyn Decode + 'a>> {
        let [codes, scales] = [Part::Codes, Part::Scales].map(|part| data.need(part)?.as_bytes());
        Ok(Box::new(Rows { codes: codes?, scales: scales?, k }))
    }

    fn values(&self) -> Vec<ValueRule> {
        let is_bad = |b| b > LARGEST;
        let in_words = |b| e8m0::decode(b).to_string();
        let need = "block scales of 2^125 at most, under which every code is finite";
        vec![ValueRule { part: Part::Scales, need, test: Test::Byte { is_bad, in_words } }]
    }
    fn facts(&self, _: [usize; 2], data: &SegmentData<'_>, scales: &[u8]) -> Result<Option<Facts>> {
        Ok(Some(facts::facts(data.need(Part::Codes)?.as_bytes()?, scales)))
    }

    fn tensors(&self, layout: Layout, shape: [usize; 2]) -> Option<Vec<Tensor>> {
        storage::tensors(layout, shape)
    }
    fn described(&self) -> Option<Described> {
        Some(storage::DESCRIBED)
    }
    fn plain(&self, _: Layout, _: Option<Convention>) -> Q4Schema {
        ENCODING
    }

    fn wire(&self) -> Wire {
        Wire { nibble_order: Some(NibbleOrder::LowFirst), block: BLOCK as u32, ..Wire::default() }
    }

    fn sample(&self, shape: [usize; 2], draw: &Draw) -> OwnedParts {
        sample::random(shape, draw)
    }
    fn plausible(&self, shape: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> Result<OwnedParts> {
        Ok(sample::plausible(shape, fill))
    }
    fn every_code(&self, factors: [usize; 2]) -> Option<Edge> {
        Some(sample::edge("every-code".into(), 0..=LARGEST, factors))
    }
    fn loudest(&self, parts: &mut OwnedParts) {
        parts.bytes_mut(Part::Codes).iter_mut().for_each(|byte| *byte |= 0x77);
    }
    fn spoil(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        parts.bytes_mut(Part::Scales)[row * k / BLOCK] = e8m0::NAN;
    }
}

/// Decodes one row: `codes` has `out.len() / 2` bytes, low nibble first, `scales` has `out.len() / 32` E8M0
/// bytes.
///
/// # Panics
/// If the lengths do not fit together.
pub fn dequantize_row(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    assert!(
        out.len() == BLOCK * scales.len() && 2 * codes.len() == out.len(),
        "{} values from {} bytes of codes and {} scales",
        out.len(),
        codes.len(),
        scales.len()
    );
    for ((out, codes), scale) in out.chunks_exact_mut(BLOCK).zip(codes.chunks_exact(BLOCK / 2)).zip(scales) {
        let scale = e8m0::decode(*scale);
        for (byte, pair) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
            *pair = [e2m1::decode(*byte) * scale, e2m1::decode(byte >> 4) * scale];
        }
    }
}

struct Rows<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    k: usize,
}

impl Decode for Rows<'_> {
    fn row(&self, r: usize, out: &mut [f32]) {
        let (codes, scales) = (self.k / 2, self.k / BLOCK);
        dequantize_row(&self.codes[r * codes..][..codes], &self.scales[r * scales..][..scales], out);
    }
}
