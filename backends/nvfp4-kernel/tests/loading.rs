//! Libraries that are missing, damaged, old or not ours: each becomes a dead candidate that says why, and the
//! host lives.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]
use q4_core::{
    Activations, BuiltinOptions, Candidate, DType, Device, ExecContext, ExecPath, FuseSet, Fusion,
    LinearSpec, OpSet, Q4Schema, Q4Weight, Registry, Reject, RejectCode, ScaleLayout, Segment, SegmentData,
    SegmentSpec, TensorView, TensorViewMut, ThreadPool,
};
use q4_nvfp4_kernel::NAME;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn the_library_beside_the_executable_is_found() {
    let registry = Registry::builtin(&BuiltinOptions::default()).unwrap();
    let backend = registry.live(NAME).expect("libNVFP4 lies beside the tests");
    let facts = &registry.env().libraries[NAME];
    assert_eq!(Path::new(&facts.path).parent(), std::env::current_exe().unwrap().parent());
    assert_eq!(backend.descriptor().version, facts.version);
    assert!(!facts.version.is_empty() && !facts.cpu_isa.is_empty(), "{facts:?}");
    let items = backend.probe(registry.env());
    let load = items.iter().find(|i| i.id == "library.load").expect("the load is reported");
    assert!(load.reasons.is_empty() && load.detail.contains(&facts.path), "{load:?}");
    assert!(items.iter().any(|i| i.id == "context.cpu" && i.reasons.is_empty()), "{items:?}");
}

#[test]
fn a_named_instruction_set_binds() {
    let real = Registry::builtin(&BuiltinOptions::default()).unwrap().env().libraries[NAME].clone();
    for isa in &real.cpu_isa {
        let options = BuiltinOptions { isa: Some(isa.clone()), ..Default::default() };
        let registry = Registry::builtin(&options).unwrap();
        let items = registry.live(NAME).expect("it can run what it lists").probe(registry.env());
        assert!(items.iter().any(|i| i.detail.starts_with(&format!("runs {isa} "))), "{items:?}");
    }
    let reasons = dead(&BuiltinOptions { isa: Some("mmx".into()), ..Default::default() });
    assert!(reasons.iter().any(|r| r.have.contains("mmx")), "{reasons:?}");
}

#[test]
fn a_missing_file_is_named_and_nothing_else_is_tried() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("absent/libNVFP4.so");
    let reasons = dead(&named(&path));
    assert_eq!(codes(&reasons), [RejectCode::LibraryMissing; 2]);
    assert!(reasons[0].need.contains("/absent/libNVFP4.so"), "{}", reasons[0]);
    assert!(reasons[1].need.contains("--nvfp4-lib PATH"), "{}", reasons[1]);
}

#[test]
fn a_named_library_is_loaded_from_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let copy = fs::canonicalize(dir.path()).unwrap().join("kernels.so");
    fs::copy(real(), &copy).unwrap();
    let registry = Registry::builtin(&named(&copy)).unwrap();
    assert!(registry.live(NAME).is_some());
    assert_eq!(Path::new(&registry.env().libraries[NAME].path), copy);
}

#[test]
fn a_library_that_is_not_ours_is_refused() {
    let refused = |source| first(&compile(source));
    let (code, have) = refused("int unrelated(void) { return 1; }");
    assert_eq!(code, RejectCode::SymbolMissing, "{have}");
}

#[test]
fn a_tensor_handle_library_is_too_old() {
    let (code, have) = first(&compile("void NVFP4_quantize(void *x, void **q, void **s) {}"));
    assert_eq!(code, RejectCode::LibraryTooOld);
    assert!(have.contains("NVFP4_quantize") && have.contains("tensor handles"), "{have}");
}

#[test]
fn another_major_version_is_a_mismatch_with_both_versions() {
    let (code, _) = first(&compile("const void *nvfp4_get_api(unsigned a, unsigned *b) { return 0; }"));
    assert_eq!(code, RejectCode::AbiMismatch);
    let two =
        "static long t[99]; const void *nvfp4_get_api(unsigned a, unsigned *b) { return a == 2 ? t : 0; }";
    let reasons = dead(&named(&compile(two).1));
    assert!(reasons[0].need.contains("ABI 1.x") && reasons[0].have.contains("ABI 2"), "{}", reasons[0]);
}

#[test]
fn a_table_we_cannot_call_is_a_mismatch() {
    // (table initialiser, what the reason says)
    let cases = [
        (".struct_size = 16, .abi_major = 1, .version = \"1\"", "struct_size 16"),
        (".struct_size = sizeof(nvfp4_api), .abi_major = 7, .version = \"1\"", "7.0"),
        (".struct_size = sizeof(nvfp4_api), .abi_major = 1, .version = \"1\"", "NULL"),
        (".struct_size = sizeof(nvfp4_api), .abi_major = 1", "NULL"),
        (".struct_size = sizeof(nvfp4_api), .abi_major = 1, .version = \"\\xff\"", "not UTF-8"),
    ];
    for (table, want) in cases {
        let source = format!(
            "#include \"{}/native/include/nvfp4.h\"\nstatic const nvfp4_api t = {{ {table} }};\n\
             const nvfp4_api *nvfp4_get_api(uint32_t a, uint32_t *b) {{ return a == 1 ? &t : 0; }}",
            env!("CARGO_MANIFEST_DIR")
        );
        let reasons = dead(&named(&compile(&source).1));
        let (told, help) = reasons.split_at(reasons.len() - 1);
        assert!(
            told.iter().all(|r| r.code == RejectCode::AbiMismatch) && help[0].need.contains("--nvfp4-lib")
        );
        assert!(told.iter().any(|r| r.have.contains(want)), "{want}: {told:?}");
    }
}

/// A library made before fusions existed: its table ends where they begin.
#[test]
fn a_library_of_abi_1_0_still_computes_and_fuses_nothing() {
    let source = format!(
        r#"#include "{}/native/include/nvfp4.h"
        #include <string.h>
        static char one;
        static nvfp4_status create(const nvfp4_ctx_desc *d, nvfp4_ctx **out, nvfp4_reason_fn f, void *u, nvfp4_error *e) {{
            *out = (nvfp4_ctx *)&one;
            return d->device_type == NVFP4_DEVICE_CPU ? NVFP4_OK : NVFP4_E_UNSUPPORTED;
        }}
        static void destroy(nvfp4_ctx *c) {{}}
        static nvfp4_status info(nvfp4_ctx *c, nvfp4_device_info *i, nvfp4_error *e) {{
            i->paths = 1u << NVFP4_PATH_FUSED_DEQUANT;
            i->activations = 14;
            strcpy(i->isa, "old");
            strcpy(i->isa_available, "old");
            return NVFP4_OK;
        }}
        static nvfp4_status prepare(nvfp4_ctx *c, const nvfp4_weight_desc *d, const nvfp4_exec *x, nvfp4_weight **out,
                                    nvfp4_error *e) {{ *out = (nvfp4_weight *)&one; return NVFP4_OK; }}
        static void release(nvfp4_weight *w) {{}}
        static uint64_t bytes(const nvfp4_weight *w) {{ return 1; }}
        static uint64_t workspace(const nvfp4_weight *w, uint64_t m) {{ return 0; }}
        static nvfp4_status product(const nvfp4_weight *w, const nvfp4_matrix *x, const nvfp4_matrix *y, const nvfp4_exec *c,
                                    nvfp4_error *e) {{ ((float *)y->data)[0] = 5; return NVFP4_OK; }}
        static nvfp4_status decode(const nvfp4_weight *w, const nvfp4_matrix *o, const nvfp4_exec *c, nvfp4_error *e) {{
            return NVFP4_OK; }}
        static const nvfp4_api t = {{ .struct_size = offsetof(nvfp4_api, fuses), .abi_major = 1, .abi_minor = 0,
            .version = "0.9", .ctx_create = create, .ctx_destroy = destroy, .device_info = info, .prepare = prepare,
            .release = release, .weight_bytes = bytes, .workspace = workspace, .forward = product,
            .backward_input = product, .dequantize = decode }};
        const nvfp4_api *nvfp4_get_api(uint32_t a, uint32_t *b) {{ if (b) *b = 0; return a == 1 ? &t : 0; }}"#,
        env!("CARGO_MANIFEST_DIR")
    );
    let (_dir, path) = compile(&source);
    let registry = Registry::builtin(&named(&path)).unwrap();
    let backend = registry.live(NAME).expect("an old library is a library");
    let (codes, scales) = (vec![0x22u8; 8 * 16], vec![0x38u8; 16]);
    let data = SegmentData::Nvfp4 {
        codes: TensorView::of(&codes, &[codes.len()]).unwrap(),
        scales: TensorView::of(&scales, &[scales.len()]).unwrap(),
        global: None,
    };
    let schema = Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None };
    let segments = [Segment { rows: 16, data }];
    let weight = Q4Weight { schema, k: 16, segments: &segments };
    let spec = LinearSpec {
        segments: vec![SegmentSpec { name: "old".into(), rows: 16 }],
        schema,
        k: 16,
        max_m: 1,
        x: DType::F32,
        y: DType::F32,
        activations: Activations::Native,
        device: Device::Cpu,
        ops: OpSet::FORWARD,
    };
    let pool = ThreadPool::new(1);
    let mut cx = ExecContext::cpu(&pool);
    let w = backend.prepare(&weight, &spec, ExecPath::FusedDequant, &mut cx).unwrap();
    assert!(w.fuses(1, FuseSet::NONE) && !w.fuses(1, FuseSet::GATE));
    let (x, mut y) = ([1f32; 16], [0f32; 16]);
    let fused = |fusion: &Fusion<'_>, y: &mut [f32], cx: &mut ExecContext<'_>| {
        let y = TensorViewMut::of(y, &[1, 16]).unwrap();
        w.forward_fused(TensorView::of(&x, &[1, 16]).unwrap(), fusion, y, cx)
    };
    fused(&Fusion::default(), &mut y, &mut cx).unwrap();
    assert_eq!(y[0], 5.0);
    assert!(fused(&Fusion { accumulate: true, ..Fusion::default() }, &mut y, &mut cx).is_err());
}

#[test]
fn a_damaged_file_is_refused_before_it_is_mapped() {
    let bytes = fs::read(real()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libNVFP4.so");
    for keep in [0, 3, 64, 4096, bytes.len() / 4, bytes.len() - 1] {
        fs::write(&path, &bytes[..keep]).unwrap();
        let reasons = dead(&named(&path));
        assert_eq!(reasons[0].code, RejectCode::LibraryMissing, "{keep} bytes");
        assert!(reasons[0].have.contains(path.to_str().unwrap()), "{}", reasons[0]);
    }
    fs::write(&path, "#!/bin/sh\n").unwrap();
    assert!(dead(&named(&path))[0].have.contains("ELF"));
}

/// The library that cargo built for this test.
fn real() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libNVFP4.so")
}

fn named(path: &Path) -> BuiltinOptions {
    BuiltinOptions { libraries: [(NAME.to_owned(), path.to_owned())].into(), ..Default::default() }
}

fn dead(options: &BuiltinOptions) -> Vec<Reject> {
    let registry = Registry::builtin(options).unwrap();
    match registry.candidates().iter().find(|c| c.name() == NAME) {
        Some(Candidate::Dead { reasons, .. }) => reasons.clone(),
        _ => panic!("{options:?} gave a live backend"),
    }
}

fn codes(reasons: &[Reject]) -> Vec<RejectCode> {
    reasons.iter().map(|r| r.code).collect()
}

fn first((_dir, path): &(tempfile::TempDir, PathBuf)) -> (RejectCode, String) {
    let reasons = dead(&named(path));
    assert!(reasons[0].have.contains(path.to_str().unwrap()), "the file is named: {}", reasons[0]);
    (reasons[0].code, reasons[0].have.to_string())
}

/// A shared library of a few lines of C.
fn compile(source: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (c, so) = (dir.path().join("fake.c"), dir.path().join("fake.so"));
    fs::write(&c, source).unwrap();
    let out =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&so, &c]).output().expect("a C compiler");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    (dir, so)
}
