//! Every cell of (policy × named backend × availability) for machines that need not be here, as reviewed snapshots.
//!
//! Selection is a pure function of facts, so a card nobody has plugged in is a value like any other. A change of priority
//! that moves one layer of one machine to another path shows here before it ships.
use q4_core::{
    ActGlobal, ActQuant, Activations, BuiltinOptions, Candidate, ComputePath, Convention, CudaDevice, DType,
    Device, HostEnv, LibraryFacts, LinearSpec, NibbleOrder, OpSet, Overrides, Policy, Q4Schema, Registry,
    Reject, RejectCode, Rule, ScaleLayout, SegmentSpec, SelectionError, select,
};
use q4_nvfp4_kernel::Nvfp4Kernel;
use std::fmt::Write;
use {q4_dequant_matmul as _, q4_nf4_kernel as _, q4_reference as _};

const NVFP4: Q4Schema =
    Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Multiply) };
const NF4: Q4Schema = Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: None };
const DENSE: Q4Schema = Q4Schema::Dense { dtype: DType::BF16 };
const W4A4: Activations = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None });

const LAYERS: [(&str, Q4Schema, Activations); 4] = [
    ("nvfp4 W4A16", NVFP4, Activations::Native),
    ("nvfp4 W4A4", NVFP4, W4A4),
    ("nf4 W4A16", NF4, Activations::Native),
    ("dense", DENSE, Activations::Native),
];
const NAMES: [Option<&str>; 6] =
    [None, Some("nvfp4-kernel"), Some("nf4-kernel"), Some("dequant-matmul"), Some("reference"), Some("typo")];

#[derive(Clone, Copy)]
enum Library {
    Absent,
    CpuOnly,
    Cuda,
    /// The same on a machine whose cuBLASLt has no FP4 kernels.
    CudaOld,
}

#[test]
fn machine_without_a_gpu() {
    for (name, library) in [("absent", Library::Absent), ("cpu", Library::CpuOnly), ("cuda", Library::Cuda)] {
        insta::assert_snapshot!(format!("no_gpu_library_{name}"), table(None, Device::Cpu, library));
    }
}

#[test]
fn machines_with_a_gpu() {
    for capability in [(8, 0), (9, 0), (10, 0), (12, 0)] {
        for (name, library) in
            [("absent", Library::Absent), ("cpu", Library::CpuOnly), ("cuda", Library::Cuda)]
        {
            let snapshot = format!("sm_{}{}_library_{name}", capability.0, capability.1);
            insta::assert_snapshot!(snapshot, table(Some(capability), Device::Cuda(0), library));
        }
    }
}

/// The fused kernels of a device with FP4 tensor cores do not need what its native path needs.
#[test]
fn machines_whose_fp4_tensor_cores_cannot_be_used() {
    let snapshot = table(Some((12, 0)), Device::Cuda(0), Library::CudaOld);
    insta::assert_snapshot!("sm_120_library_cuda_old", snapshot);
}

/// A kernel-only request is served by a kernel or refused, whatever the machine: checked without looking at a snapshot.
#[test]
fn kernel_only_never_yields_a_dense_product_of_a_4bit_layer() {
    for capability in [None, Some((8, 0)), Some((9, 0)), Some((10, 0)), Some((12, 0))] {
        for library in [Library::Absent, Library::CpuOnly, Library::Cuda, Library::CudaOld] {
            let (candidates, env) = machine(capability, library);
            for (_, schema, activations) in LAYERS {
                let device = capability.map_or(Device::Cpu, |_| Device::Cuda(0));
                let policy = Policy { compute: ComputePath::KernelOnly, ..Policy::default() };
                if let Ok(s) = select(&candidates, &spec(schema, activations, device), &policy, &env) {
                    let kernel = s.path < q4_core::ExecPath::DequantMatmul;
                    assert!(kernel || !schema.is_4bit(), "{capability:?} {schema}");
                    assert!(!s.is_downgrade);
                }
            }
        }
    }
}

fn table(capability: Option<(u32, u32)>, device: Device, library: Library) -> String {
    let (candidates, env) = machine(capability, library);
    let mut out = String::new();
    for (layer, schema, activations) in LAYERS {
        let _ = writeln!(out, "{layer} on {device}");
        for compute in ComputePath::ALL {
            for name in NAMES {
                let overrides = Overrides { all: name.map(str::to_owned), ..Overrides::default() };
                let policy = Policy { compute, deny_downgrade: false, overrides };
                let cell = match select(&candidates, &spec(schema, activations, device), &policy, &env) {
                    Ok(s) => {
                        let downgrade = if s.is_downgrade { " (downgrade)" } else { "" };
                        format!("{} via {}{downgrade}", s.backend.descriptor().name, s.path)
                    }
                    Err(e) => refusal(&e),
                };
                let _ = writeln!(out, "  {compute:<20} {:<14} -> {cell}", name.unwrap_or("-"));
            }
        }
    }
    out
}

fn refusal(e: &SelectionError) -> String {
    let reasons: Vec<_> = e
        .rejected()
        .iter()
        .filter(|r| r.reasons.iter().any(|x| x.code != RejectCode::NotSelected))
        .map(|r| {
            let codes: Vec<_> = r.reasons.iter().map(|x| x.code.as_str()).collect();
            let path = r.path.map_or(String::new(), |p| format!("/{p}"));
            format!("{}{path}: {}", r.backend, codes.join("+"))
        })
        .collect();
    let kind = q4_core::Error::from(e.clone()).code().id();
    if reasons.is_empty() { kind.to_owned() } else { format!("{kind} [{}]", reasons.join("; ")) }
}

/// The built-ins with the library in the given state, on a machine described by data.
fn machine(capability: Option<(u32, u32)>, library: Library) -> (Vec<Candidate>, HostEnv) {
    let registry = Registry::builtin(&BuiltinOptions::default()).expect("built-ins");
    let mut env = HostEnv { arch: "x86_64".into(), processors: 8, ..HostEnv::default() };
    env.cuda = capability
        .map(|capability| CudaDevice { ordinal: 0, capability, name: "a card".into(), memory: 80 << 30 })
        .into_iter()
        .collect();
    let images = match library {
        Library::Cuda | Library::CudaOld => vec![(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)],
        Library::Absent | Library::CpuOnly => Vec::new(),
    };
    let is_old = matches!(library, Library::CudaOld);
    let none = Reject::new(RejectCode::KernelImageMissing, "block-scaled FP4 kernels in cuBLASLt", "none");
    let facts = LibraryFacts {
        path: "libNVFP4.so".into(),
        version: "1.0.0".into(),
        cpu_isa: vec!["avx512vnni".into(), "avx2".into(), "portable".into()],
        cuda_native: images.iter().copied().filter(|c| c.0 >= 10 && !is_old).collect(),
        cuda_native_refused: if is_old { vec![none] } else { Vec::new() },
        cuda_images: images,
        ..LibraryFacts::default()
    };
    let kernel = match library {
        Library::Absent => Candidate::Dead {
            name: "nvfp4-kernel".into(),
            reasons: vec![Reject::new(RejectCode::LibraryMissing, "libNVFP4.so", "no such file")],
        },
        Library::CpuOnly | Library::Cuda | Library::CudaOld => {
            env.libraries.insert("nvfp4-kernel".into(), facts.clone());
            Candidate::Live(Nvfp4Kernel::with_facts(facts))
        }
    };
    let others = registry.candidates().iter().filter(|c| c.name() != "nvfp4-kernel").cloned();
    let mut all: Vec<_> = others.chain([kernel]).collect();
    all.sort_by(|a, b| a.name().cmp(b.name()));
    (all, env)
}

fn spec(schema: Q4Schema, activations: Activations, device: Device) -> LinearSpec {
    LinearSpec {
        segments: vec![SegmentSpec { name: "model.layers.0.mlp.down_proj".into(), rows: 4096 }],
        schema,
        k: 12288,
        max_m: 512,
        x: DType::F32,
        y: DType::F32,
        activations,
        device,
        ops: OpSet::FORWARD,
    }
}
