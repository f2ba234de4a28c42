//! What the kernels are compiled for: what codes are worth, and how their scales lie on the device.
use crate::encoding::Kept;
use crate::layout::scale_group;
use half::{bf16, f16};

/// What codes are worth; `LEVELS` of levels.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Levels {
    /// Those of NF4.
    Nf4,
    /// -8 to 7, or with zero points 0 to 15.
    Int4,
    /// Those of E2M1. Scales are powers of two.
    E2m1,
    /// Those of E4M3, of which a code is a byte. Whatever scales are stored, kernels have f32.
    E4m3,
}

impl Levels {
    /// Bits of a code.
    pub(super) const fn bits(self) -> usize {
        if matches!(self, Self::E4m3) { 8 } else { 4 }
    }
    /// Bytes of 16 rows by 128 k: codes and scales, as in unit.cuh.
    pub(super) const fn unit(self) -> usize {
        256 * self.bits() + 128
    }
}

/// What a scale is on the device: 16 bits of one type, or an f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// f32.
    Single,
    /// f16.
    Half,
    /// bf16, which holds powers of two as well.
    Brain,
}

impl Width {
    /// What numbers that are kept so are on a device, exactly.
    pub(super) const fn of(kept: Kept) -> Self {
        match kept {
            Kept::F32 | Kept::Byte | Kept::Signed => Self::Single,
            Kept::F16 => Self::Half,
            Kept::Bf16 | Kept::E8m0 => Self::Brain,
        }
    }

    /// The bits of a scale in the lowest half of a word. The scale is of this type, which has 16.
    pub(super) fn bits(self, scale: f32) -> u32 {
        match self {
            Self::Single => scale.to_bits(),
            Self::Half => f16::from_f32(scale).to_bits().into(),
            Self::Brain => bf16::from_f32(scale).to_bits().into(),
        }
    }
}

/// How scales lie there; `SCALES` of levels.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scales {
    Whole,
    HalvesF16,
    HalvesBf16,
    ZerosF16,
    ZerosBf16,
}

/// What a set of kernels is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Coding {
    pub levels: Levels,
    pub scales: Scales,
}

impl Coding {
    /// What the compiler is told.
    pub fn options(self) -> Vec<String> {
        match (self.levels, self.scales) {
            (Levels::Nf4, Scales::Whole) => Vec::new(), // what the sources are without a word
            (levels, scales) => {
                let told = [("LEVELS", levels as usize), ("SCALES", scales as usize)];
                let bits = (levels.bits() != 4).then_some(("CODE_BITS", levels.bits()));
                told.into_iter().chain(bits).map(|(name, value)| format!("-D{name}={value}")).collect()
            }
        }
    }

    /// Whether each half of a tile has a scale.
    pub fn has_halves(self) -> bool {
        matches!(self.scales, Scales::HalvesF16 | Scales::HalvesBf16)
    }

    /// Whether weights have zero points.
    pub fn has_zeros(self) -> bool {
        matches!(self.scales, Scales::ZerosF16 | Scales::ZerosBf16)
    }

    /// Whether a level times its scale is a bf16.
    pub const fn is_bf16(self) -> bool {
        matches!(self.levels, Levels::E2m1)
    }
}

/// Elements of k under one word of scales in a unit.
pub(super) const TILE: usize = 64;

/// Where the parts of a weight of `[n, k]` lie, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub coding: Coding,
    /// Elements under one scale.
    pub group: usize,
    /// Units of a row group; 0 where scales do not cover whole tiles, or do not fit a unit.
    pub units: usize,
    pub codes: usize,
    pub scales: usize,
}

impl Places {
    /// Of a weight with a scale of that width, and maybe a zero point, for `block` elements.
    pub fn of((levels, width): (Levels, Width), has_zeros: bool, [n, k]: [usize; 2], block: u32) -> Self {
        let (group, bits) = (scale_group(k, block).max(1), levels.bits());
        let width = if levels == Levels::E4m3 { Width::Single } else { width };
        let halves = group % TILE == TILE / 2 && width != Width::Single && !has_zeros;
        let in_units = k % TILE == 0
            && if has_zeros {
                group % TILE == 0 && width != Width::Single
            } else {
                group % TILE == 0 || halves
            };
        let scales = match (has_zeros, width) {
            (true, Width::Half) => Scales::ZerosF16,
            (true, _) => Scales::ZerosBf16,
            (false, Width::Half) if halves && in_units => Scales::HalvesF16,
            (false, Width::Brain) if halves && in_units => Scales::HalvesBf16,
            (false, _) => Scales::Whole,
        };
        let units = if in_units { k.div_ceil(2 * TILE) } else { 0 };
        let (codes, scales_bytes) = match units {
            0 => {
                let words = if has_zeros { 2 } else { 1 };
                ((n * k * bits / 8).next_multiple_of(256), n * (k / group) * 4 * words)
            }
            _ => (n.div_ceil(16) * units * levels.unit(), 0),
        };
        Self { coding: Coding { levels, scales }, group, units, codes, scales: scales_bytes }
    }

    /// Elements under one word of scales.
    pub fn each(&self) -> usize {
        if self.units > 0 { TILE } else { self.group }
    }
}

#[test]
fn scales_lie_in_units_where_they_fit() {
    use Levels::{E2m1, E4m3, Int4, Nf4};
    use Scales::{HalvesBf16, HalvesF16, Whole, ZerosBf16, ZerosF16};
    use Width::{Brain, Half, Single};
    let of = |kind, zeros, k, block| {
        let p = Places::of(kind, zeros, [48, k], block);
        (p.coding.scales, p.units)
    };
    assert_eq!(of((Nf4, Single), false, 320, 64), (Whole, 3));
    assert_eq!(of((Nf4, Single), false, 320, 32), (Whole, 0));
    assert_eq!(of((Nf4, Single), false, 80, 64), (Whole, 0));
    assert_eq!(of((Int4, Half), false, 256, 128), (Whole, 2));
    assert_eq!(of((Int4, Half), false, 256, 32), (HalvesF16, 2));
    assert_eq!(of((Int4, Brain), false, 96, 32), (Whole, 0));
    assert_eq!(of((Int4, Single), false, 256, 32), (Whole, 0));
    assert_eq!(of((Int4, Half), true, 256, 64), (ZerosF16, 2));
    assert_eq!(of((Int4, Brain), true, 256, 256), (ZerosBf16, 2));
    assert_eq!(of((Int4, Half), true, 256, 32), (ZerosF16, 0));
    assert_eq!(of((Int4, Single), true, 256, 128), (ZerosBf16, 0));
    assert_eq!(of((E2m1, Brain), false, 2880, 32), (HalvesBf16, 23));
    assert_eq!(of((E2m1, Brain), false, 32, 32), (Whole, 0));
    assert_eq!(of((E4m3, Brain), false, 320, 128), (Whole, 3));
    assert_eq!(of((E4m3, Half), false, 96, 96), (Whole, 0));
}
