//! The report for programs.
use super::Report;
use crate::case::{CaseResult, Outcome};
use serde::Serialize;

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    #[serde(flatten)]
    report: &'a Report,
    /// Cases that were rightly refused.
    unsupported: Vec<Refused<'a>>,
}

#[derive(Serialize)]
struct Refused<'a> {
    backend: &'a str,
    #[serde(flatten)]
    case: &'a CaseResult,
}

pub(super) fn render(report: &Report) -> String {
    let refused = report.cases.iter().filter(|(_, c)| c.outcome == Outcome::Unsupported);
    let unsupported = refused.map(|(b, case)| Refused { backend: &report.backends[*b].name, case }).collect();
    let document = Document { schema: "q4.conformance/1", report, unsupported };
    // Strings, numbers and lists of them: nothing here can fail to serialise.
    serde_json::to_string(&document).unwrap_or_default() + "\n"
}
