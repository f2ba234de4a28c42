//! Plain Rust, which compilers turn into whatever vectors there are.
use crate::{E8m0, LANES, Vector, Widen};
use half::{bf16, f16};
use q4_core::isa::Isa;
use std::array;

/// Arrays; products are rounded before they are added.
pub struct Portable;

impl Vector for Portable {
    type F = [f32; LANES];
    type Words = [u32; LANES];
    type Table = [f32; 16];
    const ISA: Isa = Isa::Portable;
    const FUSED: bool = false;
    const SUMS: usize = 4;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn run<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self::F {
        [v; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: 16 readable elements, as the trait asks; likewise below.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self::F {
        // SAFETY: as above.
        array::from_fn(|l| unsafe { p.add(l).read_unaligned() }.widen())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self::F {
        // SAFETY: as above.
        array::from_fn(|l| unsafe { p.add(l).read_unaligned() }.widen())
    }
    #[inline(always)]
    unsafe fn load_e8m0(p: *const u8) -> Self::F {
        // SAFETY: as above.
        array::from_fn(|l| E8m0(unsafe { p.add(l).read() }).widen())
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::F {
        // SAFETY: as above.
        array::from_fn(|l| f32::from(unsafe { p.add(l).read() }))
    }
    #[inline(always)]
    unsafe fn store(v: Self::F, p: *mut f32) {
        // SAFETY: as above.
        unsafe { p.cast::<Self::F>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(mut a: Self::F, b: Self::F) -> Self::F {
        for l in 0..LANES {
            a[l] += b[l];
        }
        a
    }
    #[inline(always)]
    unsafe fn mul(mut a: Self::F, b: Self::F) -> Self::F {
        for l in 0..LANES {
            a[l] *= b[l];
        }
        a
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, mut c: Self::F) -> Self::F {
        for l in 0..LANES {
            c[l] += a[l] * b[l];
        }
        c
    }
    #[inline(always)]
    unsafe fn sum(mut v: Self::F) -> f32 {
        for half in [8, 4, 2, 1] {
            for l in 0..half {
                v[l] += v[l + half];
            }
        }
        v[0]
    }
    #[inline(always)]
    unsafe fn table(values: &[f32; 16]) -> Self::Table {
        *values
    }
    #[inline(always)]
    unsafe fn words(p: *const u32) -> Self::Words {
        // SAFETY: as above.
        unsafe { p.cast::<Self::Words>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn look_up(table: Self::Table, words: Self::Words, j: i32) -> Self::F {
        let mut out = [0.0; LANES];
        for l in 0..LANES {
            out[l] = table[(words[l] >> (4 * j) & 15) as usize];
        }
        out
    }
    #[inline(always)]
    unsafe fn signed(words: Self::Words, j: i32) -> Self::F {
        words.map(|word| f32::from(((word >> (8 * j)) as u8).cast_signed()))
    }
    #[inline(always)]
    unsafe fn e4m3(words: Self::Words, j: i32) -> Self::F {
        words.map(|word| {
            let (sign, code) = (word >> (8 * j) << 24 & 0x8000_0000, word >> (8 * j) & 0x7f);
            // Below the normal range are multiples of 2^-9.
            let normal = f32::from_bits((code << 20) + (120 << 23));
            let value = if code < 8 { code as f32 * 0.001_953_125 } else { normal };
            f32::from_bits(value.to_bits() | sign)
        })
    }
    #[inline(always)]
    unsafe fn prefetch<T>(_: *const T) {}
    #[inline(always)]
    unsafe fn prefetch_far<T>(_: *const T) {}
}
