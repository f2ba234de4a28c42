//! A training run from its first step to its export: what the configuration says, in order.
use super::answer::Speaker;
use super::engine::{Engine, Report, Rows};
use super::export::{self, Form};
use super::loss::Target;
use super::phases::Phases;
use super::session::{self, Base, Demo, Language};
use super::weights::{bytes, restore};
use super::{Tch, device};
use crate::behaviour::{self, Suite};
use crate::checkpoint::{Keep, Loaded, Store, TrainState};
use crate::config::{Config, Init, Loss};
use crate::data::{Batch, Dataset, LoadOptions, Loader, LoaderOptions, Packing, eval_batches};
use crate::guard::{Guard, Verdict};
use crate::metrics::Metrics;
use crate::optim::Hyper;
use crate::plan::{self, Machine, Shapes};
use crate::progress::Progress;
use crate::rng::{Philox, streams};
use q4_core::memory::{self, Budget};
use q4_core::{Code, Error, Result, ThreadPool};
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tch::{Device, Tensor};

/// Makes something that answers as an exported model does.
pub type Serve<'a> = &'a dyn Fn(&Path) -> Box<dyn behaviour::Answer>;

/// What a run is told beside its configuration.
pub struct Invocation<'a> {
    /// Threads.
    pub threads: usize,
    /// Lines of progress on stderr.
    pub progress: bool,
    /// The model inside the program.
    pub demo: Demo<'a>,
    /// Plan and data are shown, nothing is trained.
    pub dry_run: bool,
    /// Nothing is trained: the losses and behaviours of the model as it is.
    pub eval_only: bool,
    /// Asks a finished model through the program that serves it; `None`: through the trainer's own forward
    /// pass.
    pub serve: Option<Serve<'a>>,
    /// Is shown what the user should know.
    pub say: &'a dyn Fn(&str),
}

/// Runs it; the value is the report.
pub fn run(c: &Config, cx: &Invocation<'_>) -> Result<Value> {
    let began = Instant::now();
    let device = session::device(&c.model.device, cx.threads)?;
    let pool = Arc::new(ThreadPool::new(cx.threads));
    let base = Base::open(&c.model, cx.demo)?;
    let limit = c.memory.limit.as_deref().map(memory::parse_bytes).transpose()?;
    let plan = predicted(c, &base, device);
    (cx.say)(&plan.to_string());
    let free = device::Memory::of(device);
    let free = if device.is_cuda() { free.device_free } else { free.host_free };
    plan.check(&Budget::new(limit.unwrap_or(free - free / 20)))?;

    let language = if c.model.shape.is_some() { None } else { Some(base.language()?) };
    let read = |paths: &[PathBuf], packing, supervise| -> Result<Option<Dataset>> {
        let Some(language) = language.as_ref().filter(|_| !paths.is_empty()) else { return Ok(None) };
        let max_len = (packing != Packing::Stream).then_some(c.data.seq + 1);
        let options = LoadOptions { format: c.data.format, max_len, truncate: c.data.truncate, supervise };
        language.load(paths, &options, &pool).map(Some)
    };
    let train = read(&c.data.train, c.data.packing, c.data.supervise)?;
    let valid = read(&c.data.valid, c.data.eval_packing, c.data.eval_supervise)?;
    for (what, data) in [("train", &train), ("valid", &valid)] {
        if let Some(data) = data {
            (cx.say)(&format!("{what}: {:?}", data.report));
        }
    }
    if cx.dry_run {
        return Ok(json!({ "schema": "q4.train/1", "plan": plan, "train": train.map(|d| d.report),
            "valid": valid.map(|d| d.report), "config": c.to_toml()? }));
    }
    let engine = session::engine(c, &base, device, pool)?;
    let (moving, all) = engine.params.counts();
    (cx.say)(&format!("{moving} of {all} parameters move, on {device:?}"));
    let mut run = Run {
        c,
        cx,
        base: &base,
        language: language.as_ref(),
        train: train.as_ref(),
        valid: valid.as_ref(),
        device,
        phases: Phases::new(device, limit),
        engine,
        guard: Guard::new(c.guard),
        step: 0,
        tokens: 0,
        best: None,
        stale: 0,
        before: None,
    };
    let mut report = if cx.eval_only { run.judge()? } else { run.whole()? };
    report["schema"] = "q4.train/1".into();
    report["seconds"] = began.elapsed().as_secs_f64().into();
    report["predicted_peak_bytes"] = plan.peak().map_or(0, |p| p.bytes()).into();
    Ok(report)
}

fn predicted(c: &Config, base: &Base, device: Device) -> plan::Plan {
    let machine = Machine {
        compute: if device.is_cuda() { 2 } else { 4 },
        fused_attention: c.data.packing != Packing::Documents,
        // On the host: libtorch itself and the data. On the device the allocator's figures leave the context
        // out, but not cuBLAS's workspace and what is lost to rounding.
        context: if device.is_cuda() { 100 << 20 } else { 300 << 20 },
    };
    plan::predict(&Shapes::of(&base.config), c, &machine)
}

struct Run<'a> {
    c: &'a Config,
    cx: &'a Invocation<'a>,
    base: &'a Base,
    language: Option<&'a Language>,
    train: Option<&'a Dataset>,
    valid: Option<&'a Dataset>,
    device: Device,
    phases: Phases,
    engine: Engine,
    guard: Guard,
    step: u64,
    tokens: u64,
    best: Option<f64>,
    /// Evaluations without a better loss.
    stale: u32,
    /// The rows that were answered right before the first step.
    before: Option<Suite>,
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

    fn whole(&mut self) -> Result<Value> {
        let c = self.c;
        let store = match &c.checkpoint.dir {
            Some(dir) => {
                Some(Store::open(dir, Keep { last: c.checkpoint.keep, best: c.checkpoint.keep_best })?)
            }
            None => None,
        };
        let data = self.train;
        let mut source = Source::new(self, data)?;
        let resumed = match store.as_ref().filter(|_| c.checkpoint.resume) {
            Some(store) => store.newest()?.map(|loaded| self.resume(&loaded, &mut source)).transpose()?,
            None => None,
        };
        let log = c.checkpoint.dir.as_ref().or(c.export.dir.as_ref());
        let metrics_path = log.map(|d| d.join("metrics.ndjson"));
        let mut metrics = match (&metrics_path, &c.checkpoint.dir) {
            (Some(path), Some(_)) => Some(Metrics::open(path, resumed)?),
            _ => None,
        };
        let suite = self.suite()?;
        if let Some(suite) = &suite {
            self.remember(suite)?;
        }
        let schedule = c.schedule();
        let mut progress = Progress::new(c.train.steps);
        let (mut saved, mut last, started, first) = (None, Report::default(), Instant::now(), self.step);
        while self.step < c.train.steps {
            let micro: Vec<Batch> = (0..c.train.accumulate).map(|_| source.next()).collect::<Result<_>>()?;
            let lr = schedule.lr(self.step);
            self.phases.begin(self.step, c.train.profile.contains(&self.step));
            last = self.one(&micro, lr)?;
            self.step += 1;
            let tokens = micro.iter().map(|b| (b.rows * b.seq) as u64).sum();
            self.tokens += tokens;
            progress.step(tokens);
            let due = |every: u64| every > 0 && self.step % every == 0;
            if self.step % c.train.log_every == 0 {
                let memory = device::Memory::of(self.device).used(self.device);
                if let Some(m) = &mut metrics {
                    let fields = [
                        ("loss", last.loss),
                        ("grad_norm", last.norm),
                        ("lr", lr),
                        ("supervised", last.supervised as f64),
                        ("tokens_per_s", progress.tokens_per_s()),
                        ("memory_bytes", memory as f64),
                        ("skipped", self.guard.skipped() as f64),
                    ];
                    m.log("train", self.step, &fields)?;
                }
                if self.cx.progress {
                    (self.cx.say)(&progress.line(self.step, last.loss, lr, Some(memory)));
                }
            }
            let (eval, sample, ask, save) =
                (due(c.eval.every), due(c.sample.every), due(c.behaviour.every), due(c.checkpoint.every));
            let mut metric = None;
            if eval && let Some(loss) = self.loss()? {
                metric = Some(loss);
                self.stale = if self.best.is_some_and(|b| b <= loss) { self.stale + 1 } else { 0 };
                self.best = Some(self.best.map_or(loss, |b| b.min(loss)));
                (self.cx.say)(&format!("step {}: valid loss {loss:.5}", self.step));
                if let Some(m) = &mut metrics {
                    m.log("eval", self.step, &[("loss", loss), ("ppl", loss.exp())])?;
                }
            }
            if sample {
                self.sample(metrics.as_mut())?;
            }
            if ask && let Some(suite) = &suite {
                let found = self.ask(suite, None)?;
                self.tell(&found, metrics.as_mut())?;
            }
            if save && let Some(store) = &store {
                saved = Some(self.save(store, &source, metric)?);
            }
            if c.eval.patience > 0 && self.stale >= c.eval.patience {
                (self.cx.say)(&format!("no better valid loss in {} evaluations: training ends", self.stale));
                break;
            }
        }
        device::synchronize(self.device)?;
        let seconds = started.elapsed().as_secs_f64();
        let loss = self.loss()?;
        if let (Some(store), true) = (&store, self.step > 0 && self.step % c.checkpoint.every.max(1) != 0) {
            saved = Some(self.save(store, &source, loss)?);
        }
        let mut report = json!({
            "steps": self.step, "steps_run": self.step - first, "tokens": self.tokens,
            "train_loss": last.loss, "grad_norm": last.norm, "valid_loss": loss, "skipped": self.guard.skipped(),
            "train_seconds": seconds, "tokens_per_s": progress.tokens_per_s(),
            "checkpoint": saved, "resumed_from": resumed, "phases": self.phases.samples,
            "peak_bytes": self.phases.peak().max(device::Memory::of(self.device).peak(self.device)),
        });
        let written = self.export()?;
        report["exports"] = json!(written);
        if let Some(suite) = &suite {
            let served = written.iter().find(|p| !p.ends_with("bf16")).cloned();
            let found = self.ask(suite, served.as_deref())?;
            self.tell(&found, metrics.as_mut())?;
            report["behaviour"] = json!(found.groups);
            report["leaks"] = found.leaks.into();
            report["keep"] = self.kept(&found).into();
            self.page(metrics.as_ref(), metrics_path.as_deref())?;
            found.gate(&c.behaviour.gates)?;
        }
        self.page(metrics.as_ref(), metrics_path.as_deref())?;
        Ok(report)
    }

    fn page(&self, metrics: Option<&Metrics>, path: Option<&Path>) -> Result<()> {
        match (metrics, path) {
            (Some(m), Some(path)) => {
                m.write_page(&path.with_extension("html"), "q4 train", &self.c.to_toml()?)
            }
            _ => Ok(()),
        }
    }

    /// One optimiser step.
    fn one(&mut self, micro: &[Batch], lr: f64) -> Result<Report> {
        let o = &self.c.optimizer;
        let hyper = Hyper {
            lr: lr as f32,
            beta1: o.beta1 as f32,
            beta2: o.beta2 as f32,
            eps: o.eps as f32,
            weight_decay: 0.0,
            step: self.step + 1,
            grad_scale: 1.0,
        };
        let ids: Vec<Vec<u32>> = micro.iter().map(|b| b.ids.iter().map(|id| *id as u32).collect()).collect();
        let wanted: Vec<Option<Tensor>> = micro.iter().map(|b| self.wanted(b)).collect::<Result<_>>()?;
        let rows: Vec<Rows<'_>> =
            micro.iter().zip(&ids).zip(&wanted).map(|((b, ids), w)| rows(b, ids, w.as_ref())).collect();
        let guard = &mut self.guard;
        let say = self.cx.say;
        let step = self.step;
        // With the update in the backward pass the norm of the step before stands for this one's.
        let last_norm = self.engine.last_norm;
        let mut allow = |loss: f64, norm: Option<f64>| match guard.check(loss, norm.unwrap_or(last_norm)) {
            Verdict::Go => Ok(true),
            Verdict::Skip(reason) => {
                say(&format!("step {step} is skipped: {reason}"));
                Ok(false)
            }
            Verdict::Stop(reason) => Err(Error::new(Code::NonFinite, format!("step {step}: {reason}"))
                .need("steps that can be taken")
                .fix("a smaller optimizer.lr; the last checkpoint is intact")),
        };
        self.engine.step(&rows, &hyper, &mut allow, &mut self.phases)
    }

    /// Hidden states to match, for the scalar loss: noise that is a function of the seed.
    fn wanted(&self, batch: &Batch) -> Result<Option<Tensor>> {
        if self.c.train.loss == Loss::Ce {
            return Ok(None);
        }
        let hidden = self.base.config.hidden_size;
        let rng = Philox::new(self.c.train.seed, 0, streams::SAMPLE);
        let mut values = vec![0f32; batch.ids.len() * hidden];
        self.engine.kernels.fill(&mut values, &|i| rng.normal(i));
        let shape = [batch.ids.len() as i64, hidden as i64];
        Tensor::f_from_slice(&values).t()?.f_view(shape).t()?.f_to_device(self.device).t().map(Some)
    }

    /// Mean loss over the held-out data.
    fn loss(&mut self) -> Result<Option<f64>> {
        let Some(valid) = self.valid else { return Ok(None) };
        let (d, e) = (&self.c.data, &self.c.eval);
        let or = |own: usize, other: usize| if own == 0 { other } else { own };
        let (mut sum, mut count) = (0.0, 0);
        for batch in eval_batches(valid, or(e.rows, d.rows), or(e.seq, d.seq), d.eval_packing, 0) {
            let ids: Vec<u32> = batch.ids.iter().map(|id| *id as u32).collect();
            if batch.supervised > 0 {
                let (s, n) = self.engine.evaluate(&rows(&batch, &ids, None))?;
                sum += s;
                count += n;
            }
        }
        Ok((count > 0).then(|| sum / count as f64))
    }

    fn sample(&mut self, mut metrics: Option<&mut Metrics>) -> Result<()> {
        let (c, step) = (self.c, self.step);
        for prompt in &c.sample.prompts {
            let answer = self.speaker(c.sample.tokens)?.greedy(prompt)?;
            (self.cx.say)(&format!("step {step}: {prompt:?} -> {answer:?}"));
            if let Some(m) = &mut metrics {
                let fields = [("prompt", prompt.as_str().into()), ("answer", answer.into())];
                m.log_values(
                    "sample",
                    step,
                    fields.map(|(k, v): (&str, Value)| (k.to_owned(), v)).into_iter().collect(),
                )?;
            }
        }
        Ok(())
    }

    fn speaker(&mut self, max_tokens: usize) -> Result<Speaker<'_>> {
        let language = self
            .language
            .ok_or_else(|| Error::new(Code::Usage, "a model without a tokenizer cannot answer"))?;
        let Language { tokenizer, template, stop, .. } = language;
        Ok(Speaker { engine: &mut self.engine, tokenizer, template, stop, max_tokens })
    }

    fn suite(&self) -> Result<Option<Suite>> {
        self.c.behaviour.suite.as_deref().map(Suite::load).transpose()
    }

    /// Asks the whole suite; `served`: an exported model, asked through the program that serves it.
    fn ask(&mut self, suite: &Suite, served: Option<&Path>) -> Result<behaviour::Report> {
        if let (Some(serve), Some(model)) = (self.cx.serve, served) {
            return suite.run(&mut *serve(model));
        }
        let mut speaker = self.speaker(self.c.behaviour.tokens)?;
        suite.run(&mut |prompt: &str| speaker.greedy(prompt))
    }

    /// What the model knows before the first step, kept beside the checkpoints for runs that go on.
    fn remember(&mut self, suite: &Suite) -> Result<()> {
        let path = self.c.checkpoint.dir.as_ref().map(|d| d.join("behaviour-before.json"));
        if self.step > 0 {
            let Some(text) = path.and_then(|p| std::fs::read_to_string(p).ok()) else { return Ok(()) };
            self.before = serde_json::from_str(&text).ok().map(|cases| Suite { cases });
            return Ok(());
        }
        let found = self.ask(suite, None)?;
        let right = suite.passed_in(&found);
        (self.cx.say)(&format!(
            "before training {} of {} rows are answered right",
            right.cases.len(),
            suite.cases.len()
        ));
        if let Some(path) = path {
            let text = serde_json::to_string(&right.cases).unwrap_or_default();
            std::fs::write(&path, text).map_err(|e| Error::io(&path, &e))?;
        }
        self.before = Some(right);
        Ok(())
    }

    /// Share of what was answered right before and still is, among the rows of the group `keep`.
    fn kept(&self, found: &behaviour::Report) -> Option<f64> {
        let before = self.before.as_ref()?;
        let known = |o: &behaviour::Outcome| {
            o.group == "keep" && before.cases.iter().any(|c| c.group == o.group && c.prompt == o.prompt)
        };
        let of: Vec<_> = found.outcomes.iter().filter(|o| known(o)).collect();
        (!of.is_empty()).then(|| of.iter().filter(|o| o.passed).count() as f64 / of.len() as f64)
    }

    fn tell(&self, found: &behaviour::Report, metrics: Option<&mut Metrics>) -> Result<()> {
        let mut fields = serde_json::Map::new();
        for (name, group) in &found.groups {
            (self.cx.say)(&format!(
                "{name}: {} of {} right, {} leaks",
                group.passed, group.cases, group.leaks
            ));
            fields.insert(name.clone(), group.rate.into());
        }
        fields.insert("leaks".into(), found.leaks.into());
        metrics.map_or(Ok(()), |m| m.log_values("behaviour", self.step, fields))
    }

    /// Everything in the configured layouts, each a directory (or file) of its own.
    fn export(&mut self) -> Result<Vec<PathBuf>> {
        let Some(dir) = &self.c.export.dir else { return Ok(Vec::new()) };
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, &e))?;
        let mut written = Vec::new();
        for layout in &self.c.export.layouts {
            let form: Form = layout.parse()?;
            let out = dir.join(if layout == "dat" { "model.dat" } else { layout });
            let base = match self.c.model.init {
                Init::Checkpoint => self.base.checkpoint.as_ref(),
                Init::Random => None,
            };
            let (params, kernels) = (&self.engine.params, &self.engine.kernels);
            let notes = export::write(params, kernels, &self.base.side, base, &out, form)?;
            (self.cx.say)(&format!("wrote {}", out.display()));
            notes.iter().for_each(|note| (self.cx.say)(&format!("{}: {note}", out.display())));
            written.push(out);
        }
        Ok(written)
    }

    fn save(&mut self, store: &Store, source: &Source<'_>, metric: Option<f64>) -> Result<PathBuf> {
        let state = TrainState {
            step: self.step,
            tokens: self.tokens,
            seed: self.c.train.seed,
            cursor: source.cursor(),
            guard: self.guard.clone(),
            best: self.best,
            config: {
                // Whether the run was interrupted is nothing a checkpoint should know.
                let mut config = self.c.clone();
                config.checkpoint.resume = false;
                config.to_toml()?
            },
        };
        let (params, norm) = (&self.engine.params, self.engine.last_norm);
        store.save(self.step, metric, |w| {
            for (name, which) in FILES {
                let mut failed = None;
                w.file(name, |out| {
                    for t in params.trained() {
                        match bytes(if which == 0 { &t.master } else { &t.state }) {
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
            w.state(&state)
        })
    }

    fn resume(&mut self, loaded: &Loaded, source: &mut Source<'_>) -> Result<u64> {
        for (path, e) in &loaded.damaged {
            (self.cx.say)(&format!("{}: passed over: {e}", path.display()));
        }
        let state = loaded.state()?;
        if state.seed != self.c.train.seed {
            return Err(Error::new(Code::Usage, "resume with another seed")
                .need(state.seed.to_string())
                .have(self.c.train.seed.to_string()));
        }
        for (name, which) in FILES {
            let (mut file, _) = loaded.open(name)?;
            let mut buffer = Vec::new();
            for t in self.engine.params.trained() {
                let tensor = if which == 0 { &t.master } else { &t.state };
                buffer.resize(tensor.numel() * tensor.kind().elt_size_in_bytes(), 0);
                file.read_exact(&mut buffer).map_err(|e| {
                    Error::new(Code::Container, format!("{}: {name}: {e}", loaded.path.display()))
                        .fix("resume with the configuration the checkpoint was written with")
                })?;
                restore(tensor, &buffer)?;
            }
            if file.read(&mut [0u8; 1]).is_ok_and(|n| n > 0) {
                return Err(Error::new(
                    Code::Container,
                    format!("{}: {name}: too long", loaded.path.display()),
                )
                .fix("resume with the configuration the checkpoint was written with"));
            }
        }
        if let Ok(norm) = <[u8; 8]>::try_from(loaded.read("last_norm")?) {
            self.engine.last_norm = f64::from_le_bytes(norm);
        }
        self.engine.forget_values();
        source.seek(state.cursor);
        (self.step, self.tokens, self.best, self.guard) = (state.step, state.tokens, state.best, state.guard);
        (self.cx.say)(&format!("goes on after step {}", self.step));
        Ok(self.step)
    }
}

const FILES: [(&str, usize); 2] = [("masters.bin", 0), ("states.bin", 1)];

fn rows<'a>(b: &'a Batch, ids: &'a [u32], wanted: Option<&'a Tensor>) -> Rows<'a> {
    Rows {
        rows: b.rows,
        seq: b.seq,
        ids,
        positions: &b.positions,
        documents: b.documents.iter().any(|d| *d != 0).then_some(&b.documents),
        target: wanted.map_or(Target::Tokens(&b.targets), Target::Hidden),
    }
}

/// Batches of the data, or random tokens for a shape without a tokenizer.
enum Source<'a> {
    Data(Loader<'a>),
    Random { rows: usize, seq: usize, vocab: u32, seed: u64, at: u64 },
}

impl<'a> Source<'a> {
    fn new(run: &Run<'_>, data: Option<&'a Dataset>) -> Result<Self> {
        let (d, seed) = (&run.c.data, run.c.train.seed);
        match data {
            Some(data) => {
                let (rows, seq) = (d.rows, d.seq);
                let options =
                    LoaderOptions { rows, seq, packing: d.packing, seed, shuffle: d.shuffle, pad: 0 };
                Ok(Self::Data(Loader::new(data, options)?))
            }
            None if run.c.model.shape.is_some() => {
                let vocab = run.base.config.vocab_size as u32;
                Ok(Self::Random { rows: d.rows, seq: d.seq, vocab, seed, at: 0 })
            }
            None => Err(Error::new(Code::Usage, "nothing to learn from").need("data.train")),
        }
    }

    fn next(&mut self) -> Result<Batch> {
        match self {
            Self::Data(loader) => Ok(loader.next_batch()),
            Self::Random { rows, seq, vocab, seed, at } => {
                let rng = Philox::new(*seed, *at, streams::SAMPLE);
                *at += 1;
                let n = *rows * *seq;
                let token = |i: usize| i64::from(rng.below(i as u64, *vocab));
                Ok(Batch {
                    rows: *rows,
                    seq: *seq,
                    ids: (0..n).map(token).collect(),
                    targets: (1..=n).map(token).collect(),
                    positions: (0..n).map(|i| (i % *seq) as i64).collect(),
                    documents: vec![0; n],
                    supervised: n,
                })
            }
        }
    }

    fn cursor(&self) -> crate::data::Cursor {
        match self {
            Self::Data(loader) => loader.cursor(),
            Self::Random { at, .. } => crate::data::Cursor { epoch: 0, index: *at },
        }
    }

    fn seek(&mut self, cursor: crate::data::Cursor) {
        match self {
            Self::Data(loader) => loader.seek(cursor),
            Self::Random { at, .. } => *at = cursor.index,
        }
    }
}
