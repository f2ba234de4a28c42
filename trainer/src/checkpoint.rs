//! Checkpoints that a crash cannot spoil: a directory a step, written beside, synced, hashed, renamed,
//! rotated.
//!
//! ```text
//! runs/demo/step-000000120/manifest.json    names, sizes and SHA-256 of the other files, and its own
//!                          state.json       step, cursor, guard, configuration
//!                          ...              masters and states, as bytes
//! ```
//! A save writes `.partial-...`, syncs every file and the directory, renames it, syncs the parent, and only
//! then removes what rotation no longer wants (renamed to `.removed-...` first). So at every moment the
//! newest directory with a final name is complete, or the one before it is. Loading trusts hashes, not names.
use crate::sources::{Sources, hash};
use crate::{data::Cursor, guard::Guard};
use q4_core::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

mod disk;
#[cfg(test)]
mod tests;

use disk::{Disk, RealDisk};

/// What survives rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The newest so many, at least one.
    pub last: usize,
    /// And the one with the smallest metric.
    pub best: bool,
}

/// Everything besides tensors that a run needs to go on as if it had not stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Optimiser steps taken.
    pub step: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// Key of every random number; there is no other state of randomness.
    pub seed: u64,
    /// Next sample.
    pub cursor: Cursor,
    /// What the guard has seen.
    pub guard: Guard,
    /// Best held-out loss so far.
    pub best: Option<f64>,
    /// The step it was of.
    #[serde(default)]
    pub best_step: Option<u64>,
    /// Evaluations since without a better one.
    #[serde(default)]
    pub stale: u32,
    /// What follows this step (evaluation, samples) was not done: the run was asked to end.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub owed: bool,
    /// Threads it was computed with; 0: not known.
    #[serde(default)]
    pub threads: usize,
    /// Ranks that the micro-batches of its configuration were first counted for.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub ranks: usize,
    /// What the model and the data were.
    #[serde(default)]
    pub sources: Option<Sources>,
    /// The effective configuration, as TOML; the schedule is part of it.
    pub config: String,
}

fn one() -> usize {
    1
}

fn is_one(n: &usize) -> bool {
    *n == 1
}

/// A directory of checkpoints with one writer.
pub struct Store {
    dir: PathBuf,
    keep: Keep,
    disk: RefCell<Box<dyn Disk>>,
    /// Held as long as the store lives.
    _lock: File,
}

/// A checkpoint whose hashes are right.
#[derive(Debug)]
pub struct Loaded {
    /// Optimiser steps taken.
    pub step: u64,
    /// Metric it was saved with.
    pub metric: Option<f64>,
    /// Where it stands.
    pub path: PathBuf,
    /// Newer ones that could not be used, and why.
    pub damaged: Vec<(PathBuf, Error)>,
    files: Vec<Entry>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    name: String,
    bytes: u64,
    sha256: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    schema: String,
    step: u64,
    metric: Option<f64>,
    files: Vec<Entry>,
}

const SCHEMA: &str = "q4.checkpoint/1";
const MANIFEST: &str = "manifest.json";

impl Store {
    /// Opens or creates the directory. [`Code::Usage`] when another process writes checkpoints there.
    pub fn open(dir: &Path, keep: Keep) -> Result<Self> {
        Self::with_disk(dir, keep, Box::new(RealDisk))
    }

    fn with_disk(dir: &Path, keep: Keep, disk: Box<dyn Disk>) -> Result<Self> {
        fs::create_dir_all(dir).map_err(|e| failed(dir, &e))?;
        let lock = lock(&dir.join(".lock"))?;
        Ok(Self { dir: dir.to_owned(), keep, disk: RefCell::new(disk), _lock: lock })
    }

    /// Writes checkpoint `step`; `fill` adds the files. `metric`: smaller is better; kept as the best by
    /// rotation.
    ///
    /// # Errors
    /// [`Code::Io`], and whatever `fill` returns. Then no checkpoint of this step exists and older ones are
    /// untouched.
    pub fn save(
        &self,
        step: u64,
        metric: Option<f64>,
        fill: impl FnOnce(&mut Writer<'_>) -> Result<()>,
    ) -> Result<PathBuf> {
        self.sweep();
        let partial = self.dir.join(format!(".partial-{step:09}"));
        let target = self.dir.join(name(step));
        let mut disk = self.disk.borrow_mut();
        disk.create_dir(&partial).map_err(|e| failed(&partial, &e))?;
        let mut writer = Writer { dir: &partial, disk: &mut **disk, files: Vec::new() };
        let written = fill(&mut writer).and_then(|()| writer.manifest(step, metric));
        if let Err(e) = written {
            // What cannot be removed now is swept before the next save.
            let _ = disk.remove_dir_all(&partial);
            return Err(e);
        }
        let publish = |disk: &mut dyn Disk| -> io::Result<()> {
            disk.sync_dir(&partial)?;
            if target.exists() {
                disk.rename(&target, &self.dir.join(format!(".removed-{step:09}")))?;
            }
            disk.rename(&partial, &target)?;
            disk.sync_dir(&self.dir)
        };
        publish(&mut **disk).map_err(|e| failed(&target, &e))?;
        drop(disk);
        self.rotate()?;
        Ok(target)
    }

    /// The newest checkpoint whose hashes are right; `None` if there never was one.
    ///
    /// # Errors
    /// [`Code::Container`] when there are checkpoints and all are damaged.
    pub fn newest(&self) -> Result<Option<Loaded>> {
        newest(&self.dir)
    }

    /// The checkpoint of a step, every file hashed.
    pub fn of_step(&self, step: u64) -> Result<Loaded> {
        load(&self.dir.join(name(step)))
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Removes what an interrupted save left.
    fn sweep(&self) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|n| n.starts_with(".partial-") || n.starts_with(".removed-")) {
                let _ = self.disk.borrow_mut().remove_dir_all(&entry.path());
            }
        }
    }

    fn rotate(&self) -> Result<()> {
        let steps = steps(&self.dir)?;
        let last = self.keep.last.max(1);
        let Some(old) = steps.len().checked_sub(last) else { return Ok(()) };
        let metric = |path: &Path| read_manifest(path).ok().and_then(|m| m.metric).filter(|m| m.is_finite());
        let best = steps
            .iter()
            .filter_map(|(_, path)| metric(path).map(|m| (m, path)))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .filter(|_| self.keep.best)
            .map(|(_, path)| path);
        for (step, path) in steps[..old].iter().filter(|(_, path)| Some(path) != best) {
            let removed = self.dir.join(format!(".removed-{step:09}"));
            let mut disk = self.disk.borrow_mut();
            disk.rename(path, &removed)
                .and_then(|()| disk.remove_dir_all(&removed))
                .map_err(|e| failed(path, &e))?;
        }
        Ok(())
    }
}

/// The file at `path`, created where there is none and held against every other process.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let lock =
        File::options().create(true).write(true).truncate(false).open(path).map_err(|e| failed(path, &e))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(fs::TryLockError::WouldBlock) => {
            let dir = path.parent().unwrap_or(path);
            Err(Error::new(Code::Usage, format!("{}: in use", dir.display()))
                .need("a folder no other training writes to")
                .fix("wait for the other run, or name another folder"))
        }
        Err(fs::TryLockError::Error(e)) => Err(failed(path, &e)),
    }
}

/// The newest intact checkpoint in `dir`, for readers that hold no [`Store`]. As [`Store::newest`].
pub fn newest(dir: &Path) -> Result<Option<Loaded>> {
    let mut damaged = Vec::new();
    for (_, path) in steps(dir)?.into_iter().rev() {
        match load(&path) {
            Ok(loaded) => return Ok(Some(Loaded { damaged, ..loaded })),
            Err(e) => damaged.push((path, e)),
        }
    }
    match damaged.into_iter().next() {
        None => Ok(None),
        Some((_, e)) => Err(e.within(format!("{}: no intact checkpoint; the newest", dir.display()))),
    }
}

/// What the newest says of itself, unproved; `None` where nothing can be read.
pub fn glance(dir: &Path) -> Option<TrainState> {
    let (_, path) = steps(dir).ok()?.pop()?;
    serde_json::from_slice(&fs::read(path.join(STATE)).ok()?).ok()
}

/// The checkpoint at `path`, every file hashed. [`Code::Container`] with what differs.
pub fn load(path: &Path) -> Result<Loaded> {
    let manifest = read_manifest(path)?;
    if path.file_name().and_then(|n| n.to_str()) != Some(&name(manifest.step)) && is_step(path) {
        return Err(damaged(path, "is of another step").have(manifest.step.to_string()));
    }
    for entry in &manifest.files {
        let file = path.join(&entry.name);
        let (bytes, sha256) =
            hash(&file).map_err(|e| damaged(&file, "cannot be read").have(e.to_string()))?;
        if (bytes, &sha256) != (entry.bytes, &entry.sha256) {
            return Err(damaged(&file, "is damaged")
                .need(format!("{} bytes, SHA-256 {}", entry.bytes, entry.sha256))
                .have(format!("{bytes} bytes, SHA-256 {sha256}")));
        }
    }
    Ok(Loaded {
        step: manifest.step,
        metric: manifest.metric,
        path: path.to_owned(),
        damaged: Vec::new(),
        files: manifest.files,
    })
}

impl Loaded {
    /// Names of the files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|f| f.name.as_str())
    }

    /// A file to read from, with its size. [`Code::Container`] when the checkpoint has none of that name.
    pub fn open(&self, name: &str) -> Result<(io::BufReader<File>, u64)> {
        let entry = self.files.iter().find(|f| f.name == name).ok_or_else(|| {
            damaged(&self.path, "lacks a file").need(name).have(self.names().collect::<Vec<_>>().join(", "))
        })?;
        let path = self.path.join(name);
        let file = File::open(&path).map_err(|e| failed(&path, &e))?;
        Ok((io::BufReader::with_capacity(BLOCK, file), entry.bytes))
    }

    /// A whole file.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let (mut file, bytes) = self.open(name)?;
        let mut all = Vec::with_capacity(bytes as usize);
        file.read_to_end(&mut all).map_err(|e| failed(&self.path.join(name), &e))?;
        Ok(all)
    }

    /// `state.json`.
    pub fn state(&self) -> Result<TrainState> {
        serde_json::from_slice(&self.read(STATE)?)
            .map_err(|e| damaged(&self.path.join(STATE), "is not understood").have(e.to_string()))
    }
}

const STATE: &str = "state.json";
/// Bytes written and hashed at a time.
const BLOCK: usize = 1 << 20;

/// Adds files to a checkpoint under construction.
pub struct Writer<'a> {
    dir: &'a Path,
    disk: &'a mut dyn Disk,
    files: Vec<Entry>,
}

impl Writer<'_> {
    /// A file with the bytes that `body` writes; synced before this returns.
    pub fn file(&mut self, name: &str, body: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let path = self.dir.join(name);
        let plain =
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        if !plain || name.starts_with('.') || name == MANIFEST || self.files.iter().any(|f| f.name == name) {
            return Err(Error::new(Code::Internal, "checkpoint")
                .need("plain, distinct file names")
                .have(name));
        }
        let mut out = Hashing {
            path: &path,
            disk: self.disk,
            buffer: Vec::with_capacity(BLOCK),
            hash: Sha256::new(),
            bytes: 0,
        };
        let write = |out: &mut Hashing<'_>| {
            out.disk.create(out.path)?;
            body(out)?;
            out.flush()?;
            out.disk.sync(out.path)
        };
        write(&mut out).map_err(|e| failed(&path, &e))?;
        let (bytes, sha256) = (out.bytes, format!("{:x}", out.hash.finalize()));
        self.files.push(Entry { name: name.to_owned(), bytes, sha256 });
        Ok(())
    }

    /// A file with these bytes.
    pub fn bytes(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.file(name, |out| out.write_all(bytes))
    }

    /// `state.json`.
    pub fn state(&mut self, state: &TrainState) -> Result<()> {
        let json = serde_json::to_vec_pretty(state)
            .map_err(|e| Error::new(Code::Internal, format!("{STATE}: {e}")))?;
        self.bytes(STATE, &json)
    }

    /// Written last; its second line is the hash of the first.
    fn manifest(&mut self, step: u64, metric: Option<f64>) -> Result<()> {
        let manifest = Manifest {
            schema: SCHEMA.into(),
            step,
            metric: metric.filter(|m| m.is_finite()),
            files: self.files.clone(),
        };
        let line = serde_json::to_string(&manifest)
            .map_err(|e| Error::new(Code::Internal, format!("{MANIFEST}: {e}")))?;
        let text = format!("{line}\n{:x}\n", Sha256::digest(&line));
        let path = self.dir.join(MANIFEST);
        let write = |disk: &mut dyn Disk| {
            disk.create(&path)?;
            disk.append(&path, text.as_bytes())?;
            disk.sync(&path)
        };
        write(self.disk).map_err(|e| failed(&path, &e))
    }
}

struct Hashing<'a> {
    path: &'a Path,
    disk: &'a mut dyn Disk,
    buffer: Vec<u8>,
    hash: Sha256,
    bytes: u64,
}

impl Write for Hashing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(BLOCK - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..n]);
        if self.buffer.len() == BLOCK {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.buffer.is_empty() {
            self.disk.append(self.path, &self.buffer)?;
            self.hash.update(&self.buffer);
            self.bytes += self.buffer.len() as u64;
            self.buffer.clear();
        }
        Ok(())
    }
}

fn name(step: u64) -> String {
    format!("step-{step:09}")
}

fn is_step(path: &Path) -> bool {
    path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with("step-"))
}

/// Checkpoints with a final name, oldest first; none where there is no folder.
pub fn steps(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|e| failed(dir, &e))?,
    };
    let mut found: Vec<_> = entries
        .flatten()
        .filter_map(|e| Some((e.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?, e.path())))
        .collect();
    found.sort();
    Ok(found)
}

fn read_manifest(path: &Path) -> Result<Manifest> {
    let file = path.join(MANIFEST);
    let bad = |have: String| damaged(&file, "is damaged").have(have);
    let text = fs::read_to_string(&file).map_err(|e| bad(e.to_string()))?;
    let (line, rest) = text.split_once('\n').ok_or_else(|| bad("no end of line".into()))?;
    if rest != format!("{:x}\n", Sha256::digest(line)) {
        return Err(bad("another hash than it says".into()));
    }
    let manifest: Manifest = serde_json::from_str(line).map_err(|e| bad(e.to_string()))?;
    if manifest.schema != SCHEMA {
        return Err(bad(manifest.schema).need(SCHEMA));
    }
    Ok(manifest)
}

fn damaged(path: &Path, what: &str) -> Error {
    Error::new(Code::Container, format!("{}: {what}", path.display()))
}

fn failed(path: &Path, e: &io::Error) -> Error {
    Error::new(Code::Io, format!("{}: {e}", path.display()))
}
