//! What the kernels make of sixteen lanes, where a set may do better than the common loops.
use crate::encoding::{Bytes, Encoding, Offset, Values, is_wide, share};
use crate::layout::{CODES, LANES};
use crate::shape::{Codes, Group, Place};
#[cfg(target_arch = "x86_64")]
use q4_simd::Avx512;
use q4_simd::{Portable, Vector};
use std::ops::Range;

/// Words of memory ahead of those in use that codes are fetched: 8 KiB.
const AHEAD: usize = 2048;

/// Most rows of x whose sums are kept while the weights pass by, of any set.
pub(crate) const MOST_ROWS: usize = 120;

/// What codes are worth, in registers.
#[derive(Clone, Copy)]
pub(crate) struct Tables<L: Vector> {
    /// By the lowest four bits.
    pub low: L::Table,
    /// What is added, for each word that shares upper bits.
    pub high: [L::Table; 4],
}

impl<L: Lanes> Tables<L> {
    /// # Safety
    /// As of [`Vector`]'s functions.
    #[inline(always)]
    pub unsafe fn of(values: &Values) -> Self {
        let mut low = values.low;
        if L::LIFT != 0.0 && values.high[0] != [0.0; 16] {
            // What codes without upper bits are worth is a whole number, and so far below 2^24.
            low.iter_mut().for_each(|v| *v += values.high[0][0] - L::LIFT);
        }
        // SAFETY: the caller's.
        unsafe {
            let [a, b, c, d] = &values.high;
            Self { low: L::table(&low), high: [L::table(a), L::table(b), L::table(c), L::table(d)] }
        }
    }

    /// Values of code `j` of words of codes, the `word`th of those that share `high`: scaled where each has
    /// its minimum.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions.
    #[inline(always)]
    pub unsafe fn decode<E: Encoding>(
        &self,
        group: &Group<L>,
        [low, high]: [L::Words; 2],
        word: usize,
        j: i32,
    ) -> L::F {
        // SAFETY: the caller's.
        unsafe {
            let four = if j < 4 { low } else { high };
            let value = match E::BYTES {
                Some(Bytes::Signed) => L::signed(four, j % 4),
                Some(Bytes::E4m3) => L::e4m3(four, j % 4),
                None if E::HIGH > 0 => {
                    let (at, mask) = (4 * j + (word * E::HIGH) as i32, (1 << E::HIGH) - 1);
                    L::add(L::look_up(self.low, low, j), L::upper(self.high[word], high, j, at, mask))
                }
                None => L::look_up(self.low, low, j),
            };
            match E::OFFSET {
                Offset::None => value,
                Offset::Zero => L::add(value, group.offset),
                Offset::Minimum => L::fma(value, group.scale, group.offset),
                // Scales may be f32, under which a product is not exact.
                Offset::Bias => L::add(L::mul(value, group.scale), group.offset),
            }
        }
    }
}

impl Codes {
    /// Asks for what is read [`AHEAD`] of word `word`.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions.
    #[inline(always)]
    pub unsafe fn fetch<L: Vector, E: Encoding>(&self, word: usize) {
        // SAFETY: a hint, of any address.
        unsafe {
            L::prefetch(self.low.wrapping_add(word * self.step + AHEAD));
            if is_wide::<E>() && word.is_multiple_of(share::<E>()) {
                L::prefetch(self.high.wrapping_add(word / share::<E>() * self.step + AHEAD));
            }
        }
    }

    /// Word `word` of 16 rows, and that of upper bits which it shares, or of the second four bytes.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions; there is such a word.
    #[inline(always)]
    pub unsafe fn words<L: Vector, E: Encoding>(&self, word: usize) -> [L::Words; 2] {
        // SAFETY: the caller's.
        unsafe {
            let low = L::words(self.low.add(word * self.step));
            let high =
                if is_wide::<E>() { L::words(self.high.add(word / share::<E>() * self.step)) } else { low };
            [low, high]
        }
    }
}

/// Some words of blocks that lie together, in one group of each.
pub(crate) struct Span<E: Encoding> {
    /// The first block.
    pub place: Place<E>,
    /// The group, and how many elements of k it has.
    pub group: usize,
    pub len: usize,
    pub words: Range<usize>,
}

/// Sums of products with decoded codes.
///
/// # Safety
/// As of [`Vector`]'s functions.
pub(crate) trait Lanes: Vector + Sized {
    /// Accumulators of a [`chain`](Self::chain) that fit into the registers.
    const ACCUMULATORS: usize = Self::SUMS;
    /// Rows of x whose sums are kept while weights pass by, a multiple of [`TILE_ROWS`](Self::TILE_ROWS) and
    /// at most [`MOST_ROWS`]: with two parts of x and two tiles 38 KiB.
    const MANY: usize = 40;
    /// Rows of one [`tile`](Self::tile) at most: 1, 2, 3, 4 or 6.
    const TILE_ROWS: usize = Self::ROWS;
    /// What [`upper`](Self::upper) has more than upper bits are worth, and the lower ones less.
    const LIFT: f32 = 0.0;
    /// Blocks (1 or 2) of one [`tile`](Self::tile) with up to `TILE_ROWS` input rows, which has two
    /// accumulators for each pair of them.
    const BLOCKS: usize = 1;

    /// Adds the products of `M` rows of `x` with a chain of `B` blocks to their totals: those over even and
    /// those over odd k are summed for themselves, then their sum is scaled and added, with one rounding.
    #[inline(always)]
    unsafe fn chain<E: Encoding, const B: usize, const M: usize>(
        tables: &Tables<Self>,
        span: &Span<E>,
        x: [*const f32; M],
        totals: &mut [[Self::F; B]; M],
    ) {
        // SAFETY: the trait's contract.
        unsafe { chain::<Self, E, B, M>(tables, span, x, totals) }
    }

    /// What upper bits are worth, those under `mask` from bit `at` on in each word of nibbles, or, from a
    /// table of nibble `j`.
    #[inline(always)]
    unsafe fn upper(table: Self::Table, words: Self::Words, j: i32, at: i32, mask: i32) -> Self::F {
        let _ = (at, mask);
        // SAFETY: the trait's contract.
        unsafe { Self::look_up(table, words, j) }
    }

    /// Values of the 8 codes of each of 16 rows in word `word`, one code after the other.
    #[inline(always)]
    unsafe fn unpack<E: Encoding>(
        tables: &Tables<Self>,
        group: &Group<Self>,
        codes: &Codes,
        word: usize,
        out: *mut f32,
    ) {
        // SAFETY: the trait's contract; `out` has 8 times 16 elements.
        unsafe { unpack::<Self, E>(tables, group, codes, word, out) }
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

/// What [`Lanes::chain`] is where a set does no better.
///
/// # Safety
/// As of [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn chain<L: Lanes, E: Encoding, const B: usize, const M: usize>(
    tables: &Tables<L>,
    span: &Span<E>,
    x: [*const f32; M],
    totals: &mut [[L::F; B]; M],
) {
    // SAFETY: the caller's; a chain has whole words of upper bits.
    unsafe {
        // Not by a closure: those of the standard library's functions are compiled without the set.
        let mut groups = [Group { scale: L::splat(0.0), offset: L::splat(0.0) }; B];
        for b in 0..B {
            groups[b] = span.place.beside(b).group(span.group, span.len);
        }
        let mut acc = [[[L::splat(0.0); 2]; B]; M];
        for first in span.words.clone().step_by(share::<E>()) {
            for sharing in 0..share::<E>() {
                let word = first + sharing;
                for b in 0..B {
                    let codes = span.place.beside(b).codes;
                    codes.fetch::<L, E>(word);
                    let packed = codes.words::<L, E>(word);
                    for j in 0..CODES {
                        let v = tables.decode::<E>(&groups[b], packed, sharing, j as i32);
                        for r in 0..M {
                            let xv = L::splat(*x[r].add(word * CODES + j));
                            acc[r][b][j & 1] = L::fma(v, xv, acc[r][b][j & 1]);
                        }
                    }
                }
            }
        }
        for b in 0..B {
            let scale = groups[b].outer::<E>();
            for r in 0..M {
                totals[r][b] = L::fma(scale, L::add(acc[r][b][0], acc[r][b][1]), totals[r][b]);
            }
        }
    }
}

/// What [`Lanes::unpack`] is where a set does no better.
///
/// # Safety
/// As of [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn unpack<L: Lanes, E: Encoding>(
    tables: &Tables<L>,
    group: &Group<L>,
    codes: &Codes,
    word: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let packed = codes.words::<L, E>(word);
        for j in 0..CODES {
            let v = tables.decode::<E>(group, packed, word % share::<E>(), j as i32);
            L::store(v, out.add(j * LANES));
        }
    }
}

impl Lanes for Portable {}
#[cfg(target_arch = "x86_64")]
impl Lanes for Avx512 {
    /// Decoding is spread over more of them. They are read in turn, so that the second level of the cache may
    /// have what the first has no room for.
    const MANY: usize = MOST_ROWS;
    /// With two blocks 24 sums, which leave registers for two tiles and an input.
    const TILE_ROWS: usize = 6;
    const BLOCKS: usize = 2;
    const LIFT: f32 = 8_388_608.0;

    /// The bits are made those of 2^23 and 16 times what they are: permutations are what there are too many
    /// of.
    #[inline(always)]
    unsafe fn upper(_: Self::Table, words: Self::Words, _: i32, at: i32, mask: i32) -> Self::F {
        use std::arch::x86_64::*;
        // SAFETY: the trait's contract.
        unsafe {
            let turned = _mm512_rorv_epi32(words, _mm512_set1_epi32((at - 4) & 31));
            let (mask, lift) = (_mm512_set1_epi32(mask << 4), _mm512_set1_epi32(0x4b00_0000));
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xea>(turned, mask, lift))
        }
    }
}
