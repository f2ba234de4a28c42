//! What a dense copy can serve, decided from the spec alone and with every reason at once.
use crate::simd::Isa;
use q4_core::{
    ActGlobal, Activations, DType, Device, ExecPath, LinearSpec, OpSet, ProbeItem, Q4Schema, Reject,
    RejectCode, Verdict,
};

/// Every encoding there is.
pub(crate) const SCHEMAS: [&str; 4] = ["nvfp4", "nf4", "nf4-dq", "dense"];

/// The instruction set in use and what else this machine could run.
pub(crate) fn probe(isa: Isa) -> Vec<ProbeItem> {
    let could: Vec<_> = Isa::ALL.into_iter().filter(|i| i.is_available()).map(Isa::as_str).collect();
    vec![ProbeItem {
        id: "cpu.isa".into(),
        reasons: Vec::new(),
        detail: format!("{} of {}", isa.as_str(), could.join(", ")),
    }]
}

/// `Ok` or every reason why `spec` cannot be served.
pub(crate) fn can_prepare(spec: &LinearSpec, path: ExecPath) -> Verdict {
    use RejectCode::*;
    let mut reasons = Vec::new();
    let mut reject = |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
    if path != ExecPath::DequantMatmul {
        reject(PathUnsupported, "dequant-matmul", path.to_string());
    }
    if spec.device != Device::Cpu {
        reject(DeviceAbsent, "cpu", spec.device.to_string());
    }
    if !SCHEMAS.contains(&spec.schema.id().name) {
        reject(SchemaUnsupported, &SCHEMAS.join(", "), spec.schema.to_string());
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
    let stored = match spec.schema {
        Q4Schema::Dense { dtype } => Some(("weight", dtype)),
        _ => None,
    };
    for (name, dtype) in [("x", spec.x), ("y", spec.y)].into_iter().chain(stored) {
        if !dtype.is_io() {
            reject(DtypeUnsupported, "float32, float16 or bfloat16", format!("{name} of {dtype}"));
        }
    }
    if spec.k == 0 || spec.segments.is_empty() || spec.segments.iter().any(|s| s.rows == 0) {
        reject(ShapeUnsupported, "at least one row and one column", format!("[{}, {}]", spec.n(), spec.k));
    }
    if spec.k % 16 != 0 {
        if matches!(spec.schema, Q4Schema::Nvfp4 { .. }) {
            reject(ShapeUnsupported, "k % 16 == 0 for blocks of nvfp4", format!("k = {}", spec.k));
        }
        if spec.activations != Activations::Native {
            let need = format!("k % 16 == 0 for {} activations", spec.activations);
            reject(ShapeUnsupported, &need, format!("k = {}", spec.k));
        }
    }
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

/// The copy in the type of y loses nothing.
pub(crate) fn is_exact(schema: &Q4Schema, y: DType) -> bool {
    y == DType::F32 || *schema == Q4Schema::Dense { dtype: y }
}
