//! The sums in AVX2: values of codes are put together from their bytes ([`q4_simd::planes`]), and the sums of
//! a block, the registers' worth of few rows, are finished before those of the next.
use crate::encoding::{Encoding, Offset, share};
use crate::layout::{CODES, LANES};
use crate::shape::{Codes, Group};
use crate::simd::{self, Lanes, MOST_ROWS, Span, Tables};
use q4_simd::planes::{self, Planes, SHORT, WHOLE, lifted, upper_codes};
use q4_simd::{Avx2, Vector};
use std::arch::x86_64::*;
use std::ops::Range;

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
    /// Twelve sums: with three other registers all there are.
    const TILE_ROWS: usize = 3;
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

    /// One block after the other: the registers hold no more than one, and what is in memory between two of
    /// them is only the totals.
    #[inline(always)]
    unsafe fn chain<E: Encoding, const B: usize, const M: usize>(
        tables: &Tables<Self>,
        span: &Span<E>,
        x: [*const f32; M],
        totals: &mut [[F; B]; M],
    ) {
        // SAFETY: the trait's contract.
        unsafe {
            let kind = Kind::of::<E>(tables);
            for b in 0..B {
                let place = span.place.beside(b);
                if matches!(kind, Kind::Bytes) {
                    let mut own = [[Self::splat(0.0)]; M];
                    for r in 0..M {
                        own[r] = [totals[r][b]];
                    }
                    let one = Span { place, words: span.words.clone(), ..*span };
                    simd::chain::<Self, E, 1, M>(tables, &one, x, &mut own);
                    for r in 0..M {
                        [totals[r][b]] = own[r];
                    }
                    continue;
                }
                let group = place.group(span.group, span.len);
                let (codes, words) = (&place.codes, span.words.clone());
                let sums = match kind {
                    Kind::Whole(least) => whole::<E, M>(least, &group, codes, words, x),
                    Kind::Short => block::<E, SHORT, M>(tables, &group, codes, words, x),
                    _ => block::<E, WHOLE, M>(tables, &group, codes, words, x),
                };
                let scale = group.outer::<E>();
                for r in 0..M {
                    totals[r][b] = Self::fma(scale, Self::add(sums[r][0], sums[r][1]), totals[r][b]);
                }
            }
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
            match Kind::of::<E>(tables) {
                Kind::Whole(least) => {
                    let numbers = Numbers::of::<E>(least, group);
                    let mut word = codes.words::<Self, E>(word)[0];
                    for half in 0..2 {
                        for j in 0..PLACES {
                            Self::store(numbers.value(word, j), out.add((PLACES * half + j) * LANES));
                        }
                        word = upper(word);
                    }
                }
                Kind::Short => unpack::<E, SHORT>(tables, group, codes, word, out),
                Kind::Long => unpack::<E, WHOLE>(tables, group, codes, word, out),
                Kind::Bytes => simd::unpack::<Self, E>(tables, group, codes, word, out),
            }
        }
    }
}

/// How values are made of codes.
enum Kind {
    /// Four bits that are a whole number, of which the least is this: by conversion.
    Whole(f32),
    /// By looking up the upper two bytes of a value; codes with upper bits are such numbers.
    Short,
    /// By looking up all four.
    Long,
    /// Codes are bytes.
    Bytes,
}

impl Kind {
    #[inline(always)]
    fn of<E: Encoding>(tables: &Tables<Avx2>) -> Self {
        match tables.low.least {
            _ if E::BYTES.is_some() => Self::Bytes,
            _ if E::HIGH > 0 => Self::Short,
            // A minimum is taken off with the rounding of the product, and so must be the least value; scales
            // under a bias may be so small that a sixteenth is none.
            Some(least) if E::OFFSET != Offset::Bias && (E::OFFSET != Offset::Minimum || least == 0.0) => {
                Self::Whole(least)
            }
            _ if tables.low.is_short => Self::Short,
            _ => Self::Long,
        }
    }
}

/// Codes of half a word.
const PLACES: usize = 4;

/// Numbers of four bits of one half of a word, which are converted where they are: `16^j` times what they
/// are. A multiply-add brings them to their size, and adds what there is to add, with one rounding, of exact
/// products.
struct Numbers {
    masks: [__m256i; PLACES],
    factors: [F; PLACES],
    offset: F,
}

impl Numbers {
    #[inline(always)]
    unsafe fn of<E: Encoding>(least: f32, group: &Group<Avx2>) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let mut masks = [_mm256_setzero_si256(); PLACES];
            let mut factors = [Avx2::splat(1.0); PLACES];
            for j in 0..PLACES {
                masks[j] = _mm256_set1_epi32(15 << (4 * j));
                let part = Avx2::splat(1.0 / (1 << (4 * j)) as f32);
                factors[j] = if E::OFFSET == Offset::Minimum { Avx2::mul(group.scale, part) } else { part };
            }
            let offset = match E::OFFSET {
                Offset::None => Avx2::splat(least),
                Offset::Zero => Avx2::add(group.offset, Avx2::splat(least)),
                Offset::Minimum | Offset::Bias => group.offset,
            };
            Self { masks, factors, offset }
        }
    }

    /// The `j`th of the lower half of every word: scaled where each has its minimum.
    #[inline(always)]
    unsafe fn value(&self, words: [__m256i; 2], j: usize) -> F {
        // SAFETY: the trait's contract.
        unsafe {
            let number = |side: usize| _mm256_cvtepi32_ps(_mm256_and_si256(words[side], self.masks[j]));
            Avx2::fma([number(0), number(1)], self.factors[j], self.offset)
        }
    }
}

/// The upper halves of words.
#[inline(always)]
unsafe fn upper(words: [__m256i; 2]) -> [__m256i; 2] {
    // SAFETY: the trait's contract.
    unsafe { [_mm256_srli_epi32::<16>(words[0]), _mm256_srli_epi32::<16>(words[1])] }
}

/// The two sums of a chain of one block, of whole numbers.
#[inline(always)]
unsafe fn whole<E: Encoding, const M: usize>(
    least: f32,
    group: &Group<Avx2>,
    codes: &Codes,
    words: Range<usize>,
    x: [*const f32; M],
) -> [[F; 2]; M] {
    // SAFETY: the trait's contract.
    unsafe {
        let numbers = Numbers::of::<E>(least, group);
        let mut sums = [[Avx2::splat(0.0); 2]; M];
        // Of more rows the sums over even k, then those over odd k.
        let passes = if M > TOGETHER { 2 } else { 1 };
        for pass in 0..passes {
            for i in words.clone() {
                codes.fetch::<Avx2, E>(i);
                let mut word = codes.words::<Avx2, E>(i)[0];
                for half in 0..2 {
                    for j in (pass..PLACES).step_by(passes) {
                        let value = numbers.value(word, j);
                        for r in 0..M {
                            let x = Avx2::splat(*x[r].add(i * CODES + PLACES * half + j));
                            sums[r][j & 1] = Avx2::fma(value, x, sums[r][j & 1]);
                        }
                    }
                    word = upper(word);
                }
            }
        }
        sums
    }
}

/// The two sums of a chain of one block, of values that are looked up.
#[inline(always)]
unsafe fn block<E: Encoding, const B: usize, const M: usize>(
    tables: &Tables<Avx2>,
    group: &Group<Avx2>,
    codes: &Codes,
    words: Range<usize>,
    x: [*const f32; M],
) -> [[F; 2]; M] {
    // SAFETY: the trait's contract; a chain has whole words of upper bits.
    unsafe {
        let (mut even, mut odd) = ([Avx2::splat(0.0); M], [Avx2::splat(0.0); M]);
        for first in words.clone().step_by(share::<E>()) {
            for sharing in 0..share::<E>() {
                let i = first + sharing;
                codes.fetch::<Avx2, E>(i);
                let parts = Parts::<B>::of::<E>(tables, codes, i, sharing);
                add::<E, B, M, 0>(&parts, group, x, i, &mut even);
                if M <= TOGETHER {
                    add::<E, B, M, 1>(&parts, group, x, i, &mut odd);
                }
            }
        }
        if M > TOGETHER {
            for first in words.step_by(share::<E>()) {
                for sharing in 0..share::<E>() {
                    let i = first + sharing;
                    add::<E, B, M, 1>(&Parts::of::<E>(tables, codes, i, sharing), group, x, i, &mut odd);
                }
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
        let parts = Parts::<B>::of::<E>(tables, codes, word, word % share::<E>());
        for (odd, values) in [parts.four::<E, 0>(group), parts.four::<E, 1>(group)].into_iter().enumerate() {
            for n in 0..CODES / 2 {
                Avx2::store([values[0][n], values[1][n]], out.add((2 * n + odd) * LANES));
            }
        }
    }
}

/// A word of each lane, and what its codes are worth; that of upper bits likewise.
struct Parts<const B: usize> {
    /// By bytes, where codes are looked up.
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
    unsafe fn of<E: Encoding>(tables: &Tables<Avx2>, codes: &Codes, word: usize, sharing: usize) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let [mut low, high] = codes.words::<Avx2, E>(word);
            if E::HIGH == 0 {
                low = [planes::by_byte::<B>(low[0]), planes::by_byte::<B>(low[1])];
            }
            Self {
                low,
                high,
                values: Planes::load(tables.low.upper()),
                least: _mm256_broadcastss_ps(_mm256_castps256_ps128(tables.low.halves[0])),
                at: (sharing * E::HIGH) as i32,
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
