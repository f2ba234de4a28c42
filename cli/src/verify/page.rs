//! What was verified, as a page: findings, the format of every matrix, and how far each is from the original.
use super::decibels;
use crate::page::{Chart, Grid, Module, Mood, Page, Point, Series, beside, place, table};
use maud::html;
use q4_core::memory::human;
use q4_model::checkpoint::Checkpoint;
use q4_model::verify::original::Matrix;
use q4_model::verify::{Finding, Severity};

/// The page before it is written.
pub fn page<'a>(
    checkpoint: &'a Checkpoint,
    original: Option<&Checkpoint>,
    findings: &[Finding],
    matrices: &[Matrix],
) -> Page<'a> {
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let [errors, warnings, notes] = [Severity::Error, Severity::Warning, Severity::Note].map(count);
    let mood = match (errors, warnings) {
        (0, 0) => Mood::Good,
        (0, _) => Mood::Odd,
        _ => Mood::Bad,
    };
    let bytes: u64 = checkpoint.store().files().map(|(_, bytes)| bytes as u64).sum();
    let mut facts = vec![
        ("tensors", checkpoint.table().len().to_string()),
        ("weight files", human(bytes)),
        ("family", checkpoint.config().arch.class.to_owned()),
        ("layers", checkpoint.config().num_hidden_layers.to_string()),
        ("declared", format!("{:?}", checkpoint.declaration().method)),
    ];
    facts.extend(original.map(|original| ("original", original.name().to_owned())));
    let rows = findings.iter().map(|f| {
        vec![severity(f.severity).to_owned(), f.code.to_owned(), f.tensor.clone(), f.message.clone()]
    });
    let found = match findings.is_empty() {
        true => html! {},
        false => table(&["severity", "finding", "where", "what"], &[], rows),
    };
    let mut sections = vec![(
        "Findings",
        if findings.is_empty() { "Nothing was found.".to_owned() } else { String::new() },
        found,
    )];
    let says = |m: &Matrix| {
        format!("{} [{}, {}] {} {}", m.name, m.shape[0], m.shape[1], m.schema.trim(), decibels(m))
    };
    let things = matrices.iter().map(|m| {
        let (layer, row) = place(checkpoint, &m.name);
        Module { layer, name: row, kind: m.schema.trim().to_owned(), says: says(m) }
    });
    let grid = Grid::of_layers("Format of each matrix, by layer", things);
    let numbers = matrices.iter().map(|m| {
        let shape = format!("[{}, {}]", m.shape[0], m.shape[1]);
        let bits = format!("{:.2}", m.bits);
        let order = if m.act_order { ", act-order" } else { "" };
        vec![m.name.clone(), m.schema.trim().to_owned(), bits, shape, format!("{}{order}", m.layout)]
    });
    sections.push((
        "Formats",
        "Every linear layer and a head of its own; bits are those that a weight takes, scales and all."
            .to_owned(),
        beside(&grid.svg(), &table(&["matrix", "format", "bits", "[out, in]", "layout"], &[2, 3], numbers)),
    ));
    if original.is_some() {
        let numbers = matrices.iter().map(|m| vec![m.name.clone(), decibels(m).trim().to_owned()]);
        sections.push((
            "Distance from the original",
            "The signal-to-noise ratio of the decoded weights: 6 dB more is half the error. NVFP4 of usual \
             weights has 19 to 21 dB. What is the same as in the original has no mark."
                .to_owned(),
            beside(&distances(checkpoint, matrices).svg(), &table(&["matrix", "SQNR"], &[1], numbers)),
        ));
    }
    let s = |n: usize| if n == 1 { "" } else { "s" };
    let verdict =
        format!("{errors} error{}, {warnings} warning{}, {notes} note{}", s(errors), s(warnings), s(notes));
    Page { verb: "verify", subject: checkpoint.name(), verdict: (mood, verdict), facts, sections }
}

fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
        Severity::Note => "note",
    }
}

/// A mark for each matrix of each layer; what has no layer stands behind them.
fn distances(checkpoint: &Checkpoint, matrices: &[Matrix]) -> Chart {
    let layers = checkpoint.config().num_hidden_layers;
    let mut series: Vec<Series> = Vec::new();
    let mut ticks: Vec<_> = (0..layers).map(|i| i.to_string()).collect();
    for m in matrices {
        let (layer, name) = place(checkpoint, &m.name);
        if layer.is_none() {
            ticks.push(name.clone());
        }
        let at = layer.unwrap_or(ticks.len() - 1);
        let point =
            m.sqnr_db.map(|value| Point { at, value, says: format!("{} {}", m.name, decibels(m).trim()) });
        match series.iter_mut().find(|s| s.name == name) {
            Some(s) => s.points.extend(point),
            None => series.push(Series { name, points: point.into_iter().collect() }),
        }
    }
    Chart {
        title: "SQNR by layer".into(),
        across: "layer".into(),
        up: "dB, up is better".into(),
        ticks,
        log: false,
        limit: None,
        series,
    }
}
