//! What the kernels can serve, decided from the spec and the facts of the machine, with every reason at once.
use q4_core::{
    Activations, CudaDevice, DType, Device, ExecPath, HostEnv, LinearSpec, Nf4, Q4Schema, Reject, RejectCode,
    Verdict,
};
use q4_cuda::{Arch, Needs};

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
    let block = match spec.schema {
        Q4Schema::Nf4(Nf4 { block, .. }) => Some(block),
        _ => None,
    };
    reasons.extend(q4_codebook::operands(spec, block));
    if block.is_none() {
        let have = spec.schema.id().name.to_owned();
        reasons.push(Reject::new(SchemaUnsupported, "nf4 or nf4-dq".to_owned(), have));
    }
    reasons
}
