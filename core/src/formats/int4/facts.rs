//! What an int4 matrix amounts to.
use super::{Int4, ZERO, Zeros};
use crate::formats::facts::{Facts, SAMPLE, even};
use crate::{Part, Result, SegmentData};

pub(super) fn facts(format: &Int4, [n, k]: [usize; 2], data: &SegmentData<'_>) -> Result<Facts> {
    let codes = data.need(Part::Codes)?.as_bytes()?;
    let scales = format.floats(Part::Scales, data)?;
    // Where zero is in each group, in codes.
    let zeros = match format.zeros {
        Zeros::Middle => vec![f64::from(ZERO); scales.len()],
        Zeros::Points => data.need(Part::Zeros)?.as_bytes()?.iter().map(|zero| f64::from(*zero)).collect(),
        Zeros::Biases => {
            let zero = |(bias, scale): (f32, &f32)| match *scale {
                0.0 => 0.0,
                scale => -f64::from(bias) / f64::from(scale),
            };
            format.floats(Part::Zeros, data)?.into_iter().zip(&scales).map(zero).collect()
        }
    };
    let largest = scales.iter().fold(0.0f32, |most, s| most.max(s.abs()));
    let mut counts = [0u64; 16];
    let (mut amax, mut squares, mut sum) = (0.0f64, 0.0f64, 0.0f64);
    let (mut used, mut lost) = (0u64, 0usize);
    let (mut logs, mut logs_squared) = (0.0f64, 0.0f64);
    for (g, codes) in codes.chunks_exact((format.group as usize / 2).max(1)).enumerate() {
        let mut here = [0u64; 16];
        for byte in codes {
            here[usize::from(byte & 15)] += 1;
            here[usize::from(byte >> 4)] += 1;
        }
        let (mut far, mut square) = (0.0f64, 0.0f64);
        for (code, count) in here.iter().enumerate().filter(|(_, count)| **count > 0) {
            let off = code as f64 - zeros[g];
            far = far.max(off.abs());
            square += off * off * *count as f64;
            // A negative scale turns codes round.
            sum += (off * *count as f64).copysign(off * f64::from(scales[g]));
        }
        counts.iter_mut().zip(here).for_each(|(all, here)| *all += here);
        let scale = f64::from(scales[g].abs());
        amax = amax.max(far * scale);
        squares += square * scale * scale;
        lost += usize::from(far > 0.0 && scale == 0.0);
        if far > 0.0 && scale > 0.0 {
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
    let mean = sum / elements as f64;
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
