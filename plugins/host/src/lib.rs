//! Third-party backends: a shared library becomes a candidate for selection, or a refusal with its reasons, and never
//! anything between.
//!
//! [`Loader::load`] trusts nothing: `file` decides whether the path may be opened at all and hashes what it opens, `elf`
//! reads the descriptor from the file before any of its code runs, `library` maps exactly the bytes that were hashed and
//! asks for the table, `table` checks and copies it, `backend` wraps every call. [`Prober`] does the same in a child
//! process first, for libraries whose constructors kill or hang the process that loads them.
//!
//! Libraries are never unloaded.
mod backend;
mod cases;
mod child;
mod descriptor;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod elf;
mod file;
mod library;
mod maps;
mod table;

pub use cases::TableCases;
pub use child::{ChildVerdict, Prober, probe_main};
pub use descriptor::Descriptor;
pub use library::Door;
pub use table::Speaks;

use q4_core::{Candidate, Code, Error, Reject, RejectCode};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A library that was loaded, and the backend in it.
#[derive(Clone)]
pub struct Loaded {
    /// `Candidate::Live`, for [`q4_core::Registry::add`].
    pub candidate: Candidate,
    /// Who it says it is.
    pub descriptor: Descriptor,
    /// SHA-256 of the bytes that were loaded, in hexadecimal.
    pub sha256: String,
    /// The file, without links.
    pub path: PathBuf,
    /// The door its table came through.
    pub door: Door,
    /// Checks of the table itself, for a conformance run.
    pub table: TableCases,
}

/// A library that was not loaded, or was loaded and is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The name in its descriptor, else that of the file.
    pub name: String,
    /// The path as given.
    pub path: PathBuf,
    /// SHA-256 of the file, once it could be read.
    pub sha256: Option<String>,
    /// Never empty; each names the path.
    pub reasons: Vec<Reject>,
}

impl Refusal {
    /// `Candidate::Dead`, so that reports and errors know of it.
    pub fn candidate(&self) -> Candidate {
        Candidate::Dead { name: self.name.clone().into(), reasons: self.reasons.clone() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plugin {} is refused", self.path.display())?;
        self.reasons.iter().try_for_each(|r| write!(f, "\n  {r}"))
    }
}

impl std::error::Error for Refusal {}

/// A refusal of a library the user named is an error of its own.
impl From<Refusal> for Error {
    fn from(r: Refusal) -> Self {
        let text = |part: fn(&Reject) -> &str| r.reasons.iter().map(part).collect::<Vec<_>>().join("\n");
        Error::new(
            Code::LibraryRefused,
            format!("plugin {} is refused: {}", r.path.display(), r.reasons[0].code.as_str()),
        )
        .need(text(|r| &r.need))
        .have(text(|r| &r.have))
    }
}

/// How libraries are loaded.
#[derive(Clone, Debug, Default)]
pub struct Loader {
    /// Which door to take.
    pub door: Door,
    /// The version of the contract this program speaks.
    pub speaks: Speaks,
    /// Loads in a child process first, when there is one.
    pub prober: Option<Prober>,
}

impl Loader {
    /// Loads the library at `path`, which must contain a separator: no folder is searched, the current one least of all.
    ///
    /// # Errors
    /// Every reason that was found at the first step that failed: path and permissions, file format, descriptor, child
    /// process, the system's loader, door, table, construction.
    pub fn load(&self, path: &Path) -> Result<Loaded, Refusal> {
        let mut refusal = Refusal {
            name: path.file_stem().map_or_else(|| "plugin".into(), |s| s.to_string_lossy().into_owned()),
            path: path.to_owned(),
            sha256: None,
            reasons: Vec::new(),
        };
        match self.try_load(path, &mut refusal) {
            Ok(loaded) => {
                tracing::info!(path = %loaded.path.display(), sha256 = %loaded.sha256, name = %loaded.descriptor.name, "plugin");
                Ok(loaded)
            }
            Err(reasons) => {
                refusal.reasons = reasons
                    .into_iter()
                    .map(|r| Reject::new(r.code, r.need, format!("{} ({})", r.have, path.display())))
                    .collect();
                tracing::debug!(path = %path.display(), reasons = ?refusal.reasons, "plugin refused");
                Err(refusal)
            }
        }
    }

    /// Loads every shared library of a folder, in the order of their names. Other files are passed over.
    ///
    /// # Errors
    /// When the folder itself cannot be read.
    pub fn load_dir(&self, folder: &Path) -> Result<Vec<Result<Loaded, Refusal>>, Error> {
        let io = |e: std::io::Error| Error::new(Code::Io, format!("plugin folder {}: {e}", folder.display()));
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|e| e == std::env::consts::DLL_EXTENSION) {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths.iter().map(|p| self.load(p)).collect())
    }

    fn try_load(&self, path: &Path, refusal: &mut Refusal) -> Result<Loaded, Vec<Reject>> {
        let opened = file::open(path).map_err(|r| vec![r])?;
        refusal.sha256 = Some(opened.sha256.clone());
        let found = library::describe(&opened, self.door, &mut refusal.name)?;
        if let Some(prober) = &self.prober
            && let Some(reasons) = prober.probe(path).reasons()
        {
            return Err(reasons);
        }
        let mapped = library::map(opened, found, self.door, self.speaks)?;
        refusal.name.clone_from(&mapped.descriptor.name);
        let plugin = backend::Plugin::new(&mapped)?;
        Ok(Loaded {
            candidate: Candidate::Live(Arc::new(plugin)),
            descriptor: mapped.descriptor,
            sha256: mapped.sha256,
            path: mapped.path,
            door: mapped.door,
            table: TableCases::new(mapped.table, mapped.query),
        })
    }
}

/// [`Loader::load`] with what is usual.
pub fn load(path: &Path) -> Result<Loaded, Refusal> {
    Loader::default().load(path)
}

/// [`Loader::load_dir`] with what is usual.
pub fn load_dir(folder: &Path) -> Result<Vec<Result<Loaded, Refusal>>, Error> {
    Loader::default().load_dir(folder)
}

/// One reason, in a list.
fn one(code: RejectCode, need: impl Into<String>, have: impl Into<String>) -> Vec<Reject> {
    vec![Reject::new(code, need.into(), have.into())]
}
