//! The report as one page: no scripts, no fonts, no other file, readable in the dark and on paper.
use super::junit::escape;
use super::{BackendReport, ClaimReport, LevelReport, Report, plot};
use crate::Level;
use crate::case::Outcome;
use std::fmt::Write;

const STYLE: &str = include_str!("page.css");
/// Failures that are listed.
const SHOWN: usize = 200;

pub(super) fn render(r: &Report) -> String {
    let mut out = String::with_capacity(1 << 16);
    let (class, verdict) = match (r.conformant, r.complete) {
        (true, true) => ("good", "Conformant"),
        (true, false) => ("partial", "Nothing wrong in the part that ran"),
        (false, _) => ("bad", "Not conformant"),
    };
    let names: Vec<_> = r.backends.iter().map(|b| escape(&b.name)).collect();
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>{}: {verdict}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n",
        names.join(", ")
    );
    hero(&mut out, r, class, verdict);
    facts(&mut out, r);
    levels(&mut out, r);
    matrix(&mut out, r);
    failures(&mut out, r);
    plots(&mut out, r);
    footer(&mut out, r);
    out.push_str("</main>\n</body>\n</html>\n");
    out
}

/// Who, and the verdict.
fn hero(out: &mut String, r: &Report, class: &str, verdict: &str) {
    let (title, by) = match r.backends.as_slice() {
        [b] => (
            format!("{} <small>{}</small>", escape(&b.name), escape(&b.version)),
            format!("by {}", escape(&b.vendor)),
        ),
        all => (
            format!("{} backends", all.len()),
            all.iter().map(|b| escape(&b.name)).collect::<Vec<_>>().join(" · "),
        ),
    };
    let failed = match r.failed {
        0 => "none failed".to_owned(),
        n => format!("{} failed", thousands(n as u64)),
    };
    let _ = writeln!(
        out,
        "<header><div><p class=\"eyebrow\">q4 conformance {}</p><h1>{title}</h1><p class=\"by\">{by}</p></div><div class=\"verdict {class}\">{}<div><b>{verdict}</b><span>{} cases, {failed}</span></div></div></header>",
        escape(&r.suite),
        seal(r.conformant),
        thousands((r.passed + r.failed + r.waived) as u64),
    );
}

/// What the verdict is about: device, bytes, profile, and how much was compared.
fn facts(out: &mut String, r: &Report) {
    let mut cells = vec![("device", escape(&r.device), escape(&r.host))];
    if let [BackendReport { library: Some(library), .. }] = r.backends.as_slice() {
        let name = library.path.rsplit('/').next().unwrap_or(&library.path);
        cells.push(("library", escape(name), format!("<code>sha256 {}</code>", escape(&library.sha256))));
    }
    let claims = r.claims.iter().filter(|c| c.claim != "backend").count();
    cells.push((
        "profile",
        r.profile.as_str().to_owned(),
        format!("{claims} claims, {} values compared, seed {}", thousands(r.values), r.seed),
    ));
    let worst = r.claims.iter().fold(0f64, |a, c| a.max(c.float32.max));
    cells.push((
        "accuracy",
        format!("{worst:.3} of the bound"),
        match r.failed {
            0 => "largest error of any f32 result, elementwise".into(),
            _ => "largest error of the f32 cases that passed".into(),
        },
    ));
    out.push_str("<dl class=\"facts\">");
    for (name, value, detail) in cells {
        let _ = write!(out, "<div><dt>{name}</dt><dd><b>{value}</b><span>{detail}</span></dd></div>");
    }
    out.push_str("</dl>\n");
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
fn levels(out: &mut String, r: &Report) {
    out.push_str("<section class=\"levels\">");
    for level in Level::ALL {
        let counts = r.claims.iter().filter_map(|c| c.levels.get(&level));
        let (mut passed, mut failed, mut asked) = (0, 0, false);
        for l in counts {
            passed += l.passed;
            failed += l.failed + usize::from(l.executed() == 0);
            asked = true;
        }
        let (class, mark, text) = match (asked, failed) {
            (false, _) => ("none", "", "not asked".to_owned()),
            (true, 0) => ("good", mark(true), format!("{} passed", thousands(passed as u64))),
            (true, n) => ("bad", mark(false), format!("{} wrong", thousands(n as u64))),
        };
        let _ = write!(
            out,
            "<div class=\"{class}\"><h3><b>{level}</b> {}{mark}</h3><p>{}</p><span>{text}</span></div>",
            level.title(),
            meaning(level)
        );
    }
    out.push_str("</section>\n");
}

fn matrix(out: &mut String, r: &Report) {
    let levels: Vec<Level> =
        Level::ALL.into_iter().filter(|l| r.claims.iter().any(|c| c.levels.contains_key(l))).collect();
    out.push_str("<section><h2>What was claimed, and what was found</h2><div class=\"scroll\"><table class=\"matrix\"><thead><tr><th>encoding</th><th>activations</th><th>path</th>");
    for l in &levels {
        let _ = write!(out, "<th class=\"level\"><b>{l}</b> {}</th>", l.title());
    }
    out.push_str("<th class=\"ratio\">error / bound</th></tr></thead>");
    for b in &r.backends {
        let _ = write!(
            out,
            "<tbody><tr class=\"backend\"><th colspan=\"{}\">{}<b>{}</b> {} <span>{}</span></th></tr>",
            levels.len() + 4,
            mark(b.conformant),
            escape(&b.name),
            escape(&b.version),
            escape(&b.vendor)
        );
        for c in r.claims.iter().filter(|c| c.backend == b.name) {
            let parts: Vec<&str> = c.claim.split('/').collect();
            match parts.as_slice() {
                [schema, activations, device, path] => {
                    let _ = write!(
                        out,
                        "<tr><td class=\"schema\">{}</td><td>{}</td><td class=\"path\">{} <span>{}</span></td>",
                        escape(schema),
                        escape(activations),
                        escape(path),
                        escape(device)
                    );
                }
                _ => out.push_str("<tr><td colspan=\"3\">descriptor, probe, verdicts</td>"),
            }
            for l in &levels {
                out.push_str(&cell(*l, c.levels.get(l)));
            }
            let ratio = if c.float32.cases() > 0 { c.float32.max } else { c.half.max };
            if has_ratios(c) {
                let _ = write!(out, "<td class=\"ratio\">{}<b>{ratio:.3}</b></td></tr>", plot::bar(ratio));
            } else {
                out.push_str("<td class=\"none\">–</td></tr>");
            }
        }
        out.push_str("</tbody>");
    }
    out.push_str("</table></div></section>\n");
}

fn cell(level: Level, counts: Option<&LevelReport>) -> String {
    let Some(l) = counts else { return "<td class=\"none\">–</td>".into() };
    let (class, text) = match l {
        l if l.failed > 0 => {
            ("bad", format!("{}<small>{} of {} wrong</small>", mark(false), l.failed, l.executed()))
        }
        l if l.executed() == 0 => ("bad", "nothing ran".to_owned()),
        l => {
            let mut text = format!("{}<small>{}</small>", mark(true), thousands(l.passed as u64));
            for (n, what) in [(l.waived, "waived"), (l.unsupported, "refused")] {
                if n > 0 {
                    let _ = write!(text, "<small class=\"more\">{n} {what}</small>");
                }
            }
            ("good", text)
        }
    };
    format!("<td class=\"{class}\" data-level=\"{level}\">{text}</td>")
}

fn plots(out: &mut String, r: &Report) {
    let shown: Vec<&ClaimReport> = r.claims.iter().filter(|c| has_ratios(c)).collect();
    if shown.is_empty() {
        return;
    }
    out.push_str("<section><h2>How far from the bound</h2><p class=\"lead\">Every output is compared with the exact product. The bound of each is derived from the terms of its sum; a bar counts the cases whose largest error takes that share of it, and everything must lie left of the line at the end. <span class=\"key f32\">f32 results</span> show the arithmetic; in <span class=\"key half\">16-bit results</span> the last rounding alone may take the whole bound.</p><div class=\"plots\">");
    for c in shown {
        let backend =
            if r.backends.len() > 1 { format!("<em>{}</em><br>", escape(&c.backend)) } else { String::new() };
        let name = match c.claim.split('/').collect::<Vec<_>>().as_slice() {
            [schema, activations, device, path] => format!(
                "{} {} <small>{}, {}</small>",
                escape(schema),
                escape(activations),
                escape(path),
                escape(device)
            ),
            _ => escape(&c.claim),
        };
        let _ = write!(
            out,
            "<figure><figcaption><span>{backend}{name}</span><b>{:.3}</b></figcaption>{}</figure>",
            if c.float32.cases() > 0 { c.float32.max } else { c.half.max },
            plot::histogram(c)
        );
    }
    out.push_str("</div></section>\n");
}

fn failures(out: &mut String, r: &Report) {
    if r.failures.is_empty() && r.notes.is_empty() {
        return;
    }
    out.push_str("<section><h2>What is not right</h2>");
    for note in &r.notes {
        let _ = write!(out, "<p class=\"note\">{}</p>", escape(note));
    }
    for (i, f) in r.failures.iter().take(SHOWN).enumerate() {
        let open = if i == 0 { " open" } else { "" };
        let class = if f.outcome == Outcome::Waived { "waived" } else { "bad" };
        let text = f.waiver.as_deref().map(|w| format!("waived: {w}\n")).unwrap_or_default()
            + f.message.as_deref().unwrap_or("");
        let _ = write!(
            out,
            "<details class=\"{class}\"{open}><summary><b>{}</b> <code>{}</code></summary><pre>{}</pre><pre class=\"again\">{}</pre></details>",
            f.outcome.as_str(),
            escape(&f.id),
            escape(&text).replace("&#10;", "\n"),
            escape(&f.replay)
        );
    }
    if r.failures.len() > SHOWN {
        let _ =
            write!(out, "<p class=\"note\">{} more are in the JSON report.</p>", r.failures.len() - SHOWN);
    }
    out.push_str("</section>\n");
}

fn footer(out: &mut String, r: &Report) {
    out.push_str("<footer><dl>");
    for b in &r.backends {
        if let Some(library) = &b.library {
            let (name, path, sha) = (escape(&b.name), escape(&library.path), escape(&library.sha256));
            let _ = write!(out, "<dt>{name}</dt><dd>{path}<br><code>sha256 {sha}</code></dd>");
        }
    }
    let _ = writeln!(
        out,
        "<dt>machine</dt><dd>{}<br><code>{}</code></dd><dt>run</dt><dd>{:.1} s, {} cases refused beforehand, {} waived</dd></dl></footer>",
        escape(&r.host),
        escape(&r.machine),
        r.seconds,
        thousands(r.skipped as u64),
        r.waived
    );
}

fn has_ratios(c: &ClaimReport) -> bool {
    c.float32.cases() + c.half.cases() > 0
}

fn seal(good: bool) -> &'static str {
    if good {
        "<svg class=\"seal\" viewBox=\"0 0 48 48\" aria-hidden=\"true\"><circle cx=\"24\" cy=\"24\" r=\"22\"/><path d=\"M14 25l7 7 13-15\"/></svg>"
    } else {
        "<svg class=\"seal\" viewBox=\"0 0 48 48\" aria-hidden=\"true\"><circle cx=\"24\" cy=\"24\" r=\"22\"/><path d=\"M16 16l16 16M32 16L16 32\"/></svg>"
    }
}

fn mark(good: bool) -> &'static str {
    if good {
        "<svg class=\"mark\" viewBox=\"0 0 16 16\" aria-hidden=\"true\"><path d=\"M3 8.5l3.2 3.2L13 4.8\"/></svg>"
    } else {
        "<svg class=\"mark\" viewBox=\"0 0 16 16\" aria-hidden=\"true\"><path d=\"M4 4l8 8M12 4l-8 8\"/></svg>"
    }
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
