//! Backends that compute less than everything: each is certified for what it computes, with limits that say
//! so, and one that is wrong about its limits is not.
use q4_conformance::liars::honest;
use q4_conformance::{Limits, Options, Profile, proofs, run};
use q4_core::{
    Activations, BackendDescriptor, Code, Convention, DType, Device, Error, ExecContext, ExecPath, HostEnv,
    LinearSpec, Nvfp4, OpSet, PreparedWeight, ProbeItem, Q4Backend, Q4Schema, Q4Weight, Reject, RejectCode,
    Result, ScaleLayout, ThreadPool, Verdict,
};
use std::sync::Arc;

/// The honest backend, for some products only.
struct Narrow {
    inner: Arc<dyn Q4Backend>,
    takes: fn(&LinearSpec) -> bool,
}

impl Narrow {
    fn of(takes: fn(&LinearSpec) -> bool) -> Self {
        Self { inner: honest(), takes }
    }
}

impl Q4Backend for Narrow {
    fn descriptor(&self) -> &BackendDescriptor {
        self.inner.descriptor()
    }
    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        self.inner.probe(env)
    }
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        self.inner.can_prepare(spec, path, env)?;
        let is_nvfp4 = matches!(spec.schema, Q4Schema::Nvfp4(_)) && spec.activations == Activations::Native;
        if is_nvfp4 && (self.takes)(spec) {
            return Ok(());
        }
        Err(vec![Reject::new(RejectCode::ShapeUnsupported, "a product of this device", "another")])
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        self.can_prepare(spec, path, &HostEnv::default())
            .map_err(|r| Error::new(Code::Unsupported, "a product").have(r[0].to_string()))?;
        self.inner.prepare(w, spec, path, cx)
    }
}

fn is(io: DType, s: &LinearSpec) -> bool {
    (s.x, s.y) == (io, io)
}

fn limits(backend: &Narrow) -> Limits {
    let mut all = proofs(backend, &HostEnv::default(), Device::Cpu);
    assert_eq!(all.len(), 1, "one kind of product");
    all.remove(0).limits
}

/// Kind, what it takes, and what its limits say.
type Kind = (&'static str, fn(&LinearSpec) -> bool, fn(&Limits) -> bool);

const NARROW: [Kind; 9] = [
    ("bf16", |s| is(DType::BF16, s), |l| l.types.len() == 1 && l.types[0].dtype == "bfloat16"),
    ("f32", |s| is(DType::F32, s), |l| l.types.len() == 1 && l.types[0].dtype == "float32"),
    ("k % 256", |s| s.k % 256 == 0, |l| l.k_multiple == 256),
    ("n % 128", |s| s.segments.iter().all(|s| s.rows % 128 == 0), |l| l.n_multiple == 128),
    ("decoding", |s| s.max_m <= 16, |l| l.max_m == Some(16)),
    (
        "row-major",
        |s| matches!(s.schema, Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, .. })),
        |l| l.encodings.len() == 3 && l.encodings.iter().all(|e| e.contains("row-major")),
    ),
    (
        "multiplying",
        |s| matches!(s.schema, Q4Schema::Nvfp4(Nvfp4 { global: Some(Convention::Multiply), .. })),
        |l| l.encodings.len() == 2 && l.encodings.iter().all(|e| e.ends_with("multiply")),
    ),
    ("one segment", |s| s.segments.len() == 1, |l| l.segments == 1),
    (
        "forward",
        |s| s.ops == OpSet::FORWARD,
        |l| l.types.len() == 3 && l.types.iter().all(|t| !t.backward && !t.dequantize),
    ),
];

#[test]
fn narrow_backends_conform_within_their_limits() {
    for (name, takes, says) in NARROW {
        let backend = Narrow::of(takes);
        assert!(says(&limits(&backend)), "{name}: {}", limits(&backend));
        let options = Options { sample: Some(40), ..Options::of(Profile::Training) };
        let report = run(&backend, &options, &HostEnv::default(), &ThreadPool::new(2));
        assert!(report.failed == 0 && report.passed > 60, "{name}:\n{}", report.text());
        println!("narrow backend: {name}: {}", limits(&backend));
    }
}

/// The tenth says it takes every k and refuses one that it would get wrong.
#[test]
fn a_refusal_inside_the_limits_is_a_failure() {
    let mutant = Narrow::of(|s| s.k != 2560);
    assert_eq!(limits(&mutant).k_multiple, 16);
    let options = Options {
        levels: vec![q4_conformance::Level::L2],
        fail_fast: true,
        ..Options::of(Profile::Training)
    };
    let report = run(&mutant, &options, &HostEnv::default(), &ThreadPool::new(2));
    assert!(!report.conformant);
    let message = report.failures[0].message.clone().unwrap_or_default();
    assert!(message.contains("inside what the backend says it computes"), "{message}");
}
