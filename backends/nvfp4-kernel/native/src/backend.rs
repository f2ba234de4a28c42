//! The backend: an instruction set, memory for packed weights, and the kernels of devices.
use crate::NAME;
use crate::memory::Arena;
use crate::{cuda, forward, prepare, probe};
use q4_core::isa::Isa;
use q4_core::memory::UnifiedMemory;
use q4_core::rows;
use q4_core::{
    BackendDescriptor, BuiltinOptions, Device, ExecContext, ExecPath, Footprint, HostEnv, LinearSpec,
    PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Reject, Result, Verdict,
};
use q4_cuda::Engines;
use std::sync::Arc;

/// The best instruction set of this machine, or the one that `options.isa` names. Without `options.cuda` no
/// device is looked for.
///
/// # Errors
/// When the named set is unknown or this processor lacks it: no other is taken instead.
pub fn construct(options: &BuiltinOptions) -> std::result::Result<Arc<dyn Q4Backend>, Vec<Reject>> {
    let isa = Isa::choose(options.isa.as_deref()).map_err(|reason| vec![reason])?;
    let offers = [ExecPath::NativeKernel, ExecPath::FusedDequant];
    let descriptor = BackendDescriptor {
        name: NAME.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        vendor: "q4".into(),
        priority: 0,
        offers: offers.map(|path| ("nvfp4".into(), path)).into(),
    };
    Ok(Arc::new(Nvfp4 {
        descriptor,
        isa,
        arena: Arena::default(),
        images: cuda::images(options),
        unified_memory: options.unified_memory,
        engines: Engines::new(cuda::Engine::open),
    }))
}

struct Nvfp4 {
    descriptor: BackendDescriptor,
    isa: Isa,
    /// Where weights for the CPU are.
    arena: Arena,
    /// Compute capabilities whose machine code is on disk, so that no compiler is needed.
    images: Vec<(u32, u32)>,
    unified_memory: UnifiedMemory,
    engines: Engines<cuda::Engine>,
}

impl Q4Backend for Nvfp4 {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }

    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        probe::items(self.isa, &self.images, env)
    }

    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        probe::verdict(spec, path, env, &self.images)
    }

    fn manages_memory(&self) -> bool {
        true
    }

    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        let usual = Footprint::usual(spec, path);
        match spec.device {
            Device::Cpu => Footprint { workspace: forward::most_workspace(spec, self.isa), ..usual },
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
        let plan = prepare::Plan::new(w, spec, path)?;
        match spec.device {
            Device::Cpu => Ok(Box::new(plan.build(self.isa, &self.arena, cx.threads)?)),
            device => cuda::prepare(&self.engines.of(device)?, &plan, self.unified_memory, cx.threads),
        }
    }
}
