//! Picks the next token from logits: penalty, temperature, top-k, top-p, min-p, draw.
//!
//! The order and the rules are those of transformers, the generator is fixed, nothing is allocated per token.
use q4_core::{Code, Error, Result};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use std::cmp::Ordering;

/// How to pick. [`Default`] is greedy with everything else off.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Tokens kept by rank; 0 keeps all.
    pub top_k: usize,
    /// Probability mass kept, the token that crosses it included; 1 keeps all.
    pub top_p: f32,
    /// Least probability kept, relative to the most probable token; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Seed of ChaCha8.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl SamplingParams {
    /// Refuses what has no meaning, with [`Code::Usage`] and the name of the parameter.
    pub fn validate(&self) -> Result<()> {
        let rules = [
            (
                "temperature",
                self.temperature,
                "a number from 0 to 100",
                (0.0..=100.0).contains(&self.temperature),
            ),
            ("top_p", self.top_p, "a number above 0, at most 1", self.top_p > 0.0 && self.top_p <= 1.0),
            ("min_p", self.min_p, "a number from 0, below 1", (0.0..1.0).contains(&self.min_p)),
            (
                "repetition_penalty",
                self.repetition_penalty,
                "a number above 0, at most 100",
                self.repetition_penalty > 0.0 && self.repetition_penalty <= 100.0,
            ),
        ];
        match rules.into_iter().find(|rule| !rule.3) {
            None => Ok(()),
            Some((name, have, need, _)) => Err(Error::new(Code::Usage, format!("{name} has no meaning"))
                .need(need)
                .have(have.to_string())),
        }
    }
}

/// A token that may still be drawn. `weight` is its logit first, then its unnormalised probability.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    weight: f32,
    id: u32,
}

/// Draws tokens of one sequence. Its memory is laid out at construction.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
    vocab_size: usize,
    candidates: Vec<Candidate>,
    /// One bit for each token, set while the penalty runs: a token is penalised once however often it occurred.
    seen: Vec<u64>,
}

impl Sampler {
    /// A sampler for `vocab_size` logits. Errors: invalid parameters, [`Code::Usage`].
    pub fn new(params: SamplingParams, vocab_size: usize) -> Result<Self> {
        params.validate()?;
        Ok(Self {
            rng: ChaCha8Rng::seed_from_u64(params.seed),
            params,
            vocab_size,
            candidates: Vec::with_capacity(vocab_size),
            seen: vec![0; vocab_size.div_ceil(64)],
        })
    }

    /// The parameters in force.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Whether the next token is the most likely one, whatever came before.
    pub fn is_greedy(&self) -> bool {
        self.params.temperature == 0.0 && self.params.repetition_penalty == 1.0
    }

    /// Next token. `logits` `[vocab_size]` are changed by the penalty; `recent` are the tokens it applies to.
    ///
    /// Errors: NaN or +inf among the logits, or all of them -inf, [`Code::NonFinite`]; another length,
    /// [`Code::ShapeMismatch`]; a recent token outside of the vocabulary, [`Code::ValueInvalid`].
    pub fn sample(&mut self, logits: &mut [f32], recent: &[u32]) -> Result<u32> {
        self.check(logits, recent)?;
        self.penalise(logits, recent);
        let best = first_maximum(logits);
        if logits[best] == f32::NEG_INFINITY {
            return Err(Error::new(Code::NonFinite, "logits: no token has a chance").have("-inf everywhere"));
        }
        if self.params.temperature == 0.0 {
            return Ok(best as u32);
        }
        let SamplingParams { temperature, top_k, top_p, min_p, .. } = self.params;
        let peak = logits[best];
        self.candidates.clear();
        let possible = logits.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY);
        self.candidates.extend(possible.map(|(id, &weight)| Candidate { weight, id: id as u32 }));
        if top_k > 0 {
            let k = top_k.min(self.candidates.len());
            keep_best(&mut self.candidates, k, by_rank);
            self.candidates.truncate(k);
        }
        for c in &mut self.candidates {
            c.weight = ((c.weight - peak) / temperature).exp();
        }
        if top_p < 1.0 {
            let kept = nucleus(&mut self.candidates, f64::from(top_p));
            self.candidates.truncate(kept);
        }
        if min_p > 0.0 {
            // The most probable token has weight exp(0) = 1, so the threshold needs no normalisation.
            self.candidates.retain(|c| c.weight >= min_p);
        }
        Ok(self.draw())
    }

    fn check(&self, logits: &[f32], recent: &[u32]) -> Result<()> {
        if logits.len() != self.vocab_size || logits.is_empty() {
            return Err(Error::new(Code::ShapeMismatch, "logits: not the size of the vocabulary")
                .need(format!("{} values", self.vocab_size))
                .have(format!("{} values", logits.len())));
        }
        if let Some(id) = recent.iter().find(|id| **id as usize >= logits.len()) {
            return Err(Error::new(Code::ValueInvalid, "recent tokens: one is outside of the vocabulary")
                .need(format!("ids below {}", logits.len()))
                .have(id.to_string()));
        }
        if let Some(at) = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY) {
            return Err(Error::new(Code::NonFinite, format!("logits: token {at} has no usable value"))
                .need("finite numbers or -inf")
                .have(logits[at].to_string()));
        }
        Ok(())
    }

    fn penalise(&mut self, logits: &mut [f32], recent: &[u32]) {
        let penalty = self.params.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        for &id in recent {
            let (word, bit) = (id as usize / 64, 1 << (id % 64));
            if self.seen[word] & bit == 0 {
                self.seen[word] |= bit;
                let logit = &mut logits[id as usize];
                // Dividing a negative logit would make the token likelier. A finite logit stays finite.
                let scaled = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
                *logit = if logit.is_finite() { scaled.clamp(f32::MIN, f32::MAX) } else { *logit };
            }
        }
        for &id in recent {
            self.seen[id as usize / 64] = 0;
        }
    }

    fn draw(&mut self) -> u32 {
        let total: f64 = self.candidates.iter().map(|c| f64::from(c.weight)).sum();
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total;
        for c in &self.candidates {
            left -= f64::from(c.weight);
            if left < 0.0 {
                return c.id;
            }
        }
        // Only rounding leads here. The heaviest candidate is always right to return.
        self.candidates.iter().copied().min_by(by_rank).map_or(0, |c| c.id)
    }
}

/// Index of the largest value, the first of several.
fn first_maximum(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = i;
        }
    }
    best
}

/// Heavier first, lower id first among equals: a total order, so results do not depend on the algorithm.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// Moves the `k` first of the order to the front, unsorted, in linear time.
fn keep_best(all: &mut [Candidate], k: usize, mut order: impl FnMut(&Candidate, &Candidate) -> Ordering) {
    if k > 0 && k < all.len() {
        all.select_nth_unstable_by(k - 1, &mut order);
    }
}

/// Sorts just enough of the front to hold a share `p` of all weight and says how many that is, at least one.
///
/// A token stays if those before it hold less than `p`: the one that crosses the threshold stays, as in transformers.
fn nucleus(all: &mut [Candidate], p: f64) -> usize {
    let total: f64 = all.iter().map(|c| f64::from(c.weight)).sum();
    let mut width = 64.min(all.len());
    loop {
        keep_best(all, width, by_rank);
        all[..width].sort_unstable_by(by_rank);
        let mut before = 0.0;
        for (i, c) in all[..width].iter().enumerate() {
            if i > 0 && before >= p * total {
                return i;
            }
            before += f64::from(c.weight);
        }
        if width == all.len() {
            return width;
        }
        width = (width * 8).min(all.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, -1.0, 0.0];

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(params, LOGITS.len()).expect("valid")
    }

    fn warm() -> SamplingParams {
        SamplingParams { temperature: 1.0, seed: 7, ..SamplingParams::default() }
    }

    /// How often each token is drawn in `n` tries.
    fn counts(params: SamplingParams, n: usize) -> [usize; 5] {
        let mut s = sampler(params);
        let mut counts = [0; 5];
        for _ in 0..n {
            counts[s.sample(&mut LOGITS.clone(), &[]).expect("token") as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_first_maximum() {
        let mut s = sampler(SamplingParams::default());
        assert_eq!(s.sample(&mut [0.0, 5.0, 5.0, 5.0, 1.0], &[]), Ok(1));
        assert_eq!(s.sample(&mut [f32::NEG_INFINITY, -3.0, -3.0, -9.0, -9.0], &[]), Ok(1));
    }

    #[test]
    fn frequencies_follow_the_distribution() {
        let n = 20_000;
        let total: f64 = LOGITS.iter().map(|x| f64::from(*x).exp()).sum();
        for (count, logit) in counts(warm(), n).into_iter().zip(LOGITS) {
            let p = f64::from(logit).exp() / total;
            let sigma = (p * (1.0 - p) / n as f64).sqrt();
            assert!((count as f64 / n as f64 - p).abs() < 4.5 * sigma, "{count} draws for probability {p}");
        }
    }

    #[test]
    fn top_p_keeps_the_crossing_token_and_never_loses_the_top() {
        // Probabilities are about 0.64, 0.24, 0.09: each threshold is crossed inside a token.
        let kept = |top_p| counts(SamplingParams { top_p, ..warm() }, 2000).map(|c| c > 0);
        assert_eq!(kept(0.01), [false, true, false, false, false]);
        assert_eq!(kept(0.6), [false, true, false, false, false]);
        assert_eq!(kept(0.7), [false, true, true, false, false]);
        assert_eq!(kept(0.9), [true, true, true, false, false]);
    }

    #[test]
    fn top_k_and_min_p_cut_the_tail() {
        let kept = |p| counts(p, 3000).map(|c| c > 0);
        assert_eq!(kept(SamplingParams { top_k: 2, ..warm() }), [false, true, true, false, false]);
        assert_eq!(kept(SamplingParams { min_p: 0.2, ..warm() }), [false, true, true, false, false]);
        assert_eq!(kept(SamplingParams { top_k: 99, ..warm() }), [true; 5]);
    }

    #[test]
    fn equal_weights_at_the_cut_keep_the_lower_id() {
        let mut s = sampler(SamplingParams { top_k: 1, ..warm() });
        for _ in 0..50 {
            assert_eq!(s.sample(&mut [1.0; 5], &[]), Ok(0));
        }
    }

    #[test]
    fn the_seed_decides() {
        let run = |seed| {
            let mut s = sampler(SamplingParams { seed, ..warm() });
            (0..64).map(|_| s.sample(&mut LOGITS.clone(), &[]).expect("token")).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn penalty_divides_positive_and_multiplies_negative_logits_once() {
        let mut s = sampler(SamplingParams { repetition_penalty: 2.0, ..SamplingParams::default() });
        let mut logits = LOGITS;
        s.sample(&mut logits, &[1, 3, 1, 1]).expect("token");
        assert_eq!(logits, [1.0, 1.5, 2.0, -2.0, 0.0]);
        s.sample(&mut logits, &[1]).expect("token");
        assert_eq!(logits[1], 0.75);
    }

    #[test]
    fn unusable_logits_are_errors() {
        for temperature in [0.0, 1.0] {
            let mut s = sampler(SamplingParams { temperature, ..warm() });
            for bad in [f32::NAN, f32::INFINITY] {
                let mut logits = LOGITS;
                logits[3] = bad;
                assert_eq!(s.sample(&mut logits, &[]).expect_err("bad").code(), Code::NonFinite);
            }
            let none = s.sample(&mut [f32::NEG_INFINITY; 5], &[]).expect_err("nothing to draw");
            assert_eq!(none.code(), Code::NonFinite);
            assert_eq!(s.sample(&mut [0.0; 4], &[]).expect_err("short").code(), Code::ShapeMismatch);
            assert_eq!(s.sample(&mut LOGITS.clone(), &[5]).expect_err("id").code(), Code::ValueInvalid);
        }
        assert_eq!(
            SamplingParams { top_p: f32::NAN, ..warm() }.validate().expect_err("nan").code(),
            Code::Usage
        );
    }

    #[test]
    fn a_small_top_k_does_not_sort_the_vocabulary() {
        let n = 151_936usize;
        let weight = |i: usize| ((i * 7919) % n) as f32;
        let mut all: Vec<_> = (0..n).map(|i| Candidate { weight: weight(i), id: i as u32 }).collect();
        let mut comparisons = 0;
        keep_best(&mut all, 20, |a, b| {
            comparisons += 1;
            by_rank(a, b)
        });
        let mut top: Vec<_> = all[..20].iter().map(|c| c.weight as usize).collect();
        top.sort_unstable();
        assert_eq!(top, (n - 20..n).collect::<Vec<_>>());
        // A sort needs about n log2 n = 17 n.
        assert!(comparisons < 6 * n, "{comparisons} comparisons");
    }

    #[test]
    fn nucleus_equals_a_full_sort() {
        let n = 5000;
        let weight = |i: usize| 1.0 / (1.0 + ((i * 733) % n) as f32);
        let all: Vec<_> = (0..n).map(|i| Candidate { weight: weight(i), id: i as u32 }).collect();
        for p in [0.05, 0.5, 0.9, 0.999] {
            let mut sorted = all.clone();
            sorted.sort_unstable_by(by_rank);
            let total: f64 = sorted.iter().map(|c| f64::from(c.weight)).sum();
            let mut before = 0.0;
            let expected = sorted.iter().take_while(|c| {
                let keep = before < p * total;
                before += f64::from(c.weight);
                keep
            });
            let expected: Vec<u32> = expected.map(|c| c.id).collect();
            let mut mine = all.clone();
            let kept = nucleus(&mut mine, p);
            assert_eq!(mine[..kept].iter().map(|c| c.id).collect::<Vec<_>>(), expected, "p = {p}");
        }
    }
}
