//! A correct backend, small enough to read, made of exchangeable parts.
//!
//! It keeps the stored bytes, decodes a row at a time, sums in f64 and rounds once. Every step that a
//! mutant could get wrong is a function of [`Parts`].
use super::card::{Card, Memory};
use super::group::Group;
use super::on_card::{GroupOnCard, OnCard};
use super::parts::{Call, FUSING, Kept, ON_CARD, Parts, Segment, float, widen};
use super::situation::{Done, Fault, Situation, View};
use super::units::UNITS;
use half::{bf16, f16};
use q4_core::device::{DeviceMemory, memory_of};
use q4_core::formats;
use q4_core::formats::int4::Zeros;
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    Absmax, ActGlobal, Activations, BackendDescriptor, Code, DType, Device, Error, ExecContext, ExecPath,
    FuseSet, Fusion, HostEnv, LinearSpec, Nf4Parts, OpSet, Part, PreparedGroup, PreparedInfo, PreparedWeight,
    ProbeItem, Q4Backend, Q4Schema, Q4Weight, Reject, RejectCode, Result, Scratch, SegmentData, TensorView,
    TensorViewMut, VendorDevice, Verdict, f32s,
};
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The correct backend.
pub fn honest() -> Arc<dyn Q4Backend> {
    with(FUSING)
}

/// The same on a device of its own.
pub fn honest_on_card() -> Arc<dyn Q4Backend> {
    with(ON_CARD)
}

/// One whose sums lose what those of FP8 tensor cores do.
pub fn honest_units() -> Arc<dyn Q4Backend> {
    with(UNITS)
}

/// The backend with these parts.
pub(super) fn with(parts: Parts) -> Arc<dyn Q4Backend> {
    let mut descriptor = BackendDescriptor {
        name: "honest".into(),
        version: "1.0.0".into(),
        vendor: "q4".into(),
        priority: -200,
        offers: formats::names()
            .filter(|name| *name != "dense")
            .map(|name| (name.into(), parts.path))
            .collect(),
    };
    (parts.descriptor)(&mut descriptor);
    let card = parts.card.map(|card| Card::new(&descriptor.name, card));
    Arc::new(Honest { descriptor, parts, card, asked: AtomicU64::new(0), refused: AtomicU64::new(0) })
}

/// Prepared weights that live.
static LIVE: AtomicU64 = AtomicU64::new(0);
/// All that there ever were.
static MADE: AtomicU64 = AtomicU64::new(0);
/// Weights that went since the last one came.
static GONE: AtomicU64 = AtomicU64::new(0);

struct Honest {
    descriptor: BackendDescriptor,
    parts: Parts,
    /// Its own device, if that is where it computes.
    card: Option<Arc<Card>>,
    asked: AtomicU64,
    /// Whether the last weight that was to be prepared was refused.
    refused: AtomicU64,
}

impl Q4Backend for Honest {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        vec![ProbeItem { id: "cpu.scalar".into(), reasons: Vec::new(), detail: String::new() }]
    }
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, _: &HostEnv) -> Verdict {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        (self.parts.verdict)(spec, path, self.right(spec, path), asked)
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        let was_refused = self.refused.swap(1, Ordering::Relaxed) == 1;
        if self.parts.obeys {
            self.right(spec, path).map_err(|r| {
                Error::new(Code::Unsupported, "weight cannot be prepared").have(format!("{r:?}"))
            })?;
        }
        w.validate()?;
        if self.parts.obeys && (w.n(), w.k) != (spec.n(), spec.k) {
            return Err(Error::new(Code::ShapeMismatch, "weight and spec differ"));
        }
        let mut segments = w
            .segments
            .iter()
            .map(|s| Segment::of(s.rows, w.schema, &s.data, self.parts))
            .collect::<Result<Vec<_>>>()?;
        let globals: Vec<_> = segments.iter().map(|s| s.global).collect();
        let p = self.parts;
        let values = |segment: usize| -> Vec<f32> {
            let scaled = |scale: fn(u8) -> f32, at: usize| {
                let (scale, code) = (scale((at >> 4) as u8), (p.e2m1)((at & 15) as u8));
                (p.value)(code, scale, globals[(p.global_of)(segment)])
            };
            match w.schema {
                Q4Schema::Nvfp4(_) => (0..256 * 16).map(|at| scaled(p.e4m3, at)).collect(),
                Q4Schema::Mxfp4(_) => (0..256 * 16).map(|at| scaled(p.e8m0, at)).collect(),
                Q4Schema::Nf4(_) => (0..16).map(p.nf4).collect(),
                Q4Schema::Fp8(_) => (0..=255).map(p.fp8).collect(),
                _ => Vec::new(),
            }
        };
        for (i, s) in segments.iter_mut().enumerate() {
            s.values = values(i);
        }
        let mut kept = Kept {
            info: PreparedInfo {
                backend: self.descriptor.name.clone(),
                path,
                activations: spec.activations,
                n: w.n(),
                k: w.k,
                resident_bytes: segments
                    .iter()
                    .map(|s| (s.codes.len() + s.scales.len() + 4 * s.absmax.len() + s.zeros.len()) as u64)
                    .sum(),
                ops: OpSet::ALL,
            },
            x: spec.x,
            y: spec.y,
            max_m: spec.max_m,
            ops: spec.ops,
            was_refused,
            nth: MADE.fetch_add(1, Ordering::Relaxed),
            name: spec.segments.first().map(|s| s.name.clone()).unwrap_or_default(),
            rows: w.segments.iter().map(|s| s.rows).collect(),
            source: w.segments.first().map_or(0, |s| address(&s.data)),
            schema: w.schema,
            segments,
            parts: self.parts,
            calls: AtomicU64::new(0),
            done: Done::default(),
            hoard: Vec::new(),
            last: AtomicU64::new(0),
            shared: Mutex::new(Vec::new()),
        };
        LIVE.fetch_add(1, Ordering::Relaxed);
        GONE.store(0, Ordering::Relaxed);
        (self.parts.prepared)(&mut kept)?;
        self.refused.store(0, Ordering::Relaxed);
        Ok(match &self.card {
            Some(card) => Box::new(OnCard::new(kept, card)),
            None => Box::new(kept),
        })
    }

    fn devices(&self) -> Vec<VendorDevice> {
        self.card.iter().map(|card| card.facts()).collect()
    }

    fn memory(&self, device: Device) -> Result<Arc<dyn DeviceMemory>> {
        match &self.card {
            Some(card) if card.device() == device => Ok(Arc::new(Memory(card.clone()))),
            _ => memory_of(device),
        }
    }

    fn group(
        &self,
        weights: &[Arc<dyn PreparedWeight>],
        _: &mut ExecContext<'_>,
    ) -> Result<Option<Box<dyn PreparedGroup>>> {
        let kept = |w: &dyn Any| -> Option<(DType, DType)> {
            let kept = w.downcast_ref().or_else(|| w.downcast_ref().map(|w: &OnCard| &w.kept));
            kept.map(|kept: &Kept| (kept.x, kept.y))
        };
        let Some(types) = weights.first().and_then(|w| kept(&**w)).filter(|_| self.parts.groups) else {
            return Ok(None);
        };
        let group = Group { weights: weights.to_vec(), parts: self.parts, types };
        Ok(Some(match &self.card {
            Some(card) => Box::new(GroupOnCard { group, card: card.clone() }),
            None => Box::new(group),
        }))
    }
}

impl Honest {
    /// The right answer.
    fn right(&self, spec: &LinearSpec, path: ExecPath) -> Verdict {
        let own = self.card.as_ref().map_or(Device::Cpu, |card| card.device());
        verdict(spec, path, (self.parts.path, own))
    }
}

fn verdict(spec: &LinearSpec, path: ExecPath, (computes, own): (ExecPath, Device)) -> Verdict {
    use RejectCode::*;
    let mut reasons = Vec::new();
    let mut no = |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
    if path != computes {
        no(PathUnsupported, computes.as_str(), path.to_string());
    }
    if computes == ExecPath::FusedRounded {
        if !matches!(spec.activations, Activations::Fp8(_)) {
            no(ActivationsUnsupported, "fp8, whose codes are multiplied", spec.activations.to_string());
        }
        if spec.x != DType::BF16 {
            no(DtypeUnsupported, "x of bfloat16", spec.x.to_string());
        }
    }
    if spec.device != own {
        no(DeviceAbsent, &own.to_string(), spec.device.to_string());
    }
    if !spec.schema.is_packed() {
        no(SchemaUnsupported, "a format of codes", spec.schema.to_string());
    }
    for dtype in [spec.x, spec.y].into_iter().filter(|d| !d.is_io()) {
        no(DtypeUnsupported, "float32, float16 or bfloat16", dtype.to_string());
    }
    if spec.k == 0 || spec.segments.is_empty() || spec.segments.iter().any(|s| s.rows == 0) {
        no(ShapeUnsupported, "at least one row and one column", format!("[{}, {}]", spec.n(), spec.k));
    }
    let is_blocked = spec.schema.k_block() > 1 || spec.activations != Activations::Native;
    let block = spec.schema.k_block().max(16);
    if is_blocked && spec.k % block != 0 {
        no(ShapeUnsupported, &format!("k % {block} == 0"), format!("k = {}", spec.k));
    }
    let kinds = spec.schema.activations();
    if matches!(spec.activations, Activations::Fp8(_)) && !kinds.contains(&"fp8") {
        no(ActivationsUnsupported, &kinds.join(" or "), "fp8".into());
    }
    if let Activations::Nvfp4(q) = spec.activations
        && let ActGlobal::Static(g) = q.global
        && g.convention() != q.rule.convention()
    {
        no(ActivationsUnsupported, "a scale of the rule's convention", format!("{:?}", g.convention()));
    }
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

impl Segment {
    fn of(rows: usize, schema: Q4Schema, data: &SegmentData<'_>, parts: Parts) -> Result<Self> {
        let mut out = Self {
            rows,
            codes: Vec::new(),
            scales: Vec::new(),
            absmax: Vec::new(),
            zeros: Vec::new(),
            biases: Vec::new(),
            global: None,
            values: Vec::new(),
        };
        let codes = data.need(Part::Codes)?;
        out.codes = codes.as_bytes()?.to_vec();
        match schema {
            Q4Schema::Nvfp4(_) => {
                if parts.reads_on {
                    // SAFETY: it is not: nobody said what lies behind the codes.
                    std::hint::black_box(unsafe {
                        codes.as_ptr().cast::<u8>().add(codes.nbytes()).read_volatile()
                    });
                }
                out.scales = data.need(Part::Scales)?.as_bytes()?.to_vec();
                out.global = data.global;
            }
            Q4Schema::Mxfp4(_) => out.scales = data.need(Part::Scales)?.as_bytes()?.to_vec(),
            Q4Schema::Nf4(format) => {
                let Some(Nf4Parts { absmax, .. }) = format.of(data) else { return Err(foreign()) };
                out.absmax = match absmax {
                    Absmax::Plain(a) => f32s(&a)?.into_owned(),
                    Absmax::Nested { codes, map, absmax, offset, block } => {
                        let (map, absmax, codes) = (f32s(&map)?, f32s(&absmax)?, codes.as_bytes()?);
                        let of = |(i, &c): (usize, &u8)| {
                            let second = (parts.nested_at)(i, block).min(absmax.len() - 1);
                            (parts.absmax)(map[usize::from(c)], c, absmax[second], offset)
                        };
                        codes.iter().enumerate().map(of).collect()
                    }
                };
            }
            Q4Schema::Int4(format) => {
                let bytes = data.need(Part::Scales)?.as_bytes()?.chunks_exact(format.scales.size());
                out.absmax = bytes.map(|bytes| (parts.int4_scale)(bytes, format.scales)).collect();
                match format.zeros {
                    Zeros::Middle => {}
                    Zeros::Points => out.zeros = data.need(Part::Zeros)?.as_bytes()?.to_vec(),
                    Zeros::Biases => {
                        let stored = data.need(Part::Zeros)?;
                        let bytes = stored.as_bytes()?.chunks_exact(format.scales.size());
                        out.biases = bytes.map(|bytes| float(bytes, format.scales)).collect();
                    }
                }
            }
            Q4Schema::Fp8(format) => {
                let bytes = data.need(Part::Scales)?.as_bytes()?.chunks_exact(format.scales.size());
                out.absmax = bytes.map(|bytes| (parts.int4_scale)(bytes, format.scales)).collect();
            }
            Q4Schema::Ggml(_) => {}
            _ => return Err(foreign()),
        }
        Ok(out)
    }
}

fn foreign() -> Error {
    Error::new(Code::SchemaInvalid, "segment").need("4-bit parts")
}

impl Drop for Kept {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::Relaxed);
        GONE.fetch_add(1, Ordering::Relaxed);
    }
}

fn address(data: &SegmentData<'_>) -> usize {
    data.get(Part::Codes).map_or(0, |codes| codes.as_ptr() as usize)
}

impl Kept {
    fn situation<'a>(&'a self, m: usize, cx: &ExecContext<'_>, x: &'a View, y: &'a View) -> Situation<'a> {
        Situation {
            m,
            max_m: self.max_m,
            rows: &self.rows,
            n: self.info.n,
            k: self.info.k,
            threads: cx.threads.threads(),
            call: self.calls.fetch_add(1, Ordering::Relaxed),
            done: &self.done,
            live: LIVE.load(Ordering::Relaxed),
            gone: GONE.load(Ordering::Relaxed),
            nth: self.nth,
            was_refused: self.was_refused,
            name: &self.name,
            io: self.x,
            out: self.y,
            activations: self.info.activations,
            ops: self.ops,
            source: self.source,
            x,
            y,
            lent: cx.workspace.as_ref().map_or(0, |w| w.as_view().nbytes()).saturating_sub(self.workspace(m)),
        }
    }
}

impl PreparedWeight for Kept {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }
    fn workspace(&self, m: usize) -> usize {
        (self.parts.workspace)(m, self.info.k, self.max_m)
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.done.count(OpSet::FORWARD, self.product(x, y, cx))
    }

    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        let halves = self.info.n % 2 == 0 || !set.contains(FuseSet::GATE);
        halves && (self.parts.fuses)(m, set)
    }

    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        self.done.count(OpSet::FORWARD, self.fused(x, fusion, y, cx))
    }

    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        self.done.count(OpSet::BACKWARD_INPUT, self.gradient(dy, dx, cx))
    }

    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.done.count(OpSet::DEQUANTIZE, self.decoded(out, cx))
    }
}

impl Kept {
    fn product(&self, x: TensorView<'_>, mut y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (n, k, p) = (self.info.n, self.info.k, &self.parts);
        let m = x.shape().first().map_or(0, |m| *m as usize);
        (p.before)(self, &mut y)?;
        (p.check)((&x, self.x, m, k), (&y.as_view(), self.y, m, n))?;
        let out = self.sums(&x, &y.as_view(), cx)?;
        for (r, out) in out.chunks(n).enumerate() {
            store(&mut y, r, out.iter().map(|v| (p.round)(*v, self.y)))?;
        }
        (p.after)(self, &x, &mut y);
        Ok(())
    }

    /// A product that does more.
    fn fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let (n, k, p) = (self.info.n, self.info.k, &self.parts);
        let m = x.shape().first().map_or(0, |m| *m as usize);
        let asked = fusion.set();
        if !self.fuses(m, asked) {
            return Err(Error::new(Code::Unsupported, "a fused product").have(format!("{asked:?}")));
        }
        let columns = if fusion.gate { n / 2 } else { n };
        let x_type = if fusion.norm.is_some() { DType::F32 } else { self.x };
        let y_type = if fusion.accumulate { DType::F32 } else { self.y };
        (p.check)((&x, x_type, m, k), (&y.as_view(), y_type, m, columns))?;
        let done = (p.fused)(asked);
        let mut rows = vec![0f32; m * k];
        rows.chunks_mut(k).enumerate().try_for_each(|(r, row)| widen(&x, r, row))?;
        if let Some(norm) = fusion.norm.as_ref().filter(|_| done.contains(FuseSet::NORM)) {
            let weight = norm.weight.as_slice::<f32>()?;
            rows = rows.chunks(k).flat_map(|row| (p.norm)(row, weight, norm.eps)).collect();
        }
        let normed = IoBuffer::new(self.x, &rows);
        let sums = self.sums(&normed.view(m, k)?, &y.as_view(), cx)?;
        for (r, sums) in sums.chunks(n).enumerate() {
            let mut before = vec![0f32; columns];
            if fusion.accumulate {
                widen(&y.as_view(), r, &mut before)?;
            }
            let value = |c: usize| {
                let gates = fusion.gate && done.contains(FuseSet::GATE);
                let v = if gates { (p.gate)(sums[c], sums[(p.up_at)(c, columns)]) } else { sums[c] };
                let adds = fusion.accumulate && done.contains(FuseSet::ACCUMULATE);
                (p.round)(if adds { (p.add)(f64::from(before[c]), v, r) } else { v }, y_type)
            };
            store(&mut y, r, (0..columns).map(value))?;
        }
        Ok(())
    }

    /// `[m, n]` sums of products, not rounded yet.
    fn sums(&self, x: &TensorView<'_>, y: &TensorView<'_>, cx: &mut ExecContext<'_>) -> Result<Vec<f64>> {
        let (n, k, p) = (self.info.n, self.info.k, &self.parts);
        let m = x.shape().first().map_or(0, |m| *m as usize);
        let threads = cx.threads.threads();
        let fault = (p.fault)(&self.situation(m, cx, &View::of(x), &View::of(y)));
        let mut scratch = Scratch::of(cx, self.workspace(m))?;
        let wide = scratch.take::<f32>(m * k)?;
        let call = Call { x, y, threads, scratch: wide[0].to_bits() as u8 };
        let is_unsteady = (p.unsteady)(self, &call);
        for (r, wide) in wide.chunks_mut(k).enumerate() {
            (p.read)(x, r, wide)?;
        }
        let input =
            (p.stage)(self, (p.quantise)(wide, k, &(p.activations)(self.info.activations), x.dtype())?);
        let mut out = vec![0f64; m * n];
        let mut row = vec![0.0; k];
        let (rows, columns) = (p.extent)(m, n);
        for j in 0..columns.min(n) {
            match p.hoarded {
                true => row.copy_from_slice(&self.hoard[j * k..][..k]),
                false => {
                    let at = self.decode(j, &mut row);
                    (p.forward_row)(&mut row, at);
                }
            }
            for r in 0..rows.min(m) {
                let x = &input[r * k..][..k];
                out[r * n + j] = if is_unsteady { backwards(x, &row) } else { (p.sum)(x, &row) };
            }
        }
        fault.apply(&mut out, n);
        Ok(out)
    }

    fn gradient(&self, dy: TensorView<'_>, mut dx: TensorViewMut<'_>, cx: &ExecContext<'_>) -> Result<()> {
        let (n, k, p) = (self.info.n, self.info.k, &self.parts);
        let m = dy.shape().first().map_or(0, |m| *m as usize);
        (p.check)((&dy, self.y, m, n), (&dx.as_view(), self.x, m, k))?;
        let mut wide = vec![0f32; m * n];
        for (r, wide) in wide.chunks_mut(n).enumerate() {
            widen(&dy, r, wide)?;
        }
        let mut sums = vec![0f64; m * k];
        let mut row = vec![0.0; k];
        for j in 0..n {
            let at = self.decode(j, &mut row);
            (p.backward_row)(&mut row, at);
            for (r, sums) in sums.chunks_mut(k).enumerate() {
                let factor = f64::from((p.gradient)(wide[r * n + j]));
                sums.iter_mut().zip(&row).for_each(|(s, w)| *s += factor * f64::from(*w));
            }
        }
        let (from, to) = (View::of(&dy), View::of(&dx.as_view()));
        (p.backward_fault)(&self.situation(m, cx, &from, &to)).apply(&mut sums, k);
        sums.chunks(k).enumerate().try_for_each(|(r, sums)| store(&mut dx, r, sums.iter().map(|v| *v as f32)))
    }

    fn decoded(&self, mut out: TensorViewMut<'_>, cx: &ExecContext<'_>) -> Result<()> {
        let (n, k, dtype) = (self.info.n, self.info.k, out.as_view().dtype());
        (self.parts.check)((&out.as_view(), dtype, n, k), (&out.as_view(), dtype, n, k))?;
        let mut row = vec![0.0; k];
        let view = View::of(&out.as_view());
        let fault = (self.parts.decode_fault)(&self.situation(1, cx, &view, &view));
        (0..n).try_for_each(|j| {
            self.decode(j, &mut row);
            match fault {
                Fault::Row(r) if r == j => row.fill(0.0),
                Fault::Column(c) => row[c] = 0.0,
                _ => {}
            }
            store(&mut out, j, row.iter().copied())
        })
    }
}

fn backwards(x: &[f64], w: &[f32]) -> f64 {
    f64::from(x.iter().zip(w).rev().fold(0f32, |sum, (x, w)| sum + *x as f32 * w))
}

fn store(y: &mut TensorViewMut<'_>, r: usize, values: impl Iterator<Item = f32>) -> Result<()> {
    match y.as_view().dtype() {
        DType::F16 => y.row_mut::<f16>(r)?.iter_mut().zip(values).for_each(|(y, v)| *y = f16::from_f32(v)),
        DType::BF16 => y.row_mut::<bf16>(r)?.iter_mut().zip(values).for_each(|(y, v)| *y = bf16::from_f32(v)),
        _ => y.row_mut::<f32>(r)?.iter_mut().zip(values).for_each(|(y, v)| *y = v),
    }
    Ok(())
}
