//! The one dispatch seam: every 4-bit product of the program goes through a [`Q4Linear`].
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

/// Everything a product needs before it exists: who may compute, under which policy, and who keeps count.
pub struct Dispatch {
    registry: Registry,
    policy: Policy,
    witness: Arc<Witness>,
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
    /// Who keeps count.
    pub fn witness(&self) -> &Arc<Witness> {
        &self.witness
    }
    /// Self-checks that were skipped.
    pub fn skipped_checks(&self) -> u64 {
        self.checks.skips()
    }

    /// The decision for one product; reads no weight.
    pub fn select(&self, spec: &LinearSpec) -> Result<Selection, crate::SelectionError> {
        select(self.registry.candidates(), spec, &self.policy, self.registry.env())
    }

    /// Prepares `w` with the chosen backend and with no other, and checks the first weight of each kind and
    /// shape.
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
        let weight = selection
            .backend
            .prepare(w, spec, selection.path, &mut cx)
            .map_err(|e| e.within(format!("{name}: {}", selection.backend.descriptor().name)))?;
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
pub struct Witness(Mutex<Vec<Arc<Counter>>>);

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

impl Witness {
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
pub struct Q4Linear {
    x: DType,
    y: DType,
    max_m: usize,
    weight: Box<dyn PreparedWeight>,
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
    pub fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let info = self.weight.info();
        self.check(OpSet::FORWARD, (&x, info.k, self.x), (&y.as_view(), info.n, self.y), cx)?;
        self.counter.calls.fetch_add(1, Ordering::Relaxed);
        self.weight.forward(x, y, cx).map_err(|e| self.blame(e))
    }

    /// Whether [`forward_fused`](Self::forward_fused) takes this combination for `m` rows.
    pub fn fuses(&self, m: usize, set: FuseSet) -> bool {
        self.weight.fuses(m, set)
    }

    /// `forward` with a norm before it, a gate behind it, or added to y; see [`Fusion`]. One product in the
    /// count.
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
            return Err(self.blame(
                Error::new(Code::ShapeMismatch, "a gated product")
                    .need("n % 2 == 0")
                    .have(info.n.to_string()),
            ));
        }
        if let Some(norm) = &fusion.norm {
            let w = &norm.weight;
            if w.dtype() != DType::F32 || w.shape() != [info.k as i64] || w.device() != cx.device {
                return Err(self.blame(
                    Error::new(Code::ShapeMismatch, "weight of a norm")
                        .need(format!("float32[{}] on {}", info.k, cx.device))
                        .have(format!("{w:?}")),
                ));
            }
        }
        self.counter.calls.fetch_add(1, Ordering::Relaxed);
        self.weight.forward_fused(x, fusion, y, cx).map_err(|e| self.blame(e))
    }

    /// `dx[m, k] = dy[m, n] W`.
    pub fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let info = self.weight.info();
        self.check(OpSet::BACKWARD_INPUT, (&dy, info.n, self.y), (&dx.as_view(), info.k, self.x), cx)?;
        self.counter.calls.fetch_add(1, Ordering::Relaxed);
        self.weight.backward_input(dy, dx, cx).map_err(|e| self.blame(e))
    }

    /// The decoded matrix.
    pub fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let info = self.weight.info();
        let (rows, cols, _) = out.as_view().as_matrix()?;
        if (rows, cols) != (info.n, info.k) || !out.as_view().dtype().is_io() {
            return Err(self.blame(
                Error::new(Code::ShapeMismatch, "output of dequantize")
                    .need(format!("[{}, {}] of f32, f16 or bf16", info.n, info.k))
                    .have(format!("{out:?}")),
            ));
        }
        self.weight.dequantize(out, cx).map_err(|e| self.blame(e))
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
        Err(self.blame(
            Error::new(code, "operands of a product")
                .need(format!(
                    "{in_type}[1..={}, {cols_in}] and {out_type}[_, {cols_out}] on {}",
                    self.max_m, cx.device
                ))
                .have(format!("{input:?} and {output:?}")),
        ))
    }

    fn blame(&self, e: Error) -> Error {
        e.within(format!("{} ({})", self.counter.layer, self.counter.backend))
    }
}
