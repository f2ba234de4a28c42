//! The gate before a backend's first product: a small weight of the same kind, computed and compared with the oracle.
use crate::formats::{nf4, nvfp4};
use crate::oracle::{Input, bound};
use crate::{
    Absmax, ActGlobal, ActQuant, Activations, Code, Convention, DType, Device, Error, ExecContext,
    GlobalScale, HostEnv, LinearSpec, Q4Schema, Q4Weight, Result, RowDecoder, ScaleLayout, Segment,
    SegmentData, SegmentSpec, Selection, TensorView, TensorViewMut, ThreadPool,
};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
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

    /// Fails unless the selected backend computes this kind of product rightly.
    pub(crate) fn require(
        &self,
        s: &Selection,
        spec: &LinearSpec,
        env: &HostEnv,
        threads: &ThreadPool,
    ) -> Result<()> {
        if self.skip {
            self.skips.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let mut verdicts = self.verdicts.lock().unwrap_or_else(|e| e.into_inner());
        let kind = kind(s, spec);
        let verdict = verdicts.entry(kind).or_insert_with_key(|kind| {
            let backend = &*s.backend.descriptor().name;
            if self.earlier.as_ref().is_some_and(|e| e.recall(backend, kind)) {
                tracing::debug!(%kind, "self-check remembered");
                return Ok(());
            }
            let start = Instant::now();
            let ratio = check(s, spec, env, threads);
            tracing::debug!(%kind, ?ratio, took = ?start.elapsed(), "self-check");
            if let (Some(earlier), Ok(_)) = (&self.earlier, &ratio) {
                earlier.remember(backend, kind);
            }
            ratio.map(|_| ())
        });
        verdict.clone()
    }
}

/// What one check stands for: everything that chooses code, and no shape or calibrated number.
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
        other => other.as_str().to_owned(),
    };
    format!(
        "{} {} {} {:?} {activations} {} {} {} {}",
        d.name,
        d.version,
        s.path,
        spec.schema,
        spec.x,
        spec.y,
        spec.device,
        spec.segments.len().min(2)
    )
}

const K: usize = 256;
const M: usize = 3;

/// Runs a small product of the kind `spec` describes through the selected backend and path.
/// Returns the largest error over bound (at most 1), or the element that broke it.
pub fn check(s: &Selection, spec: &LinearSpec, env: &HostEnv, threads: &ThreadPool) -> Result<f64> {
    let backend = &s.backend.descriptor().name;
    let sample = Sample::new(spec.schema, spec.segments.len().clamp(1, 2));
    let mut small = spec.clone();
    small.k = K;
    small.max_m = M;
    small.segments = sample.rows().map(|rows| SegmentSpec { name: "self-check".into(), rows }).collect();
    let fail = |what: String| Error::new(Code::SelfCheckFailed, format!("{backend} via {}: {what}", s.path));
    s.backend.can_prepare(&small, s.path, env).map_err(|reasons| {
        let list: Vec<_> = reasons.iter().map(ToString::to_string).collect();
        fail("refuses the product of the self-check".into()).have(list.join("; "))
    })?;
    let segments = sample.segments()?;
    let weight = Q4Weight { schema: spec.schema, k: K, segments: &segments };
    let mut cx = ExecContext { device: spec.device, stream: 0, workspace: None, threads };
    let mut prepared = s.backend.prepare(&weight, &small, s.path, &mut cx)?;
    if spec.device != Device::Cpu {
        // From here on the call is one from the host, and the product runs where it will run.
        prepared = Box::new(crate::stage::Staged::new(prepared, spec.device)?);
        cx = ExecContext::cpu(threads);
    }
    let decoder = RowDecoder::new(&weight)?;
    let n = decoder.n();
    let mut scratch = vec![0u8; prepared.workspace(M) + 64];
    let at = scratch.as_ptr().align_offset(64);
    let scratch_len = scratch.len() - at;
    let x: Vec<f32> = (0..M * K).map(|i| round_to(spec.x, (noise(i as u64) - 0.5) * 4.0)).collect();
    let mut y = IoBuffer::new(spec.y, &vec![f32::NAN; M * n]);
    cx.workspace = Some(TensorViewMut::of(&mut scratch[at..], &[scratch_len])?);
    prepared.forward(IoBuffer::new(spec.x, &x).view(M, K)?, y.view_mut(M, n)?, &mut cx)?;
    let y = y.to_f32();
    let input = Input::new(&x, K, &spec.activations, spec.x)?;
    let mut decoded = vec![0.0; K];
    let mut worst = 0f64;
    for row in 0..n {
        decoder.row(row, &mut decoded);
        for r in 0..M {
            let (exact, abs) = input.dot(r, &decoder, row, &decoded);
            let (got, limit) = (f64::from(y[r * n + row]), bound(s.path, spec.y, K, exact, abs));
            let ratio = (got - exact).abs() / limit;
            if ratio.is_nan() || ratio > 1.0 {
                return Err(fail(format!(
                    "y[{r}, {row}] of {} with {} activations is wrong",
                    spec.schema, spec.activations
                ))
                .need(format!("{exact:e} within {limit:e}"))
                .have(format!("{got:e}"))
                .fix("do not use this backend on this machine; please report it with `q4 diagnose --json`"));
            }
            worst = worst.max(ratio);
        }
    }
    Ok(worst)
}

/// Bytes of a small weight in any encoding, made of every code and of scales over the whole range that matters.
struct Sample {
    schema: Q4Schema,
    parts: Vec<Stored>,
}

struct Stored {
    rows: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    absmax: Vec<f32>,
    global: Option<GlobalScale>,
    nested: Option<(Vec<u8>, Vec<f32>, f32)>,
    dense: IoBuffer,
}

impl Sample {
    fn new(schema: Q4Schema, segments: usize) -> Self {
        let parts = [32, 48][..segments]
            .iter()
            .enumerate()
            .map(|(i, &rows)| Stored::new(schema, rows, i as u64))
            .collect();
        Self { schema, parts }
    }
    fn rows(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().map(|p| p.rows)
    }
    fn segments(&self) -> Result<Vec<Segment<'_>>> {
        self.parts.iter().map(|p| Ok(Segment { rows: p.rows, data: p.data(self.schema)? })).collect()
    }
}

impl Stored {
    fn new(schema: Q4Schema, rows: usize, seed: u64) -> Self {
        let word = |i: usize| mix(seed << 32 | i as u64);
        let elements = rows * K;
        let codes: Vec<u8> = (0..elements / 2).map(|i| word(i) as u8).collect();
        let mut out = Self {
            rows,
            codes,
            scales: Vec::new(),
            absmax: Vec::new(),
            global: None,
            nested: None,
            dense: IoBuffer::F32(Vec::new()),
        };
        match schema {
            Q4Schema::Nvfp4 { scale_layout, global } => {
                // Every finite scale byte: subnormals, the top row, zero.
                let linear: Vec<u8> =
                    (0..elements / nvfp4::BLOCK).map(|i| (word(i) >> 8) as u8 % 0x7f).collect();
                out.scales = match scale_layout {
                    ScaleLayout::RowMajor => linear,
                    ScaleLayout::Swizzled128x4 => {
                        crate::formats::swizzle::to_blocked(&linear, rows, K / nvfp4::BLOCK)
                    }
                };
                let value = 0.013 * (1.0 + seed as f32);
                out.global = global.and_then(|c| match c {
                    Convention::Multiply => GlobalScale::multiply(value).ok(),
                    Convention::Divide => GlobalScale::divide(1.0 / value).ok(),
                });
            }
            Q4Schema::Nf4 { block, nested, .. } => {
                let blocks = elements.div_ceil(block as usize);
                out.absmax = (0..blocks).map(|i| 0.01 + noise(word(i))).collect();
                out.nested = nested.map(|_| nf4::nest(&out.absmax));
            }
            Q4Schema::Dense { dtype } => {
                let values: Vec<f32> = (0..elements).map(|i| noise(word(i)) - 0.5).collect();
                out.dense = IoBuffer::new(dtype, &values);
            }
        }
        out
    }

    fn data(&self, schema: Q4Schema) -> Result<SegmentData<'_>> {
        let bytes = |b: &[u8]| [b.len()];
        Ok(match schema {
            Q4Schema::Nvfp4 { .. } => SegmentData::Nvfp4 {
                codes: TensorView::of(&self.codes, &bytes(&self.codes))?,
                scales: TensorView::of_bytes(&self.scales, DType::F8E4M3, &bytes(&self.scales))?,
                global: self.global,
            },
            Q4Schema::Nf4 { .. } => SegmentData::Nf4 {
                codes: TensorView::of(&self.codes, &bytes(&self.codes))?,
                absmax: match &self.nested {
                    None => Absmax::Plain(TensorView::of(&self.absmax, &[self.absmax.len()])?),
                    Some((codes, absmax, offset)) => Absmax::Nested {
                        codes: TensorView::of(codes, &[codes.len()])?,
                        map: TensorView::of(nf4::dynamic_map(), &[256])?,
                        absmax: TensorView::of(absmax, &[absmax.len()])?,
                        offset: *offset,
                        block: 256,
                    },
                },
            },
            Q4Schema::Dense { .. } => SegmentData::Dense { weight: self.dense.view(self.rows, K)? },
        })
    }
}

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
    /// As a `[rows, cols]` view.
    pub fn view(&self, rows: usize, cols: usize) -> Result<TensorView<'_>> {
        match self {
            Self::F32(v) => TensorView::of(v, &[rows, cols]),
            Self::F16(v) => TensorView::of(v, &[rows, cols]),
            Self::BF16(v) => TensorView::of(v, &[rows, cols]),
        }
    }
    /// As a writable `[rows, cols]` view.
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

fn round_to(dtype: DType, v: f32) -> f32 {
    IoBuffer::new(dtype, &[v]).to_f32()[0]
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

/// Activation formats a self-check can be asked for without a checkpoint.
pub fn plain_activations() -> [Activations; 3] {
    use crate::Rule;
    [
        Activations::Native,
        Activations::Int8,
        Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None }),
    ]
}
