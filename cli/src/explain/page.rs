//! The plan of a model, as a page: who computes each product, and who was refused and why.
use super::{Body, Head, Layer};
use crate::page::{Grid, Module, Mood, Page, beside, place, said, table};
use maud::{Markup, html};
use q4_model::checkpoint::Checkpoint;

/// The page before it is written.
pub fn page<'a>(checkpoint: &'a Checkpoint, body: &Body<'_>) -> Page<'a> {
    let verdict = match (body.refused, body.downgraded) {
        (Some(e), _) => (Mood::Bad, e.to_string()),
        (None, 0) => (Mood::Good, "every product has a backend".to_owned()),
        (None, n) => {
            (Mood::Odd, format!("every product has a backend, {n} of them a lesser one than asked for"))
        }
    };
    let head = match &body.head {
        Head::Tied { dtype } => format!("the embedding, {dtype}"),
        Head::Dense { dtype } => format!("dense, {dtype}"),
        Head::Product => "a product".to_owned(),
    };
    let mut facts = vec![("products", body.layers.len().to_string()), ("head", head)];
    facts.extend(body.isa.map(|isa| ("instruction set", isa.to_owned())));
    let things = |kind: fn(&Layer) -> String| {
        body.layers.iter().map(move |l| {
            let (layer, row) = place(checkpoint, &l.name);
            let says = format!("{} {}: {}", l.name, l.schema.trim(), who(l));
            Module { layer, name: row, kind: kind(l), says }
        })
    };
    let who_computes = Grid::of_layers("Who computes each product, by layer", things(who));
    let formats = Grid::of_layers("What is stored, by layer", things(stored));
    let rows = body.layers.iter().map(|l| {
        let shape = format!("[{}, {}]", l.n, l.k);
        vec![l.name.clone(), who(l), stored(l), l.activations.to_owned(), shape, l.layout.to_owned()]
    });
    let head = ["product", "computed by", "format", "inputs", "[out, in]", "layout"];
    let pictures = html! { div.stack { (who_computes.svg()) (formats.svg()) } };
    let sections = vec![
        ("Plan", String::new(), beside(&pictures, &table(&head, &[4], rows))),
        (
            "Who was refused, and why",
            "Products with the same reasons stand together.".to_owned(),
            refusals(body),
        ),
    ];
    Page { verb: "explain", subject: checkpoint.name(), verdict, facts, sections }
}

fn who(l: &Layer) -> String {
    match &l.chosen {
        Some(c) => format!("{} {}{}", c.backend, c.path, if l.downgraded { ", a downgrade" } else { "" }),
        None => "nobody".to_owned(),
    }
}

fn stored(l: &Layer) -> String {
    let origin = if l.quantized_on_load { ", quantised while loading" } else { "" };
    let order = if l.act_order { ", act-order" } else { "" };
    format!("{}{origin}{order}", l.schema.trim())
}

fn refusals(body: &Body<'_>) -> Markup {
    let mut groups: Vec<(Vec<String>, Vec<&Layer>)> = Vec::new();
    for l in &body.layers {
        let reason = |r: &q4_core::Rejection| {
            let path = r.path.map_or("-", q4_core::ExecPath::as_str);
            r.reasons.iter().map(move |why| format!("{} {path}: {why}", r.backend)).collect::<Vec<_>>()
        };
        let own: Vec<_> = l.error.iter().cloned().chain(l.rejected.iter().flat_map(reason)).collect();
        match groups.iter_mut().find(|g| g.0 == own) {
            Some(group) => group.1.push(l),
            None => groups.push((own, vec![l])),
        }
    }
    html! { @for (reasons, layers) in groups.iter().filter(|g| !g.0.is_empty()) {
        details {
            summary { (layers.len()) " products: " (said(&layers[0].name)) @if layers.len() > 1 { ", …" } }
            pre { @for reason in reasons { (said(reason)) "\n" } }
            pre { @for layer in layers { (said(&layer.name)) "\n" } }
        }
    } }
}
