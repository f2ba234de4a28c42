//! Third-party backends among the candidates: loaded from where the user said, for what the user named them
//! for, and with a certificate only. Without one, nothing of a library runs, in this process or in a child.
use crate::mistakes;
use q4_conformance::certificate::DATA_VARIABLES;
use q4_conformance::{AbiProbe, Certificate, Certificates, Elsewhere, Library, Needed, Outcome, Profile};
use q4_core::conduct::Facts;
use q4_core::device::DeviceMemory;
use q4_core::{
    BackendDescriptor, Candidate, Code, Device, Error, ExecContext, ExecPath, Footprint, HostEnv,
    LibraryFacts, LinearSpec, PreparedGroup, PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Registry,
    Reject, RejectCode, Result, VendorDevice, Verdict,
};
use q4_plugin_host::remote::{Isolation, Remote, shield};
use q4_plugin_host::{Examined, Loaded, Loader, Need, Prober, Refusal, TableCases, libraries};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Where a library's code runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this process.
    Here,
    /// In this process, mapped from its own file and without a trial in a child: for debuggers.
    Debugged,
    /// In one of its own.
    Isolated,
    /// The same, between guards, for the suite; a call may take so long.
    Judged(Duration),
}

/// Longest time of a call of a library that is isolated.
const CALL_LIMIT: Duration = Duration::from_secs(600);

/// What the command line says of libraries.
pub struct Asked<'a> {
    /// `--plugin`.
    pub paths: &'a [PathBuf],
    /// `--plugin-dir`.
    pub folders: &'a [PathBuf],
    /// Whether a certificate is needed.
    pub gated: bool,
    /// Where products run, which the certificate must be about.
    pub device: Device,
    /// Where they run.
    pub place: Place,
    /// Whether a library of a folder is asked for.
    pub wanted: &'a dyn Fn(&str) -> bool,
}

/// The tables that backends were loaded from, by name, for the suite to check.
#[derive(Default)]
pub struct Tables {
    tables: BTreeMap<String, Table>,
    named: Vec<String>,
}

/// One of them.
pub struct Table {
    checks: Checks,
    /// SHA-256 of the library, in hexadecimal.
    sha256: String,
}

/// Where its checks run.
enum Checks {
    Here(Box<TableCases>),
    There(Remote),
}

impl Tables {
    /// The checks of a backend's table; a built-in has none.
    pub fn of(&self, backend: &str) -> Option<&dyn AbiProbe> {
        self.tables.get(backend).map(|table| table as &dyn AbiProbe)
    }

    /// Backends of the files that the command line names.
    pub fn named(&self) -> &[String] {
        &self.named
    }

    /// SHA-256 of the bytes that a backend was loaded from, in hexadecimal.
    pub fn sha256(&self, backend: &str) -> Option<&str> {
        self.tables.get(backend).map(|table| &*table.sha256)
    }
}

impl AbiProbe for Table {
    fn cases(&self) -> Vec<String> {
        match &self.checks {
            Checks::Here(cases) => cases.cases(),
            Checks::There(remote) => TableCases::names(!remote.devices().is_empty()),
        }
    }
    fn run(&self, case: &str) -> Result<()> {
        match &self.checks {
            Checks::Here(cases) => cases.run(case),
            Checks::There(remote) => remote.table_case(case),
        }
    }
    fn elsewhere(&self) -> Option<&dyn Elsewhere> {
        match &self.checks {
            Checks::Here(_) => None,
            Checks::There(_) => Some(self),
        }
    }
}

impl Elsewhere for Table {
    fn process(&self) -> u32 {
        match &self.checks {
            Checks::Here(_) => std::process::id(),
            Checks::There(remote) => remote.process(),
        }
    }
    fn lost(&self) -> Option<(Outcome, String)> {
        match &self.checks {
            Checks::Here(_) => None,
            Checks::There(remote) => remote
                .lost()
                .map(|loss| (if loss.is_hang { Outcome::Hang } else { Outcome::Crash }, loss.have)),
        }
    }
    fn facts(&self) -> Result<Facts> {
        match &self.checks {
            Checks::Here(_) => Ok(q4_core::conduct::facts_here()),
            Checks::There(remote) => remote.facts(),
        }
    }
    fn facts_before(&self) -> Facts {
        match &self.checks {
            Checks::Here(_) => Facts::new(),
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

/// Adds the libraries that were asked for. One that was named by its path and is refused is an error. One
/// that was found in a folder stays in the list with its reasons, and so does one that nobody wants: it is
/// not loaded.
pub fn add(registry: &mut Registry, asked: &Asked<'_>) -> Result<Tables> {
    let mut tables = Tables::default();
    if asked.paths.is_empty() && asked.folders.is_empty() {
        return Ok(tables);
    }
    let program = std::env::current_exe().map_err(|e| Error::new(Code::Io, format!("this program: {e}")))?;
    // A library whose constructor ends or hangs a process ends a child.
    let in_place = asked.place == Place::Debugged;
    let prober = (!in_place).then(|| Prober::new(program, [crate::PROBE]));
    let loader = Loader { prober, in_place, ..Loader::default() };
    for path in asked.paths {
        let found = loader.examine(path).map_err(|refusal| {
            let e = Error::from(refusal);
            match mistakes::plugin(path) {
                Some(line) => e.fix(line),
                None => e,
            }
        })?;
        let certificate =
            if asked.gated { Some(certified(&found, registry.env(), asked.device)) } else { None };
        let certificate = certificate.transpose().map_err(|reason| uncertified(&found, reason))?;
        let entry = Entry::live(found, certificate, asked.place).map_err(|refusal| match asked.place {
            Place::Judged(_) => not_loaded(refusal),
            _ => refusal.into(),
        })?;
        tables.named.push(entry.name.clone());
        entry.enter(registry, &mut tables)?;
    }
    for folder in asked.folders {
        for path in libraries(folder)? {
            let entry = match loader.examine(&path) {
                Ok(found) if is_taken(registry, &found.descriptor.name) => {
                    Err((found.descriptor.name.clone(), found.path().to_owned(), Vec::new()))
                }
                Ok(found) => {
                    Entry::found(found, registry.env(), asked).map_err(|r| (r.name, r.path, r.reasons))
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

/// The library at `path` as a certificate is about it; nothing of it runs.
///
/// # Errors
/// Why it cannot be one.
pub fn library(path: &Path) -> Result<Library> {
    Ok(about(&Loader::default().examine(path)?))
}

/// The certificate that a library was loaded with; nothing of it runs.
///
/// # Errors
/// [`Code::LibraryRefused`] where it is gone since, or the file is another one.
pub fn certificate(library: &LibraryFacts, env: &HostEnv, device: Device) -> Result<Certificate> {
    let found = Loader::default().examine(Path::new(&library.path))?;
    if found.sha256() != library.sha256 {
        return Err(Error::new(Code::LibraryRefused, format!("plugin {} has changed", library.path))
            .need(format!("the file that was loaded, sha256 {}", library.sha256))
            .have(found.sha256()));
    }
    certified(&found, env, device).map_err(|reason| uncertified(&found, reason))
}

fn about(found: &Examined) -> Library {
    let needed = |n: &Need| Needed {
        name: n.name.clone(),
        path: n.path.display().to_string(),
        sha256: n.sha256.clone(),
    };
    let mut needs: Vec<_> = found.needs().iter().map(needed).collect();
    needs.sort();
    Library { path: found.path().display().to_string(), sha256: found.sha256().to_owned(), needs }
}

fn is_taken(registry: &Registry, name: &str) -> bool {
    registry.candidates().iter().any(|c| c.name() == name)
}

/// The certificate of what was examined.
fn certified(found: &Examined, env: &HostEnv, device: Device) -> Result<Certificate, Reject> {
    let all = Certificates::of_user().ok_or_else(|| {
        let need = format!("a place for certificates: {DATA_VARIABLES}");
        Reject::new(RejectCode::ConformanceMissing, need, "neither is set")
    })?;
    let who = &found.descriptor;
    all.find(&who.name, &who.version, &about(found), (env, device), Profile::Inference)
}

/// The error of a library that the user named and that has no certificate.
fn uncertified(found: &Examined, reason: Reject) -> Error {
    let (path, code) = (found.path().display(), reason.code.as_str());
    let command = reason.need.split_once(": ").map(|(_, command)| command.to_owned());
    let e = Error::new(Code::LibraryRefused, format!("plugin {path} is refused: {code}"))
        .need(reason.need.into_owned())
        .have(reason.have.into_owned());
    match command {
        Some(command) if command.starts_with("q4 ") => e.fix(command),
        _ => e,
    }
}

impl Entry {
    /// Loaded, for what its certificate covers; a library under judgement has none.
    fn live(found: Examined, certificate: Option<Certificate>, place: Place) -> Result<Self, Refusal> {
        let (name, facts) = Self::facts(&found);
        let (candidate, table) = if matches!(place, Place::Here | Place::Debugged) {
            let Loaded { candidate, table: cases, sha256, .. } = found.load()?;
            (candidate, Some(Table { checks: Checks::Here(Box::new(cases)), sha256 }))
        } else {
            elsewhere(found, place)?
        };
        let candidate = match (candidate, certificate) {
            (Candidate::Live(inner), Some(certificate)) => {
                certificate.is_for_device(&inner.devices()).map_err(|reason| Refusal {
                    name: name.clone(),
                    path: PathBuf::from(&facts.path),
                    sha256: Some(facts.sha256.clone()),
                    reasons: vec![reason],
                })?;
                Candidate::Live(Arc::new(Certified { inner, certificate }))
            }
            (other, _) => other,
        };
        Ok(Self { name, candidate, facts, table })
    }

    /// Of a folder: loaded when it is wanted and may be.
    fn found(found: Examined, env: &HostEnv, asked: &Asked<'_>) -> Result<Self, Refusal> {
        let (name, facts) = Self::facts(&found);
        let certificate = if asked.gated { Some(certified(&found, env, asked.device)) } else { None };
        let mut reasons = Vec::new();
        if !(asked.wanted)(&name) {
            let need = format!("to be named: --backend {name}, or its file with --plugin");
            reasons.push(Reject::new(RejectCode::NotSelected, need, "a library in a folder"));
        }
        let certificate = certificate.transpose().unwrap_or_else(|reason| {
            reasons.push(reason);
            None
        });
        if reasons.is_empty() {
            return Self::live(found, certificate, asked.place);
        }
        Ok(Self {
            candidate: Candidate::Dead { name: name.clone().into(), reasons },
            name,
            facts,
            table: None,
        })
    }

    fn facts(found: &Examined) -> (String, LibraryFacts) {
        let who = &found.descriptor;
        let (path, version) = (found.path().display().to_string(), who.version.clone());
        let sha256 = found.sha256().to_owned();
        (who.name.clone(), LibraryFacts { path, version, sha256 })
    }

    fn enter(self, registry: &mut Registry, tables: &mut Tables) -> Result<()> {
        registry.add(self.candidate)?;
        registry.loaded(&self.name, self.facts);
        tables.tables.extend(self.table.map(|table| (self.name, table)));
        Ok(())
    }
}

/// A live backend in a process of its own.
fn elsewhere(found: Examined, place: Place) -> Result<(Candidate, Option<Table>), Refusal> {
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
    Ok((Candidate::Live(Arc::new(remote)), Some(table)))
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

/// A backend within its certificate: what was not judged is refused, whatever the library says of it now.
struct Certified {
    inner: Arc<dyn Q4Backend>,
    certificate: Certificate,
}

impl Q4Backend for Certified {
    fn descriptor(&self) -> &BackendDescriptor {
        self.inner.descriptor()
    }

    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        self.inner.probe(env)
    }

    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        self.inner.can_prepare(spec, path, env)?;
        self.certificate.covers(spec, path)
    }

    fn manages_memory(&self) -> bool {
        self.inner.manages_memory()
    }

    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        self.inner.footprint(spec, path)
    }

    fn devices(&self) -> Vec<VendorDevice> {
        self.inner.devices()
    }

    fn memory(&self, device: Device) -> Result<Arc<dyn DeviceMemory>> {
        self.inner.memory(device)
    }

    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        self.certificate.covers(spec, path).map_err(|reasons| {
            let all: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            Error::new(Code::Unsupported, "a product that no certificate is about").have(all.join("\n"))
        })?;
        self.inner.prepare(w, spec, path, cx)
    }

    fn group(
        &self,
        weights: &[Arc<dyn PreparedWeight>],
        cx: &mut ExecContext<'_>,
    ) -> Result<Option<Box<dyn PreparedGroup>>> {
        self.inner.group(weights, cx)
    }
}
