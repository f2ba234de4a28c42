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
/// `(values[code] - zero) * scale`, or `values[code] * scale - minimum` ([`Offset`]).
pub trait Encoding: Send + Sync + 'static {
    /// The scale of a group.
    type Scale: Scale;
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
}

/// Codes of four bits under scales of this type.
pub struct Plain<S>(PhantomData<S>);

impl<S: Scale + 'static> Encoding for Plain<S> {
    type Scale = S;
}

/// The same with zero points.
pub struct Zeros<S>(PhantomData<S>);

impl<S: Scale + 'static> Encoding for Zeros<S> {
    type Scale = S;
    const OFFSET: Offset = Offset::Zero;
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
