//! Moments of one tile, packed and unpacked. The CUDA kernel does the same operations on the same bytes.
use super::layout::StateFormat;
use super::maps::{E2M1, ROOT4, ROOTS, SIGNED4, SIGNED8, UNSIGNED8, between};
use crate::rng::Philox;
use q4_core::formats::{e2m1, e4m3};

/// Largest E2M1 value times largest E4M3 value.
const RANGE: f32 = 2688.0;

/// The bytes of one moment in one tile.
pub(super) struct Part<'a> {
    pub codes: &'a mut [u8],
    pub scales: &'a mut [u8],
    pub second: &'a mut [u8],
}

/// Which of the two moments.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    Mean,
    Square,
}

/// The random numbers of a tile's 4-bit codes.
#[derive(Clone, Copy)]
pub(super) struct Draws {
    pub rng: Philox,
    /// Index of the tile's first element.
    pub first: usize,
}

impl Draws {
    /// Of eight elements from `at` on, a multiple of 8. A bf16 master has the blocks below.
    #[inline(always)]
    fn eight(&self, moment: Moment, at: usize) -> [u16; 8] {
        let own = if moment == Moment::Mean { 1 << 30 } else { 1 << 31 };
        let words = self.rng.block(own | ((self.first + at) / 8) as u32);
        std::array::from_fn(|i| (words[i / 2] >> (16 * (i % 2))) as u16)
    }
}

/// `out`: as many elements as the part has, a multiple of 256 in packed formats.
#[inline(always)]
pub(super) fn unpack(format: StateFormat, moment: Moment, part: &Part<'_>, out: &mut [f32]) {
    match format {
        StateFormat::F32 => {
            for (x, bytes) in out.iter_mut().zip(part.codes.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*bytes);
            }
        }
        StateFormat::Int8 => {
            let map = if moment == Moment::Mean { &SIGNED8.values } else { &UNSIGNED8.values };
            let blocks = out.chunks_exact_mut(256).zip(part.codes.chunks_exact(256));
            for ((out, codes), scale) in blocks.zip(part.scales.as_chunks::<4>().0) {
                let absmax = f32::from_le_bytes(*scale);
                for (x, code) in out.iter_mut().zip(codes) {
                    *x = map[usize::from(*code)] * absmax;
                }
            }
        }
        StateFormat::Int4 => {
            let blocks = out.chunks_exact_mut(128).zip(part.codes.chunks_exact(64));
            for ((out, codes), scale) in blocks.zip(part.scales.as_chunks::<4>().0) {
                let absmax = f32::from_le_bytes(*scale);
                for (x, code) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                    *x = [code & 15, code >> 4].map(|code| match moment {
                        Moment::Mean => SIGNED4[usize::from(code)] * absmax,
                        Moment::Square => {
                            let root = ROOT4[usize::from(code)] * absmax;
                            root * root
                        }
                    });
                }
            }
        }
        StateFormat::Nvfp4 => {
            let second = part.second.first_chunk().map_or(0.0, |b| f32::from_le_bytes(*b));
            let blocks = out.chunks_exact_mut(16).zip(part.codes.chunks_exact(8));
            for ((out, codes), scale) in blocks.zip(&*part.scales) {
                let factor = e4m3::decode(*scale) * second;
                for (x, code) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                    *x = match moment {
                        Moment::Mean => [e2m1::decode(*code) * factor, e2m1::decode(code >> 4) * factor],
                        Moment::Square => [code & 7, code >> 4 & 7].map(|c| {
                            let root = ROOTS[usize::from(c)] * factor;
                            root * root
                        }),
                    };
                }
            }
        }
    }
}

/// The reverse of [`unpack`]; `x` may be overwritten. Four bits are rounded at random, see [`between`].
#[inline(always)]
pub(super) fn pack(format: StateFormat, moment: Moment, x: &mut [f32], part: &mut Part<'_>, draws: &Draws) {
    match format {
        StateFormat::F32 => {
            for (x, bytes) in x.iter().zip(part.codes.as_chunks_mut::<4>().0) {
                *bytes = x.to_le_bytes();
            }
        }
        StateFormat::Int8 => {
            let map = if moment == Moment::Mean { &*SIGNED8 } else { &*UNSIGNED8 };
            let blocks = x.chunks_exact(256).zip(part.codes.chunks_exact_mut(256));
            for ((x, codes), scale) in blocks.zip(part.scales.as_chunks_mut::<4>().0) {
                let (absmax, divisor) = divisor(x);
                *scale = absmax.to_le_bytes();
                for (x, code) in x.iter().zip(codes) {
                    *code = map.code(x / divisor);
                }
            }
        }
        StateFormat::Int4 => {
            if moment == Moment::Square {
                x.iter_mut().for_each(|x| *x = x.sqrt());
            }
            let blocks = x.chunks_exact(128).zip(part.codes.chunks_exact_mut(64));
            let map = if moment == Moment::Mean { &*SIGNED4 } else { &*ROOT4 };
            for (b, ((x, codes), scale)) in blocks.zip(part.scales.as_chunks_mut::<4>().0).enumerate() {
                let (absmax, divisor) = divisor(x);
                *scale = absmax.to_le_bytes();
                let eights = x.as_chunks::<8>().0.iter().zip(codes.as_chunks_mut::<4>().0);
                for (e, (x, bytes)) in eights.enumerate() {
                    let random = draws.eight(moment, 128 * b + 8 * e);
                    let code = |i: usize| between(map, x[i] / divisor, random[i]);
                    *bytes = std::array::from_fn(|i| code(2 * i) | code(2 * i + 1) << 4);
                }
            }
        }
        StateFormat::Nvfp4 => pack_nvfp4(moment, x, part, draws),
    }
}

#[inline(always)]
fn pack_nvfp4(moment: Moment, x: &mut [f32], part: &mut Part<'_>, draws: &Draws) {
    if moment == Moment::Square {
        x.iter_mut().for_each(|x| *x = x.sqrt());
    }
    let second = largest(x) / RANGE;
    if let Some(bytes) = part.second.first_chunk_mut() {
        *bytes = second.to_le_bytes();
    }
    let blocks = x.chunks_exact(16).zip(part.codes.chunks_exact_mut(8));
    for (b, ((x, codes), scale)) in blocks.zip(part.scales.iter_mut()).enumerate() {
        let absmax = largest(x);
        if absmax == 0.0 || second == 0.0 {
            *scale = 0;
            codes.fill(0);
            continue;
        }
        // Rounded up, so that the largest of a block is no more than six steps and none is cut down time and
        // again.
        let want = absmax / 6.0 / second;
        *scale = e4m3::encode(want);
        *scale += u8::from(e4m3::decode(*scale) < want && *scale < 0x7e);
        let factor = e4m3::decode(*scale) * second;
        if factor == 0.0 {
            codes.fill(0);
            continue;
        }
        for (e, (x, bytes)) in x.as_chunks::<8>().0.iter().zip(codes.as_chunks_mut::<4>().0).enumerate() {
            let random = draws.eight(moment, 16 * b + 8 * e);
            let code = |i: usize| {
                let y = x[i] / factor;
                match moment {
                    Moment::Mean => between(&E2M1, y.abs(), random[i]) | (y.to_bits() >> 28) as u8 & 8,
                    Moment::Square => between(&ROOTS, y, random[i]),
                }
            };
            *bytes = std::array::from_fn(|i| code(2 * i) | code(2 * i + 1) << 4);
        }
    }
}

/// Largest magnitude, and what to divide by: that, or 1 for a block of zeros.
#[inline(always)]
fn divisor(x: &[f32]) -> (f32, f32) {
    let absmax = largest(x);
    (absmax, if absmax == 0.0 { 1.0 } else { absmax })
}

#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0f32, |a, x| if x.abs() > a { x.abs() } else { a })
}
