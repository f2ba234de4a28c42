//! E8M0, the scale of the MX formats: a power of two and nothing else (OCP Microscaling Formats 1.0, 5.4.1).

/// The byte that is NaN; there is no zero and no infinity.
pub const NAN: u8 = 0xff;

/// `2^(byte - 127)`: exact in f32, of which byte 0 is a subnormal.
#[inline]
pub const fn decode(byte: u8) -> f32 {
    f32::from_bits(match byte {
        0 => 0x0040_0000,
        NAN => 0x7fc0_0000,
        _ => (byte as u32) << 23,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_its_power_of_two() {
        for byte in 0..NAN {
            assert_eq!(f64::from(decode(byte)), 2f64.powi(i32::from(byte) - 127), "{byte}");
        }
        assert!(decode(NAN).is_nan());
    }
}
