//! Keeps a bad step from reaching the weights: not finite, or far outside of what the last steps showed.
pub use crate::config::GuardOptions;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The norm of all gradients that a step is judged by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// That of the step before, where blocks move in the backward pass and none has yet.
    OfLast(f64),
    /// That of this step. Nothing has moved.
    Whole(f64),
    /// That of this step, whose blocks have moved as far as gradients were finite.
    Moved(f64),
}

/// What to do with a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Take it.
    Go,
    /// Leave weights and states alone and go on.
    Skip(Reason),
    /// As [`Verdict::Skip`], and end the training: it was the last one patience allows.
    Stop(Reason),
}

/// Why a step is bad.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// Loss or gradient norm is NaN or infinite.
    NotFinite {
        /// Loss.
        loss: f64,
        /// Norm of all gradients.
        norm: f64,
    },
    /// Loss or norm is too far above its mean.
    Spike {
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// Its value.
        value: f64,
        /// Standard deviations above the mean.
        deviations: f64,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFinite { loss, norm } => write!(f, "not finite: loss {loss}, gradient norm {norm}"),
            Self::Spike { what, value, deviations } => {
                write!(f, "{what} {value:.4} is {deviations:.1} standard deviations above its mean")
            }
        }
    }
}

/// The guard and what it remembers, which belongs into a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guard {
    options: GuardOptions,
    losses: Window,
    norms: Window,
    in_a_row: u32,
    skipped: u64,
}

impl Guard {
    /// A guard that has seen nothing.
    pub fn new(options: GuardOptions) -> Self {
        Self { options, losses: Window::default(), norms: Window::default(), in_a_row: 0, skipped: 0 }
    }

    /// The same memory under other limits.
    pub fn with(self, options: GuardOptions) -> Self {
        Self { options, ..self }
    }

    /// Steps skipped so far.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Counts a step that was passed over for want of anything to learn; it is not a bad one.
    pub fn pass_over(&mut self) {
        self.skipped += 1;
    }

    /// Judges a step by its loss and the norm of its gradients before clipping.
    pub fn judge(&mut self, loss: f64, norm: Norm) -> Verdict {
        match norm {
            // It is not known to be good yet.
            Norm::OfLast(norm) => self.bad(loss, norm).map_or(Verdict::Go, |reason| self.refuse(reason)),
            Norm::Whole(norm) => match self.bad(loss, norm) {
                None => self.take(loss, norm),
                Some(reason) => self.refuse(reason),
            },
            // A spike cannot be taken back.
            Norm::Moved(norm) if norm.is_finite() => self.take(loss, norm),
            Norm::Moved(norm) => self.refuse(Reason::NotFinite { loss, norm }),
        }
    }

    fn take(&mut self, loss: f64, norm: f64) -> Verdict {
        self.in_a_row = 0;
        self.losses.push(loss, self.options.window);
        self.norms.push(norm, self.options.window);
        Verdict::Go
    }

    fn refuse(&mut self, reason: Reason) -> Verdict {
        self.in_a_row += 1;
        self.skipped += 1;
        if self.in_a_row >= self.options.patience { Verdict::Stop(reason) } else { Verdict::Skip(reason) }
    }

    fn bad(&self, loss: f64, norm: f64) -> Option<Reason> {
        if !(loss.is_finite() && norm.is_finite()) {
            return Some(Reason::NotFinite { loss, norm });
        }
        let GuardOptions { spike, window, .. } = self.options;
        if spike <= 0.0 {
            return None;
        }
        [("loss", loss, &self.losses), ("gradient norm", norm, &self.norms)].into_iter().find_map(
            |(what, value, seen)| {
                let deviations = seen.deviations(value, window)?;
                (deviations > spike).then_some(Reason::Spike { what, value, deviations })
            },
        )
    }
}

/// The last good values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Window {
    values: Vec<f64>,
    next: usize,
}

impl Window {
    fn push(&mut self, x: f64, size: usize) {
        if self.values.len() < size {
            self.values.push(x);
        } else if size > 0 {
            self.values[self.next] = x;
            self.next = (self.next + 1) % size;
        }
    }

    /// How far above the mean; `None` before the window is full, or where all values are equal.
    fn deviations(&self, x: f64, size: usize) -> Option<f64> {
        let n = self.values.len();
        if n < size.max(2) {
            return None;
        }
        let mean = self.values.iter().sum::<f64>() / n as f64;
        let variance = self.values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        (variance > 0.0).then(|| (x - mean) / variance.sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Guard {
        fn check(&mut self, loss: f64, norm: f64) -> Verdict {
            self.judge(loss, Norm::Whole(norm))
        }
        fn before(&mut self, loss: f64) -> Verdict {
            self.judge(loss, Norm::OfLast(1.0))
        }
        fn moved(&mut self, norm: f64) -> Verdict {
            self.judge(1.0, Norm::Moved(norm))
        }
    }

    #[test]
    fn what_is_not_finite_is_skipped_and_then_stops() {
        let mut g = Guard::new(GuardOptions { patience: 3, ..GuardOptions::default() });
        assert_eq!(g.check(1.0, 1.0), Verdict::Go);
        assert!(matches!(g.check(f64::NAN, 1.0), Verdict::Skip(Reason::NotFinite { .. })));
        assert!(matches!(g.check(1.0, f64::INFINITY), Verdict::Skip(_)));
        assert_eq!(g.check(1.0, 1.0), Verdict::Go, "a good step ends the row");
        assert!(matches!(g.check(f64::NAN, 1.0), Verdict::Skip(_)));
        assert!(matches!(g.check(f64::NAN, 1.0), Verdict::Skip(_)));
        assert!(matches!(g.check(f64::NAN, 1.0), Verdict::Stop(_)));
        assert_eq!(g.skipped(), 5);
    }

    #[test]
    fn steps_that_break_in_their_backward_pass_are_counted() {
        let mut g = Guard::new(GuardOptions { patience: 3, ..GuardOptions::default() });
        assert_eq!((g.before(1.0), g.moved(1.0)), (Verdict::Go, Verdict::Go));
        for _ in 0..2 {
            assert_eq!(g.before(1.0), Verdict::Go);
            assert!(matches!(g.moved(f64::NAN), Verdict::Skip(Reason::NotFinite { .. })));
        }
        assert_eq!(g.before(1.0), Verdict::Go);
        assert!(matches!(g.moved(f64::INFINITY), Verdict::Stop(_)));
        assert!(matches!(g.before(f64::NAN), Verdict::Stop(_)));
    }

    #[test]
    fn spikes_are_skipped_and_not_remembered() {
        let mut g = Guard::new(GuardOptions { patience: 100, spike: 6.0, window: 16 });
        for i in 0..16 {
            assert_eq!(g.check(2.0 + 0.01 * f64::from(i % 3), 1.0 + 0.01 * f64::from(i % 5)), Verdict::Go);
        }
        for _ in 0..20 {
            assert!(matches!(g.check(3.0, 1.0), Verdict::Skip(Reason::Spike { what: "loss", .. })));
            assert!(matches!(g.check(2.0, 9.0), Verdict::Skip(Reason::Spike { what: "gradient norm", .. })));
        }
        assert_eq!(g.check(1.5, 0.5), Verdict::Go, "below the mean is no spike");
        let saved = serde_json::to_string(&g).expect("JSON");
        let mut back: Guard = serde_json::from_str(&saved).expect("JSON");
        assert_eq!(back, g);
        assert_eq!(back.check(3.0, 1.0), g.check(3.0, 1.0));
    }
}
