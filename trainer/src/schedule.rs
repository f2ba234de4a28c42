//! Learning rate of a step.
use serde::{Deserialize, Serialize};

/// Course after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// `min + (peak - min) (1 + cos(pi p)) / 2`.
    #[default]
    Cosine,
    /// `peak + (min - peak) p`.
    Linear,
    /// `peak`.
    Constant,
    /// `peak`, then over the last `decay` of all steps `peak + (min - peak) sqrt(p)`.
    Wsd,
}

/// A schedule over a fixed number of steps; `p` runs from 0 after the warm-up to 1 at the last step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// Course.
    pub kind: Kind,
    /// Largest rate.
    pub peak: f64,
    /// Smallest rate as a share of `peak`.
    pub min_ratio: f64,
    /// Steps of warm-up: step s has `peak (s + 1) / warmup`.
    pub warmup: u64,
    /// All steps.
    pub steps: u64,
    /// Share of `steps` in which [`Kind::Wsd`] decays.
    pub decay: f64,
}

impl Schedule {
    /// Rate of step `step`, from 0. Beyond the end it stays where it ended.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let min = self.peak * self.min_ratio;
        let last = self.steps.saturating_sub(1);
        let progress = |from: f64| {
            let span = last as f64 - from;
            if span <= 0.0 { 1.0 } else { ((step as f64 - from) / span).clamp(0.0, 1.0) }
        };
        match self.kind {
            Kind::Constant => self.peak,
            Kind::Linear => self.peak + (min - self.peak) * progress(self.warmup as f64),
            Kind::Cosine => {
                let p = progress(self.warmup as f64);
                min + (self.peak - min) * 0.5 * (1.0 + (std::f64::consts::PI * p).cos())
            }
            Kind::Wsd => {
                let from = (self.steps as f64 * (1.0 - self.decay)).max(self.warmup as f64);
                if (step as f64) < from {
                    self.peak
                } else {
                    self.peak + (min - self.peak) * progress(from).sqrt()
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: Kind) -> Schedule {
        Schedule { kind, peak: 2.0, min_ratio: 0.1, warmup: 10, steps: 111, decay: 0.2 }
    }

    #[test]
    fn every_kind_warms_up_peaks_and_ends_where_it_should() {
        for (kind, end) in [(Kind::Cosine, 0.2), (Kind::Linear, 0.2), (Kind::Constant, 2.0), (Kind::Wsd, 0.2)]
        {
            let s = schedule(kind);
            let close = |step: u64, want: f64| {
                assert!((s.lr(step) - want).abs() < 1e-12, "{kind:?} {step}: {}", s.lr(step))
            };
            close(0, 0.2);
            close(9, 2.0);
            close(10, 2.0);
            close(110, end);
            close(1000, end);
            assert!((10..200).all(|i| s.lr(i + 1) <= s.lr(i) + 1e-15), "{kind:?} rises");
        }
        assert!((schedule(Kind::Cosine).lr(60) - 1.1).abs() < 1e-12);
        assert!((schedule(Kind::Linear).lr(60) - 1.1).abs() < 1e-12);
        assert_eq!(schedule(Kind::Wsd).lr(88), 2.0);
        assert!(schedule(Kind::Wsd).lr(90) < 2.0);
    }

    #[test]
    fn short_runs_are_finite() {
        for kind in [Kind::Cosine, Kind::Linear, Kind::Constant, Kind::Wsd] {
            for (warmup, steps) in [(0, 1), (0, 2), (1, 1), (5, 3)] {
                let s = Schedule { warmup, steps, ..schedule(kind) };
                assert!((0..10).all(|i| s.lr(i).is_finite() && s.lr(i) > 0.0), "{kind:?} {warmup} {steps}");
            }
        }
    }
}
