//! The exact product every backend is measured against: integers where the format makes them, f64 otherwise.
use crate::formats::{e2m1, e4m3, int8, nvfp4};
use crate::{
    ActGlobal, ActQuant, Activations, Code, DType, Error, ExecPath, GlobalScale, Result, RowDecoder,
};

/// `m` rows of activations in the format a product uses them in.
pub struct Input {
    k: usize,
    form: Form,
}

enum Form {
    Native(Vec<f32>),
    Int8 { q: Vec<i8>, scales: Vec<f32> },
    Nvfp4 { codes: Vec<u8>, scales: Vec<u8>, global: Option<GlobalScale> },
}

impl Input {
    /// Quantises `x` (`[m, k]`, row-major, of an input of type `source`) as `activations` says.
    pub fn new(x: &[f32], k: usize, activations: &Activations, source: DType) -> Result<Self> {
        let m = x.len() / k;
        let form = match activations {
            Activations::Native => Form::Native(x.to_vec()),
            Activations::Int8 => {
                let (mut q, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / 16]);
                for r in 0..m {
                    int8::quantize_row(
                        &x[r * k..][..k],
                        &mut q[r * k..][..k],
                        &mut scales[r * k / 16..][..k / 16],
                    )?;
                }
                Form::Int8 { q, scales }
            }
            Activations::Nvfp4(act) => {
                let global = act_global(act, x, source)?;
                let quantizer = nvfp4::Quantizer { rule: act.rule, global, source };
                let (mut codes, mut scales) = (vec![0; x.len() / 2], vec![0; x.len() / 16]);
                for r in 0..m {
                    let (c, s) = (&mut codes[r * k / 2..][..k / 2], &mut scales[r * k / 16..][..k / 16]);
                    quantizer.quantize_row(&x[r * k..][..k], c, s)?;
                }
                Form::Nvfp4 { codes, scales, global }
            }
        };
        Ok(Self { k, form })
    }

    /// Packed codes, scales and per-tensor scale that were stored, for products of recorded operands.
    pub fn from_nvfp4(codes: Vec<u8>, scales: Vec<u8>, global: Option<GlobalScale>, k: usize) -> Self {
        Self { k, form: Form::Nvfp4 { codes, scales, global } }
    }

    /// Row `r` as the product sees it, `[k]`: exact but for nvfp4, whose per-tensor scale is multiplied in f64.
    pub fn row(&self, r: usize, out: &mut [f64]) {
        let k = self.k;
        for (i, out) in out.iter_mut().enumerate() {
            let at = r * k + i;
            *out = match &self.form {
                Form::Native(x) => f64::from(x[at]),
                Form::Int8 { q, scales } => f64::from(q[at]) * f64::from(scales[at / 16]),
                Form::Nvfp4 { codes, scales, global } => {
                    let code = codes[at / 2] >> (4 * (at % 2)) & 15;
                    let scale = f64::from(e4m3::decode(scales[at / 16]));
                    f64::from(e2m1::decode(code)) * scale * global.map_or(1.0, GlobalScale::multiplier)
                }
            };
        }
    }

    /// `(Σ x·w, Σ |x·w|)` of input row `r` and weight row `row`. The first is exact for NVFP4 inputs on NVFP4 weights
    /// up to one f64 rounding, and an f64 sum of exact products otherwise.
    pub fn dot(&self, r: usize, w: &RowDecoder<'_>, row: usize, decoded: &[f32]) -> (f64, f64) {
        let k = self.k;
        match &self.form {
            Form::Native(x) => sums(x[r * k..][..k].iter().map(|&v| f64::from(v)), decoded),
            Form::Int8 { q, scales } => {
                let x = (0..k).map(|i| f64::from(q[r * k + i]) * f64::from(scales[(r * k + i) / 16]));
                sums(x, decoded)
            }
            Form::Nvfp4 { codes, scales, global } => {
                let (a, sa) = (&codes[r * k / 2..][..k / 2], &scales[r * k / 16..][..k / 16]);
                let ga = global.map_or(1.0, GlobalScale::multiplier);
                match w.nvfp4_row(row) {
                    Some((b, sb)) => {
                        let (total, abs) = fixed_point(a, sa, b, sb);
                        let g = ga * w.global(row).map_or(1.0, GlobalScale::multiplier);
                        (total * g, abs * g)
                    }
                    None => {
                        let value = |i: usize| f64::from(e2m1::decode(a[i / 2] >> (4 * (i % 2)) & 15));
                        let x = (0..k).map(|i| value(i) * f64::from(e4m3::decode(sa[i / 16])) * ga);
                        sums(x, decoded)
                    }
                }
            }
        }
    }
}

/// Per-tensor scale of one call's activations, whose type was `source` before they were widened.
pub fn act_global(act: &ActQuant, x: &[f32], source: DType) -> Result<Option<GlobalScale>> {
    match act.global {
        ActGlobal::None => Ok(None),
        ActGlobal::Static(g) => Ok(Some(g)),
        ActGlobal::PerCall => {
            let amax = x.iter().fold(0f32, |a, v| if v.abs() > a || v.is_nan() { v.abs() } else { a });
            if !amax.is_finite() {
                return Err(Error::new(Code::NonFinite, "activations of a product")
                    .need("finite values")
                    .have(amax.to_string()));
            }
            nvfp4::global_from_amax(act.rule, amax, source).map(Some)
        }
    }
}

/// Both sums in units of 2^-20: a doubled-code product is at most 144, a scale is a multiple of 2^-9 below 2^9.
/// A NaN scale has no place on that grid: the sums are NaN, as they are for every other input format.
fn fixed_point(a: &[u8], sa: &[u8], b: &[u8], sb: &[u8]) -> (f64, f64) {
    if sa.iter().chain(sb).any(|s| e4m3::is_nan(*s)) {
        return (f64::NAN, f64::NAN);
    }
    let (mut total, mut abs) = (0i128, 0i128);
    for block in 0..sa.len() {
        let (mut dot, mut mag) = (0i64, 0i64);
        for (x, y) in a[block * 8..][..8].iter().zip(&b[block * 8..][..8]) {
            for shift in [0, 4] {
                let p = i64::from(e2m1::DOUBLED[usize::from(x >> shift & 15)])
                    * i64::from(e2m1::DOUBLED[usize::from(y >> shift & 15)]);
                dot += p;
                mag += p.abs();
            }
        }
        let scale = (e4m3::decode(sa[block]) * 512.0) as i64 * (e4m3::decode(sb[block]) * 512.0) as i64;
        total += i128::from(dot * scale);
        abs += i128::from(mag * scale);
    }
    let unit = 0.5f64.powi(20);
    (total as f64 * unit, abs as f64 * unit)
}

fn sums(x: impl Iterator<Item = f64>, w: &[f32]) -> (f64, f64) {
    x.zip(w).fold((0.0, 0.0), |(s, a), (x, &w)| {
        let p = x * f64::from(w);
        (s + p, a + p.abs())
    })
}

/// Largest error a backend may make on one output, for f32 accumulation and the final rounding. A kernel adds partial sums
/// no longer than a lane's share: `(k/16 + 32) · 2^-24 · Σ|x·w|`. The GEMM behind a dense copy is free to add all of k in
/// one chain, which costs a rounding each: `(k + 32) · 2^-24 · Σ|x·w|`; the copy itself is rounded to the type of y. Inputs
/// are widened to f32, exactly. Units that multiply 4-bit operands add exact products in an order of their own and may cut
/// where others round, which loses up to a whole unit of the last place each time: `(2k + 32) · 2^-24 · Σ|x·w|`. Weights that a
/// kernel rounds to bf16 are off by [`ROUNDED`] of themselves: `((k/16 + 32) · 2^-24 + ROUNDED) · Σ|x·w|`.
pub fn bound(path: ExecPath, y: DType, k: usize, exact: f64, abs_sum: f64) -> f64 {
    let (chain, copy) = match path {
        ExecPath::DequantMatmul => (k as f64, roundoff(y)),
        ExecPath::NativeKernel => (2.0 * k as f64, 0.0),
        ExecPath::FusedRounded => (k as f64 / 16.0, ROUNDED),
        _ => (k as f64 / 16.0, 0.0),
    };
    let accumulate = (chain + 32.0) * 0.5f64.powi(24);
    abs_sum * (accumulate + copy) + exact.abs() * roundoff(y) + smallest(y)
}

/// Most that `fused-rounded` may be off by in a weight, relative: half a unit of bf16 for the weight, half as much for what it is
/// made of.
pub const ROUNDED: f64 = 1.5 / 256.0;

/// Half a unit in the last place of 1.0.
pub fn roundoff(d: DType) -> f64 {
    match d {
        DType::F16 => 0.5f64.powi(11),
        DType::BF16 => 0.5f64.powi(8),
        _ => 0.5f64.powi(24),
    }
}

fn smallest(d: DType) -> f64 {
    match d {
        DType::F16 => 0.5f64.powi(25),
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_its_own_chain() {
        let terms = |path| bound(path, DType::F32, 4096, 0.0, 1.0) * 2f64.powi(24);
        let [fused, native, dense, rounded] =
            [ExecPath::FusedDequant, ExecPath::NativeKernel, ExecPath::DequantMatmul, ExecPath::FusedRounded]
                .map(terms);
        let all = [fused.round(), native.round(), dense.round(), rounded.round()];
        assert_eq!(all, [288.0, 8224.0, 4129.0, 98592.0]);
    }

    #[test]
    fn a_nan_scale_is_not_a_zero() {
        let (codes, one, nan) = ([0x22; 8], [0x38], [0x7f]);
        assert_eq!(fixed_point(&codes, &one, &codes, &one), (16.0, 16.0));
        assert!(fixed_point(&codes, &one, &codes, &nan).0.is_nan());
        assert!(fixed_point(&codes, &nan, &codes, &one).0.is_nan());
    }
}
