//! Third-party backends: a shared library becomes a candidate for selection, or a refusal with its reasons,
//! and never anything between.
//!
//! [`Loader::examine`] runs nothing, in no process: `file` decides whether the path may be opened at all and
//! hashes what it opens, `elf` reads the descriptor from the file, `needs` finds and hashes what it would
//! load besides itself. Whoever asks for a certificate asks now, for these bytes.
//! [`Examined::load`] goes on: [`Prober`] loads it in a child process, for libraries whose constructors kill
//! or hang the process that loads them, `library` maps exactly the bytes that were hashed and asks for the
//! table, `table` checks and copies it, `backend` wraps every call.
//!
//! `remote` does the last part in another process, for a program that must not map what it judges.
//!
//! Libraries are never unloaded.
mod backend;
mod calls;
mod cases;
mod child;
#[cfg(target_os = "linux")]
mod crash;
mod descriptor;
mod device;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod elf;
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[path = "elf_unknown.rs"]
mod elf;
mod file;
mod found;
mod instance;
mod isolation;
mod library;
mod maps;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod needs;
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[path = "needs_unknown.rs"]
mod needs;
#[cfg(target_os = "linux")]
pub mod remote;
#[cfg(not(target_os = "linux"))]
#[path = "remote_unknown.rs"]
pub mod remote;
mod rounding;
mod table;

pub use backend::Plugin;
pub use cases::TableCases;
pub use child::{ChildVerdict, Prober, probe_main};
#[cfg(target_os = "linux")]
pub use crash::tell_crashes;
pub use descriptor::Descriptor;
pub use found::{Found, whole};
pub use library::Door;
pub use maps::file_at;
pub use needs::Need;
pub use table::Speaks;

use q4_core::{Candidate, Code, Error, Reject, RejectCode};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A library that may be loaded, as far as can be told while nothing of it is in this process.
pub struct Examined {
    /// Who it says it is.
    pub descriptor: Descriptor,
    opened: file::Opened,
    needs: Vec<Need>,
    given: PathBuf,
    loader: Loader,
}

/// A library that was loaded, and the backend in it.
#[derive(Clone)]
pub struct Loaded {
    /// `Candidate::Live`, for [`q4_core::Registry::add`].
    pub candidate: Candidate,
    /// Who it says it is.
    pub descriptor: Descriptor,
    /// SHA-256 of the bytes that were loaded, in hexadecimal.
    pub sha256: String,
    /// What it loaded besides itself and the system's runtime.
    pub needs: Vec<Need>,
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
    /// Of what is at `path`, before anything is known of it.
    fn of(path: &Path) -> Self {
        let name = path.file_stem().map_or_else(|| "plugin".into(), |s| s.to_string_lossy().into_owned());
        Self { name, path: path.to_owned(), sha256: None, reasons: Vec::new() }
    }

    /// The same with its reasons, which name the path.
    fn because(mut self, reasons: Vec<Reject>) -> Self {
        let path = self.path.display();
        let suffix = format!(" ({path})");
        let reasons = reasons.into_iter().map(|r| match r.have.ends_with(&suffix) {
            // A child has said it.
            true => r,
            false => Reject::new(r.code, r.need, format!("{}{suffix}", r.have)),
        });
        self.reasons = reasons.collect();
        tracing::debug!(path = %self.path.display(), reasons = ?self.reasons, "plugin refused");
        self
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

/// From now on this process says where it crashes: on Linux.
#[cfg(not(target_os = "linux"))]
pub fn tell_crashes() {}

/// How libraries are loaded.
#[derive(Clone, Debug, Default)]
pub struct Loader {
    /// Which door to take.
    pub door: Door,
    /// The version of the contract this program speaks.
    pub speaks: Speaks,
    /// Loads in a child process first, when there is one.
    pub prober: Option<Prober>,
    /// Maps the file itself and not a sealed copy of what was hashed, so that tools which read code and
    /// source lines from the path of a mapping find them. For debugging: who may write the file may
    /// change what runs.
    pub in_place: bool,
}

impl Loader {
    /// Looks at the library at `path`, which must contain a separator: no folder is searched, the current one
    /// least of all. Nothing of it runs, in this process or in another.
    ///
    /// # Errors
    /// Every reason that was found at the first step that failed: path and permissions, file format,
    /// descriptor, libraries that it needs. `not-compiled-in` where files of this system cannot be read
    /// so.
    pub fn examine(&self, path: &Path) -> Result<Examined, Refusal> {
        let mut refusal = Refusal::of(path);
        let looked = self.look(path, &mut refusal);
        looked.map_err(|reasons| refusal.because(reasons))
    }

    /// Examines the library at `path` and loads it.
    ///
    /// # Errors
    /// Those of [`Loader::examine`] and of [`Examined::load`].
    pub fn load(&self, path: &Path) -> Result<Loaded, Refusal> {
        self.examine(path)?.load()
    }

    /// Loads every shared library of a folder, in the order of their names. Other files are passed over.
    ///
    /// # Errors
    /// When the folder itself cannot be read.
    pub fn load_dir(&self, folder: &Path) -> Result<Vec<Result<Loaded, Refusal>>, Error> {
        Ok(libraries(folder)?.iter().map(|p| self.load(p)).collect())
    }

    fn look(&self, path: &Path, refusal: &mut Refusal) -> Result<Examined, Vec<Reject>> {
        let opened = file::open(path).map_err(|r| vec![r])?;
        refusal.sha256 = Some(opened.sha256.clone());
        let Some(descriptor) = library::describe(&opened, self.door, &mut refusal.name)? else {
            let need =
                "a system whose libraries say who they are before they run: Linux on x86-64 or aarch64";
            return Err(one(RejectCode::NotCompiledIn, need, this_system()));
        };
        let needs = needs::of(&opened)?;
        Ok(Examined { descriptor, opened, needs, given: path.to_owned(), loader: self.clone() })
    }
}

impl Examined {
    /// SHA-256 of the bytes that [`Examined::load`] maps, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.opened.sha256
    }

    /// The file, without links.
    pub fn path(&self) -> &Path {
        &self.opened.path
    }

    /// What becomes of it where it cannot be used.
    pub fn refused(&self, reason: Reject) -> Refusal {
        self.refusal().because(vec![reason])
    }

    /// The same before anybody has a reason.
    fn refusal(&self) -> Refusal {
        let (name, sha256) = (self.descriptor.name.clone(), Some(self.opened.sha256.clone()));
        Refusal { name, sha256, ..Refusal::of(&self.given) }
    }

    /// One number for the bytes of the library and of all that it needs.
    pub fn digest(&self) -> String {
        let needs = self.needs.iter().map(|n| format!("\n{} {} {}", n.sha256, n.name, n.path.display()));
        file::digest(&needs.fold(self.opened.sha256.clone(), |all, need| all + &need))
    }

    /// What becomes of it when it is not what somebody else examined.
    pub(crate) fn changed(&self) -> Refusal {
        let need = "the library that was examined, and what it needs";
        let have = format!("another, sha256 {}", self.opened.sha256);
        self.refused(Reject::new(RejectCode::LibraryMissing, need, have))
    }

    /// What it loads besides itself and the system's runtime.
    pub fn needs(&self) -> &[Need] {
        &self.needs
    }

    /// Lets a child process load it, when there is one to try it in, and then maps what was examined: a
    /// sealed copy of bytes with that SHA-256.
    ///
    /// # Errors
    /// Every reason that was found at the first step that failed: the child process, other bytes by now, the
    /// system's loader, what else came into the process, door, table, construction.
    pub fn load(self) -> Result<Loaded, Refusal> {
        let refusal = self.refusal();
        self.finish().map_err(|reasons| refusal.because(reasons))
    }

    fn finish(self) -> Result<Loaded, Vec<Reject>> {
        if let Some(prober) = &self.loader.prober {
            prober.probe_examined(&self).admitted(&self.opened.sha256)?;
        }
        let Self { descriptor, opened, mut needs, loader, .. } = self;
        if loader.in_place {
            // The system finds them, as it does for whoever debugs without q4.
            needs.iter_mut().for_each(|n| n.by_name = false);
        }
        /// What comes into the process meanwhile is the library's doing: one at a time.
        static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
        let before = needs::LinkMap::now();
        let how = library::How { door: loader.door, speaks: loader.speaks, in_place: loader.in_place };
        let mapped = library::map(opened, descriptor, &needs, &before, how)?;
        let plugin = backend::Plugin::new(&mapped)?;
        needs::LinkMap::now().is_expected(&before, &mapped.loaded, &needs).map_err(|r| vec![r])?;
        let library::Mapped { descriptor, sha256, path, door, table, query, .. } = mapped;
        tracing::info!(path = %path.display(), %sha256, name = %descriptor.name, "plugin");
        let (candidate, table) = (Candidate::Live(Arc::new(plugin)), TableCases::new(table, query));
        Ok(Loaded { candidate, descriptor, sha256, needs, path, door, table })
    }
}

/// The shared libraries of a folder, in the order of their names.
///
/// # Errors
/// When the folder cannot be read.
pub fn libraries(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let io = |e: std::io::Error| Error::new(Code::Io, format!("plugin folder {}: {e}", folder.display()));
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|e| e == std::env::consts::DLL_EXTENSION) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// [`Loader::load`] with what is usual.
pub fn load(path: &Path) -> Result<Loaded, Refusal> {
    Loader::default().load(path)
}

/// [`Loader::load_dir`] with what is usual.
pub fn load_dir(folder: &Path) -> Result<Vec<Result<Loaded, Refusal>>, Error> {
    Loader::default().load_dir(folder)
}

/// This system, for people.
fn this_system() -> String {
    format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH)
}

/// One reason, in a list.
fn one(code: RejectCode, need: impl Into<String>, have: impl Into<String>) -> Vec<Reject> {
    vec![Reject::new(code, need.into(), have.into())]
}
