//! What a backend is judged for: levels, profiles, and claims, each a kind of product that it agrees to
//! compute.
use q4_core::{Device, ExecPath};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a group of cases is about. Cumulative: a later level means little where an earlier one fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Level {
    /// Descriptor, probe and verdicts; the C table where there is one.
    L0,
    /// Decoding, bit for bit.
    L1,
    /// `y = x W^T` within its bound.
    L2,
    /// `dx = dy W` within its bound.
    L3,
    /// What must be refused is refused, and what is refused leaves no trace.
    L4,
    /// What is claimed about a product is what happened.
    L5,
}

impl Level {
    /// All of them, in order.
    pub const ALL: [Self; 6] = [Self::L0, Self::L1, Self::L2, Self::L3, Self::L4, Self::L5];
    /// `L0`.
    pub const fn as_str(self) -> &'static str {
        ["L0", "L1", "L2", "L3", "L4", "L5"][self as usize]
    }
    /// One word.
    pub const fn title(self) -> &'static str {
        ["abi", "decode", "forward", "backward", "negative", "honesty"][self as usize]
    }
    /// `L2`, `l2` or `forward`.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|l| l.as_str().eq_ignore_ascii_case(text) || l.title() == text)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What a backend is to be used for, and so which levels it must pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// L0 to L2, L4 and L5.
    #[default]
    Inference,
    /// The same and L3.
    Training,
}

impl Profile {
    /// Levels it consists of.
    pub const fn levels(self) -> &'static [Level] {
        match self {
            Self::Inference => &[Level::L0, Level::L1, Level::L2, Level::L4, Level::L5],
            Self::Training => &Level::ALL,
        }
    }
    /// Stable spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Inference => "inference",
            Self::Training => "training",
        }
    }
    /// The profile with that spelling.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Inference, Self::Training].into_iter().find(|p| p.as_str() == text)
    }
}

/// One kind of product: `nvfp4@1/int8/cpu/fused-dequant`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Claim {
    /// Name of the encoding.
    pub schema: &'static str,
    /// Activation format.
    pub activations: &'static str,
    /// Where it runs.
    pub device: Device,
    /// How it is computed.
    pub path: ExecPath,
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@1/{}/{}/{}", self.schema, self.activations, self.device, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_round_trip() {
        for l in Level::ALL {
            assert_eq!(Level::parse(l.as_str()), Some(l));
            assert_eq!(Level::parse(l.title()), Some(l));
        }
        assert_eq!((Level::parse("l3"), Level::parse("L6")), (Some(Level::L3), None));
        for p in [Profile::Inference, Profile::Training] {
            assert_eq!(Profile::parse(p.as_str()), Some(p));
        }
    }
}
