//! Picks the next token from logits: penalty, temperature, top-k, top-p, min-p, draw.
//!
//! The order and the rules are those of transformers, the generator is fixed, nothing is allocated per token.
//! Weights are integers, so what is drawn does not depend on the order of sums: CUDA's kernels
//! (`cuda/draw.cu`) draw the same.
use crate::scan;
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
    /// Checks that every parameter has a meaning.
    ///
    /// # Errors
    /// [`Code::Usage`] with the name of the parameter.
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

/// A token that may still be drawn.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    /// Orders by rank: the logit's bits as an integer of the same order, then the id's complement.
    key: u64,
    /// See [`mass`]; 0 until it is known.
    mass: u64,
}

impl Candidate {
    fn new(logit: f32, id: u32) -> Self {
        // Both zeros are one.
        let bits = (logit + 0.0).to_bits();
        let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        Self { key: u64::from(ordered) << 32 | u64::from(!id), mass: 0 }
    }
    fn id(self) -> u32 {
        !(self.key as u32)
    }
}

/// Draws tokens of one sequence. Its memory is laid out at construction.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
    vocab_size: usize,
    candidates: Vec<Candidate>,
    /// One bit for each token, set while the penalty runs: a token is penalised once however often it
    /// occurred.
    seen: Vec<u64>,
}

impl Sampler {
    /// A sampler for `vocab_size` logits.
    ///
    /// # Errors
    /// As [`SamplingParams::validate`].
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

    /// Goes on with other parameters. The draws go on too, unless the seed is another.
    ///
    /// # Errors
    /// As [`SamplingParams::validate`]; nothing changes then.
    pub fn set_params(&mut self, params: SamplingParams) -> Result<()> {
        params.validate()?;
        if params.seed != self.params.seed {
            self.rng = ChaCha8Rng::seed_from_u64(params.seed);
        }
        self.params = params;
        Ok(())
    }

    /// Whether the next token is the most likely one, whatever came before.
    pub fn is_greedy(&self) -> bool {
        self.params.temperature == 0.0 && self.params.repetition_penalty == 1.0
    }

    /// Next token. `logits` `[vocab_size]` are changed by the penalty; `recent` are the tokens it applies to.
    ///
    /// # Errors
    /// [`Code::NonFinite`] for NaN or +inf among the logits, or all of them -inf; [`Code::ShapeMismatch`] for
    /// another length; [`Code::ValueInvalid`] for a recent token outside of the vocabulary.
    pub fn sample(&mut self, logits: &mut [f32], recent: &[u32]) -> Result<u32> {
        self.check(logits, recent)?;
        self.penalise(logits, recent);
        let best = scan::first_maximum(logits);
        if logits[best] == f32::NEG_INFINITY {
            return Err(Error::new(Code::NonFinite, "logits: no token has a chance").have("-inf everywhere"));
        }
        if self.params.temperature == 0.0 {
            return Ok(best as u32);
        }
        let SamplingParams { temperature, top_k, top_p, min_p, .. } = self.params;
        let peak = logits[best];
        // What is farther below weighs nothing; this only saves the exponential.
        let least = peak - 28.5 * temperature;
        self.candidates.clear();
        let likely = logits.iter().enumerate().filter(|(_, logit)| **logit >= least);
        self.candidates.extend(likely.map(|(id, &logit)| Candidate::new(logit, id as u32)));
        if top_k > 0 {
            let k = top_k.min(self.candidates.len());
            keep_best(&mut self.candidates, k, by_rank);
            self.candidates.truncate(k);
        }
        self.candidates.iter_mut().for_each(|c| c.mass = mass(logits[c.id() as usize], peak, temperature));
        self.candidates.retain(|c| c.mass > 0);
        if top_p < 1.0 {
            let before = below_share(total(&self.candidates), top_p);
            let kept = within(&mut self.candidates, before);
            self.candidates.truncate(kept);
        }
        if min_p > 0.0 {
            let least = (f64::from(min_p) * WHOLE).ceil() as u64;
            self.candidates.retain(|c| c.mass >= least);
        }
        let all = total(&self.candidates);
        let target = ((self.uniform() * all as f64) as u64).min(all - 1);
        let rank = within(&mut self.candidates, target) - 1;
        Ok(self.candidates[rank].id())
    }

    /// The next number of the generator, in [0, 1): one for each token drawn.
    pub fn uniform(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
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
        if let Some(at) = scan::first(logits, |x| x.is_nan() || x == f32::INFINITY) {
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
}

/// The mass of the most probable token.
const WHOLE: f64 = (1u64 << 40) as f64;

/// `exp((logit - peak) / temperature)` in whole multiples of 2^-40, rounded down: sums of masses do not
/// depend on their order, and what weighs less than one of them cannot be drawn. Every operation here is one
/// rounding of IEEE 754 without fused products, so a device that does the same has the same bits
/// (`cuda/sample.cu`).
fn mass(logit: f32, peak: f32, temperature: f32) -> u64 {
    let x = (f64::from(logit) - f64::from(peak)) / f64::from(temperature);
    if x < -28.0 {
        return 0;
    }
    // x = n ln 2 + r, |r| <= ln 2 / 2; the series of exp(r) to r^12, whose rest is below 2^-52.
    let n = (x * std::f64::consts::LOG2_E - 0.5) as i64;
    let r = x - n as f64 * std::f64::consts::LN_2;
    let mut series = 1.0 / 479_001_600.0;
    for factorial in
        [39_916_800.0, 3_628_800.0, 362_880.0, 40_320.0, 5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0]
    {
        series = series * r + 1.0 / factorial;
    }
    (series * f64::from_bits(((1023 + 40 + n) as u64) << 52)) as u64
}

fn total(candidates: &[Candidate]) -> u64 {
    candidates.iter().map(|c| c.mass).sum()
}

/// The largest mass below the share `p` of `all`: a token stays if those before it hold no more, so the one
/// that crosses the threshold stays, as in transformers.
fn below_share(all: u64, p: f32) -> u64 {
    let share = f64::from(p) * all as f64;
    let below = share as u64;
    if below as f64 >= share { below.saturating_sub(1) } else { below }
}

/// Heavier first, lower id first among equals: a total order, so results do not depend on the algorithm.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.key.cmp(&a.key)
}

/// Moves the `k` first of the order to the front, unsorted, in linear time.
fn keep_best(all: &mut [Candidate], k: usize, mut order: impl FnMut(&Candidate, &Candidate) -> Ordering) {
    if k > 0 && k < all.len() {
        all.select_nth_unstable_by(k - 1, &mut order);
    }
}

/// Sorts just enough of the front to say how many candidates have at most `before` of mass before them in
/// rank: one at least.
fn within(all: &mut [Candidate], before: u64) -> usize {
    let mut width = 64.min(all.len());
    loop {
        keep_best(all, width, by_rank);
        all[..width].sort_unstable_by(by_rank);
        let mut passed = 0;
        for (i, c) in all[..width].iter().enumerate() {
            if passed > before {
                return i;
            }
            passed += c.mass;
        }
        if width == all.len() || passed > before {
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
    fn masses_are_exponentials() {
        for t in [0.3f32, 1.0, 2.5] {
            assert_eq!(mass(7.5, 7.5, t), 1 << 40);
            for i in 0..4000 {
                let logit = 20.0 - i as f32 * 0.0103;
                let exact = ((f64::from(logit) - 20.0) / f64::from(t)).exp() * WHOLE;
                let have = mass(logit, 20.0, t) as f64;
                assert!((have - exact).abs() <= 1.0 + exact * 1e-14, "{logit} at {t}: {have}, need {exact}");
            }
            assert_eq!(mass(f32::NEG_INFINITY, 20.0, t), 0);
        }
    }

    #[test]
    fn a_share_excludes_its_own_edge() {
        assert_eq!((below_share(1000, 0.5), below_share(1001, 0.5), below_share(3, 0.25)), (499, 500, 0));
    }

    #[test]
    fn a_small_top_k_does_not_sort_the_vocabulary() {
        let n = 151_936usize;
        let weight = |i: usize| ((i * 7919) % n) as f32;
        let mut all: Vec<_> = (0..n).map(|i| Candidate::new(weight(i), i as u32)).collect();
        let mut comparisons = 0;
        keep_best(&mut all, 20, |a, b| {
            comparisons += 1;
            by_rank(a, b)
        });
        let mut top: Vec<_> = all[..20].iter().map(|c| weight(c.id() as usize) as usize).collect();
        top.sort_unstable();
        assert_eq!(top, (n - 20..n).collect::<Vec<_>>());
        // A sort needs about n log2 n = 17 n.
        assert!(comparisons < 6 * n, "{comparisons} comparisons");
    }

    #[test]
    fn what_is_within_a_mass_equals_a_full_sort() {
        let n = 5000;
        let place = |i: usize| (i * 733) % n;
        let all: Vec<_> = (0..n)
            .map(|i| Candidate {
                mass: (1 << 40) / (1 + place(i) as u64),
                ..Candidate::new(-(place(i) as f32), i as u32)
            })
            .collect();
        for p in [0.0001f32, 0.05, 0.5, 0.9, 0.999] {
            let before = below_share(total(&all), p);
            let mut sorted = all.clone();
            sorted.sort_unstable_by(by_rank);
            let mut passed = 0;
            let expected = sorted.iter().take_while(|c| {
                let keep = passed <= before;
                passed += c.mass;
                keep
            });
            let expected: Vec<u32> = expected.map(|c| c.id()).collect();
            let mut mine = all.clone();
            let kept = within(&mut mine, before);
            assert_eq!(mine[..kept].iter().map(|c| c.id()).collect::<Vec<_>>(), expected, "p = {p}");
        }
    }
}
