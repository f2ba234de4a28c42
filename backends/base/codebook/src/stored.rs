//! Where weights come from: rows that are taken apart piece by piece.
use crate::encoding::{NEST, Scale};
use crate::layout::{CODES, LEAST_GROUP, scale_group};
use half::f16;
use q4_core::NibbleOrder;
use std::borrow::Cow;

/// Elements of k that are packed at a time: lines of a quad that stay in the first-level cache. A multiple of
/// [`NEST`].
pub(crate) const PIECE: usize = 512;

/// One stored matrix.
pub trait Stored: Sync {
    /// Out features.
    fn rows(&self) -> usize;
    /// Reads `len` elements of `row` from `from` on, which are multiples of 8 and at most those of a
    /// [`Run`], with the groups that begin among them.
    fn read(&self, row: usize, from: usize, len: usize, out: &mut Run);
}

/// A piece of a row taken apart.
pub struct Run {
    /// The lowest four bits of eight codes, the first in the lowest nibble; or the first four of eight bytes.
    pub codes: [u32; PIECE / CODES],
    /// The bits above them, of the same eight codes, each in a nibble; or the second four bytes.
    pub high: [u32; PIECE / CODES],
    /// Of each group, one of those that scales are kept in.
    pub scales: [f32; PIECE / LEAST_GROUP],
    /// Of each group that has one: its zero point, minimum or bias.
    pub offsets: [f32; PIECE / LEAST_GROUP],
    /// What scales and what minima are multiplied by, for each [`NEST`].
    pub nests: [[f16; 2]; PIECE / NEST],
}

impl Run {
    pub(crate) fn empty() -> Self {
        Self { codes: [0; _], high: [0; _], scales: [0.0; _], offsets: [0.0; _], nests: [[f16::ZERO; 2]; _] }
    }
}

/// Codes, flat over the rows of a matrix, and scales beside them: of four bits, two in a byte, or on a device
/// bytes, where its levels are such.
pub struct Flat<'a, S: Clone> {
    /// Out features.
    pub rows: usize,
    /// In features.
    pub k: usize,
    /// Of all rows.
    pub codes: &'a [u8],
    /// Order of two in a byte.
    pub order: NibbleOrder,
    /// Elements under one scale.
    pub block: u32,
    /// One for each block.
    pub scales: Cow<'a, [S]>,
    /// One for each block, of weights with zero points.
    pub zeros: &'a [u8],
}

/// The same with biases, one for each block.
pub struct FlatWithBiases<'a, S: Clone> {
    /// What there is without them.
    pub flat: Flat<'a, S>,
    /// In the order of the scales.
    pub biases: Cow<'a, [S]>,
}

/// Scales as they are stored; copied where they are not aligned.
///
/// # Panics
/// If the bytes are no whole number of scales.
pub fn scales<S: Scale>(bytes: &[u8]) -> Cow<'_, [S]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(scales) => Cow::Borrowed(scales),
        Err(_) => bytes.chunks_exact(size_of::<S>()).map(bytemuck::pod_read_unaligned).collect(),
    }
}

impl<S: Scale> Flat<'_, S> {
    fn codes(&self, row: usize, from: usize, len: usize, out: &mut [u32]) {
        let bytes = self.codes[(row * self.k + from) / 2..][..len / 2].as_chunks::<4>().0;
        let words = out.iter_mut().zip(bytes.iter().map(|b| u32::from_le_bytes(*b)));
        match self.order {
            NibbleOrder::LowFirst => words.for_each(|(to, w)| *to = w),
            NibbleOrder::HighFirst => {
                words.for_each(|(to, w)| *to = (w & 0x0f0f_0f0f) << 4 | w >> 4 & 0x0f0f_0f0f)
            }
        }
    }
    /// Blocks that groups which begin in a piece lie in, in order.
    fn blocks(&self, row: usize, from: usize, len: usize) -> impl Iterator<Item = usize> {
        let group = scale_group(self.k, self.block);
        let (first, block) = (row * self.k, self.block as usize);
        (from.div_ceil(group)..(from + len).div_ceil(group)).map(move |g| (first + g * group) / block)
    }
}

impl<S: Scale> Stored for Flat<'_, S> {
    fn rows(&self) -> usize {
        self.rows
    }
    fn read(&self, row: usize, from: usize, len: usize, out: &mut Run) {
        self.codes(row, from, len, &mut out.codes);
        let to = out.scales.iter_mut().zip(&mut out.offsets);
        for ((scale, zero), at) in to.zip(self.blocks(row, from, len)) {
            *scale = self.scales[at].widen();
            *zero = self.zeros.get(at).copied().map_or(0.0, f32::from);
        }
    }
}

impl<S: Scale> Stored for FlatWithBiases<'_, S> {
    fn rows(&self) -> usize {
        self.flat.rows
    }
    fn read(&self, row: usize, from: usize, len: usize, out: &mut Run) {
        self.flat.read(row, from, len, out);
        for (bias, at) in out.offsets.iter_mut().zip(self.flat.blocks(row, from, len)) {
            *bias = self.biases[at].widen();
        }
    }
}
