//! Files that q4 keeps for a user: read without trust in what lies there, written whole or not at all.
use q4_core::{Code, Error, Result};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

/// Most bytes of such a file.
const LIMIT: u64 = 1 << 20;
/// No write takes that long: a partial file this old was left by a process that was killed.
const STALE: Duration = Duration::from_secs(60);
const PARTIAL: &str = ".partial";

/// The bytes of a regular file of at most 1 MiB. A pipe does not hang, a device does not fill the memory.
///
/// # Errors
/// Those of the system; what else lies there is said in words.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    // Opening some devices does something.
    is_regular(&fs::metadata(path)?)?;
    let file = open(path)?;
    is_regular(&file.metadata()?)?;
    let mut bytes = Vec::new();
    file.take(LIMIT + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LIMIT {
        return Err(io::Error::other(format!("more than {LIMIT} bytes")));
    }
    Ok(bytes)
}

#[cfg(unix)]
fn open(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    // What was a file a moment ago may be a pipe by now.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    fs::OpenOptions::new().read(true).custom_flags(flags).open(path)
}

#[cfg(not(unix))]
fn open(path: &Path) -> io::Result<File> {
    File::open(path)
}

fn is_regular(meta: &fs::Metadata) -> io::Result<()> {
    if meta.is_file() {
        return Ok(());
    }
    #[cfg(unix)]
    let kind = {
        use std::os::unix::fs::FileTypeExt;
        let kind = meta.file_type();
        match () {
            () if kind.is_fifo() => "a pipe",
            () if kind.is_char_device() || kind.is_block_device() => "a device",
            () if kind.is_socket() => "a socket",
            () => "a directory",
        }
    };
    #[cfg(not(unix))]
    let kind = "a directory";
    Err(io::Error::other(format!("{kind}, no regular file")))
}

/// Writes a file that is complete or absent: no reader ever sees half of it, and a disk that is full keeps
/// nothing of it. Its folder is made if need be.
///
/// # Errors
/// `Io`.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = partial(path).map_err(|e| failed(path, &e))?;
    let written = fill(&partial, bytes).and_then(|()| fs::rename(&partial, path));
    written.map_err(|e| {
        // What is left of it would only be in the way.
        let _ = fs::remove_file(&partial);
        failed(path, &e)
    })
}

/// The same for a file that nobody may replace. `false` when there is one already.
///
/// # Errors
/// `Io`.
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<bool> {
    let partial = partial(path).map_err(|e| failed(path, &e))?;
    let written = fill(&partial, bytes).and_then(|()| match fs::hard_link(&partial, path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(e),
    });
    let _ = fs::remove_file(&partial);
    written.map_err(|e| failed(path, &e))
}

fn failed(path: &Path, e: &io::Error) -> Error {
    Error::new(Code::Io, format!("{}: {e}", path.display()))
}

/// A name beside `path` that no other process writes to, in a folder without the remains of others.
fn partial(path: &Path) -> io::Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let folder = path.parent().unwrap_or(Path::new("."));
    make(folder)?;
    sweep(folder);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    Ok(folder.join(format!(".{name}.{process}-{count}{PARTIAL}")))
}

fn make(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Nobody but the owner can read it.
fn fill(partial: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(partial)?.write_all(bytes)
}

/// Removes what killed processes left half written, earlier versions' included: `.NAME.json.PID`.
fn sweep(folder: &Path) {
    let now = SystemTime::now();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_old_kind =
            || name.rsplit_once(".json.").is_some_and(|(_, pid)| pid.bytes().all(|b| b.is_ascii_digit()));
        let is_partial = name.starts_with('.') && (name.ends_with(PARTIAL) || is_old_kind());
        let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|at| now.duration_since(at).ok());
        if is_partial && age.is_some_and(|age| age > STALE) {
            // Whoever came first has removed it.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").file_name());
        entries.map(|name| name.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn what_is_no_file_is_named_and_hangs_nobody() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        assert!(Command::new("mkfifo").arg(at("pipe")).status().expect("mkfifo").success());
        symlink("/dev/zero", at("zero")).expect("a link");
        symlink(at("pipe"), at("to-pipe")).expect("a link");
        symlink(dir.path(), at("to-folder")).expect("a link");
        symlink(at("itself"), at("itself")).expect("a link");
        fs::write(at("large"), vec![b' '; LIMIT as usize + 1]).expect("written");
        fs::write(at("whole"), vec![b' '; LIMIT as usize]).expect("written");
        symlink(at("whole"), at("to-whole")).expect("a link");
        for (name, says) in [
            ("pipe", "a pipe"),
            ("to-pipe", "a pipe"),
            ("zero", "a device"),
            ("to-folder", "a directory"),
            ("itself", "symbolic links"),
            ("large", "more than 1048576 bytes"),
            ("absent", "No such file"),
        ] {
            let e = read(&at(name)).expect_err(name);
            assert!(e.to_string().contains(says), "{name}: {e}");
        }
        assert_eq!(read(&at("to-whole")).expect("a file").len() as u64, LIMIT);
    }

    #[test]
    fn nothing_half_written_stays() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("made");
        write(&folder.join("a.json"), b"one").expect("written");
        write(&folder.join("a.json"), b"two").expect("replaced");
        assert_eq!(names(&folder), ["a.json"]);
        let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
        assert_eq!((mode(&folder.join("a.json")), mode(&folder)), (0o600, 0o700));
        // A folder in the way: the last step fails.
        fs::create_dir(folder.join("b.json")).expect("a folder");
        assert_eq!(write(&folder.join("b.json"), b"x").expect_err("a folder").code(), Code::Io);
        assert_eq!(names(&folder).len(), 2, "{:?}", names(&folder));
        // Remains: old ones go, what may be in use stays.
        let old = SystemTime::now() - 2 * STALE;
        for (name, is_old) in [
            (".a.json.7-0.partial", true),
            (".a.json.4711", true),
            (".b.json.8-0.partial", false),
            (".c", true),
        ] {
            let file = File::create(folder.join(name)).expect("made");
            if is_old {
                file.set_modified(old).expect("aged");
            }
        }
        write(&folder.join("a.json"), b"three").expect("written");
        let mut left = names(&folder);
        left.sort();
        assert_eq!(left, [".b.json.8-0.partial", ".c", "a.json", "b.json"]);
    }

    #[test]
    fn what_is_there_is_not_replaced() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("key");
        let wrote: Vec<bool> = std::thread::scope(|s| {
            let all: Vec<_> = (0..8u8)
                .map(|i| {
                    s.spawn({
                        let path = &path;
                        move || write_new(path, &[i; 32])
                    })
                })
                .collect();
            all.into_iter().map(|t| t.join().expect("no panic").expect("written")).collect()
        });
        assert_eq!(wrote.iter().filter(|w| **w).count(), 1);
        assert_eq!(names(dir.path()), ["key"]);
    }
}
