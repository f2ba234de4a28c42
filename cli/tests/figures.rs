//! Speeds of CUDA in the documents are those that `bench/h200.sh` wrote: tables between `<!-- h200 ... -->` and
//! `<!-- /h200 -->` are rendered from `bench/results/h200.json`. `Q4_WRITE_FIGURES=1` puts them there.
#![allow(clippy::unwrap_used)]
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const END: &str = "<!-- /h200 -->";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn documents_have_the_recorded_figures() {
    let recorded = std::fs::read_to_string(root().join("bench/results/h200.json")).ok();
    let recorded: Option<Value> = recorded.map(|text| serde_json::from_str(&text).unwrap());
    for name in ["README.md", "docs/cuda.md"] {
        let path = root().join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        let want = filled(&text, recorded.as_ref());
        if text != want && std::env::var_os("Q4_WRITE_FIGURES").is_some() {
            std::fs::write(&path, &want).unwrap();
        } else {
            assert!(
                text == want,
                "{name} differs from bench/results/h200.json: Q4_WRITE_FIGURES=1 writes it"
            );
        }
    }
}

/// The text with every marked region rendered anew; empty regions where nothing is recorded.
fn filled(text: &str, recorded: Option<&Value>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once("<!-- h200 ") {
        let (which, behind) = behind.split_once(" -->\n").unwrap();
        let (_, behind) = behind.split_once(END).unwrap();
        let table = recorded.map_or(String::new(), |r| match which {
            "models" => models(r),
            "products" => products(r),
            "promises" => promises(r),
            other => panic!("no table is called {other}"),
        });
        let _ = write!(out, "{before}<!-- h200 {which} -->\n{table}{END}");
        rest = behind;
    }
    out + rest
}

fn figures(recorded: &Value) -> impl Iterator<Item = (&str, &Value)> {
    recorded["figures"].as_array().unwrap().iter().map(|f| (f["name"].as_str().unwrap(), f))
}

/// Three digits at least, none invented.
fn number(v: &Value) -> String {
    match v.as_f64() {
        None => String::new(),
        Some(v) if v.abs() >= 100.0 || v.fract() == 0.0 => format!("{v:.0}"),
        Some(v) if v.abs() >= 10.0 => format!("{v:.1}"),
        Some(v) if v.abs() < 0.01 => format!("{v:.0e}"),
        Some(v) => format!("{v:.2}"),
    }
}

/// Rates of the whole model, a line per format and activations.
fn models(recorded: &Value) -> String {
    const WHAT: [&str; 7] =
        ["decode", "decode at 4096", "prefill 512", "prefill 4096", "batch 8", "batch 16", "batch 64"];
    let find = |what: &str, kind: &str, field: &str| {
        let name = format!("{what}, {kind}");
        figures(recorded).find(|(n, _)| *n == name).map_or(String::new(), |(_, f)| number(&f[field]))
    };
    let mut out = String::from("| tokens a second |");
    WHAT.iter().for_each(|w| out += &format!(" {w} |"));
    out += "\n|---|---|---|---|---|---|---|---|\n";
    for kind in ["NVFP4 native", "NVFP4 int8", "NVFP4 nvfp4", "NF4 native"] {
        let cells = WHAT.map(|w| find(w, kind, "q4")).join(" | ");
        let _ = writeln!(out, "| {kind} | {cells} |");
    }
    for (line, field) in [("floor", "floor"), ("llama.cpp Q4_0", "peer")] {
        let _ = writeln!(out, "| {line} | {} |", WHAT.map(|w| find(w, "NVFP4 native", field)).join(" | "));
    }
    out
}

/// Microseconds of single products, and how many times faster than the fastest peer.
fn products(recorded: &Value) -> String {
    const ROWS: [&str; 6] = ["1", "8", "16", "64", "512", "4096"];
    let mut out = String::from("| us (times the fastest peer's speed) |");
    ROWS.iter().for_each(|m| out += &format!(" M = {m} |"));
    out += "\n|---|---|---|---|---|---|---|\n";
    for kind in ["NVFP4", "NF4"] {
        for product in ["qkv", "o", "gate_up", "down", "lm_head"] {
            let cells = ROWS.map(|m| {
                let prefix = format!("{product} m={m}, {kind}, beside ");
                let cells: Vec<_> =
                    figures(recorded).filter(|(n, _)| n.starts_with(&prefix)).map(|(_, f)| f).collect();
                let least = cells.iter().filter_map(|f| f["ratio"].as_f64()).min_by(f64::total_cmp);
                let Some((first, least)) = cells.first().zip(least) else { return String::new() };
                format!("{} ({least:.2})", number(&first["q4"]))
            });
            let _ = writeln!(out, "| {kind} {product} | {} |", cells.join(" | "));
        }
    }
    out
}

/// What is promised and is no single product.
fn promises(recorded: &Value) -> String {
    let mut out = String::from("| figure | measured | promised | kept |\n|---|---|---|---|\n");
    for (name, f) in figures(recorded) {
        if let (Some(kept), false) = (f["met"].as_bool(), name.contains(", beside ")) {
            let (bar, unit) = (f["bar"].as_str().unwrap(), f["unit"].as_str().unwrap());
            let kept = if kept { "yes" } else { "no" };
            let _ = writeln!(out, "| {name} | {} {unit} | {bar} | {kept} |", number(&f["q4"]));
        }
    }
    out
}

#[test]
fn a_changed_figure_is_noticed() {
    let recorded = serde_json::json!({ "figures": [
        { "name": "first token", "q4": 1.234, "unit": "s", "bar": "< 3", "met": true },
        { "name": "decode, NVFP4 native", "q4": 860.3, "peer": 380, "floor": 1930.6, "unit": "tok/s", "met": null },
    ]});
    let text = filled("a <!-- h200 promises -->\nold\n<!-- /h200 --> b", Some(&recorded));
    assert_eq!(
        text,
        "a <!-- h200 promises -->\n| figure | measured | promised | kept |\n|---|---|---|---|\n\
         | first token | 1.23 s | < 3 | yes |\n<!-- /h200 --> b"
    );
    assert!(models(&recorded).contains("| NVFP4 native | 860 |  |"), "{}", models(&recorded));
    assert!(models(&recorded).contains("| floor | 1931 |"));
    assert_eq!(
        filled("x <!-- h200 models -->\n1\n<!-- /h200 -->", None),
        "x <!-- h200 models -->\n<!-- /h200 -->"
    );
}
