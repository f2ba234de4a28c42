//! The dense product of a decoded copy: what a 4-bit product is bisected against, and the path of layers that are not 4-bit.
//!
//! The copy `[n, k]` has the type of the output ("compute dtype": f32, f16 or bf16), one rounding away from the exact
//! values; a row of f16 is stored times a power of two that fits its range. Arithmetic, which is part of the numerics: copy
//! and input are widened to f32, the `gemm` crate sums in f32, and y is rounded once. `int8` and `nvfp4` activations are
//! quantised as the schema says and decoded to f32 first.
//!
//! Every thread of the caller computes tiles whose bounds depend on the shapes alone, so the number of threads changes no
//! bit. The number of rows in a call may: `gemm` picks its order of summation by it. `gemm` also allocates what it packs
//! operands into, below 1 MiB a call, and once per thread a buffer of the size of the second-level cache.
mod forward;
mod prepare;
mod probe;

use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, ExecContext, ExecPath, HostEnv, LinearSpec, PreparedWeight,
    ProbeItem, Q4Backend, Q4Weight, Registration, Reject, Result, Verdict, inventory,
};
use std::sync::Arc;

inventory::submit! {
    Registration { name: NAME, construct }
}

const NAME: &str = "dequant-matmul";

/// `gemm` uses the best instruction set there is; `options.isa` chooses for kernels. A name that is unknown or that this
/// machine lacks is a reason not to live, as it is for them.
fn construct(options: &BuiltinOptions) -> std::result::Result<Built, Vec<Reject>> {
    probe::check_isa(options.isa.as_deref()).map_err(|reason| vec![reason])?;
    Ok(Built { backend: Arc::new(DequantMatmul::new()), library: None })
}

/// The backend: nothing but its descriptor.
struct DequantMatmul {
    descriptor: BackendDescriptor,
}

impl DequantMatmul {
    fn new() -> Self {
        let descriptor = BackendDescriptor {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            vendor: "q4".into(),
            priority: 0,
            offers: probe::SCHEMAS.map(|schema| (schema.into(), ExecPath::DequantMatmul)).into(),
        };
        Self { descriptor }
    }
}

impl Q4Backend for DequantMatmul {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, _env: &HostEnv) -> Vec<ProbeItem> {
        probe::probe()
    }
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, _env: &HostEnv) -> Verdict {
        probe::can_prepare(spec, path)
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        Ok(Box::new(prepare::prepare(w, spec, path, cx.threads)?))
    }
}
