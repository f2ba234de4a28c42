//! NF4 products on packed weights, in process: the weights stay 4-bit from memory to register.
//!
//! Sixteen output rows are interleaved so that a lane is an output row and no horizontal sum is needed. Arithmetic,
//! which is part of the numerics: `y = Σ_blocks absmax · Σ_k codebook[code] · x` in f32. The inner sum runs over at most
//! 64 of k in two chains (even and odd k) and is scaled once; the outer sum adds those in order of k. The order depends on
//! k alone, so neither the number of rows in a call nor the number of threads changes a bit. NF4 has no integer form:
//! `int8` activations are rounded to int8 with an f32 scale per 16, and `q · scale`, rounded to f32, takes the
//! place of x.
mod forward;
mod kernel;
mod pages;
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

const NAME: &str = "nf4-kernel";

/// Best instruction set of this machine, or the one `options.isa` names: `portable`, `avx2`, `avx512`
/// (`avx512vnni` means `avx512` here). A name that is unknown or that this machine lacks is a reason not to live.
fn construct(options: &BuiltinOptions) -> std::result::Result<Built, Vec<Reject>> {
    let isa = Isa::choose(options.isa.as_deref()).map_err(|reason| vec![reason])?;
    Ok(Built { backend: Arc::new(Nf4Kernel::new(isa)), library: None })
}

/// The backend: a descriptor and the instruction set its kernels use.
struct Nf4Kernel {
    isa: Isa,
    descriptor: BackendDescriptor,
}

impl Nf4Kernel {
    fn new(isa: Isa) -> Self {
        let descriptor = BackendDescriptor {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            vendor: "q4".into(),
            priority: 0,
            offers: ["nf4", "nf4-dq"].map(|schema| (schema.into(), ExecPath::FusedDequant)).into(),
        };
        Self { isa, descriptor }
    }
}

impl Q4Backend for Nf4Kernel {
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
