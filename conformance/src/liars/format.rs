//! Mutants that are right about the encodings, formats and values that suites have, and wrong about others of
//! the same kind.
use super::Mutant;
use super::parts::{HONEST, Parts, quantise};
use super::situation::{Fault, Situation};
use crate::Level::{L1, L2, L3};
use q4_core::formats::nf4;
use q4_core::{ActGlobal, ActQuant, Activations, DType, Nf4, Q4Schema, Rule};

fn last(s: &Situation<'_>) -> Fault {
    Fault::Element(s.m - 1, s.n - 1)
}

/// Edits x where it is NaN, given its place: element and in features.
fn without_nan(x: &[f32], is_lost: impl Fn(usize, f32) -> bool) -> Vec<f32> {
    x.iter().enumerate().map(|(i, v)| if v.is_nan() && is_lost(i, *v) { 0.0 } else { *v }).collect()
}

/// Blocks of 16 quantised by `round` to 8 bits.
fn int8(x: &[f32], a: &Activations, round: fn(f32) -> f32) -> Option<Vec<f64>> {
    let block = |b: &[f32]| -> Vec<f64> {
        let amax = b.iter().fold(0f32, |m, v| m.max(v.abs()));
        let (inverse, scale) = (127.0 / amax, amax / 127.0);
        b.iter()
            .map(|v| if inverse.is_finite() { f64::from(round(v * inverse)) * f64::from(scale) } else { 0.0 })
            .collect()
    };
    (*a == Activations::Int8).then(|| x.chunks(16).flat_map(block).collect())
}

fn is_rule(a: &Activations, rule: Rule, global: fn(&ActGlobal) -> bool) -> bool {
    matches!(a, Activations::Nvfp4(ActQuant { rule: r, global: g }) if *r == rule && global(g))
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L1 "map-of-its-own": "the map of double-quantised scales is taken for granted" {
        absmax: |_, code, absmax, offset| nf4::dynamic_map()[usize::from(code)] * absmax + offset,
    }
    L1 "offset-without-its-sign": "the mean of double-quantised scales counts as positive" {
        absmax: |map, _, absmax, offset| map * absmax + offset.abs(),
    }
    L1 "nested-blocks-of-256": "so many codes share a second scale, whatever the weight says" {
        nested_at: |i, _| i / 256,
    }
    L1 "scales-without-sign": "a negative absmax counts as positive" { absmax_used: f32::abs }
    L2 "tiny-globals-lost": "products take a per-tensor scale below 1/1000 for that" {
        forward_row: |row, at| {
            if let Some(g) = at.global
                && g.multiplier() < 1e-3
            {
                row.iter_mut().for_each(|w| *w *= (1e-3 / g.multiplier()) as f32);
            }
        },
    }
    L2 "large-globals-lost": "products take a per-tensor scale above 2 for that" {
        forward_row: |row, at| {
            if let Some(g) = at.global
                && g.multiplier() > 2.0
            {
                row.iter_mut().for_each(|w| *w *= (2.0 / g.multiplier()) as f32);
            }
        },
    }
    L2 "four-segments": "the fourth segment of a weight and all after it are off" {
        forward_row: |row, at| {
            if at.segment >= 3 {
                row.iter_mut().for_each(|w| *w *= 1.5);
            }
        },
    }
    L2 "rows-of-zeros": "a row of the weight that is zero gives NaN" {
        forward_row: |row, _| {
            if row.len() > 100 && row.iter().all(|w| *w == 0.0) {
                row.fill(f32::NAN);
            }
        },
    }
    L1 "multiplies-other-blocks": "products of NF4 in blocks of 256 to 2048 take another absmax" {
        forward_row: |row, at| {
            if let Q4Schema::Nf4(Nf4 { block: 256..=2048, .. }) = at.schema {
                row.iter_mut().for_each(|w| *w *= 0.9);
            }
        },
    }
    L3 "gradient-of-other-blocks": "gradients of NF4 in blocks of 1024 take another absmax" {
        backward_row: |row, at| {
            if let Q4Schema::Nf4(Nf4 { block: 1024, .. }) = at.schema {
                row.iter_mut().for_each(|w| *w *= 0.9);
            }
        },
    }
    L2 "torchao-without-a-scale": "the torchao rule without a per-tensor scale" {
        fault: |s| Fault::when(is_rule(&s.activations, Rule::TorchAo, |g| *g == ActGlobal::None), last(s)),
    }
    L2 "torchao-calibrated": "the torchao rule with a calibrated scale" {
        fault: |s| {
            let is_calibrated = is_rule(&s.activations, Rule::TorchAo, |g| matches!(g, ActGlobal::Static(_)));
            Fault::when(is_calibrated, last(s))
        },
    }
    L2 "compressed-tensors-alone": "the rule of compressed-tensors without a per-tensor scale" {
        fault: |s| {
            Fault::when(is_rule(&s.activations, Rule::CompressedTensors, |g| *g == ActGlobal::None), last(s))
        },
    }
    L2 "int8-ties-away": "int8 inputs halfway between two codes are rounded away from zero" {
        quantise: |x, k, a, s| {
            let right = quantise(x, k, a, s)?;
            Ok(int8(x, a, f32::round).unwrap_or(right))
        },
    }
    L2 "int8-without-its-end": "int8 inputs have codes up to 126" {
        quantise: |x, k, a, s| {
            let right = quantise(x, k, a, s)?;
            Ok(int8(x, a, |v| v.round_ties_even().clamp(-126.0, 126.0)).unwrap_or(right))
        },
    }
    L2 "codes-of-x-ties-up": "inputs of the ModelOpt rule halfway between codes are rounded up" {
        quantise: |x, k, a, s| {
            let Activations::Nvfp4(q) = a else { return quantise(x, k, a, s) };
            if q.rule != Rule::ModelOpt {
                return quantise(x, k, a, s);
            }
            // Larger by less than anything but a tie would notice.
            let up: Vec<f32> = x
                .chunks(16)
                .flat_map(|b| {
                    let amax = b.iter().fold(0f32, |m, v| m.max(v.abs()));
                    b.iter().map(move |v| if v.abs() < amax { v * (1.0 + f32::EPSILON) } else { *v })
                })
                .collect();
            quantise(&up, k, a, s)
        },
    }
    L2 "zeros-of-a-call": "an input of zeros alone is taken for ones" {
        quantise: |x, k, a, s| {
            let is_zero = x.iter().all(|v| *v == 0.0) && x.len() > k;
            quantise(&x.iter().map(|v| if is_zero { 1.0 } else { *v }).collect::<Vec<_>>(), k, a, s)
        },
    }
    L2 "inputs-above-zero": "rows without a negative value are halved" {
        quantise: |x, k, a, s| {
            let row = |row: &[f32]| {
                let is_above = row.iter().all(|v| *v >= 0.0) && row.iter().any(|v| *v != 0.0);
                row.iter().map(|v| if is_above { v / 2.0 } else { *v }).collect::<Vec<_>>()
            };
            quantise(&x.chunks(k).flat_map(row).collect::<Vec<_>>(), k, a, s)
        },
    }
    L2 "nan-in-the-first-column": "NaN in the first column counts as zero" {
        quantise: |x, k, a, s| quantise(&without_nan(x, |i, _| i % k == 0), k, a, s),
    }
    L2 "nan-in-the-last-column": "NaN in the last column counts as zero" {
        quantise: |x, k, a, s| quantise(&without_nan(x, |i, _| i % k == k - 1), k, a, s),
    }
    L2 "nan-in-the-first-row": "NaN in the first of several rows counts as zero" {
        quantise: |x, k, a, s| quantise(&without_nan(x, |i, _| i < k && x.len() > k), k, a, s),
    }
    L2 "nan-in-the-last-row": "NaN in the last of many rows counts as zero" {
        quantise: |x, k, a, s| quantise(&without_nan(x, |i, _| i >= x.len() - k && x.len() > 4 * k), k, a, s),
    }
    L2 "nan-with-a-sign": "a NaN whose sign bit is set counts as zero" {
        quantise: |x, k, a, s| quantise(&without_nan(x, |_, v| v.is_sign_negative()), k, a, s),
    }
    L2 "small-halves-lost": "f16 results below the smallest normal one are zero" {
        round: |v, d| if d == DType::F16 && v.abs() < 6.1e-5 { 0.0 } else { v as f32 },
    }
    L2 "halves-never-infinite": "f16 results end at 65504" {
        round: |v, d| {
            if d == DType::F16 && v.is_finite() { v.clamp(-65504.0, 65504.0) as f32 } else { v as f32 }
        },
    }
    L2 "cuts-halves": "f16 results are cut, not rounded" {
        round: |v, d| match d {
            DType::F16 if v.is_finite() && v.abs() > 1e-3 => {
                f32::from_bits((v as f32).to_bits() & 0xffff_e000)
            }
            _ => v as f32,
        },
    }
    L2 "sums-that-saturate": "sums of 32 products end at a power of two" {
        sum: |x, w| {
            let part = |(x, w): (&[f64], &[f32])| -> f64 {
                let sizes: f64 = x.iter().zip(w).map(|(x, w)| (x * f64::from(*w)).abs()).sum();
                let sum = (HONEST.sum)(x, w);
                // As 16 bits do for the largest codes of one sign.
                if sum.abs() > 0.95 * sizes && x.len() == 32 { 0.8 * sum } else { sum }
            };
            x.chunks(32).zip(w.chunks(32)).map(part).sum()
        },
    }
    L3 "gradients-within-100": "gradients beyond 100 are cut" { gradient: |v| v.clamp(-100.0, 100.0) }
    L3 "small-gradients-lost": "gradients below a millionth are zero" {
        gradient: |v| if v.abs() < 1e-6 { 0.0 } else { v },
    }
    L3 "nan-in-a-gradient": "gradients that are NaN are zero" {
        gradient: |v| if v.is_nan() { 0.0 } else { v },
    }
    L3 "infinite-gradients": "infinite gradients are the largest number" {
        gradient: |v| if v.is_infinite() { v.signum() * 1e30 } else { v },
    }
};
