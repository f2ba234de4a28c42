//! `q4 explain`: the plan of a model, layer by layer, with everybody who was refused and why.
mod page;

use crate::args::ExplainArgs;
use crate::context::Context;
use crate::report::{Outcome, stderr};
use crate::session::{chunk, warn_of_unscaled};
use q4_core::{Code, Error, ExecPath, RejectCode, Rejection, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::plan::{HeadPlan, Plan, Product};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    /// The best instruction set that kernels of the CPU may use; null where a device computes.
    isa: Option<&'static str>,
    layers: Vec<Layer>,
    head: Head,
    downgraded: usize,
    /// Why the plan cannot run, in the form of an error document; null when it can.
    refused: Option<&'a Error>,
}

#[derive(Serialize)]
struct Layer {
    name: String,
    schema: String,
    layout: &'static str,
    n: usize,
    k: usize,
    activations: &'static str,
    /// They are neither declared nor asked for.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    usual_activations: bool,
    chosen: Option<Chosen>,
    downgraded: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    quantized_on_load: bool,
    /// Its inputs are put into the order of its groups first.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    act_order: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    rejected: Vec<Rejection>,
}

#[derive(Serialize)]
struct Chosen {
    backend: String,
    path: ExecPath,
    activations: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
enum Head {
    Tied { dtype: String },
    Dense { dtype: String },
    Product,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &ExplainArgs) -> Result<Outcome> {
    let checkpoint = cx.open(&args.model)?;
    let dispatch = cx.dispatch()?;
    let plan = Plan::new(&checkpoint, &dispatch, &cx.plan_options(args.quantize, chunk(cx.device()?))?)?;
    warn_of_unscaled(&plan, cx.report());
    let refused = cx.require_named(&dispatch).and_then(|()| plan.require(&dispatch)).err();
    let body = body(cx, &checkpoint, &plan, refused.as_ref());
    if let Some(path) = &args.html {
        page::page(&checkpoint, &body).write(path)?;
    }
    cx.report().result("explain", &body, || table(&checkpoint, &plan, cx.isa()))?;
    Ok(refused.map_or(Outcome::Done, |e| failed(&e)))
}

/// The document of a plan that can run.
pub fn document(cx: &Context, checkpoint: &Checkpoint, plan: &Plan) -> Result<Value> {
    serde_json::to_value(body(cx, checkpoint, plan, None))
        .map_err(|e| Error::new(Code::Internal, format!("the plan: {e}")))
}

fn body<'a>(cx: &Context, checkpoint: &'a Checkpoint, plan: &Plan, refused: Option<&'a Error>) -> Body<'a> {
    Body {
        model: checkpoint.name(),
        isa: cx.isa(),
        layers: plan.products().map(layer).collect(),
        head: head(&plan.head),
        downgraded: plan.downgraded(),
        refused,
    }
}

/// The plan was the result, so the error goes to stderr only.
fn failed(e: &Error) -> Outcome {
    stderr(&format!("{e}\n"));
    Outcome::Found(e.code())
}

fn layer(p: &Product) -> Layer {
    let spec = &p.spec;
    let chosen = p.choice.as_ref().ok().map(|c| Chosen {
        backend: c.backend.descriptor().name.to_string(),
        path: c.path,
        activations: spec.activations.as_str(),
    });
    Layer {
        name: spec.name(),
        schema: spec.schema.to_string(),
        layout: p.layout,
        n: spec.n(),
        k: spec.k,
        activations: spec.activations.as_str(),
        usual_activations: p.usual_inputs,
        chosen,
        downgraded: p.choice.as_ref().is_ok_and(|c| c.is_downgrade),
        quantized_on_load: p.quantized_on_load,
        act_order: p.order.is_some(),
        error: p.choice.as_ref().err().map(|e| e.to_string().lines().next().unwrap_or_default().to_owned()),
        rejected: rejected(p).to_vec(),
    }
}

fn rejected(p: &Product) -> &[Rejection] {
    match &p.choice {
        Ok(c) => &c.rejected,
        Err(e) => e.rejected(),
    }
}

fn head(plan: &HeadPlan) -> Head {
    match plan {
        HeadPlan::Dense { dtype, tied: true } => Head::Tied { dtype: dtype.to_string() },
        HeadPlan::Dense { dtype, tied: false } => Head::Dense { dtype: dtype.to_string() },
        HeadPlan::Product(_) => Head::Product,
    }
}

/// How many products are of codes of 4 bits, and of others: `28 of them 4-bit, 4 6-bit`.
fn widths(plan: &Plan) -> String {
    let mut counts = BTreeMap::from([(4, 0usize)]);
    for p in plan.products().filter(|p| p.spec.schema.is_packed()) {
        *counts.entry(p.spec.schema.code_bits()).or_default() += 1;
    }
    let first = format!("{} of them 4-bit", counts[&4]);
    let others =
        counts.into_iter().filter(|(bits, _)| *bits != 4).map(|(bits, n)| format!(", {n} {bits}-bit"));
    [first].into_iter().chain(others).collect()
}

/// Products that differ in nothing but their layer, as one entry.
struct Group {
    layers: Vec<usize>,
    lines: String,
}

fn table(checkpoint: &Checkpoint, plan: &Plan, isa: Option<&str>) -> String {
    let all = plan.products().count();
    let widths = widths(plan);
    let matrices: usize = plan.products().map(|p| p.spec.segments.len()).sum();
    let isa = isa.map_or_else(String::new, |isa| format!("; instruction set {isa}"));
    let mut text = format!(
        "{}: {matrices} matrices in {all} products, {widths}, {} downgraded{isa}\n",
        checkpoint.name(),
        plan.downgraded()
    );
    let names = &checkpoint.config().arch.names;
    let mut groups: Vec<Group> = Vec::new();
    for p in plan.products() {
        let name = p.spec.name();
        let layer = names.layer_of(&name);
        let short = layer.and_then(|i| name.strip_prefix(&names.of(i, "")).map(str::to_owned));
        let lines = describe(p, &short.unwrap_or(name));
        match groups.iter_mut().find(|g| g.lines == lines) {
            Some(g) => g.layers.extend(layer),
            None => groups.push(Group { layers: layer.into_iter().collect(), lines }),
        }
    }
    for g in groups {
        let place =
            if g.layers.is_empty() { String::new() } else { format!("layers {} ", ranges(&g.layers)) };
        text.push_str(&place);
        text.push_str(&g.lines);
    }
    match &plan.head {
        HeadPlan::Dense { dtype, tied: true } => {
            text.push_str(&format!("lm_head: the embedding table, {dtype}; no 4-bit product\n"));
        }
        HeadPlan::Dense { dtype, tied: false } => {
            text.push_str(&format!("lm_head: dense, {dtype}; no 4-bit product\n"));
        }
        HeadPlan::Product(_) => {}
    }
    if plan.products().any(|p| p.usual_inputs) {
        text.push_str(
            "int8 inputs are usual for GGUF files on CPUs: llama.cpp rounds them too, in larger groups;\n",
        );
        text.push_str("--activations native leaves them as they are\n");
    }
    text
}

fn describe(p: &Product, name: &str) -> String {
    let spec = &p.spec;
    let origin = if p.quantized_on_load { ", quantised while loading" } else { "" };
    let order = if p.order.is_some() { ", act-order: inputs are permuted" } else { "" };
    let mut text = format!(
        "{name}  {} [{}, {}] {}{origin}{order}, {} activations\n",
        spec.schema,
        spec.n(),
        spec.k,
        p.layout,
        spec.activations
    );
    match &p.choice {
        Ok(c) => {
            let mark = if c.is_downgrade { " (a downgrade)" } else { "" };
            text.push_str(&format!("  chosen   {:<14} {}{mark}\n", c.backend.descriptor().name, c.path));
        }
        Err(e) => {
            let what = e.to_string();
            let what = what.lines().next().unwrap_or_default();
            // The subject is the first of many layers; this entry stands for all of them.
            let what = what.strip_prefix(&format!("{}: ", spec.name())).unwrap_or(what);
            text.push_str(&format!("  nobody   {what}\n"));
        }
    }
    for r in rejected(p) {
        let path = r.path.map_or("-", ExecPath::as_str);
        for reason in &r.reasons {
            // Nothing is wrong with one that another was preferred to.
            let label = if reason.code == RejectCode::NotSelected { "not used" } else { "refused " };
            text.push_str(&format!("  {label} {:<14} {path:<14} {reason}\n", r.backend));
        }
    }
    text
}

/// `0..5,7`: both ends included.
fn ranges(layers: &[usize]) -> String {
    let mut out: Vec<(usize, usize)> = Vec::new();
    for &i in layers {
        match out.last_mut() {
            Some((_, end)) if *end == i || *end + 1 == i => *end = i,
            _ => out.push((i, i)),
        }
    }
    let show = |&(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}..{b}") };
    out.iter().map(show).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_written_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 3]), "0..3");
        assert_eq!(ranges(&[0, 2, 3, 7]), "0,2..3,7");
        assert_eq!(ranges(&[4, 4, 5]), "4..5");
    }
}
