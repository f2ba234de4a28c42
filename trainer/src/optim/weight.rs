//! The NVFP4 value of a master weight, which the forward pass computes with (straight-through estimator).
//!
//! ModelOpt's rule with a multiplying per-tensor scale. A scale that is a power of two makes every value
//! exact in bf16: a code and a block scale have together at most 6 significant bits. So what is trained with
//! is what a file can hold.
use q4_core::formats::nvfp4::{self, Quantizer};
use q4_core::{Code, DType, Error, GlobalScale, Result, Rule, ThreadPool};
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, PoisonError};

/// How the per-tensor scale is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleChoice {
    /// `amax / 2688`, rounded up to a power of two.
    #[default]
    PowerOfTwo,
    /// `amax / 2688`.
    Free,
}

/// Per-tensor scale of a weight whose largest magnitude is `amax`; 1 for zeros.
pub fn global_scale(choice: ScaleChoice, amax: f32) -> Result<GlobalScale> {
    let free = nvfp4::global_from_amax(Rule::ModelOpt, amax, DType::F32)?;
    match choice {
        ScaleChoice::Free => Ok(free),
        ScaleChoice::PowerOfTwo => GlobalScale::multiply(next_power_of_two(free.value())),
    }
}

/// Quantises `w` `[n, k]` and writes the decoded values to `out`. Returns the per-tensor scale; an export
/// with the same one (amax `2688 g`, exact for a power of two) stores these values.
///
/// # Errors
/// [`Code::ShapeMismatch`] for `k % 16 != 0` or other lengths; [`Code::ValueInvalid`] for NaN and infinity.
pub fn quantize_dequantize(
    w: &[f32],
    n: usize,
    k: usize,
    choice: ScaleChoice,
    out: &mut [f32],
    threads: &ThreadPool,
) -> Result<GlobalScale> {
    if n.checked_mul(k) != Some(w.len()) || out.len() != w.len() || k % nvfp4::BLOCK != 0 {
        return Err(Error::new(Code::ShapeMismatch, "weight to quantise")
            .need(format!("[{n}, {k}] with k % 16 == 0"))
            .have(format!("{} elements in, {} out", w.len(), out.len())));
    }
    let global = global_scale(choice, amax(w, threads))?;
    let quantizer = Quantizer { rule: Rule::ModelOpt, global: Some(global), source: DType::F32 };
    let pieces: Vec<_> = w.chunks(PIECE).zip(out.chunks_mut(PIECE)).map(Mutex::new).collect();
    let failed = Mutex::new(None);
    threads.run(pieces.len(), &|i| {
        let mut piece = pieces[i].lock().unwrap_or_else(PoisonError::into_inner);
        let (w, out) = &mut *piece;
        let (mut codes, mut scales) = ([0; PIECE / 2], [0; PIECE / nvfp4::BLOCK]);
        let (codes, scales) = (&mut codes[..w.len() / 2], &mut scales[..w.len() / nvfp4::BLOCK]);
        match quantizer.quantize_row(w, codes, scales) {
            Ok(()) => nvfp4::dequantize_row(codes, scales, Some(global), out),
            Err(e) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(e),
        }
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => Ok(global),
    }
}

/// Elements of a task.
const PIECE: usize = 16 * 1024;

/// Largest magnitude; infinite if an element is not finite.
fn amax(w: &[f32], threads: &ThreadPool) -> f32 {
    let found = Mutex::new(0f32);
    threads.run(w.len().div_ceil(PIECE), &|i| {
        let piece = &w[i * PIECE..((i + 1) * PIECE).min(w.len())];
        let largest = piece.iter().fold(0f32, |a, x| a.max(if x.is_nan() { f32::INFINITY } else { x.abs() }));
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        *found = found.max(largest);
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The smallest power of two that is not below a positive, finite `x`, and normal.
fn next_power_of_two(x: f32) -> f32 {
    let bits = x.max(f32::MIN_POSITIVE).to_bits();
    f32::from_bits((bits + 0x7f_ffff) & 0xff80_0000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Philox;

    #[test]
    fn powers_of_two_round_up() {
        for (x, y) in
            [(1.0, 1.0), (1.0001, 2.0), (0.75, 1.0), (3e-8, 2f32.powi(-24)), (1e-44, f32::MIN_POSITIVE)]
        {
            assert_eq!(next_power_of_two(x), y, "{x}");
        }
    }

    #[test]
    fn values_are_exact_in_bf16_and_stay_what_they_are() {
        let r = Philox::new(3, 0, 0);
        let (n, k) = (65, 272);
        let w: Vec<f32> = (0..(n * k) as u64).map(|i| r.normal(i) * 0.02).collect();
        let (mut a, mut b) = (vec![0f32; n * k], vec![0f32; n * k]);
        let g = quantize_dequantize(&w, n, k, ScaleChoice::PowerOfTwo, &mut a, &ThreadPool::new(1))
            .expect("quantised");
        assert!(a.iter().all(|x| x.to_bits() & 0xffff == 0), "not a bf16 value");
        let again = quantize_dequantize(&w, n, k, ScaleChoice::PowerOfTwo, &mut b, &ThreadPool::new(3))
            .expect("quantised");
        assert_eq!((g, &a), (again, &b), "threads change the result");
        // As a file with the same scale would be decoded.
        let quantizer = Quantizer { rule: Rule::ModelOpt, global: Some(g), source: DType::F32 };
        let (mut codes, mut scales) = (vec![0; n * k / 2], vec![0; n * k / 16]);
        quantizer.quantize_row(&a, &mut codes, &mut scales).expect("quantised");
        nvfp4::dequantize_row(&codes, &scales, Some(g), &mut b);
        assert_eq!(a, b, "quantising twice changes values");
        let (signal, noise) = w
            .iter()
            .zip(&a)
            .fold((0f64, 0f64), |(s, e), (x, y)| (s + f64::from(*x).powi(2), e + f64::from(x - y).powi(2)));
        assert!((noise / signal).sqrt() < 0.11, "relative error {}", (noise / signal).sqrt());
    }

    #[test]
    fn damage_is_an_error() {
        let pool = ThreadPool::new(1);
        let mut out = [0f32; 32];
        for bad in [f32::NAN, f32::INFINITY] {
            let mut w = [0.5f32; 32];
            w[17] = bad;
            assert_eq!(
                quantize_dequantize(&w, 2, 16, ScaleChoice::Free, &mut out, &pool)
                    .expect_err("refused")
                    .code(),
                Code::ValueInvalid
            );
        }
        assert!(quantize_dequantize(&[0.0; 30], 2, 15, ScaleChoice::Free, &mut [0.0; 30], &pool).is_err());
        let zero =
            quantize_dequantize(&[0.0; 32], 2, 16, ScaleChoice::PowerOfTwo, &mut out, &pool).expect("zeros");
        assert_eq!((zero.value(), out), (1.0, [0.0; 32]));
    }
}
