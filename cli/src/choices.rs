//! The values that options choose from, with the words the help explains them in.
use clap::ValueEnum;
use clap::builder::PossibleValue;
use q4_core::detect::Layout;
use q4_core::formats::{self, Quantization, quantizations};
use q4_core::{Device, Q4Schema};
use std::sync::LazyLock;

macro_rules! choices {
    ($($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident),* $(,)? })*) => { $(
        $(#[$doc])*
        #[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $name { $($(#[$vdoc])* $variant),* }
    )* };
}

choices! {
    /// `--compute`.
    Compute {
        /// The best; an error where a kernel exists and cannot be had here.
        #[default]
        Auto,
        /// Packed weights or an error.
        KernelOnly,
        /// As auto, and a dense copy where a kernel cannot be had: reported, slower.
        KernelOrFallback,
        /// A dense copy always.
        DequantMatmulOnly,
    }
    /// `--log-format`.
    LogFormat {
        /// Lines for people.
        #[default]
        Text,
        /// A JSON object a line, with the time.
        Json,
    }
    /// `--activations`.
    ActivationFormat {
        /// What the checkpoint declares, else what is usual for such a file.
        #[default]
        Auto,
        /// Floats as they are.
        Native,
        /// int8 with a scale per 16.
        Int8,
        /// NVFP4.
        Nvfp4,
        /// FP8 of FP8 weights, as the checkpoint scales them; of others as auto.
        Fp8,
    }
    /// `--dtype`.
    Dtype {
        /// IEEE binary32.
        #[default]
        #[value(aliases = ["f32", "fp32", "float"])]
        Float32,
        /// IEEE binary16.
        #[value(aliases = ["f16", "fp16", "half"])]
        Float16,
        /// Upper half of a float32.
        #[value(alias = "bf16")]
        Bfloat16,
    }
    /// `--kv-cache`.
    KvCache {
        /// IEEE binary16.
        #[default]
        #[value(aliases = ["f16", "fp16"])]
        Float16,
        /// IEEE binary32.
        #[value(aliases = ["f32", "fp32"])]
        Float32,
    }
    /// `--unified-memory`.
    Unified {
        /// Never.
        #[default]
        Disabled,
        /// Where possible.
        Prefer,
        /// Or stop.
        Require,
    }
    /// `--color`.
    ColorChoice {
        /// On a terminal, unless NO_COLOR is set.
        #[default]
        Auto,
        /// Always.
        Always,
        /// Never.
        Never,
    }
    /// `--layout`.
    OutputLayout {
        /// NVIDIA ModelOpt.
        #[default]
        Modelopt,
        /// llm-compressor, vLLM.
        CompressedTensors,
        /// bitsandbytes.
        Bitsandbytes,
        /// GPTQModel, vLLM.
        Gptq,
        /// AutoAWQ (gemm), vLLM.
        Awq,
        /// One .gguf file: llama.cpp.
        Gguf,
        /// One .dat file.
        Dat,
    }
    /// `--scales`.
    ScaleLevels {
        /// Block scales and one per tensor.
        #[default]
        TwoLevel,
        /// Block scales only.
        Single,
    }
    /// `--method`.
    ScaleMethod {
        /// The scale with the smallest error, of 17 around that of rtn.
        #[default]
        Search,
        /// Round to nearest: the largest value of a block maps to 6.
        Rtn,
        /// 6 or 4, whichever has the smaller error.
        FourOverSix,
    }
}

/// `--format` and `--quantize`: a format that dense matrices are quantised to.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// As it is spelled, and as core names it.
    pub name: &'static str,
    /// How they are.
    pub how: &'static Quantization,
}

static FORMATS: LazyLock<Vec<Format>> =
    LazyLock::new(|| quantizations().map(|(kind, how)| Format { name: kind.name(), how }).collect());

impl ValueEnum for Format {
    fn value_variants<'a>() -> &'a [Self] {
        &FORMATS
    }
    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name).help(self.how.about))
    }
}

/// The first that core lists.
impl Default for Format {
    fn default() -> Self {
        FORMATS[0]
    }
}

/// `bench --format`: an encoding, of which random weights are made.
#[derive(Clone, Copy, Debug)]
pub struct Encoding {
    /// As core spells it.
    pub name: &'static str,
    /// What dense matrices become, or else the plainest that checkpoints have.
    pub schema: Q4Schema,
}

static ENCODINGS: LazyLock<Vec<Encoding>> = LazyLock::new(|| {
    let written = |name| FORMATS.iter().find(|f| f.name == name).map(|f| f.how.default_target().schema());
    let usual = |name| formats::encodings(name).first().copied();
    let of = |name| Some(Encoding { name, schema: written(name).or_else(|| usual(name))? });
    formats::names().filter_map(of).collect()
});

impl ValueEnum for Encoding {
    fn value_variants<'a>() -> &'a [Self] {
        &ENCODINGS
    }
    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name))
    }
}

/// The first that core lists.
impl Default for Encoding {
    fn default() -> Self {
        ENCODINGS[0]
    }
}

impl From<OutputLayout> for Layout {
    fn from(layout: OutputLayout) -> Self {
        match layout {
            OutputLayout::Modelopt => Self::ModelOpt,
            OutputLayout::CompressedTensors => Self::CompressedTensors,
            OutputLayout::Bitsandbytes => Self::Bitsandbytes,
            OutputLayout::Gptq => Self::Gptq,
            OutputLayout::Awq => Self::Awq,
            OutputLayout::Gguf => Self::Gguf,
            OutputLayout::Dat => Self::Dat,
        }
    }
}

/// `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device whose kernels pass their self-check, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA device; the first one without a number.
    Cuda(u32),
    /// A device that a plugin brings.
    Vendor(Device),
}

/// Parses `--device`.
pub fn device(text: &str) -> Result<DeviceChoice, String> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "cpu" => Ok(DeviceChoice::Cpu),
        "cuda" => Ok(DeviceChoice::Cuda(0)),
        other => {
            let choice = other.split_once(':').and_then(|(name, ordinal)| {
                let is_plugin = name.starts_with(|c: char| c.is_ascii_lowercase())
                    && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
                let ordinal = ordinal.parse().ok()?;
                match name {
                    "cuda" => Some(DeviceChoice::Cuda(ordinal)),
                    "cpu" | "auto" => None,
                    _ => is_plugin.then(|| DeviceChoice::Vendor(Device::vendor(name, ordinal))),
                }
            });
            choice.ok_or_else(|| "need auto, cpu, cuda, cuda:N or NAME:N of a plugin".to_owned())
        }
    }
}

/// Parses an amount of memory.
pub fn bytes(text: &str) -> Result<u64, String> {
    q4_core::memory::parse_bytes(text).map_err(|_| "need a number and a unit, e.g. 24GiB or 512M".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed() {
        assert_eq!(device("cuda:3"), Ok(DeviceChoice::Cuda(3)));
        assert_eq!(device("cuda"), Ok(DeviceChoice::Cuda(0)));
        assert_eq!(device("acme:1"), Ok(DeviceChoice::Vendor(Device::vendor("acme", 1))));
        for bad in
            ["gpu", "cuda:", "cuda:-1", "cuda:x", "", "cpu:0", "acme", "acme:", ":0", "Acme:0", "a b:0"]
        {
            assert!(device(bad).is_err(), "{bad}");
        }
    }
}
