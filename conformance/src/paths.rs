//! Every live path of every backend on the recorded products: what `diagnose` shows, because availability
//! probes lie.
use crate::{golden, measure::measure};
use q4_core::{Candidate, Device, ExecPath, Registry, Reject, Result, ThreadPool};
use serde::Serialize;
use std::collections::BTreeMap;

/// Outcome of one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Every output inside its bound.
    Pass,
    /// A wrong result, or an error after the backend had agreed.
    Fail,
    /// Refused beforehand, with reasons.
    Unsupported,
}

/// One (path, encoding, activations) of one backend.
#[derive(Clone, Debug, Serialize)]
pub struct PathReport {
    /// Path.
    pub path: ExecPath,
    /// Encoding.
    pub schema: String,
    /// Activation format.
    pub activations: &'static str,
    /// Outcome.
    pub verdict: Verdict,
    /// Products compared.
    pub cases: usize,
    /// Outputs compared.
    pub outputs: usize,
    /// Largest error over its bound.
    pub error_over_bound: f64,
    /// What is wrong or why it is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Runs the recorded products through every live backend on `device`; by backend name.
///
/// # Errors
/// Those of reading the recorded products: a backend's failures are in its report.
pub fn check_paths(
    registry: &Registry,
    device: Device,
    threads: &ThreadPool,
) -> Result<BTreeMap<String, Vec<PathReport>>> {
    let mut all = BTreeMap::new();
    for candidate in registry.candidates() {
        let Candidate::Live(backend) = candidate else { continue };
        let mut rows: Vec<PathReport> = Vec::new();
        golden::each(&mut |problem| {
            let schema = problem.weight.schema.id();
            for (_, path) in backend.descriptor().offers.iter().filter(|(s, _)| s == schema.name) {
                let activations = problem.activations.as_str();
                let schema = schema.to_string();
                let same =
                    |r: &PathReport| r.path == *path && r.schema == schema && r.activations == activations;
                let at = rows.iter().position(same).unwrap_or_else(|| {
                    let fresh = PathReport {
                        path: *path,
                        schema: schema.clone(),
                        activations,
                        verdict: Verdict::Unsupported,
                        cases: 0,
                        outputs: 0,
                        error_over_bound: 0.0,
                        message: None,
                    };
                    rows.push(fresh);
                    rows.len() - 1
                });
                rows[at].add(measure(device, &**backend, *path, problem, registry.env(), threads));
            }
            Ok(())
        })?;
        all.insert(candidate.name().to_owned(), rows);
    }
    Ok(all)
}

impl PathReport {
    fn add(&mut self, outcome: Result<std::result::Result<crate::Measured, Vec<Reject>>>) {
        match outcome {
            Ok(Ok(m)) => {
                self.cases += 1;
                self.outputs += m.outputs;
                self.error_over_bound = self.error_over_bound.max(m.forward).max(m.backward.unwrap_or(0.0));
                if self.verdict == Verdict::Unsupported {
                    self.verdict = Verdict::Pass;
                    self.message = None;
                }
            }
            Ok(Err(reasons)) => {
                if self.cases == 0 && self.message.is_none() {
                    self.message =
                        Some(reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
                }
            }
            Err(e) => {
                self.verdict = Verdict::Fail;
                self.message.get_or_insert_with(|| e.to_string());
            }
        }
    }
}
