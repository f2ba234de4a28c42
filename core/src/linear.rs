//! The one place of dispatch: every 4-bit product of the program goes through a [`Q4Linear`].
mod group;

pub use group::Q4Group;

use crate::selfcheck::{Passes, SelfChecks};
use crate::{
    Activations, Code, DType, Error, ExecContext, ExecPath, FuseSet, Fusion, LinearSpec, OpSet, Policy,
    PreparedInfo, PreparedWeight, Q4Weight, Registry, Result, Selection, TensorView, TensorViewMut,
    ThreadPool, select,
};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tracing::field::Empty;

/// Everything a product needs before it exists: who may compute, under which policy, and the execution
/// counter.
pub struct Dispatch {
    registry: Registry,
    policy: Policy,
    witness: Arc<ExecutionCounter>,
    checks: SelfChecks,
}

impl Dispatch {
    /// Products of this process under `policy`. Third parties serve what it names them for.
    pub fn new(registry: Registry, mut policy: Policy) -> Self {
        policy.overrides.guests.extend(registry.guests().iter().cloned());
        Self { registry, policy, witness: Arc::default(), checks: SelfChecks::default() }
    }
    /// Trusts backends without checking them first. Loud on purpose: reports carry the number of skipped
    /// checks.
    pub fn without_self_checks(mut self) -> Self {
        self.checks = SelfChecks::skipped();
        self
    }
    /// Checks only what `passes` does not vouch for, and tells it what passed.
    pub fn remembering(mut self, passes: Box<dyn Passes>) -> Self {
        self.checks = SelfChecks::remembering(passes);
        self
    }
    /// The backends.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }
    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }
    /// The execution counter.
    pub fn witness(&self) -> &Arc<ExecutionCounter> {
        &self.witness
    }
    /// Self-checks that were skipped.
    pub fn skipped_checks(&self) -> u64 {
        self.checks.skips()
    }

    /// The decision for one product; reads no weight.
    ///
    /// # Errors
    /// As [`select`](crate::select()).
    pub fn select(&self, spec: &LinearSpec) -> Result<Selection, crate::SelectionError> {
        select(self.registry.candidates(), spec, &self.policy, self.registry.env())
    }

    /// Prepares `w` with the chosen backend and with no other, and checks the first weight of each kind and
    /// shape.
    ///
    /// # Errors
    /// [`Code::SchemaInvalid`] and [`Code::ShapeMismatch`] for a weight that contradicts its schema or
    /// `spec`, those of the backend, [`Code::PathBroken`] when it built something else than was selected, and
    /// [`Code::SelfCheckFailed`] when it computes something else. Each names the layer.
    pub fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        selection: &Selection,
        threads: &ThreadPool,
    ) -> Result<Q4Linear> {
        let name = spec.name();
        let span = tracing::debug_span!(
            "prepare",
            layer = name,
            n = spec.n(),
            k = spec.k,
            rows = spec.max_m,
            backend = &*selection.backend.descriptor().name,
            path = selection.path.as_str(),
            activations = spec.activations.as_str(),
            bytes = Empty,
        );
        let _in = span.enter();
        w.validate().map_err(|e| e.within(&name))?;
        let rows: Vec<_> = w.segments.iter().map(|s| s.rows).collect();
        let want: Vec<_> = spec.segments.iter().map(|s| s.rows).collect();
        if rows != want || w.k != spec.k || w.schema != spec.schema {
            return Err(Error::new(Code::ShapeMismatch, name)
                .need(format!("{} of rows {want:?}, k = {}", spec.schema, spec.k))
                .have(format!("{} of rows {rows:?}, k = {}", w.schema, w.k)));
        }
        let mut cx = ExecContext { device: spec.device, stream: 0, workspace: None, threads };
        let weight: Arc<dyn PreparedWeight> = selection
            .backend
            .prepare(w, spec, selection.path, &mut cx)
            .map_err(|e| e.within(format!("{name}: {}", selection.backend.descriptor().name)))?
            .into();
        let info = weight.info();
        span.record("bytes", info.resident_bytes);
        if info.path != selection.path
            || info.activations != spec.activations
            || info.n != spec.n()
            || info.k != spec.k
        {
            return Err(Error::new(Code::PathBroken, name)
                .need(format!(
                    "{} with {} activations, [{}, {}]",
                    selection.path,
                    spec.activations,
                    spec.n(),
                    spec.k
                ))
                .have(format!(
                    "{} with {} activations, [{}, {}]",
                    info.path, info.activations, info.n, info.k
                )));
        }
        let (backend, path, activations) = (info.backend.to_string(), info.path, info.activations);
        let weight = self.checks.require(selection, spec, w, weight, threads).map_err(|e| e.within(&name))?;
        let counter = Arc::new(Counter {
            layer: name,
            backend,
            path,
            activations,
            is_downgrade: selection.is_downgrade,
            calls: AtomicU64::new(0),
        });
        self.witness.0.lock().unwrap_or_else(|e| e.into_inner()).push(counter.clone());
        Ok(Q4Linear { x: spec.x, y: spec.y, max_m: spec.max_m, weight, counter })
    }
}

/// Counts every product, by what really ran.
#[derive(Default)]
pub struct ExecutionCounter(Mutex<Vec<Arc<Counter>>>);

struct Counter {
    layer: String,
    backend: String,
    path: ExecPath,
    activations: Activations,
    is_downgrade: bool,
    calls: AtomicU64,
}

/// Calls of one (backend, path, activations).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Executed {
    /// Backend that ran.
    pub backend: String,
    /// Path it ran.
    pub path: ExecPath,
    /// Activation format it used.
    pub activations: &'static str,
    /// Products.
    pub calls: u64,
}

impl ExecutionCounter {
    /// What ran so far, most calls first. Products that were prepared and never called are not in it.
    pub fn executed(&self) -> Vec<Executed> {
        let mut out: Vec<Executed> = Vec::new();
        for c in self.0.lock().unwrap_or_else(|e| e.into_inner()).iter() {
            let calls = c.calls.load(Ordering::Relaxed);
            if calls == 0 {
                continue;
            }
            let activations = c.activations.as_str();
            match out
                .iter_mut()
                .find(|e| e.backend == c.backend && e.path == c.path && e.activations == activations)
            {
                Some(e) => e.calls += calls,
                None => out.push(Executed { backend: c.backend.clone(), path: c.path, activations, calls }),
            }
        }
        out.sort_by(|a, b| b.calls.cmp(&a.calls).then_with(|| a.backend.cmp(&b.backend)));
        out
    }
    /// Layers that were prepared on a downgraded path.
    pub fn downgraded(&self) -> Vec<String> {
        let all = self.0.lock().unwrap_or_else(|e| e.into_inner());
        all.iter().filter(|c| c.is_downgrade).map(|c| c.layer.clone()).collect()
    }
}

/// A prepared product. Checks its operands, counts its calls, and calls the backend; nothing else does.
///
/// From a backend to a product, whole: the backend keeps a decoded copy, so its path is `dequant-matmul`.
///
/// ```
/// use q4_core::*;
/// use std::sync::Arc;
///
/// struct Plain(BackendDescriptor);
///
/// impl Q4Backend for Plain {
///     fn descriptor(&self) -> &BackendDescriptor {
///         &self.0
///     }
///     fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
///         vec![]
///     }
///     fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, _: &HostEnv) -> Verdict {
///         let mut reasons = Vec::new();
///         let mut demand = |is_met: bool, code, need: &'static str| {
///             if !is_met {
///                 reasons.push(Reject::new(code, need, format!("{path}, {spec:?}")));
///             }
///         };
///         demand(path == ExecPath::DequantMatmul, RejectCode::PathUnsupported, "dequant-matmul");
///         demand(spec.device == Device::Cpu, RejectCode::DeviceAbsent, "cpu");
///         demand([spec.x, spec.y] == [DType::F32; 2], RejectCode::DtypeUnsupported, "float32");
///         demand(spec.activations == Activations::Native, RejectCode::ActivationsUnsupported, "native");
///         demand(spec.ops == OpSet::FORWARD, RejectCode::OpUnsupported, "forward alone");
///         rows::reject_operands(spec, &mut reasons);
///         if reasons.is_empty() { Ok(()) } else { Err(reasons) }
///     }
///     fn prepare(
///         &self,
///         w: &Q4Weight<'_>,
///         spec: &LinearSpec,
///         path: ExecPath,
///         _: &mut ExecContext<'_>,
///     ) -> Result<Box<dyn PreparedWeight>> {
///         let decoder = RowDecoder::new(w)?;
///         let (n, k) = (decoder.n(), decoder.k());
///         let mut weight = vec![0.0; n * k];
///         weight.chunks_mut(k).enumerate().for_each(|(row, out)| decoder.row(row, out));
///         let (backend, ops) = ("plain".into(), OpSet::FORWARD);
///         let (activations, resident_bytes) = (spec.activations, 4 * (n * k) as u64);
///         let info = PreparedInfo { backend, path, activations, n, k, resident_bytes, ops };
///         Ok(Box::new(Decoded { info, weight }))
///     }
/// }
///
/// struct Decoded {
///     info: PreparedInfo,
///     weight: Vec<f32>,
/// }
///
/// impl PreparedWeight for Decoded {
///     fn info(&self) -> &PreparedInfo {
///         &self.info
///     }
///     fn workspace(&self, _m: usize) -> usize {
///         0
///     }
///     fn forward(
///         &self,
///         x: TensorView<'_>,
///         mut y: TensorViewMut<'_>,
///         _: &mut ExecContext<'_>,
///     ) -> Result<()> {
///         let (n, k) = (self.info.n, self.info.k);
///         let m = rows::check_product((&x, DType::F32, k), (&y.as_view(), DType::F32, n))?;
///         for r in 0..m {
///             let (x, y) = (x.row::<f32>(r)?, y.row_mut::<f32>(r)?);
///             for (y, w) in y.iter_mut().zip(self.weight.chunks(k)) {
///                 *y = x.iter().zip(w).map(|(x, w)| x * w).sum();
///             }
///         }
///         Ok(())
///     }
///     fn backward_input(
///         &self,
///         _: TensorView<'_>,
///         _: TensorViewMut<'_>,
///         _: &mut ExecContext<'_>,
///     ) -> Result<()> {
///         Err(Error::new(Code::Unsupported, "a gradient"))
///     }
///     fn dequantize(&self, _: TensorViewMut<'_>, _: &mut ExecContext<'_>) -> Result<()> {
///         Err(Error::new(Code::Unsupported, "decoding"))
///     }
/// }
///
/// // A layer of two rows: sixteen times 1.0 under a block scale of 1.0, and the same under 0.5.
/// let (codes, scales) = ([0x22_u8; 16], [0x38_u8, 0x30]);
/// let (codes, scales) = (TensorView::of(&codes, &[2, 8])?, TensorView::of(&scales, &[2, 1])?);
/// let segments = [Segment { rows: 2, data: Nvfp4Parts { codes, scales, global: None }.into() }];
/// let schema = formats::encodings("nvfp4")[0];
/// let weight = Q4Weight { schema, k: 16, segments: &segments };
/// let spec = LinearSpec {
///     segments: vec![SegmentSpec { name: "layer".into(), rows: 2 }],
///     schema,
///     k: 16,
///     max_m: 1,
///     x: DType::F32,
///     y: DType::F32,
///     activations: Activations::Native,
///     device: Device::Cpu,
///     ops: OpSet::FORWARD,
/// };
///
/// // A backend that is added serves what it is named for.
/// let mut registry = Registry::on(HostEnv::collect(), &BuiltinOptions::default())?;
/// let (name, path) = ("plain", ExecPath::DequantMatmul);
/// registry.add(Candidate::Live(Arc::new(Plain(BackendDescriptor {
///     name: name.into(),
///     version: "1.0".into(),
///     vendor: "example".into(),
///     priority: 0,
///     offers: vec![("nvfp4".into(), path)],
/// }))))?;
/// let overrides = Overrides::parse(&[name.into()])?;
/// let dispatch = Dispatch::new(registry, Policy { overrides, ..Policy::default() });
///
/// let selection = dispatch.select(&spec)?;
/// assert_eq!((&*selection.backend.descriptor().name, selection.path), (name, path));
///
/// // Prepared, and checked against the oracle.
/// let threads = ThreadPool::new(1);
/// let linear = dispatch.prepare(&weight, &spec, &selection, &threads)?;
/// let (x, mut y) = ([1.0_f32; 16], [0.0_f32; 2]);
/// let (input, output) = (TensorView::of(&x, &[1, 16])?, TensorViewMut::of(&mut y, &[1, 2])?);
/// linear.forward(input, output, &mut ExecContext::cpu(&threads))?;
/// assert_eq!(y, [16.0, 8.0]);
///
/// // Operands that do not fit never reach the backend.
/// let (input, output) = (TensorView::of(&x, &[2, 8])?, TensorViewMut::of(&mut y, &[1, 2])?);
/// let refused = linear.forward(input, output, &mut ExecContext::cpu(&threads)).unwrap_err();
/// assert_eq!(refused.code(), Code::ShapeMismatch);
/// # Ok::<(), Error>(())
/// ```
pub struct Q4Linear {
    x: DType,
    y: DType,
    max_m: usize,
    weight: Arc<dyn PreparedWeight>,
    counter: Arc<Counter>,
}

impl Q4Linear {
    /// What was built.
    pub fn info(&self) -> &PreparedInfo {
        self.weight.info()
    }
    /// Element types of input and output.
    pub fn types(&self) -> (DType, DType) {
        (self.x, self.y)
    }
    /// Rows of the largest call.
    pub fn max_m(&self) -> usize {
        self.max_m
    }
    /// Counts one more call: a recorded one that a device repeats without coming through here.
    pub fn replayed(&self) {
        self.counter.calls.fetch_add(1, Ordering::Relaxed);
    }
    /// Layer name for messages.
    pub fn name(&self) -> &str {
        &self.counter.layer
    }
    /// Scratch bytes for `m` rows.
    pub fn workspace(&self, m: usize) -> usize {
        self.weight.workspace(m)
    }

    /// `y[m, n] = x[m, k] W^T`.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for operands of other shapes, types or devices than `spec` had,
    /// [`Code::Unsupported`] without the operation, and those of the backend. Each names layer and backend.
    pub fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let info = self.weight.info();
        self.check(OpSet::FORWARD, (&x, info.k, self.x), (&y.as_view(), info.n, self.y), cx)?;
        self.counter.calls.fetch_add(1, Ordering::Relaxed);
        self.weight.forward(x, y, cx).map_err(|e| self.named(e))
    }

    /// Whether [`forward_fused`](Self::forward_fused) takes this combination for `m` rows.
    pub fn fuses(&self, m: usize, set: FuseSet) -> bool {
        self.weight.fuses(m, set)
    }

    /// `forward` with a norm before it, a gate behind it, or added to y; see [`Fusion`]. One product in the
    /// count.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`Code::Unsupported`] for what [`fuses`](Self::fuses) denies.
    pub fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let info = self.weight.info();
        let x_type = if fusion.norm.is_some() { DType::F32 } else { self.x };
        let y_type = if fusion.accumulate { DType::F32 } else { self.y };
        let columns = if fusion.gate { info.n / 2 } else { info.n };
        self.check(OpSet::FORWARD, (&x, info.k, x_type), (&y.as_view(), columns, y_type), cx)?;
        if fusion.gate && info.n % 2 != 0 {
            return Err(self.named(
                Error::new(Code::ShapeMismatch, "a gated product")
                    .need("n % 2 == 0")
                    .have(info.n.to_string()),
            ));
        }
        if let Some(norm) = &fusion.norm {
            let w = &norm.weight;
            if w.dtype() != DType::F32 || w.shape() != [info.k as i64] || w.device() != cx.device {
                return Err(self.named(
                    Error::new(Code::ShapeMismatch, "weight of a norm")
                        .need(format!("float32[{}] on {}", info.k, cx.device))
                        .have(format!("{w:?}")),
                ));
            }
        }
        self.counter.calls.fetch_add(1, Ordering::Relaxed);
        self.weight.forward_fused(x, fusion, y, cx).map_err(|e| self.named(e))
    }

    /// `dx[m, k] = dy[m, n] W`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let info = self.weight.info();
        self.check(OpSet::BACKWARD_INPUT, (&dy, info.n, self.y), (&dx.as_view(), info.k, self.x), cx)?;
        self.counter.calls.fetch_add(1, Ordering::Relaxed);
        self.weight.backward_input(dy, dx, cx).map_err(|e| self.named(e))
    }

    /// The decoded matrix.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let info = self.weight.info();
        let (rows, cols, _) = out.as_view().as_matrix()?;
        if (rows, cols) != (info.n, info.k) || !out.as_view().dtype().is_io() {
            return Err(self.named(
                Error::new(Code::ShapeMismatch, "output of dequantize")
                    .need(format!("[{}, {}] of f32, f16 or bf16", info.n, info.k))
                    .have(format!("{out:?}")),
            ));
        }
        self.weight.dequantize(out, cx).map_err(|e| self.named(e))
    }

    fn check(
        &self,
        op: OpSet,
        (input, cols_in, in_type): (&TensorView<'_>, usize, DType),
        (output, cols_out, out_type): (&TensorView<'_>, usize, DType),
        cx: &ExecContext<'_>,
    ) -> Result<()> {
        let (m, c, _) = input.as_matrix()?;
        let (mo, co, _) = output.as_matrix()?;
        let fits = m == mo && c == cols_in && co == cols_out && m > 0 && m <= self.max_m;
        let typed = input.dtype() == in_type && output.dtype() == out_type;
        let placed = input.device() == cx.device && output.device() == cx.device;
        if fits && typed && placed && self.weight.info().ops.contains(op) {
            return Ok(());
        }
        let code = if self.weight.info().ops.contains(op) { Code::ShapeMismatch } else { Code::Unsupported };
        Err(self.named(
            Error::new(code, "operands of a product")
                .need(format!(
                    "{in_type}[1..={}, {cols_in}] and {out_type}[_, {cols_out}] on {}",
                    self.max_m, cx.device
                ))
                .have(format!("{input:?} and {output:?}")),
        ))
    }

    fn named(&self, e: Error) -> Error {
        e.within(format!("{} ({})", self.counter.layer, self.counter.backend))
    }
}
