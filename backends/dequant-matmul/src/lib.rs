//! The dense product of a decoded copy: what a 4-bit product is bisected against, and the path of layers that are not 4-bit.
//!
//! The copy has the type of the output ("compute dtype": f32, f16 or bf16), one rounding away from the exact values, and
//! takes `n · k` elements and 4 bytes a row, n rounded up to 16; an f16 row is stored times a power of two that fits its
//! range. Arithmetic, which is part of the numerics: copy and input are widened to f32,
//! products are summed in f32 in chains of 64 of k (even and odd k apart), chains in order of k, and y is rounded once.
//! The order depends on k alone, so neither the number of rows in a call nor the number of threads changes a bit.
//! `int8` and `nvfp4` activations are quantised as the schema says and decoded to f32 first.
//!
//! The product is our own because a call may not allocate and may not start threads; it is written over output lanes like
//! the fused kernels, so its speed is a fair base line for them.
mod forward;
mod io;
mod kernel;
mod prepare;
mod probe;
mod simd;

use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, ExecContext, ExecPath, HostEnv, LinearSpec, PreparedWeight,
    ProbeItem, Q4Backend, Q4Weight, Registration, Reject, Result, Verdict, inventory,
};
use simd::Isa;
use std::sync::Arc;

inventory::submit! {
    Registration { name: NAME, construct }
}

const NAME: &str = "dequant-matmul";

/// Best instruction set of this machine, or the one `options.isa` names: `portable`, `avx2`, `avx512`
/// (`avx512vnni` means `avx512` here). A name that is unknown or that this machine lacks is a reason not to live.
fn construct(options: &BuiltinOptions) -> std::result::Result<Built, Vec<Reject>> {
    let isa = Isa::choose(options.isa.as_deref()).map_err(|reason| vec![reason])?;
    Ok(Built { backend: Arc::new(DequantMatmul::new(isa)), library: None })
}

/// The backend: a descriptor and the instruction set its kernels use.
struct DequantMatmul {
    isa: Isa,
    descriptor: BackendDescriptor,
}

impl DequantMatmul {
    fn new(isa: Isa) -> Self {
        let descriptor = BackendDescriptor {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            vendor: "q4".into(),
            priority: 0,
            offers: probe::SCHEMAS.map(|schema| (schema.into(), ExecPath::DequantMatmul)).into(),
        };
        Self { isa, descriptor }
    }
}

impl Q4Backend for DequantMatmul {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, _env: &HostEnv) -> Vec<ProbeItem> {
        probe::probe(self.isa)
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
        Ok(Box::new(prepare::prepare(w, spec, path, self.isa, cx.threads)?))
    }
}
