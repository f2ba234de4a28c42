//! Rows of logits, looked at as a whole: as many values at once as the processor likes, since a vocabulary is
//! long and every token of every answer looks.
//!
//! Loops that may end early or that carry an index are not made into vectors by compilers; these have
//! neither, block by block, and look closer at one block.

/// Values that are looked at before anything is decided: a piece of the first cache.
const BLOCK: usize = 2048;
const LANES: usize = 16;

/// Index of the largest value, the first of several. NaN is passed over.
pub fn first_maximum(values: &[f32]) -> usize {
    let (mut peak, mut from) = (f32::NEG_INFINITY, 0);
    for (i, block) in values.chunks(BLOCK).enumerate() {
        let most = largest(block);
        if most > peak {
            (peak, from) = (most, i * BLOCK);
        }
    }
    values[from..].iter().position(|v| *v == peak).map_or(0, |at| from + at)
}

/// Index of the first value that `is`, for what is rarely there.
pub fn first(values: &[f32], is: impl Fn(f32) -> bool) -> Option<usize> {
    let has = |block: &[f32]| block.iter().fold(false, |any, v| any | is(*v));
    let (i, block) = values.chunks(BLOCK).enumerate().find(|(_, block)| has(block))?;
    block.iter().position(|v| is(*v)).map(|at| i * BLOCK + at)
}

fn largest(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (most, v) in most.iter_mut().zip(chunk) {
            *most = larger(*most, *v);
        }
    }
    most.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| larger(a, *b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_several_is_found_wherever_blocks_end() {
        for len in [1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5] {
            for at in [0, 1, 14, 15, 16, BLOCK - 1, BLOCK, 2 * BLOCK, len - 1] {
                if at >= len {
                    continue;
                }
                let mut values = vec![-2.5; len];
                values[at] = 3.0;
                assert_eq!((first_maximum(&values), first(&values, |v| v > 0.0)), (at, Some(at)), "{len}");
                values[at..].fill(3.0);
                assert_eq!((first_maximum(&values), first(&values, |v| v > 0.0)), (at, Some(at)), "{len}");
            }
        }
        assert_eq!(first(&[1.0; 40], f32::is_nan), None);
        assert_eq!(first(&[], f32::is_nan), None);
    }

    #[test]
    fn zeros_are_equal_and_nan_is_no_maximum() {
        assert_eq!(first_maximum(&[-1.0, -0.0, 0.0]), 1);
        assert_eq!(first_maximum(&[f32::NAN, 1.0, f32::NAN, 2.0, 2.0]), 3);
        assert_eq!(first_maximum(&[f32::NEG_INFINITY; 3]), 0);
        assert_eq!(first_maximum(&[]), 0);
        assert_eq!(first_maximum(&[f32::NAN; 40]), 0);
    }
}
