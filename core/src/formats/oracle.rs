//! Brute force that the encoders are tested against: the nearest table entry by exact distance, over whole
//! bit ranges.
use half::{bf16, f16};

/// Which of two equally near entries wins.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Tie {
    /// The one with the even index.
    Even,
    /// The lower one.
    Down,
    /// The upper one.
    Up,
}

/// Index of the entry of the ascending `table` nearest to `x`. The f64 distance of two f32 is exact or, where
/// they are more than 2^29 apart in size, far from any tie.
pub(super) fn nearest(table: &[f32], x: f32, tie: Tie) -> u8 {
    let distance = |i: usize| (f64::from(table[i]) - f64::from(x)).abs();
    if x >= table[table.len() - 1] {
        return (table.len() - 1) as u8;
    }
    let mut best = 0;
    for i in 1..table.len() {
        let wins = match tie {
            Tie::Even => i % 2 == 0,
            Tie::Down => false,
            Tie::Up => true,
        };
        let (new, old) = (distance(i), distance(best));
        if new < old || (new == old && wins) {
            best = i;
        }
    }
    best as u8
}

/// Every bf16 and every f16 bit pattern that is not NaN.
pub(super) fn for_every_half(check: impl Fn(f32)) {
    for bits in 0..=u16::MAX {
        for x in [bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32()] {
            if !x.is_nan() {
                check(x);
            }
        }
    }
}

/// Non-NaN f32 patterns a prime stride apart, so that all exponents and mantissa tails occur.
pub(super) fn for_strided_f32(check: impl Fn(f32)) {
    for bits in (0..=u32::MAX).step_by(7919) {
        let x = f32::from_bits(bits);
        if !x.is_nan() {
            check(x);
        }
    }
}
