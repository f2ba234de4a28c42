//! What the check of a first product catches: backends that are right but for calls of some shape, number of
//! rows or name.
use q4_core::selfcheck::Passes;
use q4_core::{
    Activations, BackendDescriptor, BuiltinOptions, Candidate, Code, Convention, DType, Device, Dispatch,
    ExecContext, ExecPath, GlobalScale, HostEnv, LinearSpec, Nvfp4, Nvfp4Parts, OpSet, Policy, PreparedInfo,
    PreparedWeight, ProbeItem, Q4Backend, Q4Schema, Q4Weight, Registry, Result, RowDecoder, ScaleLayout,
    Segment, SegmentSpec, TensorView, TensorViewMut, ThreadPool, Verdict,
};
use std::sync::{Arc, Mutex};

const SCHEMA: Q4Schema =
    Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Multiply) });
const PATH: ExecPath = ExecPath::FusedDequant;

/// A call as the backend sees it.
#[derive(Clone, Debug)]
struct Seen {
    m: usize,
    max_m: usize,
    n: usize,
    k: usize,
    names: Vec<String>,
}

/// What a backend does in calls where it has its fault.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Its last column keeps what was there.
    Leaves,
    /// Its last row is doubled.
    Doubles,
    /// One column is half an ulp of bf16 off: within no bound of a kernel.
    Rounds,
}

type When = fn(&Seen) -> bool;

/// Exact products in f64, but for the calls where it has its fault.
struct Mutant {
    descriptor: BackendDescriptor,
    fault: Option<(When, Fault)>,
    log: Arc<Mutex<Vec<Seen>>>,
}

struct Weight {
    info: PreparedInfo,
    dense: Vec<f32>,
    seen: Seen,
    fault: Option<(When, Fault)>,
    log: Arc<Mutex<Vec<Seen>>>,
}

impl Q4Backend for Mutant {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        Vec::new()
    }
    fn can_prepare(&self, _: &LinearSpec, _: ExecPath, _: &HostEnv) -> Verdict {
        Ok(())
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        let decoder = RowDecoder::new(w)?;
        let (n, k) = (decoder.n(), decoder.k());
        let mut dense = vec![0.0; n * k];
        for (row, out) in dense.chunks_mut(k).enumerate() {
            decoder.row(row, out);
        }
        let info = PreparedInfo {
            backend: "mutant".into(),
            path,
            activations: spec.activations,
            n,
            k,
            resident_bytes: 0,
            ops: OpSet::FORWARD,
        };
        let names = spec.segments.iter().map(|s| s.name.clone()).collect();
        let seen = Seen { m: 0, max_m: spec.max_m, n, k, names };
        Ok(Box::new(Weight { info, dense, seen, fault: self.fault, log: self.log.clone() }))
    }
}

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }
    fn workspace(&self, _: usize) -> usize {
        0
    }
    fn forward(&self, x: TensorView<'_>, mut y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (m, k, _) = x.as_matrix()?;
        let (n, x) = (self.info.n, x.as_slice::<f32>()?);
        let seen = Seen { m, ..self.seen.clone() };
        let fault = self.fault.filter(|(when, _)| when(&seen)).map(|(_, fault)| fault);
        self.log.lock().expect("nobody panics").push(seen);
        let rows: Vec<_> = y.as_mut_slice::<f32>()?.chunks_mut(n).map(Mutex::new).collect();
        cx.threads.run(m, &|r| {
            let mut out = rows[r].lock().expect("one task each");
            for (c, out) in out.iter_mut().enumerate() {
                if matches!(fault, Some(Fault::Leaves)) && c + 1 == n {
                    continue;
                }
                let (x, w) = (&x[r * k..][..k], &self.dense[c * k..][..k]);
                let sum: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                *out = match fault {
                    Some(Fault::Doubles) if r + 1 == m => 2.0 * sum as f32,
                    Some(Fault::Rounds) if c + 1 == n => f32::from_bits((sum as f32).to_bits() & !0xffff),
                    _ => sum as f32,
                };
            }
        });
        Ok(())
    }
    fn backward_input(&self, _: TensorView<'_>, _: TensorViewMut<'_>, _: &mut ExecContext<'_>) -> Result<()> {
        unreachable!("nobody asks for it")
    }
    fn dequantize(&self, _: TensorViewMut<'_>, _: &mut ExecContext<'_>) -> Result<()> {
        unreachable!("nobody asks for it")
    }
}

/// A dispatch with one backend, and what that backend sees.
fn dispatch(fault: Option<(When, Fault)>) -> (Dispatch, Arc<Mutex<Vec<Seen>>>) {
    let descriptor = BackendDescriptor {
        name: "mutant".into(),
        version: "1".into(),
        vendor: "a test".into(),
        priority: 0,
        offers: vec![("nvfp4".into(), PATH)],
    };
    let log = Arc::new(Mutex::new(Vec::new()));
    let mutant = Mutant { descriptor, fault, log: log.clone() };
    let mut registry = Registry::on(HostEnv::default(), &BuiltinOptions::default()).expect("no built-ins");
    registry.add(Candidate::Live(Arc::new(mutant))).expect("a free name");
    let mut policy = Policy::default();
    policy.overrides.all = Some("mutant".into());
    (Dispatch::new(registry, policy), log)
}

fn segment(rows: usize, (codes, scales): &(Vec<u8>, Vec<u8>)) -> Result<Segment<'_>> {
    let data = Nvfp4Parts {
        codes: TensorView::of(codes, &[codes.len()])?,
        scales: TensorView::of_bytes(scales, DType::F8E4M3, &[scales.len()])?,
        global: Some(GlobalScale::multiply(0.01)?),
    }
    .into();
    Ok(Segment { rows, data })
}

/// Prepares `rows` by `k` for calls of up to `max_m` rows.
fn prepare(dispatch: &Dispatch, rows: &[usize], k: usize, max_m: usize) -> Result<()> {
    let threads = ThreadPool::new(2);
    let names = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"];
    let spec = LinearSpec {
        segments: rows.iter().zip(names).map(|(r, n)| SegmentSpec { name: n.into(), rows: *r }).collect(),
        schema: SCHEMA,
        k,
        max_m,
        x: DType::F32,
        y: DType::F32,
        activations: Activations::Native,
        device: Device::Cpu,
        ops: OpSet::FORWARD,
    };
    let bytes = |len: usize, f: fn(usize) -> u8| (0..len).map(f).collect::<Vec<u8>>();
    let stored: Vec<_> = rows
        .iter()
        .map(|r| {
            (bytes(r * k / 2, |i| (i * 37 + i / 256) as u8), bytes(r * k / 16, |i| 0x30 + (i % 16) as u8))
        })
        .collect();
    let segments = rows.iter().zip(&stored).map(|(r, s)| segment(*r, s)).collect::<Result<Vec<_>>>()?;
    let weight = Q4Weight { schema: SCHEMA, k, segments: &segments };
    let selection = dispatch.select(&spec)?;
    dispatch.prepare(&weight, &spec, &selection, &threads).map(drop)
}

#[test]
fn a_right_backend_is_called_as_a_model_calls_it() {
    let (dispatch, log) = dispatch(None);
    prepare(&dispatch, &[720, 320], 64, 512).expect("it is right");
    let calls = log.lock().expect("nobody panics").clone();
    assert_eq!(calls.iter().map(|c| c.m).collect::<Vec<_>>(), [1, 3, 17, 512]);
    for c in &calls {
        assert_eq!((c.max_m, c.n, c.k), (512, 1040, 64));
        assert_eq!(c.names, ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]);
    }
}

/// Every one of these passed a check of a small weight of the same kind.
#[test]
fn what_depends_on_shape_rows_or_name_is_caught() {
    let calls: [(&str, When); 10] = [
        ("m < max_m", |s| s.m < s.max_m),
        ("m = 1", |s| s.m == 1),
        ("odd m", |s| s.m % 2 == 1 && s.m > 1),
        ("m = max_m", |s| s.m == s.max_m),
        ("m > 400", |s| s.m > 400),
        ("n > 700", |s| s.n > 700),
        ("k >= 128", |s| s.k >= 128),
        ("n % 16 == 8", |s| s.n % 16 == 8),
        ("max_m of a prompt", |s| s.max_m > 64),
        ("a model's names", |s| s.names.iter().all(|n| n.starts_with("model."))),
    ];
    for (what, when) in calls {
        for fault in [Fault::Leaves, Fault::Doubles, Fault::Rounds] {
            let (dispatch, _) = dispatch(Some((when, fault)));
            let e = prepare(&dispatch, &[712, 320], 128, 512).expect_err(what);
            assert_eq!(e.code(), Code::SelfCheckFailed, "{what}, {fault:?}: {e}");
            let again = prepare(&dispatch, &[712, 320], 128, 512).expect_err("it is remembered");
            assert_eq!(again.to_string(), e.to_string());
        }
    }
}

/// Passes in memory.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<String>>>);

impl Passes for Kept {
    fn recall(&self, _: &str, kind: &str) -> bool {
        self.0.lock().expect("nobody panics").iter().any(|k| k == kind)
    }
    fn remember(&self, backend: &str, kind: &str) {
        assert_eq!(backend, "mutant");
        self.0.lock().expect("nobody panics").push(kind.to_owned());
    }
}

#[test]
fn a_shape_is_checked_once_and_another_shape_again() {
    let kept = Kept::default();
    let checked = |rows: &[usize], k, max_m| {
        let (dispatch, log) = dispatch(None);
        let dispatch = dispatch.remembering(Box::new(kept.clone()));
        for _ in 0..3 {
            prepare(&dispatch, rows, k, max_m).expect("it is right");
        }
        log.lock().expect("nobody panics").len()
    };
    assert_eq!(checked(&[32], 64, 16), 3, "1, 3 and 16 rows, for the first of three weights");
    assert_eq!(checked(&[32], 64, 16), 0, "remembered");
    assert_eq!(checked(&[32], 64, 9), 0, "about as many rows");
    for (rows, k, max_m) in [(&[32][..], 64, 17), (&[48], 64, 16), (&[32], 128, 16), (&[16, 16], 64, 16)] {
        assert_ne!(checked(rows, k, max_m), 0, "{rows:?} {k} {max_m}");
        assert_eq!(checked(rows, k, max_m), 0);
    }
    assert_eq!(kept.0.lock().expect("nobody panics").len(), 5);
}

#[test]
fn a_failure_is_not_remembered() {
    let kept = Kept::default();
    let (dispatch, _) = dispatch(Some((|_| true, Fault::Doubles)));
    let dispatch = dispatch.remembering(Box::new(kept.clone()));
    prepare(&dispatch, &[32], 64, 16).expect_err("a mutant");
    assert!(kept.0.lock().expect("nobody panics").is_empty());
}
