//! Codes that are integers beside int8 activations: what they are, and how rows of x come to the dots.
use crate::encoding::{Bytes, Encoding, Offset, Values};
use crate::layout::CODES;
use q4_core::formats::int8::{self, BLOCK};
use q4_core::isa::Isa;
use q4_core::rows::{Rows, activation_bytes, each_row};
use q4_core::{Activations, DType, Result, Scratch, TensorView, ThreadPool, wide};
use q4_simd::Vectors;

/// Bits of weights whose products with int8 fit 16 bits eight together: 8 * 31 * 127.
pub(crate) const NARROW: u32 = 5;
/// The same for two: 2 * 63 * 127.
pub(crate) const MIDDLE: u32 = 6;
/// Those of a byte, of which one product fits.
pub(crate) const WIDE: u32 = 8;

/// What the bytes of codes have at most; [`Integers`] are no more in a table.
pub(crate) const fn bits<E: Encoding>() -> u32 {
    match (E::BYTES, E::HIGH) {
        (Some(_), _) => WIDE,
        (_, 0 | 1) => NARROW,
        _ => MIDDLE,
    }
}

/// Elements of k in a [`Block`].
pub(crate) const TILE: usize = 64;
/// Scales of a block.
pub(crate) const SCALES: usize = TILE / BLOCK;

/// Whether a weight of eight bits is a signed number on the set of `vectors`; else it is unsigned. Those of
/// fewer bits are both.
pub(crate) const fn is_signed(vectors: Vectors) -> bool {
    !matches!(vectors.set(), Isa::Amx | Isa::Avx512Vnni | Isa::Avx512 | Isa::Avx2)
}

/// Whether the dots of such weights are two sums of 16 bits in each lane on the set of `vectors`, those of the
/// lower and those of the upper two of every four bytes, and start at two such numbers.
pub(crate) const fn in_halves(vectors: Vectors, bits: u32) -> bool {
    bits == NARROW && matches!(vectors.set(), Isa::Avx512 | Isa::Avx2)
}

/// What the codes of a weight are worth: `(byte - zero) * unit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Integers {
    /// Bytes by code; none where a code is its byte.
    pub table: Option<[u8; 16]>,
    /// Of unsigned bytes.
    pub zero: i32,
    /// 1, or a half.
    pub unit: f32,
    /// As [`in_halves`] says.
    pub halves: bool,
}

impl Integers {
    /// Those of an encoding on the set of `vectors`; none where values are no integers, nor halves of them.
    pub fn of<E: Encoding>(values: &Values, vectors: Vectors) -> Option<Self> {
        let halves = in_halves(vectors, bits::<E>());
        let plain = |zero: i32| Self { table: None, zero, unit: 1.0, halves };
        match E::BYTES {
            Some(Bytes::Signed) => return Some(plain(if is_signed(vectors) { 0 } else { 128 })),
            Some(Bytes::E4m3) => return None,
            None => {}
        }
        // What is taken off codes of more than four bits is in the upper part of each.
        let zero = -(values.low[0] + values.high[0][0]);
        let counts = |unit: f32| (0..16).all(|code| values.low[code] == values.low[0] + unit * code as f32);
        // With an offset, whatever codes count from is in it, and dots start at nothing.
        if E::OFFSET != Offset::None {
            return (counts(1.0) && zero == 0.0).then_some(plain(0));
        }
        if counts(1.0) && zero.fract() == 0.0 {
            return Some(plain(zero as i32));
        }
        let doubled = values.low.map(|v| 2.0 * v);
        let least = doubled.iter().copied().fold(0.0, f32::min);
        let fits = doubled.iter().all(|v| v.fract() == 0.0 && v - least < 32.0);
        let table = doubled.map(|v| (v - least) as u8);
        (fits && E::HIGH == 0).then_some(Self { table: Some(table), zero: -least as i32, unit: 0.5, halves })
    }
}

/// What a row of x has for 64 of k. Zero beyond the last.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub(crate) struct Block {
    /// In the order in which words of codes come apart.
    pub q: [i8; TILE],
    /// Of each 16.
    pub scales: [f32; SCALES],
    /// Where the dots of each 16 start, as [`in_halves`] says: at what the zero of the codes adds too much.
    pub start: [i32; SCALES],
    /// Sums of the 16s of a chain up to each, by their scales: for groups with zero points or minima.
    pub sums: [f32; SCALES],
}

const BLANK: Block = Block { q: [0; TILE], scales: [0.0; SCALES], start: [0; SCALES], sums: [0.0; SCALES] };

/// Rows of x in int8: `[k / 64][row]`.
#[derive(Clone, Copy)]
pub(crate) struct Inputs {
    blocks: *mut Block,
    /// Rows.
    pub m: usize,
}

// SAFETY: blocks that are written before any product reads them, each by one task.
unsafe impl Sync for Inputs {}

impl Inputs {
    /// x quantised as [`int8::quantize_row`] does, in scratch of [`bytes`], for chains of so many 16s.
    ///
    /// # Errors
    /// Of scratch that is too small, and as of [`int8::quantize_row`].
    pub fn of<'a, E: Encoding>(
        x: TensorView<'a>,
        (integers, chain): (&Integers, usize),
        scratch: &mut Scratch<'a>,
        threads: &ThreadPool,
    ) -> Result<Self> {
        let (m, k, _) = x.as_matrix()?;
        let blocks = scratch.take::<u8>(m * k.div_ceil(TILE) * size_of::<Block>())?.as_mut_ptr().cast();
        let (to, rows) = (Self { blocks, m }, Rows::activations(x, &Activations::Native, scratch, threads)?);
        each_row(m, threads, &|r| {
            let row = rows.row(r);
            for (t, x) in row.chunks(TILE).enumerate() {
                let Some(block) = block::<E>(x, integers, chain) else {
                    // Who says where it is looks at the whole row.
                    let (mut q, mut scales) = (vec![0; k], vec![0.0; k / BLOCK]);
                    return int8::quantize_row(row, &mut q, &mut scales);
                };
                // SAFETY: the scratch has a block for each tile and row, and this task alone has this row.
                unsafe { to.put(t, r, block) };
            }
            Ok(())
        })?;
        Ok(to)
    }

    /// # Safety
    /// There is such a block, and no other task has it.
    unsafe fn put(&self, t: usize, r: usize, block: Block) {
        // SAFETY: the caller's.
        unsafe { self.blocks.add(t * self.m + r).write(block) };
    }

    /// The blocks of tile `t`, one for each row.
    ///
    /// # Safety
    /// There is such a tile.
    #[inline(always)]
    pub unsafe fn tile(&self, t: usize) -> *const Block {
        // SAFETY: the caller's.
        unsafe { self.blocks.add(t * self.m) }
    }
}

/// Scratch of [`Inputs::of`] for `m` rows of `k` of type `x`.
pub(crate) fn bytes(x: DType, m: usize, k: usize) -> usize {
    Scratch::bytes(&[m * k.div_ceil(TILE) * size_of::<Block>()])
        + activation_bytes(x, &Activations::Native, m, k)
}

/// A block of up to 64 elements; none where one is not finite.
fn block<E: Encoding>(x: &[f32], integers: &Integers, chain: usize) -> Option<Block> {
    let mut out = BLANK;
    let mut q = [0; TILE];
    int8::quantize_row(x, &mut q[..x.len()], &mut out.scales[..x.len() / BLOCK]).ok()?;
    if E::BYTES.is_some() {
        out.q = q;
    } else {
        deal(&q, &mut out.q);
    }
    let mut rest = 0.0;
    for (i, [low, high]) in halves(&out.q).into_iter().enumerate() {
        out.start[i] = start(integers, low, high);
        rest = if i.is_multiple_of(chain) { 0.0 } else { rest } + (low + high) as f32 * out.scales[i];
        out.sums[i] = rest;
    }
    Some(out)
}

/// Where dots start with what sums to `low` and `high` in the lower and upper two of every four.
pub(crate) const fn start(integers: &Integers, low: i32, high: i32) -> i32 {
    let [low, high] = [-integers.zero * low, -integers.zero * high];
    // Both halves hold it: eight of at most 127, by a zero below 32.
    if integers.halves { low & 0xffff | high << 16 } else { low + high }
}

wide! {
    /// Sums of each 16: of the lower and of the upper two of every four.
    fn halves(q: &[i8; TILE]) -> [[i32; 2]; SCALES] {
        let mut sums = [[0; 2]; SCALES];
        for ([low, high], q) in sums.iter_mut().zip(q.as_chunks::<BLOCK>().0) {
            for four in q.as_chunks::<4>().0 {
                *low += i32::from(four[0]) + i32::from(four[1]);
                *high += i32::from(four[2]) + i32::from(four[3]);
            }
        }
        sums
    }
}

wide! {
    /// Nibbles of a word come apart as those of even and those of odd k.
    fn deal(q: &[i8; TILE], to: &mut [i8; TILE]) {
        for (to, q) in to.as_chunks_mut::<CODES>().0.iter_mut().zip(q.as_chunks::<CODES>().0) {
            *to = [q[0], q[2], q[4], q[6], q[1], q[3], q[5], q[7]];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encoding::Plain;
    use q4_core::formats::e2m1;

    #[test]
    fn integers_are_told_from_other_values() {
        let of = |low| Integers::of::<Plain>(&Values::of(low), Vectors::best());
        let halves = in_halves(Vectors::best(), NARROW);
        let counted = std::array::from_fn(|i| i as f32 - 8.0);
        assert_eq!(of(counted), Some(Integers { table: None, zero: 8, unit: 1.0, halves }));
        let doubled = of(e2m1::VALUES).expect("halves");
        let table = doubled.table.expect("not in order");
        assert_eq!((doubled.zero, doubled.unit), (12, 0.5));
        assert!((0..16).all(|c| (f32::from(table[c]) - 12.0) * 0.5 == e2m1::VALUES[c]), "{table:?}");
        let mut other = counted;
        other[3] += 0.125;
        assert_eq!(of(other), None);
    }

    #[test]
    fn a_block_has_the_order_of_nibbles() {
        let mut integers = Integers { table: None, zero: 8, unit: 1.0, halves: false };
        let x: [f32; 32] = std::array::from_fn(|i| if i % 16 == 15 { 127.0 } else { (i % 16) as f32 });
        let block = |integers: &_, chain| super::block::<Plain>(&x, integers, chain).expect("finite");
        let plain = block(&integers, 2);
        assert_eq!(plain.q[..16], [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 127]);
        assert_eq!(plain.start[..2], [-8 * 232; 2]);
        assert_eq!(plain.sums[..2], [232.0, 464.0]);
        assert!(plain.q[32..].iter().all(|q| *q == 0) && plain.scales[2..] == [0.0; 2]);
        integers.halves = true;
        let halved = block(&integers, 1);
        let [low, high] = [-8 * (2 + 4 + 18 + 20), -8 * (10 + 12 + 26 + 140)];
        assert_eq!((halved.start[1] as i16, halved.start[1] >> 16), (low as i16, high));
        assert_eq!(halved.sums[..2], [232.0; 2]);
    }
}
