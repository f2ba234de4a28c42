//! What codes and scales of a weight are, as the kernels are compiled for them.
use bytemuck::Pod;
use half::{bf16, f16};
use q4_core::formats::e4m3;
use q4_simd::{E8m0, Vector, Widen};

/// Elements of k under one scale of scales.
pub const NEST: usize = 256;

/// Numbers that groups have: their scales, zero points, minima or biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// An f32.
    F32,
    /// An f16.
    F16,
    /// A bf16.
    Bf16,
    /// A power of two ([`E8m0`]).
    E8m0,
    /// A byte.
    Byte,
    /// A signed byte, with 128 added.
    Signed,
}

/// A type that stored scales have.
pub trait Scale: Widen + Pod + Send {
    /// What they are kept in.
    const KEPT: Kept;
}

impl Scale for f32 {
    const KEPT: Kept = Kept::F32;
}
impl Scale for f16 {
    const KEPT: Kept = Kept::F16;
}
impl Scale for bf16 {
    const KEPT: Kept = Kept::Bf16;
}
impl Scale for E8m0 {
    const KEPT: Kept = Kept::E8m0;
}

impl Kept {
    /// Bytes of one.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E8m0 | Self::Byte | Self::Signed => 1,
        }
    }

    /// Writes `value`, which is one of those it has.
    pub(crate) fn put(self, value: f32, to: &mut [u8]) {
        match self {
            Self::F32 => to.copy_from_slice(bytemuck::bytes_of(&value)),
            Self::F16 => to.copy_from_slice(bytemuck::bytes_of(&f16::from_f32(value))),
            Self::Bf16 => to.copy_from_slice(bytemuck::bytes_of(&bf16::from_f32(value))),
            // The least is below the normal numbers, where the exponent is zero too.
            Self::E8m0 => to[0] = (value.to_bits() >> 23) as u8,
            Self::Byte => to[0] = value as u8,
            Self::Signed => to[0] = (value as i8).cast_unsigned() ^ 128,
        }
    }

    /// The value written there.
    pub(crate) fn get(self, from: &[u8]) -> f32 {
        match self {
            Self::F32 => bytemuck::pod_read_unaligned(from),
            Self::F16 => bytemuck::pod_read_unaligned::<f16>(from).widen(),
            Self::Bf16 => bytemuck::pod_read_unaligned::<bf16>(from).widen(),
            Self::E8m0 => E8m0(from[0]).widen(),
            Self::Byte => f32::from(from[0]),
            Self::Signed => f32::from((from[0] ^ 128).cast_signed()),
        }
    }

    /// Sixteen from `p` on.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions.
    #[inline(always)]
    pub(crate) unsafe fn load<V: Vector>(self, p: *const u8) -> V::F {
        // SAFETY: the caller's; what is kept starts where a line does.
        unsafe {
            match self {
                Self::F32 => V::load(p.cast()),
                Self::F16 => V::load_f16(p.cast()),
                Self::Bf16 => V::load_bf16(p.cast()),
                Self::E8m0 => V::load_e8m0(p),
                Self::Byte => V::load_u8(p),
                Self::Signed => V::add(V::load_u8(p), V::splat(-128.0)),
            }
        }
    }
}

/// What the kernels are compiled for. The value of an element is, rounded once to f32,
/// `(values[code] - zero) * scale`, or `values[code] * scale - minimum`, or `+ bias` ([`Offset`]).
pub trait Encoding: Send + Sync + 'static {
    /// What a group has besides.
    const OFFSET: Offset = Offset::None;
    /// Bits of a code above the lowest four: 0, 1 or 2. A code is worth the sum of what both are.
    const HIGH: usize = 0;
    /// Codes that are bytes, and numbers by themselves.
    const BYTES: Option<Bytes> = None;
    /// What scales are kept in where they, and minima, have an f16 for each [`NEST`] of k, by which they are
    /// multiplied.
    const NESTED: Option<Kept> = None;
}

/// What a byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bytes {
    /// A signed number.
    Signed,
    /// An E4M3 that is not NaN.
    E4m3,
}

impl Bytes {
    /// What a byte is worth.
    pub(crate) fn value(self, byte: u8) -> f32 {
        match self {
            Self::Signed => f32::from(byte.cast_signed()),
            Self::E4m3 => e4m3::decode(byte),
        }
    }
}

/// What a group has besides its scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offset {
    /// Nothing.
    None,
    /// A byte that is taken off what a code is worth.
    Zero,
    /// A byte that, multiplied by that of all minima, is taken off what was scaled.
    Minimum,
    /// What is added to what was scaled and rounded; kept as scales are.
    Bias,
}

impl Offset {
    /// What it is kept in, beside such scales.
    pub(crate) const fn kept(self, scales: Kept) -> Kept {
        match self {
            Self::Bias => scales,
            Self::None | Self::Zero | Self::Minimum => Kept::Byte,
        }
    }
}

/// Codes of four bits under scales.
pub(crate) struct Plain;

impl Encoding for Plain {}

/// The same with zero points.
pub(crate) struct Zeros;

impl Encoding for Zeros {
    const OFFSET: Offset = Offset::Zero;
}

/// The same with biases.
pub(crate) struct Biases;

impl Encoding for Biases {
    const OFFSET: Offset = Offset::Bias;
}

/// What codes are worth.
#[derive(Clone, Copy, Debug)]
pub struct Values {
    /// By the lowest four bits.
    pub low: [f32; 16],
    /// What is added: by a nibble of upper bits, for each word that shares it.
    pub high: [[f32; 16]; 4],
}

impl Values {
    /// Of codes of four bits.
    pub const fn of(low: [f32; 16]) -> Self {
        Self { low, high: [[0.0; 16]; 4] }
    }
    /// Of bytes, which are worth what they are.
    pub const BYTES: Self = Self::of([0.0; 16]);

    /// Of the numbers that codes of `4 + high` bits are, less `zero`.
    pub fn numbers(high: usize, zero: u8) -> Self {
        let above = |shift: usize, nibble: usize| (nibble >> shift & ((1 << high) - 1)) << 4;
        let of = |word: usize| {
            std::array::from_fn(|nibble| match high {
                0 => 0.0,
                _ => above(word * high % 4, nibble) as f32 - f32::from(zero),
            })
        };
        let taken = if high == 0 { zero } else { 0 };
        Self {
            low: std::array::from_fn(|code| code as f32 - f32::from(taken)),
            high: std::array::from_fn(of),
        }
    }
}

/// Whether codes have a second word: upper bits, or the second four of eight bytes.
pub(crate) const fn is_wide<E: Encoding>() -> bool {
    E::HIGH > 0 || E::BYTES.is_some()
}

/// Words of codes that share a word of upper bits; 1 where there are none.
pub(crate) const fn share<E: Encoding>() -> usize {
    match 4usize.checked_div(E::HIGH) {
        Some(words) => words,
        None => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_simd::Portable;

    #[test]
    fn what_is_kept_comes_back() {
        let bytes = || 0..=u8::MAX;
        let halves = || (0..=u16::MAX).filter(|bits| f16::from_bits(*bits).is_finite());
        let brains = || (0..=u16::MAX).filter(|bits| bf16::from_bits(*bits).is_finite());
        let values: [(Kept, Vec<f32>); 6] = [
            (Kept::F32, vec![0.0, -0.0, 1.5e-45, f32::MAX, -0.1]),
            (Kept::F16, halves().map(|bits| f16::from_bits(bits).to_f32()).collect()),
            (Kept::Bf16, brains().map(|bits| bf16::from_bits(bits).to_f32()).collect()),
            (Kept::E8m0, (0..u8::MAX).map(|byte| E8m0(byte).widen()).collect()),
            (Kept::Byte, bytes().map(f32::from).collect()),
            (Kept::Signed, bytes().map(|byte| f32::from(byte.cast_signed())).collect()),
        ];
        for (kept, values) in values {
            for value in values {
                let mut line = [0; 64];
                line[..16 * kept.size()].chunks_exact_mut(kept.size()).for_each(|to| kept.put(value, to));
                // SAFETY: a line of sixteen; the portable set is everywhere.
                let lanes = unsafe { kept.load::<Portable>(line.as_ptr()) };
                let have = kept.get(&line[15 * kept.size()..][..kept.size()]);
                assert!(have.to_bits() == value.to_bits() && lanes == [value; 16], "{kept:?} {value} {have}");
            }
        }
    }

    #[test]
    fn numbers_are_the_sum_of_both_parts_of_a_code() {
        for (high, zero) in [(0, 8), (1, 0), (2, 32)] {
            let values = Values::numbers(high, zero);
            let share = 4usize.checked_div(high).unwrap_or(1);
            for (code, word) in (0..1u32 << (4 + high)).flat_map(|code| (0..share).map(move |w| (code, w))) {
                // Other words have all their bits.
                let others = 15u32 & !(((1 << high) - 1) << (word * high));
                let nibble = others | code >> 4 << (word * high);
                let have = values.low[(code & 15) as usize] + values.high[word][nibble as usize];
                let have = if high == 0 { values.low[(code & 15) as usize] } else { have };
                assert_eq!(have, code as f32 - f32::from(zero), "{high} {code} {word}");
            }
        }
    }
}
