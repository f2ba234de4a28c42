//! Libraries that load and then break their word: what they say is compared with what was asked, and what
//! they leave behind does not matter.
#![allow(clippy::unwrap_used)]
mod built;

use q4_core::{
    Activations, Candidate, Code, DType, Device, Error, ExecContext, ExecPath, HostEnv, LinearSpec, Nvfp4,
    Nvfp4Parts, OpSet, PreparedWeight, Q4Backend, Q4Schema, Q4Weight, Registry, Reject, RejectCode, Result,
    ScaleLayout, Segment, SegmentSpec, TensorView, TensorViewMut, ThreadPool,
};
use std::sync::Arc;

const OK: &str = "return say(err, Q4_OK, \"\");";
const PATH: ExecPath = ExecPath::FusedDequant;

fn load(edits: &[(&str, &str)]) -> Arc<dyn Q4Backend> {
    let dir = tempfile::tempdir().unwrap();
    match q4_plugin_host::load(&built::stub(dir.path(), "lying", edits)).unwrap().candidate {
        Candidate::Live(b) => b,
        Candidate::Dead { .. } => unreachable!("loaded libraries live"),
    }
}

fn spec() -> LinearSpec {
    LinearSpec {
        segments: vec![SegmentSpec { name: "a.q_proj".into(), rows: 16 }],
        schema: Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None }),
        k: 32,
        max_m: 2,
        x: DType::F32,
        y: DType::F32,
        activations: Activations::Native,
        device: Device::Cpu,
        ops: OpSet::FORWARD,
    }
}

fn prepare(b: &dyn Q4Backend) -> Result<Box<dyn PreparedWeight>, Error> {
    let (codes, scales, pool) = ([0u8; 16 * 16], [0u8; 16 * 2], ThreadPool::new(1));
    let data = Nvfp4Parts {
        codes: TensorView::of(&codes, &[16, 16])?,
        scales: TensorView::of_bytes(&scales, DType::F8E4M3, &[16, 2])?,
        global: None,
    }
    .into();
    let segments = [Segment { rows: 16, data }];
    let spec = spec();
    let w = Q4Weight { schema: spec.schema, k: 32, segments: &segments };
    b.prepare(&w, &spec, PATH, &mut ExecContext::cpu(&pool))
}

fn forward(w: &dyn PreparedWeight) -> Result<(), Error> {
    let (x, mut y, pool) = ([0f32; 32], [0f32; 16], ThreadPool::new(1));
    w.forward(
        TensorView::of(&x, &[1, 32])?,
        TensorViewMut::of(&mut y, &[1, 16])?,
        &mut ExecContext::cpu(&pool),
    )
}

fn verdict(b: &dyn Q4Backend) -> Vec<Reject> {
    b.can_prepare(&spec(), PATH, &HostEnv::collect()).err().unwrap_or_default()
}

#[test]
fn an_honest_stub_is_served() {
    let b = load(&[]);
    assert_eq!(verdict(&*b), []);
    let w = prepare(&*b).unwrap();
    assert_eq!((w.info().path, w.info().n, w.info().k, w.info().ops), (PATH, 16, 32, OpSet::FORWARD));
    forward(&*w).unwrap();
    let mut registry = Registry::builtin(&Default::default()).unwrap();
    registry.add(Candidate::Live(b.clone())).unwrap();
    assert_eq!(registry.add(Candidate::Live(b)).unwrap_err().code(), Code::LibraryRefused, "a name twice");
}

#[test]
fn facts_that_are_not_what_was_asked_for_are_path_broken() {
    for (from, to) in [
        ("o->path = p->path", "o->path = Q4_PATH_DEQUANT_MATMUL"),
        ("o->path = p->path", "o->path = 99"),
        ("o->activations = p->activations", "o->activations = Q4_ACT_NVFP4"),
        ("o->n = p->n", "o->n = p->n + 1"),
        ("o->k = p->k", "o->k = 0"),
        ("o->ops = p->ops", "o->ops = 0"),
        ("o->ops = p->ops", "o->ops = 0xffffffff"),
        // It has no `backward_input`.
        ("o->ops = p->ops", "o->ops = 3"),
        // The structure is as the caller made it, zero, unless it is filled in.
        (
            "o->n = p->n, o->k = p->k, o->path = p->path, o->activations = p->activations, o->ops = p->ops;",
            "",
        ),
    ] {
        let e = prepare(&*load(&[(from, to)])).err().unwrap_or_else(|| panic!("{to}"));
        assert_eq!((e.code(), e.code().exit()), (Code::PathBroken, 6), "{to}: {e}");
    }
}

#[test]
fn verdicts_must_be_consistent() {
    let body = "e, q4_reject_fn sink, void *user, q4_error *err)\n{\n    return say(err, Q4_OK, \"\");";
    let says = |text: &str| {
        let to = body.replace("return say(err, Q4_OK, \"\");", text);
        verdict(&*load(&[(body, &to)]))
    };
    let reason = "q4_str c = Q4_STR(\"shape-unsupported\"), t = Q4_STR(\"k\"); sink(user, c, t, t);";
    let codes = |r: Vec<Reject>| r.into_iter().map(|r| r.code).collect::<Vec<_>>();
    use RejectCode::{Internal, InvalidArgument, ShapeUnsupported};
    assert_eq!(codes(says(&format!("{reason} return Q4_E_UNSUPPORTED;"))), [ShapeUnsupported]);
    assert_eq!(codes(says(&format!("{reason} return Q4_OK;"))), [ShapeUnsupported, Internal]);
    assert_eq!(codes(says("return Q4_E_UNSUPPORTED;")), [Internal]);
    assert_eq!(codes(says("return -4711;")), [Internal]);
    assert_eq!(codes(says("return say(err, Q4_E_INVALID, \"spec\");")), [InvalidArgument]);
    for own in ["not-selected", "self-check-failed", "conformance-missing", "library-untrusted"] {
        let own = reason.replace("shape-unsupported", own);
        let codes = codes(says(&format!("{own} return Q4_E_UNSUPPORTED;")));
        assert_eq!(codes, [Internal], "not a library's to say");
    }
    let wild = "q4_str c = {0, 99}, t = {\"\\xff\\xfe\", 2}; for (int i = 0; i < 100000; i++) sink(user, c, t, t); return Q4_E_UNSUPPORTED;";
    assert_eq!(says(wild).len(), 64, "a flood is cut off");
}

#[test]
fn failures_become_errors_with_a_bounded_text() {
    let call = "const q4_matrix *y, const q4_exec *e, q4_error *err)\n{\n    return say(err, Q4_OK, \"\");";
    let fails = |text: &str| {
        let b = load(&[(call, &call.replace(OK, text))]);
        forward(&*prepare(&*b).unwrap()).unwrap_err()
    };
    assert_eq!(fails("return say(err, Q4_E_NON_FINITE, \"x[0, 1] = nan\");").code(), Code::NonFinite);
    assert_eq!(fails("return say(err, Q4_E_INVALID, \"\");").code(), Code::ShapeMismatch);
    assert_eq!(fails("return say(err, Q4_E_NOMEM, \"\");").code(), Code::OutOfMemory);
    let e = fails("err->len = (size_t)1 << 60; return -12345;").to_string();
    assert!(e.len() < 2000 && e.contains("stub: forward"), "{} bytes", e.len());
    let e = fails("err->native_code = 700; return say(err, Q4_E_DEVICE, \"lost\");").to_string();
    assert!(e.contains("lost (device code 700)"), "{e}");
}

#[test]
fn a_panic_is_the_end_of_a_backend() {
    let call = "const q4_matrix *y, const q4_exec *e, q4_error *err)\n{\n    return say(err, Q4_OK, \"\");";
    let b = load(&[(call, &call.replace(OK, "return say(err, Q4_E_PANICKED, \"overflow\");"))]);
    let w = prepare(&*b).unwrap();
    let e = forward(&*w).unwrap_err();
    assert_eq!(e.code(), Code::BackendFailed);
    assert!(e.to_string().contains("a panic: overflow"), "{e}");
    assert_eq!(verdict(&*b)[0].code, RejectCode::Panicked);
    assert!(forward(&*w).unwrap_err().to_string().contains("an earlier call"));
    assert!(prepare(&*b).is_err());
}

#[test]
fn success_without_a_weight_is_a_failure() {
    let e = prepare(&*load(&[("*out = p;\n", "")])).err().unwrap();
    assert_eq!(e.code(), Code::BackendFailed);
    assert!(e.to_string().contains("NULL and success"), "{e}");
}

#[test]
fn a_table_that_changes_after_it_was_read_changes_nothing() {
    let edit = "memset(&TABLE, 0, sizeof TABLE); *out = &BACKEND;";
    let b = load(&[
        ("static q4_status create", "static q4_backend_v1 TABLE;\nstatic q4_status create"),
        ("*out = &BACKEND;", edit),
    ]);
    forward(&*prepare(&*b).unwrap()).unwrap();
}

#[test]
fn a_longer_table_is_read_as_far_as_it_is_known() {
    let b = load(&[
        (
            "static q4_backend_v1 TABLE = {\n    .struct_size = sizeof(q4_backend_v1)",
            "static struct { q4_backend_v1 now; void *later[64]; } LONG = {.later = {(void *)1}};\nstatic q4_backend_v1 TABLE = {\n    .struct_size = sizeof LONG",
        ),
        ("out->table = &TABLE;", "LONG.now = TABLE; out->table = &LONG;"),
    ]);
    forward(&*prepare(&*b).unwrap()).unwrap();
}

#[test]
fn a_library_gets_the_scratch_it_asked_for_or_no_call() {
    let b = load(&[("uint64_t m) { return 0; }", "uint64_t m) { return 4096; }")]);
    let w = prepare(&*b).unwrap();
    assert_eq!(w.workspace(1), 4096);
    assert!(forward(&*w).unwrap_err().to_string().contains("4096 bytes"));
}
