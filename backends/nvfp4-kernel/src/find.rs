//! Where libNVFP4 may lie, in order, and which of those files may be trusted: what is loaded must never
//! depend on the current directory or on who else can write to the machine.
use q4_core::{Reject, RejectCode};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{env, fs};

/// One place to look at, and how it came into the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A file the user named. The only place there is then.
    Named(PathBuf),
    /// A file near the executable, and how many folders above it others must not write to: a `lib` that
    /// anybody could have made is not ours.
    Near(PathBuf, usize),
    /// Whatever the system loader finds under the bare name.
    Loader,
}

/// Places in the order they are tried: `named` alone when given, else in `deps` beside `executable` (cargo's
/// build folder, where a copy beside the executable may be older), beside `executable`, in `../lib`, then the
/// system loader.
pub fn places(named: Option<&Path>, executable: Option<&Path>) -> Vec<Place> {
    if let Some(path) = named {
        return vec![Place::Named(path.to_owned())];
    }
    let folder = executable.filter(|e| e.is_absolute()).and_then(Path::parent);
    let near = folder.into_iter().flat_map(|f| {
        let up = f.parent().unwrap_or(f);
        [(f.join("deps"), 2), (f.to_owned(), 1), (up.join("lib"), 2)]
    });
    near.map(|(folder, guarded)| Place::Near(folder.join(file_name()), guarded))
        .chain([Place::Loader])
        .collect()
}

/// `libNVFP4.so`, `libNVFP4.dylib` or `NVFP4.dll`.
pub fn file_name() -> OsString {
    libloading::library_filename("NVFP4")
}

impl Place {
    /// What to hand to the loader: the resolved absolute file, or the bare name. Err: why the place is out.
    pub fn resolve(&self) -> Result<PathBuf, Reject> {
        match self {
            Self::Named(path) => regular(path).map_err(|have| self.reject(have)),
            Self::Near(path, folders) => regular(path)
                .and_then(|real| {
                    guarded(path, *folders).and_then(|()| guarded(&real, *folders)).map(|()| real)
                })
                .map_err(|have| self.reject(have)),
            Self::Loader => {
                loader(env::var_os("LD_LIBRARY_PATH").as_deref()).map_err(|have| self.reject(have))
            }
        }
    }

    /// Spelling for reports.
    pub fn describe(&self) -> String {
        match self {
            Self::Named(path) => format!("{} (named by --nvfp4-lib or Q4_NVFP4_LIB)", path.display()),
            Self::Near(path, _) => path.display().to_string(),
            Self::Loader => format!("{} (system loader)", file_name().display()),
        }
    }

    /// A reason about this place.
    fn reject(&self, have: String) -> Reject {
        Reject::new(RejectCode::LibraryMissing, format!("libNVFP4 at {}", self.describe()), have)
    }
}

/// The absolute path of a regular file. Named pipes and devices would hang or worse when opened.
fn regular(path: &Path) -> Result<PathBuf, String> {
    let real = fs::canonicalize(path).map_err(|e| e.to_string())?;
    let meta = fs::metadata(&real).map_err(|e| e.to_string())?;
    if meta.is_file() { Ok(real) } else { Err("not a regular file".into()) }
}

/// Refuses a file that everybody may write, or that lies in a folder, of so many, that everybody may write.
fn guarded(file: &Path, folders: usize) -> Result<(), String> {
    for path in file.ancestors().take(1 + folders) {
        if writable_by_all(path).map_err(|e| format!("{}: {e}", path.display()))? {
            return Err(format!("{} is writable by everybody; name the file if it is meant", path.display()));
        }
    }
    Ok(())
}

#[cfg(unix)]
fn writable_by_all(path: &Path) -> std::io::Result<bool> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::metadata(path)?.permissions().mode() & 0o002 != 0)
}

#[cfg(not(unix))]
fn writable_by_all(_: &Path) -> std::io::Result<bool> {
    Ok(false)
}

/// The bare name, unless the loader's search path leads through the current directory or an unguarded file.
fn loader(search: Option<&OsStr>) -> Result<PathBuf, String> {
    // On macOS a bare name is also looked up in the current directory, behind `@rpath` it is not.
    let name =
        if cfg!(target_os = "macos") { Path::new("@rpath").join(file_name()) } else { file_name().into() };
    if cfg!(not(target_os = "linux")) {
        return Ok(name);
    }
    // An empty value is no path at all; an empty entry is the current directory.
    for folder in search.filter(|s| !s.is_empty()).map(env::split_paths).into_iter().flatten() {
        if !folder.is_absolute() {
            return Err(format!(
                "LD_LIBRARY_PATH has `{}`, which depends on the current directory",
                folder.display()
            ));
        }
        let file = folder.join(file_name());
        if file.exists() {
            guarded(&file, 1)?;
        }
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[cfg(unix)]
    fn chmod(path: &Path, mode: u32) {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_named_file_is_the_only_place() {
        let places = places(Some(Path::new("/a/b.so")), Some(Path::new("/opt/q4/bin/q4")));
        assert_eq!(places, [Place::Named("/a/b.so".into())]);
    }

    #[test]
    fn the_order_is_deps_beside_lib_loader() {
        let at = |p: &str, folders| Place::Near(Path::new("/opt/q4").join(p).join(file_name()), folders);
        let places = places(None, Some(Path::new("/opt/q4/bin/q4")));
        assert_eq!(places, [at("bin/deps", 2), at("bin", 1), at("lib", 2), Place::Loader]);
    }

    #[test]
    fn a_relative_executable_adds_no_place() {
        assert_eq!(places(None, Some(Path::new("bin/q4"))), [Place::Loader]);
        assert_eq!(places(None, None), [Place::Loader]);
    }

    #[test]
    fn a_folder_is_not_a_library_and_a_missing_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let reject = Place::Named(dir.path().into()).resolve().unwrap_err();
        assert_eq!((reject.code, reject.have.as_ref()), (RejectCode::LibraryMissing, "not a regular file"));
        let absent = dir.path().join("absent.so");
        let reject = Place::Near(absent.clone(), 1).resolve().unwrap_err();
        assert!(reject.need.contains(absent.to_str().unwrap()), "{reject}");
    }

    #[cfg(unix)]
    #[test]
    fn implicit_places_that_everybody_may_write_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let (open, shut) = (root.join("open"), root.join("shut"));
        for folder in [&open, &shut] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join(file_name()), b"x").unwrap();
        }
        chmod(&open, 0o777);
        let refused = |place: Place| place.resolve().unwrap_err().have.into_owned();
        assert!(refused(Place::Near(open.join(file_name()), 1)).contains("writable by everybody"));
        assert_eq!(Place::Near(shut.join(file_name()), 1).resolve().unwrap(), shut.join(file_name()));
        chmod(&shut.join(file_name()), 0o666);
        assert!(refused(Place::Near(shut.join(file_name()), 1)).contains("writable by everybody"));
        // A link does not launder its target, and naming a file is consent.
        chmod(&shut.join(file_name()), 0o644);
        let link = shut.join("link.so");
        std::os::unix::fs::symlink(open.join(file_name()), &link).unwrap();
        assert!(refused(Place::Near(link, 1)).contains("writable by everybody"));
        assert!(Place::Named(open.join(file_name())).resolve().is_ok());
        // A `lib` in a folder of everybody's may be anybody's.
        fs::create_dir(open.join("lib")).unwrap();
        let file = open.join("lib").join(file_name());
        fs::write(&file, b"x").unwrap();
        assert!(Place::Near(file.clone(), 1).resolve().is_ok());
        assert!(refused(Place::Near(file, 2)).contains("writable by everybody"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_loader_never_reaches_the_current_directory() {
        let refused = |s: &str| loader(Some(OsStr::new(s))).unwrap_err();
        for path in ["/usr/lib:", ":/usr/lib", "/usr/lib::/lib", "lib", "."] {
            assert!(refused(path).contains("current directory"), "{path}");
        }
        for path in [None, Some(""), Some("/usr/lib:/nonexistent")] {
            assert_eq!(loader(path.map(OsStr::new)).unwrap(), Path::new("libNVFP4.so"));
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(file_name()), b"x").unwrap();
        chmod(dir.path(), 0o777);
        assert!(refused(dir.path().to_str().unwrap()).contains("writable by everybody"));
    }
}
