//! What a checkpoint stores a layer in: layouts, the tensors that one consists of, and how they are told.
use super::Q4Schema;
use crate::{DType, NibbleOrder, Part, Result};
use serde::Serialize;
use std::collections::BTreeMap;

/// Type and shape of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorMeta {
    /// Element type; `None` for one that no weight of ours has.
    pub dtype: Option<DType>,
    /// Extents.
    pub shape: Box<[usize]>,
}

impl TensorMeta {
    /// Elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Stored tensors by name.
pub trait Tensors {
    /// Type and shape of the tensor `name`, if there is one.
    fn meta(&self, name: &str) -> Option<&TensorMeta>;
}

impl Tensors for BTreeMap<String, TensorMeta> {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.get(name)
    }
}

/// How a layer's tensors are named and arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Layout {
    /// `weight`, `weight_scale`, `weight_scale_2` (multiplies), `input_scale`.
    #[serde(rename = "modelopt")]
    ModelOpt,
    /// `weight_packed`, `weight_scale`, `weight_global_scale` (divides), `input_global_scale`.
    CompressedTensors,
    /// `_weight_qdata`, `_weight_scale`, `_weight_per_tensor_scale` (multiplies).
    #[serde(rename = "torchao")]
    TorchAo,
    /// `weight.qdata`, `weight.scale` (or without `weight.`): single-level scales; NF4 as `weight`, `absmax`,
    /// `quant_map`.
    Dat,
    /// `weight`, `weight.absmax`, `weight.quant_map`, `weight.quant_state.bitsandbytes__nf4`, nested ones.
    Bitsandbytes,
    /// `qweight`, `scales`, `qzeros`, perhaps `g_idx`: eight in features in a word.
    Gptq,
    /// `qweight`, `scales`, `qzeros`: eight out features in a word.
    Awq,
    /// `weight.q4_k` and the like: blocks of a GGUF file.
    Gguf,
    /// `weight` in words, `scales`, perhaps `biases`.
    Mlx,
    /// `weight` of E4M3, `weight_scale` or `weight_scale_inv`, perhaps `input_scale`: FP8 of several tools.
    Fp8,
    /// `weight` of floats.
    Dense,
}

impl Layout {
    /// Spelling of `--layout` and of reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ModelOpt => "modelopt",
            Self::CompressedTensors => "compressed-tensors",
            Self::TorchAo => "torchao",
            Self::Dat => "dat",
            Self::Bitsandbytes => "bitsandbytes",
            Self::Gptq => "gptq",
            Self::Awq => "awq",
            Self::Gguf => "gguf",
            Self::Mlx => "mlx",
            Self::Fp8 => "fp8",
            Self::Dense => "dense",
        }
    }
}

/// Keys of a layer's tensors, full names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LayerKeys {
    /// Packed codes, or the dense matrix.
    pub weight: String,
    /// Block scales.
    pub scales: Option<String>,
    /// Zero points of blocks, or their biases.
    pub zeros: Option<String>,
    /// Per-tensor scale.
    pub global: Option<String>,
    /// Calibrated per-tensor scale of the activations, of the same convention as `global`.
    pub input_global: Option<String>,
    /// Absmax in place of block scales: f32, or u8 codes when nested.
    pub absmax: Option<String>,
    /// The 16 codebook values, to be checked.
    pub quant_map: Option<String>,
    /// The 256 values of the nested codes.
    pub nested_map: Option<String>,
    /// f32 absmax of the nested codes.
    pub nested_absmax: Option<String>,
}

impl LayerKeys {
    /// All there are.
    pub fn all(&self) -> impl Iterator<Item = &str> {
        let Self {
            scales, zeros, global, input_global, absmax, quant_map, nested_map, nested_absmax, ..
        } = self;
        let optional = [scales, zeros, global, input_global, absmax, quant_map, nested_map, nested_absmax];
        [self.weight.as_str()].into_iter().chain(optional.into_iter().flatten().map(String::as_str))
    }

    /// The tensor that holds a part.
    pub fn of(&self, part: Part) -> Option<&str> {
        match part {
            Part::Codes => Some(&self.weight),
            Part::Scales => self.scales.as_deref().or(self.absmax.as_deref()),
            Part::Zeros => self.zeros.as_deref(),
            Part::Map => self.nested_map.as_deref(),
            Part::SecondScales => self.nested_absmax.as_deref(),
        }
    }
}

/// How compressed-tensors describes the weights of a format in `quantization_config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// `format`, of a group and of the whole.
    pub format: &'static str,
    /// `type` of the numbers.
    pub kind: &'static str,
    /// `num_bits` of a code.
    pub bits: u64,
    /// `strategy`: how far a scale reaches.
    pub strategy: &'static str,
    /// `group_size`; 0 where a scale reaches over all of k.
    pub group_size: u32,
    /// `scale_dtype`; none where it is that of the stored scales.
    pub scale_dtype: Option<&'static str>,
    /// `symmetric`: without zero points.
    pub symmetric: bool,
}

/// What bitsandbytes writes as JSON beside a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantState {
    /// `nf4`.
    pub quant_type: String,
    /// Elements per absmax.
    pub block: u32,
    /// `[n, k]`.
    pub shape: Vec<usize>,
    /// Codes per nested absmax and the offset, when double-quantised.
    pub nested: Option<(u32, f32)>,
}

/// A layer whose parts fit together.
#[derive(Clone, Debug, PartialEq)]
pub struct Detected {
    /// Arrangement.
    pub layout: Layout,
    /// Encoding.
    pub schema: Q4Schema,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Tensor names.
    pub keys: LayerKeys,
    /// Offset of nested absmax.
    pub nested_offset: f32,
}

/// One tensor of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name behind that of the layer and a dot.
    pub suffix: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Extents; none for [`Content::State`], whose text they depend on.
    pub shape: Vec<usize>,
    /// What it holds.
    pub content: Content,
}

/// What a tensor of a layer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A stored part, as it is.
    Part(Part),
    /// Codes in this order.
    Codes(NibbleOrder),
    /// The per-tensor scale.
    Global,
    /// The values of the codes.
    Codebook,
    /// Zero points, those of eight out features in a word.
    ZeroWords,
    /// Codes or zero points as words; of zero points that are not there, those that codes have without any.
    Words(Part, Words),
    /// A part with its rows as columns.
    Transposed(Part),
    /// The group of each in feature, so many in each.
    Groups(u32),
    /// Blocks of GGML: so many bytes of scales, then so many of codes, in runs of so many, whose bytes have
    /// an element of the first half of a run low and one of the second half high.
    Blocks([usize; 3]),
    /// The extents of the matrix.
    Shape([usize; 2]),
    /// The JSON of bitsandbytes.
    State,
}

/// What words of int4 hold whose matrices lie the other way round: rows are in features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Words {
    /// A word has eight in features; of zero points one is stored less than there are, as GPTQ's tools did
    /// first.
    Gptq,
    /// The same with zero points as they are.
    GptqV2,
    /// A word has eight out features, the even ones first.
    Awq,
}

impl Tensor {
    pub(crate) fn new(suffix: &'static str, content: Content, dtype: DType, shape: &[usize]) -> Self {
        Self { suffix, dtype, shape: shape.to_vec(), content }
    }
}

/// Reads the JSON beside a bitsandbytes weight.
pub type StateReader<'a> = &'a dyn Fn(&str) -> Result<QuantState>;

/// How tensors of one layout are told and read.
pub(crate) struct Rule {
    pub layout: Layout,
    pub is_there: fn(&Probe<'_>) -> bool,
    pub read: fn(&mut Probe<'_>, StateReader<'_>) -> Result<Option<Detected>>,
}

/// The tensors of one layer while they are looked at, and what is wrong with them.
pub(crate) struct Probe<'a> {
    pub layer: &'a str,
    pub table: &'a dyn Tensors,
    pub problems: Vec<String>,
}

impl Probe<'_> {
    pub(crate) fn has(&self, suffix: &str) -> bool {
        self.meta(suffix).is_some()
    }
    /// It is there, and of an io dtype.
    pub(crate) fn is_float(&self, suffix: &str) -> bool {
        self.meta(suffix).is_some_and(|m| m.dtype.is_some_and(DType::is_io))
    }
    pub(crate) fn meta(&self, suffix: &str) -> Option<&TensorMeta> {
        self.table.meta(&format!("{}.{suffix}", self.layer))
    }

    pub(crate) fn key(&self, suffix: &str) -> Option<String> {
        Some(format!("{}.{suffix}", self.layer)).filter(|k| self.table.meta(k).is_some())
    }

    pub(crate) fn tensor(&mut self, suffix: &str, dtypes: &[DType]) -> Option<TensorMeta> {
        let names: Vec<_> = dtypes.iter().map(|d| d.as_str()).collect();
        let Some(meta) = self.table.meta(&format!("{}.{suffix}", self.layer)).cloned() else {
            self.problem(suffix, &names.join(" or "), "no such tensor");
            return None;
        };
        if !meta.dtype.is_some_and(|d| dtypes.contains(&d)) {
            let have = meta.dtype.map_or("another type", DType::as_str).to_owned();
            self.problem(suffix, &names.join(" or "), &have);
            return None;
        }
        Some(meta)
    }

    pub(crate) fn matrix(&mut self, suffix: &str, dtypes: &[DType]) -> Option<[usize; 2]> {
        let meta = self.tensor(suffix, dtypes)?;
        match &*meta.shape {
            &[n, k] if n > 0 && k > 0 => Some([n, k]),
            other => {
                self.problem(suffix, "a matrix with at least one element", &format!("{other:?}"));
                None
            }
        }
    }

    pub(crate) fn count(&mut self, suffix: &str, dtypes: &[DType], need: usize, why: &str) {
        if let Some(meta) = self.tensor(suffix, dtypes)
            && meta.len() != need
        {
            self.problem(suffix, &format!("{need} elements, {why}"), &format!("{:?}", meta.shape));
        }
    }

    pub(crate) fn problem(&mut self, tensor: &str, need: &str, have: &str) {
        self.problems.push(format!("  {}.{tensor}: need {need}; have {have}", self.layer));
    }
}
