//! What a backend is judged for: levels, profiles, and claims, each a kind of product that it agrees to
//! compute.
//!
//! A backend never lists its claims. It is asked, product by product, so that a claim and a refusal cannot
//! disagree.
use crate::Limits;
use crate::limits::segments;
use q4_core::{DType, Device, ExecPath, HostEnv, LinearSpec, OpSet, Q4Backend, Q4Schema};
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

/// Activation formats that have claims.
pub(crate) const ACTIVATIONS: [&str; 3] = ["native", "int8", "nvfp4"];
/// A claim and how far it reaches. The cases prove it: all inside is accepted and right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Proof {
    /// The kind of product.
    pub claim: Claim,
    /// The products of that kind.
    pub limits: Limits,
}

impl Proof {
    /// Whether it is about the kind of product of a spec.
    pub fn is_about(&self, spec: &LinearSpec, path: ExecPath) -> bool {
        let c = &self.claim;
        (c.schema, c.activations, c.device, c.path)
            == (spec.schema.id().name, spec.activations.as_str(), spec.device, path)
    }
}

/// Every kind of product that `backend` agrees to compute on `device`.
pub fn claims(backend: &dyn Q4Backend, env: &HostEnv, device: Device) -> Vec<Claim> {
    proofs(backend, env, device).into_iter().map(|p| p.claim).collect()
}

/// Every kind of product that `backend` agrees to compute on `device`, each with its limits: one product
/// suffices, everything else is asked, and then measured.
pub fn proofs(backend: &dyn Q4Backend, env: &HostEnv, device: Device) -> Vec<Proof> {
    let mut offers: Vec<_> = backend.descriptor().offers.clone();
    offers.sort();
    offers.dedup();
    let mut found = Vec::new();
    for schema in q4_core::formats::names() {
        for (_, path) in offers.iter().filter(|(name, _)| name == schema) {
            for activations in ACTIVATIONS {
                if let Some(limits) = Limits::find(backend, env, (schema, activations), *path, device) {
                    found.push(Proof { claim: Claim { schema, activations, device, path: *path }, limits });
                }
            }
        }
    }
    found
}

/// A shape that every backend has: the smallest that any tile divides.
pub(crate) fn plain_spec(schema: Q4Schema, activations: q4_core::Activations, device: Device) -> LinearSpec {
    LinearSpec {
        segments: segments(&[128], 0),
        schema,
        k: 256,
        max_m: 16,
        x: DType::F32,
        y: DType::F32,
        activations,
        device,
        ops: OpSet::FORWARD,
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
