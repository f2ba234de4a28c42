//! `acme-nvfp4`: NVFP4 products on the CPU. Sixteen rows of a weight are the sixteen lanes of a register, so
//! that a product needs no horizontal sum and one shuffle decodes sixteen codes.
//!
//! `pack` is the layout, `kernels` what runs on it, `product` a call. `cuda` is all of that on a CUDA device,
//! with the kernels of `product.cu`.
mod cuda;
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

    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        let isa = ProbeItem { id: "acme.isa".into(), reasons: Vec::new(), detail: format!("{:?}", self.isa) };
        [isa].into_iter().chain(cuda::probe(env)).collect()
    }

    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        let mut reasons = reasons(spec, path);
        if let Device::Cuda(ordinal) = spec.device {
            reasons.extend(cuda::missing(ordinal, env));
        }
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }

    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        let reasons: Vec<_> = reasons(spec, path).iter().map(ToString::to_string).collect();
        if !reasons.is_empty() {
            return Err(Error::new(Code::Unsupported, NAME).have(reasons.join("; ")));
        }
        let mut info = PreparedInfo {
            backend: NAME.into(),
            path,
            activations: spec.activations,
            n: w.n(),
            k: w.k,
            resident_bytes: 0,
            ops: OpSet::ALL,
        };
        if let Device::Cuda(ordinal) = spec.device {
            return Ok(Box::new(cuda::Weight::new(cuda::Gpu::open(ordinal)?, w, spec, info)?));
        }
        let packed = Packed::new(w)?;
        info.resident_bytes = packed.bytes();
        Ok(Box::new(Weight::new(packed, info, (spec.x, spec.y), spec.max_m, self.isa)))
    }
}

/// Every reason against a product that is in the product itself.
fn reasons(spec: &LinearSpec, path: ExecPath) -> Vec<Reject> {
    let mut reasons = Vec::new();
    let mut reject = |code, need: &'static str, have: String| reasons.push(Reject::new(code, need, have));
    if !matches!(spec.schema, Q4Schema::Nvfp4(_)) {
        reject(RejectCode::SchemaUnsupported, "nvfp4", spec.schema.to_string());
    }
    if path != ExecPath::FusedDequant {
        reject(RejectCode::PathUnsupported, "fused-dequant", path.to_string());
    }
    match spec.device {
        Device::Cpu => {}
        Device::Cuda(_) => {
            if spec.activations != Activations::Native {
                let have = spec.activations.to_string();
                reject(RejectCode::ActivationsUnsupported, "native activations on a CUDA device", have);
            }
            // Indices of the kernels have 32 bits.
            if [spec.n(), spec.k, spec.max_m].iter().any(|extent| i32::try_from(*extent).is_err()) {
                let have = format!("[{}, {}], {} rows", spec.n(), spec.k, spec.max_m);
                reject(RejectCode::ShapeUnsupported, "extents below 2^31 on a CUDA device", have);
            }
        }
        other => reject(RejectCode::DeviceAbsent, "cpu or a CUDA device", other.to_string()),
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
    reasons
}

q4_plugin_sdk::export_backend!(Acme::new());
