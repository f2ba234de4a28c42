//! What many times amount to.
use serde::Serialize;
use std::time::Duration;

/// Half, nine tenths and 99 hundredths of all times are no longer, and none is longer than the last; in
/// seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Spread {
    /// Of these times; nothing of none.
    pub fn of(times: impl IntoIterator<Item = Duration>) -> Option<Self> {
        let mut all: Vec<_> = times.into_iter().map(|t| t.as_secs_f64()).collect();
        all.sort_by(f64::total_cmp);
        let max = *all.last()?;
        // The smallest time that such a share does not exceed.
        let rank = |share: f64| all[((share * all.len() as f64).ceil() as usize).clamp(1, all.len()) - 1];
        Some(Self { p50: rank(0.5), p90: rank(0.9), p99: rank(0.99), max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_times_that_occurred() {
        let spread = |n: u64| Spread::of((1..=n).rev().map(Duration::from_secs));
        assert_eq!(spread(0), None);
        assert_eq!(spread(1), Some(Spread { p50: 1.0, p90: 1.0, p99: 1.0, max: 1.0 }));
        assert_eq!(spread(10), Some(Spread { p50: 5.0, p90: 9.0, p99: 10.0, max: 10.0 }));
        assert_eq!(spread(200), Some(Spread { p50: 100.0, p90: 180.0, p99: 198.0, max: 200.0 }));
    }
}
