//! `q4 compare`: how far the predictions of two models lie apart.
use crate::args::CompareArgs;
use crate::context::Context;
use crate::input;
use crate::report::Outcome;
use crate::session::{Facts, Session};
use crate::windows::Windows;
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::likelihood::{Comparison, Summary};
use q4_model::runner::Runner;
use serde::Serialize;

/// The document of `--json`.
#[derive(Serialize)]
struct Body<'a> {
    kl_mean: f64,
    kl_p99: f64,
    kl_max: f64,
    top1_agreement: f64,
    /// Mean of -ln p over the predicted tokens, as `q4 eval` has it.
    loss_a: f64,
    loss_b: f64,
    /// exp(loss); null where no f64 is that large.
    ppl_a: f64,
    ppl_b: f64,
    /// Tokens that were predicted.
    tokens: usize,
    window: usize,
    findings: Vec<Finding>,
    a: Side<'a>,
    b: Side<'a>,
}

/// One model and how it was computed.
#[derive(Serialize)]
struct Side<'a> {
    model: &'a str,
    /// Named by `--against`.
    #[serde(skip_serializing_if = "Option::is_none")]
    backend: Option<&'a str>,
    #[serde(flatten)]
    facts: Facts,
}

/// A bound that is exceeded.
#[derive(Serialize)]
struct Finding {
    what: &'static str,
    need: f64,
    have: f64,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &CompareArgs) -> Result<Outcome> {
    let other = args.against.as_deref().map(|name| cx.against(name, args.against_device)).transpose()?;
    let cx_a = other.as_ref().unwrap_or(cx);
    let dispatches = [Session::dispatch(cx_a)?, Session::dispatch(cx)?];
    let text = input::data(&args.data)?;
    let [a, b] = args.models();
    let (a, b) = (cx.open(&a)?, cx.open(&b)?);
    let windows = windows_of(&text, args, &a, &b)?;
    let [dispatch_a, dispatch_b] = dispatches;
    let sizes = windows.sizes(cx);
    let planned_a = Session::plan(cx_a, dispatch_a, &a, None, sizes.chunk, sizes)?;
    let planned_b = Session::plan(cx, dispatch_b, &b, args.quantize, sizes.chunk, sizes)?;
    let [session_a, session_b] = planned_a.load_beside(planned_b)?;
    let (mut runner_a, mut runner_b) = (session_a.runner()?, session_b.runner()?);
    let summary = compare(cx, &windows, &mut runner_a, &mut runner_b)?;

    let findings = findings(&summary, args);
    let outcome = if findings.is_empty() { Outcome::Done } else { Outcome::Found(Code::Findings) };
    let (facts_a, facts_b) = (session_a.facts(), session_b.facts());
    if cx.report().is_json() {
        let body = Body {
            kl_mean: summary.kl_mean,
            kl_p99: summary.kl_p99,
            kl_max: summary.kl_max,
            top1_agreement: summary.top1_agreement,
            loss_a: summary.a.mean(),
            loss_b: summary.b.mean(),
            ppl_a: summary.a.perplexity(),
            ppl_b: summary.b.perplexity(),
            tokens: summary.a.tokens(),
            window: windows.window(),
            findings,
            a: Side { model: a.name(), backend: args.against.as_deref(), facts: facts_a },
            b: Side { model: b.name(), backend: None, facts: facts_b },
        };
        cx.report().document("compare", &body)?;
    } else {
        cx.report().text(&lines(&summary, &findings))?;
        facts_a.detail(cx.report());
        facts_b.detail(cx.report());
    }
    Ok(outcome)
}

/// The text as both models read it. [`Code::Usage`] for models whose logits cannot be compared.
fn windows_of(text: &str, args: &CompareArgs, a: &Checkpoint, b: &Checkpoint) -> Result<Windows> {
    let (config_a, config_b) = (a.config(), b.config());
    if config_a.vocab_size != config_b.vocab_size {
        return Err(Error::new(
            Code::Usage,
            format!("{} and {}: different vocabularies", a.name(), b.name()),
        )
        .need(format!("{} tokens, as {} has", config_a.vocab_size, a.name()))
        .have(format!("{} tokens in {}", config_b.vocab_size, b.name())));
    }
    let context = config_a.max_position_embeddings.min(config_b.max_position_embeddings);
    let windows = Windows::new(&args.data, text, &args.cut, a, context)?;
    let other = Windows::new(&args.data, text, &args.cut, b, context)?;
    if windows.ids() != other.ids() {
        let same = windows.ids().iter().zip(other.ids()).take_while(|(a, b)| a == b).count();
        let token = |ids: &[u32]| ids.get(same).map_or("the end".to_owned(), |id| format!("id {id}"));
        return Err(Error::new(
            Code::Usage,
            format!("{} and {}: different tokens for the text", a.name(), b.name()),
        )
        .need(format!("{} as token {same}, as {} has", token(windows.ids()), a.name()))
        .have(format!("{} in {}", token(other.ids()), b.name())));
    }
    Ok(windows)
}

/// Step by step through both, so that no more logits exist than those of one step.
fn compare(cx: &Context, windows: &Windows, a: &mut Runner, b: &mut Runner) -> Result<Summary> {
    let mut comparison = Comparison::default();
    let bar = cx.report().bar("comparing");
    bar.set_length(windows.predicted() as u64);
    for step in windows.steps() {
        if step.is_first {
            a.truncate(0);
            b.truncate(0);
        }
        let mut outcome = Ok(());
        a.accept_all(step.ids, &mut |rows_a| {
            outcome = b.accept_all(step.ids, &mut |rows_b| comparison.add(rows_a, rows_b, step.next));
        })?;
        outcome?;
        bar.inc(step.next.len() as u64);
    }
    bar.finish_and_clear();
    comparison.summary().ok_or_else(|| Error::new(Code::Internal, "a text without a token"))
}

fn findings(summary: &Summary, args: &CompareArgs) -> Vec<Finding> {
    let kl = args.max_kl_mean.filter(|need| summary.kl_mean > *need);
    let top1 = args.min_top1.filter(|need| summary.top1_agreement < *need);
    let kl = kl.map(|need| Finding { what: "kl_mean", need, have: summary.kl_mean });
    let top1 = top1.map(|need| Finding { what: "top1_agreement", need, have: summary.top1_agreement });
    kl.into_iter().chain(top1).collect()
}

fn lines(summary: &Summary, findings: &[Finding]) -> String {
    let mut text = format!(
        "KL mean          {:.6}\nKL p99           {:.6}\nKL max           {:.6}\ntop-1 agreement  {:.4}\n\
         loss A           {:.4}\nloss B           {:.4}\nperplexity A     {:.4}\nperplexity B     {:.4}\n\
         tokens           {}\n",
        summary.kl_mean,
        summary.kl_p99,
        summary.kl_max,
        summary.top1_agreement,
        summary.a.mean(),
        summary.b.mean(),
        summary.a.perplexity(),
        summary.b.perplexity(),
        summary.a.tokens()
    );
    for f in findings {
        let bound = if f.what == "kl_mean" { "at most" } else { "at least" };
        text.push_str(&format!("finding: {}: need {bound} {}; have {}\n", f.what, f.need, f.have));
    }
    text
}
