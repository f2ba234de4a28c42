//! How a weight lies in memory: rows, codes and blocks that go together.

/// Output rows that are interleaved.
pub(crate) const LANES: usize = 16;
/// Codes of one row in a 32-bit word, the first in the lowest nibble.
pub(crate) const CODES: usize = 8;
/// Blocks of 16 rows that lie interleaved, so that the kernel that decodes them together reads one ascending
/// stream.
pub(crate) const QUAD: usize = 4;
/// Most of k that is summed before it is scaled. Bounds the rounding error whatever the block size is.
pub(crate) const CHAIN: usize = 64;

/// Shortest run of k under one scale that the layout can hold.
pub const LEAST_GROUP: usize = 16;

/// Elements of k that surely share a scale. Blocks are flat over the row-major matrix, so they start at
/// multiples of `block` and rows at multiples of k: every run of `gcd(k, block)` lies inside one block.
pub fn scale_group(k: usize, block: u32) -> usize {
    let (mut a, mut b) = (k, block as usize);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_never_straddle_a_block() {
        for (k, block) in [(64, 64), (80, 64), (96, 64), (256, 4096), (320, 128), (4096, 64), (17, 32)] {
            let g = scale_group(k, block);
            assert!(
                (0..k * 9).step_by(g).all(|i| i / block as usize == (i + g - 1) / block as usize),
                "{k} {block}"
            );
        }
    }
}
