//! The record of a run: lines, and the page that is drawn again while the run lasts. A record that cannot be
//! written is told and never ends a run.
use super::Invocation;
use crate::checkpoint::TrainState;
use crate::config::Config;
use crate::metrics::{After, Events, Metrics, number};
use q4_core::Result;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Lines and page of a run, where it has a folder.
pub(super) struct Log<'a> {
    metrics: Option<Metrics>,
    events: Option<Events>,
    page: PathBuf,
    config: String,
    began: Instant,
    /// Seconds of training before this process.
    before: f64,
    /// When the page was drawn, and how long that took.
    drawn: Option<(Instant, Duration)>,
    warn: &'a dyn Fn(&str),
    told: bool,
}

/// The page is at most so old when a line comes.
const AGE: Duration = Duration::from_secs(10);

impl<'a> Log<'a> {
    /// Nothing is recorded.
    pub fn none(cx: &Invocation<'a>) -> Self {
        Self {
            metrics: None,
            events: None,
            page: PathBuf::new(),
            config: String::new(),
            began: Instant::now(),
            before: 0.0,
            drawn: None,
            warn: cx.warn,
            told: false,
        }
    }

    /// Beside the checkpoints, else beside the models.
    pub fn open(c: &Config, cx: &Invocation<'a>, from: Option<&TrainState>) -> Result<Self> {
        let none = Self::none(cx);
        let Some(dir) = c.checkpoint.dir.as_ref().or(c.export.dir.as_ref()) else { return Ok(none) };
        let path = dir.join("metrics.ndjson");
        let metrics = Metrics::open(&path, from.map(|s| After { step: s.step, owed: s.owed }))?;
        if let Some(old) = metrics.aside() {
            (cx.warn)(&format!("{}: of an earlier run, kept as {}", path.display(), old.display()));
        }
        let events = Events::open(&dir.join("tensorboard"), from.map(|s| s.step))?;
        let (before, page) = (metrics.wall_s(), path.with_extension("html"));
        Ok(Self { metrics: Some(metrics), events: Some(events), page, config: c.to_toml()?, before, ..none })
    }

    /// A line of numbers.
    pub fn numbers(&mut self, kind: &str, step: u64, fields: &[(&str, f64)]) {
        self.values(kind, step, fields.iter().map(|(name, x)| ((*name).to_owned(), number(*x))).collect());
    }

    /// A line of anything.
    pub fn values(&mut self, kind: &str, step: u64, mut fields: Map<String, Value>) {
        let Some(metrics) = &mut self.metrics else { return };
        let wall = self.before + self.began.elapsed().as_secs_f64();
        fields.insert("wall_s".into(), ((wall * 1e3).round() / 1e3).into());
        let numbers: Vec<(String, f64)> =
            fields.iter().filter_map(|(name, v)| Some((format!("{kind}/{name}"), v.as_f64()?))).collect();
        let result = metrics.log_values(kind, step, fields);
        self.tell(result);
        let Some(events) = &mut self.events else { return };
        let result = numbers.iter().try_for_each(|(tag, x)| events.scalar(tag, step, *x));
        self.tell(result);
    }

    /// Draws the page, unless it was drawn a moment ago. Drawing takes longer as a run grows, and no more
    /// than a fiftieth of the time.
    pub fn page(&mut self, now: bool) {
        let Some(metrics) = &self.metrics else { return };
        let recent = |(at, took): (Instant, Duration)| at.elapsed() < AGE.max(50 * took);
        if !now && self.drawn.is_some_and(recent) {
            return;
        }
        let began = Instant::now();
        let result = metrics.write_page(&self.page, "q4 train", &self.config);
        self.drawn = Some((Instant::now(), began.elapsed()));
        self.tell(result);
    }

    fn tell(&mut self, result: Result<()>) {
        if let Err(e) = result
            && !self.told
        {
            (self.warn)(&format!("the record of this run has gaps from here on: {e}"));
            self.told = true;
        }
    }
}
