//! What is run: the version of the suite, and which of its cases.
use crate::waiver::{Date, Waivers};
use crate::{Claim, Level, Profile};
use q4_core::{Device, matches};

/// Version of the suite. A minor adds cases or tightens a bound, a major changes what conformance means and
/// voids every certificate.
pub const SUITE_VERSION: &str = "2.0.0";

/// Which cases run, and what excuses them.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Levels that must pass.
    pub profile: Profile,
    /// Only these levels; all of the profile when empty.
    pub levels: Vec<Level>,
    /// Only claims that match one of these, each the beginning of a claim or a glob over it: `nvfp4@1/int8`,
    /// `*/native/*`.
    pub claims: Vec<String>,
    /// Where products run.
    pub device: Device,
    /// Seed of every value that is drawn.
    pub seed: u64,
    /// Only the case with this id; its seed replaces `seed`.
    pub replay: Option<String>,
    /// At most this many cases of each level and claim, chosen by the seed. A sample is no conformance run.
    pub sample: Option<usize>,
    /// Stop at the first bad outcome.
    pub fail_fast: bool,
    /// Known failures.
    pub waivers: Waivers,
    /// Day that waivers are judged on.
    pub today: Date,
}

impl Options {
    /// Everything of a profile.
    pub fn of(profile: Profile) -> Self {
        Self { profile, today: Date::today(), ..Self::default() }
    }
    /// The same, with the one case of `id`: seed and level are read from it.
    pub fn replaying(mut self, id: &str) -> Self {
        if let Some(seed) = id.rsplit_once("/s").and_then(|(_, s)| s.parse().ok()) {
            self.seed = seed;
        }
        self.levels = id.split('/').next().and_then(Level::parse).into_iter().collect();
        self.replay = Some(id.to_owned());
        self
    }
    /// Levels of this run, in order.
    pub fn levels(&self) -> Vec<Level> {
        let all = if self.levels.is_empty() { self.profile.levels() } else { &self.levels };
        Level::ALL.into_iter().filter(|l| all.contains(l)).collect()
    }
    /// Whether a claim is part of this run.
    pub fn admits(&self, claim: &Claim) -> bool {
        let name = claim.to_string();
        let is_named = |pattern: &String| {
            name.strip_prefix(pattern.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
                || matches(pattern, &name)
        };
        self.claims.is_empty() || self.claims.iter().any(is_named)
    }
    /// Nothing was left out: only such a run makes a certificate.
    pub fn is_complete(&self) -> bool {
        self.levels.is_empty() && self.claims.is_empty() && self.replay.is_none() && self.sample.is_none()
    }
}
