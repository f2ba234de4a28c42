//! Codes of NF4, and the quantisation of their scales.
use crate::{Code, Error, Result};
use std::sync::LazyLock;

/// Value of every code, times absmax: the f32 that bitsandbytes writes as `quant_map`, in their shortest
/// decimals.
pub const CODEBOOK: [f32; 16] = [
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
];

/// Boundaries between neighbouring codes: their f32 midpoints. A value on a boundary belongs to the lower
/// code.
pub const THRESHOLDS: [f32; 15] = thresholds();

/// Code of zero, and of every element of a block that is all zero.
pub const ZERO: u8 = 7;

/// Absmax per nested absmax, as [`nest`] writes them.
pub const NESTED_BLOCK: usize = 256;

/// Codebook entry of the low four bits of `code`.
#[inline]
pub fn decode(code: u8) -> f32 {
    CODEBOOK[usize::from(code & 15)]
}

/// What both codes of a byte stand for, the one in the low half first and the one in the high half first.
pub(super) static PAIRS: [[[f32; 2]; 256]; 2] = pairs();

const fn pairs() -> [[[f32; 2]; 256]; 2] {
    let mut all = [[[0.0; 2]; 256]; 2];
    let mut byte = 0;
    while byte < 256 {
        let (low, high) = (CODEBOOK[byte & 15], CODEBOOK[byte >> 4]);
        all[0][byte] = [low, high];
        all[1][byte] = [high, low];
        byte += 1;
    }
    all
}

/// Nearest code of `v`, an element divided by its absmax; a tie goes to the lower code. NaN has no code and
/// gives 0.
#[inline]
pub fn encode(v: f32) -> u8 {
    THRESHOLDS.iter().map(|&t| u8::from(v > t)).sum()
}

/// Code of element `i` of a tensor packed high nibble first.
#[inline]
pub fn nibble(codes: &[u8], i: usize) -> u8 {
    codes[i / 2] >> (4 - 4 * (i % 2)) & 15
}

/// Quantises a flattened tensor: `codes` takes `ceil(x.len() / 2)` bytes, high nibble first (the low nibble
/// of an odd last byte is the code of zero), `absmax` one f32 per `block` elements.
///
/// In f32, as bitsandbytes on a CPU: `code = encode(x * (1 / absmax))` in full blocks and `encode(x /
/// absmax)` in a short last one; an all-zero block has absmax 0 and code 7. An absmax below 2^-128 has no
/// finite reciprocal and divides too.
///
/// # Errors
/// `ShapeMismatch` if the lengths do not fit together, `ValueInvalid` if an element is NaN or infinite.
pub fn quantize(x: &[f32], block: usize, codes: &mut [u8], absmax: &mut [f32]) -> Result<()> {
    if block == 0 || codes.len() != x.len().div_ceil(2) || absmax.len() != x.len().div_ceil(block) {
        return Err(Error::new(Code::ShapeMismatch, "NF4 tensor")
            .need(format!(
                "for {} elements: half as many bytes of codes, one absmax per block of {block}",
                x.len()
            ))
            .have(format!("{} bytes, {} absmax", codes.len(), absmax.len())));
    }
    if let Some(i) = x.iter().position(|v| !v.is_finite()) {
        return Err(crate::formats::nvfp4::not_finite(i, x[i]));
    }
    codes.fill(0);
    if x.len() % 2 == 1 {
        codes[x.len() / 2] = ZERO;
    }
    for (b, (values, absmax)) in x.chunks(block).zip(absmax).enumerate() {
        *absmax = values.iter().fold(0f32, |a, v| a.max(v.abs()));
        let inverse = 1.0 / *absmax;
        let divide = values.len() < block || inverse.is_infinite();
        for (i, &v) in (b * block..).zip(values) {
            let code = if *absmax == 0.0 {
                ZERO
            } else if divide {
                encode(v / *absmax)
            } else {
                encode(v * inverse)
            };
            codes[i / 2] |= code << (4 - 4 * (i % 2));
        }
    }
    Ok(())
}

/// `out[i] = codebook[code i] * absmax(i / block)`, rounded once to f32; codes are packed high nibble first.
///
/// # Panics
/// If `codes` is shorter than `ceil(out.len() / 2)` bytes.
pub fn dequantize(codes: &[u8], absmax: impl Fn(usize) -> f32, block: usize, out: &mut [f32]) {
    for (b, values) in out.chunks_mut(block).enumerate() {
        let scale = absmax(b);
        for (i, v) in (b * block..).zip(values) {
            *v = decode(nibble(codes, i)) * scale;
        }
    }
}

/// The absmax of a double-quantised tensor.
#[derive(Clone, Copy, Debug)]
pub struct Nested<'a> {
    /// One 8-bit code per absmax.
    pub codes: &'a [u8],
    /// Value of every code, 256 of them; files carry their own, usually [`dynamic_map`].
    pub map: &'a [f32],
    /// One scale per `block` codes.
    pub absmax: &'a [f32],
    /// Mean that was subtracted before the second quantisation.
    pub offset: f32,
    /// Codes per scale, 256 in bitsandbytes.
    pub block: usize,
}

impl Nested<'_> {
    /// Absmax `i`: `map[code] * absmax[i / block] + offset`, rounded to f32 after each operation.
    #[inline]
    pub fn absmax_at(&self, i: usize) -> f32 {
        self.map[usize::from(self.codes[i])] * self.absmax[i / self.block] + self.offset
    }
}

/// Quantises finite `absmax` a second time: codes into [`dynamic_map`], a scale per [`NESTED_BLOCK`] of them,
/// and the mean that was subtracted. Codes are the nearest in the map, a tie to the lower; bitsandbytes looks
/// them up in a table of 65 536 bins on a CPU and may differ by one.
pub fn nest(absmax: &[f32]) -> (Vec<u8>, Vec<f32>, f32) {
    let mean = absmax.iter().map(|&v| f64::from(v)).sum::<f64>() / absmax.len().max(1) as f64;
    let offset = mean as f32;
    let mut codes = Vec::with_capacity(absmax.len());
    let mut scales = Vec::with_capacity(absmax.len().div_ceil(NESTED_BLOCK));
    for block in absmax.chunks(NESTED_BLOCK) {
        let scale = block.iter().fold(0f32, |a, v| a.max((v - offset).abs()));
        scales.push(scale);
        codes.extend(block.iter().map(|v| nearest(if scale == 0.0 { 0.0 } else { (v - offset) / scale })));
    }
    (codes, scales, offset)
}

/// The signed dynamic 8-bit map of bitsandbytes, ascending from -0.993 to 1: seven decades, each with twice
/// the points of the one below it, the points being midpoints of an even division of [0.1, 1].
pub fn dynamic_map() -> &'static [f32; 256] {
    static MAP: LazyLock<[f32; 256]> = LazyLock::new(build_dynamic_map);
    &MAP
}

fn build_dynamic_map() -> [f32; 256] {
    // 0 and 1 have no partner of the other sign.
    let mut map = [0.0; 256];
    map[255] = 1.0;
    let (mut below, mut above) = (127, 127);
    for decade in 0..7 {
        let points = 1usize << decade;
        let step = (1.0 - 0.1f32) / points as f32;
        // Divisions are counted from the nearer end, in one fused operation each: this fixes the last bit of
        // every entry.
        let division = |i: usize| {
            if i < points.div_ceil(2) {
                step.mul_add(i as f32, 0.1)
            } else {
                (-step).mul_add((points - i) as f32, 1.0)
            }
        };
        let unit = 10f64.powi(decade - 6) as f32;
        for i in 0..points {
            let value = unit * ((division(i) + division(i + 1)) / 2.0);
            (below, above) = (below - 1, above + 1);
            (map[below], map[above]) = (-value, value);
        }
    }
    map
}

fn nearest(v: f32) -> u8 {
    let map = dynamic_map();
    let above = map.partition_point(|&m| m < v).min(255);
    let below = above.saturating_sub(1);
    let nearer_below = f64::from(v) - f64::from(map[below]) <= f64::from(map[above]) - f64::from(v);
    (if nearer_below { below } else { above }) as u8
}

const fn thresholds() -> [f32; 15] {
    let mut t = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        t[i] = (CODEBOOK[i] + CODEBOOK[i + 1]) / 2.0;
        i += 1;
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::oracle::{self, Tie};

    #[test]
    fn thresholds_are_the_rounded_midpoints() {
        let bits = [
            0xbf591cd8, 0xbf1c5270, 0xbeeb8480, 0xbeadea76, 0xbe703cec, 0xbe0d38bc, 0xbd3a7871, 0x3d22faff,
            0x3df64862, 0x3e5067e0, 0x3e9582d4, 0x3ec753f9, 0x3f006d04, 0x3f248daf, 0x3f5c89da,
        ];
        assert_eq!(THRESHOLDS.map(f32::to_bits), bits);
        for (t, pair) in THRESHOLDS.iter().zip(CODEBOOK.windows(2)) {
            assert_eq!(*t, ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32);
        }
    }

    /// Nearest entry by exact distance, except where two entries have a midpoint that f32 cannot hold:
    /// between that midpoint and its rounding the format defines the code, not the distance.
    fn check(v: f32) {
        let got = encode(v);
        let near = if v < -1.0 { 0 } else { oracle::nearest(&CODEBOOK, v, Tie::Down) };
        if got != near {
            assert!(THRESHOLDS.contains(&v) && got.abs_diff(near) == 1, "{v:e}: {got}, nearest {near}");
        }
    }

    #[test]
    fn encode_finds_the_nearest_entry() {
        oracle::for_every_half(check);
        oracle::for_strided_f32(check);
        for t in THRESHOLDS {
            check(t.next_down());
            check(t);
            check(t.next_up());
        }
    }

    #[test]
    fn ties_go_to_the_lower_code() {
        for (code, t) in (0u8..).zip(THRESHOLDS) {
            assert_eq!([t.next_down(), t, t.next_up()].map(encode), [code, code, code + 1], "{t}");
        }
        for code in 0..16 {
            assert_eq!(encode(decode(code)), code);
        }
        for byte in 0..=255u8 {
            assert_eq!(decode(byte), decode(byte & 15));
        }
        assert_eq!((encode(-0.0), encode(f32::INFINITY), encode(f32::NEG_INFINITY)), (7, 15, 0));
    }

    #[test]
    fn the_first_element_is_the_high_nibble() {
        let mut x = [0.0; 32];
        (x[0], x[1]) = (1.0, -1.0);
        let (mut codes, mut absmax) = ([0; 16], [0.0]);
        quantize(&x, 32, &mut codes, &mut absmax).expect("finite");
        assert_eq!((codes[0], codes[1], absmax), (0xf0, 0x77, [1.0]));
        assert_eq!((nibble(&codes, 0), nibble(&codes, 1)), (15, 0));
        let mut out = [0.0; 2];
        dequantize(&[0xf0], |_| 2.0, 32, &mut out);
        assert_eq!(out, [2.0, -2.0]);
    }

    #[test]
    fn absmax_repeats_over_its_block_and_does_not_tile() {
        let mut out = [0.0; 6];
        dequantize(&[0xff; 3], |b| [1.0, 2.0, 4.0][b], 2, &mut out);
        assert_eq!(out, [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]);
    }

    #[test]
    fn blocks_are_flat_and_the_last_may_be_short_and_odd() {
        let x: Vec<f32> = (0..37).map(|i| (i as f32 - 18.0) * 0.37).collect();
        let (mut codes, mut absmax) = (vec![0xff; 19], vec![0.0; 2]);
        quantize(&x, 32, &mut codes, &mut absmax).expect("finite");
        assert_eq!(absmax, [x[0].abs(), x[36]]);
        assert_eq!((nibble(&codes, 0), nibble(&codes, 36), codes[18] & 15), (0, 15, ZERO));
        let mut out = vec![0.0; 37];
        dequantize(&codes, |b| absmax[b], 32, &mut out);
        for (i, (a, b)) in x.iter().zip(&out).enumerate() {
            assert!((a - b).abs() <= 0.152 * absmax[i / 32], "element {i}: {a} {b}");
        }
    }

    #[test]
    fn a_short_block_divides_and_a_full_one_multiplies() {
        // Found by search: dividing by the absmax and multiplying by its reciprocal fall on two sides of a
        // threshold.
        let (v, absmax) = (1..4000)
            .map(|i| 1.0 + i as f32 / 997.0)
            .flat_map(|a| THRESHOLDS.map(|t| ((t * a).next_up(), a)))
            .find(|&(v, a)| encode(v / a) != encode(v * (1.0 / a)))
            .expect("some pair of f32 must differ");
        let quantise = |x: &[f32]| {
            let (mut codes, mut m) = (vec![0; x.len().div_ceil(2)], [0.0]);
            quantize(x, 4, &mut codes, &mut m).expect("finite");
            nibble(&codes, 1)
        };
        assert_eq!(quantise(&[absmax, v, 0.0, 0.0]), encode(v * (1.0 / absmax)));
        assert_eq!(quantise(&[absmax, v, 0.0]), encode(v / absmax));
    }

    #[test]
    fn zero_and_subnormal_blocks() {
        let (mut codes, mut absmax) = ([0; 2], [1.0]);
        quantize(&[0.0, -0.0, 0.0, 0.0], 4, &mut codes, &mut absmax).expect("finite");
        assert_eq!((codes, absmax), ([0x77, 0x77], [0.0]));
        let tiny = f32::from_bits(12);
        quantize(&[tiny, -tiny, 0.0, f32::from_bits(6)], 4, &mut codes, &mut absmax).expect("finite");
        assert_eq!((codes, absmax), ([0xf0, 0x7c], [tiny]));
    }

    #[test]
    fn what_cannot_be_quantised_is_refused() {
        let (mut codes, mut absmax) = ([0; 2], [0.0]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let e = quantize(&[1.0, bad, 0.0, 0.0], 4, &mut codes, &mut absmax).expect_err("not finite");
            assert_eq!(e.code(), Code::ValueInvalid);
        }
        for (n, block, c, a) in [(4, 0, 2, 1), (4, 4, 1, 1), (4, 2, 2, 1), (3, 4, 1, 1)] {
            let e =
                quantize(&[1.0; 4][..n], block, &mut [0; 2][..c], &mut [0.0; 1][..a]).expect_err("lengths");
            assert_eq!(e.code(), Code::ShapeMismatch);
        }
    }

    #[test]
    fn the_dynamic_map_ascends_and_is_symmetric_but_for_one() {
        let map = dynamic_map();
        assert!(map.windows(2).all(|w| w[0] < w[1]));
        assert_eq!((map[127], map[255]), (0.0, 1.0));
        assert!((1..=127).all(|i| map[127 - i] == -map[127 + i]));
        assert_eq!((map[128], map[254]), (5.5000004e-7, 0.99296874));
        for (i, &m) in map.iter().enumerate() {
            assert_eq!(usize::from(nearest(m)), i);
        }
        assert_eq!((nearest(-2.0), nearest(2.0)), (0, 255));
    }

    #[test]
    fn nesting_keeps_every_absmax_within_half_a_gap_of_the_map() {
        let absmax: Vec<f32> = (0..600u32).map(|i| 0.05 + (i * 7919 % 601) as f32 / 6010.0).collect();
        let (codes, scales, offset) = nest(&absmax);
        assert_eq!((codes.len(), scales.len()), (600, 3));
        let nested =
            Nested { codes: &codes, map: dynamic_map(), absmax: &scales, offset, block: NESTED_BLOCK };
        for (i, &want) in absmax.iter().enumerate() {
            // The widest gap of the map is that of its last decade, 0.9 / 64.
            assert!((nested.absmax_at(i) - want).abs() <= scales[i / 256] * 0.00704, "absmax {i}");
        }
        assert_eq!(nest(&[0.25; 3]), (vec![127; 3], vec![0.0], 0.25));
        assert_eq!(nest(&[]), (vec![], vec![], 0.0));
    }
}
