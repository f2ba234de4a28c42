//! The report for a terminal.
use super::Report;
use crate::Level;
use crate::case::Outcome;
use std::fmt::Write;

/// Failures that are printed in full.
const SHOWN: usize = 20;

pub(super) fn render(r: &Report) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "q4 conformance {}, profile {}, seed {}", r.suite, r.profile.as_str(), r.seed);
    let _ = writeln!(out, "machine {}, {}", r.machine, r.host);
    let width = r.claims.iter().map(|c| c.claim.len()).max().unwrap_or(0);
    for b in &r.backends {
        let verdict = if b.conformant { "conformant" } else { "NOT CONFORMANT" };
        let _ = writeln!(out, "\n{} {} ({}): {verdict}", b.name, b.version, b.vendor);
        if let Some(library) = &b.library {
            let _ = writeln!(out, "  {}\n  sha256 {}", library.path, library.sha256);
        }
        for c in r.claims.iter().filter(|c| c.backend == b.name) {
            let mark = if c.conformant { "ok " } else { "NO " };
            let _ = write!(out, "  {mark} {:<width$}", c.claim);
            for level in Level::ALL {
                match c.levels.get(&level) {
                    None => {}
                    Some(l) if l.failed > 0 => {
                        let _ = write!(out, "  {level} {}/{} FAILED", l.failed, l.executed());
                    }
                    Some(l) if l.executed() == 0 => {
                        let _ = write!(out, "  {level} nothing ran");
                    }
                    Some(l) if l.waived > 0 => {
                        let _ = write!(out, "  {level} {} and {} waived", l.passed, l.waived);
                    }
                    Some(l) => {
                        let _ = write!(out, "  {level} {}", l.passed);
                    }
                }
            }
            for (name, errors) in [("f32", &c.float32), ("16-bit", &c.half)] {
                if errors.cases() > 0 {
                    let _ = write!(out, "  {name} {:.3}", errors.max);
                }
            }
            out.push('\n');
        }
    }
    let _ = writeln!(
        out,
        "\nf32, 16-bit: largest error over its bound by type of the result; rounding to 16 bits alone may reach it"
    );
    let failures = r.failures.iter().filter(|f| f.outcome != Outcome::Waived);
    for f in failures.take(SHOWN) {
        let message = f.message.as_deref().unwrap_or("").replace('\n', "\n    ");
        let _ = writeln!(out, "\n{} {}\n    {message}", f.outcome.as_str(), f.id);
        let _ = writeln!(out, "    run it again: {}", f.replay);
    }
    if r.failed > SHOWN {
        let _ = writeln!(out, "\n... and {} more; the JSON report has all", r.failed - SHOWN);
    }
    for f in r.failures.iter().filter(|f| f.outcome == Outcome::Waived) {
        let _ = writeln!(out, "\nwaived {}\n    {}", f.id, f.waiver.as_deref().unwrap_or(""));
    }
    for note in &r.notes {
        let _ = writeln!(out, "\nnote: {note}");
    }
    let _ = writeln!(
        out,
        "\n{} passed, {} failed, {} unsupported, {} waived; {} values compared, largest error {:.3} of its bound; {:.1} s",
        r.passed, r.failed, r.skipped, r.waived, r.values, r.max_error_over_bound, r.seconds
    );
    let verdict = match (r.conformant, r.complete) {
        (true, true) => "CONFORMANT",
        (true, false) => "nothing wrong in the part that ran",
        (false, _) => "NOT CONFORMANT",
    };
    let _ = writeln!(out, "{verdict}");
    out
}
