//! What is kept of a run: checkpoints, the way back from one, and the model in the end.
use super::super::engine::Moved;
use super::super::export::{self, Form};
use super::super::peft;
use super::super::trained::Trained;
use super::super::weights::{bytes, restore};
use super::{Run, Source};
use crate::checkpoint::{Loaded, Store, TrainState};
use crate::config::{Init, PEFT, Pick};
use crate::data::Cursor;
use crate::guard::Guard;
use crate::preflight;
use q4_core::{Code, Error, Result};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Masters and moments.
const FILES: [(&str, usize); 2] = [("masters.bin", 0), ("states.bin", 1)];

impl Run<'_> {
    /// A checkpoint, of which every rank has a part and the first writes all.
    pub(super) fn save(
        &mut self,
        store: Option<&Store>,
        cursor: Cursor,
        guard: Guard,
        owed: bool,
        metric: Option<f64>,
    ) -> Result<PathBuf> {
        let state = TrainState {
            step: self.step,
            tokens: self.tokens,
            seed: self.c.train.seed,
            cursor,
            guard,
            best: self.best.map(|b| b.0),
            best_step: self.best.map(|b| b.1),
            stale: self.stale,
            owed,
            threads: self.cx.threads,
            ranks: self.ranks,
            sources: Some(self.sources.clone()),
            // How the run was started is left out: a checkpoint need not know of interruptions.
            config: self.c.to_toml()?,
        };
        let mut states = self.engine.states();
        let written = store.map(|store| self.write(store, &state, metric, &mut states));
        // The others wait for each other, whatever has become of the file.
        states.by_ref().try_for_each(|state| state.map(|_| ()))?;
        drop(states);
        let path = self.first(|_| written.unwrap_or_else(|| Err(Error::new(Code::Internal, "no store"))))?;
        self.saved = Some((self.step, owed, path.clone()));
        Ok(path)
    }

    fn write(
        &self,
        store: &Store,
        state: &TrainState,
        metric: Option<f64>,
        states: &mut dyn Iterator<Item = Result<Vec<u8>>>,
    ) -> Result<PathBuf> {
        let (params, norm) = (&self.engine.params, self.engine.last_norm);
        store.save(state.step, metric, |w| {
            for (name, which) in FILES {
                let mut failed = None;
                w.file(name, |out| {
                    let mut masters = params.trained().map(|t| bytes(&t.master));
                    let tensors: &mut dyn Iterator<Item = _> =
                        if which == 0 { &mut masters } else { &mut *states };
                    for tensor in tensors {
                        match tensor {
                            Ok(b) => out.write_all(&b)?,
                            Err(e) => {
                                failed = Some(e);
                                return Err(std::io::Error::other("a tensor cannot be read"));
                            }
                        }
                    }
                    Ok(())
                })
                .map_err(|e| failed.unwrap_or(e))?;
            }
            w.bytes("last_norm", &norm.to_le_bytes())?;
            w.state(state)
        })
    }

    /// Everything there is after the last step, written down: a checkpoint, or without `checkpoint.dir` the
    /// model as it is, under a name that says of which step. `None`: nothing was asked to be kept, or no step
    /// was taken.
    pub(super) fn put_down(
        &mut self,
        store: Option<&Store>,
        cursor: Cursor,
        guard: Guard,
        owed: bool,
    ) -> Result<Option<PathBuf>> {
        if let Some((step, was_owed, path)) = &self.saved
            && (*step, *was_owed) == (self.step, owed)
        {
            return Ok(Some(path.clone()));
        }
        if self.step == 0 {
            return Ok(None);
        }
        if self.keeps() {
            let path = self.save(store, cursor, guard, owed, None)?;
            (self.cx.warn)(&format!("step {} is kept in {}: --resume goes on", self.step, path.display()));
            return Ok(Some(path));
        }
        let Some(dir) = &self.c.export.dir else { return Ok(None) };
        let dir = dir.join(format!("step-{:09}", self.step));
        self.first(|run| run.export_to(&dir))?;
        (self.cx.warn)(&format!("step {} as it is: {}", self.step, dir.display()));
        Ok(Some(dir))
    }

    /// Keeps what an error leaves, and says where.
    pub(super) fn rescue(&mut self, store: Option<&Store>, e: Error, cursor: Cursor, guard: Guard) -> Error {
        // What one rank alone has not brought to its end cannot be gathered.
        if self.team.as_ref().is_some_and(|team| !team.is_agreed(&e)) {
            return match &self.saved {
                Some((step, _, path)) if e.code() == Code::RankLost => {
                    e.have(format!("step {}; {} is whole, of step {step}", self.step, path.display()))
                }
                _ => e,
            };
        }
        let mut owed = self.owed;
        match self.engine.moved {
            // Some weights have moved and some have not: no step is left to write down.
            Moved::Partly => {
                let last = self.saved.as_ref().map(|s| format!("{} is whole", s.2.display()));
                (self.cx.warn)(&format!(
                    "the step was cut short and is lost; {}",
                    last.unwrap_or_else(|| "there is no checkpoint".into())
                ));
                return e;
            }
            // The step was taken, and only then something failed.
            Moved::Wholly if !owed => {
                self.step += 1;
                self.tokens += (self.c.train.accumulate * self.c.data.rows * self.c.data.seq) as u64;
                owed = true;
            }
            _ => {}
        }
        match self.put_down(store, cursor, guard, owed) {
            Ok(Some(path)) => {
                (self.cx.warn)(&format!("nothing is lost: step {} is in {}", self.step, path.display()))
            }
            Ok(None) => {}
            Err(other) => (self.cx.warn)(&format!("step {} cannot be kept: {other}", self.step)),
        }
        e
    }

    /// The step whose weights are exported; those are the engine's from here on.
    pub(super) fn choose(&mut self, store: Option<&Store>) -> Result<u64> {
        let wanted = match self.c.export.step {
            Pick::Last => None,
            Pick::Best => self.best,
            Pick::Auto => self.best.filter(|_| self.is_stale()),
        };
        let (Some((loss, step)), Some(store), true) = (wanted, store, self.c.export.dir.is_some()) else {
            return Ok(self.step);
        };
        if step != self.step {
            let loaded = store.of_step(step).map_err(|e| {
                let last = self.saved.as_ref().map_or_else(String::new, |s| s.2.display().to_string());
                e.within("the best step").fix(format!("--resume --set export.step=last exports {last}"))
            })?;
            self.restore(&loaded)?;
        }
        (self.cx.say)(&format!("step {step} is exported, the best: valid loss {loss:.5}"));
        Ok(step)
    }

    /// Everything in the configured layouts, each a directory (or file) of its own.
    pub(super) fn export(&mut self) -> Result<Vec<PathBuf>> {
        match self.c.export.dir.clone() {
            Some(dir) => self.export_to(&dir),
            None => Ok(Vec::new()),
        }
    }

    fn export_to(&mut self, dir: &Path) -> Result<Vec<PathBuf>> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, &e))?;
        let mut written = Vec::new();
        for layout in self.c.layouts() {
            let mut out = preflight::target(dir, layout);
            if std::fs::symlink_metadata(&out).is_ok() {
                let other = preflight::other_name(&out);
                (self.cx.warn)(&format!(
                    "{}: somebody made it since this run began; the model goes to {}",
                    out.display(),
                    other.display()
                ));
                out = other;
            }
            let (params, kernels) = (&self.engine.params, &self.engine.kernels);
            if layout == PEFT {
                peft::write(params, &self.c.model.path, &out)?;
                (self.cx.say)(&format!("wrote {}", out.display()));
                written.push(out);
                continue;
            }
            let form: Form = layout.parse()?;
            let base = match self.c.model.init {
                Init::Checkpoint => self.base.checkpoint.as_ref(),
                Init::Random => None,
            };
            let notes = export::write(params, kernels, &self.base.side, base, &out, form)?;
            (self.cx.say)(&format!("wrote {}", out.display()));
            notes.iter().for_each(|note| (self.cx.say)(&format!("{}: {note}", out.display())));
            written.push(out);
        }
        Ok(written)
    }

    /// An export that failed, with the way to have it after all.
    pub(super) fn not_exported(&self, e: Error) -> Error {
        match &self.saved {
            Some((step, _, path)) => e.fix(format!(
                "step {step} is kept in {}: {} --resume --set export.dir=ANOTHER",
                path.display(),
                self.cx.line.replace(" --resume", "")
            )),
            None => e,
        }
    }

    pub(super) fn resume(
        &mut self,
        loaded: &Loaded,
        state: TrainState,
        source: &mut Source<'_>,
    ) -> Result<u64> {
        self.restore(loaded)?;
        source.seek(state.cursor);
        self.best = state.best.zip(state.best_step);
        self.guard = state.guard.with(self.c.guard);
        (self.step, self.tokens, self.stale, self.owed) = (state.step, state.tokens, state.stale, state.owed);
        self.saved = Some((state.step, state.owed, loaded.path.clone()));
        (self.cx.say)(&format!("goes on after step {}", self.step));
        Ok(self.step)
    }

    /// Masters and moments of a checkpoint.
    fn restore(&mut self, loaded: &Loaded) -> Result<()> {
        for (name, which) in FILES {
            let (mut file, bytes) = loaded.open(name)?;
            let size = |t: &Trained| match which {
                0 => t.master.numel() * t.format.size(),
                _ => t.whole.bytes(),
            };
            let need: usize = self.engine.params.trained().map(size).sum();
            if need as u64 != bytes {
                return Err(Error::new(Code::Container, format!("{}: {name}", loaded.path.display()))
                    .need(format!("{need} bytes, as this configuration has them"))
                    .have(format!("{bytes}"))
                    .fix("go on with the configuration the checkpoint was written with"));
            }
            let mut buffer = Vec::new();
            for t in self.engine.params.trained() {
                buffer.resize(size(t), 0);
                file.read_exact(&mut buffer).map_err(|e| Error::io(&loaded.path.join(name), &e))?;
                if which == 0 {
                    restore(&t.master, &buffer)?;
                } else {
                    let mut own = vec![0; t.layout.bytes()];
                    t.whole.take(&t.own, &buffer, &mut own);
                    restore(&t.state, &own)?;
                }
            }
        }
        if let Ok(norm) = <[u8; 8]>::try_from(loaded.read("last_norm")?) {
            self.engine.last_norm = f64::from_le_bytes(norm);
        }
        self.engine.forget_values();
        Ok(())
    }
}
