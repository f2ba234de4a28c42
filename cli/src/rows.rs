//! Rows as training reads them, each a window of its own, of which a model predicts what is learnt.
use crate::args::{EvalArgs, Supervise};
use crate::context::Context;
use crate::text::Text;
use crate::windows::{self, ROWS, Step};
use q4_core::Result;
use q4_model::checkpoint::Checkpoint;
use q4_model::load::ContextOptions;
use q4_rows::{Format, LoadOptions, Loaded, Report, Sample, Truncate};

/// The rows, and what loading did.
pub struct Rows {
    samples: Vec<Sample>,
    window: usize,
    /// What was cut and dropped.
    pub report: Report,
}

impl Rows {
    /// Those of `args.rows` as `checkpoint` reads them.
    ///
    /// # Errors
    /// As [`Loaded::load`], and as [`windows::known`].
    pub fn load(cx: &Context, args: &EvalArgs, checkpoint: &Checkpoint) -> Result<Self> {
        let config = checkpoint.config();
        let window = windows::window(&args.cut, config.max_position_embeddings)?;
        let text = Text::of(checkpoint)?;
        let template = text.template(checkpoint)?;
        let text = q4_rows::Text::new(&text.tokenizer, &template, &config.eos_token_ids)?;
        let supervise = match args.supervise {
            None | Some(Supervise::Response) => q4_rows::Supervise::Response,
            Some(Supervise::All) => q4_rows::Supervise::All,
        };
        let options = LoadOptions {
            format: Format::Auto,
            max_len: Some(window + 1),
            truncate: Truncate::Cut,
            supervise,
        };
        let Loaded { samples, report, notes, .. } = Loaded::load(&args.rows, &text, &options, &cx.threads())?;
        notes.iter().for_each(|note| cx.report().warn(note));
        windows::known(samples.iter().flat_map(|s| &s.ids), checkpoint)?;
        Ok(Self { samples, window, report })
    }

    /// Positions of a row at most.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Positions that are computed: those up to the last token that counts.
    pub fn positions(&self) -> usize {
        self.samples.iter().map(positions).sum()
    }

    /// All rows in steps of [`ROWS`].
    pub fn steps(&self) -> impl Iterator<Item = Step<'_>> {
        self.samples.iter().flat_map(|s| {
            let n = positions(s);
            let pieces = s.ids[..n].chunks(ROWS).zip(s.ids[1..=n].chunks(ROWS));
            let steps = pieces.zip(s.supervised[1..=n].chunks(ROWS)).enumerate();
            steps.map(|(i, ((ids, next), learnt))| Step { is_first: i == 0, ids, next, learnt: Some(learnt) })
        })
    }

    /// A context for one row.
    pub fn sizes(&self, cx: &Context) -> ContextOptions {
        windows::sizes(self.samples.iter().map(positions).max().unwrap_or(1), cx)
    }
}

/// Whoever is loaded has a token that counts behind its first.
fn positions(s: &Sample) -> usize {
    s.supervised.iter().rposition(|learnt| *learnt).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_end_where_nothing_is_learnt_any_more() {
        let sample = |n: u32, learnt: std::ops::Range<u32>| Sample {
            ids: (0..n).collect(),
            supervised: (0..n).map(|i| learnt.contains(&i)).collect(),
        };
        let rows = Rows {
            samples: vec![sample(9, 3..5), sample(100, 70..100)],
            window: 99,
            report: Report::default(),
        };
        let seen: Vec<_> = rows
            .steps()
            .map(|s| (s.is_first, s.ids.len(), s.next[0], s.learnt.map(|l| l.iter().filter(|l| **l).count())))
            .collect();
        assert_eq!(seen, [(true, 4, 1, Some(2)), (true, 64, 1, Some(0)), (false, 35, 65, Some(30))]);
        assert_eq!(rows.positions(), 4 + 99);
    }
}
