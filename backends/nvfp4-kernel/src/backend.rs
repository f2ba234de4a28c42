//! The backend object: the library's, under the name that users know, with a note of where it came from.
use crate::library;
use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, ExecContext, ExecPath, Footprint, HostEnv, LibraryFacts,
    LinearSpec, PreparedGroup, PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Reject, Result, Verdict,
};
use q4_cuda::Arch;
use q4_plugin_host::Plugin;
use std::path::PathBuf;
use std::sync::Arc;

/// Name in the registry, in overrides and in [`HostEnv::libraries`].
pub const NAME: &str = "nvfp4-kernel";

struct Nvfp4Kernel {
    descriptor: BackendDescriptor,
    plugin: Plugin,
    /// How the library was found.
    note: ProbeItem,
}

/// Loads libNVFP4: the file of `options.libraries["nvfp4-kernel"]` alone when there is one, else the first
/// usable one beside the executable, in `deps` or `../lib` beside it, or known to the system loader.
/// `options.isa` is binding.
///
/// # Errors
/// Every place that was tried, with its reason, and last the command that would help.
pub fn construct(options: &BuiltinOptions, env: &HostEnv) -> std::result::Result<Built, Vec<Reject>> {
    let library = library::load(options.libraries.get(NAME).map(PathBuf::as_path))?;
    let plugin = library.found.create(NAME, options)?;
    let mut descriptor = plugin.descriptor().clone();
    // Where no device has them, that it lacks FP4 tensor cores is no news of any layer.
    if !env.cuda.iter().any(|d| Arch::of(d.capability).fp4) {
        descriptor.offers.retain(|(_, path)| *path != ExecPath::NativeKernel);
    }
    let facts = LibraryFacts {
        path: library.path.clone(),
        version: descriptor.version.to_string(),
        sha256: String::new(),
    };
    tracing::debug!(path = %facts.path, version = %facts.version, "libNVFP4");
    let backend = Nvfp4Kernel { descriptor, plugin, note: library.note() };
    Ok(Built { library: Some(facts), ..Built::new(Arc::new(backend)) })
}

impl Q4Backend for Nvfp4Kernel {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }

    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        // The first says where a plugin came from, as the note does for this one.
        std::iter::once(self.note.clone()).chain(self.plugin.probe(env).into_iter().skip(1)).collect()
    }

    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        self.plugin.can_prepare(spec, path, env)
    }

    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        self.plugin.footprint(spec, path)
    }

    fn manages_memory(&self) -> bool {
        true
    }

    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        self.plugin.prepare(w, spec, path, cx)
    }

    fn group(
        &self,
        weights: &[Arc<dyn PreparedWeight>],
        cx: &mut ExecContext<'_>,
    ) -> Result<Option<Box<dyn PreparedGroup>>> {
        self.plugin.group(weights, cx)
    }
}
