//! What a library loads besides itself: found from files alone, as the system's loader would find it, and
//! hashed, before any of it runs. What is in the process afterwards must be that and nothing else.
//!
//! Libraries of the C and C++ runtime are the system's: they are named, not hashed. Every other one is
//! hashed, wherever it lies. Those that are known by their soname are loaded first, from sealed copies, so
//! that the loader takes these; one that is known by its path alone is loaded from there, and compared before
//! and after. Search order: ld.so(8).
use crate::elf::{Asks, Elf};
use crate::file::{self, Opened};
use crate::one;
use q4_core::{Reject, RejectCode};
use std::fs;
use std::path::{Path, PathBuf};

/// The C and C++ runtime.
const SYSTEM: [&str; 13] = [
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libatomic.so.1",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libmvec.so.1",
    "libpthread.so.0",
    "libresolv.so.2",
    "librt.so.1",
    "libstdc++.so.6",
    "libutil.so.1",
];
/// Folders of the system.
const FOLDERS: [&str; 4] = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"];
/// Where it says that it has more of them.
const CONFIGURED: &str = "/etc/ld.so.conf";
/// A library with more than that is not one that anybody can judge.
const MOST: usize = 256;

/// A library that another one needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// As the other one names it: a soname, or an absolute path.
    pub name: String,
    /// The file, without links.
    pub path: PathBuf,
    /// SHA-256 of its bytes, in hexadecimal.
    pub sha256: String,
    /// It has that name itself, so that a copy of it is as good as the file.
    pub by_name: bool,
}

/// All that the library in `opened` needs and is not the system's, in the order in which they can be loaded.
///
/// # Errors
/// `library-missing` or `library-untrusted`, naming the library that cannot be found, checked or judged.
pub fn of(opened: &Opened) -> Result<Vec<Need>, Vec<Reject>> {
    let mut search = Search { all: Vec::new(), begun: Vec::new(), system: system_folders() };
    search.walk(opened, &[])?;
    Ok(search.all)
}

struct Search {
    all: Vec<Need>,
    begun: Vec<String>,
    system: Vec<PathBuf>,
}

impl Search {
    /// Adds what a library needs behind what those need; `above` are the RPATHs of those that need it.
    fn walk(&mut self, opened: &Opened, above: &[PathBuf]) -> Result<(), Vec<Reject>> {
        let shown = opened.path.display();
        let elf = Elf::open(&opened.file, opened.len).map_err(|r| vec![r])?;
        let asks = elf.asks().filter(|asks| !asks.others);
        let Some(Asks { needed, rpath, runpath, .. }) = asks else {
            let need = "a library that asks for others by DT_NEEDED alone";
            let have = format!("{shown} with filters or auditors, or names that cannot be read");
            return Err(one(RejectCode::LibraryUntrusted, need, have));
        };
        let origin = opened.path.parent().unwrap_or(Path::new("/"));
        let own = |folders: &[String]| folders.iter().filter_map(|f| expanded(f, origin)).collect::<Vec<_>>();
        // RUNPATH is for what this one needs and switches RPATHs off.
        let rpaths = if runpath.is_some() { Vec::new() } else { [own(&rpath), above.to_vec()].concat() };
        let folders = [rpaths.clone(), environment(), own(&runpath.unwrap_or_default())].concat();
        for name in needed {
            if self.begun.contains(&name) {
                continue;
            }
            self.begun.push(name.clone());
            if self.begun.len() > MOST {
                let need = format!("a library that needs at most {MOST} others");
                return Err(one(RejectCode::LibraryUntrusted, need, "more"));
            }
            let Some(found) = self.find(&name, &folders, &opened.path)? else { continue };
            let soname = Elf::open(&found.file, found.len).ok().and_then(|elf| elf.asks()?.soname);
            self.walk(&found, &rpaths)?;
            let by_name = soname.as_ref() == Some(&name);
            self.all.push(Need { name, path: found.path, sha256: found.sha256, by_name });
        }
        Ok(())
    }

    /// The file behind a name; `None` for the system's own.
    fn find(&self, name: &str, folders: &[PathBuf], by: &Path) -> Result<Option<Opened>, Vec<Reject>> {
        let checked = |path: &Path| {
            let named = |r: Reject| {
                one(r.code, r.need, format!("{}, which {} needs: {}", path.display(), by.display(), r.have))
            };
            file::open(path).map(Some).map_err(named)
        };
        if name.contains('/') {
            if name.starts_with('/') && !name.contains('$') {
                return checked(Path::new(name));
            }
            let need = "libraries that are needed by soname or by absolute path";
            return Err(one(RejectCode::LibraryUntrusted, need, format!("{} needs {name}", by.display())));
        }
        let is_system = SYSTEM.contains(&name);
        // The loader itself and the C library are in every process already.
        let is_loaded = name.starts_with("ld-linux-") || name == "libc.so.6";
        let more = if is_system { &[][..] } else { &self.system };
        for folder in folders.iter().filter(|_| !is_loaded).chain(more) {
            let path = folder.join(name);
            if fits(&path) {
                return checked(&path);
            }
        }
        if is_system {
            return Ok(None);
        }
        let all: Vec<_> = folders.iter().chain(&self.system).map(|f| f.display().to_string()).collect();
        let need = format!("{name}, which {} needs", by.display());
        Err(one(RejectCode::LibraryMissing, need, format!("none in {}", all.join(", "))))
    }
}

/// A library for this machine; the loader passes over others.
fn fits(path: &Path) -> bool {
    let file = fs::metadata(path).ok().filter(fs::Metadata::is_file).and_then(|_| fs::File::open(path).ok());
    file.is_some_and(|f| f.metadata().is_ok_and(|m| Elf::open(&f, m.len()).is_ok()))
}

/// A folder of an RPATH; `None` for what depends on the current one, or on the loader's own facts.
fn expanded(folder: &str, origin: &Path) -> Option<PathBuf> {
    let origin = origin.to_str()?;
    let folder = folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin);
    (folder.starts_with('/') && !folder.contains('$')).then(|| folder.into())
}

/// Folders that the user names for all programs.
fn environment() -> Vec<PathBuf> {
    let text = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    text.split([':', ';']).filter(|f| f.starts_with('/')).map(PathBuf::from).collect()
}

/// Folders that are searched for everybody, in order.
fn system_folders() -> Vec<PathBuf> {
    let mut all = Vec::new();
    configured(Path::new(CONFIGURED), &mut all, 0);
    let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
    all.extend(["/lib", "/usr/lib"].iter().map(|f| Path::new(f).join(&triple)));
    all.extend(FOLDERS.map(PathBuf::from));
    all
}

/// Lines of a file of ldconfig(8), those that it includes as well.
fn configured(file: &Path, all: &mut Vec<PathBuf>, depth: u32) {
    let Ok(text) = fs::read_to_string(file) else { return };
    for line in text.lines().map(|l| l.split('#').next().unwrap_or_default().trim()) {
        match line.strip_prefix("include ") {
            Some(pattern) if depth < 4 => {
                let pattern = Path::new(pattern.trim());
                let (head, tail) = match pattern.file_name().and_then(|n| n.to_str()?.split_once('*')) {
                    Some(parts) => parts,
                    None => continue,
                };
                let entries = pattern.parent().and_then(|folder| fs::read_dir(folder).ok());
                let mut paths: Vec<_> = entries.into_iter().flatten().flatten().map(|e| e.path()).collect();
                paths.sort();
                let name = |p: &PathBuf| p.file_name().map(|n| n.to_string_lossy().into_owned());
                let fits = |p: &&PathBuf| name(p).is_some_and(|n| n.starts_with(head) && n.ends_with(tail));
                paths.iter().filter(fits).for_each(|path| configured(path, all, depth + 1));
            }
            None if line.starts_with('/') => all.push(line.into()),
            _ => {}
        }
    }
}

/// What the system's loader has in this process.
pub struct LinkMap(Vec<(usize, PathBuf)>);

impl LinkMap {
    /// Now.
    pub fn now() -> Self {
        unsafe extern "C" fn each(
            info: *mut libc::dl_phdr_info,
            _: libc::size_t,
            all: *mut std::ffi::c_void,
        ) -> std::ffi::c_int {
            // SAFETY: the loader passes a live entry, and `all` is the list below.
            let (info, all) = unsafe { (&*info, &mut *all.cast::<Vec<(usize, PathBuf)>>()) };
            let name = if info.dlpi_name.is_null() {
                PathBuf::new()
            } else {
                // SAFETY: a text that the loader keeps.
                let name = unsafe { std::ffi::CStr::from_ptr(info.dlpi_name) };
                name.to_string_lossy().into_owned().into()
            };
            all.push((info.dlpi_addr as usize, name));
            0
        }
        let mut all: Vec<(usize, PathBuf)> = Vec::new();
        // SAFETY: the function is called before this returns, with that list.
        unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut all).cast()) };
        Self(all)
    }

    /// Whether the file of a library is there already: a sanitizer's runtime that was loaded first, say. The
    /// loader takes it for the one that is needed, and a second copy would be another library.
    pub fn has(&self, need: &Need) -> bool {
        self.0.iter().any(|(_, path)| fs::canonicalize(path).is_ok_and(|real| real == need.path))
    }

    /// Whether nothing came since `before` but the system's runtime, what `loaded` names and what `needs` has
    /// by path.
    ///
    /// # Errors
    /// `library-untrusted`, naming what else there is.
    pub fn is_expected(&self, before: &Self, loaded: &[PathBuf], needs: &[Need]) -> Result<(), Reject> {
        let new = self.0.iter().filter(|object| !before.0.contains(object)).map(|(_, path)| path);
        let mut strangers = new.filter(|path| {
            let by_path = || {
                let real = fs::canonicalize(path).ok();
                needs.iter().any(|n| !n.by_name && (n.path == **path || real.as_ref() == Some(&n.path)))
            };
            !loaded.contains(path) && !is_runtime(path) && !by_path()
        });
        match strangers.next() {
            None => Ok(()),
            Some(path) => Err(Reject::new(
                RejectCode::LibraryUntrusted,
                "a library that loads what its dynamic section names, and nothing else",
                format!("{} in the process", path.display()),
            )),
        }
    }
}

/// One of [`SYSTEM`] in a folder of the system.
fn is_runtime(path: &Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str());
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    name.is_some_and(|n| SYSTEM.contains(&n)) && FOLDERS.iter().any(|f| real.starts_with(f))
}
