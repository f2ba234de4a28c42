//! NF4: codes into 16 quantiles of a normal distribution, an f32 absmax per block of the flattened tensor, as
//! bitsandbytes stores it.
//!
//! Blocks ignore rows, so one may begin in one row and end in the next. Double quantisation ([`Nested`])
//! stores the absmax themselves as 8-bit codes.
mod codec;
mod facts;
mod quantize;
mod sample;
mod storage;

pub use self::quantize::ToNf4;
use super::facts::Facts;
use super::sample::Draw;
use super::storage::{Layout, Tensor};
use super::{
    Codebook, Decode, Format, Kind, Lack, PartSpec, Q4Schema, Quantization, Target, Test, ValueRule, Wire,
};
use crate::Convention;
use crate::{DType, NibbleOrder, OwnedParts, Part, Result, SchemaId, SegmentData, TensorView, f32s};
pub use codec::{
    CODEBOOK, NESTED_BLOCK, Nested, THRESHOLDS, ZERO, decode, dequantize, dynamic_map, encode, nest, nibble,
    quantize,
};
use serde::Serialize;
use std::borrow::Cow;
use std::ops::RangeInclusive;

/// Codes into the NF4 codebook, an f32 absmax per `block` consecutive elements of the flattened `[n, k]`:
/// `value = codebook[code] * absmax`, rounded once to f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Nf4 {
    /// Packing.
    pub nibble_order: NibbleOrder,
    /// Elements per absmax, 32 to 4096; blocks cross rows.
    pub block: u32,
    /// Double quantisation: absmax is itself 8-bit, with this many absmax per f32. A schema of its own.
    pub nested: Option<u32>,
}

/// Elements per absmax.
const BLOCKS: RangeInclusive<u32> = 32..=4096;

/// Whether blocks of this size exist.
pub fn has_block(size: u32) -> bool {
    BLOCKS.contains(&size) && size.is_power_of_two()
}

/// The stored parts of a segment.
#[derive(Clone, Debug)]
pub struct Nf4Parts<'a> {
    /// u8, `ceil(rows*k/2)` bytes.
    pub codes: TensorView<'a>,
    /// One absmax per block.
    pub absmax: Absmax<'a>,
}

/// Scales of NF4.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // a handful exist, while a layer is prepared
pub enum Absmax<'a> {
    /// f32, one per block.
    Plain(TensorView<'a>),
    /// `map[codes[i]] * absmax[i / block] + offset`.
    Nested {
        /// u8, one per block.
        codes: TensorView<'a>,
        /// f32 `[256]`.
        map: TensorView<'a>,
        /// f32, one per `block` codes.
        absmax: TensorView<'a>,
        /// Mean that was subtracted before the second quantisation.
        offset: f32,
        /// Codes per nested absmax.
        block: usize,
    },
}

impl Nf4 {
    /// The parts of a segment of this encoding; `None` where one is missing.
    pub fn of<'a>(&self, data: &SegmentData<'a>) -> Option<Nf4Parts<'a>> {
        let (codes, scales) = (*data.get(Part::Codes)?, *data.get(Part::Scales)?);
        let absmax = match self.nested {
            None => Absmax::Plain(scales),
            Some(block) => Absmax::Nested {
                codes: scales,
                map: *data.get(Part::Map)?,
                absmax: *data.get(Part::SecondScales)?,
                offset: data.offset,
                block: block as usize,
            },
        };
        Some(Nf4Parts { codes, absmax })
    }
}

impl<'a> From<Nf4Parts<'a>> for SegmentData<'a> {
    fn from(p: Nf4Parts<'a>) -> Self {
        let data = Self::default().with(Part::Codes, p.codes);
        match p.absmax {
            Absmax::Plain(absmax) => data.with(Part::Scales, absmax),
            Absmax::Nested { codes, map, absmax, offset, .. } => data
                .with_offset(offset)
                .with(Part::Scales, codes)
                .with(Part::Map, map)
                .with(Part::SecondScales, absmax),
        }
    }
}

impl<'a> Absmax<'a> {
    /// One f32 per block, borrowed where the file already holds it so.
    ///
    /// # Errors
    /// [`Code::TensorType`](crate::Code::TensorType) for scales that are not f32 in host memory,
    /// [`Code::ShapeMismatch`](crate::Code::ShapeMismatch) for parts with gaps.
    pub fn to_f32(&self) -> Result<Cow<'a, [f32]>> {
        match self {
            Self::Plain(a) => f32s(a),
            Self::Nested { codes, map, absmax, offset, block } => {
                let (map, absmax) = (f32s(map)?, f32s(absmax)?);
                let nested = Nested {
                    codes: codes.as_bytes()?,
                    map: &map,
                    absmax: &absmax,
                    offset: *offset,
                    block: *block,
                };
                Ok(Cow::Owned((0..codes.len()).map(|i| nested.absmax_at(i)).collect()))
            }
        }
    }
}

const fn encoding(nibble_order: NibbleOrder, block: u32, nested: Option<u32>) -> Q4Schema {
    Q4Schema::Nf4(Nf4 { nibble_order, block, nested })
}

use NibbleOrder::{HighFirst, LowFirst};

/// NF4 before its parameters are known.
pub static KIND: Kind = Kind {
    names: &[("nf4", 2), ("nf4-dq", 3)],
    usual: &[
        encoding(HighFirst, 64, None),
        encoding(LowFirst, 128, None),
        encoding(HighFirst, 64, Some(256)),
    ],
    rarer: &[
        encoding(HighFirst, 32, None),
        encoding(LowFirst, 4096, None),
        encoding(LowFirst, 128, Some(256)),
    ],
    from_wire: |name, wire| {
        let nested = (name == "nf4-dq").then_some(wire.nested_block);
        Ok(encoding(wire.nibble_order.ok_or("nibble order")?, wire.block, nested))
    },
    quantization: Some(Quantization {
        about: "Normal-float codebook with a float scale per block",
        layout: Layout::Bitsandbytes,
        options: &["--block-size", "--double-quant"],
        target: |_, choices| {
            Target::Nf4(ToNf4 { block: choices.block.unwrap_or(64), double: choices.double })
        },
        held: |layout| match layout {
            Layout::Bitsandbytes => Some("nf4"),
            Layout::Dat => Some("nf4 without double quantisation"),
            _ => None,
        },
    }),
    edges: sample::edges,
    rules: &storage::RULES,
};

impl Format for Nf4 {
    fn id(&self) -> SchemaId {
        SchemaId { name: if self.nested.is_some() { "nf4-dq" } else { "nf4" }, revision: 1 }
    }
    fn label(&self) -> String {
        let order = if self.nibble_order == HighFirst { "high" } else { "low" };
        format!("{}.{order}.{}", self.id().name, self.block)
    }

    fn block(&self) -> usize {
        self.block as usize
    }

    fn parts(&self, rows: usize, k: usize) -> Vec<PartSpec> {
        let (elements, part) = (rows * k, PartSpec::new);
        let blocks = elements.div_ceil(self.block.max(1) as usize);
        let mut all = vec![part(Part::Codes, "codes", DType::U8, &[elements.div_ceil(2)])];
        match self.nested {
            None => all.push(part(Part::Scales, "absmax", DType::F32, &[blocks])),
            Some(block) => all.extend([
                part(Part::Scales, "absmax codes", DType::U8, &[blocks]),
                part(Part::Map, "nested map", DType::F32, &[256]),
                part(
                    Part::SecondScales,
                    "nested absmax",
                    DType::F32,
                    &[blocks.div_ceil(block.max(1) as usize)],
                ),
            ]),
        }
        all
    }
    fn stored_bytes(&self, n: usize, k: usize) -> u64 {
        let elements = n as u64 * k as u64;
        let blocks = elements.div_ceil(u64::from(self.block));
        let scales = self.nested.map_or(4 * blocks, |b| blocks + 4 * blocks.div_ceil(u64::from(b)));
        elements.div_ceil(2) + scales
    }
    fn least_bytes(&self, n: usize, k: usize) -> u64 {
        let elements = n as u64 * k as u64;
        let scale = if self.nested.is_some() { 1 } else { 4 };
        elements / 2 + scale * elements / u64::from(self.block)
    }
    fn check(&self, _: usize, problem: &mut dyn FnMut(String)) {
        if !has_block(self.block) {
            problem(format!("need a block size of 32 to 4096, a power of two; have {}", self.block));
        }
        if self.nested == Some(0) {
            problem("need a nested block size above zero".into());
        }
    }
    fn foreign(&self, data: &SegmentData<'_>) -> String {
        match data.get(Part::Scales) {
            Some(_) => format!("absmax: need nested = {}; have the other", self.nested.is_some()),
            None => format!("need the parts of {}; have those of another format", self.id()),
        }
    }

    fn decoder<'a>(&self, [_, k]: [usize; 2], data: &SegmentData<'a>) -> Result<Box<dyn Decode + 'a>> {
        let parts = self.of(data).ok_or_else(|| data.lacks(Part::Scales))?;
        Ok(Box::new(Rows {
            codes: parts.codes.as_bytes()?,
            absmax: parts.absmax.to_f32()?,
            high_first: self.nibble_order == HighFirst,
            block: self.block as usize,
            k,
        }))
    }

    fn values(&self) -> Vec<ValueRule> {
        let rule = |part, need, test| ValueRule { part, need, test };
        let is_bad = |bits| bits >= 0x7f80_0000 && bits != 0x8000_0000;
        match self.nested {
            None => {
                vec![rule(Part::Scales, "absmax that is finite and not negative", Test::Float32 { is_bad })]
            }
            Some(_) => [Part::Map, Part::SecondScales].map(|p| rule(p, "finite values", Test::Finite)).into(),
        }
    }
    fn facts(&self, [n, k]: [usize; 2], data: &SegmentData<'_>, _: &[u8]) -> Result<Option<Facts>> {
        let Some(Nf4Parts { codes, absmax }) = self.of(data) else { return Ok(None) };
        facts::facts(codes.as_bytes()?, &absmax, self.block as usize, n * k).map(Some)
    }
    fn codebook(&self) -> Option<&'static Codebook> {
        static BOOK: Codebook = Codebook { values: CODEBOOK, need: "the 16 values of NF4" };
        Some(&BOOK)
    }

    fn tensors(&self, layout: Layout, shape: [usize; 2]) -> Option<Vec<Tensor>> {
        storage::tensors(self, layout, shape)
    }
    fn plain(&self, _: Layout, _: Option<Convention>) -> Q4Schema {
        encoding(HighFirst, self.block, self.nested)
    }
    fn lacks(&self, layout: Layout, shape: [usize; 2], _: &SegmentData<'_>) -> Result<Option<Lack>> {
        Ok(storage::lacks(self, layout, shape))
    }

    fn wire(&self) -> Wire {
        Wire {
            nibble_order: Some(self.nibble_order),
            block: self.block,
            nested_block: self.nested.unwrap_or(0),
            ..Wire::default()
        }
    }

    fn sample(&self, shape: [usize; 2], draw: &Draw) -> OwnedParts {
        sample::random(self, shape, draw)
    }
    fn plausible(&self, shape: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> Result<OwnedParts> {
        sample::plausible(self, shape, fill)
    }
    fn blocks(&self) -> Vec<Q4Schema> {
        sample::blocks(self.nested)
    }
    fn impossible(&self) -> Option<(&'static str, Q4Schema)> {
        // Double quantisation has the same rule.
        self.nested.is_none().then_some(("block-of-48", Q4Schema::Nf4(Self { block: 48, ..*self })))
    }
    fn loudest(&self, parts: &mut OwnedParts) {
        let nibble = |c: u8| if c & 8 == 0 { 0 } else { 15 };
        let loudest = |byte: &mut u8| *byte = nibble(*byte & 15) | nibble(*byte >> 4) << 4;
        parts.bytes_mut(Part::Codes).iter_mut().for_each(loudest);
    }
    fn silence(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        parts.bytes_mut(Part::Codes)[row * k / 2..][..k / 2].fill(ZERO | ZERO << 4);
    }
    fn spoil(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        match self.nested {
            None => parts.set_f32(Part::Scales, row * k / self.block as usize, f32::NAN),
            Some(_) => parts.set_f32(Part::SecondScales, 0, f32::NAN),
        }
    }
}

struct Rows<'a> {
    codes: &'a [u8],
    absmax: Cow<'a, [f32]>,
    high_first: bool,
    block: usize,
    k: usize,
}

impl Decode for Rows<'_> {
    fn row(&self, r: usize, out: &mut [f32]) {
        let Self { codes, absmax, high_first, block, k } = self;
        let mut done = 0;
        // Blocks ignore rows: the first and the last may be cut.
        while done < *k {
            let from = r * k + done;
            let len = (block - from % block).min(k - done);
            let scale = absmax[from / block];
            let run = &mut out[done..done + len];
            if from % 2 == 0 && len % 2 == 0 {
                let pairs = &codec::PAIRS[usize::from(*high_first)];
                for (pair, code) in run.as_chunks_mut::<2>().0.iter_mut().zip(&codes[from / 2..]) {
                    *pair = pairs[usize::from(*code)].map(|value| value * scale);
                }
            } else {
                for (i, o) in (from..).zip(run) {
                    let is_high = (i % 2 == 0) == *high_first;
                    *o = decode(codes[i / 2] >> (4 * u8::from(is_high))) * scale;
                }
            }
            done += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absmax_may_be_zero_of_either_sign_only() {
        let rules = Nf4 { nibble_order: HighFirst, block: 64, nested: None }.values();
        let [ValueRule { test: Test::Float32 { is_bad }, .. }] = rules[..] else { panic!("{rules:?}") };
        for good in [0.0, -0.0, 1.0, f32::MAX, f32::MIN_POSITIVE / 2.0] {
            assert!(!is_bad(f32::to_bits(good)), "{good}");
        }
        for bad in [-1.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::MIN_POSITIVE] {
            assert!(is_bad(f32::to_bits(bad)), "{bad}");
        }
    }
}
