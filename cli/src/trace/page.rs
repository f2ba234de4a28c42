//! Two runs side by side, as a page: how far they are apart behind each call.
use super::Body;
use crate::page::{Chart, Mood, Page, Point, Series, beside, place, table};
use q4_model::checkpoint::Checkpoint;

/// The page before it is written.
pub fn page<'a>(checkpoint: &'a Checkpoint, body: &Body<'_>) -> Page<'a> {
    let verdict = match body.first_divergence {
        Some(l) => {
            (Mood::Bad, format!("first to differ: {}, by {:.1e} of its largest value", l.full_name(), l.rel))
        }
        None => {
            (Mood::Good, format!("no call differs by more than {:.1e} of its largest value", body.tolerance))
        }
    };
    let backends = |all: &[q4_core::Executed]| {
        let mut names: Vec<_> = all.iter().map(|e| e.backend.to_string()).collect();
        names.sort();
        names.dedup();
        names.join(", ")
    };
    let mut facts = vec![
        ("this run", backends(&body.facts.executed)),
        ("compared with", format!("{} ({})", body.against, backends(&body.executed_against))),
        ("tokens", format!("{} of the prompt, {} decoded behind it", body.tokens, body.decoded)),
        ("tolerance", format!("{:.1e}", body.tolerance)),
        (
            "values",
            if body.drift { "each run goes on with its own" } else { "each call starts from the same" }
                .to_owned(),
        ),
    ];
    if let Some(codes) = body.input_codes {
        facts.push(("4-bit inputs", format!("{} of {} codes differ", codes.differ, codes.compared)));
    }
    let rows = body.layers.iter().map(|l| {
        let mark = if l.diverges(body.tolerance) { "differs" } else { "" };
        let numbers = [
            format!("{:.1e}", l.rel),
            format!("{:.7}", l.cos),
            format!("{:.4}", l.ref_max),
            format!("{:.4}", l.got_max),
        ];
        [l.full_name(), mark.to_owned()].into_iter().chain(numbers).collect()
    });
    let numbers = table(&["call", "", "rel", "cos", "ref max", "got max"], &[2, 3, 4, 5], rows);
    let lead = "The largest difference of a call's outputs, over the largest of the run to compare with: \
                the worst step's. Equal outputs lie at the bottom, what is not finite at the top.";
    let sections = vec![("Call by call", lead.to_owned(), beside(&chart(checkpoint, body).svg(), &numbers))];
    Page { verb: "trace", subject: checkpoint.name(), verdict, facts, sections }
}

/// A mark for each call, a series for each kind of call.
fn chart(checkpoint: &Checkpoint, body: &Body<'_>) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    let (mut ticks, mut last) = (Vec::new(), None);
    for (at, l) in body.layers.iter().enumerate() {
        let name = l.call.to_owned();
        // The first call of a layer has its number.
        let layer = place(checkpoint, &l.full_name()).0;
        let first = layer.filter(|_| layer != last);
        ticks.push(first.map_or(String::new(), |layer| layer.to_string()));
        last = layer;
        let point = Point { at, value: l.rel, says: format!("{}: {:.1e}", l.full_name(), l.rel) };
        match series.iter_mut().find(|s| s.name == name) {
            Some(s) => s.points.push(point),
            None => series.push(Series { name, points: vec![point] }),
        }
    }
    Chart {
        title: "Largest difference behind each call".into(),
        across: "layer, calls in their order".into(),
        up: "share of the largest value".into(),
        ticks,
        log: true,
        limit: Some((body.tolerance, "tolerance".into())),
        series,
    }
}
