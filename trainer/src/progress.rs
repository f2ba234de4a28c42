//! The line a person watches.
use crate::config::Config;
use q4_core::memory::human;
use std::time::Duration;

/// What stands between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Loss on held-out data.
    Eval,
    /// Answers to prompts.
    Sample,
    /// A suite of prompts.
    Behaviour,
    /// A checkpoint.
    Save,
}

/// Every how many steps each [`Work`] is due, and whether it is due in the end.
pub type Due = [(u64, bool); 4];

/// Speed, and when the rest will be done: steps and what stands between them, each at its own pace.
#[derive(Debug)]
pub struct Progress {
    steps: u64,
    due: Due,
    step: Mean,
    tokens: Mean,
    works: [Mean; 4],
}

impl Progress {
    /// A run that ends after `steps` steps.
    pub fn new(steps: u64, due: Due) -> Self {
        Self { steps, due, step: Mean::default(), tokens: Mean::default(), works: [Mean::default(); 4] }
    }

    /// What is due in a run.
    pub fn plan(c: &Config, has_valid: bool) -> Due {
        let all = [
            (has_valid, c.eval.every, true),
            (!c.sample.prompts.is_empty(), c.sample.every, false),
            (c.behaviour.suite.is_some(), c.behaviour.every, true),
            (c.checkpoint.dir.is_some(), c.checkpoint.every, true),
        ];
        all.map(|(is, every, end)| if is { (every, end) } else { (0, false) })
    }

    /// A step over `tokens` tokens has ended.
    pub fn step(&mut self, took: Duration, tokens: u64) {
        self.step.add(took.as_secs_f64());
        self.tokens.add(tokens as f64);
    }

    /// Something between steps has ended.
    pub fn other(&mut self, work: Work, took: Duration) {
        self.works[work as usize].add(took.as_secs_f64());
    }

    /// Tokens a second while steps run; 0 before the first.
    pub fn tokens_per_s(&self) -> f64 {
        if self.step.value > 0.0 { self.tokens.value / self.step.value } else { 0.0 }
    }

    /// Time left after `done` steps, what stands between and behind them included.
    pub fn eta(&self, done: u64) -> Duration {
        let mut seconds = self.step.value * self.steps.saturating_sub(done) as f64;
        for (&(every, end), took) in self.due.iter().zip(&self.works) {
            let of = |steps: u64| steps.checked_div(every).unwrap_or(0);
            let last = end && done < self.steps && self.steps.checked_rem(every) != Some(0);
            let times = of(self.steps).saturating_sub(of(done)) + u64::from(last);
            seconds += took.value * times as f64;
        }
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// `step 120/1000  loss 2.345  lr 1.0e-3  881530 tok/s  1.50 GiB  4m 05s left`.
    pub fn line(&self, done: u64, loss: f64, lr: f64, memory: Option<u64>) -> String {
        let memory = memory.map_or(String::new(), |bytes| format!("  {}", human(bytes)));
        format!(
            "step {done}/{}  loss {loss:.4}  lr {lr:.2e}  {:.0} tok/s{memory}  {} left",
            self.steps,
            self.tokens_per_s(),
            clock(self.eta(done))
        )
    }
}

/// A mean in which the last hundred count most.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, x: f64) {
        self.count = (self.count + 1).min(100);
        self.value += (x - self.value) / f64::from(self.count);
    }
}

/// `3s`, `4m 05s`, `2h 07m`, `3d 04h`.
pub fn clock(time: Duration) -> String {
    match time.as_secs() {
        s @ 0..60 => format!("{s}s"),
        s @ 60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        s @ 3600..86400 => format!("{}h {:02}m", s / 3600, s / 60 % 60),
        s => format!("{}d {:02}h", s / 86400, s / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: (u64, bool) = (0, false);

    #[test]
    fn speed_and_rest_follow_the_steps() {
        let mut p = Progress::new(100, [NEVER; 4]);
        assert_eq!((p.tokens_per_s(), p.eta(0)), (0.0, Duration::ZERO));
        for _ in 0..40 {
            p.step(Duration::from_secs(2), 500);
        }
        assert_eq!(p.tokens_per_s(), 250.0);
        assert_eq!(p.eta(40), Duration::from_secs(120));
        assert_eq!(
            p.line(40, 1.25, 1e-3, Some(3 << 29)),
            "step 40/100  loss 1.2500  lr 1.00e-3  250 tok/s  1.50 GiB  2m 00s left"
        );
    }

    /// Steps of one second that waver, evaluations of thirty each twenty steps, saves of five each fifty.
    #[test]
    fn the_time_left_shrinks_and_does_not_jump() {
        let steps = 1010;
        let mut p = Progress::new(steps, [(20, true), NEVER, NEVER, (50, true)]);
        p.other(Work::Eval, Duration::from_secs(30));
        p.other(Work::Save, Duration::from_secs(5));
        let truth = |done: u64| {
            let times = |every: u64| (steps / every - done / every + u64::from(done < steps)) as f64;
            (steps - done) as f64 + 30.0 * times(20) + 5.0 * times(50)
        };
        for done in 1..=steps {
            p.step(Duration::from_millis(900 + 50 * (done * 7 % 5)), 10);
            if done % 20 == 0 {
                p.other(Work::Eval, Duration::from_secs(30));
            }
            if done > 3 {
                let (eta, truth) = (p.eta(done).as_secs_f64(), truth(done));
                assert!((eta - truth).abs() <= 0.05 * truth, "after {done}: {eta} instead of {truth}");
            }
        }
        assert_eq!(p.eta(steps), Duration::ZERO);
    }

    #[test]
    fn times_are_short() {
        let at = |s| clock(Duration::from_secs(s));
        assert_eq!([at(3), at(245), at(7620), at(273_600)], ["3s", "4m 05s", "2h 07m", "3d 04h"]);
    }
}
