//! The exact product every backend is measured against: integers where the format makes them, f64 otherwise.
use crate::formats::{e2m1, e4m3, fp8::inputs, int8, nvfp4};
use crate::{
    ActGlobal, ActQuant, Activations, Code, DType, Error, ExecPath, GlobalScale, Result, RowDecoder, wide,
    wide::widen,
};

/// `m` rows of activations in the format a product uses them in.
pub struct Input {
    k: usize,
    /// `[m, k]` as the product sees it.
    wide: Vec<f64>,
    packed: Option<Packed>,
}

/// NVFP4 values as integers: `codes` doubled, `scales` in units of 2^-9, one per 16 codes, [`NAN`] for NaN.
struct Packed {
    codes: Vec<i8>,
    scales: Vec<i32>,
    global: f64,
}

/// Stands for a scale that is not a number.
const NAN: i32 = i32::MAX;

impl Packed {
    /// Takes these bytes instead of what was there.
    fn read(&mut self, codes: &[u8], scales: &[u8], global: Option<GlobalScale>) {
        self.codes.resize(2 * codes.len(), 0);
        for (pair, code) in self.codes.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            *pair = [code & 15, code >> 4].map(|c| e2m1::DOUBLED[usize::from(c)]);
        }
        self.scales.clear();
        let units = |s: &u8| if e4m3::is_nan(*s) { NAN } else { (e4m3::decode(*s) * 512.0) as i32 };
        self.scales.extend(scales.iter().map(units));
        self.global = global.map_or(1.0, GlobalScale::multiplier);
    }
    fn new() -> Self {
        Self { codes: Vec::new(), scales: Vec::new(), global: 1.0 }
    }
}

/// One row of a weight, as the sums of one column of `y` take it.
pub struct Column {
    decoded: Vec<f32>,
    /// The same, as every sum takes them: widened once, not for each row of x.
    wide: Vec<f64>,
    packed: Option<Packed>,
}

impl Column {
    /// Row `row` (`0..n`) of `w`.
    pub fn new(w: &RowDecoder<'_>, row: usize) -> Self {
        let mut out = Self { decoded: vec![0.0; w.k()], wide: vec![0.0; w.k()], packed: None };
        out.read(w, row);
        out
    }
    /// Takes another row, or one of another weight with as many columns.
    pub fn read(&mut self, w: &RowDecoder<'_>, row: usize) {
        w.row(row, &mut self.decoded);
        self.wide.resize(self.decoded.len(), 0.0);
        widen(&mut self.wide, &self.decoded);
        match w.nvfp4_row(row) {
            Some((codes, scales)) => {
                self.packed.get_or_insert_with(Packed::new).read(codes, scales, w.global(row));
            }
            None => self.packed = None,
        }
    }
}

impl Input {
    /// Quantises `x` (`[m, k]`, row-major, of an input of type `source`) as `activations` says.
    ///
    /// # Errors
    /// [`Code::NonFinite`] or [`Code::ValueInvalid`] where `activations` quantise and a value is NaN or
    /// infinite.
    pub fn new(x: &[f32], k: usize, activations: &Activations, source: DType) -> Result<Self> {
        let m = x.len() / k;
        Ok(match activations {
            Activations::Native => Self { k, wide: x.iter().map(|v| f64::from(*v)).collect(), packed: None },
            Activations::Int8 => {
                let (mut q, mut scales, mut wide) = (vec![0; k], vec![0.0; k / 16], vec![0.0; x.len()]);
                for (x, wide) in x.chunks(k).zip(wide.chunks_mut(k)) {
                    int8::quantize_row(x, &mut q, &mut scales)?;
                    for ((wide, q), scale) in wide.chunks_mut(16).zip(q.chunks(16)).zip(&scales) {
                        let scale = f64::from(*scale);
                        wide.iter_mut().zip(q).for_each(|(wide, q)| *wide = f64::from(*q) * scale);
                    }
                }
                Self { k, wide, packed: None }
            }
            Activations::Fp8(how) => {
                let (mut values, mut wide) = (x.to_vec(), vec![0.0; x.len()]);
                for (values, wide) in values.chunks_mut(k).zip(wide.chunks_mut(k)) {
                    let reach = inputs::reach(*how, k);
                    for (values, wide) in values.chunks_mut(reach).zip(wide.chunks_mut(reach)) {
                        let scale = f64::from(inputs::quantize_block(values, *how)?);
                        wide.iter_mut().zip(values).for_each(|(wide, v)| *wide = f64::from(*v) * scale);
                    }
                }
                Self { k, wide, packed: None }
            }
            Activations::Nvfp4(act) => {
                let global = act_global(act, x, source)?;
                let quantizer = nvfp4::Quantizer { rule: act.rule, global, source };
                let (mut codes, mut scales) = (vec![0; x.len() / 2], vec![0; x.len() / 16]);
                for r in 0..m {
                    let (c, s) = (&mut codes[r * k / 2..][..k / 2], &mut scales[r * k / 16..][..k / 16]);
                    quantizer.quantize_row(&x[r * k..][..k], c, s)?;
                }
                Self::from_nvfp4(&codes, &scales, global, k)
            }
        })
    }

    fn from_nvfp4(codes: &[u8], scales: &[u8], global: Option<GlobalScale>, k: usize) -> Self {
        let mut packed = Packed::new();
        packed.read(codes, scales, global);
        let mut wide = vec![0.0; packed.codes.len()];
        for ((wide, codes), scale) in wide.chunks_mut(16).zip(packed.codes.chunks(16)).zip(scales) {
            let scale = f64::from(e4m3::decode(*scale));
            let value = |doubled: &i8| f64::from(*doubled) / 2.0 * scale * packed.global;
            wide.iter_mut().zip(codes).for_each(|(wide, code)| *wide = value(code));
        }
        Self { k, wide, packed: Some(packed) }
    }

    /// Row `r` as the product sees it, `[k]`: exact but for nvfp4, whose per-tensor scale is multiplied in
    /// f64.
    pub fn row(&self, r: usize) -> &[f64] {
        &self.wide[r * self.k..][..self.k]
    }

    /// `(Σ x·w, Σ |x·w|)` of input row `r` and a row of the weight. The first is exact for NVFP4 inputs on
    /// NVFP4 weights up to one f64 rounding, and an f64 sum of exact products otherwise.
    pub fn dot(&self, r: usize, w: &Column) -> (f64, f64) {
        match (&self.packed, &w.packed) {
            (Some(a), Some(b)) => {
                let (codes, scales) = (r * self.k, r * self.k / 16);
                let (total, abs) = fixed_point(&a.codes[codes..], &a.scales[scales..], &b.codes, &b.scales);
                let g = a.global * b.global;
                (total * g, abs * g)
            }
            _ => sums(self.row(r), &w.wide),
        }
    }
}

/// Per-tensor scale of one call's activations, whose type was `source` before they were widened.
///
/// # Errors
/// [`Code::NonFinite`] when the scale comes from the call and a value of it is NaN or infinite.
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

wide! {
    /// Both sums in units of 2^-20: a doubled-code product is at most 144, a scale is a multiple of 2^-9 below
    /// 2^9. A NaN scale has no place on that grid: the sums are NaN, as they are for every other input format.
    fn fixed_point(a: &[i8], sa: &[i32], b: &[i8], sb: &[i32]) -> (f64, f64) {
        let (mut total, mut abs) = (0i128, 0i128);
        let (a, b) = (a.as_chunks::<16>().0, b.as_chunks::<16>().0);
        for (((a, b), sa), sb) in a.iter().zip(b).zip(sa).zip(sb) {
            if *sa == NAN || *sb == NAN {
                return (f64::NAN, f64::NAN);
            }
            // 16 of 144 fit.
            let products: [i16; 16] = std::array::from_fn(|i| i16::from(a[i]) * i16::from(b[i]));
            let scale = i64::from(*sa) * i64::from(*sb);
            total += i128::from(i64::from(products.iter().sum::<i16>()) * scale);
            abs += i128::from(i64::from(products.iter().map(|p| p.abs()).sum::<i16>()) * scale);
        }
        let unit = 0.5f64.powi(20);
        (total as f64 * unit, abs as f64 * unit)
    }
}

wide! {
    /// `(Σ x·w, Σ |x·w|)`.
    fn sums(x: &[f64], w: &[f64]) -> (f64, f64) {
        lanes(x, w)
    }
}

/// Sums that run beside each other: one alone would wait for every addition.
#[inline(always)]
fn lanes(x: &[f64], w: &[f64]) -> (f64, f64) {
    const LANES: usize = 8;
    let (mut total, mut abs) = ([0.0; LANES], [0.0; LANES]);
    let mut add = |x: &[f64; LANES], w: &[f64; LANES]| {
        let products: [f64; LANES] = std::array::from_fn(|i| x[i] * w[i]);
        total.iter_mut().zip(&products).for_each(|(sum, p)| *sum += p);
        abs.iter_mut().zip(&products).for_each(|(sum, p)| *sum += p.abs());
    };
    let ((x, last_x), (w, last_w)) = (x.as_chunks::<LANES>(), w.as_chunks::<LANES>());
    x.iter().zip(w).for_each(|(x, w)| add(x, w));
    let (mut rest_x, mut rest_w) = ([0.0; LANES], [0.0; LANES]);
    rest_x[..last_x.len()].copy_from_slice(last_x);
    rest_w[..last_w.len()].copy_from_slice(last_w);
    add(&rest_x, &rest_w);
    (total.iter().sum(), abs.iter().sum())
}

/// Largest error a backend may make on one output, for f32 accumulation and the final rounding. A kernel adds
/// partial sums no longer than a lane's share: `(k/16 + 32) · 2^-24 · Σ|x·w|`. The GEMM behind a dense copy
/// is free to add all of k in one chain, which costs a rounding each: `(k + 32) · 2^-24 · Σ|x·w|`; the copy
/// itself is rounded to the type of y. Inputs are widened to f32, exactly. Units that multiply 4-bit operands
/// add exact products in an order of their own and may cut where others round, which loses up to a whole unit
/// of the last place each time: `(2k + 32) · 2^-24 · Σ|x·w|`. Weights that a kernel rounds to bf16 are off by
/// [`ROUNDED`] of themselves: `((k/16 + 32) · 2^-24 + ROUNDED) · Σ|x·w|`; what [`Units::Fp8`] multiply has
/// [`CUT`] there.
pub fn bound(path: ExecPath, units: Units, y: DType, k: usize, exact: f64, abs_sum: f64) -> f64 {
    let (chain, copy) = match path {
        _ if units == Units::Fp8 => (k as f64 / 16.0, CUT),
        ExecPath::DequantMatmul => (k as f64, roundoff(y)),
        ExecPath::NativeKernel => (2.0 * k as f64, 0.0),
        ExecPath::FusedRounded => (k as f64 / 16.0, ROUNDED),
        _ => (k as f64 / 16.0, 0.0),
    };
    let accumulate = (chain + 32.0) * 0.5f64.powi(24);
    abs_sum * (accumulate + copy) + exact.abs() * roundoff(y) + smallest(y)
}

/// Most that `fused-rounded` may be off by in a weight, relative: half a unit of bf16 for the weight, half as
/// much for what it is made of.
pub const ROUNDED: f64 = 1.5 / 256.0;

/// Most that FP8 tensor cores may lose, of `Σ|x·w|`. Those of sm_90 align 32 products and the sum before them
/// to the largest, and of each keep 13 bits behind the first one of that; a kernel takes sums out after 128
/// of k. So 4 times 33 terms lose less than `2^-13` of what is at most `Σ|x·w|`. Of ordinary numbers it is a
/// hundredth of that.
pub const CUT: f64 = 4.0 * 33.0 / 8192.0;

/// What adds products up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Units {
    /// f32, or tensor cores that keep all of its bits.
    Full,
    /// FP8 tensor cores.
    Fp8,
}

impl Units {
    /// Those of products with such inputs: FP8 units where a path may round and has bytes on both sides.
    pub fn of(path: ExecPath, inputs: &Activations) -> Self {
        let has_bytes = matches!(inputs, Activations::Fp8(_));
        if path == ExecPath::FusedRounded && has_bytes { Self::Fp8 } else { Self::Full }
    }
}

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
    fn sums_are_the_same_whatever_the_processor_has() {
        let value = |i: usize, m: usize| (i * 7919 % m) as f64 * 0.37 - 150.0;
        for len in (0..40).chain([1027]) {
            let x: Vec<f64> = (0..len).map(|i| value(i, 1013)).collect();
            let w: Vec<f64> = (0..len).map(|i| value(i, 997)).collect();
            assert_eq!(sums(&x, &w), lanes(&x, &w), "{len} terms");
            let plain: f64 = x.iter().zip(&w).map(|(x, w)| x * w).sum();
            assert!((sums(&x, &w).0 - plain).abs() <= 1e-6, "{len} terms");
        }
    }

    #[test]
    fn every_path_has_its_own_chain() {
        let terms = |path| bound(path, Units::Full, DType::F32, 4096, 0.0, 1.0) * 2f64.powi(24);
        let [fused, native, dense, rounded] =
            [ExecPath::FusedDequant, ExecPath::NativeKernel, ExecPath::DequantMatmul, ExecPath::FusedRounded]
                .map(terms);
        let all = [fused.round(), native.round(), dense.round(), rounded.round()];
        assert_eq!(all, [288.0, 8224.0, 4129.0, 98592.0]);
    }

    #[test]
    fn a_nan_scale_is_not_a_zero() {
        let packed = |scale: u8| {
            let mut packed = Packed::new();
            packed.read(&[0x22; 8], &[scale], None);
            packed
        };
        let sum = |a: &Packed, b: &Packed| fixed_point(&a.codes, &a.scales, &b.codes, &b.scales);
        let (one, nan) = (packed(0x38), packed(0x7f));
        assert_eq!(sum(&one, &one), (16.0, 16.0));
        assert!(sum(&one, &nan).0.is_nan());
        assert!(sum(&nan, &one).0.is_nan());
    }
}
