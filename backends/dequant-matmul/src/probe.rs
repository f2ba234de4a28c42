//! What a dense copy can serve, decided from the spec and the facts of the machine, with every reason at
//! once.
use q4_core::rows::reject_operands;
use q4_core::{
    ActGlobal, Activations, DType, ExecPath, HostEnv, LinearSpec, OpSet, ProbeItem, Q4Schema, Reject,
    RejectCode, Result, Verdict,
};
use q4_cuda::Needs;
use q4_simd::{Isa, Vectors};

/// The instruction set that products use, and what else this machine could run.
pub(crate) fn probe(is_plain: bool) -> Vec<ProbeItem> {
    let could: Vec<_> = Vectors::all().map(|v| v.isa().name()).collect();
    let detail = match is_plain {
        true => format!("portable, for gemm would take {} of {}", could[0], could.join(", ")),
        false => format!("{} of {}, chosen by gemm", could[0], could.join(", ")),
    };
    vec![ProbeItem { id: "cpu.isa".into(), reasons: Vec::new(), detail }]
}

/// Whether products do without `gemm`, which takes the best instruction set there is, because a lesser one is
/// named. Refuses one that does not exist or that this machine lacks.
pub(crate) fn is_plain(name: Option<&str>) -> Result<bool, Reject> {
    Ok(Vectors::choose(name)?.isa() != Isa::best().floats())
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
