//! What a run looks at before its first step: a checkpoint to go on from, what it will not do although it
//! looks so, and the memory it will take.
use super::super::products::Products;
use super::super::ranks::Team;
use super::super::session::Base;
use super::Invocation;
use super::source::loader;
use crate::checkpoint::{self, Loaded, Store, TrainState};
use crate::compare;
use crate::config::{BaseForm, Config, PEFT};
use crate::data::Dataset;
use crate::optim::Share;
use crate::plan::{self, Machine, Shapes};
use crate::preflight;
use crate::sources::Sources;
use q4_core::{Code, Error, Result};
use std::path::PathBuf;
use tch::Device;

/// The checkpoint to go on from, once it was compared with what is asked for.
pub(super) fn go_on_from(
    c: &Config,
    cx: &Invocation<'_>,
    store: Option<&Store>,
    team: Option<&Team>,
    sources: &Sources,
) -> Result<Option<(Loaded, TrainState)>> {
    let Some(dir) = c.checkpoint.dir.as_deref().filter(|_| c.checkpoint.resume) else { return Ok(None) };
    let newest = match store {
        Some(store) => store.newest()?,
        None => checkpoint::newest(dir)?,
    };
    let loaded = newest.ok_or_else(|| preflight::nothing_to_resume(dir, cx.line))?;
    if let Some(team) = team {
        team.same("newest checkpoint", &loaded.step.to_le_bytes())?;
        team.same("model or data", serde_json::to_string(sources).unwrap_or_default().as_bytes())?;
    }
    for (path, e) in &loaded.damaged {
        (cx.warn)(&format!("{}: passed over: {e}", path.display()));
    }
    let state = loaded.state()?;
    let found = compare::differences(&state, c, sources, cx.threads)?;
    compare::judge(&found, &loaded.path, cx.allow_changes)?;
    for d in &found {
        (cx.warn)(&format!(
            "changed since step {}: {d}{}",
            state.step,
            if d.mixes { " (mixed)" } else { "" }
        ));
    }
    if state.step >= c.train.steps && !state.owed {
        (cx.warn)(&format!(
            "step {} of {} is there: nothing is left to train, the end follows",
            state.step, c.train.steps
        ));
    }
    Ok(Some((loaded, state)))
}

/// What a run will not do although it looks so, said before its first step.
pub(super) fn habits(c: &Config, cx: &Invocation<'_>, has_valid: bool) {
    if c.checkpoint.dir.is_none() && c.export.dir.is_some() {
        (cx.say)("no checkpoint.dir: this run cannot be gone on with after an interruption");
    }
    if c.checkpoint.dir.is_none() && c.export.dir.is_none() {
        (cx.warn)("nothing will be kept: model.shape learns from random tokens");
    }
    if c.eval.every > 0 && !has_valid {
        (cx.warn)("eval.every has no effect: there is no data.valid");
    }
    if c.sample.every > 0 && c.sample.prompts.is_empty() {
        (cx.warn)("sample.every has no effect: there are no sample.prompts");
    }
    if c.behaviour.every > 0 && c.behaviour.suite.is_none() {
        (cx.warn)("behaviour.every has no effect: there is no behaviour.suite");
    }
    let merges = c.lora.as_ref().is_some_and(|l| l.base != BaseForm::Merged);
    if merges && c.export.dir.is_some() && c.layouts().iter().any(|l| *l != PEFT) {
        (cx.warn)(
            "adapters were trained beside their base: a merge rounds anew, which is not what is trained \
                   (lora.base = \"merged\" trains what a merge writes)",
        );
    }
    if c.export.dir.is_some() && c.layouts().contains(&"dat") {
        (cx.warn)(
            "model.dat will hold a head packed in 4 bits, which is not what is trained, \
                   and runs with NVFP4 inputs unless told otherwise",
        );
    }
}

/// The shares of files that are drawn from by weight, a line each.
pub(super) fn mixed(c: &Config, data: &Dataset) -> Vec<String> {
    let shares = data.mixture.iter().flat_map(|m| m.shares());
    let line = |(path, (share, count)): (&PathBuf, (usize, usize))| {
        let times = share as f64 / count as f64;
        format!("{}: {share} rows an epoch of its {count}, each {times:.2} times", path.display())
    };
    c.data.train.paths.iter().zip(shares).map(line).collect()
}

/// The configuration with the steps that its epochs are.
pub(super) fn with_steps(c: &Config, cx: &Invocation<'_>, data: Option<&Dataset>) -> Result<Config> {
    let mut c = c.clone();
    let (Some(epochs), Some(data)) = (c.train.epochs, data) else { return Ok(c) };
    let mut loader = loader(&c, data)?;
    let items = loader.items();
    c.train.steps = loader.batches(epochs).div_ceil(c.train.accumulate as u64);
    let steps = c.train.steps;
    (cx.say)(&format!("{epochs} epochs of {items} samples are {steps} steps"));
    if c.schedule.warmup > steps {
        return Err(Error::new(Code::Usage, "schedule.warmup")
            .need(format!("at most the steps of train.epochs ({steps})"))
            .have(c.schedule.warmup.to_string()));
    }
    Ok(c)
}

/// Bytes of every phase.
pub(super) fn planned(
    c: &Config,
    base: &Base,
    device: Device,
    products: Option<&Products>,
    share: Share,
) -> Result<plan::Plan> {
    let machine = Machine {
        compute: if device.is_cuda() { 2 } else { 4 },
        // On the host: libtorch itself and the data. On the device the allocator's figures leave the context
        // out, but not cuBLAS's workspace and what is lost to rounding.
        context: if device.is_cuda() { 100 << 20 } else { 300 << 20 },
    };
    let beside = match (products, c.lora.as_ref().map(|l| l.base)) {
        (Some(p), _) => {
            plan::Base::Packed { resident: p.resident(), workspace: p.workspace(), head: p.has_head() }
        }
        (None, Some(BaseForm::Decoded)) => plan::Base::Decoded,
        _ => plan::Base::Merged,
    };
    let (shapes, _) = Shapes::of(&base.config).freeze(&c.train.freeze)?;
    Ok(plan::predict(&shapes, c, &machine, beside, share))
}
