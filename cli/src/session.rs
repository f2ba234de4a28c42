//! From a checkpoint to something that runs, and what a report must say about how it ran.
use crate::args::Format;
use crate::context::Context;
use crate::report::Report;
use q4_core::memory::{Budget, UnifiedMemory, peak_resident};
use q4_core::{Device, Dispatch, ExecPath, Executed, RejectCode, Rejection, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::generate::Answer;
use q4_model::load::{self, ContextOptions, Loaded};
use q4_model::plan::{HeadPlan, Plan, Product};
use q4_model::runner::Runner;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Rows of a step at most: enough to amortise the weights, few enough to keep activations small.
pub fn chunk(device: Device) -> usize {
    if device == Device::Cpu { 512 } else { 2048 }
}

/// A loaded model with the seam that counts its products.
pub struct Session {
    dispatch: Dispatch,
    loaded: Loaded,
    budget: Arc<Budget>,
    downgraded: usize,
    dense: Vec<String>,
}

/// What every report about a run says of how it was computed.
#[derive(Serialize)]
pub struct Facts {
    /// Largest resident size of the process; null where the system does not say.
    pub peak_bytes: Option<u64>,
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
        let dispatch = cx.dispatch()?;
        cx.require_named(&dispatch)?;
        Ok(dispatch)
    }

    /// Plans and prepares `checkpoint` for steps of up to `max_rows` rows. A downgrade is announced on
    /// stderr, also under `-q`.
    pub fn load(
        cx: &Context,
        dispatch: Dispatch,
        checkpoint: &Checkpoint,
        quantize: Option<Format>,
        max_rows: usize,
    ) -> Result<Self> {
        Self::within(cx, dispatch, checkpoint, quantize, max_rows, Arc::new(cx.budget()))
    }

    /// The same inside what `other` left of the memory: both stay loaded.
    pub fn load_beside(
        cx: &Context,
        dispatch: Dispatch,
        checkpoint: &Checkpoint,
        quantize: Option<Format>,
        max_rows: usize,
        other: &Self,
    ) -> Result<Self> {
        Self::within(cx, dispatch, checkpoint, quantize, max_rows, other.budget.clone())
    }

    fn within(
        cx: &Context,
        dispatch: Dispatch,
        checkpoint: &Checkpoint,
        quantize: Option<Format>,
        max_rows: usize,
        budget: Arc<Budget>,
    ) -> Result<Self> {
        let options = cx.plan_options(quantize, max_rows)?;
        let plan = Plan::new(checkpoint, &dispatch, &options)?;
        cx.hint_of_idle_gpu();
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
        warn_of_unscaled(&plan, cx.report());
        warn_of_parts(&plan, &dispatch, cx.report());
        let mut dense: Vec<_> =
            plan.products().filter(|p| !p.spec.schema.is_4bit()).map(|p| p.spec.name()).collect();
        if let HeadPlan::Dense { .. } = plan.head {
            dense.push(q4_model::checkpoint::names::HEAD.to_owned());
        }
        Ok(Self { downgraded: plan.downgraded(), dispatch, loaded, budget, dense })
    }

    /// Counts memory that is not the model's, before it is taken.
    pub fn reserve(&self, bytes: u64, what: &str) -> Result<()> {
        self.budget.reserve(bytes, what)
    }

    /// A context of its own.
    pub fn runner(&self, options: ContextOptions) -> Result<Runner> {
        self.loaded.runner(options, &self.budget)
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
            executed,
            plugins,
            downgraded: self.downgraded,
            dense: self.dense.clone(),
            skipped_self_checks: self.dispatch.skipped_checks(),
        }
    }
}

impl Facts {
    /// What ran, for those who asked with `-v`.
    pub fn detail(&self, report: &Report) {
        for e in &self.executed {
            report.detail(&format!("{} {} {}: {} products", e.backend, e.path, e.activations, e.calls));
        }
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
        let four_bit = || plan.products().filter(|p| p.spec.schema.is_4bit());
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
