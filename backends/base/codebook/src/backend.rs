//! A backend on the CPU: the products of this crate, and what its format alone knows.
use crate::prepare::footprint;
use crate::probe::{operands, probe};
use q4_core::isa::Isa;
use q4_core::rows;
use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, Device, ExecContext, ExecPath, Footprint, HostEnv, LinearSpec,
    PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Reject, RejectCode, Result, ThreadPool, Verdict,
};
use q4_simd::Vectors;
use std::sync::Arc;

/// What a format's backend says of itself.
pub struct Own {
    /// Its name.
    pub name: &'static str,
    /// That of its package.
    pub version: &'static str,
    /// Schemas that it multiplies by.
    pub schemas: &'static [&'static str],
    /// What is wrong with the schema of a product, or with its shape under that schema.
    pub refuse: fn(&LinearSpec, &mut Refuse<'_>),
    /// Elements per scale and what is kept for each beside four bits of each code, in bytes; `None` for other
    /// schemas.
    pub scale: fn(&LinearSpec) -> Option<(u32, usize)>,
    /// Repacks a weight that was not refused.
    pub prepare: Prepare,
}

/// Takes a reason: its code, what is needed, what is there.
pub type Refuse<'a> = dyn FnMut(RejectCode, &str, String) + 'a;

/// Repacks a weight for a spec and a path.
pub type Prepare =
    fn(&Q4Weight<'_>, &LinearSpec, ExecPath, Vectors, &ThreadPool) -> Result<Box<dyn PreparedWeight>>;

impl Own {
    /// The backend on the best instruction set of this machine, or on the one that `options.isa` names.
    ///
    /// # Errors
    /// An instruction set that is unknown or that this machine lacks.
    pub fn construct(&'static self, options: &BuiltinOptions) -> std::result::Result<Built, Vec<Reject>> {
        let vectors = Vectors::choose(options.isa.as_deref()).map_err(|reason| vec![reason])?;
        let descriptor = BackendDescriptor {
            name: self.name.into(),
            version: self.version.into(),
            vendor: "q4".into(),
            priority: 0,
            offers: self.schemas.iter().map(|schema| ((*schema).into(), ExecPath::FusedDequant)).collect(),
        };
        Ok(Built::new(Arc::new(OnCpu { own: self, vectors, descriptor })))
    }
}

struct OnCpu {
    own: &'static Own,
    vectors: Vectors,
    descriptor: BackendDescriptor,
}

impl OnCpu {
    fn reasons(&self, spec: &LinearSpec, path: ExecPath) -> Vec<Reject> {
        use RejectCode::*;
        let mut reasons = Vec::new();
        let mut reject =
            |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
        if path != ExecPath::FusedDequant {
            reject(PathUnsupported, "fused-dequant", path.to_string());
        }
        if spec.device != Device::Cpu {
            reject(DeviceUnsupported, "cpu", spec.device.to_string());
        }
        (self.own.refuse)(spec, &mut reject);
        reasons.extend(operands(spec, None));
        reasons
    }
}

impl Q4Backend for OnCpu {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        probe(self.vectors.set(), Isa::available())
    }
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, _: &HostEnv) -> Verdict {
        let reasons = self.reasons(spec, path);
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }
    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        match (self.own.scale)(spec) {
            Some((block, bytes)) => footprint(spec, block, bytes),
            None => Footprint::usual(spec, path),
        }
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        rows::agree(w, spec, &self.reasons(spec, path), cx)?;
        (self.own.prepare)(w, spec, path, self.vectors, cx.threads)
    }
}
