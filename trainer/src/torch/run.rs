//! A training run from its first step to its export: what the configuration says, in order.
use super::device;
use super::engine::{Engine, Moved, Report};
use super::phases::Phases;
use super::ranks::Team;
use super::session::{self, Base, Demo, Language};
use crate::behaviour::{self, Suite};
use crate::checkpoint::{Loaded, Store, TrainState};
use crate::config::{Config, Init, PEFT};
use crate::data::{Batch, Cursor, Dataset, LoadOptions, Packing, preview};
use crate::freeze;
use crate::guard::Guard;
use crate::optim::Share;
use crate::plan::Shapes;
use crate::preflight::{self, Outputs};
use crate::progress::{Progress, Work};
use crate::ranks::Place;
use crate::sources::{Files, Sources};
use crate::stop;
use before::{go_on_from, habits, mixed, planned, with_steps};
use log::Log;
use q4_core::memory::{self, Budget};
use q4_core::{Code, Error, Result, ThreadPool};
use serde_json::{Value, json};
use source::{Source, rows};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use tch::Device;

mod ask;
mod before;
mod keep;
mod log;
mod source;
mod step;
mod team;

pub use team::run;

/// Makes something that answers as an exported model does.
pub type Serve<'a> = &'a dyn Fn(&Path) -> Box<dyn behaviour::Answer>;

/// What a run is told beside its configuration.
pub struct Invocation<'a> {
    /// Threads.
    pub threads: usize,
    /// This process among others that share the run.
    pub place: Option<Place>,
    /// Lines of progress on stderr.
    pub progress: bool,
    /// The model inside the program.
    pub demo: Demo<'a>,
    /// Plan and data are shown, nothing is trained.
    pub dry_run: bool,
    /// So many rows are shown as they would be learnt, nothing is trained.
    pub preview: Option<usize>,
    /// Nothing is trained: the losses and behaviours of the model as it is.
    pub eval_only: bool,
    /// A checkpoint of another configuration, model or data is gone on from, too.
    pub allow_changes: bool,
    /// The command as it was given, for advice.
    pub line: &'a str,
    /// Asks a finished model through the program that serves it; `None`: through the trainer's own forward
    /// pass.
    pub serve: Option<Serve<'a>>,
    /// Is shown what the user may want to know.
    pub say: &'a dyn Fn(&str),
    /// Is shown what the user must know.
    pub warn: &'a dyn Fn(&str),
}

/// Runs it, alone or with the ranks of a team; the value is the report. `interrupted` in
/// it names the signal that ended the run early.
fn alone(c: &Config, cx: &Invocation<'_>, team: Option<Rc<Team>>) -> Result<Value> {
    let began = Instant::now();
    let trains = !cx.dry_run && !cx.eval_only && cx.preview.is_none();
    if c.learns_nothing() && !cx.eval_only {
        return Err(Error::new(Code::Usage, "data.train")
            .need("at least one file")
            .have("none")
            .fix("--set data.train=FILE, or --eval-only to judge by data.valid"));
    }
    if trains {
        preflight::keeps_something(c, cx.line)?;
    }
    if !cx.eval_only && cx.preview.is_none() {
        preflight::names(c, cx.line)?;
    }
    if let Some(rows) = cx.preview {
        return shown(c, cx, rows);
    }
    let device = session::device(&c.model.device, cx.threads)?;
    let share = cx.place.as_ref().map_or(Share::WHOLE, |p| Share { rank: p.rank, of: p.size });
    let (c, ranks) = &team::of_all_ranks(c, cx, share.of);
    if let Some(team) = &team {
        team.connect(device)?;
    }
    let pool = Arc::new(ThreadPool::new(cx.threads));
    let base = Base::open(&c.model, cx.demo)?;
    let named = c.layouts().len();
    let c = &session::settled(c, &base)?;
    if !cx.eval_only && c.layouts().len() != named {
        preflight::names(c, cx.line)?;
    }
    let products = session::products(c, &base, device, &pool)?;
    if let Some(products) = &products {
        (cx.say)(&products.to_string());
        match products.downgraded() {
            0 => {}
            n => (cx.warn)(&format!("{n} products run on a dense copy, as quant.compute agrees to")),
        }
    }
    let limit = c.memory.limit.as_deref().map(memory::parse_bytes).transpose()?;
    let plan = planned(c, &base, device, products.as_ref(), share)?;
    (cx.say)(&plan.to_string());
    let free = device::Memory::of(device);
    // Ranks of one machine share its memory.
    let local = cx.place.as_ref().map_or(1, |p| p.local_size as u64);
    let free = if device.is_cuda() { free.device_free } else { free.host_free / local };
    plan.check(&Budget::new(limit.unwrap_or(free - free / 20)))?;
    if !cx.eval_only {
        // Whoever writes a checkpoint writes all of it.
        let all = planned(c, &base, device, products.as_ref(), Share::WHOLE)?;
        preflight::space(c, &preflight::bytes(c, &Shapes::of(&base.config), &all, base.width()))?;
    }

    let language = if c.model.shape.is_some() { None } else { Some(base.language()?) };
    let read = |paths: &[PathBuf], packing, supervise| -> Result<Option<Dataset>> {
        let Some(language) = language.as_ref().filter(|_| !paths.is_empty()) else { return Ok(None) };
        let max_len = (packing != Packing::Stream).then_some(c.data.seq + 1);
        let options = LoadOptions { format: c.data.format, max_len, truncate: c.data.truncate, supervise };
        language.load(paths, &options, &pool).map(Some)
    };
    let mut train = read(&c.data.train.paths, c.data.packing, c.data.supervise)?;
    let valid = read(&c.data.valid, c.data.eval_packing, c.data.eval_supervise)?;
    for (what, data) in [("train", &train), ("valid", &valid)] {
        if let Some(data) = data {
            (cx.say)(&format!("{what}: {}", data.report));
            data.notes.iter().for_each(|note| (cx.warn)(note));
        }
    }
    if let Some(data) = &mut train {
        data.mix(&c.data.train.weights)?;
        mixed(c, data).iter().for_each(|line| (cx.say)(line));
    }
    let c = &with_steps(c, cx, train.as_ref())?;
    if cx.dry_run {
        let moves = Shapes::of(&base.config).freeze(&c.train.freeze)?.0.moving(c);
        (cx.say)(&format!("what moves: {}", freeze::brief(&moves).join(", ")));
        return Ok(json!({ "schema": "q4.train/1", "plan": plan, "train": train.map(|d| d.report),
            "valid": valid.map(|d| d.report), "steps": c.train.steps, "moves": moves, "config": c.to_toml()? }));
    }
    if let Some(team) = &team {
        team::compared(team, c, [train.as_ref(), valid.as_ref()])?;
    }
    let mut sources = Sources::default();
    let mut outputs = Outputs::default();
    let mut from = None;
    if trains {
        if team.as_ref().is_none_or(|t| t.is_first()) {
            outputs = preflight::hold(c)?;
        }
        let rows = |data: &Option<Dataset>| data.as_ref().map_or(0, |d| d.report.rows);
        if c.model.shape.is_none() {
            sources = Sources {
                model: base.digest(c.model.init == Init::Checkpoint)?,
                train: Files::of(&c.data.train.paths, rows(&train))?,
                valid: Files::of(&c.data.valid, rows(&valid))?,
            };
        }
        from = go_on_from(c, cx, outputs.store.as_ref(), team.as_deref(), &sources)?;
        habits(c, cx, valid.is_some());
    }
    let mut engine = session::engine(c, &base, device, pool, products.as_ref(), share)?;
    engine.team = team.clone();
    let (moving, all) = engine.params.counts();
    (cx.say)(&format!("{moving} of {all} parameters move, on {}", device::name(device)));
    let mut phases = Phases::new(device, limit);
    phases.base_bytes = engine.params.base_bytes();
    let log = if trains && share.rank == 0 {
        Log::open(c, cx, from.as_ref().map(|(_, s)| s))?
    } else {
        Log::none(cx)
    };
    let mut run = Run {
        c,
        cx,
        base: &base,
        language: language.as_ref(),
        train: train.as_ref(),
        valid: valid.as_ref(),
        team,
        ranks: *ranks,
        planned: plan.part("states"),
        device,
        phases,
        progress: Progress::new(c.train.steps, Progress::plan(c, valid.is_some())),
        log,
        sources,
        engine,
        guard: Guard::new(c.guard),
        step: 0,
        tokens: 0,
        owed: false,
        best: None,
        stale: 0,
        evaluated: None,
        saved: None,
        good: None,
        unsaved: None,
        before: None,
    };
    let mut report = if cx.eval_only { run.judge()? } else { run.whole(&outputs, from)? };
    report["schema"] = "q4.train/1".into();
    if let Some(lora) = &c.lora {
        report["base"] = json!(lora.base);
        report["base_bytes"] = run.phases.base_bytes.into();
    }
    if let Some(products) = &products {
        report["executed"] = json!(products.executed());
    }
    report["seconds"] = began.elapsed().as_secs_f64().into();
    report["predicted_peak_bytes"] = plan.peak().map_or(0, |p| p.bytes()).into();
    Ok(report)
}

/// The first rows of the data, as the model would see them.
fn shown(c: &Config, cx: &Invocation<'_>, rows: usize) -> Result<Value> {
    if c.model.shape.is_some() {
        return Err(Error::new(Code::Usage, "--preview")
            .need("a model with a tokenizer")
            .have("model.shape"));
    }
    let language = Base::open(&c.model, cx.demo)?.language()?;
    let d = &c.data;
    let max_len = (d.packing != Packing::Stream).then_some(d.seq + 1);
    let options = LoadOptions { format: d.format, max_len, truncate: d.truncate, supervise: d.supervise };
    let pool = ThreadPool::new(cx.threads);
    let shown = preview(&d.train.paths, &language.text(), &options, rows, &pool)?;
    Ok(json!({ "schema": "q4.train/1", "preview": shown }))
}

struct Run<'a> {
    c: &'a Config,
    cx: &'a Invocation<'a>,
    base: &'a Base,
    language: Option<&'a Language>,
    train: Option<&'a Dataset>,
    valid: Option<&'a Dataset>,
    /// The other ranks.
    team: Option<Rc<Team>>,
    /// Ranks that the micro-batches of a step were first counted for.
    ranks: usize,
    /// Bytes of moments, as planned.
    planned: u64,
    device: Device,
    phases: Phases,
    progress: Progress,
    log: Log<'a>,
    sources: Sources,
    engine: Engine,
    guard: Guard,
    step: u64,
    tokens: u64,
    /// What follows the last step (evaluation, samples, checkpoint) is still to be done.
    owed: bool,
    /// The smallest held-out loss and its step.
    best: Option<(f64, u64)>,
    /// Evaluations since without a better loss.
    stale: u32,
    /// The last evaluation: step and loss.
    evaluated: Option<(u64, f64)>,
    /// The last checkpoint: step, whether something was owed then, where.
    saved: Option<(u64, bool, PathBuf)>,
    /// The last checkpoint behind which a good step was taken.
    good: Option<(u64, PathBuf)>,
    /// Why the last checkpoint could not be written.
    unsaved: Option<Error>,
    /// The rows that were answered right before the first step.
    before: Option<Suite>,
}

/// An error on the way, with where the data stood and what the guard knew when the last step was whole.
struct Cut {
    e: Error,
    cursor: Cursor,
    guard: Guard,
}

/// Stops what one process does behind a step as soon as it is asked to end.
fn go_on() -> Result<()> {
    ended(stop::heard())
}

/// The same, as soon as all ranks know.
fn asked_to_end() -> Result<()> {
    ended(stop::asked())
}

fn ended(signal: Option<stop::Signal>) -> Result<()> {
    match signal {
        None => Ok(()),
        Some(signal) => Err(Error::new(Code::Internal, format!("ended by {}", signal.name()))),
    }
}

impl Run<'_> {
    /// The model as it is.
    fn judge(&mut self) -> Result<Value> {
        let mut report = json!({});
        if let Some(loss) = self.loss()? {
            (self.cx.say)(&format!("valid loss {loss:.6}"));
            report["valid_loss"] = loss.into();
        }
        if let Some(suite) = self.suite()? {
            let found = self.ask(&suite, None)?;
            report["behaviour"] = json!(found.groups);
            report["leaks"] = found.leaks.into();
        }
        Ok(report)
    }

    fn whole(&mut self, outputs: &Outputs, from: Option<(Loaded, TrainState)>) -> Result<Value> {
        let store = outputs.store.as_ref();
        let data = self.train;
        let mut source = Source::new(self, data)?;
        let resumed = from.map(|(loaded, state)| self.resume(&loaded, state, &mut source)).transpose()?;
        let suite = self.suite()?;
        if let Some(suite) = &suite {
            self.first(|run| run.remember(suite))?;
        }
        let at_first = if resumed.is_none() { self.first_look()? } else { None };
        let (started, first) = (Instant::now(), self.step);
        stop::ask_first();
        let last = match self.course(store, &mut source, suite.as_ref()) {
            Ok(last) => last,
            Err(cut) => return Err(self.rescue(store, cut.e, cut.cursor, cut.guard)),
        };
        device::synchronize(self.device)?;
        let mut report = json!({
            "steps": self.step, "steps_run": self.step - first, "tokens": self.tokens,
            "train_loss": last.loss, "grad_norm": last.norm, "skipped": self.guard.skipped(),
            "train_seconds": started.elapsed().as_secs_f64(), "tokens_per_s": self.progress.tokens_per_s(),
            "valid_loss_before": at_first, "resumed_from": resumed, "phases": self.phases.samples,
            "peak_bytes": self.phases.peak().max(device::Memory::of(self.device).peak(self.device)),
        });
        report["ranks"] = self.memory_of_ranks(self.planned, report["peak_bytes"].as_u64().unwrap_or(0))?;
        if let Some(signal) = stop::asked().filter(|_| self.keeps() || !self.is_over()) {
            return self.interrupted(report, signal, store, source.cursor());
        }
        // A run that was gone on with after its last step has not looked yet.
        let loss = match self.evaluated {
            Some((step, loss)) if step == self.step => Ok(Some(loss)),
            _ => self.loss(),
        };
        let loss = match (loss, stop::asked()) {
            (Err(_), Some(signal)) => return self.interrupted(report, signal, store, source.cursor()),
            (loss, _) => loss?,
        };
        report["valid_loss"] = loss.into();
        let cursor = source.cursor();
        self.first(|run| run.without_team(|run| run.finish(report, store, cursor, suite.as_ref())))
    }

    /// Exports, and asks what was exported.
    fn finish(
        &mut self,
        mut report: Value,
        store: Option<&Store>,
        cursor: Cursor,
        suite: Option<&Suite>,
    ) -> Result<Value> {
        report["best_valid_loss"] = self.best.map(|b| b.0).into();
        report["checkpoint"] = json!(self.saved.as_ref().map(|s| &s.2));
        let exported = self.choose(store)?;
        let written = match self.export() {
            Ok(written) => written,
            Err(e) => return Err(self.not_exported(e)),
        };
        if !written.is_empty() {
            report["exported_step"] = exported.into();
        }
        report["exports"] = json!(written);
        if let Some(e) = self.unsaved.take() {
            self.log.page(true);
            return Err(e.fix("make room; what was exported is whole"));
        }
        if let Some(suite) = suite {
            let served = written.iter().find(|p| !p.ends_with("bf16") && !p.ends_with(PEFT)).cloned();
            let found = match (self.ask(suite, served.as_deref()), stop::heard()) {
                (Err(_), Some(signal)) => return self.interrupted(report, signal, store, cursor),
                (found, _) => found?,
            };
            self.tell(&found);
            report["behaviour"] = json!(found.groups);
            report["leaks"] = found.leaks.into();
            report["keep"] = self.kept(&found).into();
            self.log.page(true);
            found.gate(&self.c.behaviour.gates)?;
        }
        self.log.page(true);
        Ok(report)
    }

    /// The report of a run that was asked to end, with where it stands written down.
    fn interrupted(
        &mut self,
        mut report: Value,
        signal: stop::Signal,
        store: Option<&Store>,
        cursor: Cursor,
    ) -> Result<Value> {
        let (guard, exported) = (self.guard.clone(), report["exports"].is_array());
        // What was exported is what there is to keep where there are no checkpoints.
        let kept = match !self.keeps() && exported {
            true => None,
            false => self.put_down(store, cursor, guard, self.owed)?,
        };
        report["interrupted"] = signal.name().into();
        report["exit"] = signal.exit().into();
        report["checkpoint"] = json!(self.saved.as_ref().map(|s| &s.2));
        report["kept"] = json!(kept);
        self.log.page(true);
        Ok(report)
    }

    /// The held-out loss of the model as it came.
    fn first_look(&mut self) -> Result<Option<f64>> {
        let began = Instant::now();
        let Some(loss) = self.loss()? else { return Ok(None) };
        self.progress.other(Work::Eval, began.elapsed());
        (self.cx.say)(&format!("before the first step: valid loss {loss:.5}"));
        self.log.numbers("eval", 0, &[("loss", loss), ("ppl", loss.exp())]);
        Ok(Some(loss))
    }

    /// Steps and what follows each, until the end or until the run is asked to end.
    fn course(
        &mut self,
        store: Option<&Store>,
        source: &mut Source<'_>,
        suite: Option<&Suite>,
    ) -> Result<Report, Box<Cut>> {
        let mut last = Report::default();
        loop {
            let (cursor, guard) = (source.cursor(), self.guard.clone());
            let result = match self.listen() {
                Ok(()) if stop::asked().is_some() || self.is_over() => return Ok(last),
                Ok(()) if self.owed => self.follow_up(store, source, suite),
                Ok(()) => self.advance(source).map(|report| last = report),
                Err(e) => Err(e),
            };
            if let Err(e) = result {
                // The step is whole: it counts, and the data behind it is next.
                let whole = self.engine.moved == Moved::Wholly;
                let (cursor, guard) =
                    if whole { (source.cursor(), self.guard.clone()) } else { (cursor, guard) };
                return Err(Box::new(Cut { e, cursor, guard }));
            }
        }
    }

    /// Nothing is left to train, and nothing to do behind the last step.
    fn is_over(&self) -> bool {
        !self.owed && (self.step >= self.c.train.steps || self.is_stale())
    }

    fn is_stale(&self) -> bool {
        self.c.eval.patience > 0 && self.stale >= self.c.eval.patience
    }

    /// One step, its line and its record.
    fn advance(&mut self, source: &mut Source<'_>) -> Result<Report> {
        let c = self.c;
        let began = Instant::now();
        self.engine.moved = Moved::No;
        let micro: Vec<Batch> = (0..c.train.accumulate).map(|_| source.next()).collect::<Result<_>>()?;
        let lr = c.schedule().lr(self.step);
        self.phases.begin(self.step, c.train.profile.contains(&self.step));
        let report = self.one(&micro, lr)?;
        self.engine.moved = Moved::No;
        self.step += 1;
        self.owed = true;
        let tokens = micro.iter().map(|b| (b.rows * b.seq) as u64).sum();
        self.tokens += tokens;
        self.progress.step(began.elapsed(), tokens);
        if self.step % c.train.log_every == 0 {
            let memory = device::Memory::of(self.device).used(self.device);
            let fields = [
                ("loss", report.loss),
                ("grad_norm", report.norm),
                ("lr", lr),
                ("supervised", report.supervised as f64),
                ("tokens", self.tokens as f64),
                ("tokens_per_s", self.progress.tokens_per_s()),
                ("memory_bytes", memory as f64),
                ("skipped", self.guard.skipped() as f64),
            ];
            self.log.numbers("train", self.step, &fields);
            self.log.page(false);
            if self.cx.progress {
                (self.cx.say)(&self.progress.line(self.step, report.loss, lr, Some(memory)));
            }
        }
        Ok(report)
    }

    /// Evaluation, samples, behaviour and checkpoint, where they are due. Asked to end, it leaves everything
    /// as it was before, and owed.
    fn follow_up(&mut self, store: Option<&Store>, source: &Source<'_>, suite: Option<&Suite>) -> Result<()> {
        let before = (self.best, self.stale, self.evaluated);
        let result = self.look(suite);
        if result.is_err() && stop::asked().is_some() {
            (self.best, self.stale, self.evaluated) = before;
            return Ok(());
        }
        let metric = result?;
        self.owed = false;
        let c = self.c;
        let better = metric.is_some() && self.best.is_some_and(|(_, step)| step == self.step);
        let due = c.checkpoint.every > 0 && self.step % c.checkpoint.every == 0;
        if self.keeps() && (due || better && c.checkpoint.keep_best || self.is_over()) {
            let began = Instant::now();
            let guard = self.guard.clone();
            self.unsaved = match self.save(store, source.cursor(), guard, false, metric) {
                Ok(_) => None,
                Err(e) => {
                    (self.cx.warn)(&format!("no checkpoint of step {}: {e}", self.step));
                    Some(e)
                }
            };
            self.progress.other(Work::Save, began.elapsed());
        }
        if self.is_stale() && self.step < c.train.steps {
            (self.cx.say)(&format!("no better valid loss in {} evaluations: training ends", self.stale));
        }
        Ok(())
    }

    /// Evaluates, samples and asks, where it is due; the held-out loss.
    fn look(&mut self, suite: Option<&Suite>) -> Result<Option<f64>> {
        let (c, step) = (self.c, self.step);
        let due = |every: u64| every > 0 && step % every == 0;
        let mut metric = None;
        let began = Instant::now();
        if (due(c.eval.every) || step >= c.train.steps)
            && let Some(loss) = self.loss()?
        {
            self.progress.other(Work::Eval, began.elapsed());
            let better = loss.is_finite() && self.best.is_none_or(|(best, _)| loss < best);
            if better {
                self.best = Some((loss, step));
            }
            self.stale = if better { 0 } else { self.stale + 1 };
            (metric, self.evaluated) = (Some(loss), Some((step, loss)));
            (self.cx.say)(&format!(
                "step {step}: valid loss {loss:.5}{}",
                if better { ", the best so far" } else { "" }
            ));
            self.log.numbers("eval", step, &[("loss", loss), ("ppl", loss.exp())]);
        }
        let began = Instant::now();
        if due(c.sample.every) {
            self.first(Self::sample)?;
            self.progress.other(Work::Sample, began.elapsed());
        }
        let began = Instant::now();
        if due(c.behaviour.every)
            && let Some(suite) = suite
        {
            self.first(|run| {
                let found = run.ask(suite, None)?;
                run.tell(&found);
                Ok(())
            })?;
            self.progress.other(Work::Behaviour, began.elapsed());
        }
        Ok(metric)
    }
}
