//! Names of encodings, orders of their parts, and what a product does with its activations.
use crate::{GlobalScale, Rule};
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
    /// Rounded to FP8 (`formats::fp8::inputs`), what FP8 tensor cores compute (W8A8).
    Fp8(Fp8Inputs),
}

/// Where the f32 scale of FP8 activations comes from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Inputs {
    /// The amax of a row of a call divided by 448: a scale a token.
    PerRow,
    /// That of each 128 in features of a row; the last may be fewer.
    PerBlock,
    /// Calibrated, stored with the checkpoint; it multiplies.
    Static(GlobalScale),
}

impl Fp8Inputs {
    /// Spelling in reports, without the value of a stored scale.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PerRow => "per-row",
            Self::PerBlock => "per-block",
            Self::Static(_) => "static",
        }
    }
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
            Self::Fp8(_) => "fp8",
        }
    }
}

impl fmt::Display for Activations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
