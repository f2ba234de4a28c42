//! One case: its id, what it does, and what came of it.
//!
//! An id holds all that makes the case, its seed included, so that a line of a report can be run again.
use crate::{Claim, Level, Proof};
use q4_core::conduct::Facts;
use q4_core::{Device, HostEnv, Q4Backend, Reject, Result, ThreadPool};
use serde::{Deserialize, Serialize};

/// What a case runs with.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// The backend under test.
    pub backend: &'a dyn Q4Backend,
    /// The machine.
    pub env: &'a HostEnv,
    /// Where products run. Operands are made in host memory; elsewhere they are copied there and back around
    /// each call.
    pub device: Device,
    /// Threads lent to calls; cases that vary the number make their own.
    pub threads: &'a ThreadPool,
    /// What only a host of shared libraries can check.
    pub abi: Option<&'a dyn AbiProbe>,
    /// What the backend says it computes: a refusal inside is a failure. Empty where nobody asked.
    pub proofs: &'a [Proof],
}

impl<'a> Bench<'a> {
    /// The process that runs the backend, where it is not this one.
    pub fn elsewhere(&self) -> Option<&'a dyn Elsewhere> {
        self.abi.and_then(AbiProbe::elsewhere)
    }
}

/// Checks of the C table behind a backend, added to L0 by whoever loaded it.
pub trait AbiProbe: Sync {
    /// Names of its cases, stable and unique.
    fn cases(&self) -> Vec<String>;
    /// Runs one. The error says what is wrong.
    fn run(&self, case: &str) -> Result<()>;
    /// The process that runs the backend, where it is not this one.
    fn elsewhere(&self) -> Option<&dyn Elsewhere> {
        None
    }
}

/// A process that runs a backend for this one.
pub trait Elsewhere: Sync {
    /// Its number.
    fn process(&self) -> u32;
    /// How it was lost, if it was: whether it hung, and what became of it.
    fn lost(&self) -> Option<(Outcome, String)>;
    /// What is known of it now.
    fn facts(&self) -> Result<Facts>;
    /// The same before it knew of the backend.
    fn facts_before(&self) -> Facts;
}

/// What a case that found nothing wrong has seen.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    /// Values compared, and the largest error over its bound where errors have one.
    Checked {
        /// Values, verdicts or calls compared.
        values: u64,
        /// Largest error over its bound.
        ratio: Option<f64>,
    },
    /// The backend said no beforehand.
    Refused(Vec<Reject>),
}

impl Seen {
    /// `values` things compared that have no bound.
    pub fn exactly(values: usize) -> Self {
        Self::Checked { values: values as u64, ratio: None }
    }
    /// `values` results compared, the worst of them `ratio` of its bound away.
    pub fn within(values: usize, ratio: f64) -> Self {
        Self::Checked { values: values as u64, ratio: Some(ratio) }
    }
    /// Both: what either has checked, or the first reasons if neither has.
    pub(crate) fn and(self, next: Self) -> Self {
        match (self, next) {
            (Self::Checked { values: a, ratio: p }, Self::Checked { values: b, ratio: q }) => {
                Self::Checked { values: a + b, ratio: p.into_iter().chain(q).reduce(f64::max) }
            }
            (Self::Refused(reasons), next) if reasons.is_empty() => next,
            (Self::Refused(_), next @ Self::Checked { .. }) => next,
            (seen, _) => seen,
        }
    }
}

pub(crate) type Body = Box<dyn Fn(&Bench<'_>) -> Result<Seen> + Send + Sync>;

/// A case that can be run.
pub struct Case {
    /// Its identity: level, claim, and everything that makes its operands.
    pub id: String,
    /// Level it belongs to.
    pub level: Level,
    /// Claim it belongs to; `None` for what concerns the whole backend.
    pub claim: Option<Claim>,
    pub(crate) body: Body,
}

impl Case {
    /// A case of `claim`; `name` holds what the claim does not.
    pub(crate) fn new(
        level: Level,
        claim: Option<&Claim>,
        name: impl std::fmt::Display,
        body: impl Fn(&Bench<'_>) -> Result<Seen> + Send + Sync + 'static,
    ) -> Self {
        let id = match claim {
            Some(claim) => format!("{level}/{claim}/{name}"),
            None => format!("{level}/backend/{name}"),
        };
        Self { id, level, claim: claim.cloned(), body: Box::new(body) }
    }
}

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Everything compared was right.
    Pass,
    /// Something is wrong.
    Fail,
    /// Refused beforehand, with reasons, and refusing was allowed.
    Unsupported,
    /// Wrong, and excused by a waiver.
    Waived,
    /// The process ended or panicked.
    Crash,
    /// No end within the time limit.
    Hang,
    /// The suite itself could not go on: memory limit, or the child could not be started.
    Error,
}

impl Outcome {
    /// Stable spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Unsupported => "unsupported",
            Self::Waived => "waived",
            Self::Crash => "crash",
            Self::Hang => "hang",
            Self::Error => "error",
        }
    }
    /// The backend does not conform.
    pub const fn is_bad(self) -> bool {
        matches!(self, Self::Fail | Self::Crash | Self::Hang | Self::Error)
    }
}

/// What came of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseResult {
    /// Id.
    pub id: String,
    /// Level.
    pub level: Level,
    /// Claim, spelt out.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub claim: Option<String>,
    /// Outcome.
    pub outcome: Outcome,
    /// Values compared.
    #[serde(default)]
    pub values: u64,
    /// Largest error over its bound.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ratio: Option<f64>,
    /// What is wrong, or why it was refused.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub message: Option<String>,
    /// Reason of the waiver that excuses it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub waiver: Option<String>,
}

impl CaseResult {
    /// The result of `case` from what its body returned.
    pub(crate) fn of(case: &Case, seen: Result<Seen>) -> Self {
        let mut result = Self::ended(case, Outcome::Pass, None);
        match seen {
            Ok(Seen::Checked { values, ratio }) => (result.values, result.ratio) = (values, ratio),
            Ok(Seen::Refused(reasons)) => {
                result.outcome = Outcome::Unsupported;
                let reasons: Vec<_> = reasons.iter().map(ToString::to_string).collect();
                result.message = Some(reasons.join("; "));
            }
            Err(e) => {
                result.outcome = Outcome::Fail;
                result.message = Some(e.to_string());
            }
        }
        result
    }

    /// A case that ended in some other way.
    pub(crate) fn ended(case: &Case, outcome: Outcome, message: Option<String>) -> Self {
        Self {
            id: case.id.clone(),
            level: case.level,
            claim: case.claim.as_ref().map(ToString::to_string),
            outcome,
            values: 0,
            ratio: None,
            message,
            waiver: None,
        }
    }
}
