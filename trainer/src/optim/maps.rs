//! Code books of the 8-bit and 4-bit moments, computed once, and rounding to them.
use q4_core::formats::nf4;
use std::sync::LazyLock;

/// A sorted code book and the midpoints between its entries: `code(x)` counts the midpoints below x.
#[derive(Debug)]
pub(super) struct Map<const N: usize> {
    pub values: [f32; N],
    /// `N - 1` midpoints, then infinity.
    pub bounds: [f32; N],
}

/// Magnitudes of E2M1, for a mean.
pub(super) const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// The same for the root of v: nothing is zero.
pub(super) const ROOTS: [f32; 8] = [0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// bitsandbytes' signed dynamic map.
pub(super) static SIGNED8: LazyLock<Map<256>> = LazyLock::new(|| Map::new(*nf4::dynamic_map()));
/// bitsandbytes' unsigned dynamic map, its zero replaced by a quarter of the smallest step.
pub(super) static UNSIGNED8: LazyLock<Map<256>> = LazyLock::new(|| {
    let mut values = [0f32; 256];
    for (slot, v) in values.iter_mut().zip(dynamic(7, false)) {
        *slot = v;
    }
    values[0] = values[1] / 4.0;
    Map::new(values)
});
/// The signed dynamic map of 4 bits with 3 exponents.
pub(super) static SIGNED4: LazyLock<[f32; 16]> = LazyLock::new(|| {
    let mut values = [0f32; 16];
    for (slot, v) in values.iter_mut().zip(dynamic(3, true)) {
        *slot = v;
    }
    values
});

/// Sixteen values from 2^-6 to 1 in equal ratios, for the root of v: what divides an update needs relative
/// precision, and has no zero.
pub(super) static ROOT4: LazyLock<[f32; 16]> =
    LazyLock::new(|| std::array::from_fn(|i| 2f64.powf(0.4 * (i as f64 - 15.0)) as f32));

/// Code of the value below or above `y`, with the probability that makes the mean exact: `y` is compared with
/// a random place between the two. Sixteen values of a moment are too few to round to the nearest: a mean
/// that changes by less than half a step would never change at all. Beyond the ends it is the end.
#[inline(always)]
pub(super) fn between<const N: usize>(values: &[f32; N], y: f32, random: u16) -> u8 {
    let low = (1..N - 1).map(|i| usize::from(y >= values[i])).sum::<usize>();
    let (a, b) = (values[low], values[low + 1]);
    let share = (f32::from(random) + 0.5) * (1.0 / 65536.0);
    low as u8 + u8::from(y > a + share * (b - a))
}

impl<const N: usize> Map<N> {
    fn new(values: [f32; N]) -> Self {
        let mut bounds = [f32::INFINITY; N];
        for i in 0..N - 1 {
            bounds[i] = ((f64::from(values[i]) + f64::from(values[i + 1])) / 2.0) as f32;
        }
        Self { values, bounds }
    }

    /// Code of the nearest value, the lower one on a tie. `N` is a power of two.
    #[inline(always)]
    pub fn code(&self, x: f32) -> u8 {
        let mut code = 0;
        let mut step = N / 2;
        while step > 0 {
            // Never reads the infinite bound: code + step <= N - 1.
            code += if x > self.bounds[(code + step - 1) & (N - 1)] { step } else { 0 };
            step /= 2;
        }
        code as u8
    }
}

/// Dynamic map of `exponents + 1` bits (Dettmers et al., arXiv 2110.02861): for every power of ten, twice as
/// many evenly spaced means as for the one below, plus 0 and 1.
fn dynamic(exponents: i32, signed: bool) -> Vec<f32> {
    let mut values = vec![0.0, 1.0];
    for i in 0..exponents {
        let count = 1usize << if signed { i } else { i + 1 };
        for j in 0..count {
            let mean = 0.1 + 0.9 * (j as f64 + 0.5) / count as f64;
            let value = mean * 10f64.powi(i + 1 - exponents);
            values.push(value as f32);
            if signed {
                values.push(-value as f32);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_have_the_published_values() {
        assert_eq!(dynamic(7, true).len(), 256);
        assert_eq!(dynamic(7, false).len(), 256);
        for (ours, published) in dynamic(7, true).iter().zip(nf4::dynamic_map()) {
            assert!((ours - published).abs() <= 1e-6 * published.abs(), "{ours} {published}");
        }
        // 0.1 to 1 in halves: 0.325 and 0.775 of 10^-6.
        assert!((UNSIGNED8.values[1] - 3.25e-7).abs() < 1e-12 && UNSIGNED8.values[255] == 1.0);
        let four = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0];
        for (a, b) in SIGNED4[8..].iter().zip(four) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
        assert_eq!(SIGNED4[7], 0.0);
    }

    #[test]
    fn codes_are_the_nearest_values() {
        fn check<const N: usize>(map: &Map<N>) {
            for i in 0..=40_000 {
                let x = i as f32 / 20_000.0 - 1.0;
                let x = x * x * x;
                let code = usize::from(map.code(x));
                let error = |c: usize| (f64::from(map.values[c]) - f64::from(x)).abs();
                let best = (0..N).map(error).fold(f64::INFINITY, f64::min);
                assert!(error(code) <= best + 1e-9, "{x}: {code}");
            }
            for (code, value) in map.values.iter().enumerate() {
                assert_eq!(usize::from(map.code(*value)), code);
            }
        }
        check(&*SIGNED8);
        check(&*UNSIGNED8);
        assert_eq!((ROOT4[0], ROOT4[15]), (1.0 / 64.0, 1.0));
    }

    #[test]
    fn random_codes_are_neighbours_and_right_in_the_mean() {
        fn check<const N: usize>(values: &[f32; N]) {
            for (code, value) in values.iter().enumerate() {
                for random in [0, 1, 40_000, u16::MAX] {
                    assert_eq!(usize::from(between(values, *value, random)), code, "{value}");
                }
            }
            for i in 0..=200 {
                let y = values[0] + (values[N - 1] - values[0]) * i as f32 / 200.0;
                let low = values.iter().rposition(|v| *v <= y).unwrap_or(0).min(N - 2);
                let codes: Vec<u8> = (0..=u16::MAX).step_by(7).map(|r| between(values, y, r)).collect();
                assert!(codes.iter().all(|c| usize::from(*c) == low || usize::from(*c) == low + 1));
                let sum: f64 = codes.iter().map(|c| f64::from(values[usize::from(*c)])).sum();
                let step = f64::from(values[low + 1] - values[low]);
                assert!((sum / codes.len() as f64 - f64::from(y)).abs() < 2e-4 * step, "{y}");
            }
            for random in [0, u16::MAX] {
                assert_eq!(between(values, values[0] - 1.0, random), 0);
                assert_eq!(usize::from(between(values, values[N - 1] + 1.0, random)), N - 1);
            }
        }
        check(&SIGNED4);
        check(&ROOT4);
        check(&E2M1);
        check(&ROOTS);
    }
}
