//! Blocks of GGML taken apart and put together again, as `ggml-quants.c` of llama.cpp lays them out.
use crate::wide;
use half::f16;
use serde::Serialize;
use std::ops::Range;

/// Elements of the longest block.
pub const LONGEST: usize = 256;

/// Groups of a block, at most.
const GROUPS: usize = 16;

/// A type of blocks, by the names that GGUF files and people have for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Blocks {
    /// 256 codes of 4 bits; scales and minima of 6 bits for 32; an f16 for the scales and one for the minima.
    #[serde(rename = "q4_k")]
    Q4K,
    /// As `Q4K` with codes of 5 bits.
    #[serde(rename = "q5_k")]
    Q5K,
    /// 256 codes of 6 bits about 32, a signed byte of scale for 16, an f16 for the scales.
    #[serde(rename = "q6_k")]
    Q6K,
    /// 32 signed bytes and an f16.
    #[serde(rename = "q8_0")]
    Q80,
}

/// What a block stands for: element `i`, in group `g`, is
/// `(scale * scales[g]) * (codes[i] - zero) - min * mins[g]`. The first two products are exact in f32, so is
/// the last; the difference is rounded once.
#[derive(Clone, Debug)]
pub struct Apart {
    /// Unsigned, as many as the block has elements.
    pub codes: [u8; LONGEST],
    /// Of each group; 1 where groups have no scale of their own.
    pub scales: [i8; GROUPS],
    /// Of each group; 0 where there are none.
    pub mins: [u8; GROUPS],
    /// Of the scales.
    pub scale: f16,
    /// Of the minima.
    pub min: f16,
}

impl Blocks {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Q4K, Self::Q5K, Self::Q6K, Self::Q80];

    /// As files and people spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
            Self::Q80 => "q8_0",
        }
    }
    /// Elements of a block.
    pub const fn elements(self) -> usize {
        match self {
            Self::Q80 => 32,
            _ => LONGEST,
        }
    }
    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Q80 => 34,
        }
    }
    /// Elements under one scale.
    pub const fn group(self) -> usize {
        match self {
            Self::Q6K => 16,
            _ => 32,
        }
    }
    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        match self {
            Self::Q4K => 4,
            Self::Q5K => 5,
            Self::Q6K => 6,
            Self::Q80 => 8,
        }
    }
    /// What is taken off a code.
    pub const fn zero(self) -> u8 {
        match self {
            Self::Q4K | Self::Q5K => 0,
            Self::Q6K => 32,
            Self::Q80 => 128,
        }
    }
    /// Groups have a minimum, which is taken off what is scaled.
    pub const fn has_mins(self) -> bool {
        matches!(self, Self::Q4K | Self::Q5K)
    }
    /// The largest scale of a group.
    pub(super) const fn largest_scale(self) -> i8 {
        match self {
            Self::Q4K | Self::Q5K => 63,
            Self::Q6K => 127,
            Self::Q80 => 1,
        }
    }
    /// Where the f16 of a block lie: of the scales, and of the minima.
    pub(super) const fn floats(self) -> &'static [usize] {
        match self {
            Self::Q4K | Self::Q5K => &[0, 2],
            Self::Q6K => &[208],
            Self::Q80 => &[0],
        }
    }
    /// What a reader of files calls the blocks that stand for tensor `name`.
    pub fn tensor(self, name: &str) -> String {
        format!("{name}.{}", self.name())
    }
    /// Bytes of a row of `k` elements.
    pub const fn row(self, k: usize) -> usize {
        k / self.elements() * self.bytes()
    }

    /// Takes a block apart.
    ///
    /// # Panics
    /// If it has not [`bytes`](Self::bytes).
    #[inline(always)] // into loops for wider registers
    pub fn apart(self, block: &[u8]) -> Apart {
        assert_eq!(block.len(), self.bytes(), "bytes of a {} block", self.name());
        let float = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
        let mut out = Apart {
            codes: [0; LONGEST],
            scales: [1; GROUPS],
            mins: [0; GROUPS],
            scale: float(self.floats()[0]),
            min: self.floats().get(1).map_or(f16::ZERO, |at| float(*at)),
        };
        match self {
            Self::Q4K => {
                unpack_scales(&block[4..16], &mut out);
                nibbles(&block[16..], &mut out.codes);
            }
            Self::Q5K => {
                unpack_scales(&block[4..16], &mut out);
                nibbles(&block[48..], &mut out.codes);
                // Byte `i` has a bit for each of eight runs.
                for (run, codes) in out.codes.chunks_exact_mut(32).enumerate() {
                    for (code, bits) in codes.iter_mut().zip(&block[16..48]) {
                        *code |= (bits >> run & 1) << 4;
                    }
                }
            }
            Self::Q6K => {
                for (half, codes) in out.codes.chunks_exact_mut(128).enumerate() {
                    let (low, high) = (&block[64 * half..][..64], &block[128 + 32 * half..][..32]);
                    for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
                        let low = &low[run % 2 * 32..][..32];
                        for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
                            *code = low >> (run / 2 * 4) & 15 | (high >> (2 * run) & 3) << 4;
                        }
                    }
                }
                out.scales = std::array::from_fn(|g| block[192 + g].cast_signed());
            }
            Self::Q80 => {
                out.codes.iter_mut().zip(&block[2..]).for_each(|(code, byte)| *code = byte ^ 128);
            }
        }
        out
    }

    /// Puts a block together: the inverse of [`apart`](Self::apart) for what fits the bits of its fields.
    ///
    /// # Panics
    /// If `block` has not [`bytes`](Self::bytes).
    pub fn put(self, from: &Apart, block: &mut [u8]) {
        assert_eq!(block.len(), self.bytes(), "bytes of a {} block", self.name());
        block.fill(0);
        for (at, value) in self.floats().iter().zip([from.scale, from.min]) {
            block[*at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        match self {
            Self::Q4K => {
                pack_scales(from, &mut block[4..16]);
                put_nibbles(&from.codes, &mut block[16..]);
            }
            Self::Q5K => {
                pack_scales(from, &mut block[4..16]);
                put_nibbles(&from.codes, &mut block[48..]);
                for (i, code) in from.codes.iter().enumerate() {
                    block[16 + i % 32] |= (code >> 4 & 1) << (i / 32);
                }
            }
            Self::Q6K => {
                for (i, code) in from.codes.iter().enumerate() {
                    let (half, run, at) = (i / 128, i / 32 % 4, i % 32);
                    block[64 * half + run % 2 * 32 + at] |= (code & 15) << (run / 2 * 4);
                    block[128 + 32 * half + at] |= (code >> 4 & 3) << (2 * run);
                }
                block[192..208].iter_mut().zip(from.scales).for_each(|(b, s)| *b = s.cast_unsigned());
            }
            Self::Q80 => block[2..].iter_mut().zip(from.codes).for_each(|(byte, code)| *byte = code ^ 128),
        }
    }

    /// Values of whole blocks.
    ///
    /// # Panics
    /// If `out` has another number of elements than `blocks`.
    pub fn decode(self, blocks: &[u8], out: &mut [f32]) {
        assert_eq!(blocks.len(), self.row(out.len()), "bytes of {} elements of {}", out.len(), self.name());
        values(self, blocks, out);
    }
}

wide! {
    fn values(of: Blocks, bytes: &[u8], out: &mut [f32]) {
        let (group, zero) = (of.group(), i32::from(of.zero()));
        for (block, out) in bytes.chunks_exact(of.bytes()).zip(out.chunks_exact_mut(of.elements())) {
            let apart = of.apart(block);
            let (scale, min) = (apart.scale.to_f32(), apart.min.to_f32());
            let groups = out.chunks_exact_mut(group).zip(apart.codes.chunks_exact(group));
            for ((out, codes), (s, m)) in groups.zip(apart.scales.iter().zip(apart.mins)) {
                let (scale, min) = (scale * f32::from(*s), min * f32::from(m));
                for (v, code) in out.iter_mut().zip(codes) {
                    *v = scale * (i32::from(*code) - zero) as f32 - min;
                }
            }
        }
    }
}

impl Apart {
    /// Scale and minimum of a group, both exact.
    pub fn of(&self, group: usize) -> (f32, f32) {
        let scale = self.scale.to_f32() * f32::from(self.scales[group]);
        (scale, self.min.to_f32() * f32::from(self.mins[group]))
    }
}

/// Each 64 elements share 32 bytes: the first half has the low nibbles.
#[inline(always)]
fn nibbles(bytes: &[u8], codes: &mut [u8; LONGEST]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        let (low, high) = codes.split_at_mut(32);
        for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
            (*low, *high) = (byte & 15, byte >> 4);
        }
    }
}

fn put_nibbles(codes: &[u8; LONGEST], bytes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact_mut(32).zip(codes.chunks_exact(64)) {
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = codes[i] & 15 | codes[32 + i] << 4;
        }
    }
}

/// Eight scales and eight minima of six bits in twelve bytes. The first four of each have a byte of their
/// own, whose upper two bits are those of the last four; their nibbles share the last four bytes.
#[inline(always)]
fn unpack_scales(bytes: &[u8], out: &mut Apart) {
    for g in 0..4 {
        out.scales[g] = (bytes[g] & 63).cast_signed();
        out.mins[g] = bytes[4 + g] & 63;
        out.scales[4 + g] = (bytes[8 + g] & 15 | bytes[g] >> 6 << 4).cast_signed();
        out.mins[4 + g] = bytes[8 + g] >> 4 | bytes[4 + g] >> 6 << 4;
    }
}

fn pack_scales(from: &Apart, bytes: &mut [u8]) {
    for g in 0..4 {
        let (scale, min) = (from.scales[4 + g].cast_unsigned(), from.mins[4 + g]);
        bytes[g] = from.scales[g].cast_unsigned() & 63 | scale >> 4 << 6;
        bytes[4 + g] = from.mins[g] & 63 | min >> 4 << 6;
        bytes[8 + g] = scale & 15 | min << 4;
    }
}

/// The blocks of a row of `k` elements among those of a matrix.
pub(super) fn row(blocks: Blocks, r: usize, k: usize) -> Range<usize> {
    let bytes = blocks.row(k);
    r * bytes..(r + 1) * bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::sample::mix;

    #[test]
    fn blocks_of_any_bytes_are_put_together_as_they_were() {
        for blocks in Blocks::ALL {
            for seed in 0..200 {
                let block: Vec<u8> = (0..blocks.bytes()).map(|i| mix(seed << 20 | i as u64) as u8).collect();
                let mut again = vec![0xff; block.len()];
                blocks.put(&blocks.apart(&block), &mut again);
                assert_eq!(again, block, "{blocks:?} {seed}");
            }
        }
    }

    #[test]
    fn only_the_difference_is_rounded() {
        // Every f16 with every scale of a group, codes and minima in turn.
        for blocks in Blocks::ALL {
            let zero = i32::from(blocks.zero());
            for bits in (0..=u16::MAX).filter(|bits| f16::from_bits(*bits).is_finite()) {
                let mut apart = blocks.apart(&vec![0; blocks.bytes()]);
                let codes = 1u32 << blocks.bits();
                let turn = u32::from(bits);
                for (i, code) in apart.codes.iter_mut().enumerate() {
                    *code = ((i as u32 * 7 + turn) % codes) as u8;
                }
                let largest = i32::from(blocks.largest_scale());
                for g in 0..GROUPS {
                    apart.scales[g] = match largest {
                        1 => 1,
                        127 => (turn as usize * 16 + g) as u8 as i8,
                        _ => ((turn as usize * 16 + g) % 64) as i8,
                    };
                    apart.mins[g] =
                        if blocks.has_mins() { (turn as usize * 5 + g * 9) as u8 % 64 } else { 0 };
                }
                apart.scale = f16::from_bits(bits);
                apart.min = if blocks.has_mins() { f16::from_bits(bits ^ 0x155) } else { f16::ZERO };
                if !apart.min.is_finite() {
                    continue;
                }
                let (mut block, mut out) = (vec![0; blocks.bytes()], vec![0.0; blocks.elements()]);
                blocks.put(&apart, &mut block);
                blocks.decode(&block, &mut out);
                for (i, v) in out.iter().enumerate() {
                    let g = i / blocks.group();
                    let scale = apart.scale.to_f64() * f64::from(apart.scales[g]);
                    let min = apart.min.to_f64() * f64::from(apart.mins[g]);
                    // Exact in f64: 24 bits less 17 bits, at most 40 powers of two apart.
                    let want = scale * f64::from(i32::from(apart.codes[i]) - zero) - min;
                    assert_eq!(*v, want as f32, "{blocks:?} {bits:04x} {i}");
                }
            }
        }
    }
}
