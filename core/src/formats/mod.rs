//! The formats of weights, one folder each: what a code is, how it is stored, recognised, passed on and
//! tested.
//!
//! A [`Format`] is one encoding with its parameters; everybody else asks it and knows none by name, but for
//! backends whose kernels are made for one. [`KINDS`] lists what there is. A new format is a folder here, a
//! variant of [`Q4Schema`] and a line in [`KINDS`].
//!
//! Codecs are plain IEEE f32 (subnormals included) and allocation-free per row, so they are the reference
//! that kernels are compared with and what they fall back on for ragged edges.
pub mod dense;
pub mod e2m1;
pub mod e4m3;
pub mod e8m0;
pub mod facts;
pub mod fp8;
pub mod ggml;
pub mod int4;
pub mod int8;
mod mlx;
pub mod mxfp4;
pub mod nf4;
pub mod nvfp4;
pub mod quantize;
pub mod sample;
pub mod storage;
pub mod swizzle;

#[cfg(test)]
mod oracle;

use crate::{
    Convention, DType, GlobalScale, NibbleOrder, OwnedParts, Part, Result, ScaleLayout, SchemaId, SegmentData,
};
use dense::Dense;
use facts::Facts;
use fp8::Fp8;
use ggml::Ggml;
use int4::{Int4, ToInt4};
use mxfp4::{Mxfp4, ToMxfp4};
use nf4::{Nf4, ToNf4};
use nvfp4::{Method, Nvfp4, Scales, ToNvfp4};
use quantize::Encoder;
use sample::{Draw, Edge};
use serde::Serialize;
use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;
use storage::{Described, Layout, Rule, Tensor};

/// A complete description of one weight encoding. What can be asked of it is in [`Format`], which it
/// dereferences to.
///
/// ```
/// use q4_core::{Convention, formats};
///
/// // As compressed-tensors stores NVFP4: with a per-tensor scale that divides.
/// let all = formats::encodings("nvfp4");
/// let nvfp4 = all.into_iter().find(|s| s.global() == Some(Convention::Divide)).unwrap();
/// assert_eq!(nvfp4.id().to_string(), "nvfp4@1");
/// assert_eq!(nvfp4.label(), "nvfp4.row-major.divide");
///
/// // Half a byte for a code, and a byte of scale for 16 of them.
/// let [n, k] = [1024, 2048];
/// assert_eq!(nvfp4.stored_bytes(n, k), (n * k / 2 + n * k / 16) as u64);
/// let parts: Vec<_> = nvfp4.parts(n, k).into_iter().map(|p| (p.what, p.shape)).collect();
/// assert_eq!(parts, [("codes", vec![n, k / 2]), ("block scales", vec![n, k / 16])]);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case", tag = "format")]
#[non_exhaustive]
pub enum Q4Schema {
    /// E2M1 codes, an E4M3 scale per 16.
    Nvfp4(Nvfp4),
    /// Codes into a codebook of 16, an absmax per block.
    Nf4(Nf4),
    /// E2M1 codes, a power of two per 32.
    Mxfp4(Mxfp4),
    /// Integers of four bits, a scale and maybe a zero point per group.
    Int4(Int4),
    /// Blocks of GGML.
    Ggml(Ggml),
    /// Bytes of E4M3, a scale per tile.
    Fp8(Fp8),
    /// Not quantised.
    Dense(Dense),
}

impl Deref for Q4Schema {
    type Target = dyn Format;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Nvfp4(format) => format,
            Self::Nf4(format) => format,
            Self::Mxfp4(format) => format,
            Self::Int4(format) => format,
            Self::Ggml(format) => format,
            Self::Fp8(format) => format,
            Self::Dense(format) => format,
        }
    }
}

impl fmt::Debug for Q4Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl fmt::Display for Q4Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_packed() { f.pad(&self.in_words()) } else { f.write_str(&self.in_words()) }
    }
}

/// What a dense matrix becomes, and how. What can be asked of it is [`Encoder`]'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "format")]
pub enum Target {
    /// E2M1 codes with E4M3 block scales.
    Nvfp4(ToNvfp4),
    /// NF4 codes with an absmax per block.
    Nf4(ToNf4),
    /// E2M1 codes with a power of two per 32.
    Mxfp4(ToMxfp4),
    /// Integers with a scale per group.
    Int4(ToInt4),
}

impl Deref for Target {
    type Target = dyn Encoder;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Nvfp4(to) => to,
            Self::Nf4(to) => to,
            Self::Mxfp4(to) => to,
            Self::Int4(to) => to,
        }
    }
}

/// What users say of a quantiser. A format takes some of it ([`Quantization::options`]).
#[derive(Clone, Copy, Debug, Default)]
pub struct Choices {
    /// How many scales a value has.
    pub scales: Option<Scales>,
    /// How a block scale is chosen.
    pub method: Option<Method>,
    /// Elements per scale.
    pub block: Option<u32>,
    /// Quantise the scales too.
    pub double: bool,
}

/// How dense matrices become those of a format.
#[derive(Clone, Copy, Debug)]
pub struct Quantization {
    /// The format in one line of a help.
    pub about: &'static str,
    /// Where it is written if nobody says.
    pub layout: Layout,
    /// Options about it.
    pub options: &'static [&'static str],
    /// What a matrix becomes in a layout, whether that holds it ([`Encoder::fits`]) or not.
    pub target: fn(Layout, &Choices) -> Target,
    /// What of it a layout holds, as errors say it.
    pub held: fn(Layout) -> Option<&'static str>,
}

impl Quantization {
    /// What a dense matrix becomes where nothing is said but the format.
    pub fn default_target(&self) -> Target {
        (self.target)(self.layout, &Choices::default())
    }
}

/// One weight encoding, its parameters included.
pub trait Format: fmt::Debug + Send + Sync {
    /// Name and revision.
    fn id(&self) -> SchemaId;
    /// Name with parameters, as cases of the conformance suite spell it: `nf4.high.64`.
    fn label(&self) -> String;
    /// As people read it.
    fn in_words(&self) -> String {
        self.id().to_string()
    }
    /// The stored type of a matrix that is not quantised; `None` for codes.
    fn dense_dtype(&self) -> Option<DType> {
        None
    }
    /// Codes, as opposed to a dense matrix.
    fn is_packed(&self) -> bool {
        self.dense_dtype().is_none()
    }
    /// Bits of a code.
    fn code_bits(&self) -> u32 {
        4
    }

    /// In features are a multiple of this: elements of a block that no row may cut.
    fn k_block(&self) -> usize {
        1
    }
    /// Elements that share a scale.
    fn block(&self) -> usize;
    /// Out and in features under one scale, 0 for all there are, of formats whose scales reach over rows.
    fn tile(&self) -> Option<[u32; 2]> {
        None
    }
    /// Convention of the per-tensor scale, where there is one.
    fn global(&self) -> Option<Convention> {
        None
    }
    /// Kinds of activations whose products make sense: `native`, `int8`, `nvfp4`, `fp8`.
    fn activations(&self) -> &'static [&'static str] {
        &["native", "int8"]
    }

    /// The stored parts of `[rows, k]`, in the order in which they are checked.
    fn parts(&self, rows: usize, k: usize) -> Vec<PartSpec>;
    /// Bytes that `n * k` elements take, codes and scales, per-tensor scalars aside.
    fn stored_bytes(&self, n: usize, k: usize) -> u64;
    /// The least that `n * k` elements can be kept in, whatever a kernel packs them into.
    fn least_bytes(&self, n: usize, k: usize) -> u64 {
        self.stored_bytes(n, k)
    }
    /// What is wrong with the parameters, or with `k` columns.
    fn check(&self, k: usize, problem: &mut dyn FnMut(String));
    /// What is said of a segment that has other parts than [`parts`](Self::parts).
    fn foreign(&self, _: &SegmentData<'_>) -> String {
        format!("need the parts of {}; have those of another format", self.in_words())
    }

    /// The exact decoder of a segment `[rows, k]` whose parts were checked: the definition of its values.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`](crate::Code::ShapeMismatch) for parts that are not contiguous in host memory.
    fn decoder<'a>(&self, shape: [usize; 2], data: &SegmentData<'a>) -> Result<Box<dyn Decode + 'a>>;

    /// What stored values have to be.
    fn values(&self) -> Vec<ValueRule> {
        Vec::new()
    }
    /// What a matrix `[n, k]` of checked values amounts to; `scales` are in the order of rows. `None` where
    /// nothing is known of the format.
    ///
    /// # Errors
    /// As [`decoder`](Self::decoder).
    fn facts(&self, _shape: [usize; 2], _data: &SegmentData<'_>, _scales: &[u8]) -> Result<Option<Facts>> {
        Ok(None)
    }
    /// The values of all codes, where checkpoints store them beside the weight.
    fn codebook(&self) -> Option<&'static Codebook> {
        None
    }
    /// The bytes of a part in the order of rows; copied where they are stored in another.
    ///
    /// # Errors
    /// [`Code::TensorShape`](crate::Code::TensorShape) for another number of bytes.
    fn in_rows<'a>(&self, _part: Part, stored: &'a [u8], _shape: [usize; 2]) -> Result<Cow<'a, [u8]>> {
        Ok(Cow::Borrowed(stored))
    }

    /// The tensors that a layer `[n, k]` has in a layout, in the order of the file; `None` where the layout
    /// does not hold the format.
    fn tensors(&self, _layout: Layout, _shape: [usize; 2]) -> Option<Vec<Tensor>> {
        None
    }
    /// How compressed-tensors describes it; `None` where it has no name there.
    fn described(&self) -> Option<Described> {
        None
    }
    /// The same encoding as writers of a layout have it, with a per-tensor scale of this convention.
    fn plain(&self, layout: Layout, global: Option<Convention>) -> Q4Schema;
    /// An encoding without a part that says nothing in these values; `None` where there is none.
    ///
    /// # Errors
    /// As [`decoder`](Self::decoder).
    fn simpler(&self, _data: &SegmentData<'_>) -> Result<Option<Q4Schema>> {
        Ok(None)
    }
    /// Stored parts as those of [`plain`](Self::plain) or [`simpler`](Self::simpler), which
    /// [`lacks`](Self::lacks) does not keep out.
    fn recast(&self, parts: OwnedParts, _to: &Q4Schema) -> OwnedParts {
        parts
    }
    /// What keeps a layer `[n, k]` of checked values out of a layout that holds the format.
    ///
    /// # Errors
    /// As [`decoder`](Self::decoder).
    fn lacks(&self, _layout: Layout, _shape: [usize; 2], _data: &SegmentData<'_>) -> Result<Option<Lack>> {
        Ok(None)
    }

    /// Parameters as the binary contract of plugins has fields for them.
    fn wire(&self) -> Wire;

    /// Random stored parts of `[rows, k]`, a test's: every code, and scales far apart.
    fn sample(&self, shape: [usize; 2], draw: &Draw) -> OwnedParts;
    /// Random stored parts of `[rows, k]`, a model's: codes that `fill` draws, and scales that give outputs
    /// of a product the size of its inputs.
    fn plausible(&self, shape: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> Result<OwnedParts>;
    /// Every code under every scale at every place of a block: rows and columns are multiples of `factors`.
    fn every_code(&self, _factors: [usize; 2]) -> Option<Edge> {
        None
    }
    /// The same encoding in every size of block that checkpoints have, where there is a choice.
    fn blocks(&self) -> Vec<Q4Schema> {
        Vec::new()
    }
    /// The parameters of a schema that contradicts every weight; `None` where no parameter can.
    fn impossible(&self) -> Option<(&'static str, Q4Schema)> {
        None
    }
    /// Puts the largest code of either sign in place of each.
    fn loudest(&self, parts: &mut OwnedParts);
    /// Makes a row of whole bytes zero.
    fn silence(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        parts.bytes_mut(Part::Codes)[row * k / 2..][..k / 2].fill(0);
    }
    /// Makes a scale of `row` NaN.
    fn spoil(&self, parts: &mut OwnedParts, row: usize, k: usize);
}

/// What a layer would have to be for a layout, and is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// Of which part.
    pub part: Part,
    /// What it would have to be.
    pub need: &'static str,
    /// What it is.
    pub have: String,
}

/// What no value of a stored part may be.
#[derive(Clone, Copy, Debug)]
pub struct ValueRule {
    /// Of which part.
    pub part: Part,
    /// What has to be there instead, as errors say it.
    pub need: &'static str,
    /// How it is told.
    pub test: Test,
}

/// How a value that may not be is told.
#[derive(Clone, Copy, Debug)]
pub enum Test {
    /// By its byte, one for each block along k.
    Byte {
        /// It may not be.
        is_bad: fn(u8) -> bool,
        /// Its value.
        in_words: fn(u8) -> String,
    },
    /// By its byte, one for each element.
    Code {
        /// It may not be.
        is_bad: fn(u8) -> bool,
    },
    /// By the bits of an f32.
    Float32 {
        /// It may not be.
        is_bad: fn(u32) -> bool,
    },
    /// NaN or infinite, in an io dtype.
    Finite,
    /// NaN or infinite, an f16 within a block.
    Blocks {
        /// Of a block.
        bytes: usize,
        /// Where each is in a block.
        floats: &'static [usize],
    },
}

/// The values of all codes.
#[derive(Clone, Copy, Debug)]
pub struct Codebook {
    /// In the order of codes.
    pub values: [f32; 16],
    /// What has to be stored, as errors say it.
    pub need: &'static str,
}

/// Rows of one segment, decoded.
pub trait Decode: Send + Sync {
    /// The values of row `r`, bit for bit what the format defines.
    fn row(&self, r: usize, out: &mut [f32]);
    /// Packed codes and block scales of an NVFP4 row, whose products with NVFP4 inputs are sums of integers.
    fn nvfp4_row(&self, _r: usize) -> Option<(&[u8], &[u8])> {
        None
    }
    /// The per-tensor scale.
    fn global(&self) -> Option<GlobalScale> {
        None
    }
}

/// What one stored part of a segment has to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartSpec {
    /// Which.
    pub part: Part,
    /// As errors call it.
    pub what: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Another type that its bytes may be called.
    pub or: Option<DType>,
    /// Extents.
    pub shape: Vec<usize>,
}

impl PartSpec {
    pub(crate) fn new(part: Part, what: &'static str, dtype: DType, shape: &[usize]) -> Self {
        Self { part, what, dtype, or: None, shape: shape.to_vec() }
    }
    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
    /// No element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Parameters of an encoding, by the fields of `q4_linear_spec`. `None`: not said, or not known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wire {
    /// Order of block scales.
    pub scale_layout: Option<ScaleLayout>,
    /// Convention of the per-tensor scale; `Some(None)` where there is none.
    pub global: Option<Option<Convention>>,
    /// Order of codes in a byte.
    pub nibble_order: Option<NibbleOrder>,
    /// Elements per scale.
    pub block: u32,
    /// Scales per second scale.
    pub nested_block: u32,
    /// Type of scales, where a format has several.
    pub scales: Option<DType>,
    /// Type of a dense matrix.
    pub dense: Option<DType>,
}

/// A format before its parameters are known.
pub struct Kind {
    /// Names that its encodings have, each with its number in the binary contract.
    pub names: &'static [(&'static str, u32)],
    /// Encodings that checkpoints have, the plainest first.
    pub usual: &'static [Q4Schema],
    /// Encodings that are tried besides.
    pub rarer: &'static [Q4Schema],
    /// The encoding of a name and its parameters, or the field that is missing.
    pub from_wire: fn(&str, &Wire) -> std::result::Result<Q4Schema, &'static str>,
    /// How dense matrices become weights of it; `None` where they do not.
    pub quantization: Option<Quantization>,
    /// Weights at the edges of the encodings of a name, whose rows and columns are multiples of factors.
    pub edges: fn(&str, [usize; 2]) -> Vec<Edge>,
    /// The layouts that checkpoints store it in.
    pub(crate) rules: &'static [Rule],
}

impl Kind {
    /// The first of its names: how users call the format.
    pub fn name(&self) -> &'static str {
        self.names[0].0
    }
}

/// Every format, in the order of reports.
pub static KINDS: [&Kind; 7] =
    [&nvfp4::KIND, &nf4::KIND, &mxfp4::KIND, &int4::KIND, &ggml::KIND, &fp8::KIND, &dense::KIND];

/// Names of all encodings: what overrides and reports spell.
pub fn names() -> impl Iterator<Item = &'static str> + Clone {
    KINDS.iter().flat_map(|kind| kind.names.iter().map(|n| n.0))
}

/// The format that has encodings of this name.
pub fn kind(name: &str) -> Option<&'static Kind> {
    KINDS.into_iter().find(|kind| kind.names.iter().any(|n| n.0 == name))
}

/// The formats that dense matrices are quantised to, each with how.
pub fn quantizations() -> impl Iterator<Item = (&'static Kind, &'static Quantization)> + Clone {
    KINDS.iter().filter_map(|kind| Some((*kind, kind.quantization.as_ref()?)))
}

/// Encodings of a name that are tried, those that checkpoints have first.
pub fn encodings(name: &str) -> Vec<Q4Schema> {
    let all = kind(name).into_iter().flat_map(|kind| kind.usual.iter().chain(kind.rarer));
    all.filter(|s| s.id().name == name).copied().collect()
}
