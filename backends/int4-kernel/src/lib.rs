//! int4 products on packed weights, in process, on the CPU: codes stay 4-bit from memory to register, scales
//! as wide as they are stored, zero points a byte. `q4-codebook` has the products and says how they sum.
mod prepare;
mod probe;

use q4_core::rows;
use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, ExecContext, ExecPath, Footprint, HostEnv, LinearSpec,
    PreparedWeight, ProbeItem, Q4Backend, Q4Schema, Q4Weight, Registration, Reject, Result, Verdict,
    inventory,
};
use q4_simd::Vectors;
use std::sync::Arc;

inventory::submit! {
    Registration { name: NAME, construct }
}

const NAME: &str = "int4-kernel";

/// Best instruction set of this machine, or the one `options.isa` names: one that is unknown or that this
/// machine lacks is refused.
fn construct(options: &BuiltinOptions, _: &HostEnv) -> std::result::Result<Built, Vec<Reject>> {
    let vectors = Vectors::choose(options.isa.as_deref()).map_err(|reason| vec![reason])?;
    Ok(Built::new(Arc::new(Int4Kernel::new(vectors))))
}

/// The backend: a descriptor, and the instruction set its kernels use.
struct Int4Kernel {
    vectors: Vectors,
    descriptor: BackendDescriptor,
}

impl Int4Kernel {
    fn new(vectors: Vectors) -> Self {
        let descriptor = BackendDescriptor {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            vendor: "q4".into(),
            priority: 0,
            offers: ["int4", "int4-asym"].map(|schema| (schema.into(), ExecPath::FusedDequant)).into(),
        };
        Self { vectors, descriptor }
    }
}

impl Q4Backend for Int4Kernel {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        q4_codebook::probe(self.vectors)
    }
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, _: &HostEnv) -> Verdict {
        let reasons = probe::operands(spec, path);
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }
    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        match spec.schema {
            Q4Schema::Int4(format) => {
                let scale = format.scales.size() + usize::from(!format.symmetric);
                q4_codebook::footprint(spec, format.group, scale)
            }
            _ => Footprint::usual(spec, path),
        }
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        rows::agree(w, spec, &probe::operands(spec, path), cx)?;
        prepare::prepare(w, spec, path, self.vectors, cx.threads)
    }
}
