//! Random numbers without a state: Philox4x32-10 (Salmon et al., SC'11), a function of (seed, step, stream,
//! index).
//!
//! Nothing but the step has to be saved to go on with the same numbers, and no number depends on the order or
//! the thread in which others were drawn.

/// Streams that belong to no tensor; tensors count up from zero.
pub mod streams {
    /// Order of the data; the step is the epoch.
    pub const ORDER: u32 = u32::MAX;
    /// Sampling of answers.
    pub const SAMPLE: u32 = u32::MAX - 1;
    /// Initial values of tensor `t` are drawn from `INIT ^ t`.
    pub const INIT: u32 = 0x8000_0000;
    /// Anything else a caller numbers itself.
    pub const FREE: u32 = 0x4000_0000;
}

/// The generator of one (seed, step, stream).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    key: [u32; 2],
    /// Words 1 to 3 of the counter; word 0 is the block.
    counter: [u32; 3],
    /// Block that counts as the first.
    first: u32,
}

impl Philox {
    /// `stream` is the number of a tensor, or one of [`streams`].
    pub const fn new(seed: u64, step: u64, stream: u32) -> Self {
        let counter = [stream, step as u32, (step >> 32) as u32];
        Self { key: [seed as u32, (seed >> 32) as u32], counter, first: 0 }
    }

    /// The same numbers, counted from those of element `element` on, a multiple of 8: what a part of a tensor
    /// draws that begins there, eight elements a block.
    pub const fn from_element(self, element: usize) -> Self {
        Self { first: self.first.wrapping_add((element / 8) as u32), ..self }
    }

    /// Four words: numbers `4 block` to `4 block + 3`.
    #[inline]
    pub fn block(&self, block: u32) -> [u32; 4] {
        let [a, b, c] = self.counter;
        rounds([block.wrapping_add(self.first), a, b, c], self.key)
    }

    /// Number `index`, below 2^34.
    #[inline]
    pub fn word(&self, index: u64) -> u32 {
        self.block((index >> 2) as u32)[(index & 3) as usize]
    }

    /// Sixteen bits per `index`, below 2^35: the low half of a word for even indices, the high half for odd
    /// ones.
    #[inline]
    pub fn half(&self, index: u64) -> u16 {
        (self.word(index >> 1) >> (16 * (index & 1))) as u16
    }

    /// Key, counter and first block, for the kernels that draw the same numbers on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn parts(&self) -> ([u32; 2], [u32; 3], u32) {
        (self.key, self.counter, self.first)
    }

    /// A uniform number below `n`, from number `index`; the bias is below `n / 2^32`.
    pub fn below(&self, index: u64, n: u32) -> u32 {
        ((u64::from(self.word(index)) * u64::from(n)) >> 32) as u32
    }

    /// A standard normal number (Box-Muller on words `2 index` and `2 index + 1`).
    pub fn normal(&self, index: u64) -> f32 {
        let block = self.block((index >> 1) as u32);
        let at = 2 * (index & 1) as usize;
        // (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * ((f64::from(block[at]) + 1.0) / 4_294_967_296.0).ln()).sqrt();
        let angle = std::f64::consts::TAU * f64::from(block[at + 1]) / 4_294_967_296.0;
        (radius * angle.cos()) as f32
    }

    /// A permutation of `0..n` (Fisher-Yates).
    pub fn permutation(&self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i as u64, i as u32 + 1) as usize);
        }
        order
    }
}

/// f32 to bf16 bits, up or down with the probability that makes the mean exact: `(bits + random16) >> 16`.
#[inline]
pub fn stochastic_bf16(x: f32, random: u16) -> u16 {
    (x.to_bits().wrapping_add(u32::from(random)) >> 16) as u16
}

#[inline]
fn rounds(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p = u64::from(c[0]) * 0xd251_1f53;
        let q = u64::from(c[2]) * 0xcd9e_8d57;
        c = [(q >> 32) as u32 ^ c[1] ^ k[0], q as u32, (p >> 32) as u32 ^ c[3] ^ k[1], p as u32];
        k = [k[0].wrapping_add(0x9e37_79b9), k[1].wrapping_add(0xbb67_ae85)];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with Random123.
    #[test]
    fn known_answers() {
        assert_eq!(rounds([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            rounds([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            rounds([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn every_coordinate_matters() {
        let words = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1 << 32, 2, 3), (1, 2 << 32, 3)]
            .map(|(seed, step, stream)| Philox::new(seed, step, stream).word(5));
        for (i, w) in words.iter().enumerate() {
            assert!(!words[..i].contains(w), "{words:x?}");
        }
    }

    #[test]
    fn a_permutation_is_one_and_normals_are_normal() {
        let r = Philox::new(7, 0, streams::ORDER);
        let order = r.permutation(1000);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.iter().enumerate().all(|(i, &x)| i as u32 == x));
        assert_ne!(order, Philox::new(7, 1, streams::ORDER).permutation(1000));
        let n = 100_000;
        let (mut mean, mut square) = (0f64, 0f64);
        for i in 0..n {
            let x = f64::from(r.normal(i));
            mean += x / n as f64;
            square += x * x / n as f64;
        }
        // Five standard deviations of a mean and of a variance of that many draws.
        assert!(mean.abs() < 5.0 / (n as f64).sqrt() && (square - 1.0).abs() < 5.0 * (2.0 / n as f64).sqrt());
    }

    #[test]
    fn stochastic_rounding_is_adjacent_and_unbiased() {
        let draws = 100_000u64;
        for (t, x) in [0.1f32, -3.3e-5, 1.999_999, 0.02, -7.7].into_iter().enumerate() {
            let r = Philox::new(1, 1, t as u32);
            let low = f32::from_bits(x.to_bits() & 0xffff_0000);
            let high = f32::from_bits((x.to_bits() & 0xffff_0000).wrapping_add(0x1_0000));
            let mut mean = 0f64;
            for i in 0..draws {
                let y = f32::from_bits(u32::from(stochastic_bf16(x, r.half(i))) << 16);
                assert!(y == low || y == high, "{x} became {y}");
                mean += f64::from(y) / draws as f64;
            }
            let p = f64::from((x - low) / (high - low));
            let deviation = f64::from((high - low).abs()) * (p * (1.0 - p) / draws as f64).sqrt();
            assert!((mean - f64::from(x)).abs() <= 5.0 * deviation, "{x}: mean {mean}");
        }
        for exact in [0.0f32, -0.0, 1.0, f32::INFINITY] {
            assert_eq!(u32::from(stochastic_bf16(exact, 0xffff)) << 16, exact.to_bits());
        }
    }
}
