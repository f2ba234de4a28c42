//! Prompts of random words, the same for the same seed.
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

/// Words that most vocabularies have as one token each.
const WORDS: [&str; 64] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
];

/// The prompts of a measurement.
pub struct Prompts(Vec<String>);

impl Prompts {
    /// `count` prompts of as many words each. One of them does not depend on how many there are.
    pub fn new(seed: u64, words: usize, count: usize) -> Self {
        Self((0..count).map(|at| prompt(seed, at as u64, words)).collect())
    }

    /// One of them.
    pub fn get(&self, at: usize) -> &str {
        &self.0[at]
    }
}

/// The prompt at place `at`.
pub fn prompt(seed: u64, at: u64, words: usize) -> String {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(at + 1);
    let words: Vec<_> = (0..words).map(|_| WORDS[rng.next_u32() as usize % WORDS.len()]).collect();
    words.join(" ")
}

/// When `count` requests are due, in units of the mean time between two: by chance, each on its own.
pub fn arrivals(seed: u64, count: usize) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut at = 0.0;
    let mut next = || {
        let now = at;
        // 53 bits of the unit interval, one excluded.
        let chance = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        at -= (1.0 - chance).ln();
        now
    };
    (0..count).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_names_its_prompts() {
        let (few, many) = (Prompts::new(7, 20, 3), Prompts::new(7, 20, 9));
        for at in 0..3 {
            assert_eq!(few.get(at), many.get(at));
            assert_eq!(few.get(at).split(' ').count(), 20);
        }
        assert!(few.get(0) != few.get(1) && few.get(0) != Prompts::new(8, 20, 1).get(0));
    }

    #[test]
    fn arrivals_come_by_chance_around_their_mean() {
        let all = arrivals(3, 4001);
        assert_eq!((all[0], &all), (0.0, &arrivals(3, 4001)));
        let gaps: Vec<_> = all.windows(2).map(|w| w[1] - w[0]).collect();
        assert!(gaps.iter().all(|gap| *gap >= 0.0 && gap.is_finite()));
        let mean = all[4000] / 4000.0;
        assert!((0.9..1.1).contains(&mean), "{mean}");
        // Of an exponential distribution, a share of 1/e is beyond its mean.
        let beyond = gaps.iter().filter(|gap| **gap > 1.0).count() as f64 / 4000.0;
        assert!((0.33..0.41).contains(&beyond), "{beyond}");
    }
}
