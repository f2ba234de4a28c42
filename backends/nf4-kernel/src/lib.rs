//! NF4 products on packed weights, in process: the weights stay 4-bit from memory to register.
//!
//! On the CPU the products are those of `q4-codebook`, which says how they sum. On a CUDA device the kernels
//! are NF4's own.
mod cuda;
mod prepare;
mod probe;

use cuda::Engine;
use q4_core::rows;
use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, Device, ExecContext, ExecPath, Footprint, HostEnv, LinearSpec,
    Nf4, PreparedWeight, ProbeItem, Q4Backend, Q4Schema, Q4Weight, Registration, Reject, Result, Verdict,
    inventory,
};
use q4_cuda::Engines;
use q4_simd::Vectors;
use std::sync::Arc;

inventory::submit! {
    Registration { name: NAME, construct }
}

const NAME: &str = "nf4-kernel";

/// Best instruction set of this machine, or the one `options.isa` names: one that is unknown or that this
/// machine lacks is refused.
fn construct(options: &BuiltinOptions, env: &HostEnv) -> std::result::Result<Built, Vec<Reject>> {
    let vectors = Vectors::choose(options.isa.as_deref()).map_err(|reason| vec![reason])?;
    let images = q4_cuda::images(options, &cuda::SOURCE);
    Ok(Built { images, ..Built::new(Arc::new(Nf4Kernel::new(vectors, env))) })
}

/// The backend: a descriptor, the instruction set its kernels use, and those of devices.
struct Nf4Kernel {
    vectors: Vectors,
    descriptor: BackendDescriptor,
    cuda: Engines<Engine>,
}

impl Nf4Kernel {
    fn new(vectors: Vectors, env: &HostEnv) -> Self {
        let paths = probe::paths(&env.cuda);
        let offer = |schema: &'static str| paths.iter().map(move |path| (schema.into(), *path));
        let descriptor = BackendDescriptor {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            vendor: "q4".into(),
            priority: 0,
            offers: ["nf4", "nf4-dq"].into_iter().flat_map(offer).collect(),
        };
        Self { vectors, descriptor, cuda: Engines::new(Engine::new) }
    }
}

impl Q4Backend for Nf4Kernel {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        q4_codebook::probe(self.vectors.isa(), Vectors::all().map(Vectors::isa))
            .into_iter()
            .chain(probe::NEEDS.items(env))
            .collect()
    }
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        probe::can_prepare(spec, path, env)
    }
    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        let usual = Footprint::usual(spec, path);
        match (spec.device, spec.schema) {
            (Device::Cpu, Q4Schema::Nf4(Nf4 { block, .. })) => {
                q4_codebook::footprint(spec, block, size_of::<f32>())
            }
            (_, Q4Schema::Nf4(Nf4 { block, .. })) => {
                Footprint { resident: cuda::resident(spec.n(), spec.k, block), ..usual }
            }
            _ => usual,
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
        match spec.device {
            Device::Cpu => Ok(Box::new(prepare::prepare(w, spec, path, self.vectors, cx.threads)?)),
            _ => Ok(Box::new(cuda::prepare(&self.cuda.of(spec.device)?, w, spec, path)?)),
        }
    }
}
