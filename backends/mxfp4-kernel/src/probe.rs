//! What the kernels can serve, decided from the spec alone, with every reason at once.
use q4_core::formats::mxfp4;
use q4_core::{Device, ExecPath, LinearSpec, Q4Schema, Reject, RejectCode};

/// Elements of k under one scale.
pub(crate) const BLOCK: u32 = mxfp4::BLOCK as u32;

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
    let is_mxfp4 = matches!(spec.schema, Q4Schema::Mxfp4(_));
    if !is_mxfp4 {
        reject(SchemaUnsupported, "mxfp4", spec.schema.id().name.into());
    }
    if is_mxfp4 && spec.k % mxfp4::BLOCK != 0 {
        reject(ShapeUnsupported, "k % 32 == 0", format!("k = {}", spec.k));
    }
    reasons.extend(q4_codebook::operands(spec, None));
    reasons
}
