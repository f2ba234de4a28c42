//! What was typed in earlier conversations: one JSON string a line, in a file only its owner reads.
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Entries that are offered again.
pub const ENTRIES: usize = 1000;
/// Bytes of an entry that is kept for the next time; a pasted book is not.
const LONGEST: usize = 64 << 10;

/// A file that grows by one line with every message.
pub struct History {
    path: PathBuf,
    file: File,
}

impl History {
    /// Opens `chat-history` in `folder`, which is made where it is not there, and returns its newest entries,
    /// oldest first. Lines that are no entries are passed over.
    pub fn open(folder: &Path) -> io::Result<(Self, Vec<String>)> {
        fs::create_dir_all(folder)?;
        let path = folder.join("chat-history");
        let mut text = Vec::new();
        private().read(true).open(&path)?.read_to_end(&mut text)?;
        let mut entries: Vec<String> =
            text.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
        let surplus = entries.len().saturating_sub(ENTRIES);
        entries.drain(..surplus);
        if surplus > ENTRIES {
            rewrite(folder, &path, &entries)?;
        }
        let file = private().open(&path)?;
        Ok((Self { path, file }, entries))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds an entry, in one piece even where several conversations write.
    pub fn add(&mut self, entry: &str) -> io::Result<()> {
        if entry.len() > LONGEST {
            return Ok(());
        }
        self.file.write_all(line(entry)?.as_bytes())
    }
}

fn line(entry: &str) -> io::Result<String> {
    Ok(serde_json::to_string(entry)? + "\n")
}

fn rewrite(folder: &Path, path: &Path, entries: &[String]) -> io::Result<()> {
    let mut file = NamedTempFile::new_in(folder)?;
    for entry in entries {
        file.write_all(line(entry)?.as_bytes())?;
    }
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}

/// Appends, and makes what nobody else can read.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back_whole_and_old_ones_go() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let folder = dir.path().join("q4");
        let (mut history, none) = History::open(&folder)?;
        assert!(none.is_empty());
        history.add("two\nlines \\ \"談\"")?;
        history.add(&"x".repeat(LONGEST + 1))?;
        history.file.write_all(b"\xff not an entry\n\"torn")?;
        let (mut history, entries) = History::open(&folder)?;
        assert_eq!(entries, ["two\nlines \\ \"談\""]);
        history.file.write_all(b"\n")?;
        (0..=2 * ENTRIES).try_for_each(|i| history.add(&i.to_string()))?;
        let (history, entries) = History::open(&folder)?;
        assert_eq!((entries.len(), entries[ENTRIES - 1].as_str()), (ENTRIES, "2000"));
        assert_eq!(fs::read_to_string(history.path())?.lines().count(), ENTRIES);
        #[cfg(unix)]
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(history.path())?.permissions()) & 0o777,
            0o600
        );
        Ok(())
    }
}
