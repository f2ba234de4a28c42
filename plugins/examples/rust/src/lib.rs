//! `acme-nvfp4`: NVFP4 products on the CPU. Sixteen rows of a weight are the sixteen lanes of a register, so that a product
//! needs no horizontal sum and one shuffle decodes sixteen codes.
//!
//! `pack` is the layout, `kernels` what runs on it, `product` a call.
mod kernels;
mod pack;
mod product;

use kernels::Isa;
use pack::Packed;
use product::Weight;
use q4_plugin_sdk::q4_core::rows::reject_operands;
use q4_plugin_sdk::q4_core::{
    ActGlobal, ActQuant, Activations, BackendDescriptor, Code, Device, Error, ExecContext, ExecPath, HostEnv,
    LinearSpec, OpSet, PreparedInfo, PreparedWeight, ProbeItem, Q4Backend, Q4Schema, Q4Weight, Reject,
    RejectCode, Result, Verdict,
};

const NAME: &str = env!("CARGO_PKG_NAME");

/// The backend.
pub struct Acme {
    descriptor: BackendDescriptor,
    isa: Isa,
}

impl Acme {
    /// For the best instruction set there is.
    pub fn new() -> Self {
        let descriptor = BackendDescriptor {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            vendor: env!("CARGO_PKG_AUTHORS").into(),
            // Below the kernels q4 comes with: used when it is named, or when those cannot.
            priority: -10,
            offers: vec![("nvfp4".into(), ExecPath::FusedDequant)],
        };
        Self { descriptor, isa: Isa::detect() }
    }
}

impl Default for Acme {
    fn default() -> Self {
        Self::new()
    }
}

impl Q4Backend for Acme {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }

    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        vec![ProbeItem { id: "acme.isa".into(), reasons: Vec::new(), detail: format!("{:?}", self.isa) }]
    }

    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, _: &HostEnv) -> Verdict {
        verdict(spec, path)
    }

    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        verdict(spec, path).map_err(|reasons| {
            let texts: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            Error::new(Code::Unsupported, NAME).have(texts.join("; "))
        })?;
        let packed = Packed::new(w)?;
        let info = PreparedInfo {
            backend: NAME.into(),
            path,
            activations: spec.activations,
            n: packed.n,
            k: packed.k,
            resident_bytes: packed.bytes(),
            ops: OpSet::ALL,
        };
        Ok(Box::new(Weight::new(packed, info, (spec.x, spec.y), spec.max_m, self.isa)))
    }
}

/// Every reason against a product.
fn verdict(spec: &LinearSpec, path: ExecPath) -> Verdict {
    let mut reasons = Vec::new();
    let mut reject = |code, need: &'static str, have: String| reasons.push(Reject::new(code, need, have));
    if !matches!(spec.schema, Q4Schema::Nvfp4 { .. }) {
        reject(RejectCode::SchemaUnsupported, "nvfp4", spec.schema.to_string());
    }
    if path != ExecPath::FusedDequant {
        reject(RejectCode::PathUnsupported, "fused-dequant", path.to_string());
    }
    if spec.device != Device::Cpu {
        reject(RejectCode::DeviceAbsent, "cpu", spec.device.to_string());
    }
    if spec.max_m == 0 {
        reject(RejectCode::ShapeUnsupported, "at least one row in a call", "max_m = 0".into());
    }
    if let Activations::Nvfp4(ActQuant { rule, global: ActGlobal::Static(g) }) = spec.activations
        && g.convention() != rule.convention()
    {
        let have = format!("{} with {:?}", rule.as_str(), g.convention());
        reject(RejectCode::ActivationsUnsupported, "a per-tensor scale of the rule's convention", have);
    }
    reject_operands(spec, &mut reasons);
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

q4_plugin_sdk::export_backend!(Acme::new());
