//! What codes and scales of a weight are, as the kernels are compiled for them.
use bytemuck::{Pod, Zeroable};
use q4_core::formats::e4m3;
use q4_simd::{Vector, Widen};
use std::marker::PhantomData;

/// Elements of k under one scale of scales.
pub const NEST: usize = 256;

/// A type that scales are kept in.
pub trait Scale: Widen + Pod + Send {}

impl<T: Widen + Pod + Send> Scale for T {}

/// What the kernels are compiled for. The value of an element is, rounded once to f32,
/// `(values[code] - zero) * scale`, or `values[code] * scale - minimum`, or `+ bias` ([`Offset`]).
pub trait Encoding: Send + Sync + 'static {
    /// The scale of a group.
    type Scale: Scale;
    /// What it is kept in, where a group has something besides.
    type Offset: Scale;
    /// What a group has besides.
    const OFFSET: Offset = Offset::None;
    /// Bits of a code above the lowest four: 0, 1 or 2. A code is worth the sum of what both are.
    const HIGH: usize = 0;
    /// Codes that are bytes, and numbers by themselves.
    const BYTES: Option<Bytes> = None;
    /// Scales, and minima, have an f16 for each [`NEST`] of k, by which they are multiplied.
    const NESTED: bool = false;
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
    /// What is added to what was scaled and rounded.
    Bias,
}

/// Codes of four bits under scales of this type.
pub struct Plain<S>(PhantomData<S>);

impl<S: Scale + 'static> Encoding for Plain<S> {
    type Scale = S;
    type Offset = u8;
}

/// The same with zero points.
pub struct Zeros<S>(PhantomData<S>);

impl<S: Scale + 'static> Encoding for Zeros<S> {
    type Scale = S;
    type Offset = u8;
    const OFFSET: Offset = Offset::Zero;
}

/// The same with biases of the type of the scales.
pub struct Biases<S>(PhantomData<S>);

impl<S: Scale + 'static> Encoding for Biases<S> {
    type Scale = S;
    type Offset = S;
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

/// A signed byte as a scale, kept with 128 added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Signed(u8);

impl Signed {
    /// Of this value.
    pub const fn new(value: i8) -> Self {
        Self(value.cast_unsigned() ^ 128)
    }
}

impl Widen for Signed {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from(self.0) - 128.0
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const Self) -> V::F {
        // SAFETY: the caller's; the struct is its byte.
        unsafe { V::add(V::load_u8(p.cast()), V::splat(-128.0)) }
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
