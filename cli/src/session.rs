//! From a checkpoint to something that runs, and what a report must say about how it ran.
use crate::args::Format;
use crate::context::Context;
use crate::device::Choice;
use crate::report::Report;
use q4_core::memory::{Budget, UnifiedMemory, human, peak_resident, resident};
use q4_core::{
    Code, Device, Dispatch, Error, ExecPath, Executed, Policy, RejectCode, Rejection, Result, Selection,
};
use q4_model::batch::company::{self, Dependent};
use q4_model::batch::{self, PAGE, Sequences};
use q4_model::checkpoint::Checkpoint;
use q4_model::generate::Answer;
use q4_model::load::{self, ContextOptions, Loaded, Many};
use q4_model::memory::{MemoryPlan, Part};
use q4_model::plan::{HeadPlan, Plan, PlanOptions, Product};
use q4_model::runner::Runner;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Rows of a step at most: enough to amortise the weights, few enough to keep activations small.
pub fn chunk(device: Device) -> usize {
    if device == Device::Cpu { 512 } else { 2048 }
}

/// Rows of a step that many sequences share: enough for prompts, few enough that nobody waits long for his
/// next token.
pub fn shared_chunk(device: Device, sequences: usize) -> usize {
    let rows = if device == Device::Cpu { 128 } else { 512 };
    rows.max(2 * sequences)
}

/// Bytes of the program and its libraries that a run touches; more where they are not optimised.
const PROGRAM: u64 = if cfg!(debug_assertions) { 40 << 20 } else { 24 << 20 };
/// The part of a server's requests in flight.
const REQUESTS: &str = "requests";
/// Bytes a tokenizer takes for one of its file.
const TOKENIZER: u64 = 12;

/// A model that is planned and not loaded: all that a run will take is known.
pub struct Planned<'a> {
    cx: &'a Context,
    dispatch: Dispatch,
    checkpoint: &'a Checkpoint,
    options: PlanOptions,
    context: ContextOptions,
    plan: Plan,
    memory: MemoryPlan,
    program: u64,
}

/// A loaded model with the dispatch that counts its products.
pub struct Session {
    dispatch: Dispatch,
    loaded: Loaded,
    context: ContextOptions,
    budget: Arc<Budget>,
    memory: MemoryPlan,
    choice: Choice,
    isa: Option<&'static str>,
    downgraded: usize,
    dense: Vec<String>,
}

/// What was planned of memory, and what was used.
#[derive(Serialize)]
pub struct Memory {
    /// All parts.
    planned_bytes: u64,
    parts: Vec<Part>,
    /// `--memory-limit`; null without.
    limit_bytes: Option<u64>,
    /// What a device has less of than before the model was loaded; null on the CPU.
    device_bytes: Option<u64>,
}

/// What every report about a run says of how it was computed.
#[derive(Serialize)]
pub struct Facts {
    /// Largest resident size of the process; null where the system does not say.
    pub peak_bytes: Option<u64>,
    /// Where products ran.
    pub device: String,
    /// Why there.
    pub device_reason: String,
    /// The best instruction set that kernels of the CPU may use; null where a device computes.
    pub isa: Option<&'static str>,
    /// What was planned, and what a device has.
    pub memory: Memory,
    /// Products by what really ran.
    pub executed: Vec<Executed>,
    /// Third parties among those that ran.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub plugins: Vec<Plugin>,
    /// Products on a path worse than the best there is for them.
    pub downgraded: usize,
    /// Layers that are not 4-bit.
    pub dense: Vec<String>,
    /// Self-checks that --no-self-check skipped.
    #[serde(skip_serializing_if = "is_zero")]
    pub skipped_self_checks: u64,
}

/// A library that computed something.
#[derive(Serialize)]
pub struct Plugin {
    backend: String,
    version: String,
    path: String,
    sha256: String,
}

/// How long an answer took.
#[derive(Clone, Copy, Default, Serialize)]
pub struct Timing {
    /// Opening and preparing the model.
    pub load_s: f64,
    /// Computing the prompt.
    pub prefill_s: f64,
    /// Computing the answer.
    pub decode_s: f64,
    /// Prompt tokens a second.
    pub prefill_tok_s: f64,
    /// Answer tokens a second.
    pub decode_tok_s: f64,
}

impl Session {
    /// The backends of a run. First of all, so that a backend that was named and cannot be used stops the
    /// program before it asks for a prompt or reads a model.
    pub fn dispatch(cx: &Context) -> Result<Dispatch> {
        load::require_executor(cx.device()?)?;
        let dispatch = cx.dispatch()?;
        cx.require_named(&dispatch)?;
        Ok(dispatch)
    }

    /// Plans all that a run on `checkpoint` takes. `max_rows`: rows of the largest step that products are
    /// planned for.
    pub fn plan<'a>(
        cx: &'a Context,
        dispatch: Dispatch,
        checkpoint: &'a Checkpoint,
        quantize: Option<Format>,
        max_rows: usize,
        context: ContextOptions,
    ) -> Result<Planned<'a>> {
        let options = cx.plan_options(quantize, max_rows)?;
        let plan = Plan::new(checkpoint, &dispatch, &options)?;
        plan.require(&dispatch)?;
        let threads = cx.thread_count();
        let program = program(checkpoint);
        let memory = MemoryPlan::new(checkpoint, &plan, &options, &context, threads, program)?;
        Ok(Planned { cx, dispatch, checkpoint, options, context, plan, memory, program })
    }

    /// Plans and prepares `checkpoint` for a context of these sizes, in steps of the largest it has. A
    /// downgrade is announced on stderr, also under `-q`. [`q4_core::Code::OutOfMemory`] before anything is
    /// loaded where not all of it fits.
    pub fn load(
        cx: &Context,
        dispatch: Dispatch,
        checkpoint: &Checkpoint,
        quantize: Option<Format>,
        context: ContextOptions,
    ) -> Result<Self> {
        let rows = context.chunk;
        Self::plan(cx, dispatch, checkpoint, quantize, rows, context)?.load()
    }

    /// Plans and prepares `checkpoint` for `sequences` sequences of a context of these sizes, which share a
    /// cache: one that holds them all, else as many pages as there is memory for, at least those of one.
    /// `requests`: bytes that what is asked takes beside the model.
    pub fn load_many(
        cx: &Context,
        dispatch: Dispatch,
        checkpoint: &Checkpoint,
        quantize: Option<Format>,
        context: ContextOptions,
        sequences: usize,
        requests: u64,
    ) -> Result<Self> {
        let least = context.context.div_ceil(PAGE);
        let many = |pages| ContextOptions { many: Some(Many { sequences, pages }), ..context };
        let mut pages = sequences * least;
        let planned = Self::plan(cx, dispatch, checkpoint, quantize, context.chunk, many(pages))?;
        let mut planned = planned.with(REQUESTS, requests);
        while pages > least && planned.check().is_err() {
            pages = (pages / 2).max(least);
            planned = planned.sized(many(pages))?.with(REQUESTS, requests);
        }
        let session = planned.load()?;
        session.budget.reserve(requests, REQUESTS)?;
        Ok(session)
    }

    /// A cache for many and its bounds; for a model that was [loaded for many](Self::load_many).
    pub fn sequences(&self) -> Result<(Box<dyn Sequences>, batch::Options)> {
        let context = self.context;
        let many = context.many.ok_or_else(|| Error::new(Code::Internal, "a model for one sequence"))?;
        let engine = self.loaded.sequences(context, many, &self.budget)?;
        let options = batch::Options {
            sequences: many.sequences,
            rows: context.chunk,
            logit_rows: context.logit_rows(),
            context: context.context,
            pages: many.pages,
            balance: self.loaded.model.shape().balance(),
        };
        Ok((engine, options))
    }

    /// Layers whose rows depend on their company.
    pub fn dependents(&self) -> Result<Vec<Dependent>> {
        company::dependents(&self.loaded, self.context.chunk)
    }

    /// A context of its own, as it was planned.
    pub fn runner(&self) -> Result<Runner> {
        self.loaded.runner(self.context, &self.budget)
    }

    /// What ran so far.
    pub fn facts(&self) -> Facts {
        let (executed, libraries) =
            (self.dispatch.witness().executed(), &self.dispatch.registry().env().libraries);
        let guests = self.dispatch.registry().guests().iter();
        let ran = guests.filter(|name| executed.iter().any(|e| e.backend == **name));
        let plugin = |name: &String| {
            let facts = libraries.get(name)?;
            let (version, path, sha256) = (facts.version.clone(), facts.path.clone(), facts.sha256.clone());
            Some(Plugin { backend: name.clone(), version, path, sha256 })
        };
        let plugins = ran.filter_map(plugin).collect();
        Facts {
            peak_bytes: peak_resident(),
            device: self.choice.device.to_string(),
            device_reason: self.choice.why.clone(),
            isa: self.isa,
            memory: Memory {
                planned_bytes: self.memory.total(),
                parts: self.memory.parts().to_vec(),
                limit_bytes: self.budget.is_named().then(|| self.budget.limit()),
                device_bytes: self.loaded.device_bytes(),
            },
            executed,
            plugins,
            downgraded: self.downgraded,
            dense: self.dense.clone(),
            skipped_self_checks: self.dispatch.skipped_checks(),
        }
    }
}

impl Planned<'_> {
    /// The same with `bytes` more that the verb keeps.
    pub fn with(mut self, name: &'static str, bytes: u64) -> Self {
        self.memory = self.memory.with(name, bytes);
        self
    }

    /// The same plan for a context of other sizes, whose steps have as many rows.
    fn sized(mut self, context: ContextOptions) -> Result<Self> {
        let threads = self.cx.thread_count();
        let (plan, options) = (&self.plan, &self.options);
        self.memory = MemoryPlan::new(self.checkpoint, plan, options, &context, threads, self.program)?;
        self.context = context;
        Ok(self)
    }

    /// Refuses it where not all of it fits.
    pub fn check(&self) -> Result<()> {
        self.memory.check(&self.cx.budget(), load::device_free(self.options.device)?)
    }

    /// Loads it alone.
    pub fn load(self) -> Result<Session> {
        self.check()?;
        let budget = Arc::new(self.budget()?);
        self.prepare(budget)
    }

    /// Loads it and `other` beside it; nothing of either where both do not fit.
    pub fn load_beside(self, other: Self) -> Result<[Session; 2]> {
        let both = self.memory.clone().beside(&other.memory);
        both.check(&self.cx.budget(), load::device_free(self.options.device)?)?;
        let budget = Arc::new(self.budget()?);
        Ok([self.prepare(budget.clone())?, other.prepare(budget)?])
    }

    /// What is left for the model, which takes its parts as it is loaded.
    fn budget(&self) -> Result<Budget> {
        let budget = self.cx.budget();
        budget.reserve(self.program, "the program")?;
        Ok(budget)
    }

    fn prepare(self, budget: Arc<Budget>) -> Result<Session> {
        let Self { cx, dispatch, checkpoint, options, context, plan, memory, program: _ } = self;
        for line in memory.to_string().lines() {
            cx.report().detail(line);
        }
        cx.tell_device()?;
        warn_of_plain_memory(&plan, &dispatch, options.device, cx.report());
        let bar = cx.report().bar("loading");
        let mut progress = |done: usize, all: usize| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
        };
        let loaded = load::load(checkpoint, &plan, &dispatch, &options, cx.threads(), &budget, &mut progress);
        bar.finish_and_clear();
        let loaded = loaded?;
        warn_of_downgrades(&plan, cx.report());
        warn_of_copies(&plan, dispatch.policy(), options.device, cx.report());
        warn_of_unscaled(&plan, cx.report());
        warn_of_parts(&plan, &dispatch, cx.report());
        let mut dense: Vec<_> =
            plan.products().filter(|p| !p.spec.schema.is_packed()).map(|p| p.spec.name()).collect();
        if let HeadPlan::Dense { .. } = plan.head {
            dense.push(checkpoint.config().arch.names.head.to_owned());
        }
        let downgraded = plan.downgraded();
        let choice = cx.device_choice()?.clone();
        let isa = cx.isa();
        Ok(Session { dispatch, loaded, context, budget, memory, choice, isa, downgraded, dense })
    }
}

/// What the process has beside the model. The same for the same files, unless more is resident already: a
/// total that differs from run to run is hard to plan with.
fn program(checkpoint: &Checkpoint) -> u64 {
    let tokenizer = checkpoint.file("tokenizer.json").map_or(0, |file| file.len() as u64);
    (PROGRAM + TOKENIZER * tokenizer).max(resident().unwrap_or(0))
}

impl Facts {
    /// What ran, for those who asked with `-v`.
    pub fn detail(&self, report: &Report) {
        for e in &self.executed {
            report.detail(&format!("{} {} {}: {} products", e.backend, e.path, e.activations, e.calls));
        }
        let peak = self.peak_bytes.map_or("unknown".into(), human);
        let device = self.memory.device_bytes.map_or(String::new(), |b| format!(", device {}", human(b)));
        report.detail(&format!(
            "memory: {} planned, host {peak} resident at most{device}",
            human(self.memory.planned_bytes)
        ));
    }
}

impl Timing {
    /// Of answers that took `load_s` to prepare for; rates are over all of them.
    pub fn of<'a>(load_s: f64, answers: impl IntoIterator<Item = &'a Answer>) -> Self {
        let mut t = Self { load_s, ..Self::default() };
        let (mut prompt, mut answer) = (0, 0);
        for a in answers {
            t.prefill_s += a.prefill.as_secs_f64();
            t.decode_s += a.decode.as_secs_f64();
            prompt += a.prompt_tokens;
            answer += a.ids.len();
        }
        let rate = |tokens: usize, s: f64| if s > 0.0 { tokens as f64 / s } else { 0.0 };
        t.prefill_tok_s = rate(prompt, t.prefill_s);
        t.decode_tok_s = rate(answer, t.decode_s);
        t
    }
}

fn warn_of_downgrades(plan: &Plan, report: &Report) {
    let downgraded: Vec<_> =
        plan.products().filter(|p| p.choice.as_ref().is_ok_and(|c| c.is_downgrade)).collect();
    let Some(first) = downgraded.first() else { return };
    report.insist(&format!(
        "{} of {} products run on dense copies of their 4-bit weights ({}), as --compute kernel-or-fallback agreed to",
        downgraded.len(),
        plan.products().count(),
        reason(first).unwrap_or_else(|| "see q4 explain".into())
    ));
}

/// Says which formats have no kernel on this device, where nobody asked for dense copies: they take several
/// times the memory.
fn warn_of_copies(plan: &Plan, policy: &Policy, device: Device, report: &Report) {
    let named = |backend: &str| policy.overrides.layers.iter().any(|(_, name)| name == backend);
    let is_asked = policy.overrides.all.is_some() || policy.compute.admits()[0] >= ExecPath::DequantMatmul;
    let is_copy = |p: &&Product| {
        let copied = |c: &Selection| {
            c.path == ExecPath::DequantMatmul && !c.is_downgrade && !named(&c.backend.descriptor().name)
        };
        p.spec.schema.is_packed() && p.choice.as_ref().is_ok_and(copied)
    };
    let copies: Vec<_> = plan.products().filter(is_copy).collect();
    if is_asked || copies.is_empty() {
        return;
    }
    let formats: BTreeSet<_> = copies.iter().map(|p| p.spec.schema.id().name).collect();
    let formats = formats.into_iter().collect::<Vec<_>>().join(" and ");
    report.warn(&format!(
        "{} of {} products run on dense copies of their 4-bit weights: no kernel of {formats} is for {device}",
        copies.len(),
        plan.products().count()
    ));
}

/// Layers that a tool exported for 4-bit inputs, without the scales of those: other engines would compute
/// something else.
pub fn warn_of_unscaled(plan: &Plan, report: &Report) {
    let unscaled: usize = plan.products().map(|p| p.unscaled).sum();
    let Some(first) = plan.products().find(|p| p.unscaled > 0) else { return };
    report.insist(&format!(
        "{unscaled} layers have no input_scale, and config.json declares NVFP4 inputs: theirs stay as they are, first in {}",
        first.spec.name()
    ));
}

/// A plugin that was named has what it accepts. Where that is a part of the model, the user is told who has
/// the rest.
fn warn_of_parts(plan: &Plan, dispatch: &Dispatch, report: &Report) {
    for name in &dispatch.policy().overrides.preferred {
        let four_bit = || plan.products().filter(|p| p.spec.schema.is_packed());
        let chosen = |p: &&Product| p.choice.as_ref().is_ok_and(|c| c.backend.descriptor().name == *name);
        let (served, all) = (four_bit().filter(chosen).count(), four_bit().count());
        let Some(other) = four_bit().find(|p| !chosen(p)) else { continue };
        let lost = other.choice.iter().flat_map(|c| &c.rejected).find(|r| r.backend == *name);
        let why = lost
            .and_then(|r| r.reasons.first())
            .map_or_else(String::new, |r| format!(": {}: need {}; have {}", r.code.as_str(), r.need, r.have));
        report.warn(&format!(
            "plugin {name} computes {served} of {all} 4-bit products, built-ins the others; {}{why}",
            other.spec.name()
        ));
    }
}

/// Names the backends whose weights stay in plain memory of a device where unified memory is preferred.
fn warn_of_plain_memory(plan: &Plan, dispatch: &Dispatch, device: Device, report: &Report) {
    if device == Device::Cpu || dispatch.policy().unified_memory != UnifiedMemory::Prefer {
        return;
    }
    let chosen = plan.products().filter_map(|p| p.choice.as_ref().ok());
    let plain: BTreeSet<_> =
        chosen.filter(|c| !c.backend.manages_memory()).map(|c| c.backend.descriptor().name.clone()).collect();
    for name in plain {
        report.warn(&format!("--unified-memory prefer: weights of {name} stay in plain memory of {device}"));
    }
}

/// Why a better path could not be had: the first candidate that lost to circumstance, not to a choice.
fn reason(product: &Product) -> Option<String> {
    let choice = product.choice.as_ref().ok()?;
    let circumstance = |r: &&Rejection| {
        r.path.is_none_or(|p| p < ExecPath::DequantMatmul)
            && !r
                .reasons
                .iter()
                .any(|x| matches!(x.code, RejectCode::NotSelected | RejectCode::SchemaUnsupported))
    };
    let lost = choice.rejected.iter().find(circumstance)?;
    let first = lost.reasons.first()?;
    Some(format!("{}: {}: need {}; have {}", lost.backend, first.code.as_str(), first.need, first.have))
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}
