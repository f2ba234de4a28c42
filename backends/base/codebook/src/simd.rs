//! What the kernels make of sixteen lanes, where a set may do better than the common loops.
use crate::layout::{CODES, LANES};
#[cfg(target_arch = "x86_64")]
use q4_simd::{Avx2, Avx512};
use q4_simd::{Portable, Vector};

/// Words ahead of the one in use that codes are fetched: 8 KiB.
pub(crate) const AHEAD: usize = 2048;

/// Sums of products with decoded codes.
///
/// # Safety
/// As of [`Vector`]'s functions.
pub(crate) trait Lanes: Vector {
    /// Accumulators of a [`chain`](Self::chain) that fit into the registers.
    const ACCUMULATORS: usize = Self::SUMS;
    /// Blocks (1 or 2) of one [`tile`](Self::tile) with up to `ROWS` input rows, which has two accumulators
    /// for each pair of them.
    const BLOCKS: usize = 1;

    /// Values of code `j` of every word, with `offset` added if there are zero points (`Z`).
    #[inline(always)]
    unsafe fn decode<const Z: bool>(t: Self::Table, offset: Self::F, words: Self::Words, j: i32) -> Self::F {
        // SAFETY: the trait's contract.
        unsafe {
            let value = Self::look_up(t, words, j);
            if Z { Self::add(value, offset) } else { value }
        }
    }

    /// The two sums, over even and over odd k, of a chain of `count` words from `word` on: `M` rows of `x`
    /// with `B` blocks, whose lines are `step` words of memory apart.
    #[inline(always)]
    unsafe fn chain<const B: usize, const M: usize, const Z: bool>(
        t: Self::Table,
        offsets: [Self::F; B],
        codes: [*const u32; B],
        step: usize,
        count: usize,
        x: [*const f32; M],
        word: usize,
    ) -> [[[Self::F; 2]; B]; M] {
        // SAFETY: the trait's contract.
        unsafe {
            let mut acc = [[[Self::splat(0.0); 2]; B]; M];
            for word in word..word + count {
                for b in 0..B {
                    let p = codes[b].add(word * step);
                    Self::prefetch(p.wrapping_add(AHEAD));
                    let packed = Self::words(p);
                    for j in 0..CODES {
                        let v = Self::decode::<Z>(t, offsets[b], packed, j as i32);
                        for r in 0..M {
                            let xv = Self::splat(*x[r].add(word * CODES + j));
                            acc[r][b][j & 1] = Self::fma(v, xv, acc[r][b][j & 1]);
                        }
                    }
                }
            }
            acc
        }
    }

    /// Values of the 8 codes of each of 16 words at `p`, one code after the other.
    #[inline(always)]
    unsafe fn unpack<const Z: bool>(t: Self::Table, offset: Self::F, p: *const u32, out: *mut f32) {
        // SAFETY: the trait's contract; `out` has 8 times 16 elements.
        unsafe {
            let packed = Self::words(p);
            for j in 0..CODES {
                Self::store(Self::decode::<Z>(t, offset, packed, j as i32), out.add(j * LANES));
            }
        }
    }

    /// The two sums of `R` rows of `x` with `C` decoded tiles of `len` k.
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(
        tiles: [*const f32; C],
        len: usize,
        x: [*const f32; R],
    ) -> [[[Self::F; 2]; C]; R] {
        // SAFETY: the trait's contract; a tile has 16 elements for each k, which is a multiple of 8.
        unsafe {
            let mut acc = [[[Self::splat(0.0); 2]; C]; R];
            for i in (0..len).step_by(2) {
                for odd in 0..2 {
                    let mut w = [Self::splat(0.0); C];
                    for c in 0..C {
                        w[c] = Self::load(tiles[c].add((i + odd) * LANES));
                    }
                    for r in 0..R {
                        let x = Self::splat(*x[r].add(i + odd));
                        for c in 0..C {
                            acc[r][c][odd] = Self::fma(w[c], x, acc[r][c][odd]);
                        }
                    }
                }
            }
            acc
        }
    }
}

impl Lanes for Portable {}
#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {}
#[cfg(target_arch = "x86_64")]
impl Lanes for Avx512 {
    const BLOCKS: usize = 2;
}
