//! Per-tensor scales with their convention, and the named NVFP4 quantiser rules. Neither is ever a bare float
//! or a flag.
use crate::{Code, Error, Result};
use serde::{Deserialize, Serialize};

/// What a stored per-tensor scale does to a block scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Convention {
    /// `value = code * (scale * g)`: ModelOpt `weight_scale_2`, torchao `per_tensor_scale`.
    Multiply,
    /// `value = code * (scale / g)`: compressed-tensors `weight_global_scale`.
    Divide,
}

/// A finite, positive f32 scale of a whole tensor, with its [`Convention`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GlobalScale {
    convention: Convention,
    value: f32,
}

impl GlobalScale {
    /// Largest E2M1 value times largest E4M3 value: the amax a two-level scale maps to.
    pub const RANGE: f32 = 6.0 * 448.0;

    /// A scale of `convention`.
    ///
    /// # Errors
    /// [`Code::ScaleInvalid`] for NaN, infinity, zero and negative values.
    pub fn new(convention: Convention, value: f32) -> Result<Self> {
        if !(value.is_finite() && value > 0.0) {
            return Err(Error::new(Code::ScaleInvalid, "per-tensor scale")
                .need("a finite value above zero")
                .have(value.to_string()));
        }
        Ok(Self { convention, value })
    }
    /// Multiplying scale, as ModelOpt and torchao store it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn multiply(value: f32) -> Result<Self> {
        Self::new(Convention::Multiply, value)
    }
    /// Dividing scale, as compressed-tensors stores it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn divide(value: f32) -> Result<Self> {
        Self::new(Convention::Divide, value)
    }
    /// The convention.
    pub fn convention(self) -> Convention {
        self.convention
    }
    /// The stored number.
    pub fn value(self) -> f32 {
        self.value
    }
    /// The factor on one block scale, rounded once to f32 (formats: `scale * g` or `scale / g`).
    pub fn effective(self, block_scale: f32) -> f32 {
        match self.convention {
            Convention::Multiply => block_scale * self.value,
            Convention::Divide => block_scale / self.value,
        }
    }
    /// The factor as an exact multiplier in f64 (a divisor's reciprocal is rounded once).
    pub fn multiplier(self) -> f64 {
        match self.convention {
            Convention::Multiply => f64::from(self.value),
            Convention::Divide => 1.0 / f64::from(self.value),
        }
    }
}

/// How an NVFP4 quantiser rounds. The libraries differ in bits, so each rule has its library's name.
/// `am` is the amax of a 16-block, `g` the multiplying and `G` the dividing per-tensor scale, all in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Rule {
    /// torchao 0.18: scale `e4m3(clamp((am/6)/g, 2^-6, 448))`, element times the reciprocal, ties to even.
    TorchAo,
    /// NVIDIA ModelOpt: scale `e4m3(clamp(am/(6*g), 2^-9, 448))` (1.0 for a zero block), element divided,
    /// ties to even.
    ModelOpt,
    /// compressed-tensors: scale `e4m3(min(G*(am/6), 448))` (0.125 where that is 0), element divided, ties to
    /// even; `am/6` is rounded in the dtype of the source tensor.
    CompressedTensors,
    /// TransformerEngine, FlashInfer exact mode: scale `e4m3(am * (G*(1/6)))`, element times the reciprocal,
    /// ties to even.
    TransformerEngine,
    /// Old libNVFP4 and `.dat` run time: scale `e4m3(clamp(am/6, 2^-16, 448))`, element divided, ties away
    /// from zero.
    Runtime,
}

impl Rule {
    /// Every rule.
    pub const ALL: [Rule; 5] =
        [Rule::TorchAo, Rule::ModelOpt, Rule::CompressedTensors, Rule::TransformerEngine, Rule::Runtime];
    /// Stable spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TorchAo => "torchao",
            Self::ModelOpt => "modelopt",
            Self::CompressedTensors => "compressed-tensors",
            Self::TransformerEngine => "transformer-engine",
            Self::Runtime => "runtime",
        }
    }
    /// The convention its per-tensor scales have.
    pub const fn convention(self) -> Convention {
        match self {
            Self::TorchAo | Self::ModelOpt | Self::Runtime => Convention::Multiply,
            Self::CompressedTensors | Self::TransformerEngine => Convention::Divide,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_positive_finite_scales_exist() {
        for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(GlobalScale::multiply(bad).expect_err("must be refused").code(), Code::ScaleInvalid);
        }
    }

    #[test]
    fn conventions_are_inverse() -> Result<()> {
        let (m, d) = (GlobalScale::multiply(0.25)?, GlobalScale::divide(4.0)?);
        assert_eq!(m.effective(3.5), d.effective(3.5));
        assert_eq!(m.multiplier(), d.multiplier());
        Ok(())
    }
}
