//! NVFP4: E2M1 codes with an E4M3 scale per 16 elements along k and, usually, one f32 scale per tensor.
mod codec;
mod facts;
mod quantize;
mod sample;
mod storage;

use super::facts::Facts;
use super::sample::{Draw, Edge};
use super::storage::{Described, Layout, Tensor};
use super::{
    Decode, Format, Kind, Lack, PartSpec, Q4Schema, Quantization, Target, Test, ValueRule, Wire, e4m3,
    swizzle,
};
use crate::{
    Convention, DType, GlobalScale, NibbleOrder, OwnedParts, Part, Result, ScaleLayout, SchemaId,
    SegmentData, TensorView,
};
pub(crate) use codec::not_finite;
pub use codec::{BLOCK, Quantizer, dequantize_row, global_from_amax};
pub use quantize::{Method, Scales, ToNvfp4, power_of_two_amax};
use serde::Serialize;
use std::borrow::Cow;

/// E2M1 codes, low nibble first, an E4M3 scale per 16 along k:
/// `value = code * fl32(scale ∘ global)`, rounded to f32 after each product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Nvfp4 {
    /// Order of the block scales.
    pub scale_layout: ScaleLayout,
    /// Convention of the per-tensor scale; `None` for single-level scales.
    pub global: Option<Convention>,
}

/// The stored parts of a segment.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4Parts<'a> {
    /// u8 `[rows, k/2]`.
    pub codes: TensorView<'a>,
    /// E4M3 `[rows, k/16]`, or the swizzled buffer of `swizzle::blocked_len(rows, k/16)` bytes.
    pub scales: TensorView<'a>,
    /// Present iff the schema has a convention for it.
    pub global: Option<GlobalScale>,
}

impl<'a> Nvfp4Parts<'a> {
    /// Those of a segment; `None` where one is missing.
    pub fn of(data: &SegmentData<'a>) -> Option<Self> {
        let (codes, scales) = (*data.get(Part::Codes)?, *data.get(Part::Scales)?);
        Some(Self { codes, scales, global: data.global })
    }
}

impl<'a> From<Nvfp4Parts<'a>> for SegmentData<'a> {
    fn from(p: Nvfp4Parts<'a>) -> Self {
        Self::default().with_global(p.global).with(Part::Codes, p.codes).with(Part::Scales, p.scales)
    }
}

const fn encoding(scale_layout: ScaleLayout, global: Option<Convention>) -> Q4Schema {
    Q4Schema::Nvfp4(Nvfp4 { scale_layout, global })
}

use ScaleLayout::{RowMajor, Swizzled128x4};

/// NVFP4 before its parameters are known.
pub static KIND: Kind = Kind {
    names: &[("nvfp4", 1)],
    usual: &[
        encoding(RowMajor, None),
        encoding(RowMajor, Some(Convention::Multiply)),
        encoding(RowMajor, Some(Convention::Divide)),
        encoding(Swizzled128x4, Some(Convention::Multiply)),
    ],
    rarer: &[encoding(Swizzled128x4, None), encoding(Swizzled128x4, Some(Convention::Divide))],
    from_wire: |_, wire| {
        let scale_layout = wire.scale_layout.ok_or("scale layout")?;
        Ok(encoding(scale_layout, wire.global.ok_or("convention")?))
    },
    quantization: Some(Quantization {
        about: "E2M1 with an E4M3 scale per 16",
        layout: Layout::ModelOpt,
        options: &["--scales", "--method"],
        target: |layout, choices| {
            let method = choices.method.unwrap_or(Method::Search);
            Target::Nvfp4(ToNvfp4::new(layout, choices.scales, method))
        },
        held: |layout| match layout {
            Layout::ModelOpt => {
                Some("nvfp4 with two-level scales and a rule whose per-tensor scale multiplies")
            }
            Layout::CompressedTensors => {
                Some("nvfp4 with two-level scales and a rule whose per-tensor scale divides")
            }
            Layout::Dat => Some("nvfp4 with a rule whose per-tensor scale multiplies"),
            _ => None,
        },
    }),
    edges: sample::edges,
    rules: &storage::RULES,
};

impl Format for Nvfp4 {
    fn id(&self) -> SchemaId {
        SchemaId { name: "nvfp4", revision: 1 }
    }
    fn label(&self) -> String {
        let layout = if self.scale_layout == RowMajor { "row-major" } else { "swizzled" };
        let global = match self.global {
            None => "single",
            Some(Convention::Multiply) => "multiply",
            Some(Convention::Divide) => "divide",
        };
        format!("nvfp4.{layout}.{global}")
    }

    fn k_block(&self) -> usize {
        BLOCK
    }
    fn block(&self) -> usize {
        BLOCK
    }
    fn global(&self) -> Option<Convention> {
        self.global
    }
    fn activations(&self) -> &'static [&'static str] {
        &["native", "int8", "nvfp4"]
    }

    fn parts(&self, rows: usize, k: usize) -> Vec<PartSpec> {
        let scales = match self.scale_layout {
            RowMajor => vec![rows, k / BLOCK],
            Swizzled128x4 => vec![swizzle::blocked_len(rows, k / BLOCK)],
        };
        vec![
            PartSpec::new(Part::Codes, "codes", DType::U8, &[rows, k / 2]),
            PartSpec {
                or: Some(DType::U8),
                ..PartSpec::new(Part::Scales, "block scales", DType::F8E4M3, &scales)
            },
        ]
    }
    fn stored_bytes(&self, n: usize, k: usize) -> u64 {
        let elements = n as u64 * k as u64;
        elements / 2 + elements / BLOCK as u64
    }
    fn check(&self, k: usize, problem: &mut dyn FnMut(String)) {
        if k % BLOCK != 0 {
            problem(format!("need k % 16 == 0; have k = {k}"));
        }
    }

    fn decoder<'a>(&self, [rows, k]: [usize; 2], data: &SegmentData<'a>) -> Result<Box<dyn Decode + 'a>> {
        let stored = data.need(Part::Scales)?.as_bytes()?;
        let scales = self.row_major(stored, rows, k)?;
        Ok(Box::new(Rows { codes: data.need(Part::Codes)?.as_bytes()?, scales, global: data.global, k }))
    }

    fn values(&self) -> Vec<ValueRule> {
        // As bytes, below that of NaN.
        let is_bad = |b| b >= 0x7f;
        let in_words = |b| if e4m3::is_nan(b) { "NaN".to_owned() } else { e4m3::decode(b).to_string() };
        let need = "block scales that are finite and not negative";
        vec![ValueRule { part: Part::Scales, need, test: Test::Byte { is_bad, in_words } }]
    }
    fn facts(&self, [_, k]: [usize; 2], data: &SegmentData<'_>, scales: &[u8]) -> Result<Option<Facts>> {
        let codes = data.need(Part::Codes)?;
        Ok(Some(facts::facts(codes.as_bytes()?, scales, k / BLOCK, data.global.is_some())))
    }
    fn in_rows<'a>(&self, part: Part, stored: &'a [u8], [rows, k]: [usize; 2]) -> Result<Cow<'a, [u8]>> {
        if part == Part::Scales { self.row_major(stored, rows, k) } else { Ok(Cow::Borrowed(stored)) }
    }

    fn tensors(&self, layout: Layout, shape: [usize; 2]) -> Option<Vec<Tensor>> {
        storage::tensors(layout, shape, self.global.is_some())
    }
    fn described(&self) -> Option<Described> {
        Some(storage::DESCRIBED)
    }
    fn plain(&self, _: Layout, global: Option<Convention>) -> Q4Schema {
        encoding(RowMajor, global)
    }

    fn lacks(&self, layout: Layout, [n, k]: [usize; 2], _: &SegmentData<'_>) -> Result<Option<Lack>> {
        let need = "in features divisible by 64, which a block of GGML has";
        let is_ragged = layout == Layout::Gguf && !k.is_multiple_of(64);
        Ok(is_ragged.then(|| Lack { part: Part::Codes, need, have: format!("[{n}, {k}]") }))
    }

    fn wire(&self) -> Wire {
        Wire {
            scale_layout: Some(self.scale_layout),
            global: Some(self.global),
            nibble_order: Some(NibbleOrder::LowFirst),
            block: BLOCK as u32,
            ..Wire::default()
        }
    }

    fn sample(&self, shape: [usize; 2], draw: &Draw) -> OwnedParts {
        sample::random(self, shape, draw)
    }
    fn plausible(&self, shape: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> Result<OwnedParts> {
        sample::plausible(self, shape, fill)
    }
    fn every_code(&self, factors: [usize; 2]) -> Option<Edge> {
        let global = self.global.map(|convention| (convention, 1.0));
        Some(sample::edge("every-code".into(), *self, global, 0..0x7f, factors))
    }
    fn loudest(&self, parts: &mut OwnedParts) {
        parts.bytes_mut(Part::Codes).iter_mut().for_each(|byte| *byte |= 0x77);
    }
    fn spoil(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        parts.bytes_mut(Part::Scales)[row * k / BLOCK] = 0x7f;
    }
}

impl Nvfp4 {
    /// `[rows, k/16]` of the stored scales; copied where they are swizzled.
    ///
    /// # Errors
    /// [`Code::TensorShape`](crate::Code::TensorShape) for a swizzled buffer of another size.
    pub fn row_major<'a>(&self, stored: &'a [u8], rows: usize, k: usize) -> Result<Cow<'a, [u8]>> {
        Ok(match self.scale_layout {
            RowMajor => Cow::Borrowed(stored),
            Swizzled128x4 => Cow::Owned(swizzle::from_blocked(stored, rows, k / BLOCK)?),
        })
    }
}

struct Rows<'a> {
    codes: &'a [u8],
    scales: Cow<'a, [u8]>,
    global: Option<GlobalScale>,
    k: usize,
}

impl Rows<'_> {
    fn packed(&self, r: usize) -> (&[u8], &[u8]) {
        let (codes, scales) = (self.k / 2, self.k / BLOCK);
        (&self.codes[r * codes..][..codes], &self.scales[r * scales..][..scales])
    }
}

impl Decode for Rows<'_> {
    fn row(&self, r: usize, out: &mut [f32]) {
        let (codes, scales) = self.packed(r);
        dequantize_row(codes, scales, self.global, out);
    }
    fn nvfp4_row(&self, r: usize) -> Option<(&[u8], &[u8])> {
        Some(self.packed(r))
    }
    fn global(&self) -> Option<GlobalScale> {
        self.global
    }
}
