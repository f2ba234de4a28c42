//! What an NF4 matrix amounts to.
use super::{Absmax, ZERO, decode, dynamic_map, nibble};
use crate::Result;
use crate::formats::facts::{Facts, SAMPLE};

/// `block` elements an absmax, `elements` in all.
pub(super) fn facts(codes: &[u8], absmax: &Absmax<'_>, block: usize, elements: usize) -> Result<Facts> {
    let scales = absmax.to_f32()?;
    let mut counts = [0u64; 16];
    let (mut amax, mut squares, mut flat, mut negative) = (0.0f64, 0.0f64, 0u64, 0usize);
    for (b, scale) in scales.iter().enumerate() {
        let (mut seen, mut sum, mut largest) = (0u16, 0.0f32, 0.0f32);
        for i in b * block..((b + 1) * block).min(elements) {
            let code = nibble(codes, i);
            counts[usize::from(code)] += 1;
            seen |= 1 << code;
            let value = decode(code);
            (sum, largest) = (sum + value * value, largest.max(value.abs()));
        }
        let scale = f64::from(*scale);
        flat += u64::from(scale > 0.0 && seen == 1 << ZERO);
        negative += usize::from(scale < 0.0);
        amax = amax.max(scale.abs() * f64::from(largest));
        squares += f64::from(sum) * scale * scale;
    }
    let (all, blocks) = (elements as u64, scales.len());
    let mut odd = Vec::new();
    if flat > 3 && flat * 1000 > blocks as u64 {
        odd.push((
            "codes-empty",
            format!("{flat} of {blocks} blocks have an absmax and no code that is not zero"),
        ));
    }
    let ends = counts[0] + counts[15];
    if all >= SAMPLE && ends * 100 > all * 10 && block >= 32 {
        let share = 100.0 * ends as f64 / all as f64;
        let message = format!("{share:.0} % of the codes are the largest ones, of which a block needs one");
        odd.push(("codes-even", message));
    }
    if negative * 20 > blocks {
        odd.push((
            "absmax-negative",
            format!("{negative} of {blocks} absmax are negative once nested_offset is added"),
        ));
    }
    if let Absmax::Nested { map, .. } = absmax {
        let stored = map.as_bytes()?.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        let far = stored.zip(dynamic_map()).position(|(a, b)| (a - b).abs() > 1e-5);
        if let Some(i) = far {
            odd.push((
                "nested-map",
                format!("nested_quant_map differs from that of bitsandbytes, at code {i} first"),
            ));
        }
    }
    let zero = scales.iter().all(|s| *s == 0.0);
    Ok(Facts { amax, mean_square: squares / all.max(1) as f64, lost: 0, all_zero: zero, odd })
}
