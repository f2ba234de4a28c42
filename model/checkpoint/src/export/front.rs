//! A file that is written front to back: as many entries as it announces, each of the size it was announced
//! with.
use super::atomic::failed;
use super::safetensors::Entry;
use q4_core::{Code, Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Such a file under construction.
pub(super) struct Front {
    file: File,
    path: PathBuf,
    left: usize,
    size: u64,
}

impl Front {
    /// A file of `entries` entries that begins with `head`.
    pub fn new(file: File, path: &Path, entries: usize, head: &[u8]) -> Result<Self> {
        let mut front = Self { file, path: path.to_owned(), left: entries, size: 0 };
        front.put(head)?;
        Ok(front)
    }

    /// Takes the next entry, whose contents are `bytes`; they are not written yet.
    pub fn take(&mut self, entry: &Entry, bytes: &[u8]) -> Result<()> {
        if entry.bytes() != bytes.len() as u64 || self.left == 0 {
            return Err(Error::new(Code::Internal, format!("{}: not what was announced", entry.name)));
        }
        self.left -= 1;
        Ok(())
    }

    /// Writes what comes next.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.size += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| failed(&self.path, &e))
    }

    /// Syncs the file and returns its size in bytes.
    pub fn finish(self) -> Result<u64> {
        if self.left != 0 {
            return Err(Error::new(
                Code::Internal,
                format!("{} announced entries were not written", self.left),
            ));
        }
        self.file.sync_all().map_err(|e| failed(&self.path, &e))?;
        Ok(self.size)
    }
}
