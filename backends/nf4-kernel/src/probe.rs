//! What the kernels can serve, decided from the spec and the facts of the machine, with every reason at once.
use crate::layout::scale_group;
use q4_core::{
    Activations, CudaDevice, DType, Device, ExecPath, HostEnv, LinearSpec, Nf4, ProbeItem, Q4Schema, Reject,
    RejectCode, Verdict,
};
use q4_cuda::{Arch, Needs};
use q4_simd::Vectors;

/// Shortest run of k under one absmax that the layout can hold.
const LEAST_GROUP: usize = 16;

/// The instruction set in use and what else this machine could run.
pub(crate) fn probe(vectors: Vectors) -> Vec<ProbeItem> {
    let could: Vec<_> = Vectors::all().map(|v| v.isa().name()).collect();
    vec![ProbeItem {
        id: "cpu.isa".into(),
        reasons: Vec::new(),
        detail: format!("{} of {}", vectors.isa().name(), could.join(", ")),
    }]
}

/// The paths there are with these devices, best first.
pub(crate) fn paths(devices: &[CudaDevice]) -> Vec<ExecPath> {
    let rounded = devices.iter().any(|d| Arch::of(d.capability).wgmma);
    rounded.then_some(ExecPath::FusedRounded).into_iter().chain([ExecPath::FusedDequant]).collect()
}

/// What products on a device take.
pub(crate) const NEEDS: Needs = Needs { backend: crate::NAME, cublaslt: false };

/// `Ok` or every reason why `spec` cannot be served on the machine `env`.
pub(crate) fn can_prepare(spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
    let mut reasons = Vec::new();
    if let (ExecPath::FusedRounded, Device::Cuda(ordinal)) = (path, spec.device)
        && let Some(gpu) = env.cuda_device(ordinal).filter(|gpu| !Arch::of(gpu.capability).wgmma)
    {
        reasons.push(Reject::new(RejectCode::DeviceArch, Arch::names(|a| a.wgmma), gpu.arch()));
    }
    reasons.extend(operands(spec, path));
    reasons.extend(NEEDS.verdict(spec.device, env).err().into_iter().flatten());
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

/// What is wrong with `spec` on every machine.
pub(crate) fn operands(spec: &LinearSpec, path: ExecPath) -> Vec<Reject> {
    use RejectCode::*;
    let mut reasons = Vec::new();
    let mut reject = |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
    if !matches!(path, ExecPath::FusedRounded | ExecPath::FusedDequant) {
        reject(PathUnsupported, "fused-rounded or fused-dequant", path.to_string());
    }
    if path == ExecPath::FusedRounded {
        if spec.device == Device::Cpu {
            reject(DeviceArch, &Arch::names(|a| a.wgmma), spec.device.to_string());
        }
        if spec.activations != Activations::Native {
            reject(ActivationsUnsupported, "native, for rounded weights", spec.activations.to_string());
        }
        if spec.x != DType::BF16 {
            reject(DtypeUnsupported, "x of bfloat16, for rounded weights", spec.x.to_string());
        }
    }
    if matches!(spec.activations, Activations::Nvfp4(_)) {
        reject(
            ActivationsUnsupported,
            "native or int8: NF4 codes have no exact product with NVFP4",
            "nvfp4".into(),
        );
    }
    for (name, dtype) in [("x", spec.x), ("y", spec.y)] {
        if !dtype.is_io() {
            reject(DtypeUnsupported, "float32, float16 or bfloat16", format!("{name} of {dtype}"));
        }
    }
    if spec.k == 0 || spec.segments.is_empty() || spec.segments.iter().any(|s| s.rows == 0) {
        reject(ShapeUnsupported, "at least one row and one column", format!("[{}, {}]", spec.n(), spec.k));
    }
    match spec.schema {
        Q4Schema::Nf4(Nf4 { block, .. }) if spec.k > 0 && scale_group(spec.k, block) < LEAST_GROUP => {
            let need = "gcd(k, block) >= 16, so that every 16 of k share an absmax";
            reject(ShapeUnsupported, need, format!("k = {}, block = {block}", spec.k));
        }
        Q4Schema::Nf4(_) => {}
        other => reject(SchemaUnsupported, "nf4 or nf4-dq", other.id().name.into()),
    }
    reasons
}
