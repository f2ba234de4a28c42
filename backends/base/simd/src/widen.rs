//! Elements that widen to f32 exactly, one by one or sixteen at a time.
use crate::Vector;
use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use q4_core::formats::e8m0;

/// An element type that widens to f32 exactly.
pub trait Widen: Copy + Sync {
    /// The value.
    fn widen(self) -> f32;
    /// Sixteen values from `p` on.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions.
    unsafe fn load<V: Vector>(p: *const Self) -> V::F;
}

impl Widen for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const Self) -> V::F {
        // SAFETY: the caller's.
        unsafe { V::load(p) }
    }
}

impl Widen for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const Self) -> V::F {
        // SAFETY: the caller's.
        unsafe { V::load_bf16(p) }
    }
}

impl Widen for f16 {
    /// Branch-free over finite values, infinities and NaN: shift the fields into place, then rescale by
    /// 2^112.
    #[inline(always)]
    fn widen(self) -> f32 {
        let h = u32::from(self.to_bits());
        let magnitude = (h & 0x7fff) << 13;
        let value = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
        let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        f32::from_bits(value.to_bits() | special | (h & 0x8000) << 16)
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const Self) -> V::F {
        // SAFETY: the caller's.
        unsafe { V::load_f16(p) }
    }
}

impl Widen for u8 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from(self)
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const Self) -> V::F {
        // SAFETY: the caller's.
        unsafe { V::load_u8(p) }
    }
}

/// A power of two ([`e8m0`]); the byte of NaN is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E8m0(pub u8);

impl Widen for E8m0 {
    #[inline(always)]
    fn widen(self) -> f32 {
        e8m0::decode(self.0)
    }
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const Self) -> V::F {
        // SAFETY: the caller's; the struct is its byte.
        unsafe { V::load_e8m0(p.cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_exactly() {
        for bits in 0..=u16::MAX {
            let h = f16::from_bits(bits);
            let (got, want) = (h.widen(), h.to_f32());
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{bits:04x}");
        }
        for bits in 0..=u16::MAX {
            let b = bf16::from_bits(bits);
            assert!(b.widen().to_bits() == b.to_f32().to_bits() || b.is_nan());
        }
    }
}
