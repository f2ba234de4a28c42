//! What the oracle can serve, decided from the spec alone and with every reason at once.
use q4_core::rows::reject_operands;
use q4_core::{ActGlobal, Activations, Device, ExecPath, LinearSpec, ProbeItem, Reject, RejectCode, Verdict};

/// Plain Rust: nothing to find, nothing to miss.
pub(crate) fn probe() -> Vec<ProbeItem> {
    vec![ProbeItem { id: "cpu.scalar".into(), reasons: Vec::new(), detail: "fixed point and f64".into() }]
}

/// `Ok` or every reason why `spec` cannot be served.
pub(crate) fn can_prepare(spec: &LinearSpec, path: ExecPath) -> Verdict {
    use RejectCode::*;
    let mut reasons = Vec::new();
    let mut reject = |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
    if path != ExecPath::Reference {
        reject(PathUnsupported, "reference", path.to_string());
    }
    if spec.device != Device::Cpu {
        reject(DeviceAbsent, "cpu", spec.device.to_string());
    }
    if let Activations::Nvfp4(act) = spec.activations
        && let ActGlobal::Static(g) = act.global
        && g.convention() != act.rule.convention()
    {
        let need = format!("a per-tensor scale of the convention of {}", act.rule.as_str());
        reject(ActivationsUnsupported, &need, format!("{:?}", g.convention()));
    }
    reject_operands(spec, &mut reasons);
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}
