//! Files that are drawn from by weight: what an epoch has of each, and in which order.
use super::order;
use crate::rng::{Philox, streams};
use q4_core::{Code, Error, Result};

/// Files with weights. An epoch has as many rows as all files together, each file its share of them; a file
/// begins anew only once all its rows were there, so after a while each row comes as often as its weight
/// says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mixture {
    parts: Vec<Part>,
}

/// Samples of a file, and how many of them an epoch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    first: usize,
    count: usize,
    share: usize,
}

impl Mixture {
    /// `counts[i]` samples of file `i` lie behind each other. [`Code::Usage`] where a share is no row.
    pub fn new(counts: &[usize], weights: &[f64]) -> Result<Self> {
        let rows: usize = counts.iter().sum();
        let total: f64 = weights.iter().sum();
        let exact: Vec<f64> = weights.iter().map(|w| rows as f64 * w / total).collect();
        let mut shares: Vec<usize> = exact.iter().map(|x| x.floor() as usize).collect();
        // What rounding left goes to those it took most from, earlier files first.
        let mut by_rest: Vec<usize> = (0..shares.len()).collect();
        by_rest.sort_by(|a, b| (exact[*b].fract()).total_cmp(&exact[*a].fract()).then(a.cmp(b)));
        for i in by_rest.into_iter().take(rows.saturating_sub(shares.iter().sum())) {
            shares[i] += 1;
        }
        let mut first = 0;
        let parts = counts.iter().zip(shares).map(|(&count, share)| {
            first += count;
            Part { first: first - count, count, share }
        });
        let parts: Vec<_> = parts.collect();
        match parts.iter().position(|p| p.share == 0 || p.count == 0) {
            None => Ok(Self { parts }),
            Some(i) => Err(Error::new(Code::Usage, format!("data.train: the weight of file {}", i + 1))
                .need("at least one row of each file in an epoch")
                .have(format!("{} of {rows} rows, the file has {}", exact[i], counts[i]))
                .fix("a larger weight, or leave the file out")),
        }
    }

    /// Rows an epoch has of each file, and rows of each file.
    pub fn shares(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.parts.iter().map(|p| (p.share, p.count))
    }

    /// The samples of an epoch: a function of (seed, epoch).
    pub(super) fn order(&self, seed: u64, epoch: u64, shuffle: bool) -> Vec<u32> {
        let mut drawn = Vec::new();
        for (i, part) in self.parts.iter().enumerate() {
            let (mut times, mut own) = (None, Vec::new());
            for k in 0..part.share {
                let at = epoch * part.share as u64 + k as u64;
                let (time, j) = (at / part.count as u64, (at % part.count as u64) as usize);
                if times != Some(time) {
                    own = match shuffle {
                        true => Philox::new(seed, time, streams::FREE ^ i as u32).permutation(part.count),
                        false => (0..part.count as u32).collect(),
                    };
                    times = Some(time);
                }
                // Where it stands among the rows of an epoch that has its files evenly spread.
                let place = (2 * k + 1) as f64 / (2 * part.share) as f64;
                drawn.push((place, part.first as u32 + own[j]));
            }
        }
        if shuffle {
            let places = order(drawn.len(), seed, epoch, true);
            return places.into_iter().map(|i| drawn[i as usize].1).collect();
        }
        drawn.sort_by(|a, b| a.0.total_cmp(&b.0));
        drawn.into_iter().map(|(_, sample)| sample).collect()
    }
}
