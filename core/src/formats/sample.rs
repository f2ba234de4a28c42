//! Weights made up for tests and measurements: every format makes its own of the same draws.
use super::Q4Schema;
use crate::{DType, OwnedParts, Result};
use half::{bf16, f16};

/// Random words for one segment, the same on every machine.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// All that makes the values.
    pub seed: u64,
    /// Sums have to fit f16: no large scales where nothing makes them small again.
    pub tame: bool,
}

impl Draw {
    /// Word `i`, which never depends on how many were drawn before.
    pub fn word(&self, i: usize) -> u64 {
        mix(self.seed.wrapping_mul(0x1_0000_01b3) ^ (i as u64) << 20)
    }
    /// Two codes in every byte, over all values.
    pub fn codes(&self, elements: usize) -> Vec<u8> {
        let mut bytes = vec![0; elements.div_ceil(2)];
        for (i, to) in bytes.chunks_mut(8).enumerate() {
            to.copy_from_slice(&self.word(i).to_le_bytes()[..to.len()]);
        }
        bytes
    }
}

/// Counter-based: the value of an index never depends on how many were drawn before.
pub fn mix(i: u64) -> u64 {
    let mut z = i.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// `[0, 1)` from the upper bits.
pub fn uniform(word: u64) -> f32 {
    (word >> 40) as f32 / (1u32 << 24) as f32
}

/// A scale as it is stored, in an io dtype.
pub(super) fn bytes_of(value: f32, scales: DType) -> Vec<u8> {
    match scales {
        DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

/// A weight at the edge of a format: every code under every scale, scales at the ends of their type.
pub struct Edge {
    /// Name within the format.
    pub id: String,
    /// Encoding.
    pub schema: Q4Schema,
    /// Out and in features.
    pub shape: [usize; 2],
    /// Legal and nowhere written: whoever serves it serves it rightly, and it may be refused.
    pub is_rare: bool,
    /// Makes it.
    pub parts: Box<dyn Fn() -> Result<OwnedParts> + Send + Sync>,
}
