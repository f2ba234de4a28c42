//! The scalar oracle as a backend: slow, allocating, and right by construction.
//!
//! It keeps the stored bytes and computes with `q4_core::oracle`: NVFP4 by NVFP4 in fixed point, everything
//! else as an f64 sum of exact products; y is rounded once. The one backend that allocates in a call. Nobody
//! gets it without naming it.
mod forward;
mod prepare;
mod probe;

use q4_core::formats::names;
use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, ExecContext, ExecPath, Footprint, HostEnv, LinearSpec,
    PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Registration, Reject, Result, Verdict, inventory,
};
use std::sync::Arc;

inventory::submit! {
    Registration { name: NAME, construct }
}

const NAME: &str = "reference";

fn construct(_: &BuiltinOptions, _: &HostEnv) -> std::result::Result<Built, Vec<Reject>> {
    Ok(Built::new(Arc::new(Reference::new())))
}

/// The backend: nothing but its descriptor.
struct Reference {
    descriptor: BackendDescriptor,
}

impl Reference {
    fn new() -> Self {
        let descriptor = BackendDescriptor {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            vendor: "q4".into(),
            priority: -100,
            offers: names().map(|schema| (schema.into(), ExecPath::Reference)).collect(),
        };
        Self { descriptor }
    }
}

impl Q4Backend for Reference {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, _env: &HostEnv) -> Vec<ProbeItem> {
        probe::probe()
    }
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, _env: &HostEnv) -> Verdict {
        probe::can_prepare(spec, path)
    }
    fn footprint(&self, spec: &LinearSpec, _path: ExecPath) -> Footprint {
        // Values, codes and sums in eight bytes each, which a call allocates.
        let workspace = 16 * spec.max_m * (spec.n() + spec.k);
        Footprint { resident: spec.schema.stored_bytes(spec.n(), spec.k), workspace: workspace as u64 }
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        Ok(Box::new(prepare::prepare(w, spec, path, cx)?))
    }
}
