//! This machine and what its kernels make of recorded products, as a page.
use super::{Backend, Body};
use crate::page::{Chart, Mood, Page, Point, Series, beside, said, table};
use maud::{Markup, html};
use q4_conformance::Verdict;
use q4_core::memory::human;

/// The page before it is written.
pub fn page(body: &Body) -> Page<'_> {
    let verdict = match body.findings.len() {
        0 => (Mood::Good, "no findings".to_owned()),
        1 => (Mood::Bad, "1 finding".to_owned()),
        n => (Mood::Bad, format!("{n} findings")),
    };
    let host = &body.host;
    let mut facts = vec![
        ("processor", format!("{}, {} processors", host.env.arch, host.env.processors)),
        ("features", host.env.cpu_features.join(" ")),
        (
            "memory",
            host.available_bytes.map_or("unknown".to_owned(), |bytes| format!("{} available", human(bytes))),
        ),
        ("device", format!("{} ({})", host.device, host.device_why)),
        ("fingerprint", host.fingerprint.clone()),
    ];
    let cuda = host.env.cuda.iter().map(|d| format!("{} ({}, {})", d.ordinal, d.name, d.arch()));
    let cuda: Vec<_> = cuda.collect();
    facts.push(("CUDA", host.env.cuda_missing.clone().unwrap_or_else(|| cuda.join(", "))));
    facts.extend(host.env.vendor.iter().map(|d| ("other device", format!("{} ({})", d.device, d.name))));
    if !host.env.cuda.is_empty() {
        let c = &host.cuda_libraries;
        let libraries = format!("driver {}, NVRTC {}, cuBLASLt {}", c.driver, c.nvrtc, c.cublaslt);
        facts.push(("CUDA libraries", libraries));
    }
    facts.extend(host.environment.iter().map(|(name, value)| ("variable", format!("{name}={value}"))));
    let found = body.findings.iter().map(|f| vec![f.code.to_owned(), f.backend.clone(), f.message.clone()]);
    let mut sections = Vec::new();
    if !body.findings.is_empty() {
        sections.push(("Findings", String::new(), table(&["finding", "backend", "what"], &[], found)));
    }
    let rows = body.backends.iter().flat_map(|b| {
        b.paths.iter().map(move |p| {
            let (verdict, error) = match p.verdict {
                Verdict::Pass => ("pass".to_owned(), format!("{:.3}", p.error_over_bound)),
                Verdict::Fail => (format!("WRONG: {}", p.message.as_deref().unwrap_or("")), String::new()),
                Verdict::Unsupported => {
                    (format!("refused: {}", p.message.as_deref().unwrap_or("")), String::new())
                }
            };
            vec![
                b.name.clone(),
                p.schema.clone(),
                p.activations.to_owned(),
                error,
                verdict,
                p.path.to_string(),
            ]
        })
    });
    let head = ["backend", "format", "inputs", "error / bound", "verdict", "path"];
    sections.push((
        "What was computed",
        "Every path computed recorded products; the largest error of an output over the bound that the terms \
         of its sum allow. All must lie below 1."
            .to_owned(),
        beside(&chart(body).svg(), &table(&head, &[3], rows)),
    ));
    sections.push(("Backends", String::new(), backends(&body.backends)));
    Page { verb: "diagnose", subject: "this machine", verdict, facts, sections }
}

fn chart(body: &Body) -> Chart {
    let (mut series, mut ticks) = (Vec::new(), Vec::new());
    for b in &body.backends {
        let mut points = Vec::new();
        for p in b.paths.iter().filter(|p| p.verdict != Verdict::Unsupported) {
            let value = if p.verdict == Verdict::Pass { p.error_over_bound } else { f64::INFINITY };
            let says = format!("{} {} {} {}: {value:.3}", b.name, p.path, p.schema, p.activations);
            points.push(Point { at: ticks.len(), value, says });
            ticks.push(p.schema.trim_end_matches("@1").to_owned());
        }
        if !points.is_empty() {
            series.push(Series { name: b.name.clone(), points });
        }
    }
    Chart {
        title: "Error over its bound".into(),
        across: "paths".into(),
        up: "error / bound".into(),
        ticks,
        log: false,
        limit: Some((1.0, "the bound".into())),
        series,
    }
}

fn backends(all: &[Backend]) -> Markup {
    html! { @for b in all {
        details open[b.state == "dead"] {
            summary { b { (said(&b.name)) } " " (b.state) " " (said(&b.version)) }
            pre {
                @for reason in &b.reasons { (said(&reason.to_string())) "\n" }
                @for probe in &b.probes {
                    @let mark = if probe.reasons.is_empty() { "ok  " } else { "no  " };
                    (mark) (said(&probe.id)) "  " (said(&probe.detail)) "\n"
                    @for reason in &probe.reasons { "    " (said(&reason.to_string())) "\n" }
                }
            }
        }
    } }
}
