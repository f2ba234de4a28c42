//! Which files may be loaded, and their hash: what runs must not depend on the current directory, on who else
//! can write to the machine, or on a file that changes between check and use.
use q4_core::{Reject, RejectCode};
use sha2::{Digest, Sha256};
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// A file that was opened once; everything else is done through this handle.
pub struct Opened {
    /// Absolute, without links.
    pub path: PathBuf,
    /// The handle that was hashed, at its start.
    pub file: File,
    /// Bytes of the file.
    pub len: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

/// Opens `path` when it may be loaded at all, and hashes it.
pub fn open(path: &Path) -> Result<Opened, Reject> {
    let missing = |have: String| Reject::new(RejectCode::LibraryMissing, "a shared library", have);
    if path.parent().is_none_or(|p| p.as_os_str().is_empty()) {
        return Err(Reject::new(
            RejectCode::LibraryMissing,
            "a path with a folder, e.g. ./name.so: no folder is searched",
            format!("`{}`", path.display()),
        ));
    }
    let given = std::path::absolute(path).map_err(|e| missing(e.to_string()))?;
    let real = fs::canonicalize(path).map_err(|e| missing(e.to_string()))?;
    let seen = fs::metadata(&real).map_err(|e| missing(e.to_string()))?;
    // A pipe would hang the open below.
    if !seen.is_file() {
        return Err(missing("not a regular file".into()));
    }
    guarded(&real)?;
    if given != real {
        // A link in a folder of everybody's may be anybody's.
        folders(&given)?;
    }
    let unreadable = |e: std::io::Error| missing(format!("unreadable: {e}"));
    let mut file = File::open(&real).map_err(unreadable)?;
    let meta = file.metadata().map_err(unreadable)?;
    if !same(&seen, &meta) {
        return Err(missing("replaced while it was opened".into()));
    }
    let (sha256, len) = hash(&mut file, &mut io::sink()).map_err(unreadable)?;
    file.rewind().map_err(unreadable)?;
    Ok(Opened { path: real, file, len, sha256 })
}

/// SHA-256 of a text, in hexadecimal.
pub fn digest(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))
}

/// SHA-256 and number of the bytes from here to the end, which are written to `copy`.
fn hash(file: &mut File, copy: &mut impl Write) -> io::Result<(String, u64)> {
    let (mut hasher, mut buffer, mut len) = (Sha256::new(), vec![0; 1 << 16], 0);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok((format!("{:x}", hasher.finalize()), len)),
            Ok(n) => {
                hasher.update(&buffer[..n]);
                copy.write_all(&buffer[..n])?;
                len += n as u64;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// A copy in memory that nobody can write to any more, this process included: whoever may write the file
/// cannot change what was hashed. `name` is what profilers see, `/memfd:NAME`.
#[cfg(target_os = "linux")]
pub fn sealed(mut file: File, name: &str, sha256: &str) -> Result<File, Reject> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let failed = |e: io::Error| {
        Reject::new(RejectCode::LibraryMissing, "a sealed copy of the library in memory", e.to_string())
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut copy = File::from(memfd_create(called(name), flags).map_err(|e| failed(e.into()))?);
    file.rewind().map_err(failed)?;
    let (copied, _) = hash(&mut file, &mut copy).map_err(failed)?;
    if copied != sha256 {
        return Err(changed(sha256, &copied));
    }
    fcntl_add_seals(&copy, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)
        .map_err(|e| failed(e.into()))?;
    Ok(copy)
}

/// As much of a name as a file in memory may have.
#[cfg(target_os = "linux")]
fn called(name: &str) -> String {
    const LONGEST: usize = 246;
    format!("q4-{}", &name[..name.floor_char_boundary(LONGEST)])
}

/// The reason against a file that is another now than when it was hashed.
pub fn changed(before: &str, now: &str) -> Reject {
    Reject::new(
        RejectCode::LibraryMissing,
        format!("the file that was examined, sha256 {before}"),
        format!("sha256 {now}"),
    )
}

/// Refuses a file, or a folder above it, that everybody may write.
#[cfg(unix)]
fn guarded(file: &Path) -> Result<(), Reject> {
    if mode(file)?.0 & 0o002 != 0 {
        return Err(untrusted(file));
    }
    folders(file)
}

/// The folder of `file` may not be writable by everybody at all; one further up may when it is sticky, as
/// `/tmp` is, and what lies in it on the way to `file` is ours or the system's: others cannot replace that.
#[cfg(unix)]
fn folders(file: &Path) -> Result<(), Reject> {
    let own = fs::metadata("/proc/self").map(|m| std::os::unix::fs::MetadataExt::uid(&m)).ok();
    let mut below = file;
    for folder in file.ancestors().skip(1) {
        let (bits, _) = mode(folder)?;
        let owner = mode(below)?.1;
        let held = below != file && bits & 0o1000 != 0 && (owner == 0 || Some(owner) == own);
        if bits & 0o002 != 0 && !held {
            return Err(untrusted(folder));
        }
        below = folder;
    }
    Ok(())
}

/// Permission bits and owner, of a link itself.
#[cfg(unix)]
fn mode(path: &Path) -> Result<(u32, u32), Reject> {
    use std::os::unix::fs::MetadataExt;
    let meta = fs::symlink_metadata(path).map_err(|e| {
        Reject::new(
            RejectCode::LibraryMissing,
            "a folder that can be checked",
            format!("{}: {e}", path.display()),
        )
    })?;
    // A link's own bits say nothing.
    Ok((if meta.is_symlink() { 0 } else { meta.mode() }, meta.uid()))
}

#[cfg(unix)]
fn untrusted(path: &Path) -> Reject {
    Reject::new(
        RejectCode::LibraryUntrusted,
        "a file and folders that not everybody may write",
        format!("{0} is writable by everybody; chmod o-w {0}", path.display()),
    )
}

#[cfg(unix)]
fn same(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    b.is_file() && (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn guarded(_: &Path) -> Result<(), Reject> {
    Ok(())
}

#[cfg(not(unix))]
fn folders(_: &Path) -> Result<(), Reject> {
    Ok(())
}

#[cfg(not(unix))]
fn same(_: &Metadata, b: &Metadata) -> bool {
    b.is_file()
}
