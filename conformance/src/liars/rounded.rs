//! Mutants that round inputs to FP8 otherwise than they were asked to.
use super::Mutant;
use super::parts::{HONEST, Parts, quantise};
use crate::Level::L2;
use q4_core::formats::e4m3;
use q4_core::formats::fp8::inputs::reach;
use q4_core::{Activations, DType, Fp8Inputs, Result};

/// Quantises with another scale than the one asked for.
fn scaled(
    x: &[f32],
    k: usize,
    a: &Activations,
    source: DType,
    other: fn(Fp8Inputs) -> Fp8Inputs,
) -> Result<Vec<f64>> {
    match a {
        Activations::Fp8(how) => quantise(x, k, &Activations::Fp8(other(*how)), source),
        _ => quantise(x, k, a, source),
    }
}

/// Quantises values that `edit` changes, given the scale that they have.
fn edited(
    x: &[f32],
    k: usize,
    a: &Activations,
    source: DType,
    edit: fn(f32, f32) -> f32,
) -> Result<Vec<f64>> {
    let Activations::Fp8(how) = a else { return quantise(x, k, a, source) };
    let block = |block: &[f32]| {
        let amax = block.iter().fold(0f32, |m, v| m.max(v.abs()));
        let scale = match how {
            Fp8Inputs::Static(scale) => scale.value(),
            _ => amax / e4m3::MAX,
        };
        // What gives the scale stays, so that this does.
        block.iter().map(|v| if v.abs() == amax { *v } else { edit(*v, scale) }).collect::<Vec<_>>()
    };
    let x: Vec<_> = x.chunks(k).flat_map(|row| row.chunks(reach(*how, k))).flat_map(block).collect();
    quantise(&x, k, a, source)
}

pub(super) fn as_it_is(x: &[f32], k: usize, a: &Activations, source: DType) -> Result<Vec<f64>> {
    // What cannot be quantised is refused.
    let right = quantise(x, k, a, source)?;
    let is_fp8 = matches!(a, Activations::Fp8(_));
    Ok(if is_fp8 { x.iter().map(|v| f64::from(*v)).collect() } else { right })
}

pub(super) fn by_row(x: &[f32], k: usize, a: &Activations, source: DType) -> Result<Vec<f64>> {
    scaled(x, k, a, source, |how| if how == Fp8Inputs::PerBlock { Fp8Inputs::PerRow } else { how })
}

pub(super) fn by_block(x: &[f32], k: usize, a: &Activations, source: DType) -> Result<Vec<f64>> {
    scaled(x, k, a, source, |how| if how == Fp8Inputs::PerRow { Fp8Inputs::PerBlock } else { how })
}

pub(super) fn without_the_stored_scale(
    x: &[f32],
    k: usize,
    a: &Activations,
    source: DType,
) -> Result<Vec<f64>> {
    scaled(x, k, a, source, |how| match how {
        Fp8Inputs::Static(_) => Fp8Inputs::PerRow,
        other => other,
    })
}

pub(super) fn ties_up(x: &[f32], k: usize, a: &Activations, source: DType) -> Result<Vec<f64>> {
    // Larger by less than anything but a tie would notice.
    edited(x, k, a, source, |v, _| v * (1.0 + f32::EPSILON))
}

pub(super) fn cut(x: &[f32], k: usize, a: &Activations, source: DType) -> Result<Vec<f64>> {
    edited(x, k, a, source, |v, scale| {
        let cut = f32::from_bits((v / scale).to_bits() & !0xf_ffff) * scale;
        if scale > 0.0 { cut } else { v }
    })
}

pub(super) fn past_its_end(x: &[f32], k: usize, a: &Activations, source: DType) -> Result<Vec<f64>> {
    let Activations::Fp8(Fp8Inputs::Static(scale)) = a else { return quantise(x, k, a, source) };
    let end = e4m3::MAX * scale.value();
    let x: Vec<_> = x.iter().map(|v| if v.abs() > end { 0.0 } else { *v }).collect();
    quantise(&x, k, a, source)
}

pub(super) fn without_subnormals(x: &[f32], k: usize, a: &Activations, source: DType) -> Result<Vec<f64>> {
    edited(x, k, a, source, |v, scale| if v.abs() < e4m3::MIN_NORMAL * scale { 0.0 } else { v })
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L2 "fp8-as-it-is": "FP8 inputs are not rounded" { quantise: as_it_is }
    L2 "fp8-by-row": "FP8 inputs that have a scale per 128 get one a row" { quantise: by_row }
    L2 "fp8-by-block": "FP8 inputs that have a scale a row get one per 128" { quantise: by_block }
    L2 "fp8-without-the-stored-scale": "FP8 inputs with a stored scale get one of their own" {
        quantise: without_the_stored_scale,
    }
    L2 "fp8-ties-up": "FP8 inputs halfway between two codes are rounded away from zero" { quantise: ties_up }
    L2 "fp8-cut": "FP8 inputs lose what their codes have no bits for" { quantise: cut }
    L2 "fp8-past-its-end": "FP8 inputs beyond the range of a stored scale are zero" { quantise: past_its_end }
    L2 "fp8-without-subnormals": "FP8 inputs below the smallest normal code are zero" {
        quantise: without_subnormals,
    }
};
