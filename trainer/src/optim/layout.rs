//! Where the codes and scales of a tensor's moments stand in its one buffer of state.
use super::TILE;
use q4_core::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use std::{ops::Range, str::FromStr};

/// How moments are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StateFormat {
    /// f32.
    #[serde(rename = "f32")]
    F32,
    /// Dynamic 8-bit map, absmax per 256.
    #[serde(rename = "8bit")]
    Int8,
    /// 4-bit maps, absmax per 128.
    #[serde(rename = "4bit")]
    Int4,
    /// E2M1 of m and of `sqrt(v)`.
    #[serde(rename = "nvfp4")]
    Nvfp4,
}

/// How master weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MasterFormat {
    /// f32.
    #[serde(rename = "f32")]
    F32,
    /// bf16, rounded stochastically.
    #[serde(rename = "bf16")]
    Bf16,
}

impl StateFormat {
    /// Every format.
    pub const ALL: [Self; 4] = [Self::F32, Self::Int8, Self::Int4, Self::Nvfp4];
    /// Stable spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Int8 => "8bit",
            Self::Int4 => "4bit",
            Self::Nvfp4 => "nvfp4",
        }
    }
    /// Bytes a tile has of codes, block scales and second-level scales, of one moment.
    pub(super) const fn tile_bytes(self) -> [usize; 3] {
        match self {
            Self::F32 => [4 * TILE, 0, 0],
            Self::Int8 => [TILE, TILE / 256 * 4, 0],
            Self::Int4 => [TILE / 2, TILE / 128 * 4, 0],
            Self::Nvfp4 => [TILE / 2, TILE / 16, 4],
        }
    }
}

impl MasterFormat {
    /// Stable spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
    /// Bytes an element has.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl FromStr for StateFormat {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|f| f.as_str() == s).ok_or_else(|| {
            Error::new(Code::Usage, format!("`{s}` is no format of optimiser states"))
                .need("f32, 8bit, 4bit or nvfp4")
        })
    }
}

impl FromStr for MasterFormat {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        [Self::F32, Self::Bf16].into_iter().find(|f| f.as_str() == s).ok_or_else(|| {
            Error::new(Code::Usage, format!("`{s}` is no format of master weights")).need("f32 or bf16")
        })
    }
}

/// The state of one tensor of `len` elements: codes of m, codes of v, scales of m, of v, second-level scales
/// of m, of v, each section beginning at a multiple of 16 bytes. Packed formats count `len` up to a multiple
/// of 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateLayout {
    format: StateFormat,
    len: usize,
}

impl StateLayout {
    /// Exactly this format.
    pub const fn new(format: StateFormat, len: usize) -> Self {
        Self { format, len }
    }

    /// The format `want` for matrices from 4096 elements; what is smaller, or a vector, stays in f32.
    pub fn choose(want: StateFormat, shape: &[usize]) -> Self {
        let len: usize = shape.iter().product();
        Self::new(if shape.len() < 2 || len < TILE { StateFormat::F32 } else { want }, len)
    }

    /// How moments are stored.
    pub const fn format(&self) -> StateFormat {
        self.format
    }
    /// Elements.
    pub const fn len(&self) -> usize {
        self.len
    }
    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the whole state.
    pub fn bytes(&self) -> usize {
        self.sections()[5].end.next_multiple_of(16)
    }

    /// Codes of m and v, scales of m and v, second-level scales of m and v.
    pub(super) fn sections(&self) -> [Range<usize>; 6] {
        let padded = match self.format {
            StateFormat::F32 => self.len,
            _ => self.len.next_multiple_of(256),
        };
        let [codes, scales, seconds] = match self.format {
            StateFormat::F32 => [4 * padded, 0, 0],
            StateFormat::Int8 => [padded, padded / 256 * 4, 0],
            StateFormat::Int4 => [padded / 2, padded / 128 * 4, 0],
            StateFormat::Nvfp4 => [padded / 2, padded / 16, 4 * padded.div_ceil(TILE)],
        };
        let mut at = 0;
        [codes, codes, scales, scales, seconds, seconds].map(|bytes| {
            let start = at;
            at = (start + bytes).next_multiple_of(16);
            start..start + bytes
        })
    }
}
