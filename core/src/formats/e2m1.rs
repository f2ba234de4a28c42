//! E2M1, the 4-bit float of NVFP4: bit 3 is the sign, bits 2..1 the exponent (bias 1), bit 0 the mantissa.
//!
//! The table is the definition; both encoders are threshold counts because the spacing of the values changes
//! twice.

/// Value of every code. Code 8 is -0.0; there is no infinity and no NaN.
pub const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Twice the value of every code: the integers that exact block products are made of.
pub const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Value of the low four bits of `code`.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[usize::from(code & 15)]
}

/// Nearest code, ties to the even code, saturating at 6; keeps the sign of zero and of what rounds to zero
/// (code 8). As `cvt.rn.satfinite.e2m1x2`. NaN has no code: callers refuse it first, here it becomes a zero.
#[inline]
pub fn encode(y: f32) -> u8 {
    let a = y.abs();
    // A boundary belongs to its even neighbour: below it for 0.25, 1.25, 2.5 and 5, above it for the others.
    let magnitude = u8::from(a > 0.25)
        + u8::from(a >= 0.75)
        + u8::from(a > 1.25)
        + u8::from(a >= 1.75)
        + u8::from(a > 2.5)
        + u8::from(a >= 3.5)
        + u8::from(a > 5.0);
    magnitude | ((y.to_bits() >> 28) as u8 & 8)
}

/// Nearest code, ties away from zero, saturating at 6; the sign bit is set iff `y < 0`, so -0.0 becomes 0.
/// The rule of `.dat` run times. NaN becomes 0, as in [`encode`].
#[inline]
pub fn encode_ties_away(y: f32) -> u8 {
    let a = y.abs();
    let magnitude = u8::from(a >= 0.25)
        + u8::from(a >= 0.75)
        + u8::from(a >= 1.25)
        + u8::from(a >= 1.75)
        + u8::from(a >= 2.5)
        + u8::from(a >= 3.5)
        + u8::from(a >= 5.0);
    magnitude | (u8::from(y < 0.0) << 3)
}

/// One packed NVFP4 byte: element `2j` in the low nibble, element `2j + 1` in the high one.
#[inline]
pub fn pair(lo: u8, hi: u8) -> u8 {
    (lo & 15) | (hi << 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::oracle::{self, Tie};

    const BOUNDARIES: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];

    #[test]
    fn the_table_follows_from_the_bits() {
        for code in 0u8..16 {
            let (e, m) = (i32::from(code >> 1 & 3), f32::from(code & 1));
            let magnitude = if e == 0 { m * 0.5 } else { (1.0 + m * 0.5) * 2f32.powi(e - 1) };
            let value = if code & 8 == 0 { magnitude } else { -magnitude };
            assert_eq!(decode(code).to_bits(), value.to_bits(), "code {code}");
            assert_eq!(f32::from(DOUBLED[usize::from(code)]), 2.0 * value);
        }
        for byte in 0..=255u8 {
            assert_eq!(decode(byte).to_bits(), decode(byte & 15).to_bits());
            assert_eq!(pair(byte & 15, byte >> 4), byte);
            assert_eq!(pair(byte, 0), byte & 15, "bits above the nibble must not leak into the neighbour");
        }
    }

    fn check(y: f32) {
        let even = oracle::nearest(&VALUES[..8], y.abs(), Tie::Even);
        let away = oracle::nearest(&VALUES[..8], y.abs(), Tie::Up);
        let sign = if y.is_sign_negative() { 8 } else { 0 };
        assert_eq!(encode(y), even | sign, "{y:e} ({:#010x})", y.to_bits());
        assert_eq!(
            encode_ties_away(y),
            away | if y == 0.0 { 0 } else { sign },
            "{y:e} ({:#010x})",
            y.to_bits()
        );
    }

    #[test]
    fn encoders_find_the_nearest_value() {
        oracle::for_every_half(check);
        oracle::for_strided_f32(check);
        for b in BOUNDARIES.into_iter().chain(VALUES[..8].iter().copied()) {
            for y in [b.next_down(), b, b.next_up()] {
                check(y);
                check(-y);
            }
        }
    }

    #[test]
    fn ties_go_where_the_rule_says() {
        assert_eq!(BOUNDARIES.map(encode), [0, 2, 2, 4, 4, 6, 6]);
        assert_eq!(BOUNDARIES.map(|b| encode(-b)), [8, 10, 10, 12, 12, 14, 14]);
        assert_eq!(BOUNDARIES.map(encode_ties_away), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(BOUNDARIES.map(|b| encode_ties_away(-b)), [9, 10, 11, 12, 13, 14, 15]);
    }

    #[test]
    fn the_sign_of_zero_is_kept_by_one_encoder_only() {
        assert_eq!((encode(-0.0), encode(-1e-30), encode(0.0)), (8, 8, 0));
        assert_eq!((encode_ties_away(-0.0), encode_ties_away(-1e-30), encode_ties_away(0.0)), (0, 8, 0));
    }

    #[test]
    fn infinity_saturates() {
        assert_eq!((encode(f32::INFINITY), encode(f32::NEG_INFINITY)), (7, 15));
        assert_eq!((encode_ties_away(f32::MAX), encode_ties_away(f32::MIN)), (7, 15));
    }
}
