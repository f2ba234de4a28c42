//! Libraries that are missing, damaged, old or not ours: each becomes a dead candidate that says why, and the
//! host lives.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]
use q4_core::{
    Activations, BuiltinOptions, Candidate, DType, Device, ExecContext, ExecPath, FuseSet, Fusion,
    LinearSpec, Nvfp4, Nvfp4Parts, OpSet, Q4Schema, Q4Weight, Registry, Reject, RejectCode, ScaleLayout,
    Segment, SegmentSpec, TensorView, TensorViewMut, ThreadPool,
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
    assert!(!facts.version.is_empty(), "{facts:?}");
    let items = backend.probe(registry.env());
    let load = items.iter().find(|i| i.id == "library.load").expect("the load is reported");
    assert!(load.reasons.is_empty() && load.detail.contains(&facts.path), "{load:?}");
    assert!(items.iter().any(|i| i.id == "cpu.isa" && i.reasons.is_empty()), "{items:?}");
}

#[test]
fn a_named_instruction_set_binds() {
    for isa in q4_core::isa::Isa::available().map(q4_core::isa::Isa::name) {
        let options = BuiltinOptions { isa: Some(isa.into()), ..Default::default() };
        let registry = Registry::builtin(&options).unwrap();
        let items = registry.live(NAME).expect("this processor has it").probe(registry.env());
        assert!(items.iter().any(|i| i.detail.starts_with(&format!("{isa} of "))), "{items:?}");
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
fn libraries_of_earlier_interfaces_are_too_old() {
    for symbol in ["NVFP4_quantize", "nvfp4_get_api"] {
        let (code, have) = first(&compile(&format!("void {symbol}(void *x, void **q, void **s) {{}}")));
        assert_eq!(code, RejectCode::LibraryTooOld);
        assert!(have.contains(symbol) && have.contains("a table of its own"), "{have}");
    }
}

/// A library with that descriptor, whose query hands out that table.
fn with_table(name: &str, major: u32, table: &str) -> (tempfile::TempDir, PathBuf) {
    compile(&format!(
        "#define Q4_ABI_MAJOR {major}u\n{}\n\
         Q4_PLUGIN_DESCRIPTOR(\"{name}\", \"1\", \"q4\");\n\
         static const q4_backend_v1 t = {{ {table} }};\n\
         q4_status q4_plugin_query(uint32_t a, uint32_t b, q4_interface *out) {{ out->table = &t; return 0; }}",
        header().replace("#define Q4_ABI_MAJOR 1u", "")
    ))
}

fn header() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../plugins/abi/include/q4_plugin.h");
    fs::read_to_string(path).unwrap()
}

#[test]
fn another_major_version_is_a_mismatch_with_both_versions() {
    let reasons = dead(&named(&with_table("libnvfp4", 2, "0").1));
    assert_eq!(reasons[0].code, RejectCode::AbiMismatch);
    let told = (reasons[0].need.contains("interface 1.x"), reasons[0].have.contains("interface 2."));
    assert_eq!(told, (true, true), "{}", reasons[0]);
}

#[test]
fn a_table_we_cannot_call_is_a_mismatch() {
    // (table initialiser, what the reason says)
    let cases = [
        (".struct_size = 16, .abi_major = 1", "struct_size 16"),
        (".struct_size = sizeof(q4_backend_v1), .abi_major = 7", "7.0"),
        (".struct_size = sizeof(q4_backend_v1), .abi_major = 1", "NULL"),
        (".struct_size = sizeof(q4_backend_v1), .abi_major = 1, .forward = (void *)&t", "which is no code"),
    ];
    for (table, want) in cases {
        let reasons = dead(&named(&with_table("libnvfp4", 1, table).1));
        let (told, help) = reasons.split_at(reasons.len() - 1);
        assert!(
            told.iter().all(|r| r.code == RejectCode::AbiMismatch) && help[0].need.contains("--nvfp4-lib")
        );
        assert!(told.iter().any(|r| r.have.contains(want)), "{want}: {told:?}");
    }
}

/// The C example under the name of libNVFP4.
fn example(name: &str, flags: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let plugins = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../plugins");
    let source = fs::read_to_string(plugins.join("examples/c/acme_c.c")).unwrap();
    let [include, beside] = ["abi/include", "examples/c"].map(|f| format!("-I{}", plugins.join(f).display()));
    compile_with(
        &source.replace("\"acme-c\"", &format!("\"{name}\"")),
        &[&[include.as_str(), beside.as_str()], flags].concat(),
    )
}

#[test]
fn somebody_elses_plugin_is_not_libnvfp4() {
    let (code, have) = first(&example("acme-c", &[]));
    assert_eq!((code, have.ends_with("`acme-c`")), (RejectCode::AbiMismatch, true), "{have}");
}

/// A library made before fusions existed: its table ends where they begin.
#[test]
fn a_library_of_interface_1_0_still_computes_and_fuses_nothing() {
    let (_dir, path) = example("libnvfp4", &["-DQ4_ABI_MINOR=0u"]);
    let registry = Registry::builtin(&named(&path)).unwrap();
    let backend = registry.live(NAME).expect("an old library is a library");
    let (codes, scales) = (vec![0x22u8; 8 * 16], vec![0x38u8; 16]);
    let data = Nvfp4Parts {
        codes: TensorView::of(&codes, &[codes.len()]).unwrap(),
        scales: TensorView::of_bytes(&scales, DType::F8E4M3, &[scales.len()]).unwrap(),
        global: None,
    }
    .into();
    let schema = Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None });
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
    assert_eq!(w.info().backend, NAME);
    assert!(w.fuses(1, FuseSet::NONE) && !w.fuses(1, FuseSet::GATE));
    let mut scratch = vec![0u8; w.workspace(1).max(1)];
    let len = scratch.len();
    cx.workspace = Some(TensorViewMut::of(&mut scratch, &[len]).unwrap());
    let (x, mut y) = ([1f32; 16], [0f32; 16]);
    let fused = |fusion: &Fusion<'_>, y: &mut [f32], cx: &mut ExecContext<'_>| {
        let y = TensorViewMut::of(y, &[1, 16]).unwrap();
        w.forward_fused(TensorView::of(&x, &[1, 16]).unwrap(), fusion, y, cx)
    };
    fused(&Fusion::default(), &mut y, &mut cx).unwrap();
    // Sixteen ones by ones.
    assert_eq!(y, [16.0; 16]);
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
    compile_with(source, &[])
}

fn compile_with(source: &str, flags: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (c, so) = (dir.path().join("fake.c"), dir.path().join("fake.so"));
    fs::write(&c, source).unwrap();
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-w"]).args(flags).arg("-o").args([&so, &c]).arg("-lm");
    let out = command.output().expect("a C compiler");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    (dir, so)
}
