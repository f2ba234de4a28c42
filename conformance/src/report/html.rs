//! The report as one page: no scripts, no fonts, no other file, readable in the dark and on paper.
use super::{BackendReport, ClaimReport, LevelReport, Report, plot};
use crate::Level;
use crate::case::Outcome;
use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = include_str!("page.css");
/// Failures that are listed.
const SHOWN: usize = 200;

pub(super) fn render(r: &Report) -> String {
    let (class, verdict) = match (r.conformant, r.complete) {
        (true, true) => ("good", "Conformant"),
        (true, false) => ("partial", "Nothing wrong in the part that ran"),
        (false, _) => ("bad", "Not conformant"),
    };
    let parts = [hero(r, class, verdict), facts(r), levels(r), matrix(r), failures(r), plots(r), footer(r)];
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (names(r).join(", ")) ": " (verdict) }
                style { (PreEscaped(STYLE)) }
            }
            body { main { @for part in parts { (part) } } }
        }
    };
    page.into_string() + "\n"
}

fn names(r: &Report) -> Vec<&str> {
    r.backends.iter().map(|b| &*b.name).collect()
}

/// Who, and the verdict.
fn hero(r: &Report, class: &str, verdict: &str) -> Markup {
    let failed = if r.failed == 0 { "none".to_owned() } else { thousands(r.failed as u64) };
    let cases = thousands((r.passed + r.failed + r.waived) as u64);
    html! {
        header {
            div {
                p.eyebrow { "q4 conformance " (r.suite) }
                @if let [b] = r.backends.as_slice() {
                    h1 { (b.name) " " small { (b.version) } } p.by { "by " (b.vendor) }
                } @else {
                    h1 { (r.backends.len()) " backends" } p.by { (names(r).join(" · ")) }
                }
            }
            div.verdict.(class) {
                (seal(r.conformant)) div { b { (verdict) } span { (cases) " cases, " (failed) " failed" } }
            }
        }
    }
}

/// What the verdict is about: device, bytes, profile, and how much was compared.
fn facts(r: &Report) -> Markup {
    let claims = r.claims.iter().filter(|c| c.claim != "backend").count();
    let worst = r.claims.iter().fold(0f64, |a, c| a.max(c.float32.max));
    html! {
        dl.facts {
            (fact("device", &r.device, html! { (r.host) }))
            @if let [BackendReport { library: Some(library), .. }] = r.backends.as_slice() {
                @let name = library.path.rsplit('/').next().unwrap_or(&library.path);
                (fact("library", name, html! { code { "sha256 " (library.sha256) } }))
            }
            (fact("profile", r.profile.as_str(), html! {
                (claims) " claims, " (thousands(r.values)) " values compared, seed " (r.seed)
            }))
            (fact("accuracy", &format!("{worst:.3} of the bound"), html! {
                @if r.failed == 0 { "largest error of any f32 result, elementwise" }
                @else { "largest error of the f32 cases that passed" }
            }))
        }
    }
}

fn fact(name: &str, value: &str, detail: Markup) -> Markup {
    html! { div { dt { (name) } dd { b { (value) } span { (detail) } } } }
}

const fn meaning(level: Level) -> &'static str {
    match level {
        Level::L0 => "It says who it is, in a table that holds, and gives the same answer twice.",
        Level::L1 => "Every code and every scale decodes to the right number, bit for bit.",
        Level::L2 => "Forward products lie within the bound of each single element.",
        Level::L3 => "So do gradients, by the same bound.",
        Level::L4 => "What it cannot do it refuses, with reasons, and leaves no trace.",
        Level::L5 => "The path, the format and the memory it claims are what was seen.",
    }
}

/// One tile a level: what it means and what came of it.
fn levels(r: &Report) -> Markup {
    let tile = |level: Level| {
        let counts: Vec<_> = r.claims.iter().filter_map(|c| c.levels.get(&level)).collect();
        let passed: usize = counts.iter().map(|l| l.passed).sum();
        let failed: usize = counts.iter().map(|l| l.failed + usize::from(l.executed() == 0)).sum();
        let (class, mark, text) = match (counts.len(), failed) {
            (0, _) => ("none", None, "not asked".to_owned()),
            (_, 0) => ("good", Some(mark(true)), format!("{} passed", thousands(passed as u64))),
            (_, n) => ("bad", Some(mark(false)), format!("{} wrong", thousands(n as u64))),
        };
        html! {
            div class=(class) {
                h3 { b { (level) } " " (level.title()) @if let Some(mark) = mark { (mark) } }
                p { (meaning(level)) }
                span { (text) }
            }
        }
    };
    html! { section.levels { @for level in Level::ALL { (tile(level)) } } }
}

fn matrix(r: &Report) -> Markup {
    let levels: Vec<Level> =
        Level::ALL.into_iter().filter(|l| r.claims.iter().any(|c| c.levels.contains_key(l))).collect();
    html! {
        section {
            h2 { "What was claimed, and what was found" }
            div.scroll { table.matrix {
                thead { tr {
                    th { "encoding" } th { "activations" } th { "path" }
                    @for l in &levels { th.level { b { (l) } " " (l.title()) } }
                    th.ratio { "error / bound" }
                } }
                @for b in &r.backends { tbody {
                    tr.backend { th colspan=(levels.len() + 4) {
                        (mark(b.conformant)) b { (b.name) } " " (b.version) " " span { (b.vendor) }
                    } }
                    @for c in r.claims.iter().filter(|c| c.backend == b.name) { (row(&levels, c)) }
                } }
            } }
        }
    }
}

fn row(levels: &[Level], c: &ClaimReport) -> Markup {
    html! {
        tr {
            @if let [schema, activations, device, path] = parts(c)[..] {
                td.schema { (schema) } td { (activations) } td.path { (path) " " span { (device) } }
            } @else {
                td colspan="3" { "descriptor, probe, verdicts" }
            }
            @for l in levels { (cell(*l, c.levels.get(l))) }
            @if has_ratios(c) {
                td.ratio { (plot::bar(ratio(c))) b { (format_args!("{:.3}", ratio(c))) } }
            } @else {
                td.none { "–" }
            }
        }
    }
}

fn cell(level: Level, counts: Option<&LevelReport>) -> Markup {
    let Some(l) = counts else { return html! { td.none { "–" } } };
    let class = if l.failed > 0 || l.executed() == 0 { "bad" } else { "good" };
    html! {
        td class=(class) data-level=(level) {
            @if l.failed > 0 {
                (mark(false)) small { (l.failed) " of " (l.executed()) " wrong" }
            } @else if l.executed() == 0 {
                "nothing ran"
            } @else {
                (mark(true)) small { (thousands(l.passed as u64)) }
                @for (n, what) in [(l.waived, "waived"), (l.unsupported, "refused")] {
                    @if n > 0 { small.more { (n) " " (what) } }
                }
            }
        }
    }
}

fn plots(r: &Report) -> Markup {
    let shown: Vec<&ClaimReport> = r.claims.iter().filter(|c| has_ratios(c)).collect();
    if shown.is_empty() {
        return Markup::default();
    }
    html! {
        section {
            h2 { "How far from the bound" }
            p.lead {
                "Every output is compared with the exact product. The bound of each is derived from the terms "
                "of its sum; a bar counts the cases whose largest error takes that share of it, and everything "
                "must lie left of the line at the end. " span.key.f32 { "f32 results" } " show the arithmetic; "
                "in " span.key.half { "16-bit results" } " the last rounding alone may take the whole bound."
            }
            div.plots { @for c in shown { figure {
                figcaption {
                    span {
                        @if r.backends.len() > 1 { em { (c.backend) } br; }
                        @if let [schema, activations, device, path] = parts(c)[..] {
                            (schema) " " (activations) " " small { (path) ", " (device) }
                        } @else {
                            (c.claim)
                        }
                    }
                    b { (format_args!("{:.3}", ratio(c))) }
                }
                (plot::histogram(c))
            } } }
        }
    }
}

fn failures(r: &Report) -> Markup {
    if r.failures.is_empty() && r.notes.is_empty() {
        return Markup::default();
    }
    html! {
        section {
            h2 { "What is not right" }
            @for note in &r.notes { p.note { (note) } }
            @for (i, f) in r.failures.iter().take(SHOWN).enumerate() {
                details class=(if f.outcome == Outcome::Waived { "waived" } else { "bad" }) open[i == 0] {
                    summary { b { (f.outcome.as_str()) } " " code { (f.id) } }
                    pre {
                        @if let Some(waiver) = &f.waiver { "waived: " (waiver) "\n" }
                        @if let Some(message) = &f.message { (message) }
                    }
                    pre.again { (f.replay) }
                }
            }
            @if r.failures.len() > SHOWN {
                p.note { (r.failures.len() - SHOWN) " more are in the JSON report." }
            }
        }
    }
}

fn footer(r: &Report) -> Markup {
    html! {
        footer { dl {
            @for b in &r.backends {
                @if let Some(library) = &b.library {
                    dt { (b.name) } dd { (library.path) br; code { "sha256 " (library.sha256) } }
                }
            }
            dt { "machine" } dd { (r.host) br; code { (r.machine) } }
            dt { "run" } dd {
                (format_args!("{:.1}", r.seconds)) " s, " (thousands(r.skipped as u64))
                " cases refused beforehand, " (r.waived) " waived"
            }
        } }
    }
}

fn has_ratios(c: &ClaimReport) -> bool {
    c.float32.cases() + c.half.cases() > 0
}

/// Encoding, activations, device and path.
fn parts(c: &ClaimReport) -> Vec<&str> {
    c.claim.split('/').collect()
}

fn ratio(c: &ClaimReport) -> f64 {
    if c.float32.cases() > 0 { c.float32.max } else { c.half.max }
}

fn seal(good: bool) -> Markup {
    let d = if good { "M14 25l7 7 13-15" } else { "M16 16l16 16M32 16L16 32" };
    html! {
        svg.seal viewBox="0 0 48 48" aria-hidden="true" { circle cx="24" cy="24" r="22" {} path d=(d) {} }
    }
}

fn mark(good: bool) -> Markup {
    let d = if good { "M3 8.5l3.2 3.2L13 4.8" } else { "M4 4l8 8M12 4l-8 8" };
    html! { svg.mark viewBox="0 0 16 16" aria-hidden="true" { path d=(d) {} } }
}

/// `12 345`, with thin spaces.
fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let head = digits.len() % 3;
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && i % 3 == head % 3 {
            out.push('\u{2009}');
        }
        out.push(c);
    }
    out
}
