//! What the kernels can serve, decided from the spec alone, with every reason at once.
use q4_core::{Device, ExecPath, LinearSpec, Q4Schema, Reject, RejectCode};

/// What is wrong with `spec`.
pub(crate) fn operands(spec: &LinearSpec, path: ExecPath) -> Vec<Reject> {
    use RejectCode::*;
    let mut reasons = Vec::new();
    let mut reject = |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
    if path != ExecPath::FusedDequant {
        reject(PathUnsupported, "fused-dequant", path.to_string());
    }
    if spec.device != Device::Cpu {
        reject(DeviceUnsupported, "cpu", spec.device.to_string());
    }
    match spec.schema {
        Q4Schema::Int4(format) => {
            let group = format.group as usize;
            if group == 0 || !group.is_multiple_of(16) {
                reject(ShapeUnsupported, "groups of a multiple of 16", group.to_string());
            } else if !spec.k.is_multiple_of(group) {
                reject(ShapeUnsupported, &format!("k % {group} == 0"), format!("k = {}", spec.k));
            }
            if !format.scales.is_io() {
                reject(DtypeUnsupported, "scales of float32, float16 or bfloat16", format.scales.to_string());
            }
        }
        other => reject(SchemaUnsupported, "int4 or int4-asym", other.id().name.into()),
    }
    reasons.extend(q4_codebook::operands(spec, None));
    reasons
}
