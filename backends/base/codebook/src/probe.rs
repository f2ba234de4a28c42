//! What the kernels can serve, decided from the spec alone, with every reason at once.
use q4_core::isa::Isa;
use q4_core::{LinearSpec, ProbeItem, Reject, RejectCode};

/// The instruction set in use and what else this machine could run.
pub(crate) fn probe(used: Isa, could: impl Iterator<Item = Isa>) -> Vec<ProbeItem> {
    let could: Vec<_> = could.map(Isa::name).collect();
    vec![ProbeItem {
        id: "cpu.isa".into(),
        reasons: Vec::new(),
        detail: format!("{} of {}", used.name(), could.join(", ")),
    }]
}

/// What is wrong with `spec` on every machine, its schema and path aside.
pub(crate) fn operands(spec: &LinearSpec) -> Vec<Reject> {
    use RejectCode::*;
    let mut reasons = Vec::new();
    let mut reject = |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
    let name = spec.schema.id().name;
    let kinds = spec.schema.activations();
    if !kinds.contains(&spec.activations.as_str()) {
        let need = format!("{} for {name}", kinds.join(" or "));
        reject(ActivationsUnsupported, &need, spec.activations.to_string());
    }
    for (name, dtype) in [("x", spec.x), ("y", spec.y)] {
        if !dtype.is_io() {
            reject(DtypeUnsupported, "float32, float16 or bfloat16", format!("{name} of {dtype}"));
        }
    }
    if spec.k == 0 || spec.segments.is_empty() || spec.segments.iter().any(|s| s.rows == 0) {
        reject(ShapeUnsupported, "at least one row and one column", format!("[{}, {}]", spec.n(), spec.k));
    }
    reasons
}
