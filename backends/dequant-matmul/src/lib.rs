//! The dense product of a decoded copy: what a 4-bit product is bisected against, and the path of layers that
//! are not 4-bit.
//!
//! The copy `[n, k]` has the type of the output ("compute dtype": f32, f16 or bf16), one rounding away from
//! the exact values; a row of f16 is stored times a power of two that fits its range. Arithmetic, which is
//! part of the numerics: copy and input are widened to f32, the `gemm` crate sums in f32, and y is rounded
//! once. `int8` and `nvfp4` activations are quantised as the schema says and decoded to f32 first.
//!
//! Every thread of the caller computes tiles whose bounds depend on the shapes alone, so the number of
//! threads changes no bit. The number of rows in a call may: `gemm` picks its order of summation by it.
//! `gemm` also allocates what it packs operands into, below 1 MiB a call, and once per thread a buffer of the
//! size of the second-level cache.
mod cuda;
mod forward;
mod prepare;
mod probe;

use cuda::Engine;
use q4_core::formats::names;
use q4_core::rows;
use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, Device, ExecContext, ExecPath, Footprint, HostEnv, LinearSpec,
    PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Registration, Reject, Result, Verdict, inventory,
};
use q4_cuda::Engines;
use std::sync::Arc;

inventory::submit! {
    Registration { name: NAME, construct }
}

const NAME: &str = "dequant-matmul";

/// `gemm` uses the best instruction set there is. Where `options.isa` names a lesser one, products are plain
/// loops instead. An instruction set that is unknown or that this machine lacks is refused.
fn construct(options: &BuiltinOptions, _: &HostEnv) -> std::result::Result<Built, Vec<Reject>> {
    let is_plain = probe::is_plain(options.isa.as_deref()).map_err(|reason| vec![reason])?;
    let images = q4_cuda::images(options, &cuda::SOURCE, &[Vec::new()]);
    Ok(Built { images, ..Built::new(Arc::new(DequantMatmul::new(is_plain))) })
}

/// The backend: its descriptor, how it multiplies, and cuBLASLt on the devices that are used.
struct DequantMatmul {
    descriptor: BackendDescriptor,
    is_plain: bool,
    cuda: Engines<Engine>,
}

impl DequantMatmul {
    fn new(is_plain: bool) -> Self {
        let descriptor = BackendDescriptor {
            name: NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            vendor: "q4".into(),
            priority: 0,
            offers: names().map(|schema| (schema.into(), ExecPath::DequantMatmul)).collect(),
        };
        Self { descriptor, is_plain, cuda: Engines::new(Engine::new) }
    }
}

impl Q4Backend for DequantMatmul {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        probe::probe(self.is_plain).into_iter().chain(probe::NEEDS.items(env)).collect()
    }
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        probe::can_prepare(spec, path, env)
    }
    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        match spec.device {
            Device::Cpu => forward::footprint(spec),
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
        match spec.device {
            Device::Cpu => Ok(Box::new(prepare::decode(w, spec, path, cx.threads)?.plain(self.is_plain))),
            _ => Ok(Box::new(cuda::prepare(&self.cuda.of(spec.device)?, w, spec, path, cx)?)),
        }
    }
}
