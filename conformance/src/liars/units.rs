//! The correct backend with the sums of FP8 tensor cores, and mutants of it. Its one claim is of FP8 inputs
//! on `fused-rounded`, whose bound is wide: nothing but cases of that claim can catch them.
use super::Mutant;
use super::parts::{FUSING, Parts, quantise, sum};
use super::rounded;
use crate::Level::L2;
use q4_core::formats::fp8::inputs::BLOCK;
use q4_core::{Activations, ExecPath, Fp8Inputs, wide};

/// Products that units of sm_90 add to a sum at once.
const STEP: usize = 32;
/// Of k, what is added there before the sum is taken out; no scale changes within.
const SLAB: usize = BLOCK;
/// Bits that they keep behind the first one of the largest.
const KEPT: i32 = 13;

/// Nothing exchanged.
pub(super) const UNITS: Parts = Parts {
    path: ExecPath::FusedRounded,
    descriptor: |d| d.offers.retain(|(name, _)| name == "fp8"),
    sum: |x, w| slabs(x, w, SLAB, KEPT),
    ..FUSING
};

/// The sum of what units give for each `slab` of k, in f32.
fn slabs(x: &[f64], w: &[f32], slab: usize, kept: i32) -> f64 {
    let parts = x.chunks(slab).zip(w.chunks(slab));
    f64::from(parts.fold(0f32, |sum, (x, w)| sum + aligned(x, w, kept) as f32))
}

wide! {
    /// Step by step, products and the sum so far are aligned to the largest of them, lose all bits but so
    /// many behind its first one, and are added, exactly.
    fn aligned(x: &[f64], w: &[f32], kept: i32) -> f64 {
        const EXPONENT: u64 = 0x7ff << 52;
        let (last, first) = (0.5f64.powi(kept), 2f64.powi(kept));
        let mut sum = 0f64;
        for (x, w) in x.chunks(STEP).zip(w.chunks(STEP)) {
            let mut products = [0.0; STEP];
            for (i, (x, w)) in x.iter().zip(w).enumerate() {
                products[i] = x * f64::from(*w);
            }
            // Magnitudes order as their bits do.
            let mut most = sum.abs().to_bits();
            for p in &products {
                most = most.max(p.abs().to_bits());
            }
            let power = f64::from_bits(most & EXPONENT);
            if power == 0.0 {
                continue;
            }
            let units = first / power;
            let mut total = (sum * units).trunc();
            for p in &products {
                total += (p * units).trunc();
            }
            sum = total * (power * last);
        }
        sum
    }
}

/// Each sum of a slab with what `edit` makes of it.
fn each_slab(x: &[f64], w: &[f32], edit: fn(&[f64], &[f32]) -> f64) -> f64 {
    x.chunks(SLAB).zip(w.chunks(SLAB)).map(|(x, w)| edit(x, w)).sum()
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    UNITS;
    L2 "units-as-it-is": "inputs of FP8 units are not rounded" { quantise: rounded::as_it_is }
    L2 "units-as-it-is-in-long-rows": "more than 2048 inputs of FP8 units are not rounded" {
        quantise: |x, k, a, s| if k > 2048 { rounded::as_it_is(x, k, a, s) } else { quantise(x, k, a, s) },
    }
    L2 "units-by-row": "inputs of FP8 units that have a scale per 128 get one a row" {
        quantise: rounded::by_row,
    }
    L2 "units-by-block": "inputs of FP8 units that have a scale a row get one per 128" {
        quantise: rounded::by_block,
    }
    L2 "units-without-the-stored-scale": "inputs of FP8 units with a stored scale get one of their own" {
        quantise: rounded::without_the_stored_scale,
    }
    L2 "units-ties-up": "inputs of FP8 units halfway between two codes are rounded away from zero" {
        quantise: rounded::ties_up,
    }
    L2 "units-cut": "inputs of FP8 units lose what their codes have no bits for" { quantise: rounded::cut }
    L2 "units-past-its-end": "inputs of FP8 units beyond the range of a stored scale are zero" {
        quantise: rounded::past_its_end,
    }
    L2 "units-without-subnormals": "inputs of FP8 units below the smallest normal code are zero" {
        quantise: rounded::without_subnormals,
    }
    L2 "units-scale-of-x-beside": "a block of FP8 inputs takes the scale of the one before it" {
        quantise: |x, k, a, s| {
            let right = quantise(x, k, a, s)?;
            if *a != Activations::Fp8(Fp8Inputs::PerBlock) {
                return Ok(right);
            }
            let amax = |b: &[f32]| b.iter().fold(0f32, |most, v| v.abs().max(most));
            let row = |(row, x): (&[f64], &[f32])| -> Vec<f64> {
                let scales: Vec<_> = x.chunks(BLOCK).map(amax).collect();
                let of = |i: usize| f64::from(scales[(i / BLOCK).saturating_sub(1)] / scales[i / BLOCK]);
                let moved = |(i, v): (usize, &f64)| if *v == 0.0 { 0.0 } else { v * of(i) };
                row.iter().enumerate().map(moved).collect()
            };
            Ok(right.chunks(k).zip(x.chunks(k)).flat_map(row).collect())
        },
    }
    L2 "units-last-in-feature-lost": "FP8 units are not given the last in feature" {
        sum: |x, w| (UNITS.sum)(&x[..x.len() - 1], &w[..w.len() - 1]),
    }
    L2 "units-end-of-a-slab-lost": "FP8 units are not given the last in feature of the first 128" {
        sum: |x, w| {
            let rest = SLAB.min(x.len());
            (UNITS.sum)(&x[..rest - 1], &w[..rest - 1]) + (UNITS.sum)(&x[rest..], &w[rest..])
        },
    }
    L2 "units-last-slab-lost": "of several slabs FP8 units are not given the last" {
        sum: |x, w| {
            let most = if x.len() > SLAB { (x.len() - 1) / SLAB * SLAB } else { x.len() };
            (UNITS.sum)(&x[..most], &w[..most])
        },
    }
    L2 "units-remainder-lost": "FP8 units are not given what whole slabs leave of k" {
        sum: |x, w| {
            let most = if x.len() > SLAB { x.len() / SLAB * SLAB } else { x.len() };
            (UNITS.sum)(&x[..most], &w[..most])
        },
    }
    L2 "units-end-of-long-sums-lost": "the last in feature of more than 1024 is not given to FP8 units" {
        sum: |x, w| {
            let most = if x.len() > 8 * SLAB { x.len() - 1 } else { x.len() };
            (UNITS.sum)(&x[..most], &w[..most])
        },
    }
    L2 "units-slab-of-many-lost": "behind eight slabs FP8 units miss one" {
        sum: |x, w| {
            let [from, to] = [8 * SLAB, 9 * SLAB].map(|at| at.min(x.len()));
            (UNITS.sum)(&x[..from], &w[..from]) + (UNITS.sum)(&x[to..], &w[to..])
        },
    }
    L2 "units-in-features-exchanged": "FP8 units meet the last two in features in the other order" {
        sum: |x, w| {
            let mut w = w.to_vec();
            w[x.len() - 2..].reverse();
            (UNITS.sum)(x, &w)
        },
    }
    L2 "units-scale-of-the-next-tile": "sums of a slab take the scale of the weight of the next" {
        tile_of: |e| e.format.scale_of(e.row, (e.column + SLAB).min(e.k - 1), e.k),
    }
    L2 "units-scale-of-the-next-row": "sums of an out feature take the scale of the next" {
        tile_of: |e| e.format.scale_of((e.row + 1).min(e.rows - 1), e.column, e.k),
    }
    L2 "units-taken-out-at-the-end": "sums of all of k stay in FP8 units" {
        sum: |x, w| slabs(x, w, x.len(), KEPT),
    }
    L2 "units-with-ten-bits": "FP8 units keep ten bits behind the first one" {
        sum: |x, w| slabs(x, w, SLAB, 10),
    }
    L2 "units-largest-alone": "of a slab FP8 units keep the largest product" {
        sum: |x, w| {
            each_slab(x, w, |x, w| {
                let products = x.iter().zip(w).map(|(x, w)| x * f64::from(*w));
                products.fold(0.0, |most, p| if p.abs() > f64::abs(most) { p } else { most })
            })
        },
    }
    L2 "units-sums-in-bf16": "sums of slabs are added up in bf16" {
        sum: |x, w| {
            let add = |sum: half::bf16, (x, w): (&[f64], &[f32])| {
                half::bf16::from_f64(sum.to_f64() + aligned(x, w, KEPT))
            };
            x.chunks(SLAB).zip(w.chunks(SLAB)).fold(half::bf16::ZERO, add).to_f64()
        },
    }
    L2 "units-negative-sums-lost": "slabs whose sum is negative are left out" {
        sum: |x, w| each_slab(x, w, |x, w| sum(x, w).max(0.0)),
    }
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims;
    use q4_core::{Device, HostEnv};

    /// As measured on an H200.
    #[test]
    fn thirteen_bits_are_kept() {
        let beside = |small: f32| {
            let mut w = [small; SLAB];
            w[0] = 65536.0;
            (UNITS.sum)(&[1.0; SLAB], &w)
        };
        assert_eq!(beside(8.0), 65536.0 + 127.0 * 8.0);
        assert_eq!(beside(4.0), 65536.0);
        assert_eq!(beside(15.0), 65536.0 + 127.0 * 8.0);
    }

    #[test]
    fn sums_leave_the_units_after_each_slab() {
        let mut w = [4.0; 2 * SLAB];
        w[SLAB] = 65536.0;
        assert_eq!((UNITS.sum)(&[1.0; 2 * SLAB], &w), 128.0 * 4.0 + 65536.0);
    }

    /// A mutant with another claim might be caught there.
    #[test]
    fn one_claim_is_all_that_can_catch_them() {
        for mutant in MUTANTS {
            let found = claims(&*mutant.backend(), &HostEnv::default(), Device::Cpu);
            let names: Vec<_> = found.iter().map(ToString::to_string).collect();
            assert_eq!(names, ["fp8@1/fp8/cpu/fused-rounded"], "{}", mutant.name);
        }
    }
}
