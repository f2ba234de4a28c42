//! Mutants that decode rightly and multiply wrongly.
use super::Mutant;
use super::parts::{HONEST, Parts, quantise};
use crate::Level::{L2, L3, L5};
use half::{bf16, f16};
use q4_core::{ActGlobal, ActQuant, Activations, DType, Result, Rule, TensorView, TensorViewMut};
use std::sync::atomic::Ordering;

const W4A4: Activations = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None });

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L2 "accumulates-in-half": "sums are kept in f16" {
        sum: |x, w| products(x, w).fold(f16::ZERO, |s, p| f16::from_f64(s.to_f64() + p)).to_f64(),
    }
    L2 "accumulates-in-bf16": "sums are kept in bf16" {
        sum: |x, w| products(x, w).fold(bf16::ZERO, |s, p| bf16::from_f64(s.to_f64() + p)).to_f64(),
    }
    L2 "input-in-bf16": "f32 inputs are rounded to bf16" {
        sum: |x, w| x.iter().zip(w).map(|(x, w)| bf16::from_f64(*x).to_f64() * f64::from(*w)).sum(),
    }
    L2 "weights-in-bf16": "decoded weights are rounded to bf16" {
        sum: |x, w| x.iter().zip(w).map(|(x, w)| x * bf16::from_f32(*w).to_f64()).sum(),
    }
    L2 "last-chunk-lost": "what is left of k behind the last 128 is not summed" {
        sum: |x, w| {
            let whole = if x.len() < 128 { x.len() } else { x.len() / 128 * 128 };
            (HONEST.sum)(&x[..whole], &w[..whole])
        },
    }
    L2 "hole-at-512": "products with k a multiple of 512 lose a block" {
        sum: |x, w| {
            let skip = if x.len() % 512 == 0 { 16 } else { 0 };
            (HONEST.sum)(&x[skip..], &w[skip..])
        },
    }
    L2 "last-row-of-x-lost": "the last row of an odd number of rows is zero" {
        extent: |m, n| (if m > 1 { m / 2 * 2 } else { m }, n),
    }
    L2 "rows-above-128": "rows from 129 on are zero" { extent: |m, n| (m.min(128), n) }
    L2 "last-column-of-y-lost": "the last column of an odd number of columns is zero" {
        extent: |m, n| (m, if n > 1 { n / 2 * 2 } else { n }),
    }
    L2 "tail-of-y-lost": "columns behind the last 32 are zero" {
        extent: |m, n| (m, if n > 32 { n / 32 * 32 } else { n }),
    }
    L2 "truncates-bf16": "bf16 results are cut, not rounded" {
        round: |v, dtype| match dtype {
            DType::BF16 => f32::from_bits((v as f32).to_bits() & 0xffff_0000),
            _ => v as f32,
        },
    }
    L2 "swallows-nan": "NaN becomes zero" { round: |v, _| if v.is_nan() { 0.0 } else { v as f32 } }
    L2 "swallows-infinity": "infinity becomes the largest number" {
        round: |v, _| if v.is_nan() { f32::NAN } else { (v as f32).clamp(-60000.0, 60000.0) },
    }
    L2 "quantises-nan": "an input that cannot be quantised is quantised" {
        quantise: |x, k, a, source| {
            let finite: Vec<f32> = x.iter().map(|v| if v.is_finite() { *v } else { 0.0 }).collect();
            quantise(&finite, k, a, source)
        },
    }
    L2 "int8-cut": "int8 inputs are cut, not rounded" { quantise: int8_cut }
    L2 "int8-scale-of-the-row": "int8 inputs have a scale per row instead of per 16" { quantise: int8_by_row }
    L2 "ties-away": "NVFP4 inputs are rounded by another rule: ties away from zero" {
        activations: |a| match a {
            Activations::Nvfp4(ActQuant { global: ActGlobal::None, .. }) => {
                Activations::Nvfp4(ActQuant { rule: Rule::Runtime, global: ActGlobal::None })
            }
            other => other,
        },
    }
    L2 "input-scale-dropped": "the calibrated scale of the input is not used" {
        activations: |a| match a {
            Activations::Nvfp4(q) => Activations::Nvfp4(ActQuant { global: ActGlobal::None, ..q }),
            other => other,
        },
    }
    L2 "amax-of-the-row": "the scale of a call is taken from each row by itself" {
        quantise: |x, k, a, source| {
            let rows = x.chunks(k).map(|row| quantise(row, k, a, source)).collect::<Result<Vec<_>>>()?;
            Ok(rows.concat())
        },
    }
    L2 "scales-of-x-shifted": "each block of a quantised input takes the scale of the next" {
        quantise: |x, k, a, source| {
            let mut q = quantise(x, k, a, source)?;
            if *a != Activations::Native && k > 16 {
                let moved: Vec<f64> =
                    (0..q.len()).map(|i| q[i] * amax(x, k, i, 1) / amax(x, k, i, 0)).collect();
                q = moved;
            }
            Ok(q)
        },
    }
    L2 "ignores-stride-of-x": "rows of x are read one behind the other" {
        read: |x, r, out| {
            let k = out.len();
            (0..k).for_each(|i| out[i] = load(x, r * k + i));
            Ok(())
        },
    }
    L2 "ignores-stride-of-y": "rows of y are written one behind the other" {
        after: |_, _, y| {
            let (rows, cols, ld) = shape(&y.as_view());
            for r in 1..rows {
                for c in 0..cols {
                    copy_element(y, (r * ld + c) as isize, (r * cols + c) as isize);
                }
            }
        },
    }
    L2 "writes-past-the-end": "one element behind y is written" {
        after: |_, _, y| {
            let (rows, cols, ld) = shape(&y.as_view());
            copy_element(y, 0, ((rows - 1) * ld + cols) as isize);
        },
    }
    L2 "writes-before-the-start": "one element before y is written" {
        after: |_, _, y| copy_element(y, 0, -1),
    }
    L2 "writes-into-gaps": "whole vectors are stored, over the gap behind a row" {
        after: |_, _, y| {
            let (rows, cols, ld) = shape(&y.as_view());
            if ld > cols && rows > 1 {
                copy_element(y, 0, cols as isize);
            }
        },
    }
    L2 "modifies-the-input": "x is used as scratch" { after: |_, x, _| spoil(x) }
    L2 "adds-to-y": "results are added to what y held" {
        before: |kept, y| {
            kept.last.store(u64::from(load(&y.as_view(), 0).to_bits()), Ordering::Relaxed);
            Ok(())
        },
        after: |kept, _, y| {
            let held = f32::from_bits(kept.last.load(Ordering::Relaxed) as u32);
            if let Ok(row) = y.row_mut::<f32>(0) {
                row[0] += held;
            }
        },
    }
    L3 "gradient-without-global": "the backward product drops the per-tensor scale" {
        backward_row: |row, at| {
            if let Some(g) = at.global {
                row.iter_mut().for_each(|w| *w = (f64::from(*w) / g.multiplier()) as f32);
            }
        },
    }
    L3 "gradient-without-the-last-row": "the last out feature has no gradient" {
        backward_row: |row, at| {
            if at.row + 1 == at.n {
                row.fill(0.0);
            }
        },
    }
    L3 "gradient-reversed": "columns of the gradient are in another order within blocks" {
        backward_row: |row, _| row.chunks_mut(2).for_each(<[f32]>::reverse),
    }
    L3 "gradient-in-half": "the backward product multiplies by rounded weights" {
        backward_row: |row, _| row.iter_mut().for_each(|w| *w = f16::from_f32(*w).to_f32()),
    }
    L5 "w4a16-as-w4a8": "native inputs are rounded to int8" {
        activations: |a| if a == Activations::Native { Activations::Int8 } else { a },
    }
    L5 "w4a16-as-w4a4": "native inputs are rounded to NVFP4" {
        activations: |a| if a == Activations::Native { W4A4 } else { a },
    }
    L5 "w4a8-as-w4a16": "int8 is asked for and native inputs are used" {
        activations: |a| if a == Activations::Int8 { Activations::Native } else { a },
    }
    L5 "w4a8-as-w4a4": "int8 is asked for and NVFP4 is used" {
        activations: |a| if a == Activations::Int8 { W4A4 } else { a },
    }
    L5 "w4a4-as-w4a16": "NVFP4 is asked for and native inputs are used" {
        activations: |a| if matches!(a, Activations::Nvfp4(_)) { Activations::Native } else { a },
    }
    L5 "w4a4-as-w4a8": "NVFP4 is asked for and int8 is used" {
        activations: |a| if matches!(a, Activations::Nvfp4(_)) { Activations::Int8 } else { a },
    }
};

fn products<'a>(x: &'a [f64], w: &'a [f32]) -> impl Iterator<Item = f64> + 'a {
    x.iter().zip(w).map(|(x, w)| x * f64::from(*w))
}

fn int8_cut(x: &[f32], k: usize, a: &Activations, source: DType) -> Result<Vec<f64>> {
    let right = quantise(x, k, a, source)?;
    if *a != Activations::Int8 {
        return Ok(right);
    }
    let step = |i: usize| f64::from(amax(x, k, i, 0) as f32 / 127.0);
    Ok((0..x.len())
        .map(|i| if step(i) == 0.0 { 0.0 } else { (f64::from(x[i]) / step(i)).trunc() * step(i) })
        .collect())
}

fn int8_by_row(x: &[f32], k: usize, a: &Activations, source: DType) -> Result<Vec<f64>> {
    let right = quantise(x, k, a, source)?;
    if *a != Activations::Int8 {
        return Ok(right);
    }
    let step = |row: &[f32]| f64::from(row.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0);
    let rounded = |row: &[f32]| -> Vec<f64> {
        let s = step(row);
        row.iter().map(|v| if s == 0.0 { 0.0 } else { (f64::from(*v) / s).round_ties_even() * s }).collect()
    };
    Ok(x.chunks(k).flat_map(rounded).collect())
}

/// Amax of the block of element `i`, or of the block `ahead` of it in its row.
fn amax(x: &[f32], k: usize, i: usize, ahead: usize) -> f64 {
    let (row, block) = (i / k, (i % k / 16 + ahead) % (k / 16));
    let amax = x[row * k + 16 * block..][..16].iter().fold(0f32, |m, v| m.max(v.abs()));
    f64::from(if amax == 0.0 { 1.0 } else { amax })
}

fn shape(y: &TensorView<'_>) -> (usize, usize, usize) {
    y.as_matrix().unwrap_or((1, 1, 1))
}

/// Element `i` of a view's memory, counted from its first and widened; gaps count.
fn load(x: &TensorView<'_>, i: usize) -> f32 {
    let at = i * x.dtype().size();
    if at + x.dtype().size() > x.nbytes() {
        return f32::NAN;
    }
    // SAFETY: inside the bytes of the view, which hold elements of its type or poison; every bit pattern is a
    // value.
    unsafe {
        let p = x.as_ptr().cast::<u8>().add(at);
        match x.dtype() {
            DType::F16 => p.cast::<f16>().read().to_f32(),
            DType::BF16 => p.cast::<bf16>().read().to_f32(),
            _ => p.cast::<f32>().read(),
        }
    }
}

/// Copies element `from` of y, counted from its first, to `to`, which may be a few outside.
fn copy_element(y: &mut TensorViewMut<'_>, from: isize, to: isize) {
    let size = y.as_view().dtype().size();
    let start = y.as_mut_ptr().cast::<u8>();
    // SAFETY: `from` is an element; `to` is one or lies within the guards that the suite puts around every
    // buffer it lends, which is the only place where these backends run.
    unsafe {
        std::ptr::copy(start.offset(from * size as isize), start.offset(to * size as isize), size);
    }
}

fn spoil(x: &TensorView<'_>) {
    let first = x.as_ptr().cast_mut().cast::<u8>();
    // SAFETY: the byte is part of a buffer that the suite owns and reads again only after the call; see
    // `copy_element`.
    unsafe { first.write_volatile(first.read_volatile() ^ 1) }
}
