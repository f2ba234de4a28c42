//! The report for a terminal.
use super::{Failure, Report};
use crate::Level;
use crate::case::{CaseResult, Outcome};
use std::fmt::Write;

/// Kinds of failures whose first is printed in full; of the others there is a line.
const SHOWN: usize = 20;

pub(super) fn render(r: &Report) -> String {
    let mut out = String::new();
    let (profile, seed) = (r.profile.as_str(), r.seed);
    let _ = writeln!(out, "q4 {}, conformance suite {}, profile {profile}, seed {seed}", r.q4, r.suite);
    let _ = writeln!(out, "machine {}, {}", r.machine, r.host);
    let width = r.claims.iter().map(|c| c.claim.len()).max().unwrap_or(0);
    for b in &r.backends {
        let verdict = match (b.conformant, r.complete) {
            (true, true) => "conformant",
            (true, false) => "nothing wrong in the part that ran",
            (false, _) => "NOT CONFORMANT",
        };
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
            let schema = c.claim.split('@').next().unwrap_or_default();
            if let Some(limits) = c.limits.as_ref().filter(|l| !l.is_everything(schema)) {
                let _ = writeln!(out, "      only {limits}");
            }
        }
    }
    let _ = writeln!(
        out,
        "\nf32, 16-bit: largest error over its bound by type of the result; rounding to 16 bits alone may reach it"
    );
    failures(&mut out, r);
    refusals(&mut out, r);
    for f in r.failures.iter().filter(|f| f.outcome == Outcome::Waived) {
        let _ = writeln!(out, "\nwaived {}\n    {}", f.id, f.waiver.as_deref().unwrap_or(""));
    }
    for note in &r.notes {
        let _ = writeln!(out, "\nnote: {note}");
    }
    let unjudged = r.failures.iter().filter(|f| f.outcome == Outcome::Error).count();
    let unjudged = if unjudged > 0 { format!(" ({unjudged} of them not judged)") } else { String::new() };
    let _ = writeln!(
        out,
        "\n{} passed, {} failed{unjudged}, {} unsupported, {} waived; {} values compared, largest error {:.3} of its bound; \
         {:.1} s",
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

/// The first of each kind, backend, level, claim and check, and how many more there are where.
fn failures(out: &mut String, r: &Report) {
    let bad: Vec<&Failure> = r.failures.iter().filter(|f| f.outcome != Outcome::Waived).collect();
    let kinds = grouped(bad.iter().map(|f| ((&*f.backend, &**f), *f)), |(backend, c)| (*backend, kind(c)));
    let mut is_cut = false;
    for (i, ((_, kind), all)) in kinds.iter().enumerate() {
        let first = all[0];
        if i >= SHOWN {
            is_cut = true;
            let _ = writeln!(
                out,
                "\n{} {}, the first of {} of {kind}",
                first.outcome.as_str(),
                first.id,
                all.len()
            );
            continue;
        }
        let message = first.message.as_deref().unwrap_or("").replace('\n', "\n    ");
        let _ = writeln!(out, "\n{} {}\n    {message}", first.outcome.as_str(), first.id);
        let _ = writeln!(out, "    run it again: {}", first.replay);
        if all.len() > 1 {
            let parts = grouped(all[1..].iter().map(|f| (&**f, ())), |c| part(c));
            let parts: Vec<_> = parts.iter().map(|(part, n)| format!("{} {part}", n.len())).collect();
            let _ = writeln!(out, "    and {} more of {kind}: {}", all.len() - 1, parts.join(", "));
            is_cut = true;
        }
    }
    if is_cut {
        let _ = writeln!(out, "\nthe JSON report has every failure");
    }
}

/// What was rightly refused, and why: what a certificate does not speak of.
fn refusals(out: &mut String, r: &Report) {
    let refused = r.cases.iter().filter(|(_, c)| c.outcome == Outcome::Unsupported);
    let with_reason = |c: &CaseResult| (kind(c), c.message.clone().unwrap_or_default());
    let kinds = grouped(refused.map(|(b, c)| ((*b, c), c)), |(b, c)| (*b, with_reason(c)));
    for ((_, (kind, why)), all) in kinds.iter().take(SHOWN) {
        let why: Vec<_> = why.split_whitespace().collect();
        let _ = writeln!(
            out,
            "\nunsupported {kind}, {} cases, the first {}\n    {}",
            all.len(),
            all[0].id,
            why.join(" ")
        );
    }
    if kinds.len() > SHOWN {
        let _ = writeln!(out, "\nunsupported: {} more kinds; the JSON report has all", kinds.len() - SHOWN);
    }
}

/// Level, claim and check of a case.
fn kind(c: &CaseResult) -> String {
    format!("{}/{}/{}", c.level, c.claim.as_deref().unwrap_or("backend"), words(c)[0])
}

/// What comes behind the check in its name: an encoding, a layout, an operation.
fn part(c: &CaseResult) -> String {
    words(c).get(1).unwrap_or(&"alone").to_string()
}

fn words(c: &CaseResult) -> Vec<&str> {
    let start = format!("{}/{}/", c.level, c.claim.as_deref().unwrap_or("backend"));
    c.id.strip_prefix(&start).unwrap_or(&c.id).split('/').collect()
}

/// Values by key, both in the order in which they come.
fn grouped<I, K: PartialEq, V>(all: impl Iterator<Item = (I, V)>, key: impl Fn(&I) -> K) -> Vec<(K, Vec<V>)> {
    let mut groups: Vec<(K, Vec<V>)> = Vec::new();
    for (item, value) in all {
        let key = key(&item);
        match groups.iter_mut().find(|g| g.0 == key) {
            Some(group) => group.1.push(value),
            None => groups.push((key, vec![value])),
        }
    }
    groups
}
