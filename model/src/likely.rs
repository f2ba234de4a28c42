//! The most likely next tokens and their logarithms, for people who ask what else a model would have said.

/// A token and ln of its probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likely {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability among all tokens.
    pub logprob: f32,
}

/// The most likely tokens of many steps. Its memory is laid out at construction.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    most: usize,
    /// Tokens of a step: `most`, or as many as there are.
    each: usize,
    all: Vec<Likely>,
}

impl Ranking {
    /// For up to `steps` steps, the `most` best of each.
    pub fn new(most: usize, steps: usize) -> Self {
        Self { most, each: 0, all: Vec::with_capacity(most.saturating_mul(steps)) }
    }

    /// Notes the best of `logits` `[vocab]`, best first, the lower id first among equals. Nothing is noted
    /// where a logit is NaN: who samples says so.
    pub fn look(&mut self, logits: &[f32]) {
        let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if self.most == 0 || !peak.is_finite() || logits.iter().any(|l| l.is_nan()) {
            return;
        }
        self.each = self.most.min(logits.len());
        let start = self.all.len();
        for (id, &logit) in (0u32..).zip(logits) {
            let best = &self.all[start..];
            if best.len() == self.each {
                if best.last().is_some_and(|worst| logit <= worst.logprob) {
                    continue;
                }
                self.all.pop();
            }
            let place = start + self.all[start..].partition_point(|l| l.logprob >= logit);
            self.all.insert(place, Likely { id, logprob: logit });
        }
        let sum: f64 = logits.iter().map(|l| f64::from(l - peak).exp()).sum();
        let whole = f64::from(peak) + sum.ln();
        for likely in &mut self.all[start..] {
            likely.logprob = (f64::from(likely.logprob) - whole) as f32;
        }
    }

    /// The steps in order; none where nothing was noted.
    pub fn steps(&self) -> impl Iterator<Item = &[Likely]> {
        self.all.chunks_exact(self.each.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_with_their_probabilities() {
        let logits = [1.0f32, 3.0, 2.0, 3.0, f32::NEG_INFINITY, -1.0];
        let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let mut ranking = Ranking::new(3, 2);
        ranking.look(&logits);
        ranking.look(&[0.0; 6]);
        let steps: Vec<_> = ranking.steps().collect();
        assert_eq!(steps[0].iter().map(|l| l.id).collect::<Vec<_>>(), [1, 3, 2]);
        for likely in steps[0] {
            let exact = f64::from(logits[likely.id as usize]) - sum.ln();
            assert!((f64::from(likely.logprob) - exact).abs() < 1e-6, "{likely:?}, exactly {exact}");
        }
        assert_eq!(steps[1].iter().map(|l| l.id).collect::<Vec<_>>(), [0, 1, 2]);
        assert!((steps[1][0].logprob - (1.0f32 / 6.0).ln()).abs() < 1e-6);
        let mut all = Ranking::new(9, 1);
        all.look(&logits);
        assert_eq!(all.steps().map(<[Likely]>::len).collect::<Vec<_>>(), [6]);
        assert_eq!(Ranking::new(0, 5).steps().count(), 0);
    }
}
