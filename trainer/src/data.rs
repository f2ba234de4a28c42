//! From rows of files ([`q4_rows`]) to batches of token ids with targets.
use crate::rng::{Philox, streams};
use q4_core::{Result, ThreadPool};
use serde::{Deserialize, Serialize};

mod batch;
mod mixture;
#[cfg(test)]
mod tests;

pub use batch::{Batch, IGNORE, Loader, LoaderOptions, Packing, eval_batches};
pub use mixture::Mixture;
pub use q4_rows::{
    Format, LoadOptions, Loaded, Report, Sample, Shown, Supervise, Text, Truncate, preview, read_rows,
};

/// All samples, in the order of the files.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Samples.
    pub samples: Vec<Sample>,
    /// What loading did.
    pub report: Report,
    /// Samples of each file.
    pub counts: Vec<usize>,
    /// Where files are drawn from by weight.
    pub mixture: Option<Mixture>,
    /// What stands between the samples of a stream, and whether it is learnt.
    pub separator: (u32, bool),
    /// What the files have and nothing was made of, a line each.
    pub notes: Vec<String>,
}

/// Where in the data training stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Times all data was seen.
    pub epoch: u64,
    /// Place in the epoch's order of the next sample or window.
    pub index: u64,
}

/// An order of `n` things: a permutation that is a function of (seed, epoch), or as they are.
pub(crate) fn order(n: usize, seed: u64, epoch: u64, shuffle: bool) -> Vec<u32> {
    if shuffle { Philox::new(seed, epoch, streams::ORDER).permutation(n) } else { (0..n as u32).collect() }
}

impl Dataset {
    /// Reads and tokenises `paths`, on all threads.
    ///
    /// # Errors
    /// As [`Loaded::load`].
    pub fn load<P: AsRef<std::path::Path>>(
        paths: &[P],
        text: &Text<'_>,
        options: &LoadOptions,
        threads: &ThreadPool,
    ) -> Result<Self> {
        let separator = (text.end_of_text, options.supervise == Supervise::All);
        let Loaded { samples, report, counts, notes } = Loaded::load(paths, text, options, threads)?;
        Ok(Self { samples, report, counts, mixture: None, separator, notes })
    }

    /// Draws from the files by weight, one a file; without weights every row comes once an epoch.
    ///
    /// # Errors
    /// As [`Mixture::new`].
    pub fn mix(&mut self, weights: &[f64]) -> Result<()> {
        self.mixture = (!weights.is_empty()).then(|| Mixture::new(&self.counts, weights)).transpose()?;
        Ok(())
    }

    /// The samples of an epoch in their order, a function of (seed, epoch).
    pub fn order(&self, seed: u64, epoch: u64, shuffle: bool) -> Vec<u32> {
        match &self.mixture {
            Some(mixture) => mixture.order(seed, epoch, shuffle),
            None => order(self.samples.len(), seed, epoch, shuffle),
        }
    }
}
