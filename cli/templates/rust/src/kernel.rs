//! The arithmetic of {{name}}, apart from the interface: what you replace by your hardware's own. Keep the
//! three rules in the comments, and the suite will agree.

/// Elements along k that share a block scale.
pub const GROUP: usize = 16;
/// Rows of x that one call of [`Packed::row`] takes.
pub const TILE: usize = 8;

const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A weight as this backend keeps it. Any layout will do: pack it in `take` of lib.rs as your kernel wants
/// it.
pub struct Packed {
    pub n: usize,
    pub k: usize,
    /// `[n][k/2]`, the even element in the low nibble.
    pub codes: Vec<u8>,
    /// `[n][k/16]`, block scale and per-tensor scale in one.
    pub scales: Vec<f32>,
}

impl Packed {
    /// The 16 elements of a group in a row of W.
    ///
    /// Rule 1: a decoded weight is code * scale, rounded to f32, and dequantize must give exactly that.
    pub fn decode(&self, row: usize, group: usize) -> [f32; GROUP] {
        let codes = &self.codes[row * (self.k / 2) + group * (GROUP / 2)..][..GROUP / 2];
        let scale = self.scales[row * (self.k / GROUP) + group];
        std::array::from_fn(|i| E2M1[usize::from(codes[i / 2] >> (4 * (i % 2)) & 15)] * scale)
    }

    /// The dot products of a row of W and up to [`TILE`] rows of x.
    ///
    /// Rule 2: 16 sums side by side, added up at the end. One chain of k additions would be outside of the
    /// error bound, (k/16 + 32) * 2^-24 * sum |x w|; so would sums in f16 or bf16.
    ///
    /// Rule 3: what is computed for a row of x does not depend on how many rows there are.
    pub fn row(&self, row: usize, x: &[&[f32]]) -> [f32; TILE] {
        let mut lanes = [[0f32; GROUP]; TILE];
        for group in 0..self.k / GROUP {
            let values = self.decode(row, group);
            for (lanes, x) in lanes.iter_mut().zip(x) {
                for (i, (lane, x)) in lanes.iter_mut().zip(&x[group * GROUP..][..GROUP]).enumerate() {
                    *lane += x * values[i];
                }
            }
        }
        lanes.map(|mut lanes| {
            for half in [8, 4, 2, 1] {
                for i in 0..half {
                    lanes[i] += lanes[i + half];
                }
            }
            lanes[0]
        })
    }
}
