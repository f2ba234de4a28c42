//! Moments of one tile, packed and unpacked. The CUDA kernel does the same operations on the same bytes.
use super::layout::StateFormat;
use super::maps::{ROOT4, SIGNED4, SIGNED8, UNSIGNED8};
use q4_core::formats::{e2m1, e4m3};

/// Largest E2M1 value times largest E4M3 value.
const RANGE: f32 = 2688.0;
/// Magnitude of an E2M1 code of sqrt(v): as E2M1, but nothing is zero.
const ROOTS: [f32; 8] = [0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

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
                        Moment::Mean => SIGNED4.values[usize::from(code)] * absmax,
                        Moment::Square => {
                            let root = ROOT4.values[usize::from(code)] * absmax;
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

/// The reverse of [`unpack`]; `x` may be overwritten.
#[inline(always)]
pub(super) fn pack(format: StateFormat, moment: Moment, x: &mut [f32], part: &mut Part<'_>) {
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
            for ((x, codes), scale) in blocks.zip(part.scales.as_chunks_mut::<4>().0) {
                let (absmax, divisor) = divisor(x);
                *scale = absmax.to_le_bytes();
                let code = |x: f32| match moment {
                    Moment::Mean => SIGNED4.code(x / divisor),
                    Moment::Square => ROOT4.code(x / divisor),
                };
                for (x, byte) in x.as_chunks::<2>().0.iter().zip(codes) {
                    *byte = code(x[0]) | code(x[1]) << 4;
                }
            }
        }
        StateFormat::Nvfp4 => pack_nvfp4(moment, x, part),
    }
}

#[inline(always)]
fn pack_nvfp4(moment: Moment, x: &mut [f32], part: &mut Part<'_>) {
    if moment == Moment::Square {
        x.iter_mut().for_each(|x| *x = x.sqrt());
    }
    let second = largest(x) / RANGE;
    if let Some(bytes) = part.second.first_chunk_mut() {
        *bytes = second.to_le_bytes();
    }
    let blocks = x.chunks_exact(16).zip(part.codes.chunks_exact_mut(8));
    for ((x, codes), scale) in blocks.zip(part.scales.iter_mut()) {
        let absmax = largest(x);
        if absmax == 0.0 || second == 0.0 {
            *scale = 0;
            codes.fill(0);
            continue;
        }
        // A mean may vanish beside one 200,000 times larger; a mean square may not.
        let least = u8::from(moment == Moment::Square);
        *scale = e4m3::encode(absmax / 6.0 / second).max(least);
        let factor = e4m3::decode(*scale) * second;
        if factor == 0.0 {
            codes.fill(0);
            continue;
        }
        for (x, byte) in x.as_chunks::<2>().0.iter().zip(codes) {
            *byte = match moment {
                Moment::Mean => e2m1::pair(e2m1::encode(x[0] / factor), e2m1::encode(x[1] / factor)),
                Moment::Square => e2m1::pair(root_code(x[0] / factor), root_code(x[1] / factor)),
            };
        }
    }
}

/// Code of the nearest of [`ROOTS`]: E2M1, but the first boundary lies between 0.25 and 0.5.
#[inline(always)]
fn root_code(y: f32) -> u8 {
    if y <= 0.375 { 0 } else { e2m1::encode(y).max(1) }
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
