//! What a run will write is looked at before its first step: that something is kept at all, names that are
//! taken, folders nobody may write to, disks and files that would grow too large.
use crate::checkpoint::{self, Keep, Store};
use crate::config::{Config, Init, PEFT};
use crate::plan::{Plan, Shapes};
use q4_core::memory::human;
use q4_core::{Code, Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Refuses a run that would keep nothing. `line`: the command, for the advice.
///
/// A named shape (`model.shape`) learns from random tokens: such a run is a measurement and may end without a
/// trace.
pub fn keeps_something(c: &Config, line: &str) -> Result<()> {
    if c.export.dir.is_some() || c.checkpoint.dir.is_some() || c.model.shape.is_some() {
        return Ok(());
    }
    Err(Error::new(Code::Usage, "this run would keep nothing: no model, no checkpoint")
        .need("export.dir (the finished model), checkpoint.dir (to go on from), or both")
        .have("neither")
        .fix(format!(
            "{line} --set export.dir={}; or look without training: --dry-run, --eval-only",
            free_name("out")
        )))
}

/// Refuses names that are taken, a used checkpoint folder without `--resume`, and `--resume` of nothing.
/// Changes nothing.
pub fn names(c: &Config, line: &str) -> Result<()> {
    for (key, dir) in [("export.dir", &c.export.dir), ("checkpoint.dir", &c.checkpoint.dir)] {
        if let Some(dir) = dir
            && dir.exists()
            && !dir.is_dir()
        {
            return Err(Error::new(Code::Usage, format!("{}: is no folder", dir.display()))
                .need(format!("a folder, or a name that is free, as {key}"))
                .fix(format!("{line} --set {key}={}", free_name(&dir.display().to_string()))));
        }
    }
    let taken: Vec<_> = targets(c).into_iter().filter(|p| fs::symlink_metadata(p).is_ok()).collect();
    if let (Some(dir), false) = (&c.export.dir, taken.is_empty()) {
        let list: Vec<_> = taken.iter().map(|p| p.display().to_string()).collect();
        return Err(Error::new(Code::Usage, format!("{}: exists", list.join(", ")))
            .need("names that are free: a finished model is never overwritten")
            .fix(format!(
                "{line} --set export.dir={}, or remove what is there",
                free_name(&dir.display().to_string())
            )));
    }
    let Some(dir) = &c.checkpoint.dir else { return Ok(()) };
    if let Some(target) = targets(c).iter().find(|t| dir.starts_with(t)) {
        return Err(Error::new(
            Code::Usage,
            format!("checkpoint.dir {}: is where a model goes", dir.display()),
        )
        .need(format!("a folder outside of {}", target.display())));
    }
    let newest = if dir.is_dir() { checkpoint::steps(dir)?.pop() } else { None };
    match (newest, c.checkpoint.resume) {
        (Some((step, _)), false) => {
            Err(Error::new(Code::Usage, format!("{}: has checkpoints of a run", dir.display()))
                .need("a new folder, or --resume to go on with that run")
                .have(format!("the newest is of step {step}"))
                .fix(format!(
                    "{line} --resume, or {line} --set checkpoint.dir={}",
                    free_name(&dir.display().to_string())
                )))
        }
        (None, true) => Err(nothing_to_resume(dir, line)),
        _ => Ok(()),
    }
}

/// `--resume` where nothing is, with what lies beside it.
pub fn nothing_to_resume(dir: &Path, line: &str) -> Error {
    let mut e = Error::new(Code::Usage, format!("{}: no checkpoint to go on from", dir.display()))
        .need("a folder with step-... in it, as a run with checkpoint.dir leaves it");
    let beside = used_beside(dir);
    let what = if dir.is_dir() { "a folder without" } else { "no such folder" };
    let list: Vec<_> = beside.iter().map(|(p, step)| format!("{} (step {step})", p.display())).collect();
    e = e.have(if list.is_empty() {
        what.to_owned()
    } else {
        format!("{what}; beside it {}", list.join(", "))
    });
    match beside.first() {
        Some((other, _)) => {
            e.fix(format!("{line} --set checkpoint.dir={}, or begin without --resume", other.display()))
        }
        None => e.fix("begin without --resume"),
    }
}

/// Folders beside `dir` that have checkpoints, the likest name first, with their newest steps.
fn used_beside(dir: &Path) -> Vec<(PathBuf, u64)> {
    let wanted = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let parent = dir.parent().unwrap_or(Path::new(""));
    let listed = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let mut found: Vec<_> = fs::read_dir(listed)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| parent.join(e.file_name()))
        .filter(|p| p != dir && p.is_dir())
        .filter_map(|p| checkpoint::steps(&p).ok()?.pop().map(|(step, _)| (p, step)))
        .collect();
    let alike = |p: &Path| {
        let name = p.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.chars().zip(wanted.chars()).take_while(|(a, b)| a == b).count()
    };
    found.sort_by_key(|(p, _)| (std::cmp::Reverse(alike(p)), p.clone()));
    found.truncate(5);
    found
}

/// Where every layout goes.
pub fn targets(c: &Config) -> Vec<PathBuf> {
    let Some(dir) = &c.export.dir else { return Vec::new() };
    c.layouts().iter().map(|layout| target(dir, layout)).collect()
}

/// Where a layout goes.
pub fn target(dir: &Path, layout: &str) -> PathBuf {
    dir.join(if layout == "dat" { "model.dat" } else { layout })
}

/// `name`, or the first of `name-2`, `name-3`, ... that does not exist.
fn free_name(name: &str) -> String {
    let name = name.trim_end_matches('/');
    let other = || (2..).map(|i| format!("{name}-{i}")).find(|n| !Path::new(n).exists());
    if Path::new(name).exists() { other().unwrap_or_default() } else { name.to_owned() }
}

/// Bytes a run writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Of one checkpoint.
    pub checkpoint: u64,
    /// Of every layout: the model, and what lies beside it only while it is made.
    pub exports: Vec<(u64, u64)>,
    /// Of the largest single file.
    pub largest: u64,
}

/// Predicts them. `base`: bytes of an element that keeps the type it was read with, 0 where there is none.
pub fn bytes(c: &Config, shapes: &Shapes, plan: &Plan, base: u64) -> Bytes {
    // Headers, tokenizers, states of the run.
    const SMALL: u64 = 4 << 20;
    let (masters, states) = (plan.part("masters"), plan.part("states"));
    let (linear, other) = (shapes.elements(|t| t.linear), shapes.elements(|t| !t.linear));
    let others = other * if c.model.init == Init::Checkpoint { base.max(2) } else { 2 };
    let layouts = c.layouts().into_iter().filter(|_| c.export.dir.is_some());
    let exports: Vec<_> = layouts
        .map(|layout| match layout {
            // q, k and v repeat the half that they share.
            PEFT => (3 * masters + SMALL, 0),
            "bf16" => (2 * linear + others + SMALL, 0),
            // A packed head of its own in .dat files.
            "dat" => (linear * 9 / 16 + others + other + SMALL, 4 * linear + others + SMALL),
            _ => (linear * 9 / 16 + others + SMALL, 4 * linear + others + SMALL),
        })
        .collect();
    let largest = exports.iter().flat_map(|e| [e.0, e.1]).chain([masters, states]).max().unwrap_or(0);
    Bytes { checkpoint: masters + states + SMALL, exports, largest }
}

/// Refuses what the disks cannot take, as far as they say: all checkpoints that are kept and the one being
/// written, all models and what their making needs.
pub fn space(c: &Config, bytes: &Bytes) -> Result<()> {
    let mut needs: Vec<(PathBuf, u64, &str)> = Vec::new();
    if let Some(dir) = &c.checkpoint.dir {
        let kept = c.checkpoint.keep as u64 + u64::from(c.checkpoint.keep_best && c.eval.every > 0) + 1;
        let there = if dir.is_dir() { checkpoint::steps(dir)?.len() as u64 } else { 0 };
        needs.push((dir.clone(), kept.saturating_sub(there) * bytes.checkpoint, "checkpoints"));
    }
    if let Some(dir) = &c.export.dir {
        // Layouts are written one after the other.
        let (mut done, mut most) = (0, 0);
        for (model, beside) in &bytes.exports {
            most = most.max(done + model + beside);
            done += model;
        }
        needs.push((dir.clone(), most, "models"));
    }
    if let (Some(limit), false) = (disk::largest_file(), needs.is_empty())
        && limit < bytes.largest
    {
        return Err(Error::new(Code::Io, "a file this run writes is larger than a process here may write")
            .need(human(bytes.largest))
            .have(format!("{} (ulimit -f)", human(limit)))
            .fix("ulimit -f unlimited"));
    }
    // Folders on one disk share what is free there.
    let mut disks: Vec<(u64, u64, u64, Vec<String>)> = Vec::new();
    for (dir, need, what) in needs {
        let Some((id, free)) = disk::free(&existing(&dir)) else { continue };
        let line = format!("{what} in {}: {}", dir.display(), human(need));
        match disks.iter_mut().find(|d| d.0 == id) {
            Some(d) => {
                d.2 += need;
                d.3.push(line);
            }
            None => disks.push((id, free, need, vec![line])),
        }
    }
    match disks.into_iter().find(|(_, free, need, _)| need > free) {
        None => Ok(()),
        Some((_, free, need, lines)) => {
            Err(Error::new(Code::Io, "the disk is too small for what this run writes")
                .need(format!("{} ({})", human(need), lines.join("; ")))
                .have(format!("{} free", human(free)))
                .fix(
                    "make room, a smaller checkpoint.keep, fewer export.layouts, or folders on another disk",
                ))
        }
    }
}

/// The nearest folder above that exists.
fn existing(path: &Path) -> PathBuf {
    let there = path.ancestors().find(|p| p.is_dir());
    there.filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

/// The folders of a run, created, tried, and held against other runs.
#[derive(Default)]
pub struct Outputs {
    /// Where checkpoints go.
    pub store: Option<Store>,
    _export: Option<Held>,
}

/// Creates the folders, writes into each, and keeps other runs out of them.
pub fn hold(c: &Config) -> Result<Outputs> {
    let new = c.checkpoint.dir.as_ref().filter(|d| !d.exists());
    let store = match &c.checkpoint.dir {
        Some(dir) => {
            let keep = Keep { last: c.checkpoint.keep, best: c.checkpoint.keep_best };
            Some(tried(dir, "checkpoint.dir", || Store::open(dir, keep))?)
        }
        None => None,
    };
    let export = match &c.export.dir {
        Some(dir) if c.checkpoint.dir.as_ref().is_none_or(|d| !same(d, dir)) => {
            tried(dir, "export.dir", || Held::new(dir)).map(Some)
        }
        _ => Ok(None),
    };
    match export {
        Ok(export) => Ok(Outputs { store, _export: export }),
        Err(e) => {
            drop(store);
            if let Some(dir) = new {
                // A run that is refused leaves nothing; what stays all the same is an empty folder.
                let _ = fs::remove_file(dir.join(".lock")).and_then(|()| fs::remove_dir(dir));
            }
            Err(e)
        }
    }
}

/// A folder that was not there before is removed again where it cannot be used.
fn tried<T>(dir: &Path, key: &str, open: impl FnOnce() -> Result<T>) -> Result<T> {
    let new = !dir.exists();
    let refused = |e: &std::io::Error| {
        Error::new(Code::Io, format!("{key} {}: {e}", dir.display()))
            .need("a folder that can be written to")
            .fix(format!("--set {key}=ANOTHER"))
    };
    fs::create_dir_all(dir).map_err(|e| refused(&e))?;
    let probe = dir.join(format!(".q4-tries-{}", std::process::id()));
    let written = fs::write(&probe, [0; 4096]);
    // What could not be written need not be there.
    let _ = fs::remove_file(&probe);
    let result = written.map_err(|e| refused(&e)).and_then(|()| open());
    if result.is_err() && new {
        let _ = fs::remove_dir(dir);
    }
    result
}

fn same(a: &Path, b: &Path) -> bool {
    a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// A folder no other run exports to.
struct Held {
    path: PathBuf,
    _lock: File,
}

impl Held {
    fn new(dir: &Path) -> Result<Self> {
        let path = dir.join(".lock");
        Ok(Self { _lock: checkpoint::lock(&path)?, path })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // A model's folder has no need of it; where it stays it holds nobody back.
        let _ = fs::remove_file(&self.path);
    }
}

/// A name that is free now, where a run that has ended finds its own taken.
pub fn other_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    (2..)
        .map(|i| path.with_file_name(format!("{name}-{i}")))
        .find(|p| fs::symlink_metadata(p).is_err())
        .unwrap_or_else(|| path.to_owned())
}

#[cfg(unix)]
mod disk {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    /// Which disk a folder is on, and the bytes this user may still write there.
    pub fn free(dir: &Path) -> Option<(u64, u64)> {
        let id = std::fs::metadata(dir).ok()?.dev();
        let s = rustix::fs::statvfs(dir).ok()?;
        // Some file systems do not say.
        (s.f_blocks > 0).then(|| (id, s.f_bavail.saturating_mul(s.f_frsize)))
    }

    /// The largest file this process may write.
    pub fn largest_file() -> Option<u64> {
        rustix::process::getrlimit(rustix::process::Resource::Fsize).current
    }
}

#[cfg(not(unix))]
mod disk {
    use std::path::Path;

    /// Not known here.
    pub fn free(_: &Path) -> Option<(u64, u64)> {
        None
    }

    /// Not limited here.
    pub fn largest_file() -> Option<u64> {
        None
    }
}

#[cfg(all(test, unix))]
mod tests;
