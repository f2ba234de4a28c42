//! What codes and scales of a 4-bit matrix amount to, and which of that no quantiser writes.
//!
//! A quantiser scales every block by its largest element: some code of a block is near the largest code, and
//! codes follow the bell of trained (or random) weights. Bounds lie far from what quantisers of real weights
//! do.
use q4_core::{
    Absmax, Part, Q4Schema, Result, SegmentData,
    formats::{e2m1, e4m3, nf4, nvfp4},
};

/// Elements below which a distribution says nothing.
const SAMPLE: u64 = 4096;
/// Block scales from here on are rounded finely enough that a block under one has a large code.
const NORMAL: u8 = 0x10;

/// One finding: stable name and text.
pub(super) type Oddity = (&'static str, String);

/// What a matrix amounts to.
#[derive(Default)]
pub(super) struct Facts {
    /// The largest absolute weight before the per-tensor scale.
    pub amax: f64,
    /// Mean square of the weights before the per-tensor scale.
    pub mean_square: f64,
    /// Blocks whose codes are lost under a zero scale.
    pub lost: usize,
    /// Every scale is zero.
    pub all_zero: bool,
    /// What no quantiser writes.
    pub odd: Vec<Oddity>,
}

/// What a matrix `[n, k]` of codes amounts to; `scales` are row-major. `None` for a format that nothing is
/// known about.
pub(super) fn facts(
    schema: Q4Schema,
    data: &SegmentData<'_>,
    scales: &[u8],
    [n, k]: [usize; 2],
) -> Result<Option<Facts>> {
    let codes = data.need(Part::Codes)?;
    let codes = codes.as_bytes()?;
    Ok(match schema {
        Q4Schema::Nvfp4(_) => Some(nvfp4(codes, scales, k / nvfp4::BLOCK, data.global.is_some())),
        Q4Schema::Nf4(format) => match format.of(data) {
            Some(parts) => Some(nf4(codes, &parts.absmax, format.block as usize, n * k)?),
            None => None,
        },
        _ => None,
    })
}

/// `scales` are row-major; `two_level`: there is a per-tensor scale beside them.
fn nvfp4(codes: &[u8], scales: &[u8], blocks_per_row: usize, two_level: bool) -> Facts {
    let mut pairs = [0u64; 256];
    let mut used = [0u64; 128];
    let (mut empty, mut lost_rows) = (0u64, 0usize);
    let (mut amax, mut squares, mut lost) = (0.0f64, 0.0f64, 0usize);
    let square: [f32; 256] = std::array::from_fn(|b| {
        let [lo, hi] = [b as u8 & 15, b as u8 >> 4].map(e2m1::decode);
        lo * lo + hi * hi
    });
    let blocks = codes.as_chunks::<{ nvfp4::BLOCK / 2 }>().0;
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

/// Trained weights use small codes more than large ones, and quantisers see to it that some are the largest.
fn even(counts: &[u64; 16]) -> Option<Oddity> {
    let all: u64 = counts.iter().sum();
    let mean = all as f64 / 16.0;
    let deviation = counts.iter().map(|c| (*c as f64 - mean).powi(2)).sum::<f64>() / mean / all as f64;
    (all >= SAMPLE && deviation < 0.01)
        .then(|| ("codes-even", "all 16 codes are equally frequent, as those of no weights are".to_owned()))
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

/// `block` elements an absmax, `elements` in all.
fn nf4(codes: &[u8], absmax: &Absmax<'_>, block: usize, elements: usize) -> Result<Facts> {
    let scales = absmax.to_f32()?;
    let mut counts = [0u64; 16];
    let (mut amax, mut squares, mut flat, mut negative) = (0.0f64, 0.0f64, 0u64, 0usize);
    for (b, scale) in scales.iter().enumerate() {
        let (mut seen, mut sum, mut largest) = (0u16, 0.0f32, 0.0f32);
        for i in b * block..((b + 1) * block).min(elements) {
            let code = nf4::nibble(codes, i);
            counts[usize::from(code)] += 1;
            seen |= 1 << code;
            let value = nf4::decode(code);
            (sum, largest) = (sum + value * value, largest.max(value.abs()));
        }
        let scale = f64::from(*scale);
        flat += u64::from(scale > 0.0 && seen == 1 << nf4::ZERO);
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
        let far = stored.zip(nf4::dynamic_map()).position(|(a, b)| (a - b).abs() > 1e-5);
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
