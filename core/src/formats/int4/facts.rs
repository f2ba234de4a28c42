//! What an int4 matrix amounts to.
use super::{Int4, ZERO};
use crate::formats::facts::{Facts, SAMPLE, even};
use crate::{Part, Result, SegmentData, read_floats};

pub(super) fn facts(format: &Int4, [n, k]: [usize; 2], data: &SegmentData<'_>) -> Result<Facts> {
    let codes = data.need(Part::Codes)?.as_bytes()?;
    let zeros = match format.symmetric {
        true => None,
        false => Some(data.need(Part::Zeros)?.as_bytes()?),
    };
    let mut scales = vec![0.0f32; n * format.groups(k)];
    read_floats(data.need(Part::Scales)?.as_bytes()?, format.scales, &mut scales);
    let largest = scales.iter().fold(0.0f32, |most, s| most.max(s.abs()));
    let mut counts = [0u64; 16];
    let (mut amax, mut squares, mut sum) = (0.0f64, 0.0f64, 0i64);
    let (mut used, mut lost) = (0u64, 0usize);
    let (mut logs, mut logs_squared) = (0.0f64, 0.0f64);
    for (g, codes) in codes.chunks_exact((format.group as usize / 2).max(1)).enumerate() {
        let zero = i64::from(zeros.map_or(ZERO, |zeros| zeros[g]));
        let mut here = [0u64; 16];
        for byte in codes {
            here[usize::from(byte & 15)] += 1;
            here[usize::from(byte >> 4)] += 1;
        }
        let (mut far, mut square) = (0, 0);
        for (code, count) in here.iter().enumerate().filter(|(_, count)| **count > 0) {
            let off = code as i64 - zero;
            far = far.max(off.abs());
            square += off * off * *count as i64;
            sum += off * *count as i64;
        }
        counts.iter_mut().zip(here).for_each(|(all, here)| *all += here);
        let scale = f64::from(scales[g].abs());
        amax = amax.max(far as f64 * scale);
        squares += square as f64 * scale * scale;
        lost += usize::from(far > 0 && scale == 0.0);
        if far > 0 && scale > 0.0 {
            used += 1;
            logs += scale.log2();
            logs_squared += scale.log2().powi(2);
        }
    }
    // A group of zeros has whatever scale its writer likes.
    let elements = (n * k) as u64;
    let mut odd = Vec::new();
    if used == 0 && lost == 0 {
        odd.push(("codes-zero", "every code is its zero point, so every weight is zero".to_owned()));
        return Ok(Facts { all_zero: true, odd, ..Facts::default() });
    }
    odd.extend(even(&counts));
    // Half a step and more, one way, in the mean of thousands: the weights of no model.
    let mean = sum as f64 / elements as f64;
    if elements >= SAMPLE && mean.abs() > 0.5 {
        let message = format!(
            "codes are {mean:+.2} from their zero points in the mean, those of weights are about 0: zero points of \
             another convention?"
        );
        odd.push(("zeros-shifted", message));
    }
    let count = used.max(1) as f64;
    let deviation = (logs_squared / count - (logs / count).powi(2)).max(0.0).sqrt();
    if deviation > 3.0 && used >= 64 {
        let message = format!(
            "scales differ by {deviation:.1} powers of two in the mean, those of weights by less than two: another \
             type?"
        );
        odd.push(("scales-spread", message));
    }
    let all_zero = largest == 0.0;
    Ok(Facts { amax, mean_square: squares / elements.max(1) as f64, lost, all_zero, odd })
}
