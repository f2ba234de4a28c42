//! What this backend can serve, decided from facts alone: the library is never called here, so that `explain`
//! and tests can ask about machines they do not have.
use q4_core::{
    ActGlobal, ActQuant, Activations, CudaDevice, Device, ExecPath, HostEnv, LibraryFacts, LinearSpec, OpSet,
    ProbeItem, Q4Schema, Reject, RejectCode, Verdict,
};

/// Name in the registry, in overrides and in [`HostEnv::libraries`].
pub const NAME: &str = "nvfp4-kernel";

/// Compute capabilities whose tensor cores multiply block-scaled FP4 (PTX ISA, `mma` with `kind::mxf4nvf4`).
pub const BLACKWELL: [(u32, u32); 4] = [(10, 0), (10, 3), (12, 0), (12, 1)];

/// Oldest capability the fused kernels are written for: bf16 `mma` and asynchronous copies.
const FUSED_SINCE: (u32, u32) = (8, 0);

/// Paths a library with these facts is offered for. The native one also where the device has what it takes
/// and something else is missing, so that the reason is listed.
pub fn paths(facts: &LibraryFacts) -> Vec<ExecPath> {
    let native =
        facts.cuda_native.iter().any(|c| BLACKWELL.contains(c)) || !facts.cuda_native_refused.is_empty();
    native.then_some(ExecPath::NativeKernel).into_iter().chain([ExecPath::FusedDequant]).collect()
}

/// Every reason why `spec` cannot be served on `path` in `env`. Looks at its arguments and at nothing else.
pub fn verdict(spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
    let mut reasons = Vec::new();
    let mut no = |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
    if !matches!(spec.schema, Q4Schema::Nvfp4 { .. }) {
        no(RejectCode::SchemaUnsupported, "nvfp4", spec.schema.to_string());
    }
    if !matches!(path, ExecPath::NativeKernel | ExecPath::FusedDequant) {
        no(RejectCode::PathUnsupported, "native-kernel or fused-dequant", path.to_string());
    }
    if path == ExecPath::NativeKernel && !matches!(spec.activations, Activations::Nvfp4(_)) {
        no(
            RejectCode::ActivationsUnsupported,
            "nvfp4, the only input of FP4 tensor cores",
            spec.activations.to_string(),
        );
    }
    if let Activations::Nvfp4(ActQuant { rule, global: ActGlobal::Static(g) }) = spec.activations
        && g.convention() != rule.convention()
    {
        let need = format!("a {:?} scale for the {} rule", rule.convention(), rule.as_str());
        no(RejectCode::ActivationsUnsupported, &need, format!("{:?}", g.convention()));
    }
    for (what, dtype) in [("input", spec.x), ("output", spec.y)] {
        if !dtype.is_io() {
            no(RejectCode::DtypeUnsupported, "float32, float16 or bfloat16", format!("{what} of {dtype}"));
        }
    }
    if spec.k == 0 || spec.k % 16 != 0 {
        no(RejectCode::ShapeUnsupported, "k % 16 == 0, k > 0", format!("k = {}", spec.k));
    }
    if spec.segments.is_empty() || spec.segments.iter().any(|s| s.rows == 0) {
        let rows: Vec<_> = spec.segments.iter().map(|s| s.rows).collect();
        no(
            RejectCode::ShapeUnsupported,
            "one or more segments of at least one row",
            format!("rows {rows:?}"),
        );
    }
    if spec.max_m == 0 {
        no(RejectCode::ShapeUnsupported, "max_m > 0", "max_m = 0".into());
    }
    if !OpSet::ALL.contains(spec.ops) {
        no(
            RejectCode::OpUnsupported,
            "forward, backward_input, dequantize",
            format!("operations {:#b}", spec.ops.0),
        );
    }
    place(spec.device, path, env, &mut no);
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

/// What the machine and the library lack for `device` and `path`.
fn place(device: Device, path: ExecPath, env: &HostEnv, no: &mut impl FnMut(RejectCode, &str, String)) {
    let facts = env.libraries.get(NAME);
    if facts.is_none() {
        no(RejectCode::LibraryMissing, "a loaded libNVFP4", format!("libraries {:?}", env.libraries.keys()));
    }
    match device {
        Device::Cpu => {
            if path == ExecPath::NativeKernel {
                no(RejectCode::DeviceArch, "CUDA with FP4 tensor cores", "cpu".into());
            }
            if facts.is_some_and(|f| f.cpu_isa.is_empty()) {
                no(
                    RejectCode::KernelImageMissing,
                    "CPU kernels in libNVFP4",
                    "none this machine can run".into(),
                );
            }
        }
        Device::Cuda(ordinal) => match env.cuda_device(ordinal) {
            None => no(RejectCode::DeviceAbsent, "a CUDA device", env.no_cuda(ordinal)),
            Some(gpu) => {
                if path == ExecPath::NativeKernel && !BLACKWELL.contains(&gpu.capability) {
                    no(
                        RejectCode::DeviceArch,
                        &format!("FP4 tensor cores: {}", list(&BLACKWELL)),
                        gpu.arch(),
                    );
                }
                if path == ExecPath::FusedDequant && gpu.capability < FUSED_SINCE {
                    no(RejectCode::DeviceArch, "sm_80 or newer", gpu.arch());
                }
                let is_native = facts.is_some_and(|f| f.cuda_native.contains(&gpu.capability));
                if path == ExecPath::NativeKernel && BLACKWELL.contains(&gpu.capability) && !is_native {
                    let why = facts.map_or(&[][..], |f| &f.cuda_native_refused);
                    for r in why {
                        no(r.code, &r.need, r.have.to_string());
                    }
                    if why.is_empty() {
                        let need = format!("FP4 tensor core products for {} in libNVFP4", gpu.arch());
                        no(RejectCode::KernelImageMissing, &need, "none".into());
                    }
                } else if let Some(have) = facts.and_then(|f| missing_image(f, gpu)) {
                    no(RejectCode::KernelImageMissing, &format!("{} kernels in libNVFP4", gpu.arch()), have);
                }
            }
        },
        other => no(RejectCode::DeviceAbsent, "cpu or cuda", other.to_string()),
    }
}

fn missing_image(facts: &LibraryFacts, gpu: &CudaDevice) -> Option<String> {
    (!facts.cuda_images.contains(&gpu.capability)).then(|| match &facts.cuda_refused {
        Some(why) => why.clone(),
        None => format!("kernels for {}", list(&facts.cuda_images)),
    })
}

fn list(capabilities: &[(u32, u32)]) -> String {
    let names: Vec<_> = capabilities.iter().map(|(major, minor)| format!("sm_{major}{minor}")).collect();
    if names.is_empty() { "no GPU".into() } else { names.join(", ") }
}

/// "Compiled into the library" for the CPU and for each GPU of `env`, as separate lines of `diagnose`.
pub fn items(facts: &LibraryFacts, env: &HostEnv) -> Vec<ProbeItem> {
    let cpu = ProbeItem {
        id: "kernels.cpu".into(),
        reasons: if facts.cpu_isa.is_empty() {
            vec![Reject::new(
                RejectCode::KernelImageMissing,
                "CPU kernels in libNVFP4",
                "none this machine can run",
            )]
        } else {
            Vec::new()
        },
        detail: facts.cpu_isa.join(", "),
    };
    let images =
        ProbeItem { id: "kernels.cuda".into(), reasons: Vec::new(), detail: list(&facts.cuda_images) };
    let gpus = env.cuda.iter().map(|gpu| ProbeItem {
        id: format!("kernels.cuda.{}", gpu.ordinal).into(),
        reasons: missing_image(facts, gpu)
            .map(|have| {
                Reject::new(
                    RejectCode::KernelImageMissing,
                    format!("{} kernels in libNVFP4", gpu.arch()),
                    have,
                )
            })
            .into_iter()
            .collect(),
        detail: format!("{} ({})", gpu.arch(), gpu.name),
    });
    [cpu, images].into_iter().chain(gpus).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::{Convention, DType, GlobalScale, Rule, ScaleLayout, SegmentSpec};

    const W4A4: Activations = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None });
    const BOTH: [ExecPath; 2] = [ExecPath::NativeKernel, ExecPath::FusedDequant];

    fn spec(device: Device, activations: Activations) -> LinearSpec {
        LinearSpec {
            segments: vec![SegmentSpec { name: "m.o_proj".into(), rows: 48 }],
            schema: Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Divide) },
            k: 64,
            max_m: 4,
            x: DType::BF16,
            y: DType::BF16,
            activations,
            device,
            ops: OpSet::ALL,
        }
    }

    fn machine(gpu: Option<(u32, u32)>, images: &[(u32, u32)]) -> HostEnv {
        let facts = LibraryFacts {
            cpu_isa: vec!["scalar".into()],
            cuda_images: images.to_vec(),
            cuda_native: images.iter().copied().filter(|c| BLACKWELL.contains(c)).collect(),
            ..Default::default()
        };
        let gpu = gpu.map(|capability| CudaDevice {
            ordinal: 0,
            capability,
            name: "imagined".into(),
            memory: 1 << 34,
        });
        HostEnv {
            cuda: gpu.into_iter().collect(),
            libraries: [(NAME.to_owned(), facts)].into(),
            ..Default::default()
        }
    }

    fn codes(v: Verdict) -> Vec<RejectCode> {
        v.err().into_iter().flatten().map(|r| r.code).collect()
    }

    #[test]
    fn imagined_machines_get_the_whole_decision_table() {
        use RejectCode::{DeviceAbsent, DeviceArch, KernelImageMissing};
        let hopper = [(8, 0), (9, 0)];
        let all = [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)];
        // (GPU, images, reasons of native-kernel, reasons of fused-dequant)
        type Row<'a> = (Option<(u32, u32)>, &'a [(u32, u32)], &'a [RejectCode], &'a [RejectCode]);
        let table: &[Row<'_>] = &[
            (None, &all, &[DeviceAbsent], &[DeviceAbsent]),
            (Some((7, 5)), &all, &[DeviceArch, KernelImageMissing], &[DeviceArch, KernelImageMissing]),
            (Some((8, 0)), &[], &[DeviceArch, KernelImageMissing], &[KernelImageMissing]),
            (Some((8, 0)), &hopper, &[DeviceArch], &[]),
            (Some((9, 0)), &[], &[DeviceArch, KernelImageMissing], &[KernelImageMissing]),
            (Some((9, 0)), &hopper, &[DeviceArch], &[]),
            (Some((10, 0)), &hopper, &[KernelImageMissing], &[KernelImageMissing]),
            (Some((10, 0)), &all, &[], &[]),
            (Some((12, 0)), &hopper, &[KernelImageMissing], &[KernelImageMissing]),
            (Some((12, 0)), &all, &[], &[]),
            (Some((12, 1)), &[(12, 0)], &[KernelImageMissing], &[KernelImageMissing]),
        ];
        for (gpu, images, native, fused) in table {
            let env = machine(*gpu, images);
            for (path, want) in BOTH.into_iter().zip([native, fused]) {
                let got = codes(verdict(&spec(Device::Cuda(0), W4A4), path, &env));
                assert_eq!(got, *want, "{gpu:?} with {images:?} via {path}");
                assert_eq!(got, codes(verdict(&spec(Device::Cuda(0), W4A4), path, &env)), "pure");
            }
            assert_eq!(codes(verdict(&spec(Device::Cpu, W4A4), ExecPath::NativeKernel, &env)), [DeviceArch]);
            assert_eq!(verdict(&spec(Device::Cpu, W4A4), ExecPath::FusedDequant, &env), Ok(()));
            assert_eq!(
                codes(verdict(&spec(Device::Cuda(1), W4A4), ExecPath::FusedDequant, &env)),
                [DeviceAbsent]
            );
        }
    }

    #[test]
    fn only_four_bit_inputs_are_native() {
        let env = machine(Some((10, 0)), &[(10, 0)]);
        for activations in [Activations::Native, Activations::Int8] {
            let spec = spec(Device::Cuda(0), activations);
            assert_eq!(
                codes(verdict(&spec, ExecPath::NativeKernel, &env)),
                [RejectCode::ActivationsUnsupported]
            );
            assert_eq!(verdict(&spec, ExecPath::FusedDequant, &env), Ok(()));
        }
    }

    #[test]
    fn a_calibrated_scale_of_the_other_convention_is_refused() {
        let g = GlobalScale::divide(2.0).expect("positive");
        let act = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::Static(g) };
        let got = codes(verdict(
            &spec(Device::Cpu, Activations::Nvfp4(act)),
            ExecPath::FusedDequant,
            &machine(None, &[]),
        ));
        assert_eq!(got, [RejectCode::ActivationsUnsupported]);
    }

    #[test]
    fn every_reason_is_listed_at_once() {
        use RejectCode::*;
        let mut s = spec(Device::Cuda(3), Activations::Native);
        s.schema = Q4Schema::Dense { dtype: DType::F32 };
        (s.x, s.y, s.k, s.max_m, s.ops) = (DType::U8, DType::F64, 24, 0, OpSet(255));
        s.segments.clear();
        let got = codes(verdict(&s, ExecPath::DequantMatmul, &HostEnv::default()));
        let want = [
            SchemaUnsupported,
            PathUnsupported,
            DtypeUnsupported,
            DtypeUnsupported,
            ShapeUnsupported,
            ShapeUnsupported,
            ShapeUnsupported,
            OpUnsupported,
            LibraryMissing,
            DeviceAbsent,
        ];
        assert_eq!(got, want);
    }

    #[test]
    fn native_is_offered_only_by_a_library_that_has_it() {
        let facts = |images: &[(u32, u32)]| machine(None, images).libraries[NAME].clone();
        assert_eq!(paths(&facts(&[])), [ExecPath::FusedDequant]);
        assert_eq!(paths(&facts(&[(8, 0), (9, 0)])), [ExecPath::FusedDequant]);
        assert_eq!(paths(&facts(&[(9, 0), (12, 1)])), BOTH);
        let without = LibraryFacts { cuda_native: Vec::new(), ..facts(&[(12, 1)]) };
        assert_eq!(paths(&without), [ExecPath::FusedDequant]);
    }

    #[test]
    fn what_the_library_says_of_fp4_tensor_cores_is_listed() {
        let mut env = machine(Some((12, 0)), &[(12, 0)]);
        let facts = env.libraries.get_mut(NAME).expect("facts");
        facts.cuda_native.clear();
        let why =
            Reject::new(RejectCode::LibraryMissing, "cuBLASLt 12.8 or newer", "libcublasLt.so not found");
        facts.cuda_native_refused = vec![why.clone()];
        assert_eq!(paths(facts), BOTH);
        let s = spec(Device::Cuda(0), W4A4);
        assert_eq!(verdict(&s, ExecPath::NativeKernel, &env), Err(vec![why]));
        assert_eq!(verdict(&s, ExecPath::FusedDequant, &env), Ok(()));
    }

    #[test]
    fn what_is_missing_is_named() {
        let mut env = machine(None, &[]);
        env.cuda_missing = Some("libcuda.so.1 not found".into());
        let all = verdict(&spec(Device::Cuda(0), W4A4), ExecPath::FusedDequant, &env).expect_err("no driver");
        assert_eq!((all[0].code, all[0].have.as_ref()), (RejectCode::DeviceAbsent, "libcuda.so.1 not found"));
        let mut env = machine(Some((9, 0)), &[]);
        let facts = env.libraries.get_mut(NAME).expect("facts");
        facts.cuda_refused = Some("no NVRTC and no prebuilt image".into());
        let all = verdict(&spec(Device::Cuda(0), W4A4), ExecPath::FusedDequant, &env).expect_err("no image");
        let found = (all[0].code, all[0].have.as_ref());
        assert_eq!(found, (RejectCode::KernelImageMissing, "no NVRTC and no prebuilt image"));
        let mut env = machine(Some((12, 0)), &[(12, 0)]);
        env.libraries.get_mut(NAME).expect("facts").cuda_native.clear();
        let s = spec(Device::Cuda(0), W4A4);
        assert_eq!(codes(verdict(&s, ExecPath::NativeKernel, &env)), [RejectCode::KernelImageMissing]);
        assert_eq!(verdict(&s, ExecPath::FusedDequant, &env), Ok(()));
    }

    #[test]
    fn a_gpu_without_kernels_is_a_finding() {
        let env = machine(Some((9, 0)), &[(8, 0)]);
        let items = items(&env.libraries[NAME], &env);
        let found: Vec<_> =
            items.iter().flat_map(|i| i.reasons.iter().map(|r| (i.id.as_ref(), r.code))).collect();
        assert_eq!(found, [("kernels.cuda.0", RejectCode::KernelImageMissing)]);
    }
}
