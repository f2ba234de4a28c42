//! The line a person watches.
use q4_core::memory::human;
use std::time::{Duration, Instant};

/// Speed over the last steps, and when the rest will be done.
#[derive(Debug)]
pub struct Progress {
    steps: u64,
    /// Times and tokens of the last steps.
    recent: std::collections::VecDeque<(Instant, u64)>,
}

/// Steps the speed is averaged over.
const RECENT: usize = 20;

impl Progress {
    /// A run that ends after `steps` steps.
    pub fn new(steps: u64) -> Self {
        Self { steps, recent: [(Instant::now(), 0)].into() }
    }

    /// A step over `tokens` tokens has ended.
    pub fn step(&mut self, tokens: u64) {
        self.step_at(Instant::now(), tokens);
    }

    fn step_at(&mut self, now: Instant, tokens: u64) {
        self.recent.push_back((now, tokens));
        if self.recent.len() > RECENT + 1 {
            self.recent.pop_front();
        }
    }

    /// Tokens a second over the last steps; 0 before the first.
    pub fn tokens_per_s(&self) -> f64 {
        let tokens: u64 = self.recent.iter().skip(1).map(|(_, n)| n).sum();
        match self.span() {
            s if s > 0.0 => tokens as f64 / s,
            _ => 0.0,
        }
    }

    /// Time left after `done` steps.
    pub fn eta(&self, done: u64) -> Duration {
        let each = self.span() / (self.recent.len() - 1).max(1) as f64;
        Duration::try_from_secs_f64(each * self.steps.saturating_sub(done) as f64).unwrap_or(Duration::MAX)
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

    fn span(&self) -> f64 {
        match (self.recent.front(), self.recent.back()) {
            (Some(a), Some(b)) => b.0.duration_since(a.0).as_secs_f64(),
            _ => 0.0,
        }
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

    #[test]
    fn speed_and_rest_follow_the_last_steps() {
        let mut p = Progress::new(100);
        assert_eq!(p.tokens_per_s(), 0.0);
        let start = p.recent[0].0;
        for i in 1..=40u32 {
            p.step_at(start + Duration::from_secs(2) * i, 500);
        }
        assert_eq!(p.tokens_per_s(), 250.0);
        assert_eq!(p.eta(40), Duration::from_secs(120));
        assert_eq!(
            p.line(40, 1.25, 1e-3, Some(3 << 29)),
            "step 40/100  loss 1.2500  lr 1.00e-3  250 tok/s  1.50 GiB  2m 00s left"
        );
    }

    #[test]
    fn times_are_short() {
        let at = |s| clock(Duration::from_secs(s));
        assert_eq!([at(3), at(245), at(7620), at(273_600)], ["3s", "4m 05s", "2h 07m", "3d 04h"]);
    }
}
