//! Every cell of (machine × encoding × inputs × policy × named backend), as reviewed snapshots of machines
//! that need not be here.
//!
//! Selection is a pure function of facts, so a card nobody has plugged in is a value like any other. A change
//! of priority that moves one layer of one machine to another path shows here before it ships.
use q4_core::formats::ggml::Blocks;
use q4_core::formats::int4::Zeros;
use q4_core::memory::UnifiedMemory;
use q4_core::{
    ActGlobal, ActQuant, Activations, BuiltinOptions, Candidate, ComputePath, Convention, CudaDevice, DType,
    Dense, Device, ExecPath, Found, Fp8, Ggml, HostEnv, Int4, LinearSpec, Mxfp4, Nf4, NibbleOrder, Nvfp4,
    OpSet, Overrides, Policy, Q4Backend, Q4Schema, Registry, Reject, RejectCode, Result, Rule, ScaleLayout,
    SegmentSpec, SelectionError, select,
};
use std::fmt::Write;
use std::sync::Arc;
use {
    q4_dequant_matmul as _, q4_fp8_kernel as _, q4_ggml_kernel as _, q4_int4_kernel as _,
    q4_mxfp4_kernel as _, q4_nf4_kernel as _, q4_nvfp4_kernel as _, q4_reference as _,
};

const NVFP4: Q4Schema =
    Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Multiply) });
const NF4: Q4Schema = Q4Schema::Nf4(Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: None });
const NF4_DQ: Q4Schema =
    Q4Schema::Nf4(Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: Some(256) });
const MXFP4: Q4Schema = Q4Schema::Mxfp4(Mxfp4);
const INT4: Q4Schema = Q4Schema::Int4(Int4 { group: 128, scales: DType::BF16, zeros: Zeros::Middle });
const Q4_K: Q4Schema = Q4Schema::Ggml(Ggml { blocks: Blocks::Q4K });
const Q6_K: Q4Schema = Q4Schema::Ggml(Ggml { blocks: Blocks::Q6K });
const Q8_0: Q4Schema = Q4Schema::Ggml(Ggml { blocks: Blocks::Q80 });
const FP8: Q4Schema = Q4Schema::Fp8(Fp8 { tile: [128, 128], scales: DType::BF16 });
const INT4_ASYM: Q4Schema = Q4Schema::Int4(Int4 { group: 128, scales: DType::F16, zeros: Zeros::Points });
const INT4_AFFINE: Q4Schema = Q4Schema::Int4(Int4 { group: 64, scales: DType::BF16, zeros: Zeros::Biases });
const DENSE: Q4Schema = Q4Schema::Dense(Dense { dtype: DType::BF16 });
const W4A4: Activations = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None });

const LAYERS: [(&str, Q4Schema, Activations); 30] = [
    ("nvfp4 W4A16", NVFP4, Activations::Native),
    ("nvfp4 W4A8", NVFP4, Activations::Int8),
    ("nvfp4 W4A4", NVFP4, W4A4),
    ("nf4 W4A16", NF4, Activations::Native),
    ("nf4 W4A8", NF4, Activations::Int8),
    ("nf4 W4A4", NF4, W4A4),
    ("nf4-dq W4A16", NF4_DQ, Activations::Native),
    ("nf4-dq W4A8", NF4_DQ, Activations::Int8),
    ("nf4-dq W4A4", NF4_DQ, W4A4),
    ("mxfp4 W4A16", MXFP4, Activations::Native),
    ("mxfp4 W4A8", MXFP4, Activations::Int8),
    ("mxfp4 W4A4", MXFP4, W4A4),
    ("int4 W4A16", INT4, Activations::Native),
    ("int4 W4A8", INT4, Activations::Int8),
    ("int4 W4A4", INT4, W4A4),
    ("int4-asym W4A16", INT4_ASYM, Activations::Native),
    ("int4-asym W4A8", INT4_ASYM, Activations::Int8),
    ("int4-asym W4A4", INT4_ASYM, W4A4),
    ("int4-affine W4A16", INT4_AFFINE, Activations::Native),
    ("int4-affine W4A8", INT4_AFFINE, Activations::Int8),
    ("int4-affine W4A4", INT4_AFFINE, W4A4),
    ("q4_k native", Q4_K, Activations::Native),
    ("q4_k int8", Q4_K, Activations::Int8),
    ("q4_k NVFP4", Q4_K, W4A4),
    ("q6_k native", Q6_K, Activations::Native),
    ("q8_0 int8", Q8_0, Activations::Int8),
    ("fp8 native", FP8, Activations::Native),
    ("fp8 int8", FP8, Activations::Int8),
    ("fp8 NVFP4", FP8, W4A4),
    ("dense", DENSE, Activations::Native),
];
const NAMES: [Option<&str>; 10] = [
    None,
    Some("nvfp4-kernel"),
    Some("nf4-kernel"),
    Some("mxfp4-kernel"),
    Some("ggml-kernel"),
    Some("fp8-kernel"),
    Some("int4-kernel"),
    Some("dequant-matmul"),
    Some("reference"),
    Some("typo"),
];
const GPUS: [(u32, u32); 4] = [(8, 0), (9, 0), (10, 0), (12, 0)];
const LIBRARIES: [(&str, Library); 2] = [("absent", Library::Absent), ("cuda", Library::There)];

/// libNVFP4 as it is in the build folder, which computes on every machine.
#[derive(Clone, Copy, PartialEq)]
enum Library {
    Absent,
    There,
}

#[test]
fn machine_without_a_gpu() {
    for (name, library) in LIBRARIES {
        insta::assert_snapshot!(format!("no_gpu_library_{name}"), machine(None, library).table(&NAMES));
    }
}

#[test]
fn machines_with_a_gpu() {
    for gpu in GPUS {
        for (name, library) in LIBRARIES {
            let snapshot = format!("sm_{}{}_library_{name}", gpu.0, gpu.1);
            insta::assert_snapshot!(snapshot, machine(Some(gpu), library).table(&NAMES));
        }
    }
}

/// A machine has a GPU, and something that its products take is missing, or the user demands what not
/// everybody does.
#[test]
fn machines_with_a_gpu_that_lack_something() {
    let mut out = String::new();
    for gpu in GPUS {
        for (what, change) in LACKS {
            let mut m = machine(Some(gpu), Library::There);
            change(&mut m);
            let _ = writeln!(out, "== sm_{}{}, {what}", gpu.0, gpu.1);
            out += &m.table(&[None]);
        }
    }
    let _ = writeln!(out, "== sm_75");
    out += &machine(Some((7, 5)), Library::There).table(&[None]);
    let _ = writeln!(out, "== sm_90, products on the CPU");
    out += &Machine { device: Device::Cpu, ..machine(Some((9, 0)), Library::There) }.table(&[None]);
    insta::assert_snapshot!("gpus_that_lack_something", out);
}

type Change = fn(&mut Machine);
const LACKS: [(&str, Change); 7] = [
    ("cuBLASLt without FP4 products", |m| m.env.cuda_tools.cublaslt = Found::Yes(12_06_00)),
    ("no NVRTC", |m| m.lose_nvrtc()),
    ("no NVRTC, images of nf4-kernel", |m| {
        m.lose_nvrtc();
        let capability = m.env.cuda[0].capability;
        m.env.cuda_tools.images.insert("nf4-kernel".into(), vec![capability]);
    }),
    ("no cuBLASLt", |m| m.env.cuda_tools.cublaslt = Found::No("no libcublasLt.so".into())),
    ("a device that cannot be opened", |m| {
        m.env.cuda_tools.unusable.insert(0, "in exclusive use".into());
    }),
    ("unified memory required", |m| m.unified_memory = UnifiedMemory::Require),
    ("inputs and outputs of float32", |m| m.dtype = DType::F32),
];

/// A kernel-only request is served by a kernel or refused, whatever the machine: checked without looking at a
/// snapshot.
#[test]
fn kernel_only_never_yields_a_dense_product_of_a_4bit_layer() {
    each_machine(&mut |m| {
        for (_, schema, activations) in LAYERS {
            if let Ok(s) = m.select(schema, activations, ComputePath::KernelOnly, None) {
                assert!(s.path < ExecPath::DequantMatmul || !schema.is_packed(), "{schema}");
                assert!(!s.is_downgrade);
            }
        }
    });
}

/// `auto` and `kernel-or-fallback` choose the same wherever `auto` chooses at all; where it does not, and the
/// other does, that is a downgrade, and it is marked.
#[test]
fn nobody_is_downgraded_without_agreeing() {
    let mut downgrades = 0;
    each_machine(&mut |m| {
        for (_, schema, activations) in LAYERS {
            let auto = m.select(schema, activations, ComputePath::Auto, None);
            let agreed = m.select(schema, activations, ComputePath::KernelOrFallback, None);
            match (auto, agreed) {
                (Ok(a), Ok(b)) => {
                    let name = |s: &q4_core::Selection| (s.backend.descriptor().name.to_string(), s.path);
                    assert_eq!((name(&a), a.is_downgrade, b.is_downgrade), (name(&b), false, false));
                }
                (Err(SelectionError::DowngradeDenied { got, rejected, .. }), Ok(b)) => {
                    assert!(b.is_downgrade && b.path == got && got == ExecPath::DequantMatmul);
                    assert!(!rejected.is_empty());
                    downgrades += 1;
                }
                (Err(a), Err(b)) => assert_eq!(refusal(&a), refusal(&b)),
                (a, b) => panic!("{a:?} and {b:?}"),
            }
        }
    });
    assert!(downgrades > 50, "{downgrades}");
}

/// Backends that were made for one machine say the same of another as those that were made for it, so
/// whatever machine runs this test, its devices and libraries are in no answer.
#[test]
fn verdicts_are_functions_of_their_arguments() {
    let makers = [None, Some((9, 0)), Some((12, 0))].map(|gpu| machine(gpu, Library::There).candidates);
    let here = Registry::builtin(&BuiltinOptions::default()).expect("built-ins");
    let live = |all: &[Candidate], name: &str| -> Option<Arc<dyn Q4Backend>> {
        all.iter().find_map(|c| match c {
            Candidate::Live(b) if c.name() == name => Some(b.clone()),
            _ => None,
        })
    };
    let mut asked = 0;
    each_machine(&mut |m| {
        for name in [
            "dequant-matmul",
            "fp8-kernel",
            "ggml-kernel",
            "int4-kernel",
            "mxfp4-kernel",
            "nf4-kernel",
            "nvfp4-kernel",
            "reference",
        ] {
            let all: Vec<_> =
                makers.iter().filter_map(|c| live(c, name)).chain(live(here.candidates(), name)).collect();
            for (_, schema, activations) in LAYERS {
                let spec = m.spec(schema, activations);
                for path in [
                    ExecPath::NativeKernel,
                    ExecPath::FusedRounded,
                    ExecPath::FusedDequant,
                    ExecPath::DequantMatmul,
                    ExecPath::Reference,
                ] {
                    let first = all[0].can_prepare(&spec, path, &m.env);
                    assert!(all.iter().all(|b| b.can_prepare(&spec, path, &m.env) == first), "{name} {path}");
                    asked += all.len();
                }
            }
        }
    });
    assert!(asked > 10_000, "{asked}");
}

/// A machine described by data.
struct Machine {
    candidates: Vec<Candidate>,
    env: HostEnv,
    device: Device,
    dtype: DType,
    unified_memory: UnifiedMemory,
}

fn each_machine(job: &mut dyn FnMut(&Machine)) {
    for gpu in GPUS.map(Some).into_iter().chain([None, Some((7, 5))]) {
        for library in [Library::Absent, Library::There] {
            job(&machine(gpu, library));
        }
        if gpu.is_some() {
            for (_, change) in LACKS {
                let mut m = machine(gpu, Library::There);
                change(&mut m);
                job(&m);
                m.device = Device::Cpu;
                job(&m);
            }
        }
    }
}

/// With everything its GPU takes, and libNVFP4 in the given state.
fn machine(gpu: Option<(u32, u32)>, library: Library) -> Machine {
    let mut env = HostEnv { arch: "x86_64".into(), processors: 8, ..HostEnv::default() };
    env.cuda = gpu
        .map(|capability| CudaDevice { ordinal: 0, capability, name: "a card".into(), memory: 80 << 30 })
        .into_iter()
        .collect();
    if gpu.is_some() {
        (env.cuda_tools.nvrtc, env.cuda_tools.cublaslt) = (Found::Yes(13_000), Found::Yes(130_000));
    }
    let registry = Registry::on(env.clone(), &BuiltinOptions::default()).expect("built-ins");
    let candidates = registry.candidates().to_vec();
    let (device, dtype) = match gpu {
        Some(_) => (Device::Cuda(0), DType::BF16),
        None => (Device::Cpu, DType::F32),
    };
    let mut m = Machine { candidates, env, device, dtype, unified_memory: UnifiedMemory::Disabled };
    if library == Library::Absent {
        m.lose_library();
    }
    m
}

impl Machine {
    fn lose_library(&mut self) {
        self.env.libraries.clear();
        let reasons = vec![Reject::new(RejectCode::LibraryMissing, "libNVFP4.so", "no such file")];
        self.replace(Candidate::Dead { name: "nvfp4-kernel".into(), reasons });
    }

    fn replace(&mut self, candidate: Candidate) {
        self.candidates.retain(|c| c.name() != candidate.name());
        self.candidates.push(candidate);
        self.candidates.sort_by(|a, b| a.name().cmp(b.name()));
    }

    fn lose_nvrtc(&mut self) {
        self.env.cuda_tools.nvrtc = Found::No("no libnvrtc.so".into());
    }

    fn spec(&self, schema: Q4Schema, activations: Activations) -> LinearSpec {
        LinearSpec {
            segments: vec![SegmentSpec { name: "model.layers.0.mlp.down_proj".into(), rows: 4096 }],
            schema,
            k: 12288,
            max_m: 512,
            x: self.dtype,
            y: self.dtype,
            activations,
            device: self.device,
            ops: OpSet::FORWARD,
        }
    }

    fn select(
        &self,
        schema: Q4Schema,
        activations: Activations,
        compute: ComputePath,
        name: Option<&str>,
    ) -> Result<q4_core::Selection, SelectionError> {
        let overrides = Overrides { all: name.map(str::to_owned), ..Overrides::default() };
        let policy = Policy { compute, unified_memory: self.unified_memory, overrides };
        select(&self.candidates, &self.spec(schema, activations), &policy, &self.env)
    }

    fn table(&self, names: &[Option<&str>]) -> String {
        let mut out = String::new();
        for (layer, schema, activations) in LAYERS {
            let _ = writeln!(out, "{layer} on {}", self.device);
            for compute in ComputePath::ALL {
                for name in names {
                    let cell = match self.select(schema, activations, compute, *name) {
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
}

/// The code, and everybody's reasons but for those that only say that another was named or that the encoding
/// is another.
fn refusal(e: &SelectionError) -> String {
    let is_told = |x: &Reject| !matches!(x.code, RejectCode::NotSelected | RejectCode::SchemaUnsupported);
    let reasons: Vec<_> = e
        .rejected()
        .iter()
        .filter(|r| r.reasons.iter().any(is_told))
        .map(|r| {
            let codes: Vec<_> = r.reasons.iter().map(|x| x.code.as_str()).collect();
            let path = r.path.map_or(String::new(), |p| format!("/{p}"));
            format!("{}{path}: {}", r.backend, codes.join("+"))
        })
        .collect();
    let kind = q4_core::Error::from(e.clone()).code().id();
    if reasons.is_empty() { kind.to_owned() } else { format!("{kind} [{}]", reasons.join("; ")) }
}
