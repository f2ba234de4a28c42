//! Output that appears complete under its final name or not at all.
//!
//! It is written beside that name, synced, and renamed last: a crash leaves at most something called
//! `.partial-`.
use q4_core::{Code, Error, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A file or directory under construction; dropping it without [`Output::commit`] removes it.
#[derive(Debug)]
pub struct Output {
    target: PathBuf,
    partial: PathBuf,
    directory: bool,
    committed: bool,
}

impl Output {
    /// A new directory that will be called `target`.
    ///
    /// # Errors
    /// [`Code::Usage`] when that exists and is not an empty directory; a link to one cannot be replaced by a
    /// directory. [`Code::Io`].
    pub fn directory(target: &Path) -> Result<Self> {
        if fs::symlink_metadata(target).is_ok_and(|m| m.is_symlink()) {
            return Err(exists(target));
        }
        match fs::read_dir(target).map(|mut entries| entries.next().is_some()) {
            Ok(true) => return Err(exists(target)),
            Err(e) if e.kind() == ErrorKind::NotADirectory => return Err(exists(target)),
            Ok(false) => {}
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(failed(target, &e)),
        }
        Self::begin(target, true, |partial| fs::create_dir(partial))
    }

    /// A new file that will be called `target`.
    ///
    /// # Errors
    /// [`Code::Usage`] when that exists, [`Code::Io`].
    pub fn file(target: &Path) -> Result<(Self, File)> {
        if fs::symlink_metadata(target).is_ok() {
            return Err(exists(target));
        }
        let mut file = None;
        let output = Self::begin(target, false, |partial| {
            file = Some(create_new(partial)?);
            Ok(())
        })?;
        file.map(|f| (output, f)).ok_or_else(|| Error::new(Code::Internal, "output file was not created"))
    }

    /// Where to write for now.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Writes and syncs a small file of the directory; returns its size in bytes.
    ///
    /// # Errors
    /// [`Code::Io`], also when there is a file of that name.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<u64> {
        let path = self.partial.join(name);
        let write = || {
            let mut file = create_new(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().map_err(|e| failed(&path, &e))?;
        Ok(bytes.len() as u64)
    }

    /// Gives the finished output its name. What appeared there meanwhile is never replaced, an empty
    /// directory aside.
    ///
    /// # Errors
    /// [`Code::Usage`] when something took the name meanwhile, [`Code::Io`].
    pub fn commit(mut self) -> Result<()> {
        if self.directory {
            sync_directory(&self.partial)?;
            fs::rename(&self.partial, &self.target).map_err(|e| self.taken(&e))?;
        } else {
            self.name_file().map_err(|e| self.taken(&e))?;
        }
        self.committed = true;
        sync_directory(parent(&self.target))
    }

    /// A link refuses to replace a file, a rename does not; not every file system has links.
    fn name_file(&self) -> io::Result<()> {
        match fs::hard_link(&self.partial, &self.target) {
            Ok(()) => fs::remove_file(&self.partial),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(e),
            Err(_) if fs::symlink_metadata(&self.target).is_ok() => Err(ErrorKind::AlreadyExists.into()),
            Err(_) => fs::rename(&self.partial, &self.target),
        }
    }

    fn begin(
        target: &Path,
        directory: bool,
        mut create: impl FnMut(&Path) -> io::Result<()>,
    ) -> Result<Self> {
        let Some(name) = target.file_name() else {
            return Err(Error::new(Code::Usage, format!("{}: output", target.display()))
                .need("a path that ends in a name"));
        };
        // A killed run leaves its partial behind, and process ids repeat, in containers above all.
        for attempt in 0..1000 {
            let mut partial = name.to_owned();
            partial.push(format!(".partial-{}", std::process::id()));
            if attempt > 0 {
                partial.push(format!("-{attempt}"));
            }
            let partial = parent(target).join(partial);
            match create(&partial) {
                Ok(()) => {
                    return Ok(Self { target: target.to_owned(), partial, directory, committed: false });
                }
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(failed(&partial, &e)),
            }
        }
        Err(Error::new(Code::Io, format!("{}: too many unfinished outputs beside it", target.display()))
            .fix(format!("rm -r {}.partial-*", target.display())))
    }

    fn taken(&self, e: &io::Error) -> Error {
        match e.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty | ErrorKind::NotADirectory => {
                exists(&self.target)
            }
            _ => failed(&self.target, e),
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.committed {
            return;
        }
        let removed =
            if self.directory { fs::remove_dir_all(&self.partial) } else { fs::remove_file(&self.partial) };
        if let Err(e) = removed
            && e.kind() != ErrorKind::NotFound
        {
            tracing::warn!(path = %self.partial.display(), error = %e, "unfinished output could not be removed");
        }
    }
}

/// Creates a file that did not exist, readable as the umask says.
pub(crate) fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// A failure to write `path`: always [`Code::Io`], a missing parent directory included.
pub(crate) fn failed(path: &Path, e: &io::Error) -> Error {
    let error = Error::new(Code::Io, format!("{}: {e}", path.display()));
    match e.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            error.fix("free some space or write to another disk")
        }
        ErrorKind::NotFound => error.fix(format!("mkdir -p {}", parent(path).display())),
        _ => error,
    }
}

fn exists(target: &Path) -> Error {
    Error::new(Code::Usage, format!("{}: exists", target.display()))
        .need("an output path that is free; nothing is ever overwritten")
        .fix("choose another path or remove it first")
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Only Unix can open a directory to sync it; elsewhere the rename is all there is.
fn sync_directory(path: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(path).and_then(|d| d.sync_all()).map_err(|e| failed(path, &e))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_shows_before_the_commit_and_all_after() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let target = dir.path().join("out");
        let output = Output::directory(&target)?;
        output.write("a", b"1")?;
        assert!(!target.exists());
        output.commit()?;
        assert_eq!(fs::read(target.join("a")).expect("written"), b"1");
        assert_eq!(fs::read_dir(dir.path()).expect("listing").count(), 1);
        assert_eq!(Output::directory(&target).expect_err("not empty").code(), Code::Usage);
        Ok(())
    }

    #[test]
    fn a_dropped_output_leaves_nothing() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        Output::directory(&dir.path().join("d"))?.write("a", b"1")?;
        let _ = Output::file(&dir.path().join("f"))?;
        assert_eq!(fs::read_dir(dir.path()).expect("listing").count(), 0);
        Ok(())
    }

    #[test]
    fn what_appears_meanwhile_is_kept() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let (f, d) = (dir.path().join("f"), dir.path().join("d"));
        let (file, mut handle) = Output::file(&f)?;
        handle.write_all(b"new").expect("written");
        let directory = Output::directory(&d)?;
        fs::write(&f, b"old").expect("written");
        fs::create_dir(&d).expect("created");
        fs::write(d.join("x"), b"old").expect("written");
        assert_eq!(file.commit().expect_err("taken").code(), Code::Usage);
        assert_eq!(directory.commit().expect_err("taken").code(), Code::Usage);
        assert_eq!(fs::read(&f).expect("kept"), b"old");
        assert_eq!(fs::read_dir(dir.path()).expect("listing").count(), 2, "no partial is left");
        Ok(())
    }

    #[test]
    fn a_left_over_partial_is_no_obstacle() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let target = dir.path().join("out");
        fs::create_dir(dir.path().join(format!("out.partial-{}", std::process::id()))).expect("created");
        Output::directory(&target)?.commit()?;
        assert!(target.exists());
        Ok(())
    }

    #[test]
    fn a_missing_parent_is_an_output_error() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let e = Output::directory(&dir.path().join("absent/out")).expect_err("no parent");
        assert_eq!(e.code(), Code::Io);
        assert!(e.to_string().contains("absent"));
        assert_eq!(Output::directory(Path::new("..")).expect_err("no name").code(), Code::Usage);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_an_empty_directory_is_refused_at_once() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let (empty, link) = (dir.path().join("empty"), dir.path().join("link"));
        fs::create_dir(&empty).expect("created");
        std::os::unix::fs::symlink(&empty, &link).expect("linked");
        assert_eq!(Output::directory(&link).expect_err("a link").code(), Code::Usage);
    }

    #[cfg(unix)]
    #[test]
    fn permissions_follow_the_umask() -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("temporary directory");
        let plain = dir.path().join("plain");
        fs::write(&plain, b"").expect("written");
        let target = dir.path().join("out");
        let output = Output::directory(&target)?;
        output.write("a", b"1")?;
        output.commit()?;
        let mode = |p: &Path| fs::metadata(p).expect("metadata").permissions().mode() & 0o777;
        assert_eq!(mode(&target.join("a")), mode(&plain));
        Ok(())
    }
}
