//! Sixteen f32 lanes on every instruction set, and what is compiled once for each of them.
//!
//! A loop is written once over a [`Vector`], and [`on!`] compiles it for every set and runs the one that
//! [`Vectors`] found on this processor. Lanes are sixteen everywhere, whatever a register holds, and so are
//! the orders of sums: the bits of two sets differ only where one fuses a multiply-add and the other does not
//! ([`Vector::FUSED`]).
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
pub mod planes;
mod portable;
mod widen;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use portable::Portable;
pub use q4_core::isa::Isa;
pub use widen::{E8m0, Widen};

use half::{bf16, f16};
use q4_core::{Reject, Result};

/// Lanes of a [`Vector::F`].
pub const LANES: usize = 16;

/// Sixteen f32 lanes of an instruction set, and a look-up of values by 4-bit codes. Every method is inlined
/// into a function that enables the features, which [`run`](Self::run) is.
///
/// # Safety of its functions
/// The processor has [`ISA`](Self::ISA); pointers address sixteen elements, readable or writable, of any
/// alignment.
#[allow(clippy::missing_safety_doc)] // above, once for all
pub trait Vector {
    /// 16 f32.
    type F: Copy;
    /// 16 words of 8 codes.
    type Words: Copy;
    /// The 16 values of the codes.
    type Table: Copy;

    /// The set, one of those that are their own [`Isa::floats`].
    const ISA: Isa;
    /// Whether [`fma`](Self::fma) rounds once; else the product is rounded before it is added.
    const FUSED: bool;
    /// How many `F` the registers hold as sums, with room for what is added.
    const SUMS: usize;
    /// Rows whose sums advance together where there are many.
    const ROWS: usize;

    /// Calls `f`, compiled for the set where it is `#[inline(always)]` together with all it calls.
    unsafe fn run<R>(f: impl FnOnce() -> R) -> R;

    /// `v` in every lane.
    unsafe fn splat(v: f32) -> Self::F;
    /// Sixteen f32.
    unsafe fn load(p: *const f32) -> Self::F;
    /// Sixteen f16, widened.
    unsafe fn load_f16(p: *const f16) -> Self::F;
    /// Sixteen bf16, widened.
    unsafe fn load_bf16(p: *const bf16) -> Self::F;
    /// Sixteen powers of two, `2^(byte - 127)`; 255 is not among them.
    unsafe fn load_e8m0(p: *const u8) -> Self::F;
    /// Sixteen bytes as numbers.
    unsafe fn load_u8(p: *const u8) -> Self::F;
    /// Writes all lanes.
    unsafe fn store(v: Self::F, p: *mut f32);
    /// `a + b`.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Halves added lane by lane until one lane is left.
    unsafe fn sum(v: Self::F) -> f32;

    /// The values by code.
    unsafe fn table(values: &[f32; 16]) -> Self::Table;
    /// Sixteen words.
    unsafe fn words(p: *const u32) -> Self::Words;
    /// Values of code `j` (0 to 7, the first in the lowest nibble) of every word.
    unsafe fn look_up(table: Self::Table, words: Self::Words, j: i32) -> Self::F;

    /// Byte `j` (0 to 3, the first in the lowest bits) of every word, a signed number.
    unsafe fn signed(words: Self::Words, j: i32) -> Self::F;
    /// Byte `j` of every word, an E4M3; the two that are NaN there are 480 and -480. No instruction meets a
    /// subnormal number: processors take a hundred times as long for a product with one.
    unsafe fn e4m3(words: Self::Words, j: i32) -> Self::F;

    /// Asks for the line at `p`, which may lie past the allocation.
    unsafe fn prefetch<T>(p: *const T);
    /// The same, no nearer than the second level of the cache: the first has few lines on their way at once.
    unsafe fn prefetch_far<T>(p: *const T);
}

/// The vectors of an instruction set that this processor has: what [`on!`] chooses by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vectors(Isa);

impl Vectors {
    /// Those of `isa`, if it is here.
    pub fn of(isa: Isa) -> Option<Self> {
        isa.is_available().then_some(Self(isa))
    }

    /// Every one of this processor, best first.
    pub fn all() -> impl Iterator<Item = Self> {
        Isa::available().filter(|isa| isa.floats() == *isa).map(Self)
    }

    /// Those of the best set of this processor.
    pub fn best() -> Self {
        Self(Isa::best())
    }

    /// Those of the set that `name` names, or of the best one.
    ///
    /// # Errors
    /// As [`Isa::choose`].
    pub fn choose(name: Option<&str>) -> std::result::Result<Self, Reject> {
        Isa::choose(name).map(Self)
    }

    /// Those of the set that `Q4_ISA` names, or of the best one.
    ///
    /// # Errors
    /// As [`Isa::named`].
    pub fn named() -> Result<Self> {
        Ok(Isa::named()?.map_or_else(Self::best, Self))
    }

    /// Their set, one of those that are their own [`Isa::floats`].
    pub const fn isa(self) -> Isa {
        self.0.floats()
    }

    /// The set that was chosen: it may have integer dots besides.
    pub const fn set(self) -> Isa {
        self.0
    }

    /// [`Vector::run`] of the type that belongs to them.
    #[doc(hidden)] // for `on!`
    #[inline(always)]
    pub fn run<V: Vector, R>(self, f: impl FnOnce() -> R) -> R {
        assert!(self.isa() == V::ISA, "vectors of another set");
        // SAFETY: values of this type exist for sets of this processor only.
        unsafe { V::run(f) }
    }
}

/// `on!(vectors, V => body)` is the value of `body`, compiled for every instruction set of the architecture
/// and run on that of `vectors`. `V` is its [`Vector`], a concrete type; what the body calls is compiled for
/// the set where it is inlined. It takes what it uses with it, so that its loops need not look whether a
/// store changed that.
#[macro_export]
macro_rules! on {
    ($vectors:expr, $V:ident => $body:expr) => {
        match $crate::Vectors::isa($vectors) {
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512 => $crate::on!(@ $vectors, $V = Avx512, $body),
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx2 => $crate::on!(@ $vectors, $V = Avx2, $body),
            #[cfg(target_arch = "aarch64")]
            $crate::Isa::Neon => $crate::on!(@ $vectors, $V = Neon, $body),
            _ => $crate::on!(@ $vectors, $V = Portable, $body),
        }
    };
    (@ $vectors:expr, $V:ident = $set:ident, $body:expr) => {{
        #[allow(dead_code)] // a body need not name it
        type $V = $crate::$set;
        $crate::Vectors::run::<$V, _>($vectors, #[inline(always)] move || $body)
    }};
}

/// `run!(V, body)` is [`Vector::run`] of `body`, and as unsafe.
#[macro_export]
macro_rules! run {
    ($V:ty, $body:expr) => {
        <$V as $crate::Vector>::run(
            #[inline(always)]
            move || $body,
        )
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::formats::e4m3;
    use std::array;

    /// Every operation, lane by lane, from buffers that are not aligned.
    unsafe fn check<V: Vector>() {
        let a: [f32; LANES + 1] = array::from_fn(|l| (l as f32 * 0.7).sin() * 3.0);
        let b: [f32; LANES + 1] = array::from_fn(|l| (l as f32 * 1.3).cos() * 1e-3);
        let (half, brain) = (a.map(f16::from_f32), a.map(bf16::from_f32));
        let words: [u32; LANES + 1] =
            array::from_fn(|l| (l as u32).wrapping_mul(2_654_435_761) ^ 0x1234_5678);
        let powers: [u8; LANES + 1] = array::from_fn(|l| [0, 1, 2, 126, 127, 128, 252, 253, 254][l % 9]);
        let values: [f32; 16] = array::from_fn(|c| c as f32 * 0.1 - 1.0);
        let equal = |what: &str, got: V::F, want: &dyn Fn(usize) -> f32| {
            let mut lanes = [0.0; LANES + 1];
            // SAFETY: sixteen lanes behind the first; the caller's.
            unsafe { V::store(got, lanes[1..].as_mut_ptr()) };
            for l in 1..=LANES {
                assert_eq!(lanes[l].to_bits(), want(l).to_bits(), "{:?}: {what}, lane {}", V::ISA, l - 1);
            }
        };
        // SAFETY: the caller's; every buffer has sixteen elements behind the first.
        unsafe {
            let (x, y) = (V::load(a[1..].as_ptr()), V::load(b[1..].as_ptr()));
            equal("splat", V::splat(1.5), &|_| 1.5);
            equal("load", x, &|l| a[l]);
            equal("f16", V::load_f16(half[1..].as_ptr()), &|l| half[l].to_f32());
            equal("bf16", V::load_bf16(brain[1..].as_ptr()), &|l| brain[l].to_f32());
            equal("e8m0", V::load_e8m0(powers[1..].as_ptr()), &|l| E8m0(powers[l]).widen());
            equal("add", V::add(x, y), &|l| a[l] + b[l]);
            equal("mul", V::mul(x, y), &|l| a[l] * b[l]);
            let fma = |l: usize| if V::FUSED { a[l].mul_add(b[l], a[l]) } else { a[l] * b[l] + a[l] };
            equal("fma", V::fma(x, y, x), &fma);
            let mut tree = a;
            for n in [8, 4, 2, 1] {
                (1..=n).for_each(|l| tree[l] += tree[l + n]);
            }
            assert_eq!(V::sum(x).to_bits(), tree[1].to_bits(), "{:?}: sum", V::ISA);
            let (table, packed) = (V::table(&values), V::words(words[1..].as_ptr()));
            for j in 0..8 {
                let code = |l: usize| (words[l] >> (4 * j) & 15) as usize;
                equal("look_up", V::look_up(table, packed, j), &|l| values[code(l)]);
            }
            let number = |byte: u8| match byte & 0x7f {
                0x7f => f32::from_bits(u32::from(byte & 0x80) << 24 | 480f32.to_bits()),
                _ => e4m3::decode(byte),
            };
            for first in (0..=255u8).step_by(4) {
                let words: [u32; LANES + 1] = array::from_fn(|l| {
                    u32::from_le_bytes([0, 1, 2, 3].map(|j| (first | j) ^ (l as u8) << 4))
                });
                let packed = V::words(words[1..].as_ptr());
                for j in 0..4 {
                    let byte = |l: usize| words[l].to_le_bytes()[j as usize];
                    equal("signed", V::signed(packed, j), &|l| f32::from(byte(l).cast_signed()));
                    equal("e4m3", V::e4m3(packed, j), &|l| number(byte(l)));
                }
            }
            V::prefetch(a.as_ptr().wrapping_add(1 << 40));
        }
    }

    #[test]
    fn every_set_does_what_plain_rust_does() {
        for v in Vectors::all() {
            // SAFETY: `on` runs sets of this processor.
            on!(v, V => unsafe { check::<V>() });
        }
    }

    #[test]
    fn only_sets_of_this_processor_have_vectors() {
        for isa in Isa::ALL {
            assert_eq!(Vectors::of(isa).map(Vectors::isa), isa.is_available().then_some(isa.floats()));
        }
        assert_eq!(Vectors::choose(None).ok(), Some(Vectors::best()));
        assert_eq!(Vectors::all().next().map(Vectors::isa), Some(Vectors::best().isa()));
        assert!(Vectors::choose(Some("sse9")).is_err());
    }
}
