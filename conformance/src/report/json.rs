//! The report for programs.
use super::Report;
use serde::Serialize;

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    #[serde(flatten)]
    report: &'a Report,
}

pub(super) fn render(report: &Report) -> String {
    let document = Document { schema: "q4.conformance/1", report };
    // Strings, numbers and lists of them: nothing here can fail to serialise.
    serde_json::to_string(&document).unwrap_or_default() + "\n"
}
