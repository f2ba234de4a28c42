//! Mutants that are right for inputs around one.
use super::Mutant;
use super::parts::{HONEST, Parts, quantise};
use crate::Level::L2;
use q4_core::DType;

fn map(x: &[f32], f: impl Fn(f32) -> f32) -> Vec<f32> {
    x.iter().map(|v| if v.is_finite() { f(*v) } else { *v }).collect()
}

/// Blocks of 16 whose largest magnitude is not `keep`, given that of their row, become zero.
fn blocks(x: &[f32], k: usize, keep: fn(f32, f32) -> bool) -> Vec<f32> {
    let amax = |v: &[f32]| v.iter().fold(0f32, |m, v| m.max(v.abs()));
    let row = |row: &[f32]| {
        let largest = amax(row);
        let block = |b: &[f32]| if keep(amax(b), largest) { b.to_vec() } else { vec![0.0; b.len()] };
        row.chunks(16).flat_map(block).collect::<Vec<_>>()
    };
    x.chunks(k).flat_map(row).collect()
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L2 "inputs-within-20": "inputs beyond 20 are cut" {
        quantise: |x, k, a, s| quantise(&map(x, |v| v.clamp(-20.5, 20.5)), k, a, s),
    }
    L2 "inputs-within-1000": "inputs beyond 1000 are cut" {
        quantise: |x, k, a, s| quantise(&map(x, |v| v.clamp(-1000.0, 1000.0)), k, a, s),
    }
    L2 "inputs-within-half": "inputs that no half can hold are cut" {
        quantise: |x, k, a, s| quantise(&map(x, |v| v.clamp(-65504.0, 65504.0)), k, a, s),
    }
    L2 "inputs-in-half-range": "inputs are converted to f16 and back, twice as exact" {
        quantise: |x, k, a, s| {
            quantise(&map(x, |v| if v.abs() < 6.1e-5 { half::f16::from_f32(v).to_f32() } else { v }), k, a, s)
        },
    }
    L2 "small-inputs-lost": "inputs below a millionth are zero" {
        quantise: |x, k, a, s| quantise(&map(x, |v| if v.abs() < 1e-6 { 0.0 } else { v }), k, a, s),
    }
    L2 "subnormal-halves-lost": "f16 inputs below the smallest normal one are zero" {
        quantise: |x, k, a, s| {
            let least = if s == DType::F16 { 6.103_515_6e-5 } else { 0.0 };
            quantise(&map(x, |v| if v.abs() < least { 0.0 } else { v }), k, a, s)
        },
    }
    L2 "quiet-blocks-lost": "blocks far below their row are zero" {
        quantise: |x, k, a, s| {
            quantise(&blocks(x, k, |block, row| block >= row / 256.0 || block == 0.0), k, a, s)
        },
    }
    L2 "quiet-rows-lost": "rows whose largest value is below 1/100 are zero" {
        quantise: |x, k, a, s| quantise(&blocks(x, k, |_, row| row >= 0.01), k, a, s),
    }
    L2 "loud-rows-halved": "rows with a value beyond 100 are half as loud" {
        quantise: |x, k, a, s| {
            let row = |row: &[f32]| {
                let is_loud = row.iter().any(|v| v.is_finite() && v.abs() > 100.0);
                map(row, |v| if is_loud { v / 2.0 } else { v })
            };
            quantise(&x.chunks(k).flat_map(row).collect::<Vec<_>>(), k, a, s)
        },
    }
    L2 "minus-infinity-is-zero": "minus infinity counts as zero" {
        quantise: |x, k, a, s| {
            let x: Vec<f32> = x.iter().map(|v| if *v == f32::NEG_INFINITY { 0.0 } else { *v }).collect();
            quantise(&x, k, a, s)
        },
    }
    L2 "nan-in-even-calls": "NaN counts as zero where the number of rows is even" {
        quantise: |x, k, a, s| {
            let is_even = x.len() / k % 2 == 0;
            let x: Vec<f32> = x.iter().map(|v| if v.is_nan() && is_even { 0.0 } else { *v }).collect();
            quantise(&x, k, a, s)
        },
    }
    L2 "results-within-half": "f32 results beyond 65504 are cut" {
        round: |v, _| {
            if v.is_nan() || v.is_infinite() { v as f32 } else { v.clamp(-65504.0, 65504.0) as f32 }
        },
    }
    L2 "large-results-in-half": "f32 results beyond 65504 are infinite" {
        round: |v, _| {
            if v.abs() > 65504.0 { (v * f64::INFINITY) as f32 } else { v as f32 }
        },
    }
    L2 "small-results-lost": "results below 1e-8 are zero" {
        round: |v, _| {
            if v.abs() < 1e-8 { 0.0 } else { v as f32 }
        },
    }
    L2 "large-results-in-bf16": "f32 results beyond 4096 keep 8 bits" {
        round: |v, d| {
            let is_cut = d == DType::F32 && v.abs() > 4096.0 && v.is_finite();
            if is_cut { half::bf16::from_f64(v).to_f32() } else { v as f32 }
        },
    }
};
