//! The report for build servers.
use super::Report;
use crate::case::{CaseResult, Outcome};
use std::collections::BTreeMap;
use std::fmt::Write;

pub(super) fn render(r: &Report) -> String {
    let mut suites: BTreeMap<String, Vec<&CaseResult>> = BTreeMap::new();
    for (b, case) in &r.cases {
        let name = &r.backends[*b].name;
        let claim = case.claim.as_deref().unwrap_or("backend");
        suites.entry(format!("{name} {} {claim}", case.level)).or_default().push(case);
    }
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let errors = |cases: &[&CaseResult]| {
        cases.iter().filter(|c| c.outcome.is_bad() && c.outcome != Outcome::Fail).count()
    };
    let failures = |cases: &[&CaseResult]| cases.iter().filter(|c| c.outcome == Outcome::Fail).count();
    let skipped = |cases: &[&CaseResult]| {
        cases.iter().filter(|c| matches!(c.outcome, Outcome::Unsupported | Outcome::Waived)).count()
    };
    let all: Vec<&CaseResult> = r.cases.iter().map(|(_, c)| c).collect();
    let _ = writeln!(
        out,
        "<testsuites name=\"q4 conformance {}\" tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.3}\">",
        escape(&r.suite),
        all.len(),
        failures(&all),
        errors(&all),
        skipped(&all),
        r.seconds
    );
    for (name, cases) in suites {
        let _ = writeln!(
            out,
            "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\">",
            escape(&name),
            cases.len(),
            failures(&cases),
            errors(&cases),
            skipped(&cases)
        );
        for case in cases {
            one(&mut out, &name, case);
        }
        out.push_str("  </testsuite>\n");
    }
    out.push_str("</testsuites>\n");
    out
}

fn one(out: &mut String, suite: &str, c: &CaseResult) {
    let _ = write!(out, "    <testcase classname=\"{}\" name=\"{}\"", escape(suite), escape(&c.id));
    let message = escape(c.message.as_deref().unwrap_or(""));
    let _ = match c.outcome {
        Outcome::Pass => writeln!(out, "/>"),
        Outcome::Unsupported => writeln!(out, "><skipped message=\"{message}\"/></testcase>"),
        Outcome::Waived => {
            let why = escape(c.waiver.as_deref().unwrap_or(""));
            writeln!(out, "><skipped message=\"waived: {why}\"/></testcase>")
        }
        Outcome::Fail => writeln!(out, "><failure message=\"{message}\"/></testcase>"),
        _ => writeln!(out, "><error type=\"{}\" message=\"{message}\"/></testcase>", c.outcome.as_str()),
    };
}

/// Text of an attribute of XML; characters that XML has no place for become spaces.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' => out.push_str("&#10;"),
            c if (c as u32) < 0x20 => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
