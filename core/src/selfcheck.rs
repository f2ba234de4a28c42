//! The gate before a backend's first product of a shape: the prepared weight itself, called as a model will
//! call it, and a sample of its outputs compared with the oracle.
//!
//! A library cannot tell these calls from use: names, shapes, bytes and the largest number of rows are the
//! model's.
mod group;

use crate::oracle::{Column, Input, Units, act_global, bound};
use crate::stage::Staged;
use crate::{
    ActGlobal, ActQuant, Activations, Code, DType, Device, Error, ExecContext, ExecPath, LinearSpec,
    PreparedWeight, Q4Backend, Q4Weight, Result, RowDecoder, Selection, TensorView, TensorViewMut,
    ThreadPool,
};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Passes that earlier processes of this build saw on this machine. A kind it does not vouch for is checked.
pub trait Passes: Send + Sync {
    /// Whether `backend` passed on this kind of product.
    fn recall(&self, backend: &str, kind: &str) -> bool;
    /// It passed just now.
    fn remember(&self, backend: &str, kind: &str);
}

/// Verdicts of this process, one per kind of product.
#[derive(Default)]
pub(crate) struct SelfChecks {
    verdicts: Mutex<BTreeMap<String, Result<()>>>,
    earlier: Option<Box<dyn Passes>>,
    skip: bool,
    skips: AtomicU64,
}

impl SelfChecks {
    pub(crate) fn skipped() -> Self {
        Self { skip: true, ..Self::default() }
    }
    pub(crate) fn remembering(passes: Box<dyn Passes>) -> Self {
        Self { earlier: Some(passes), ..Self::default() }
    }
    pub(crate) fn skips(&self) -> u64 {
        self.skips.load(Ordering::Relaxed)
    }

    /// Gives `prepared`, made of `w`, back unless it, or another weight of its kind and shape, computes
    /// wrongly.
    pub(crate) fn require(
        &self,
        s: &Selection,
        spec: &LinearSpec,
        w: &Q4Weight<'_>,
        prepared: Arc<dyn PreparedWeight>,
        threads: &ThreadPool,
    ) -> Result<Arc<dyn PreparedWeight>> {
        if self.skip {
            self.skips.fetch_add(1, Ordering::Relaxed);
            return Ok(prepared);
        }
        let kind = kind(s, spec);
        let here = format!("{kind} {}", spec.max_m);
        let mut verdicts = self.verdicts.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(verdict) = verdicts.get(&here) {
            return verdict.clone().map(|()| prepared);
        }
        // The length of a prompt decides how many rows a call may have: one pass for all of about as many.
        let kind = format!("{kind} of {} rows", spec.max_m.next_power_of_two());
        let backend = &*s.backend.descriptor().name;
        if self.earlier.as_ref().is_some_and(|e| e.recall(backend, &kind)) {
            tracing::debug!(%kind, "self-check remembered");
            verdicts.insert(here, Ok(()));
            return Ok(prepared);
        }
        let _span = tracing::debug_span!("self-check", %kind).entered();
        let start = Instant::now();
        let (prepared, ratio) = staged(&*s.backend, prepared, spec.device, |p| check(p, w, spec, threads))?;
        tracing::debug!(%kind, ?ratio, took = ?start.elapsed(), "self-check");
        if let (Some(earlier), Ok(_)) = (&self.earlier, &ratio) {
            earlier.remember(backend, &kind);
        }
        let verdict = ratio.map(drop);
        verdicts.insert(here, verdict.clone());
        verdict.map(|()| prepared)
    }
}

/// Runs `job` on a weight that takes operands in host memory, wherever its products run.
fn staged<R>(
    backend: &dyn Q4Backend,
    prepared: Arc<dyn PreparedWeight>,
    device: Device,
    job: impl FnOnce(&dyn PreparedWeight) -> R,
) -> Result<(Arc<dyn PreparedWeight>, R)> {
    if device == Device::Cpu {
        let result = job(&*prepared);
        return Ok((prepared, result));
    }
    let staged = Staged::new(prepared, device, backend.memory(device)?);
    let result = job(&staged);
    Ok((staged.into_inner(), result))
}

/// What one check stands for: everything that chooses code, shapes included, and no calibrated number.
fn kind(s: &Selection, spec: &LinearSpec) -> String {
    let d = s.backend.descriptor();
    let activations = match spec.activations {
        Activations::Nvfp4(ActQuant { rule, global }) => {
            let global = match global {
                ActGlobal::None => "none".into(),
                ActGlobal::PerCall => "per-call".into(),
                ActGlobal::Static(g) => format!("static {:?}", g.convention()),
            };
            format!("nvfp4 ({}, {global})", rule.as_str())
        }
        Activations::Fp8(inputs) => format!("fp8 ({})", inputs.as_str()),
        other => other.as_str().to_owned(),
    };
    let rows: Vec<_> = spec.segments.iter().map(|s| s.rows.to_string()).collect();
    format!(
        "{} {} {} {:?} {activations} {} {} {} [{}, {}]",
        d.name,
        d.version,
        s.path,
        spec.schema,
        spec.x,
        spec.y,
        spec.device,
        rows.join("+"),
        spec.k
    )
}

/// Outputs that are compared in each call.
const SAMPLES: usize = 64;
/// Rows of the input that they are spread over.
const INPUTS: usize = 8;

/// Calls `prepared`, which was made of `w` for `spec` and takes operands in host memory, with one row, with a
/// few, and with as many as a prompt has or as are cheap, never more than `spec.max_m`. Every output must be
/// written, and those of a sample of rows must be the oracle's. Returns the largest error over its bound, at
/// most 1, or the element that broke it.
///
/// # Errors
/// [`Code::SelfCheckFailed`] with the element that was not written or is off by more than its bound,
/// [`Code::OutOfMemory`] for more scratch than the machine has free, and those of the calls.
pub fn check(
    prepared: &dyn PreparedWeight,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    threads: &ThreadPool,
) -> Result<f64> {
    let path = prepared.info().path;
    let decoder = RowDecoder::new(w)?;
    let (n, k) = (decoder.n(), decoder.k());
    let columns = columns(spec);
    let weights: Vec<_> = columns.iter().map(|row| Column::new(&decoder, *row)).collect();
    let calls = calls(path, n * k, spec.max_m);
    let most = calls.last().copied().unwrap_or(1);
    let x: Vec<f32> = (0..most * k).map(|i| (noise(i as u64) - 0.5) * 4.0).collect();
    let x = IoBuffer::new(spec.x, &x);
    let values = x.to_f32();
    let bytes = calls.iter().map(|m| prepared.workspace(*m)).max().unwrap_or(0);
    let mut scratch = Room::of(bytes, &prepared.info().backend)?;
    let mut worst = 0f64;
    for m in calls {
        let mut cx = ExecContext::cpu(threads);
        cx.workspace = Some(scratch.view()?);
        let mut y = IoBuffer::poisoned(spec.y, m * n);
        prepared.forward(x.rows(m, k)?, y.view_mut(m, n)?, &mut cx)?;
        let fail = |what: String| {
            let backend = &prepared.info().backend;
            let what = format!("{backend} via {path}, {m} of at most {} rows: {what}", spec.max_m);
            Error::new(Code::SelfCheckFailed, what)
                .fix("do not use this backend on this machine; please report it with `q4 diagnose --json`")
        };
        if let Some(at) = y.unwritten() {
            return Err(fail(format!("y[{}, {}] was not written", at / n, at % n)));
        }
        let (inputs, units) = (inputs(m), Units::of(path, &spec.activations));
        let input = quantised(&values[..m * k], &inputs, k, spec)?;
        for (i, (column, weight)) in columns.iter().zip(&weights).enumerate() {
            let part = i % inputs.len();
            let (exact, abs) = input.dot(part, weight);
            let (got, limit) = (y.at(inputs[part] * n + column), bound(path, units, spec.y, k, exact, abs));
            let ratio = (got - exact).abs() / limit;
            // A weight that is not finite, or a result that y cannot hold: no number is right.
            let is_lost = !got.is_finite()
                && (exact.abs() + limit).partial_cmp(&largest(spec.y)).is_none_or(|o| o.is_ge());
            if !is_lost && (ratio.is_nan() || ratio > 1.0) {
                let (r, schema, act) = (inputs[part], spec.schema, spec.activations);
                return Err(fail(format!("y[{r}, {column}] of {schema} with {act} activations is wrong"))
                    .need(format!("{exact:e} within {limit:e}"))
                    .have(format!("{got:e}")));
            }
            worst = if is_lost { worst } else { worst.max(ratio) };
        }
    }
    Ok(worst)
}

/// Scratch of checks in host memory.
struct Room {
    bytes: Vec<u8>,
    len: usize,
}

impl Room {
    const ALIGN: usize = 256;

    /// So many bytes, or [`Code::OutOfMemory`]: whoever asks for more than there is, is refused before the
    /// machine is.
    fn of(len: usize, backend: &str) -> Result<Self> {
        let free = crate::memory::available().unwrap_or(u64::MAX);
        if len as u64 > free {
            return Err(Error::new(Code::OutOfMemory, format!("scratch of {backend} for one product"))
                .need(crate::memory::human(len as u64))
                .have(crate::memory::human(free)));
        }
        Ok(Self { bytes: vec![0; len + Self::ALIGN], len })
    }

    fn view(&mut self) -> Result<TensorViewMut<'_>> {
        let at = self.bytes.as_ptr().align_offset(Self::ALIGN);
        TensorViewMut::of(&mut self.bytes[at..at + self.len], &[self.len])
    }
}

/// Bytes that [`check`] takes of the host for a weight of `spec`, the product's own scratch aside.
pub fn bytes(spec: &LinearSpec, path: ExecPath) -> u64 {
    let (n, k) = (spec.n(), spec.k);
    let m = calls(path, n * k, spec.max_m).last().copied().unwrap_or(1);
    // The input as f32, in its type, and widened again; every output; samples of either in f64 with their
    // codes; and scales of the whole weight in another order.
    let input = m * k * (8 + spec.x.size());
    (input + m * n * spec.y.size() + (SAMPLES + 2 * INPUTS) * k * 16 + n * k / 8) as u64
}

/// Multiply-accumulates a call may take: a start must not wait for proofs.
const fn affordable(path: ExecPath) -> usize {
    match path {
        ExecPath::Reference => 1 << 22,
        _ => 1 << 30,
    }
}

/// Numbers of rows that are tried, ascending: those of a decode step, an odd number, a short prompt and the
/// longest that is allowed and cheap. A model's smallest product has the longest.
fn calls(path: ExecPath, cost: usize, max_m: usize) -> Vec<usize> {
    const PROMPT: usize = 17;
    let (most, cost) = (affordable(path), cost.max(1));
    let least = if PROMPT * cost <= 2 * most { PROMPT } else { 1 };
    let most = (most / cost).max(least).min(max_m.max(1));
    let mut all = vec![1, 3, PROMPT, most];
    all.retain(|m| *m <= most);
    all.sort_unstable();
    all.dedup();
    all
}

/// Rows of the weight that are compared: the first and last of every segment, and others anywhere.
fn columns(spec: &LinearSpec) -> Vec<usize> {
    let (n, mut start) = (spec.n(), 0);
    let mut all = Vec::new();
    for segment in &spec.segments {
        all.extend([start, start + segment.rows - 1]);
        start += segment.rows;
    }
    let seed = mix(n as u64) ^ spec.k as u64;
    all.extend((0..SAMPLES as u64).map(|i| (mix(seed ^ i << 32) % n as u64) as usize));
    all.truncate(SAMPLES.max(2 * spec.segments.len()));
    all.sort_unstable();
    all.dedup();
    all
}

/// Rows of the input that are compared: the first, the last, and others anywhere.
fn inputs(m: usize) -> Vec<usize> {
    let mut all = vec![0, m - 1];
    all.extend((2..INPUTS as u64).map(|i| (mix(i) % m as u64) as usize));
    all.sort_unstable();
    all.dedup();
    all
}

/// Those rows of `x` as the product uses them. A scale of the whole call comes from the whole call.
fn quantised(x: &[f32], rows: &[usize], k: usize, spec: &LinearSpec) -> Result<Input> {
    let mut activations = spec.activations;
    if let Activations::Nvfp4(act) = &mut activations
        && let Some(global) = act_global(act, x, spec.x)?
    {
        act.global = ActGlobal::Static(global);
    }
    let some: Vec<f32> = rows.iter().flat_map(|r| &x[r * k..][..k]).copied().collect();
    Input::new(&some, k, &activations, spec.x)
}

/// Largest finite value of a type.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::MAX.to_f64(),
        DType::BF16 => bf16::MAX.to_f64(),
        _ => f64::from(f32::MAX),
    }
}

/// Quiet NaNs with a payload, of f32, f16 and bf16.
const POISON: (u32, u16, u16) = (0x7fe5_5a5a, 0x7f5a, 0x7fe5);

/// Owned values of an io dtype.
pub enum IoBuffer {
    /// f32.
    F32(Vec<f32>),
    /// f16.
    F16(Vec<f16>),
    /// bf16.
    BF16(Vec<bf16>),
}

impl IoBuffer {
    /// `values` rounded to `dtype` (f32 for anything that is not an io dtype).
    pub fn new(dtype: DType, values: &[f32]) -> Self {
        match dtype {
            DType::F16 => Self::F16(values.iter().map(|&v| f16::from_f32(v)).collect()),
            DType::BF16 => Self::BF16(values.iter().map(|&v| bf16::from_f32(v)).collect()),
            _ => Self::F32(values.to_vec()),
        }
    }
    /// `len` times a NaN that no product makes: what still has its bits was not written.
    fn poisoned(dtype: DType, len: usize) -> Self {
        match dtype {
            DType::F16 => Self::F16(vec![f16::from_bits(POISON.1); len]),
            DType::BF16 => Self::BF16(vec![bf16::from_bits(POISON.2); len]),
            _ => Self::F32(vec![f32::from_bits(POISON.0); len]),
        }
    }
    /// The first element that is poison yet.
    fn unwritten(&self) -> Option<usize> {
        match self {
            Self::F32(v) => v.iter().position(|v| v.to_bits() == POISON.0),
            Self::F16(v) => v.iter().position(|v| v.to_bits() == POISON.1),
            Self::BF16(v) => v.iter().position(|v| v.to_bits() == POISON.2),
        }
    }
    fn at(&self, i: usize) -> f64 {
        match self {
            Self::F32(v) => f64::from(v[i]),
            Self::F16(v) => v[i].to_f64(),
            Self::BF16(v) => v[i].to_f64(),
        }
    }
    /// The first `rows` rows of `cols`.
    fn rows(&self, rows: usize, cols: usize) -> Result<TensorView<'_>> {
        match self {
            Self::F32(v) => TensorView::of(&v[..rows * cols], &[rows, cols]),
            Self::F16(v) => TensorView::of(&v[..rows * cols], &[rows, cols]),
            Self::BF16(v) => TensorView::of(&v[..rows * cols], &[rows, cols]),
        }
    }
    /// As a `[rows, cols]` view.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for more elements than there are.
    pub fn view(&self, rows: usize, cols: usize) -> Result<TensorView<'_>> {
        match self {
            Self::F32(v) => TensorView::of(v, &[rows, cols]),
            Self::F16(v) => TensorView::of(v, &[rows, cols]),
            Self::BF16(v) => TensorView::of(v, &[rows, cols]),
        }
    }
    /// As a writable `[rows, cols]` view.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn view_mut(&mut self, rows: usize, cols: usize) -> Result<TensorViewMut<'_>> {
        match self {
            Self::F32(v) => TensorViewMut::of(v, &[rows, cols]),
            Self::F16(v) => TensorViewMut::of(v, &[rows, cols]),
            Self::BF16(v) => TensorViewMut::of(v, &[rows, cols]),
        }
    }
    /// Widened.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(v) => v.clone(),
            Self::F16(v) => v.iter().map(|v| v.to_f32()).collect(),
            Self::BF16(v) => v.iter().map(|v| v.to_f32()).collect(),
        }
    }
}

/// Counter-based: the value of an index never depends on how many were drawn before.
fn mix(i: u64) -> u64 {
    let mut z = i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Uniform in `[0, 1)`.
fn noise(i: u64) -> f32 {
    (mix(i) >> 40) as f32 / (1u32 << 24) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_those_of_a_model_as_far_as_they_are_cheap() {
        let fused = |cost, max_m| calls(ExecPath::FusedDequant, cost, max_m);
        assert_eq!(fused(6144 * 1024, 512), [1, 3, 17, 170], "gate and up of 0.6B");
        assert_eq!(fused(1024 * 2048, 512), [1, 3, 17, 512], "o of 0.6B");
        assert_eq!(fused(24_576 * 4096, 512), [1, 3, 17], "gate and up of 8B");
        assert_eq!(fused(151_936 * 1024, 512), [1, 3, 6], "a head of 156 million weights");
        assert_eq!(fused(64 * 64, 1), [1]);
        assert_eq!(fused(64 * 64, 16), [1, 3, 16]);
        assert_eq!(calls(ExecPath::Reference, 6144 * 1024, 512), [1]);
    }
}
