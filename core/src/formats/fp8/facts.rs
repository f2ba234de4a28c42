//! What an FP8 matrix amounts to.
use super::{Fp8, e4m3};
use crate::formats::facts::{Facts, SAMPLE, even};
use crate::{Part, Result, SegmentData, read_floats};

pub(super) fn facts(format: &Fp8, [n, k]: [usize; 2], data: &SegmentData<'_>) -> Result<Facts> {
    let codes = data.need(Part::Codes)?.as_bytes()?;
    let stored = data.need(Part::Scales)?;
    let mut scales = vec![0.0f32; stored.len()];
    read_floats(stored.as_bytes()?, format.scales, &mut scales);
    let mut counts = [0u64; 16];
    let mut tiles = vec![(0.0f32, 0.0f64, 0.0f64); scales.len()];
    let reach = format.reach(k).max(1);
    for (r, row) in codes.chunks_exact(k.max(1)).enumerate() {
        for (t, run) in row.chunks(reach).enumerate() {
            let mut seen = [0u32; 256];
            run.iter().for_each(|code| seen[usize::from(*code)] += 1);
            let (most, square, sum) = &mut tiles[format.scale_of(r, t * reach, k)];
            for (code, count) in (0..=255u8).zip(seen).filter(|(_, count)| *count > 0) {
                let (value, count) = (e4m3::decode(code), f64::from(count));
                *most = most.max(value.abs());
                *square += f64::from(value).powi(2) * count;
                *sum += f64::from(value) * count;
                counts[usize::from(code >> 4)] += count as u64;
            }
        }
    }
    let (mut amax, mut squares, mut sum, mut lost) = (0.0f64, 0.0f64, 0.0f64, 0);
    for ((most, square, of_codes), scale) in tiles.iter().zip(&scales) {
        let scale = f64::from(*scale);
        amax = amax.max(f64::from(*most) * scale.abs());
        squares += square * scale * scale;
        sum += of_codes * scale;
        lost += usize::from(*most > 0.0 && scale == 0.0);
    }
    let largest = tiles.iter().fold(0.0f32, |most, tile| most.max(tile.0));
    let mut odd = Vec::new();
    if largest == 0.0 {
        odd.push(("codes-zero", "every code is zero, so every weight is zero".to_owned()));
        return Ok(Facts { all_zero: true, odd, ..Facts::default() });
    }
    odd.extend(even(&counts));
    let elements = (n * k).max(1) as f64;
    // Writers scale the largest weight of a tile to the largest code.
    if elements >= SAMPLE as f64 && largest < 64.0 {
        let message = format!(
            "the largest code is {largest} of 448: scales of another convention, or bytes of another type?"
        );
        odd.push(("codes-small", message));
    }
    let (mean, mean_square) = (sum / elements, squares / elements);
    if elements >= SAMPLE as f64 && mean.abs() > 0.5 * mean_square.sqrt() {
        let message = format!(
            "weights are {mean:+.2e} in the mean and {:.2e} in size, those of models about 0 in the mean",
            mean_square.sqrt()
        );
        odd.push(("weights-shifted", message));
    }
    let all_zero = scales.iter().all(|s| *s == 0.0);
    Ok(Facts { amax, mean_square, lost, all_zero, odd })
}
