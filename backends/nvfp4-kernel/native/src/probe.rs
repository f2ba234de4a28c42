//! What the library can serve, decided from the product and the facts of a machine alone, so that `explain`
//! and tests can ask about machines they do not have.
use crate::NAME;
use q4_core::isa::Isa;
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, Device, Error, ExecPath, HostEnv, LinearSpec, OpSet, ProbeItem,
    Q4Schema, Reject, RejectCode, Verdict,
};
use q4_cuda::{Arch, Needs, fp4_lacks};

/// What products on a device take.
const NEEDS: Needs = Needs { backend: NAME, cublaslt: false };

/// `Ok` or every reason why `spec` cannot be served on `path` on the machine `env`; `images` are the compute
/// capabilities whose machine code needs no compiler.
pub fn verdict(spec: &LinearSpec, path: ExecPath, env: &HostEnv, images: &[(u32, u32)]) -> Verdict {
    let mut reasons = operands(spec, path);
    if let (ExecPath::NativeKernel, Device::Cuda(ordinal)) = (path, spec.device)
        && let Some(gpu) = env.cuda_device(ordinal)
    {
        if Arch::of(gpu.capability).fp4 {
            reasons.extend(fp4_lacks(&env.cuda_tools.cublaslt));
        } else {
            let need = format!("FP4 tensor cores: {}", Arch::names(|a| a.fp4));
            reasons.push(Reject::new(RejectCode::DeviceArch, need, gpu.arch()));
        }
    }
    reasons.extend(NEEDS.verdict(spec.device, &with(env, images)).err().into_iter().flatten());
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

/// What is wrong with `spec` on every machine.
pub fn operands(spec: &LinearSpec, path: ExecPath) -> Vec<Reject> {
    let mut reasons = Vec::new();
    let mut no = |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
    if !matches!(spec.schema, Q4Schema::Nvfp4(_)) {
        no(RejectCode::SchemaUnsupported, "nvfp4", spec.schema.to_string());
    }
    if !matches!(path, ExecPath::NativeKernel | ExecPath::FusedDequant) {
        no(RejectCode::PathUnsupported, "native-kernel or fused-dequant", path.to_string());
    }
    if path == ExecPath::NativeKernel && spec.device == Device::Cpu {
        no(RejectCode::DeviceArch, "CUDA with FP4 tensor cores", "cpu".into());
    }
    if path == ExecPath::NativeKernel && !matches!(spec.activations, Activations::Nvfp4(_)) {
        no(
            RejectCode::ActivationsUnsupported,
            "nvfp4, the only input of FP4 tensor cores",
            spec.activations.to_string(),
        );
    }
    if let Activations::Fp8(_) = spec.activations {
        let need = spec.schema.activations().join(" or ");
        no(RejectCode::ActivationsUnsupported, &need, spec.activations.to_string());
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
        let need = "one or more segments of at least one row";
        no(RejectCode::ShapeUnsupported, need, format!("rows {rows:?}"));
    }
    if spec.max_m == 0 {
        no(RejectCode::ShapeUnsupported, "max_m > 0", "max_m = 0".into());
    }
    if !OpSet::ALL.contains(spec.ops) {
        let need = "forward, backward_input, dequantize";
        no(RejectCode::OpUnsupported, need, format!("operations {:#b}", spec.ops.0));
    }
    reasons
}

/// Inputs that [`operands`] refuses.
pub fn refused(activations: &Activations) -> Error {
    let what = "inputs of a product with NVFP4 weights";
    Error::new(Code::Unsupported, what).need("native, int8 or nvfp4").have(activations.to_string())
}

/// The instruction set in use, and each device of `env`.
pub fn items(isa: Isa, images: &[(u32, u32)], env: &HostEnv) -> Vec<ProbeItem> {
    let could: Vec<_> = Isa::available().map(Isa::name).collect();
    let mut all = vec![ProbeItem {
        id: "cpu.isa".into(),
        reasons: Vec::new(),
        detail: format!("{} of {}", isa.name(), could.join(", ")),
    }];
    all.extend(NEEDS.items(&with(env, images)));
    let has_fp4 = |d: &&q4_core::CudaDevice| Arch::of(d.capability).fp4;
    all.extend(env.cuda.iter().filter(has_fp4).map(|d| ProbeItem {
        id: format!("fp4.cuda:{}", d.ordinal).into(),
        reasons: fp4_lacks(&env.cuda_tools.cublaslt).into_iter().collect(),
        detail: format!("FP4 tensor cores of {}", d.arch()),
    }));
    all
}

/// The machine with the machine code that the library found on disk.
fn with<'e>(env: &'e HostEnv, images: &[(u32, u32)]) -> std::borrow::Cow<'e, HostEnv> {
    if images.is_empty() {
        return std::borrow::Cow::Borrowed(env);
    }
    let mut env = env.clone();
    env.cuda_tools.images.insert(NAME.to_owned(), images.to_vec());
    std::borrow::Cow::Owned(env)
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::{
        Convention, CudaDevice, DType, Dense, Found, GlobalScale, Nvfp4, Rule, ScaleLayout, SegmentSpec,
    };

    const W4A4: Activations = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None });
    const BOTH: [ExecPath; 2] = [ExecPath::NativeKernel, ExecPath::FusedDequant];

    fn spec(device: Device, activations: Activations) -> LinearSpec {
        LinearSpec {
            segments: vec![SegmentSpec { name: "m.o_proj".into(), rows: 48 }],
            schema: Q4Schema::Nvfp4(Nvfp4 {
                scale_layout: ScaleLayout::RowMajor,
                global: Some(Convention::Divide),
            }),
            k: 64,
            max_m: 4,
            x: DType::BF16,
            y: DType::BF16,
            activations,
            device,
            ops: OpSet::ALL,
        }
    }

    /// A machine with a GPU of that capability, a compiler, and cuBLASLt of that version.
    fn machine(gpu: Option<(u32, u32)>, has_nvrtc: bool, cublaslt: u32) -> HostEnv {
        let device =
            |capability| CudaDevice { ordinal: 0, capability, name: "a card".into(), memory: 1 << 34 };
        let mut env = HostEnv { cuda: gpu.map(device).into_iter().collect(), ..Default::default() };
        env.cuda_tools.nvrtc =
            if has_nvrtc { Found::Yes(13_000) } else { Found::No("no libnvrtc.so".into()) };
        env.cuda_tools.cublaslt = Found::Yes(cublaslt);
        env
    }

    fn codes(v: Verdict) -> Vec<RejectCode> {
        v.err().into_iter().flatten().map(|r| r.code).collect()
    }

    #[test]
    fn imagined_machines_get_the_whole_decision_table() {
        use RejectCode::{DeviceAbsent, DeviceArch, KernelImageMissing, LibraryMissing};
        const NEW: u32 = 130_000;
        const OLD: u32 = 12_06_00;
        // (GPU, compiler, cuBLASLt, reasons of native-kernel, reasons of fused-dequant)
        type Row<'a> = (Option<(u32, u32)>, bool, u32, &'a [RejectCode], &'a [RejectCode]);
        let table: &[Row<'_>] = &[
            (None, true, NEW, &[DeviceAbsent], &[DeviceAbsent]),
            (Some((7, 5)), true, NEW, &[DeviceArch, DeviceArch], &[DeviceArch]),
            (Some((8, 0)), false, NEW, &[DeviceArch, KernelImageMissing], &[KernelImageMissing]),
            (Some((8, 0)), true, NEW, &[DeviceArch], &[]),
            (Some((9, 0)), false, NEW, &[DeviceArch, KernelImageMissing], &[KernelImageMissing]),
            (Some((9, 0)), true, NEW, &[DeviceArch], &[]),
            (Some((10, 0)), true, NEW, &[], &[]),
            (Some((10, 0)), true, OLD, &[LibraryMissing], &[]),
            (Some((12, 0)), false, NEW, &[KernelImageMissing], &[KernelImageMissing]),
            (Some((12, 1)), true, NEW, &[], &[]),
        ];
        for (gpu, has_nvrtc, cublaslt, native, fused) in table {
            let env = machine(*gpu, *has_nvrtc, *cublaslt);
            let ask = |device, path| codes(verdict(&spec(device, W4A4), path, &env, &[]));
            for (path, want) in BOTH.into_iter().zip([native, fused]) {
                let got = ask(Device::Cuda(0), path);
                assert_eq!(got, *want, "{gpu:?}, compiler {has_nvrtc}, cuBLASLt {cublaslt} via {path}");
            }
            assert_eq!(ask(Device::Cpu, ExecPath::NativeKernel), [DeviceArch]);
            assert_eq!(ask(Device::Cpu, ExecPath::FusedDequant), []);
            assert_eq!(ask(Device::Cuda(1), ExecPath::FusedDequant), [DeviceAbsent]);
        }
    }

    #[test]
    fn machine_code_on_disk_stands_in_for_the_compiler() {
        let env = machine(Some((9, 0)), false, 130_000);
        let s = spec(Device::Cuda(0), W4A4);
        let ask = |images: &[(u32, u32)]| codes(verdict(&s, ExecPath::FusedDequant, &env, images));
        assert_eq!(ask(&[(8, 0)]), [RejectCode::KernelImageMissing]);
        assert_eq!(ask(&[(8, 0), (9, 0)]), []);
    }

    #[test]
    fn only_four_bit_inputs_are_native() {
        let env = machine(Some((10, 0)), true, 130_000);
        for activations in [Activations::Native, Activations::Int8] {
            let spec = spec(Device::Cuda(0), activations);
            let ask = |path| codes(verdict(&spec, path, &env, &[]));
            assert_eq!(ask(ExecPath::NativeKernel), [RejectCode::ActivationsUnsupported]);
            assert_eq!(ask(ExecPath::FusedDequant), []);
        }
    }

    #[test]
    fn a_calibrated_scale_of_the_other_convention_is_refused() {
        let g = GlobalScale::divide(2.0).expect("positive");
        let act = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::Static(g) };
        let reasons = operands(&spec(Device::Cpu, Activations::Nvfp4(act)), ExecPath::FusedDequant);
        assert_eq!(codes(Err(reasons)), [RejectCode::ActivationsUnsupported]);
    }

    #[test]
    fn every_reason_is_listed_at_once() {
        use RejectCode::*;
        let mut s = spec(Device::Cuda(3), Activations::Native);
        s.schema = Q4Schema::Dense(Dense { dtype: DType::F32 });
        (s.x, s.y, s.k, s.max_m, s.ops) = (DType::U8, DType::F64, 24, 0, OpSet(255));
        s.segments.clear();
        let got = codes(verdict(&s, ExecPath::DequantMatmul, &HostEnv::default(), &[]));
        let want = [
            SchemaUnsupported,
            PathUnsupported,
            DtypeUnsupported,
            DtypeUnsupported,
            ShapeUnsupported,
            ShapeUnsupported,
            ShapeUnsupported,
            OpUnsupported,
            DeviceAbsent,
        ];
        assert_eq!(got, want);
    }

    #[test]
    fn what_is_missing_is_named() {
        let mut env = HostEnv { cuda_missing: Some("libcuda.so.1 not found".into()), ..HostEnv::default() };
        let s = spec(Device::Cuda(0), W4A4);
        let first =
            |env: &HostEnv, path| verdict(&s, path, env, &[]).expect_err("something is missing")[0].clone();
        assert_eq!(first(&env, ExecPath::FusedDequant).have, "libcuda.so.1 not found");
        env = machine(Some((12, 0)), true, 12_06_00);
        let why = first(&env, ExecPath::NativeKernel);
        assert_eq!((why.need.as_ref(), why.have.as_ref()), ("cuBLASLt 12.8 or newer", "cuBLASLt 12.6"));
        let fp4 = items(Isa::Portable, &[], &env);
        let found: Vec<_> = fp4.iter().filter(|i| !i.reasons.is_empty()).map(|i| i.id.as_ref()).collect();
        assert_eq!(found, ["fp4.cuda:0"]);
    }
}
