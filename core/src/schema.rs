//! What the bits of a weight mean and what its product does with activations. Everything that changes a value
//! is here.
use crate::{Convention, DType, GlobalScale, Rule};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Name and revision of a weight encoding, e.g. `nvfp4@1`. The revision changes when any decoded value could.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct SchemaId {
    /// Lower-case name.
    pub name: &'static str,
    /// Revision.
    pub revision: u16,
}

impl fmt::Display for SchemaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}@{}", self.name, self.revision))
    }
}

/// Which half of a byte holds the even element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NibbleOrder {
    /// NVFP4 everywhere; NF4 in `.dat` files.
    LowFirst,
    /// NF4 as bitsandbytes packs it.
    HighFirst,
}

/// Order in which NVFP4 block scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleLayout {
    /// `[n, k/16]`.
    RowMajor,
    /// The tensor cores' tiles of 128 rows by 4 scales (`formats::swizzle`).
    Swizzled128x4,
}

/// A complete, closed description of one weight encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case", tag = "format")]
#[non_exhaustive]
pub enum Q4Schema {
    /// E2M1 codes, low nibble first, an E4M3 scale per 16 along k:
    /// `value = code * fl32(scale ∘ global)`, rounded to f32 after each product.
    Nvfp4 {
        /// Order of the block scales.
        scale_layout: ScaleLayout,
        /// Convention of the per-tensor scale; `None` for single-level scales.
        global: Option<Convention>,
    },
    /// Codes into the NF4 codebook, an f32 absmax per `block` consecutive elements of the flattened `[n, k]`:
    /// `value = codebook[code] * absmax`, rounded once to f32.
    Nf4 {
        /// Packing.
        nibble_order: NibbleOrder,
        /// Elements per absmax, 32 to 4096; blocks cross rows.
        block: u32,
        /// Double quantisation: absmax is itself 8-bit, with this many absmax per f32. A schema of its own.
        nested: Option<u32>,
    },
    /// Not quantised: `[n, k]` of f32, f16 or bf16.
    Dense {
        /// Stored type.
        dtype: DType,
    },
}

impl Q4Schema {
    /// Identity used by overrides and reports.
    pub const fn id(&self) -> SchemaId {
        let name = match self {
            Self::Nvfp4 { .. } => "nvfp4",
            Self::Nf4 { nested: None, .. } => "nf4",
            Self::Nf4 { nested: Some(_), .. } => "nf4-dq",
            Self::Dense { .. } => "dense",
        };
        SchemaId { name, revision: 1 }
    }
    /// Codes of 4 bits, as opposed to a dense matrix.
    pub const fn is_4bit(&self) -> bool {
        !matches!(self, Self::Dense { .. })
    }
    /// Bytes that `n * k` elements take in this encoding, codes and scales, per-tensor scalars aside.
    pub fn stored_bytes(&self, n: usize, k: usize) -> u64 {
        let elements = n as u64 * k as u64;
        match *self {
            Self::Nvfp4 { .. } => elements / 2 + elements / 16,
            Self::Nf4 { block, nested, .. } => {
                let blocks = elements.div_ceil(u64::from(block));
                let scales = nested.map_or(4 * blocks, |b| blocks + 4 * blocks.div_ceil(u64::from(b)));
                elements.div_ceil(2) + scales
            }
            Self::Dense { dtype } => elements * dtype.size() as u64,
        }
    }
}

impl fmt::Display for Q4Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense { dtype } => write!(f, "dense ({dtype})"),
            _ => self.id().fmt(f),
        }
    }
}

/// What a product does with its activations. Part of the numerics, so never a kernel's choice.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "format")]
pub enum Activations {
    /// Used as they are, f32 accumulation (W4A16).
    Native,
    /// Rounded to int8 with an f32 scale per 16 (`formats::int8`), integer block products (W4A8).
    Int8,
    /// Rounded to NVFP4 (W4A4), what FP4 tensor cores compute.
    Nvfp4(ActQuant),
}

/// The NVFP4 quantiser of activations. The source type of its rule is the type of the product's input.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActQuant {
    /// Rounding of scales and codes.
    pub rule: Rule,
    /// Where the per-tensor scale comes from.
    pub global: ActGlobal,
}

/// Source of the activations' per-tensor scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActGlobal {
    /// Single-level scales.
    None,
    /// Calibrated, stored with the checkpoint.
    Static(GlobalScale),
    /// The amax of the whole call divided by 2688. The result depends on how a prompt is split into calls.
    PerCall,
}

impl Activations {
    /// Spelling of the command line and of reports.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Int8 => "int8",
            Self::Nvfp4(_) => "nvfp4",
        }
    }
}

impl fmt::Display for Activations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
