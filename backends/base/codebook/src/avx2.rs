//! The sums in AVX2: values of codes are put together from their bytes ([`q4_simd::planes`]), and the sums of
//! a block, the registers' worth of few rows, are finished before those of the next.
use crate::encoding::{Encoding, Offset, share};
use crate::layout::{CODES, LANES};
use crate::shape::{Codes, Group};
use crate::simd::{self, Lanes, MOST_ROWS, Tables};
use q4_simd::planes::{self, Planes, SHORT, WHOLE, lifted, upper_codes};
use q4_simd::{Avx2, Vector};
use std::arch::x86_64::*;
use std::{array, hint};

/// Sixteen lanes.
type F = <Avx2 as Vector>::F;
/// Lanes of a register.
const HALF: usize = 8;
/// Rows whose sums over even and over odd k fit into the registers.
const TOGETHER: usize = 2;

impl Lanes for Avx2 {
    /// Those of a quad, which is one stream of memory, and four rows: blocks are taken one after the other.
    const ACCUMULATORS: usize = 32;
    /// As with AVX-512.
    const MANY: usize = MOST_ROWS;
    const TILE_ROWS: usize = 6;
    const LIFT: f32 = planes::LIFT;

    /// As with AVX-512, but as bits of a number of bf16.
    #[inline(always)]
    unsafe fn upper(_: Self::Table, words: Self::Words, _: i32, at: i32, mask: i32) -> F {
        /// Where codes have their upper bits in numbers that are lifted.
        const TO: i32 = 20;
        // SAFETY: the trait's contract.
        unsafe {
            let (mask, lift) =
                (_mm256_set1_epi32(mask << TO), _mm256_set1_epi32(Self::LIFT.to_bits() as i32));
            let mut out = [_mm256_setzero_ps(); 2];
            for side in 0..LANES / HALF {
                let turned = if at < TO {
                    _mm256_sllv_epi32(words[side], _mm256_set1_epi32(TO - at))
                } else {
                    _mm256_srlv_epi32(words[side], _mm256_set1_epi32(at - TO))
                };
                out[side] = _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(turned, mask), lift));
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn chain<E: Encoding, const B: usize, const M: usize>(
        tables: &Tables<Self>,
        groups: &[Group<Self>; B],
        codes: &[Codes; B],
        count: usize,
        x: [*const f32; M],
        word: usize,
    ) -> [[[F; 2]; B]; M] {
        // SAFETY: the trait's contract.
        unsafe {
            let mut out = [[[Self::splat(0.0); 2]; B]; M];
            for b in 0..B {
                let (group, codes) = (&groups[b], &codes[b]);
                let sums = match needed::<E>(tables) {
                    Some(SHORT) => block::<E, SHORT, M>(tables, group, codes, count, x, word),
                    Some(_) => block::<E, WHOLE, M>(tables, group, codes, count, x, word),
                    None => {
                        let (group, codes) = (array::from_ref(group), array::from_ref(codes));
                        simd::chain::<Self, E, 1, M>(tables, group, codes, count, x, word).map(|[sums]| sums)
                    }
                };
                for r in 0..M {
                    out[r][b] = sums[r];
                }
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn unpack<E: Encoding>(
        tables: &Tables<Self>,
        group: &Group<Self>,
        codes: &Codes,
        word: usize,
        out: *mut f32,
    ) {
        // SAFETY: the trait's contract.
        unsafe {
            match needed::<E>(tables) {
                Some(SHORT) => unpack::<E, SHORT>(tables, group, codes, word, out),
                Some(_) => unpack::<E, WHOLE>(tables, group, codes, word, out),
                None => simd::unpack::<Self, E>(tables, group, codes, word, out),
            }
        }
    }

    /// Even k before odd k: six rows are then twelve sums, more than hide the latency of a multiply-add, and
    /// each load of x serves two of them.
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(
        tiles: [*const f32; C],
        len: usize,
        x: [*const f32; R],
    ) -> [[[F; 2]; C]; R] {
        // SAFETY: the trait's contract; `len` is a multiple of 8.
        unsafe {
            let mut out = [[[Self::splat(0.0); 2]; C]; R];
            for odd in 0..2 {
                for c in 0..C {
                    let mut sums = [Self::splat(0.0); R];
                    for first in (odd..len).step_by(CODES) {
                        for n in 0..CODES / 2 {
                            let i = first + 2 * n;
                            let w = Self::load(tiles[c].add(i * LANES));
                            for r in 0..R {
                                sums[r] = Self::fma(w, Self::splat(*x[r].add(i)), sums[r]);
                            }
                        }
                    }
                    for r in 0..R {
                        out[r][c][odd] = sums[r];
                    }
                    // In memory from here on: the sums that follow need the registers.
                    hint::black_box(&mut out);
                }
            }
            out
        }
    }
}

/// How many bytes of a value have to be looked up, if any: codes with upper bits are numbers. None where codes
/// are bytes.
#[inline(always)]
fn needed<E: Encoding>(tables: &Tables<Avx2>) -> Option<usize> {
    if E::BYTES.is_some() {
        return None;
    }
    Some(if tables.low.is_short || E::HIGH > 0 { SHORT } else { WHOLE })
}

/// The two sums of a chain of one block.
#[inline(always)]
unsafe fn block<E: Encoding, const B: usize, const M: usize>(
    tables: &Tables<Avx2>,
    group: &Group<Avx2>,
    codes: &Codes,
    count: usize,
    x: [*const f32; M],
    word: usize,
) -> [[F; 2]; M] {
    // SAFETY: the trait's contract; a chain has whole words of upper bits.
    unsafe {
        let (mut even, mut odd) = ([Avx2::splat(0.0); M], [Avx2::splat(0.0); M]);
        for i in word..word + count {
            codes.fetch::<Avx2, E>(i);
            let parts = Parts::<B>::of::<E>(tables, codes, i);
            add::<E, B, M, 0>(&parts, group, x, i, &mut even);
            if M <= TOGETHER {
                add::<E, B, M, 1>(&parts, group, x, i, &mut odd);
            }
        }
        if M > TOGETHER {
            for i in word..word + count {
                add::<E, B, M, 1>(&Parts::of::<E>(tables, codes, i), group, x, i, &mut odd);
            }
        }
        let mut out = [[Avx2::splat(0.0); 2]; M];
        for r in 0..M {
            out[r] = [even[r], odd[r]];
        }
        out
    }
}

/// Adds the products over the four even (`ODD` = 0) or odd k of a word.
#[inline(always)]
unsafe fn add<E: Encoding, const B: usize, const M: usize, const ODD: usize>(
    parts: &Parts<B>,
    group: &Group<Avx2>,
    x: [*const f32; M],
    word: usize,
    sums: &mut [F; M],
) {
    // SAFETY: the trait's contract.
    unsafe {
        let values = parts.four::<E, ODD>(group);
        for n in 0..CODES / 2 {
            for r in 0..M {
                let x = Avx2::splat(*x[r].add(word * CODES + 2 * n + ODD));
                sums[r] = Avx2::fma([values[0][n], values[1][n]], x, sums[r]);
            }
        }
    }
}

#[inline(always)]
unsafe fn unpack<E: Encoding, const B: usize>(
    tables: &Tables<Avx2>,
    group: &Group<Avx2>,
    codes: &Codes,
    word: usize,
    out: *mut f32,
) {
    // SAFETY: the trait's contract.
    unsafe {
        let parts = Parts::<B>::of::<E>(tables, codes, word);
        for (odd, values) in [parts.four::<E, 0>(group), parts.four::<E, 1>(group)].into_iter().enumerate() {
            for n in 0..CODES / 2 {
                Avx2::store([values[0][n], values[1][n]], out.add((2 * n + odd) * LANES));
            }
        }
    }
}

/// A word of each lane, by bytes, and what its codes are worth; that of upper bits likewise.
struct Parts<const B: usize> {
    low: [__m256i; 2],
    high: [__m256i; 2],
    values: Planes<B>,
    /// Of codes with upper bits, the least one, less what [`lifted`] adds.
    least: __m256,
    /// Where the upper bits of this word begin.
    at: i32,
}

impl<const B: usize> Parts<B> {
    #[inline(always)]
    unsafe fn of<E: Encoding>(tables: &Tables<Avx2>, codes: &Codes, word: usize) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let [low, high] = codes.words::<Avx2, E>(word);
            let by_byte = |w: [__m256i; 2]| [planes::by_byte::<B>(w[0]), planes::by_byte::<B>(w[1])];
            Self {
                low: by_byte(low),
                high: by_byte(high),
                values: Planes::load(tables.low.upper()),
                least: _mm256_broadcastss_ps(_mm256_castps256_ps128(tables.low.halves[0])),
                at: (word % share::<E>() * E::HIGH) as i32,
            }
        }
    }

    /// Values of the codes in one half of every byte, of eight lanes and of the other eight: scaled where
    /// each has its minimum.
    #[inline(always)]
    unsafe fn four<E: Encoding, const ODD: usize>(&self, group: &Group<Avx2>) -> [[__m256; 4]; 2] {
        // SAFETY: the trait's contract.
        unsafe {
            let mut out = [[_mm256_setzero_ps(); 4]; 2];
            for side in 0..LANES / HALF {
                let bytes = self.low[side];
                let codes = if ODD == 0 { planes::codes(bytes) } else { upper_codes(bytes) };
                let values = if E::HIGH > 0 {
                    let mut values = lifted(_mm256_or_si256(codes, self.upper::<E, ODD>(side)));
                    for n in 0..4 {
                        values[n] = _mm256_add_ps(values[n], self.least);
                    }
                    values
                } else {
                    self.values.four(codes)
                };
                let (scale, offset) = (group.scale[side], group.offset[side]);
                for n in 0..4 {
                    out[side][n] = match E::OFFSET {
                        Offset::None => values[n],
                        Offset::Zero => _mm256_add_ps(values[n], offset),
                        Offset::Minimum => _mm256_fmadd_ps(values[n], scale, offset),
                        Offset::Bias => _mm256_add_ps(_mm256_mul_ps(values[n], scale), offset),
                    };
                }
            }
            out
        }
    }

    /// The upper bits of these codes, above the lowest four of every byte.
    #[inline(always)]
    unsafe fn upper<E: Encoding, const ODD: usize>(&self, side: usize) -> __m256i {
        // SAFETY: the trait's contract.
        unsafe {
            let bits = if ODD == 0 {
                _mm256_sllv_epi32(self.high[side], _mm256_set1_epi32(4 - self.at))
            } else {
                _mm256_srlv_epi32(self.high[side], _mm256_set1_epi32(self.at))
            };
            _mm256_and_si256(bits, _mm256_set1_epi8(((1 << E::HIGH) - 1) << 4))
        }
    }
}
