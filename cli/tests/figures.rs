//! Speeds in the documents are those that scripts wrote: tables between `<!-- h200 ... -->` and `<!-- /h200
//! -->` are rendered from `bench/results/h200.json` (`bench/h200.sh`), those of `cpu` from `cpu.json`
//! (`bench/cpu.sh`). `Q4_WRITE_FIGURES=1` puts them there.
#![allow(clippy::unwrap_used)]
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn documents_have_the_recorded_figures() {
    for name in ["README.md", "docs/cuda.md"] {
        let path = root().join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        let want = ["h200", "cpu"].iter().fold(text.clone(), |text, machine| {
            let recorded = root().join("bench/results").join(machine).with_extension("json");
            let recorded = std::fs::read_to_string(recorded).ok();
            let recorded = recorded.map(|text| serde_json::from_str(&text).unwrap());
            filled(&text, machine, recorded.as_ref())
        });
        if text != want && std::env::var_os("Q4_WRITE_FIGURES").is_some() {
            std::fs::write(&path, &want).unwrap();
        } else {
            assert!(text == want, "{name} differs from bench/results: Q4_WRITE_FIGURES=1 writes it");
        }
    }
}

/// The text with every marked region of a machine rendered anew; empty regions where nothing is recorded.
fn filled(text: &str, machine: &str, recorded: Option<&Value>) -> String {
    let (begin, end) = (format!("<!-- {machine} "), format!("<!-- /{machine} -->"));
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once(&begin) {
        let (which, behind) = behind.split_once(" -->\n").unwrap();
        let (_, behind) = behind.split_once(&end).unwrap();
        let table = recorded.map_or(String::new(), |r| match (machine, which) {
            ("h200", "speed") => card(r),
            ("h200", "models") => models(r),
            ("h200", "products") => products(r),
            ("h200", "promises") => promises(r),
            ("cpu", "speed") => processor(r),
            ("h200", "headline") => headline("one H200", r, "decode, NVFP4 native"),
            ("cpu", "headline") => {
                let threads = r["machine"]["threads"].as_u64().unwrap();
                let on = format!("{threads} threads of an {}, with int8 inputs,", name(&r["machine"]));
                headline(&on, r, "qwen3-4b decode nvfp4 int8") + &resident(r, "qwen3-4b q4 nvfp4 int8")
            }
            other => panic!("no table is called {other:?}"),
        });
        let _ = write!(out, "{before}{begin}{which} -->\n{table}{end}");
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

/// A field of a figure, nothing where there is no such figure.
fn cell(recorded: &Value, name: &str, field: &str) -> String {
    figures(recorded).find(|(n, _)| *n == name).map_or(String::new(), |(_, f)| number(&f[field]))
}

fn table(head: &str, columns: &[&str]) -> String {
    format!("| {head} | {} |\n|---|{}\n", columns.join(" | "), "---|".repeat(columns.len()))
}

fn line(name: &str, cells: impl Iterator<Item = String>) -> String {
    format!("| {name} | {} |\n", cells.collect::<Vec<_>>().join(" | "))
}

/// What a reader wants to know first.
fn headline(on: &str, recorded: &Value, name: &str) -> String {
    let of = |field: &str| figures(recorded).find(|(n, _)| *n == name).unwrap().1[field].as_f64().unwrap();
    let (q4, peer) = (of("q4"), of("peer"));
    format!(
        "On {on} a 4B model writes {q4:.0} tokens a second, {:.1} times what llama.cpp does.\n",
        q4 / peer
    )
}

/// The memory that took.
fn resident(recorded: &Value, name: &str) -> String {
    let all = recorded["memory"].as_array().unwrap();
    let peak = all.iter().find(|m| m["name"] == name).unwrap()["peak_bytes"].as_f64().unwrap();
    format!("That takes {:.1} GiB of memory, weights, cache and all.\n", peak / f64::from(1 << 30))
}

/// What the whole model does on a card, in short.
fn card(recorded: &Value) -> String {
    const WHAT: [&str; 4] = ["decode", "prefill 512", "prefill 4096", "batch 64"];
    let of = |kind: &str, field: &str| {
        WHAT.map(|w| cell(recorded, &format!("{w}, {kind} native"), field)).into_iter()
    };
    table("one H200, 4B", &["decode", "prefill of 512", "prefill of 4096", "64 sequences"])
        + &line("q4, NVFP4", of("NVFP4", "q4"))
        + &line("q4, NF4", of("NF4", "q4"))
        + &line("llama.cpp, Q4_0", of("NVFP4", "peer"))
}

/// The same on processors.
fn processor(recorded: &Value) -> String {
    const WHAT: [&str; 4] =
        ["qwen3-4b decode", "qwen3-4b prefill", "qwen3-0.6b decode", "qwen3-0.6b prefill"];
    let of =
        |kind: &str, field: &str| WHAT.map(|w| cell(recorded, &format!("{w} {kind}"), field)).into_iter();
    let machine = &recorded["machine"];
    let head = format!("{} threads, {}", machine["threads"].as_u64().unwrap(), name(machine));
    table(&head, &["4B decode", "4B prefill of 512", "0.6B decode", "0.6B prefill of 512"])
        + &line("q4, NVFP4", of("nvfp4 native", "q4"))
        + &line("q4, NVFP4, int8 activations", of("nvfp4 int8", "q4"))
        + &line("q4, NF4", of("nf4 native", "q4"))
        + &line("llama.cpp, Q4_0", of("nvfp4 native", "peer"))
}

/// A processor and the widest of its instructions that q4 has kernels for: vendors use a name for years.
fn name(machine: &Value) -> String {
    let has = |i: &str| machine["instructions"].as_array().unwrap().iter().any(|have| have == i);
    let sets =
        [("amx_int8", "AMX"), ("avx512_vnni", "AVX-512 VNNI"), ("avx512f", "AVX-512"), ("avx2", "AVX2")];
    let set = sets.iter().find(|(flag, _)| has(flag)).map_or("no AVX2", |(_, set)| set);
    format!("{} ({set})", machine["processor"].as_str().unwrap())
}

/// Rates of the whole model, a line per format and activations.
fn models(recorded: &Value) -> String {
    const WHAT: [&str; 7] =
        ["decode", "decode at 4096", "prefill 512", "prefill 4096", "batch 8", "batch 16", "batch 64"];
    let of =
        |kind: &str, field: &str| WHAT.map(|w| cell(recorded, &format!("{w}, {kind}"), field)).into_iter();
    let mut out = table("tokens a second", &WHAT);
    for kind in ["NVFP4 native", "NVFP4 int8", "NVFP4 nvfp4", "NF4 native"] {
        out += &line(kind, of(kind, "q4"));
    }
    out + &line("floor", of("NVFP4 native", "floor")) + &line("llama.cpp Q4_0", of("NVFP4 native", "peer"))
}

/// Microseconds of single products, and how many times faster than the fastest peer.
fn products(recorded: &Value) -> String {
    const ROWS: [&str; 6] = ["M = 1", "M = 8", "M = 16", "M = 64", "M = 512", "M = 4096"];
    let mut out = table("us (times the fastest peer's speed)", &ROWS);
    for kind in ["NVFP4", "NF4"] {
        for product in ["qkv", "o", "gate_up", "down", "lm_head"] {
            let cells = ROWS.map(|m| {
                let prefix = format!("{product} m={}, {kind}, beside ", &m["M = ".len()..]);
                let cells: Vec<_> =
                    figures(recorded).filter(|(n, _)| n.starts_with(&prefix)).map(|(_, f)| f).collect();
                let least = cells.iter().filter_map(|f| f["ratio"].as_f64()).min_by(f64::total_cmp);
                let Some((first, least)) = cells.first().zip(least) else { return String::new() };
                format!("{} ({least:.2})", number(&first["q4"]))
            });
            out += &line(&format!("{kind} {product}"), cells.into_iter());
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
    let text = filled("a <!-- h200 promises -->\nold\n<!-- /h200 --> b", "h200", Some(&recorded));
    assert_eq!(
        text,
        "a <!-- h200 promises -->\n| figure | measured | promised | kept |\n|---|---|---|---|\n\
         | first token | 1.23 s | < 3 | yes |\n<!-- /h200 --> b"
    );
    assert!(models(&recorded).contains("| NVFP4 native | 860 |  |"), "{}", models(&recorded));
    assert!(models(&recorded).contains("| floor | 1931 |"));
    assert_eq!(
        filled("x <!-- h200 models -->\n1\n<!-- /h200 -->", "h200", None),
        "x <!-- h200 models -->\n<!-- /h200 -->"
    );
}
