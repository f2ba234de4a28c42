//! How well logits predict a text, and how far the predictions of two models lie apart.
//!
//! A row of logits `l` is the distribution `p_i = exp(l_i - lse(l))` with `lse(l) = ln Σ exp(l_i)`. Logits
//! are f32 as the model wrote them and must be finite; everything here is f64 and in nats.
use crate::scan::first_maximum;

/// Loss over the tokens of a text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Loss {
    sum: f64,
    tokens: usize,
}

impl Loss {
    /// Adds the tokens `next`, each behind its row of `rows`, `[next.len(), vocab]`. Ids must be below
    /// `vocab`.
    pub fn add(&mut self, rows: &[f32], next: &[u32]) {
        for (row, id) in split(rows, next.len()).zip(next) {
            self.add_token(row, LogSum::of(row), *id);
        }
    }

    /// As [`Self::add`], of those tokens alone that are `learnt`.
    pub fn add_learnt(&mut self, rows: &[f32], next: &[u32], learnt: &[bool]) {
        for ((row, id), _) in split(rows, next.len()).zip(next).zip(learnt).filter(|(_, learnt)| **learnt) {
            self.add_token(row, LogSum::of(row), *id);
        }
    }

    /// Tokens that were predicted.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Mean of `-ln p(token)`; NaN before the first token.
    pub fn mean(&self) -> f64 {
        self.sum / self.tokens as f64
    }

    /// `exp(mean)`: as uncertain as an even choice between this many tokens.
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    fn add_token(&mut self, row: &[f32], sum: LogSum, id: u32) {
        self.sum -= sum.ln_p(row[id as usize]);
        self.tokens += 1;
    }
}

/// ln of the probability of token `id` after a row of logits, `[vocab]`.
pub fn logprob(logits: &[f32], id: u32) -> f32 {
    LogSum::of(logits).ln_p(logits[id as usize]) as f32
}

/// Two models over the same text. A is the reference.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    divergences: Vec<f64>,
    agreed: usize,
    a: Loss,
    b: Loss,
}

impl Comparison {
    /// Adds the tokens `next`, each behind its row of either model, both `[next.len(), vocab]`. Ids must be
    /// below `vocab`.
    pub fn add(&mut self, rows_a: &[f32], rows_b: &[f32], next: &[u32]) {
        assert_eq!(rows_a.len(), rows_b.len(), "rows of equal shape");
        let rows = split(rows_a, next.len()).zip(split(rows_b, next.len()));
        for ((a, b), id) in rows.zip(next) {
            let (sum_a, sum_b) = (LogSum::of(a), LogSum::of(b));
            self.divergences.push(divergence(a, sum_a, b, sum_b));
            self.agreed += usize::from(first_maximum(a) == first_maximum(b));
            self.a.add_token(a, sum_a, *id);
            self.b.add_token(b, sum_b, *id);
        }
    }

    /// What was seen so far; `None` before the first token.
    pub fn summary(&self) -> Option<Summary> {
        let mut sorted = self.divergences.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let n = sorted.len();
        Some(Summary {
            kl_mean: sorted.iter().sum::<f64>() / n as f64,
            kl_p99: sorted[nearest_rank(99, n)?],
            kl_max: *sorted.last()?,
            top1_agreement: self.agreed as f64 / n as f64,
            a: self.a,
            b: self.b,
        })
    }
}

/// What a [`Comparison`] saw. Divergences are `KL(A||B)` of one position each, in nats.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// Their mean.
    pub kl_mean: f64,
    /// Their 99th percentile by nearest rank: of all `n` in ascending order the one with number `ceil(0.99
    /// n)`.
    pub kl_p99: f64,
    /// The largest.
    pub kl_max: f64,
    /// Share of positions where both find the same token most likely; of several equal ones the lowest id
    /// counts.
    pub top1_agreement: f64,
    /// Loss of A.
    pub a: Loss,
    /// Loss of B.
    pub b: Loss,
}

fn split(rows: &[f32], n: usize) -> impl Iterator<Item = &[f32]> {
    assert!(n > 0 && !rows.is_empty() && rows.len() % n == 0, "{} logits for {n} rows", rows.len());
    rows.chunks_exact(rows.len() / n)
}

/// `lse(l) = peak + ln`, in two parts so that large logits lose nothing: `ln` is that of `Σ exp(l_i - peak)`.
#[derive(Clone, Copy)]
struct LogSum {
    peak: f64,
    ln: f64,
}

impl LogSum {
    fn of(row: &[f32]) -> Self {
        let peak = f64::from(row[first_maximum(row)]);
        Self { peak, ln: row.iter().map(|l| (f64::from(*l) - peak).exp()).sum::<f64>().ln() }
    }

    /// `ln p` of a token with this logit.
    fn ln_p(self, logit: f32) -> f64 {
        (f64::from(logit) - self.peak) - self.ln
    }
}

/// `KL(A||B) = Σ p_A (ln p_A - ln p_B)`. It is never negative; what rounding puts below 0 is 0.
fn divergence(a: &[f32], sum_a: LogSum, b: &[f32], sum_b: LogSum) -> f64 {
    let term = |(a, b): (&f32, &f32)| {
        let ln_p = sum_a.ln_p(*a);
        ln_p.exp() * (ln_p - sum_b.ln_p(*b))
    };
    a.iter().zip(b).map(term).sum::<f64>().max(0.0)
}

/// Index of a percentile among `n` ascending values.
fn nearest_rank(percent: usize, n: usize) -> Option<usize> {
    (percent * n).div_ceil(100).checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logs(p: [f64; 3]) -> [f32; 3] {
        p.map(|p| p.ln() as f32)
    }

    #[test]
    fn the_loss_is_the_mean_of_negative_logarithms() {
        let mut loss = Loss::default();
        let rows = [logs([0.5, 0.25, 0.25]), logs([0.1, 0.2, 0.7])].concat();
        loss.add(&rows, &[1, 2]);
        let mean = -(0.25f64.ln() + 0.7f64.ln()) / 2.0;
        assert!((loss.mean() - mean).abs() < 1e-7, "{}", loss.mean());
        loss.add(&logs([0.5, 0.25, 0.25]), &[0]);
        let mean = (2.0 * mean - 0.5f64.ln()) / 3.0;
        assert!((loss.mean() - mean).abs() < 1e-7, "{}", loss.mean());
        assert!((loss.perplexity() - mean.exp()).abs() < 1e-6);
        assert_eq!(loss.tokens(), 3);
    }

    #[test]
    fn even_logits_of_any_size_choose_between_all_tokens() {
        for size in [-3e38, -1e4, 0.0, 1e4, 3e38] {
            let mut loss = Loss::default();
            loss.add(&[size; 8], &[3]);
            assert!((loss.mean() - 8f64.ln()).abs() < 1e-12, "{size}: {}", loss.mean());
        }
    }

    #[test]
    fn divergence_is_what_its_definition_says_and_not_symmetric() {
        let (p, q) = ([0.7, 0.2, 0.1], [0.4, 0.5, 0.1]);
        let kl = |p: [f64; 3], q: [f64; 3]| p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum::<f64>();
        let seen = |p, q| {
            let mut c = Comparison::default();
            c.add(&logs(p), &logs(q), &[0]);
            c.summary().expect("one token")
        };
        assert!((seen(p, q).kl_mean - kl(p, q)).abs() < 1e-7);
        assert!((seen(q, p).kl_mean - kl(q, p)).abs() < 1e-7);
        assert!((kl(p, q) - kl(q, p)).abs() > 1e-2, "the test tells one from the other");
        // A constant added to all logits changes no distribution.
        let mut c = Comparison::default();
        c.add(&logs(p), &logs(p).map(|l| l + 2.0), &[0]);
        assert!(c.summary().expect("one token").kl_max < 1e-7);
    }

    #[test]
    fn equal_rows_do_not_diverge_at_all() {
        let mut c = Comparison::default();
        let row: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin() * 20.0).collect();
        c.add(&row, &row, &[7]);
        let s = c.summary().expect("one token");
        assert_eq!((s.kl_max, s.top1_agreement, s.a.mean()), (0.0, 1.0, s.b.mean()));
    }

    #[test]
    fn both_losses_are_those_of_the_model_alone() {
        let (rows_a, rows_b) = (logs([0.5, 0.25, 0.25]), logs([0.1, 0.2, 0.7]));
        let (mut a, mut b, mut c) = (Loss::default(), Loss::default(), Comparison::default());
        a.add(&rows_a, &[2]);
        b.add(&rows_b, &[2]);
        c.add(&rows_a, &rows_b, &[2]);
        let s = c.summary().expect("one token");
        assert_eq!((s.a.mean(), s.b.mean()), (a.mean(), b.mean()));
        assert_eq!((s.a.tokens(), s.b.tokens()), (1, 1));
    }

    #[test]
    fn top_1_breaks_ties_by_the_lowest_id() {
        let mut c = Comparison::default();
        let rows_a = [1.0, 3.0, 3.0, /**/ 5.0, 5.0, 1.0];
        let rows_b = [0.0, 9.0, 2.0, /**/ 0.0, 1.0, 0.0];
        c.add(&rows_a, &rows_b, &[0, 0]);
        assert_eq!(c.summary().expect("two tokens").top1_agreement, 0.5);
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let rank = |n| nearest_rank(99, n).map(|i| i + 1);
        assert_eq!([1, 2, 99, 100, 101, 200, 1000].map(rank), [1, 2, 99, 99, 100, 198, 990].map(Some));
        assert_eq!(rank(0), None);
        // 100 positions: one that diverges is the maximum and not the percentile, two are both.
        for (outliers, p99) in [(1, false), (2, true)] {
            let mut c = Comparison::default();
            for i in 0..100 {
                let b = if i < outliers { [0.0, 4.0] } else { [4.0, 0.0] };
                c.add(&[4.0, 0.0], &b, &[0]);
            }
            let s = c.summary().expect("100 tokens");
            assert_eq!((s.kl_p99 > 0.0, s.kl_max > 0.0), (p99, true));
        }
    }

    #[test]
    fn nothing_predicted_is_no_result() {
        assert!(Comparison::default().summary().is_none());
        assert!(Loss::default().mean().is_nan());
    }
}
