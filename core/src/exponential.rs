//! `e^x` and what is made of it in f32, for loops that a compiler vectorises: the same bits wherever they are
//! computed.
/// Fused where the enclosing copy has the instruction: without it `mul_add` is a library call.
#[inline(always)]
pub fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `e^x` within 2 units in the last place; 0 below -87, infinity above 88.7, NaN kept.
/// Cody-Waite reduction by ln 2 in two parts, then a degree-6 Taylor polynomial on [-ln2/2, ln2/2].
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds, and leaves the integer in the low bits
    let clamped = x.clamp(-87.3, 88.8);
    let shifted = fma::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, 2.121_944_4e-4, fma::<FMA>(n, -0.693_359_4, clamped));
    let factorials = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let p = factorials.into_iter().fold(1.0 / 5040.0, |p, f| fma::<FMA>(p, r, f));
    // 2^n in two factors, so that n = 128 does not overflow the exponent field. No conversion of a float: a
    // cast that saturates keeps a compiler from using vectors.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    let value = p * power(half) * power(n.wrapping_sub(half));
    // NaN passes through the clamp and every product above.
    if x < -87.3 { 0.0 } else { value }
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub fn silu<const FMA: bool>(x: f32) -> f32 {
    x / (1.0 + exp::<FMA>(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        let mut worst = 0f64;
        for i in -87_000..88_700 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp();
            for got in [exp::<false>(x), exp::<true>(x)] {
                worst = worst.max((f64::from(got) - exact).abs() / exact);
            }
        }
        assert!(worst < 2.5 * f64::from(f32::EPSILON), "{worst:e}");
        for exp in [exp::<false>, exp::<true>] {
            assert_eq!(exp(-200.0), 0.0);
            assert_eq!(exp(f32::NEG_INFINITY), 0.0);
            assert!(exp(f32::NAN).is_nan());
            assert_eq!(exp(0.0), 1.0);
        }
    }

    #[test]
    fn silu_has_its_limits() {
        for silu in [silu::<false>, silu::<true>] {
            assert_eq!((silu(0.0), silu(100.0), silu(-100.0)), (0.0, 100.0, 0.0));
            assert!((f64::from(silu(1.0)) - 1.0 / (1.0 + (-1f64).exp())).abs() < 1e-7);
            assert!(silu(f32::NAN).is_nan());
        }
    }
}
