//! Third-party backends among the candidates: loaded from where the user said, and trusted with a certificate only.
use q4_conformance::Profile;
use q4_conformance::certificate::{self, Library, default_dir};
use q4_core::{Candidate, LibraryFacts, Registry, Reject, RejectCode, Result};
use q4_plugin_host::{Loaded, Loader, Prober};
use std::path::PathBuf;

/// Adds the libraries of `paths` and `folders`. One that was named and is refused is an error; one that was found in a
/// folder stays in the list with its reasons, and so does one without a valid certificate while `gated`.
pub fn add(registry: &mut Registry, paths: &[PathBuf], folders: &[PathBuf], gated: bool) -> Result<()> {
    if paths.is_empty() && folders.is_empty() {
        return Ok(());
    }
    // A library whose constructor ends or hangs a process ends a child.
    let prober = std::env::current_exe().ok().map(|program| Prober::new(program, [crate::PROBE]));
    let loader = Loader { prober, ..Loader::default() };
    for path in paths {
        let loaded = loader.load(path)?;
        admit(registry, loaded, gated)?;
    }
    for folder in folders {
        for outcome in loader.load_dir(folder)? {
            match outcome {
                Ok(loaded) => admit(registry, loaded, gated)?,
                Err(refusal) => registry.add(refusal.candidate())?,
            }
        }
    }
    Ok(())
}

fn admit(registry: &mut Registry, loaded: Loaded, gated: bool) -> Result<()> {
    let (name, version) = (loaded.descriptor.name.to_string(), loaded.descriptor.version.to_string());
    let library = Library { path: loaded.path.display().to_string(), sha256: loaded.sha256.clone() };
    let verdict = match (gated, default_dir()) {
        (false, _) => Ok(()),
        (true, Some(dir)) => {
            certificate::gate(&dir, &name, &version, &library, registry.env(), Profile::Inference)
        }
        (true, None) => Err(Reject::new(
            RejectCode::ConformanceMissing,
            "a place for certificates: XDG_DATA_HOME or HOME",
            "neither is set",
        )),
    };
    registry.add(match verdict {
        Ok(()) => loaded.candidate,
        Err(reason) => Candidate::Dead { name: name.clone().into(), reasons: vec![reason] },
    })?;
    registry.loaded(&name, LibraryFacts { path: library.path, version, ..LibraryFacts::default() });
    Ok(())
}
