//! The few operations a save consists of, so that tests can fail each of them.
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Operations in the order a save needs them; each is one point where a crash may happen.
pub(super) trait Disk {
    fn create_dir(&mut self, path: &Path) -> io::Result<()>;
    fn create(&mut self, path: &Path) -> io::Result<()>;
    fn append(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    fn sync(&mut self, path: &Path) -> io::Result<()>;
    fn sync_dir(&mut self, path: &Path) -> io::Result<()>;
    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove_dir_all(&mut self, path: &Path) -> io::Result<()>;
}

/// The file system.
pub(super) struct RealDisk;

impl Disk for RealDisk {
    fn create_dir(&mut self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }
    fn create(&mut self, path: &Path) -> io::Result<()> {
        OpenOptions::new().write(true).create_new(true).open(path).map(|_| ())
    }
    fn append(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        OpenOptions::new().append(true).open(path)?.write_all(bytes)
    }
    fn sync(&mut self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
    fn sync_dir(&mut self, path: &Path) -> io::Result<()> {
        // Only Unix can open a directory; elsewhere the rename is all there is.
        if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
    }
    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }
    fn remove_dir_all(&mut self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}
