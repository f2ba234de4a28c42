//! What a matrix of blocks amounts to.
use super::Blocks;
use crate::formats::facts::{Facts, SAMPLE, even};

pub(super) fn facts(blocks: Blocks, [n, k]: [usize; 2], bytes: &[u8]) -> Facts {
    let (mut amax, mut squares, mut sum) = (0.0f64, 0.0f64, 0.0f64);
    let (mut lost, mut largest) = (0, 0.0f32);
    let mut counts = [0u64; 16];
    let mut values = vec![0.0; blocks.elements()];
    for block in bytes.chunks_exact(blocks.bytes()) {
        let apart = blocks.apart(block);
        blocks.decode(block, &mut values);
        for (g, values) in values.chunks_exact(blocks.group()).enumerate() {
            let codes = &apart.codes[g * blocks.group()..][..blocks.group()];
            codes.iter().for_each(|code| counts[usize::from(code >> (blocks.bits() - 4))] += 1);
            let (scale, min) = apart.of(g);
            largest = largest.max(scale.abs()).max(min.abs());
            // Codes of minima lie above them; a group of one value needs no scale.
            let differ = codes.iter().any(|code| *code != codes[0]);
            lost += usize::from(scale == 0.0 && differ);
            for v in values.iter().map(|v| f64::from(*v)) {
                amax = amax.max(v.abs());
                squares += v * v;
                sum += v;
            }
        }
    }
    let elements = (n * k).max(1) as f64;
    let (mean, mean_square) = (sum / elements, squares / elements);
    let mut odd = Vec::new();
    if blocks.bits() == 4 {
        odd.extend(even(&counts));
    }
    // The weights of no model lie to one side.
    if elements >= SAMPLE as f64 && mean.abs() > 0.5 * mean_square.sqrt() {
        let message = format!(
            "weights are {mean:+.2e} in the mean and {:.2e} in size, those of models about 0 in the mean: \
             minima of another convention?",
            mean_square.sqrt()
        );
        odd.push(("zeros-shifted", message));
    }
    Facts { amax, mean_square, lost, all_zero: largest == 0.0, odd }
}
