//! Third-party backends among the candidates: loaded from where the user said, and with a certificate only. Without one, nothing
//! of a library is mapped into this process.
use q4_conformance::certificate::{self, Library, default_dir};
use q4_conformance::{AbiProbe, Profile};
use q4_core::{Candidate, Code, Error, HostEnv, LibraryFacts, Registry, Reject, RejectCode, Result};
use q4_plugin_host::{Examined, Loaded, Loader, Prober, Refusal, TableCases, libraries};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The tables that backends were loaded from, by name, for the suite to check.
#[derive(Default)]
pub struct Tables(BTreeMap<String, Table>);

/// One of them.
pub struct Table {
    cases: TableCases,
    /// SHA-256 of the library, in hexadecimal.
    sha256: String,
}

impl Tables {
    /// The checks of a backend's table; a built-in has none.
    pub fn of(&self, backend: &str) -> Option<&dyn AbiProbe> {
        self.0.get(backend).map(|table| table as &dyn AbiProbe)
    }

    /// SHA-256 of the bytes that a backend was loaded from, in hexadecimal.
    pub fn sha256(&self, backend: &str) -> Option<&str> {
        self.0.get(backend).map(|table| &*table.sha256)
    }
}

impl AbiProbe for Table {
    fn cases(&self) -> Vec<String> {
        self.cases.cases()
    }
    fn run(&self, case: &str) -> Result<()> {
        self.cases.run(case)
    }
}

/// What an examined library becomes among the candidates.
struct Entry {
    name: String,
    candidate: Candidate,
    facts: LibraryFacts,
    /// Of a live one.
    table: Option<Table>,
}

/// Adds the libraries of `paths` and `folders`. One that was named and is refused is an error; one that was found in a
/// folder stays in the list with its reasons, and so does one without a valid certificate while `gated`. For a debugger
/// everything is `in_process`: no trial in a child, and the file itself is mapped.
pub fn add(
    registry: &mut Registry,
    paths: &[PathBuf],
    folders: &[PathBuf],
    gated: bool,
    in_process: bool,
) -> Result<Tables> {
    let mut tables = Tables::default();
    if paths.is_empty() && folders.is_empty() {
        return Ok(tables);
    }
    let program = std::env::current_exe().map_err(|e| Error::new(Code::Io, format!("this program: {e}")))?;
    // A library whose constructor ends or hangs a process ends a child.
    let prober = (!in_process).then(|| Prober::new(program, [crate::PROBE]));
    let loader = Loader { prober, in_place: in_process, ..Loader::default() };
    for path in paths {
        let entry = Entry::of(loader.examine(path)?, registry.env(), gated)?;
        entry.enter(registry, &mut tables)?;
    }
    for folder in folders {
        for path in libraries(folder)? {
            let entry = match loader.examine(&path) {
                Ok(found) if is_taken(registry, &found.descriptor.name) => {
                    Err((found.descriptor.name.clone(), found.path().to_owned(), Vec::new()))
                }
                Ok(found) => Entry::of(found, registry.env(), gated).map_err(|r| (r.name, r.path, r.reasons)),
                Err(r) => Err((r.name, r.path, r.reasons)),
            };
            let (name, path, mut reasons) = match entry {
                Ok(entry) => {
                    entry.enter(registry, &mut tables)?;
                    continue;
                }
                Err(refused) => refused,
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

impl Entry {
    /// Live if it may be used here; only then it is mapped.
    fn of(found: Examined, env: &HostEnv, gated: bool) -> Result<Self, Refusal> {
        let (name, version) = (found.descriptor.name.clone(), found.descriptor.version.clone());
        let library = Library { path: found.path().display().to_string(), sha256: found.sha256().to_owned() };
        let verdict = if gated { certified(&name, &version, &library, env) } else { Ok(()) };
        let (candidate, table) = match verdict {
            Ok(()) => {
                let Loaded { candidate, table: cases, sha256, .. } = found.load()?;
                (candidate, Some(Table { cases, sha256 }))
            }
            Err(reason) => (Candidate::Dead { name: name.clone().into(), reasons: vec![reason] }, None),
        };
        let facts = LibraryFacts { path: library.path, version, ..LibraryFacts::default() };
        Ok(Self { name, candidate, facts, table })
    }

    fn enter(self, registry: &mut Registry, tables: &mut Tables) -> Result<()> {
        registry.add(self.candidate)?;
        registry.loaded(&self.name, self.facts);
        tables.0.extend(self.table.map(|table| (self.name, table)));
        Ok(())
    }
}

fn certified(name: &str, version: &str, library: &Library, env: &HostEnv) -> Result<(), Reject> {
    let dir = default_dir().ok_or_else(|| {
        let need = "a place for certificates: XDG_DATA_HOME or HOME";
        Reject::new(RejectCode::ConformanceMissing, need, "neither is set")
    })?;
    certificate::gate(&dir, name, version, library, env, Profile::Inference)
}
