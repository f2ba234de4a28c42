//! E4M3FN, the 8-bit float of NVFP4 block scales: exponent bias 7, 3 mantissa bits, no infinity.
//!
//! Scales are carried as these bytes end to end; nothing may read them as integers.

/// Largest finite value.
pub const MAX: f32 = 448.0;
/// Smallest normal value, 2^-6: the floor of torchao's scales.
pub const MIN_NORMAL: f32 = 0.015625;
/// Smallest positive value, 2^-9: the floor of ModelOpt's scales.
pub const MIN_POSITIVE: f32 = 0.001953125;

/// Value of every byte. Only 0x7F and 0xFF are NaN: the rest of the top exponent row is 256 to 448.
pub const TABLE: [f32; 256] = table();

/// Value of a byte.
#[inline]
pub fn decode(byte: u8) -> f32 {
    TABLE[usize::from(byte)]
}

/// Whether a byte is one of the two NaNs.
#[inline]
pub fn is_nan(byte: u8) -> bool {
    byte & 0x7f == 0x7f
}

/// Nearest byte, ties to the even mantissa, saturating at ±448 (infinities included); keeps the sign of zero.
/// NaN of either sign becomes 0x7F.
#[inline]
pub fn encode(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let a = x.abs();
    let magnitude = if a < MIN_NORMAL {
        // Subnormals are multiples of 2^-9 and the multiplication is exact; 8 of them are the smallest
        // normal, 0x08.
        (a * 512.0).round_ties_even() as u8
    } else {
        let bits = a.to_bits();
        // A carry out of the mantissa runs into the exponent, which is what rounding up to the next binade
        // means.
        let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
        (rounded - ((127 - 7) << 3)).min(0x7e) as u8
    };
    magnitude | ((x.to_bits() >> 24) as u8 & 0x80)
}

/// The value of the nearest byte: `decode(encode(x))` of what is no NaN, in plain arithmetic.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    // What is added to it is rounded to a multiple of 2^-9, ties to even.
    const ROUNDER: f32 = 12_582_912.0 / 512.0;
    let bits = x.abs().min(MAX).to_bits();
    let normal = f32::from_bits((bits + 0x7_ffff + (bits >> 20 & 1)) & !0xf_ffff);
    let small = (f32::from_bits(bits) + ROUNDER) - ROUNDER;
    let magnitude = if bits < MIN_NORMAL.to_bits() { small } else { normal };
    f32::from_bits(magnitude.to_bits() | x.to_bits() & 0x8000_0000)
}

const fn table() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte as u32 & 7);
        let magnitude = match (exponent, mantissa) {
            (0, m) => m as f32 * MIN_POSITIVE,
            (15, 7) => f32::NAN,
            (e, m) => f32::from_bits((e + 127 - 7) << 23 | m << 20),
        };
        values[byte] = if byte < 128 { magnitude } else { -magnitude };
        byte += 1;
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::oracle::{self, Tie};

    #[test]
    fn known_bytes() {
        for (byte, value) in [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x07, 0.013671875),
            (0x08, 0.015625),
            (0x0f, 0.029296875),
            (0x10, 0.03125),
            (0x38, 1.0),
            (0x40, 2.0),
            (0x77, 240.0),
            (0x78, 256.0),
            (0x7e, 448.0),
        ] {
            assert_eq!(decode(byte), value, "{byte:#04x}");
            assert_eq!(decode(byte | 0x80), -value, "{byte:#04x}");
        }
        assert_eq!(decode(0x80).to_bits(), (-0f32).to_bits());
    }

    #[test]
    fn the_top_exponent_row_is_finite_except_for_its_last_byte() {
        assert_eq!(
            [0x78, 0x79, 0x7a, 0x7b, 0x7c, 0x7d, 0x7e].map(decode),
            [256., 288., 320., 352., 384., 416., 448.]
        );
        for byte in 0..=255u8 {
            assert_eq!(decode(byte).is_nan(), byte == 0x7f || byte == 0xff, "{byte:#04x}");
            assert_eq!(is_nan(byte), byte == 0x7f || byte == 0xff, "{byte:#04x}");
        }
    }

    #[test]
    fn every_byte_is_the_float_its_bits_say_and_not_the_integer() {
        for byte in 0..=255u8 {
            if is_nan(byte) {
                continue;
            }
            let (e, m) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
            let magnitude = if e == 0 { m * 2f64.powi(-6) } else { (1.0 + m) * 2f64.powi(e - 7) };
            let value = if byte < 128 { magnitude } else { -magnitude };
            assert_eq!(f64::from(decode(byte)).to_bits(), value.to_bits(), "{byte:#04x}");
            assert_eq!(encode(decode(byte)), byte, "{byte:#04x}");
        }
        // Read as integers, the smallest sixteen scales would be 512 times too large.
        assert!((1..=16u8).all(|b| f32::from(b) == 512.0 * decode(b)));
    }

    fn check(x: f32) {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let want = oracle::nearest(&TABLE[..127], x.abs(), Tie::Even) | sign;
        assert_eq!(encode(x), want, "{x:e} ({:#010x})", x.to_bits());
        assert_eq!(round(x).to_bits(), decode(want).to_bits(), "{x:e} ({:#010x})", x.to_bits());
    }

    #[test]
    fn encode_finds_the_nearest_value() {
        oracle::for_every_half(check);
        oracle::for_strided_f32(check);
        for pair in TABLE[..127].windows(2) {
            let tie = (pair[0] + pair[1]) / 2.0;
            for x in [tie, pair[0], pair[1]].into_iter().flat_map(|v| [v.next_down(), v, v.next_up()]) {
                check(x);
                check(-x);
            }
        }
        for x in
            [448f32, 464.0, 480.0, 1e30, f32::MAX, f32::INFINITY].into_iter().flat_map(|v| [v.next_down(), v])
        {
            assert_eq!((encode(x), encode(-x)), (0x7e, 0xfe), "{x}");
        }
    }

    #[test]
    fn nan_stays_nan() {
        for bits in [0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0xffff_ffff] {
            assert_eq!(encode(f32::from_bits(bits)), 0x7f);
        }
    }
}
