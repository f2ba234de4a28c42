//! What an NVFP4 matrix amounts to.
use super::BLOCK;
use crate::formats::facts::{Facts, Oddity, even};
use crate::formats::{e2m1, e4m3};

/// Block scales from here on are rounded finely enough that a block under one has a large code.
const NORMAL: u8 = 0x10;

/// `scales` are row-major; `two_level`: there is a per-tensor scale beside them.
pub(super) fn facts(codes: &[u8], scales: &[u8], blocks_per_row: usize, two_level: bool) -> Facts {
    let mut pairs = [0u64; 256];
    let mut used = [0u64; 128];
    let (mut empty, mut lost_rows) = (0u64, 0usize);
    let (mut amax, mut squares, mut lost) = (0.0f64, 0.0f64, 0usize);
    let square: [f32; 256] = std::array::from_fn(|b| {
        let [lo, hi] = [b as u8 & 15, b as u8 >> 4].map(e2m1::decode);
        lo * lo + hi * hi
    });
    let blocks = codes.as_chunks::<{ BLOCK / 2 }>().0;
    for (row, scales) in blocks.chunks(blocks_per_row).zip(scales.chunks(blocks_per_row)) {
        let before = lost;
        for (block, scale) in row.iter().zip(scales) {
            let (mut magnitude, mut sum) = (0u8, 0.0f32);
            for b in block {
                magnitude = magnitude.max(b & 7).max(b >> 4 & 7);
                sum += square[usize::from(*b)];
                pairs[usize::from(*b)] += 1;
            }
            used[usize::from(*scale & 0x7f)] += 1;
            let value = f64::from(e4m3::decode(*scale));
            lost += usize::from(*scale == 0 && magnitude > 0);
            empty += u64::from(*scale >= NORMAL && magnitude == 0);
            amax = amax.max(f64::from(e2m1::decode(magnitude)) * value);
            squares += f64::from(sum) * value * value;
        }
        lost_rows += usize::from(2 * (lost - before) > row.len());
    }
    let all: u64 = used.iter().sum();
    let mut counts = [0u64; 16];
    for (b, n) in pairs.iter().enumerate() {
        counts[b & 15] += n;
        counts[b >> 4] += n;
    }
    let mut odd = Vec::new();
    if empty == all && all > 0 {
        odd.push(("codes-zero", "every code is zero, so is every weight".to_owned()));
    } else if empty > 3 && empty * 1000 > all {
        odd.push((
            "codes-empty",
            format!("{empty} of {all} blocks have a scale and no code that is not zero"),
        ));
    }
    odd.extend(even(&counts));
    if lost_rows > 0 {
        odd.push((
            "scales-lost",
            format!("{lost_rows} rows have codes under scales of zero: their weights are lost"),
        ));
    }
    if used[0] != all {
        odd.extend(spread(&used, all, two_level));
    }
    Facts { amax, mean_square: squares / (all.max(1) as f64 * 16.0), lost, all_zero: used[0] == all, odd }
}

/// Block scales lie within few powers of two of each other; beside a per-tensor scale the largest is near
/// 448.
fn spread(used: &[u64; 128], all: u64, two_level: bool) -> Option<Oddity> {
    let present = || used.iter().enumerate().skip(1).filter(|(_, n)| **n > 0);
    let count: u64 = present().map(|(_, n)| n).sum();
    let mean_of = |f: &dyn Fn(f64) -> f64| {
        present().map(|(b, n)| f(f64::from(e4m3::decode(b as u8)).log2()) * *n as f64).sum::<f64>()
            / count as f64
    };
    let mean = mean_of(&|x| x);
    let deviation = mean_of(&|x| (x - mean).powi(2)).sqrt();
    let largest = present().next_back().map_or(0.0, |(b, _)| e4m3::decode(b as u8));
    if present().count() == 1 && all >= 64 {
        return Some(("scales-equal", format!("all {all} block scales are {largest}")));
    }
    if deviation > 1.4 && all >= 64 {
        let message = format!(
            "block scales differ by {deviation:.1} powers of two in the mean, those of weights by less than one: another type?"
        );
        return Some(("scales-spread", message));
    }
    (two_level && largest <= 32.0 && all >= 64).then(|| {
        let message = format!(
            "the largest block scale is {largest}; beside a per-tensor scale it is near 448: another type?"
        );
        ("scales-small", message)
    })
}
