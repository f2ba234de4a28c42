//! A library whose device memory is its own: nobody else touches it, products there are proved like others,
//! and memory functions that lie are found out.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]
mod built;

use q4_conformance::{AbiProbe, InProcess, Level, Options, Profile, Report, run_with};
use q4_core::{
    Activations, BuiltinOptions, Candidate, Code, DType, Device, Dispatch, Error, ExecPath, HostEnv,
    LinearSpec, Nvfp4, Nvfp4Parts, OpSet, Overrides, Policy, Q4Backend, Q4Schema, Q4Weight, Registry,
    RejectCode, Result, ScaleLayout, Segment, SegmentSpec, TensorView, ThreadPool,
};
use q4_plugin_host::remote::{Isolation, Remote};
use q4_plugin_host::{Loaded, Loader, Refusal, TableCases};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const NAME: &str = "acme-arena";
const N: usize = 96;
const K: usize = 128;

fn device() -> Device {
    Device::vendor(NAME, 0)
}

fn live(loaded: Loaded) -> Arc<dyn Q4Backend> {
    match loaded.candidate {
        Candidate::Live(backend) => backend,
        Candidate::Dead { .. } => unreachable!("loaded libraries live"),
    }
}

struct Abi(TableCases);

impl AbiProbe for Abi {
    fn cases(&self) -> Vec<String> {
        self.0.cases()
    }
    fn run(&self, case: &str) -> Result<()> {
        self.0.run(case)
    }
}

fn suite(path: &Path, options: &Options) -> Report {
    let loaded = q4_plugin_host::load(path).unwrap();
    let (table, backend) = (loaded.table.clone(), live(loaded));
    let options = Options { device: device(), ..options.clone() };
    let env = HostEnv { vendor: backend.devices(), ..HostEnv::collect() };
    run_with(&InProcess, &*backend, Some(&Abi(table)), &options, &env, &ThreadPool::new(2))
}

#[test]
fn the_device_is_conformant() {
    let report = suite(&built::acme_arena(), &Options::of(Profile::Training));
    assert!(report.conformant && report.complete, "{}", report.text());
    let judged = |part: &str| report.cases.iter().filter(|c| c.1.id.contains(part)).count();
    assert!(judged("/nvfp4@1/native/acme-arena:0/fused-dequant/") > 100, "{}", report.text());
    assert_eq!(judged("table/device-"), 5);
    let own = report.backends[0].device.as_deref();
    assert_eq!(own, Some("acme-arena:0 ACME arena (acme-arena 1, 4 GiB)"));
}

#[test]
fn nobody_else_touches_its_memory() {
    let backend = live(q4_plugin_host::load(&built::acme_arena()).unwrap());
    let devices = backend.devices();
    assert_eq!((devices.len(), devices[0].device, &*devices[0].name), (1, device(), "ACME arena"));
    let memory = backend.memory(device()).unwrap();
    let before = memory.free().unwrap();
    let bytes = memory.alloc(1000).unwrap();
    assert!(memory.free().unwrap() < before);
    bytes.upload(10, &[1, 2, 3]).unwrap();
    let mut back = [0; 3];
    bytes.download(10, &mut back).unwrap();
    assert_eq!(back, [1, 2, 3]);
    // The system, which is asked to read there, finds nothing that it may.
    let (file, at) = (tempfile::tempfile().unwrap(), bytes.address() as usize);
    // SAFETY: the system follows the address, and says so where it cannot.
    let written = unsafe { libc::write(file.as_raw_fd(), std::ptr::without_provenance(at), 3) };
    let why = std::io::Error::last_os_error().raw_os_error();
    assert_eq!((written, why), (-1, Some(libc::EFAULT)));
    assert!(bytes.upload(999, &[0; 2]).is_err() && bytes.download(usize::MAX, &mut back).is_err());
    drop(bytes);
    assert_eq!(memory.free().unwrap(), before);
    for other in [Device::vendor(NAME, 1), Device::vendor("acme-c", 0)] {
        assert_eq!(backend.memory(other).err().unwrap().code(), Code::DeviceMissing);
    }
}

fn spec(device: Device) -> LinearSpec {
    LinearSpec {
        segments: vec![SegmentSpec { name: "a.q_proj".into(), rows: N }],
        schema: Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None }),
        k: K,
        max_m: 4,
        x: DType::F32,
        y: DType::F32,
        activations: Activations::Native,
        device,
        ops: OpSet::FORWARD,
    }
}

/// Selects, prepares and checks a product on the device, as a program does before its first call.
fn self_checked(path: &Path) -> Result<(), Error> {
    let loaded = q4_plugin_host::load(path)?;
    let mut registry = Registry::on(HostEnv::collect(), &BuiltinOptions::default())?;
    registry.add(loaded.candidate)?;
    assert_eq!(registry.env().vendor_device(device()).unwrap().name, "ACME arena");
    let overrides = Overrides { all: Some(NAME.into()), ..Overrides::default() };
    let dispatch = Dispatch::new(registry, Policy { overrides, ..Policy::default() });
    let codes: Vec<u8> = (0..N * K / 2).map(|i| ((i * 151) >> 2) as u8).collect();
    let scales: Vec<u8> = (0..N * K / 16).map(|i| 0x30 + (i % 16) as u8).collect();
    let data = Nvfp4Parts {
        codes: TensorView::of(&codes, &[N, K / 2])?,
        scales: TensorView::of_bytes(&scales, DType::F8E4M3, &[N, K / 16])?,
        global: None,
    }
    .into();
    let (segments, spec) = ([Segment { rows: N, data }], spec(device()));
    let w = Q4Weight { schema: spec.schema, k: K, segments: &segments };
    let selection = dispatch.select(&spec)?;
    assert_eq!((&*selection.backend.descriptor().name, selection.path), (NAME, ExecPath::FusedDequant));
    dispatch.prepare(&w, &spec, &selection, &ThreadPool::new(2)).map(drop)
}

#[test]
fn a_product_there_is_checked_before_its_first_use() {
    self_checked(&built::acme_arena()).unwrap();
}

#[test]
fn a_device_that_is_not_its_own_is_refused() {
    let backend = live(q4_plugin_host::load(&built::acme_arena()).unwrap());
    let ask = |device| backend.can_prepare(&spec(device), ExecPath::FusedDequant, &HostEnv::collect());
    assert_eq!(ask(device()), Ok(()));
    for other in [Device::Cpu, Device::Cuda(0), Device::vendor(NAME, 1), Device::vendor("acme", 0)] {
        let reasons = ask(other).unwrap_err();
        assert_eq!(reasons[0].code, RejectCode::DeviceAbsent, "{other}: {reasons:?}");
    }
    let theirs = live(q4_plugin_host::load(&built::acme_c()).unwrap());
    assert!(theirs.devices().is_empty());
    let refused = theirs.can_prepare(&spec(device()), ExecPath::FusedDequant, &HostEnv::collect());
    let reasons = refused.unwrap_err();
    assert!(reasons[0].to_string().contains("a device of acme-c"), "{reasons:?}");
}

#[test]
fn a_process_of_its_own_has_the_device_too() {
    let how = Isolation {
        program: env!("CARGO_BIN_EXE_q4-plugin-probe").into(),
        args: Vec::new(),
        limit: Duration::from_secs(60),
        is_judged: true,
    };
    let remote = Remote::start(&Loader::default().examine(&built::acme_arena()).unwrap(), &how).unwrap();
    let here = live(q4_plugin_host::load(&built::acme_arena()).unwrap());
    assert_eq!(remote.devices(), here.devices());
    for case in TableCases::names(true) {
        remote.table_case(&case).unwrap();
    }
    let memory = remote.memory(device()).unwrap();
    assert_eq!(memory.free().unwrap(), here.memory(device()).unwrap().free().unwrap());
    // Operands are staged where the library is, not here.
    assert_eq!(memory.alloc(1).err().unwrap().code(), Code::Unsupported);
}

/// A lie, and the check of the table that catches it.
const LIES: [(&str, &str, &str); 12] = [
    ("device-memory-keeps-bytes", "*out = DEVICE.addresses + at;", "*out = NULL;"),
    ("device-memory-is-apart", "*out = DEVICE.addresses + at;", "*out = DEVICE.addresses;"),
    ("device-memory-keeps-bytes", "*out = DEVICE.addresses + at;", "*out = DEVICE.addresses + at + 16;"),
    (
        "device-memory-keeps-bytes",
        "memcpy(there, from, bytes);",
        "memcpy(there, from, bytes > 99 ? 99 : bytes);",
    ),
    ("device-memory-keeps-bytes", "memcpy(there, from, bytes);", "memcpy(there, from, bytes + 1);"),
    ("device-memory-keeps-bytes", "memcpy(to, there, bytes);", "memcpy(to, there, bytes + 8);"),
    (
        "device-memory-keeps-bytes",
        "memcpy(to, there, bytes);",
        "memcpy(to, there, bytes);\n    if (bytes > 65536)\n        ((char *)to)[65536] ^= 1;",
    ),
    (
        "device-memory-is-apart",
        "    at = take(bytes);",
        "    static int calls;\n    if (++calls % 7 == 0)\n \
         return fail(err, Q4_E_DEVICE, \"lost\");\n    at = take(bytes);",
    ),
    (
        "device-memory-is-given-back",
        "    return give_back((uint64_t)((uintptr_t)at",
        "    return 1 || give_back((uint64_t)((uintptr_t)at",
    ),
    ("device-memory-ends", "    at = take(bytes);", "    at = take(bytes > MEMORY ? 4096 : bytes);"),
    (
        "device-says-the-same",
        "out->name = name, out->fingerprint = fingerprint;",
        "static int calls;\n    out->name = name, out->fingerprint = fingerprint;\n \
         out->fingerprint.len -= (size_t)(calls++ & 1);",
    ),
    ("device-says-the-same", "out->free_bytes = MEMORY - DEVICE.used;", "out->free_bytes = MEMORY + 1;"),
];

#[test]
fn memory_functions_that_lie_are_caught() {
    let dir = tempfile::tempdir().unwrap();
    for (i, (case, from, to)) in LIES.into_iter().enumerate() {
        let path = built::arena(dir.path(), &format!("lie-{i}"), &[(from, to)]);
        let loaded = q4_plugin_host::load(&path);
        match loaded {
            Ok(loaded) => {
                let table = loaded.table;
                let failed: Vec<_> = table.cases().into_iter().filter(|c| table.run(c).is_err()).collect();
                assert!(failed.contains(&case.to_owned()), "{i}, {case}: {failed:?}");
            }
            // What contradicts itself at once is not even loaded.
            Err(refusal) => assert_eq!(refusal.reasons[0].code, RejectCode::DeviceAbsent, "{i}: {refusal}"),
        }
    }
}

fn refused(name: &str, edits: &[(&str, &str)]) -> Refusal {
    let dir = tempfile::tempdir().unwrap();
    q4_plugin_host::load(&built::arena(dir.path(), name, edits)).err().unwrap()
}

#[test]
fn tables_and_devices_that_make_no_sense_are_refused() {
    for entry in ["device", "device_alloc", "device_free", "copy_in", "copy_out", "synchronize"] {
        let (from, to) = (format!("    .{entry} = {entry},"), format!("    .{entry} = NULL,"));
        let refusal = refused(entry, &[(&from, &to)]);
        assert_eq!(refusal.reasons[0].code, RejectCode::AbiMismatch, "{refusal}");
        assert!(refusal.reasons[0].need.contains(&format!("`{entry}`")), "{refusal}");
    }
    for (name, from, to) in [
        ("endless", "return id == 0 ? Q4_OK :", "return 1 ? Q4_OK :"),
        ("nameless", "Q4_STR(\"ACME arena\")", "{NULL, 4}"),
        ("escape", "Q4_STR(\"ACME arena\")", "Q4_STR(\"ACME\\033[2J\")"),
        ("no-fingerprint", "Q4_STR(\"acme-arena 1, 4 GiB\")", "{\"\", 0}"),
        ("device-fails", "    out->memory_bytes = MEMORY;", "    return fail(err, Q4_E_DEVICE, \"burnt\");"),
    ] {
        let refusal = refused(name, &[(from, to)]);
        assert_eq!(refusal.reasons[0].code, RejectCode::DeviceAbsent, "{name}: {refusal}");
    }
}

/// What only products meet is caught by them.
const SHY: [(&str, &str); 4] = [
    // Checks of the table copy no multiple of 512 bytes and more.
    (
        "memcpy(to, there, bytes);",
        "memcpy(to, there, bytes);\n    if (bytes % 4 == 0 && bytes > 512)\n \
         ((char *)to)[bytes / 2] ^= 64;",
    ),
    (
        "memcpy(there, from, bytes);",
        "memcpy(there, from, bytes % 4 == 0 && bytes > 512 ? bytes - 300 : bytes);",
    ),
    // A kernel that writes past its output, on the device.
    (
        "return forward(p, &in, &out, &inner, err);",
        "q4_status done = forward(p, &in, &out, &inner, err);\n \
         ((char *)out.data)[out.bytes] = 1;\n    return done;",
    ),
    // And one that does nothing.
    ("return forward(p, &in, &out, &inner, err);", "return done(err);"),
];

#[test]
fn lies_that_only_products_meet_are_caught_by_the_suite_and_the_self_check() {
    let dir = tempfile::tempdir().unwrap();
    for (i, (from, to)) in SHY.into_iter().enumerate() {
        let path = built::arena(dir.path(), &format!("shy-{i}"), &[(from, to)]);
        let options = Options { levels: vec![Level::L2], sample: Some(2), ..Options::of(Profile::Inference) };
        let report = suite(&path, &options);
        assert!(!report.conformant && report.failed > 0, "{i}: {}", report.text());
        let e = self_checked(&path).unwrap_err();
        assert!(matches!(e.code(), Code::SelfCheckFailed | Code::ConformanceFailed), "{i}: {e}");
    }
}

/// Memory that is the program's is not the device's.
#[test]
fn memory_of_the_program_is_no_memory_of_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let load = |name: &str, to: &str| {
        let path = built::arena(dir.path(), name, &[("*out = DEVICE.addresses + at;", to)]);
        live(q4_plugin_host::load(&path).unwrap()).memory(device()).unwrap()
    };
    let alloc =
        |memory: &Arc<dyn q4_core::device::DeviceMemory>| memory.alloc(4096).err().unwrap().to_string();
    let stack = load("stack", "*out = (void *)((uintptr_t)err / 256 * 256);");
    assert!(alloc(&stack).contains("on the stack of the call"), "{}", alloc(&stack));
    let null = load("null", "*out = NULL;");
    assert!(alloc(&null).contains("that is not 0"), "{}", alloc(&null));
    let crooked = load("crooked", "*out = DEVICE.addresses + at + 8;");
    assert!(alloc(&crooked).contains("multiple of 256"), "{}", alloc(&crooked));
    let twice = load("twice", "*out = DEVICE.addresses;");
    let first = twice.alloc(4096).unwrap();
    assert!(alloc(&twice).contains("is in use"), "{}", alloc(&twice));
    drop(first);
    // Memory that the program has as well: what it copies from there is no copy.
    let edits = [("*out = DEVICE.addresses + at;", "*out = DEVICE.bytes + at;")];
    let shared = live(q4_plugin_host::load(&built::arena(dir.path(), "shared", &edits)).unwrap());
    let bytes = shared.memory(device()).unwrap().alloc(4096).unwrap();
    // SAFETY: memory of the library, mapped for reading and writing as long as it is allocated.
    let own = unsafe { std::slice::from_raw_parts_mut(bytes.address() as *mut u8, 64) };
    let e = bytes.download(128, own).err().unwrap().to_string();
    assert!(e.contains("memory of the device"), "{e}");
}
