//! A backend that refuses everything and says why: the smallest one there can be.
use crate::{
    BackendDescriptor, Code, Error, ExecContext, ExecPath, HostEnv, LinearSpec, PreparedWeight, ProbeItem,
    Q4Backend, Q4Weight, Reject, RejectCode, Result, Verdict,
};

/// Offers what it is told to and serves none of it, with a reason. It stands in for a backend in tests, and
/// is what a backend of one's own can start as: copy this file, then let `can_prepare` refuse one product
/// less at a time and `prepare` build it.
///
/// ```
/// use q4_core::{
///     Activations, Candidate, DType, Device, ExecPath, HostEnv, LinearSpec, NullBackend, OpSet, Policy,
///     RejectCode, SegmentSpec, formats, select,
/// };
/// use std::sync::Arc;
///
/// let mine = NullBackend::new("mine", &[("nvfp4", ExecPath::FusedDequant)]);
/// let spec = LinearSpec {
///     segments: vec![SegmentSpec { name: "model.layers.0.mlp.down_proj".into(), rows: 256 }],
///     schema: formats::encodings("nvfp4")[0],
///     k: 768,
///     max_m: 64,
///     x: DType::F32,
///     y: DType::F32,
///     activations: Activations::Native,
///     device: Device::Cpu,
///     ops: OpSet::FORWARD,
/// };
/// let candidates = [Candidate::Live(Arc::new(mine))];
/// let refused = select(&candidates, &spec, &Policy::default(), &HostEnv::collect()).unwrap_err();
///
/// let by = &refused.rejected()[0];
/// assert_eq!((by.backend.as_str(), by.path), ("mine", Some(ExecPath::FusedDequant)));
/// assert_eq!(by.reasons[0].code, RejectCode::PathUnsupported);
/// assert_eq!(by.reasons[0].have, "`mine`, which computes nothing yet");
/// ```
pub struct NullBackend {
    descriptor: BackendDescriptor,
}

impl NullBackend {
    /// A backend of this name that is asked for these `(schema name, path)` pairs.
    pub fn new(name: &str, offers: &[(&str, ExecPath)]) -> Self {
        let descriptor = BackendDescriptor {
            name: name.to_owned().into(),
            version: env!("CARGO_PKG_VERSION").into(),
            vendor: "q4".into(),
            priority: 0,
            offers: offers.iter().map(|(schema, path)| ((*schema).to_owned().into(), *path)).collect(),
        };
        Self { descriptor }
    }

    /// The one reason there is.
    fn reason(&self, path: ExecPath) -> Reject {
        let have = format!("`{}`, which computes nothing yet", self.descriptor.name);
        Reject::new(RejectCode::PathUnsupported, format!("a kernel for {path}"), have)
    }
}

impl Q4Backend for NullBackend {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }

    /// One item for each offer: a backend says here what it found and what it lacks.
    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        let item = |(schema, path): &(_, ExecPath)| ProbeItem {
            id: format!("kernel.{schema}").into(),
            reasons: vec![self.reason(*path)],
            detail: String::new(),
        };
        self.descriptor.offers.iter().map(item).collect()
    }

    /// Looks at the arguments and at nothing else, and gives every reason.
    fn can_prepare(&self, _: &LinearSpec, path: ExecPath, _: &HostEnv) -> Verdict {
        Err(vec![self.reason(path)])
    }

    /// Refuses what `can_prepare` refuses, which is all there is to do.
    fn prepare(
        &self,
        _: &Q4Weight<'_>,
        _: &LinearSpec,
        path: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        Err(Error::new(Code::Unsupported, "weight cannot be prepared").have(self.reason(path).to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Activations, BuiltinOptions, Candidate, DType, Device, Dispatch, OpSet, OwnedParts, Part, Policy,
        Registry, Segment, SegmentSpec, ThreadPool, formats,
    };
    use std::sync::Arc;

    /// As the user meets it: registered, named, asked, refused with its own reason; and by `prepare` as well.
    #[test]
    fn it_is_refused_with_its_reason_wherever_it_is_asked() -> Result<()> {
        let null = Arc::new(NullBackend::new("mine", &[("dense", ExecPath::DequantMatmul)]));
        let (segments, schema) =
            (vec![SegmentSpec { name: "lm_head".into(), rows: 1 }], formats::encodings("dense")[0]);
        let spec = LinearSpec {
            segments,
            schema,
            k: 2,
            max_m: 1,
            x: DType::F32,
            y: DType::F32,
            activations: Activations::Native,
            device: Device::Cpu,
            ops: OpSet::FORWARD,
        };
        let mut registry = Registry::on(HostEnv::default(), &BuiltinOptions::default())?;
        registry.add(Candidate::Live(null.clone()))?;
        let mut policy = Policy::default();
        policy.overrides.all = Some("mine".into());
        let refused =
            Error::from(Dispatch::new(registry, policy).select(&spec).expect_err("nobody serves it"));
        let reason = null.reason(ExecPath::DequantMatmul).to_string();
        assert_eq!(refused.code(), Code::NoneEligible);
        assert!(refused.to_string().contains(&reason), "{refused}");

        let dtype = schema.dense_dtype().expect("a dense matrix");
        let parts = OwnedParts::default().with(Part::Codes, dtype, &[1, 2], vec![0; 2 * dtype.size()]);
        let segments = [Segment { rows: 1, data: parts.lend()? }];
        let (weight, pool) = (Q4Weight { schema, k: 2, segments: &segments }, ThreadPool::new(1));
        weight.validate()?;
        let path = ExecPath::DequantMatmul;
        let Err(refused) = null.prepare(&weight, &spec, path, &mut ExecContext::cpu(&pool)) else {
            panic!("prepare serves what can_prepare refuses")
        };
        assert!(refused.to_string().contains(&reason), "{refused}");
        assert_eq!(null.probe(&HostEnv::default())[0].reasons, [null.reason(path)]);
        Ok(())
    }
}
