//! One run of the suite: options, enumeration, execution, waivers, and the report.
use crate::report::Report;
use crate::runner::{InProcess, Runner};
use crate::waiver::{Date, Waivers};
use crate::{AbiProbe, Bench, Claim, Level, Profile, cases, proofs};
use q4_core::{Device, HostEnv, Q4Backend, ThreadPool, matches};
use std::time::Instant;

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

/// Runs the suite in this process: for tests, and for backends that are trusted not to end it.
pub fn run(backend: &dyn Q4Backend, options: &Options, env: &HostEnv, threads: &ThreadPool) -> Report {
    run_with(&InProcess, backend, None, options, env, threads)
}

/// Runs the suite through `runner`, with the checks of a plugin host where there is one.
pub fn run_with(
    runner: &dyn Runner,
    backend: &dyn Q4Backend,
    abi: Option<&dyn AbiProbe>,
    options: &Options,
    env: &HostEnv,
    threads: &ThreadPool,
) -> Report {
    let start = Instant::now();
    let proofs = proofs(backend, env, options.device);
    let bench = Bench { backend, env, device: options.device, threads, abi, proofs: &proofs };
    let cases = cases(&proofs, abi, options);
    let name = backend.descriptor().name.to_string();
    let mut results = Vec::with_capacity(cases.len());
    let mut waivers = options.waivers.judge(&name, options.today);
    runner.run(&cases, &bench, &mut |mut result| {
        waivers.apply(&mut result);
        let goes_on = !(options.fail_fast && result.outcome.is_bad());
        results.push(result);
        goes_on
    });
    Report::of(
        backend.descriptor(),
        env,
        options,
        &proofs,
        results,
        waivers.notes(options.is_complete()),
        start.elapsed(),
    )
}
