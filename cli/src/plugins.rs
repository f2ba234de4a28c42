//! Third-party backends among the candidates: loaded from where the user said, and trusted with a certificate only.
use q4_conformance::certificate::{self, Library, default_dir};
use q4_conformance::{AbiProbe, Profile};
use q4_core::{Candidate, LibraryFacts, Registry, Reject, RejectCode, Result};
use q4_plugin_host::{Loaded, Loader, Prober, TableCases};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The tables that backends were loaded from, by name, for the suite to check.
#[derive(Default)]
pub struct Tables(BTreeMap<String, Table>);

/// One of them.
pub struct Table(TableCases);

impl Tables {
    /// The checks of a backend's table; a built-in has none.
    pub fn of(&self, backend: &str) -> Option<&dyn AbiProbe> {
        self.0.get(backend).map(|table| table as &dyn AbiProbe)
    }
}

impl AbiProbe for Table {
    fn cases(&self) -> Vec<String> {
        self.0.cases()
    }
    fn run(&self, case: &str) -> Result<()> {
        self.0.run(case)
    }
}

/// Adds the libraries of `paths` and `folders`. One that was named and is refused is an error; one that was found in a
/// folder stays in the list with its reasons, and so does one without a valid certificate while `gated`.
pub fn add(registry: &mut Registry, paths: &[PathBuf], folders: &[PathBuf], gated: bool) -> Result<Tables> {
    let mut tables = Tables::default();
    if paths.is_empty() && folders.is_empty() {
        return Ok(tables);
    }
    // A library whose constructor ends or hangs a process ends a child.
    let prober = std::env::current_exe().ok().map(|program| Prober::new(program, [crate::PROBE]));
    let loader = Loader { prober, ..Loader::default() };
    for path in paths {
        admit(registry, &mut tables, loader.load(path)?, gated)?;
    }
    for folder in folders {
        for outcome in loader.load_dir(folder)? {
            let (name, path, mut reasons) = match outcome {
                Ok(loaded) if !is_taken(registry, &loaded.descriptor.name) => {
                    admit(registry, &mut tables, loaded, gated)?;
                    continue;
                }
                Ok(loaded) => (loaded.descriptor.name, loaded.path, Vec::new()),
                Err(refusal) => (refusal.name, refusal.path, refusal.reasons),
            };
            // Whatever a folder holds, it must not keep the others from being listed.
            let name = if is_taken(registry, &name) {
                reasons.push(Reject::new(RejectCode::NameTaken, "a name of its own", format!("`{name}`")));
                path.display().to_string()
            } else {
                name
            };
            // A folder that is given twice is one folder.
            if !is_taken(registry, &name) {
                registry.add(Candidate::Dead { name: name.into(), reasons })?;
            }
        }
    }
    Ok(tables)
}

fn is_taken(registry: &Registry, name: &str) -> bool {
    registry.candidates().iter().any(|c| c.name() == name)
}

fn admit(registry: &mut Registry, tables: &mut Tables, loaded: Loaded, gated: bool) -> Result<()> {
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
    tables.0.insert(name, Table(loaded.table));
    Ok(())
}
