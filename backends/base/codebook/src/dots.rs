//! Exact dots of four bytes a lane, on every instruction set: weights as the codes they are, inputs as int8.
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::simd::Lanes;
#[cfg(target_arch = "aarch64")]
use neon::{NeonDot, NeonPlain};
use q4_core::isa::Isa;
#[cfg(target_arch = "x86_64")]
use q4_simd::{Avx2, Avx512};
use q4_simd::{LANES, Portable, Vector, Vectors};
#[cfg(target_arch = "x86_64")]
use x86::Vnni;

/// Words of sixteen lanes.
pub(crate) type Words<D> = <<D as Dot>::On as Vector>::Words;

/// Sums of byte products, exact while they are integers below 2^31.
///
/// # Safety of its functions
/// The processor has the set.
#[allow(clippy::missing_safety_doc)] // above, once for all
pub(crate) trait Dot {
    /// The set for everything else.
    type On: Lanes;
    /// Sixteen i32, or what becomes of them.
    type Sums: Copy;
    /// A table of sixteen bytes.
    type Table: Copy;
    /// Rows of a product of many whose sums the registers hold, with [`Lanes::BLOCKS`] blocks, while weights
    /// pass by; none where they hold the weights of sixteen k, and rows pass by.
    const ROWS: Option<usize>;

    /// Calls `f`, compiled for the set where it is `#[inline(always)]` together with all it calls.
    unsafe fn run<R>(f: impl FnOnce() -> R) -> R;
    /// Sums from `v` on, which is what [`start`](crate::integers::start) makes, of weights of so many
    /// [`bits`](crate::integers::bits).
    unsafe fn start<const BITS: u32>(v: i32) -> Self::Sums;
    /// Adds the products of four weights in each lane with the four bytes of `x`: at most four times.
    unsafe fn dot<const BITS: u32>(sums: Self::Sums, weights: Words<Self>, x: i32) -> Self::Sums;
    /// Such sums as numbers, exact below 2^24.
    unsafe fn numbers<const BITS: u32>(sums: Self::Sums) -> <Self::On as Vector>::F;
    /// Words shifted to the right, or to the left by a negative number, and what is left of them by `mask`.
    unsafe fn pick(words: Words<Self>, shift: i32, mask: u32) -> Words<Self>;
    /// Bits of both.
    unsafe fn or(a: Words<Self>, b: Words<Self>) -> Words<Self>;
    /// Signed bytes, as numbers of this set: 128 more where they are unsigned.
    unsafe fn bytes(words: Words<Self>) -> Words<Self>;
    /// The table in a register.
    unsafe fn table(table: &[u8; 16]) -> Self::Table;
    /// What the table has for every byte, which is below 16.
    unsafe fn look_up(table: Self::Table, bytes: Words<Self>) -> Words<Self>;
    /// Writes the words.
    unsafe fn store(words: Words<Self>, p: *mut u32);
}

/// What is compiled for every set.
pub(crate) trait Job {
    /// Runs it.
    ///
    /// # Safety
    /// As of [`Dot`], and what the job asks.
    unsafe fn on<D: Dot>(self);
}

/// Runs `job` on the set of `vectors`.
///
/// # Safety
/// What the job asks.
pub(crate) unsafe fn run(vectors: Vectors, job: impl Job) {
    // SAFETY: the caller's; values of `Vectors` exist for sets of this processor only.
    unsafe {
        match vectors.set() {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Vnni => on::<Vnni>(job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => on::<Avx512>(job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => on::<Avx2>(job),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm | Isa::NeonDotprod => on::<NeonDot>(job),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => on::<NeonPlain>(job),
            _ => on::<Portable>(job),
        }
    }
}

unsafe fn on<D: Dot>(job: impl Job) {
    // SAFETY: the caller's.
    unsafe {
        D::run(
            #[inline(always)]
            || job.on::<D>(),
        );
    }
}

// SAFETY of every block: the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Dot for Portable {
    type On = Self;
    type Sums = [i32; LANES];
    type Table = [u8; 16];
    const ROWS: Option<usize> = Some(2);

    #[inline(always)]
    unsafe fn run<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    unsafe fn start<const BITS: u32>(v: i32) -> Self::Sums {
        [v; LANES]
    }
    #[inline(always)]
    unsafe fn dot<const BITS: u32>(sums: Self::Sums, weights: [u32; LANES], x: i32) -> Self::Sums {
        let x = x.to_le_bytes().map(|b| i32::from(b.cast_signed()));
        std::array::from_fn(|lane| {
            let w = weights[lane].to_le_bytes().map(|b| i32::from(b.cast_signed()));
            sums[lane] + w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3]
        })
    }
    #[inline(always)]
    unsafe fn numbers<const BITS: u32>(sums: Self::Sums) -> [f32; LANES] {
        sums.map(|sum| sum as f32)
    }
    #[inline(always)]
    unsafe fn pick(words: [u32; LANES], shift: i32, mask: u32) -> [u32; LANES] {
        words.map(|w| if shift < 0 { w << -shift } else { w >> shift } & mask)
    }
    #[inline(always)]
    unsafe fn or(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|lane| a[lane] | b[lane])
    }
    #[inline(always)]
    unsafe fn bytes(words: [u32; LANES]) -> [u32; LANES] {
        words
    }
    #[inline(always)]
    unsafe fn table(table: &[u8; 16]) -> [u8; 16] {
        *table
    }
    #[inline(always)]
    unsafe fn look_up(table: [u8; 16], bytes: [u32; LANES]) -> [u32; LANES] {
        bytes.map(|w| u32::from_le_bytes(w.to_le_bytes().map(|b| table[usize::from(b & 15)])))
    }
    #[inline(always)]
    unsafe fn store(words: [u32; LANES], p: *mut u32) {
        unsafe { p.cast::<[u32; LANES]>().write_unaligned(words) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integers::{Integers, MIDDLE, NARROW, WIDE, in_halves, is_signed, start};

    /// Sums of lanes with any bytes, and of the largest there are, counted from the largest zeros.
    struct Check {
        vectors: Vectors,
    }

    impl Job for Check {
        #[inline(always)]
        unsafe fn on<D: Dot>(self) {
            let widest = if is_signed(self.vectors) { [127u8, 128] } else { [255, 0] };
            for x in [-127i8, -1, 0, 5, 127] {
                // SAFETY: the job's.
                unsafe {
                    for w in [31, 0] {
                        self.four::<D, NARROW>(w, x);
                    }
                    for w in [63, 0] {
                        self.four::<D, MIDDLE>(w, x);
                    }
                    for w in widest {
                        self.four::<D, WIDE>(w, x);
                    }
                }
            }
        }
    }

    impl Check {
        /// Sixteen products in each lane, two of every four of `w` and `x`.
        #[inline(always)]
        unsafe fn four<D: Dot, const BITS: u32>(&self, w: u8, x: i8) {
            // Another byte in each place tells lanes and bytes apart.
            let words: [u32; LANES] =
                std::array::from_fn(|lane| u32::from_le_bytes([w, (lane % 7) as u8, w, (lane % 5) as u8]));
            let signed = is_signed(self.vectors) && BITS == WIDE;
            let zero = match BITS {
                NARROW => 31,
                _ if signed => 0,
                _ => 1 << (BITS - 1),
            };
            let integers = Integers { table: None, zero, unit: 1.0, halves: in_halves(self.vectors, BITS) };
            for xs in [[x, 3, x, -2], [x, -x, x, -x], [x; 4]] {
                let x = xs.map(i32::from);
                let want: [f32; LANES] = std::array::from_fn(|lane| {
                    let of = |b: u8| if signed { i32::from(b.cast_signed()) } else { i32::from(b) };
                    let four = words[lane].to_le_bytes().map(of);
                    (4 * (0..4).map(|i| (four[i] - zero) * x[i]).sum::<i32>()) as f32
                });
                let mut have = [0.0; LANES];
                // SAFETY: the caller's.
                unsafe {
                    let at = start(&integers, 4 * (x[0] + x[1]), 4 * (x[2] + x[3]));
                    let (mut sums, words) = (D::start::<BITS>(at), D::On::words(words.as_ptr()));
                    for _ in 0..4 {
                        sums = D::dot::<BITS>(sums, words, i32::from_le_bytes(xs.map(i8::cast_unsigned)));
                    }
                    D::On::store(D::numbers::<BITS>(sums), have.as_mut_ptr());
                }
                assert_eq!(have, want, "{BITS} bits: {w} {xs:?}");
            }
        }
    }

    #[test]
    fn dots_are_exact() {
        for isa in Isa::available() {
            let vectors = Vectors::of(isa).expect("available");
            // SAFETY: nothing is asked.
            unsafe { run(vectors, Check { vectors }) };
        }
    }
}
