//! Third-party backends among the candidates: loaded from where the user said, and with a certificate only. Without one, nothing
//! of a library is mapped into this process.
use q4_conformance::certificate::{self, Library, default_dir};
use q4_conformance::{AbiProbe, Elsewhere, Outcome, Profile};
use q4_core::conduct::Facts;
use q4_core::{Candidate, Code, Error, HostEnv, LibraryFacts, Registry, Reject, RejectCode, Result};
use q4_plugin_host::{Examined, Loaded, Loader, Prober, Refusal, TableCases, libraries};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Where a library's code runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this process.
    Here,
    /// In this process, mapped from its own file and without a trial in a child: for debuggers.
    InPlace,
    /// In one of its own.
    Isolated,
    /// The same, between guards, for the suite; a call may take so long.
    Judged(Duration),
}

/// Longest time of a call of a library that is isolated.
const CALL_LIMIT: Duration = Duration::from_secs(600);

/// The tables that backends were loaded from, by name, for the suite to check.
#[derive(Default)]
pub struct Tables(BTreeMap<String, Table>);

/// One of them.
pub struct Table {
    checks: Checks,
    /// SHA-256 of the library, in hexadecimal.
    sha256: String,
}

/// Where its checks run.
enum Checks {
    Here(TableCases),
    #[cfg(target_os = "linux")]
    There(q4_plugin_host::remote::Remote),
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
        TableCases::names()
    }
    fn run(&self, case: &str) -> Result<()> {
        match &self.checks {
            Checks::Here(cases) => cases.run(case),
            #[cfg(target_os = "linux")]
            Checks::There(remote) => remote.table_case(case),
        }
    }
    fn elsewhere(&self) -> Option<&dyn Elsewhere> {
        match &self.checks {
            Checks::Here(_) => None,
            #[cfg(target_os = "linux")]
            Checks::There(_) => Some(self),
        }
    }
}

impl Elsewhere for Table {
    fn process(&self) -> u32 {
        match &self.checks {
            Checks::Here(_) => std::process::id(),
            #[cfg(target_os = "linux")]
            Checks::There(remote) => remote.process(),
        }
    }
    fn lost(&self) -> Option<(Outcome, String)> {
        match &self.checks {
            Checks::Here(_) => None,
            #[cfg(target_os = "linux")]
            Checks::There(remote) => remote
                .lost()
                .map(|loss| (if loss.is_hang { Outcome::Hang } else { Outcome::Crash }, loss.have)),
        }
    }
    fn facts(&self) -> Result<Facts> {
        match &self.checks {
            Checks::Here(_) => Ok(q4_core::conduct::facts_here()),
            #[cfg(target_os = "linux")]
            Checks::There(remote) => remote.facts(),
        }
    }
    fn facts_before(&self) -> Facts {
        match &self.checks {
            Checks::Here(_) => Facts::new(),
            #[cfg(target_os = "linux")]
            Checks::There(remote) => remote.facts_before(),
        }
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
/// folder stays in the list with its reasons, and so does one without a valid certificate while `gated`.
pub fn add(
    registry: &mut Registry,
    paths: &[PathBuf],
    folders: &[PathBuf],
    gated: bool,
    place: Place,
) -> Result<Tables> {
    let mut tables = Tables::default();
    if paths.is_empty() && folders.is_empty() {
        return Ok(tables);
    }
    let program = std::env::current_exe().map_err(|e| Error::new(Code::Io, format!("this program: {e}")))?;
    // A library whose constructor ends or hangs a process ends a child.
    let in_place = place == Place::InPlace;
    let prober = (!in_place).then(|| Prober::new(program, [crate::PROBE]));
    let loader = Loader { prober, in_place, ..Loader::default() };
    for path in paths {
        let entry = Entry::of(loader.examine(path)?, registry.env(), gated, place);
        let entry = entry.map_err(|refusal| match place {
            Place::Judged(_) => not_loaded(refusal),
            _ => refusal.into(),
        })?;
        entry.enter(registry, &mut tables)?;
    }
    for folder in folders {
        for path in libraries(folder)? {
            let entry = match loader.examine(&path) {
                Ok(found) if is_taken(registry, &found.descriptor.name) => {
                    Err((found.descriptor.name.clone(), found.path().to_owned(), Vec::new()))
                }
                Ok(found) => {
                    Entry::of(found, registry.env(), gated, place).map_err(|r| (r.name, r.path, r.reasons))
                }
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
    fn of(found: Examined, env: &HostEnv, gated: bool, place: Place) -> Result<Self, Refusal> {
        let (name, version) = (found.descriptor.name.clone(), found.descriptor.version.clone());
        let library = Library { path: found.path().display().to_string(), sha256: found.sha256().to_owned() };
        let verdict = if gated { certified(&name, &version, &library, env) } else { Ok(()) };
        let (candidate, table) = match verdict {
            Ok(()) if matches!(place, Place::Here | Place::InPlace) => {
                let Loaded { candidate, table: cases, sha256, .. } = found.load()?;
                (candidate, Some(Table { checks: Checks::Here(cases), sha256 }))
            }
            Ok(()) => elsewhere(found, place)?,
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

/// A live backend in a process of its own.
#[cfg(target_os = "linux")]
fn elsewhere(found: Examined, place: Place) -> Result<(Candidate, Option<Table>), Refusal> {
    use q4_plugin_host::remote::{Isolation, Remote, shield};
    let is_judged = place != Place::Isolated;
    if is_judged {
        // The library is about to run as the same user.
        shield();
    }
    let how = Isolation {
        program: std::env::current_exe().unwrap_or_else(|_| "q4".into()),
        args: Vec::new(),
        limit: if let Place::Judged(limit) = place { limit } else { CALL_LIMIT },
        is_judged,
    };
    let remote = Remote::start(&found, &how)?;
    let table = Table { checks: Checks::There(remote.handle()), sha256: found.sha256().to_owned() };
    Ok((Candidate::Live(std::sync::Arc::new(remote)), Some(table)))
}

#[cfg(not(target_os = "linux"))]
fn elsewhere(found: Examined, _: Place) -> Result<(Candidate, Option<Table>), Refusal> {
    let need = "a system where a library can have a process of its own: Linux";
    Err(found.refused(Reject::new(RejectCode::NotCompiledIn, need, std::env::consts::OS)))
}

/// A library that ends whoever loads it does not conform; any other refusal is one.
fn not_loaded(refusal: Refusal) -> Error {
    let is_fatal = |r: &&Reject| matches!(r.code, RejectCode::DiedInProbe | RejectCode::TimedOut);
    match refusal.reasons.iter().find(is_fatal) {
        Some(r) => Error::new(Code::ConformanceFailed, format!("{} cannot be judged", refusal.name))
            .need(r.need.clone())
            .have(r.have.clone()),
        None => refusal.into(),
    }
}

fn certified(name: &str, version: &str, library: &Library, env: &HostEnv) -> Result<(), Reject> {
    let dir = default_dir().ok_or_else(|| {
        let need = "a place for certificates: XDG_DATA_HOME or HOME";
        Reject::new(RejectCode::ConformanceMissing, need, "neither is set")
    })?;
    certificate::gate(&dir, name, version, library, env, Profile::Inference)
}
