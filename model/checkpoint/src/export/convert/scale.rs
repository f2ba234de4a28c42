//! Per-tensor scales in the other convention, bit for bit or not at all.
//!
//! A reciprocal is rounded, so `scale * g` and `scale / (1/g)` differ in the last bit for most `g`: seen over
//! random ones, one in five has a counterpart that gives the same f32 for all block scales. Powers of two
//! always have one.
use super::Changed;
use q4_core::formats::e4m3;
use q4_core::{Code, Convention, Error, GlobalScale, Result};

/// How far from the rounded reciprocal to look, in units of the last place. A counterpart for a scale that is
/// a power of two is within one of it; the rest is for tensors that use few scales.
const REACH: i32 = 2;

/// E4M3 block scales that occur, by their byte; NaN has none.
pub(super) struct Used([bool; 127]);

impl Used {
    /// Those in `scales`, all below 0x7f.
    pub fn of(scales: &[u8]) -> Self {
        let mut used = [false; 127];
        scales.iter().for_each(|&s| used[usize::from(s & 0x7f).min(126)] = true);
        Self(used)
    }

    /// Any: for scales that are chosen at run time.
    pub fn all() -> Self {
        Self([true; 127])
    }

    fn iter(&self) -> impl Iterator<Item = f32> + '_ {
        (0u8..).zip(self.0).filter(|(_, used)| *used).map(|(byte, _)| e4m3::decode(byte))
    }
}

/// The scale of `convention` with the same factor, bit for bit, on every block scale in `used`. `tensor` and
/// `layout` are for the error, a [`Code::Usage`].
pub(super) fn expressed(
    scale: GlobalScale,
    convention: Convention,
    used: &Used,
    tensor: &str,
    layout: &str,
) -> Result<GlobalScale> {
    if scale.convention() == convention {
        return Ok(scale);
    }
    match closest(scale, convention, used) {
        Some((0, other)) => Ok(other),
        found => Err(lossy(scale, used.iter().count(), found, tensor, layout)),
    }
}

/// The scale of `convention` that changes the fewest factors, where last bits may change: taken down in
/// `changed` under `name`. `exact` is why there is none that changes nothing; it stays the error where
/// nothing may change, or where a factor would change by more.
pub(super) fn nearest(
    scale: GlobalScale,
    convention: Convention,
    used: &Used,
    name: String,
    changed: Option<&mut Vec<Changed>>,
    exact: Error,
) -> Result<GlobalScale> {
    let Some(changed) = changed else {
        return Err(
            exact.fix("--allow-last-bit takes the nearest f32; or q4 quantize from the dense original")
        );
    };
    let Some((_, other)) = closest(scale, convention, used) else { return Err(exact) };
    let mut told = Changed { name, block_scales: 0, of: 0, largest_relative: 0.0 };
    for s in used.iter() {
        let (before, after) = (scale.effective(s), other.effective(s));
        if before.to_bits().abs_diff(after.to_bits()) > 1 {
            return Err(exact);
        }
        told.of += 1;
        if before.to_bits() != after.to_bits() {
            told.block_scales += 1;
            let relative = ((f64::from(after) - f64::from(before)) / f64::from(before)).abs();
            told.largest_relative = told.largest_relative.max(relative);
        }
    }
    changed.push(told);
    Ok(other)
}

/// Of the f32 around the reciprocal the one that changes the fewest factors, with their number.
fn closest(scale: GlobalScale, convention: Convention, used: &Used) -> Option<(usize, GlobalScale)> {
    let reciprocal = 1.0 / scale.value();
    let near = |ulps: i32| {
        let bits = reciprocal.to_bits().checked_add_signed(ulps)?;
        GlobalScale::new(convention, f32::from_bits(bits)).ok()
    };
    let differing = |other: GlobalScale| {
        used.iter().filter(|&s| scale.effective(s).to_bits() != other.effective(s).to_bits()).count()
    };
    let order = (0..=REACH).flat_map(|d| [d, -d]);
    order.filter_map(near).map(|other| (differing(other), other)).min_by_key(|(count, _)| *count)
}

fn lossy(
    scale: GlobalScale,
    used: usize,
    found: Option<(usize, GlobalScale)>,
    tensor: &str,
    layout: &str,
) -> Error {
    let (own, other) = match scale.convention() {
        Convention::Multiply => ("times", "divided by"),
        Convention::Divide => ("divided by", "times"),
    };
    let have = match found {
        Some((count, near)) => format!("{}, which gives {count} of them another last bit", near.value()),
        None => "no f32 near its reciprocal".into(),
    };
    Error::new(
        Code::Usage,
        format!("`{tensor}`: layout {layout} cannot hold this scale without changing values"),
    )
    .need(format!(
        "an f32 with s {other} it = s {own} {} for {used} block scales s, every bit",
        scale.value()
    ))
    .have(have)
    .fix(format!(
        "a layout whose scales mean the same, or `q4 quantize --layout {layout}` from the dense original"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both_ways() -> [(Convention, Convention); 2] {
        [(Convention::Multiply, Convention::Divide), (Convention::Divide, Convention::Multiply)]
    }

    #[test]
    fn powers_of_two_are_exact() -> Result<()> {
        for (from, to) in both_ways() {
            for e in -120..=120 {
                let scale = GlobalScale::new(from, (e as f32).exp2())?;
                let other = expressed(scale, to, &Used::all(), "t", "l")?;
                assert_eq!((other.convention(), other.value()), (to, (-e as f32).exp2()));
                assert_eq!(expressed(scale, from, &Used::all(), "t", "l")?, scale);
            }
        }
        Ok(())
    }

    #[test]
    fn what_is_found_is_exact_and_most_is_not_found() {
        let mut exact = [0, 0];
        for (found, (from, to)) in exact.iter_mut().zip(both_ways()) {
            for i in 0..2000u32 {
                // Mantissas in steps of an irrational number, exponents of real scales.
                let mantissa = 1.0 + (f64::from(i) * 0.618_033_988_749_895).fract();
                let scale = GlobalScale::new(from, (mantissa * 2f64.powi(-((i % 7) as i32) - 8)) as f32)
                    .expect("positive");
                match expressed(scale, to, &Used::all(), "t", "l") {
                    Ok(other) => {
                        *found += 1;
                        for byte in 0..0x7f {
                            let s = e4m3::decode(byte);
                            assert_eq!(
                                scale.effective(s).to_bits(),
                                other.effective(s).to_bits(),
                                "{scale:?} {s}"
                            );
                        }
                    }
                    Err(e) => assert_eq!(e.code(), Code::Usage),
                }
            }
        }
        assert!(exact.iter().all(|found| (200..600).contains(found)), "{exact:?} of 2000");
    }

    #[test]
    fn only_scales_in_use_count() {
        let (zero, one) = (Used::of(&[0]), Used::of(&[0x38, 0x38, 0]));
        let scale = GlobalScale::multiply(0.3).expect("positive");
        assert!(expressed(scale, Convention::Divide, &zero, "t", "l").is_ok());
        assert_eq!(one.iter().collect::<Vec<_>>(), [0.0, 1.0]);
        assert_eq!(Used::all().iter().last(), Some(448.0));
        // 2^-140 has no reciprocal in f32.
        let tiny = GlobalScale::multiply(f32::from_bits(1 << 9)).expect("positive");
        assert!(expressed(tiny, Convention::Divide, &one, "t", "l").is_err());
    }

    #[test]
    fn the_error_names_tensor_need_and_have() {
        let scale = GlobalScale::multiply(0.000_3).expect("positive");
        let e = expressed(scale, Convention::Divide, &Used::all(), "up.weight_scale_2", "compressed-tensors");
        let text = e.expect_err("no counterpart").to_string();
        for part in [
            "`up.weight_scale_2`",
            "need: ",
            "s times 0.0003",
            "127 block scales",
            "have: 3333.33",
            "another last bit",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
