//! What a dense copy can serve, decided from the spec and the facts of the machine, with every reason at
//! once.
use q4_core::rows::reject_operands;
use q4_core::{
    ActGlobal, Activations, DType, ExecPath, HostEnv, LinearSpec, OpSet, ProbeItem, Q4Schema, Reject,
    RejectCode, Result, Verdict,
};
use q4_cuda::Needs;

/// The instruction set that products use, and what else this machine could run.
pub(crate) fn probe(is_plain: bool) -> Vec<ProbeItem> {
    let could: Vec<_> = isas().into_iter().filter(|i| i.1).map(|i| i.0).collect();
    let detail = match is_plain {
        true => format!("portable, for gemm would take {} of {}", could[0], could.join(", ")),
        false => format!("{} of {}, chosen by gemm", could[0], could.join(", ")),
    };
    vec![ProbeItem { id: "cpu.isa".into(), reasons: Vec::new(), detail }]
}

/// Whether products do without `gemm`, which takes the best instruction set there is, because a lesser one is
/// named. Refuses one that does not exist or that this machine lacks (`avx512vnni` and `amx` mean `avx512`
/// here, `neondotprod` and `neoni8mm` mean `neon`).
pub(crate) fn is_plain(name: Option<&str>) -> Result<bool, Reject> {
    let Some(name) = name else { return Ok(false) };
    let plain = match name {
        "avx512vnni" | "amx" => "avx512",
        "neondotprod" | "neoni8mm" => "neon",
        _ => name,
    };
    let (need, have) = match isas().into_iter().find(|i| i.0 == plain) {
        Some((_, true)) => return Ok(isas().into_iter().find(|i| i.1).is_some_and(|best| best.0 != plain)),
        Some(_) => (format!("a processor with {plain}"), std::env::consts::ARCH.to_owned()),
        None => (format!("isa {}", q4_core::isa::ISAS.join(", ")), name.to_owned()),
    };
    Err(Reject::new(RejectCode::DeviceArch, need, have))
}

/// Best first, and whether this machine has it.
fn isas() -> [(&'static str, bool); 4] {
    #[cfg(target_arch = "x86_64")]
    let (avx512, avx2) = (
        std::arch::is_x86_feature_detected!("avx512f"),
        std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma"),
    );
    #[cfg(not(target_arch = "x86_64"))]
    let (avx512, avx2) = (false, false);
    #[cfg(target_arch = "aarch64")]
    let neon = std::arch::is_aarch64_feature_detected!("neon");
    #[cfg(not(target_arch = "aarch64"))]
    let neon = false;
    [("avx512", avx512), ("avx2", avx2), ("neon", neon), ("portable", true)]
}

/// What products on a device take.
pub(crate) const NEEDS: Needs = Needs { backend: crate::NAME, cublaslt: true };

/// `Ok` or every reason why `spec` cannot be served on the machine `env`.
pub(crate) fn can_prepare(spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
    let mut reasons = operands(spec, path);
    reasons.extend(NEEDS.verdict(spec.device, env).err().into_iter().flatten());
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

/// What is wrong with `spec` on every machine.
pub(crate) fn operands(spec: &LinearSpec, path: ExecPath) -> Vec<Reject> {
    use RejectCode::*;
    let mut reasons = Vec::new();
    let mut reject = |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
    if path != ExecPath::DequantMatmul {
        reject(PathUnsupported, "dequant-matmul", path.to_string());
    }
    if let Activations::Nvfp4(act) = spec.activations
        && let ActGlobal::Static(g) = act.global
        && g.convention() != act.rule.convention()
    {
        let need = format!("a per-tensor scale of the convention of {}", act.rule.as_str());
        reject(ActivationsUnsupported, &need, format!("{:?}", g.convention()));
    }
    if spec.ops.contains(OpSet::DEQUANTIZE) && !is_exact(&spec.schema, spec.y) {
        let need = "y of float32: a copy in the type of y must hold the decoded values exactly";
        reject(OpUnsupported, need, format!("dequantize with y of {}", spec.y));
    }
    reject_operands(spec, &mut reasons);
    reasons
}

/// The copy in the type of y loses nothing.
pub(crate) fn is_exact(schema: &Q4Schema, y: DType) -> bool {
    y == DType::F32 || schema.dense_dtype() == Some(y)
}
