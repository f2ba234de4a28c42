//! A run of several ranks: what every one does, what the first does for all, and how all end.
use super::super::ranks::Team;
use super::{Invocation, Run, go_on};
use crate::checkpoint;
use crate::config::Config;
use crate::data::{Batch, Dataset, eval_batches};
use q4_core::{Code, Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::rc::Rc;

/// Runs `c` as this process' part of it; the value is the report, which is the first rank's to show.
pub fn run(c: &Config, cx: &Invocation<'_>) -> Result<Value> {
    let Some(place) = &cx.place else { return super::alone(c, cx, None) };
    let mute = |_: &str| {};
    let quiet = Invocation {
        progress: false,
        serve: None,
        say: &mute,
        warn: &mute,
        place: Some(place.clone()),
        ..*cx
    };
    let cx = if place.is_first() { cx } else { &quiet };
    if !place.is_first() && (cx.dry_run || cx.eval_only || cx.preview.is_some()) {
        return Ok(json!({ "rank": place.rank }));
    }
    let mut c = c.clone();
    if c.model.device.starts_with("cuda:") && place.local_size > 1 {
        return Err(Error::new(Code::Usage, format!("model.device = {:?}", c.model.device))
            .need("a device for every rank of this machine")
            .have(format!("{} ranks", place.local_size))
            .fix("--device cuda: rank r takes cuda:r"));
    }
    if c.model.device == "cuda" {
        c.model.device = format!("cuda:{}", place.local);
    }
    if place.restarts > 0 && c.checkpoint.dir.as_deref().is_some_and(|d| checkpoint::glance(d).is_some()) {
        (cx.say)(&format!("started again by {}: goes on after the newest checkpoint", place.by));
        c.checkpoint.resume = true;
    }
    if cx.dry_run || cx.eval_only || cx.preview.is_some() {
        return super::alone(&c, cx, None);
    }
    (cx.say)(&place.to_string());
    let team = Rc::new(Team::meet(place)?);
    match super::alone(&c, cx, Some(team.clone())) {
        Ok(mut report) => {
            team.part()?;
            if !team.is_first() {
                report["rank"] = team.rank().into();
            }
            Ok(report)
        }
        // All have it: one says so.
        Err(e) if team.is_agreed(&e) && !team.is_first() => {
            Ok(json!({ "rank": team.rank(), "exit": e.code().exit() }))
        }
        Err(e) if team.is_agreed(&e) => Err(e),
        Err(e) => {
            team.fail(&e);
            match team.said_by_first(&e) {
                true => Ok(json!({ "rank": team.rank(), "exit": e.code().exit() })),
                false => Err(e),
            }
        }
    }
}

/// The configuration with the micro-batches that all ranks have together, and for how many ranks that was
/// said. A run that goes on with another number of ranks keeps the step it had.
pub(super) fn of_all_ranks(c: &Config, cx: &Invocation<'_>, ranks: usize) -> (Config, usize) {
    let mut c = c.clone();
    let own = c.train.accumulate;
    c.train.accumulate = own * ranks;
    let stored = c.checkpoint.dir.as_deref().filter(|_| c.checkpoint.resume).and_then(checkpoint::glance);
    let accumulate = |config: &str| -> Option<usize> {
        let table: toml::Table = config.parse().ok()?;
        table.get("train")?.get("accumulate")?.as_integer()?.try_into().ok()
    };
    if let Some(state) = stored
        && state.ranks != ranks
        && accumulate(&state.config) == Some(own * state.ranks)
    {
        c.train.accumulate = own * state.ranks;
        (cx.say)(&format!(
            "{} micro-batches a step as before, now on {ranks} rank{} instead of {}",
            c.train.accumulate,
            if ranks == 1 { "" } else { "s" },
            state.ranks
        ));
        return (c, state.ranks);
    }
    (c, ranks)
}

/// What all ranks must have alike: a run of two configurations or two data sets would be neither's.
pub(super) fn compared(team: &Team, c: &Config, data: [Option<&Dataset>; 2]) -> Result<()> {
    let mut c = c.clone();
    c.model.device = String::new();
    team.same("configuration", c.to_toml()?.as_bytes())?;
    let mut hash = Sha256::new();
    for sample in data.into_iter().flatten().flat_map(|d| &d.samples) {
        hash.update((sample.ids.len() as u64).to_le_bytes());
        sample.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        sample.supervised.iter().for_each(|s| hash.update([u8::from(*s)]));
    }
    team.same("data", &hash.finalize())
}

impl Run<'_> {
    /// What one process does for all; every rank has the result.
    pub(super) fn first<T: Serialize + DeserializeOwned>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        match self.team.clone() {
            Some(team) => team.first(|| f(self)),
            None => f(self),
        }
    }

    /// Whether checkpoints are kept, by this rank or another.
    pub(super) fn keeps(&self) -> bool {
        self.c.checkpoint.dir.is_some()
    }

    /// Hears what other ranks were asked.
    pub(super) fn listen(&self) -> Result<()> {
        self.team.as_ref().map_or(Ok(()), |team| team.gather_and_listen(&[]).map(|_| ()))
    }

    /// Mean loss over the held-out data, a batch a rank, summed in the order of batches.
    pub(super) fn loss(&mut self) -> Result<Option<f64>> {
        let Some(valid) = self.valid else { return Ok(None) };
        let (d, e) = (&self.c.data, &self.c.eval);
        let or = |own: usize, other: usize| if own == 0 { other } else { own };
        let (me, ranks) = self.team.as_ref().map_or((0, 1), |t| (t.rank(), t.size()));
        let mut batches = eval_batches(valid, or(e.rows, d.rows), or(e.seq, d.seq), d.eval_packing, 0);
        let (mut sum, mut count) = (0.0, 0.0);
        loop {
            let round: Vec<Batch> = batches.by_ref().take(ranks).collect();
            if round.is_empty() {
                return Ok((count > 0.0).then(|| sum / count));
            }
            if self.team.is_none() {
                go_on()?;
            }
            let mine = match round.get(me).filter(|b| b.supervised > 0) {
                Some(batch) => {
                    let ids: Vec<u32> = batch.ids.iter().map(|id| *id as u32).collect();
                    let (s, n) = self.engine.evaluate(&super::rows(batch, &ids, None))?;
                    [s, n as f64]
                }
                None => [0.0, 0.0],
            };
            let all = match &self.team {
                None => vec![mine.to_vec()],
                Some(team) => {
                    let all = team.gather_and_listen(&mine)?;
                    super::asked_to_end()?;
                    all
                }
            };
            for of in all.iter().filter(|of| of[1] > 0.0) {
                sum += of[0];
                count += of[1];
            }
        }
    }

    /// Of every rank: bytes of its moments as planned and as they are, the most memory it had, and what it
    /// had before the first pass that was profiled.
    pub(super) fn memory_of_ranks(&self, planned: u64, peak: u64) -> Result<Value> {
        let own = self.engine.params.trained().map(|t| t.state.numel()).sum::<usize>();
        let ready = self.phases.samples.iter().find(|s| s.phase == "batch_ready");
        let ready = ready.map_or(0, |s| s.memory.used(self.device));
        let mine = [planned as f64, own as f64, peak as f64, ready as f64];
        let all = match &self.team {
            Some(team) => team.gather_numbers(&mine)?,
            None => vec![mine.to_vec()],
        };
        let line = |of: &Vec<f64>| {
            let [planned, states, peak, ready] = [0, 1, 2, 3].map(|i| of.get(i).map_or(0, |x| *x as u64));
            json!({ "planned_state_bytes": planned, "state_bytes": states, "peak_bytes": peak,
                "ready_bytes": ready })
        };
        Ok(all.iter().map(line).collect())
    }

    /// The team without which rank 0 works for all: nothing in it may wait for the others.
    pub(super) fn without_team<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        let team: Option<Rc<Team>> = self.team.take();
        let result = f(self);
        self.team = team;
        result
    }
}
