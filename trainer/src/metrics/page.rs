//! The page: a row of figures, a chart for each quantity that was logged, the configuration.
use super::Record;
use super::svg::{Chart, Series, Unit};
use crate::progress::clock;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use std::time::Duration;

/// Kind and field of the records a curve is drawn from, its label and its colour.
type Curve = (&'static str, &'static str, &'static str, &'static str);
/// Title, unit, logarithmic, and the curves.
type Panel = (&'static str, Unit, bool, &'static [Curve]);

/// Charts in order.
const CHARTS: [Panel; 5] = [
    (
        "Loss (logarithmic)",
        Unit::Plain,
        true,
        &[("train", "loss", "training", "#2f6fde"), ("eval", "loss", "held out", "#d9480f")],
    ),
    ("Learning rate", Unit::Plain, false, &[("train", "lr", "rate", "#2b8a3e")]),
    (
        "Gradient norm (logarithmic)",
        Unit::Plain,
        true,
        &[("train", "grad_norm", "before clipping", "#862e9c")],
    ),
    ("Tokens per second", Unit::Thousands, false, &[("train", "tokens_per_s", "speed", "#0b7285")]),
    ("Memory", Unit::Bytes, false, &[("train", "memory_bytes", "where the model is", "#c2255c")]),
];

/// The whole page; needs no other file and no network.
pub fn page(title: &str, config: &str, records: &[Record]) -> String {
    let charts: Vec<_> = CHARTS.iter().filter_map(|c| chart(c, records)).collect();
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            meta charset="utf-8";
            meta name="viewport" content="width=device-width";
            title { (title) }
            style { (PreEscaped(include_str!("page.css"))) }
            h1 { (title) }
            section.figures {
                @for (name, value) in figures(records) { div { b { (value) } span { (name) } } }
            }
            main {
                @if charts.is_empty() { p { "Nothing was logged yet." } }
                @for chart in charts { (chart) }
            }
            details { summary { "Configuration" } pre { (config) } }
        }
    };
    page.into_string() + "\n"
}

fn chart(&(title, unit, log, series): &Panel, records: &[Record]) -> Option<Markup> {
    let series: Vec<_> = series
        .iter()
        .map(|(kind, field, label, colour)| Series {
            label,
            colour,
            points: records
                .iter()
                .filter(|r| r.kind == *kind)
                .filter_map(|r| Some((r.step as f64, r.number(field)?)))
                .collect(),
        })
        .filter(|s| !s.points.is_empty())
        .collect();
    (!series.is_empty()).then(|| Chart { title, unit, log, series }.svg())
}

/// Last and best values, as `(name, value)`.
fn figures(records: &[Record]) -> Vec<(String, String)> {
    let last = |kind: &str, field: &str| {
        records.iter().rev().filter(|r| r.kind == kind).find_map(|r| r.number(field))
    };
    let mut list = Vec::new();
    if let Some(step) = records.iter().map(|r| r.step).max() {
        list.push(("steps".into(), step.to_string()));
    }
    let mut add = |name: &str, value: Option<String>| list.extend(value.map(|v| (name.to_owned(), v)));
    add("training loss", last("train", "loss").map(|x| format!("{x:.4}")));
    add("held-out loss", last("eval", "loss").map(|x| format!("{x:.4}")));
    let best =
        records.iter().filter(|r| r.kind == "eval").filter_map(|r| r.number("loss")).min_by(f64::total_cmp);
    add("best held-out loss", best.map(|x| format!("{x:.4}")));
    let wall = records.iter().filter_map(|r| r.number("wall_s")).max_by(f64::total_cmp);
    add("of training", wall.map(|s| clock(Duration::from_secs_f64(s.max(0.0)))));
    add("tokens", last("train", "tokens").map(|x| Unit::Thousands.show(x)));
    add("tokens per second", last("train", "tokens_per_s").map(|x| Unit::Thousands.show(x)));
    let skipped = last("train", "skipped").filter(|n| *n > 0.0);
    add("steps skipped", skipped.map(|n| format!("{n:.0}")));
    list
}
