//! `q4 verify`: what is wrong with a model, or merely odd about it.
mod page;

use crate::args::{ModelArgs, VerifyArgs};
use crate::context::Context;
use crate::report::Outcome;
use crate::session::Session;
use q4_core::{Code, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::cpu::KvType;
use q4_model::load::ContextOptions;
use q4_model::verify::original::{Matrix, matrices};
use q4_model::verify::run::{self, Told};
use q4_model::verify::{Finding, Severity, verify};
use serde::Serialize;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    errors: usize,
    warnings: usize,
    findings: &'a [Finding],
    #[serde(skip_serializing_if = "Option::is_none")]
    run: Option<Ran>,
    /// Every matrix against the model that it was made from, if that was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    matrices: Option<&'a [Matrix]>,
}

/// What `--run` came to.
#[derive(Clone, Copy, Serialize)]
struct Ran {
    /// Nats a token over the better half of the answers; null without a tokenizer.
    loss: Option<f64>,
    /// ln of the vocabulary.
    even: f64,
    trained: bool,
    runs: usize,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &VerifyArgs) -> Result<Outcome> {
    let checkpoint = cx.open(&args.model)?;
    let original = args.original.as_ref().map(|path| cx.open(&ModelArgs::of(path))).transpose()?;
    let mut findings = verify(&checkpoint);
    let mut ran = None;
    // What cannot be loaded cannot be run.
    if args.run && findings.iter().all(|f| f.severity != Severity::Error) {
        let told = run_text(cx, &checkpoint)?;
        ran = Some(Ran { loss: told.loss, even: told.even, trained: told.trained, runs: told.runs });
        findings.extend(told.findings);
        findings.sort_by_key(|f| f.severity);
    }
    let matrices = match original.is_some() || args.html.is_some() {
        true => Some(compared(cx, &checkpoint, original.as_ref())?),
        false => None,
    };
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    if let (Some(path), Some(matrices)) = (&args.html, &matrices) {
        page::page(&checkpoint, original.as_ref(), &findings, matrices).write(path)?;
    }
    let matrices = matrices.as_deref().filter(|_| original.is_some());
    if cx.report().is_json() {
        let body =
            Body { model: checkpoint.name(), errors, warnings, findings: &findings, run: ran, matrices };
        cx.report().document("verify", &body)?;
    } else {
        let mut text = String::new();
        for f in &findings {
            let severity = match f.severity {
                Severity::Error => "error",
                Severity::Warning => "warning",
                Severity::Note => "note",
            };
            text.push_str(&format!("{severity:<8} {:<20} {}: {}\n", f.code, f.tensor, f.message));
        }
        for m in matrices.into_iter().flatten() {
            let [n, k] = m.shape;
            let order = if m.act_order { " act-order" } else { "" };
            text.push_str(&format!("{:<44} [{n}, {k}] {:<14} {}{order}\n", m.name, m.schema, decibels(m)));
        }
        if let Some(Ran { loss: Some(loss), even, runs, .. }) = ran {
            text.push_str(&format!("{runs} runs: {loss:.3} nats a token, an even choice has {even:.3}\n"));
        }
        text.push_str(&format!(
            "{}: {} tensors, {errors} errors, {warnings} warnings, {} notes\n",
            checkpoint.name(),
            checkpoint.table().len(),
            count(Severity::Note)
        ));
        cx.report().text(&text)?;
    }
    // A warning is a model that loads and is probably wrong: `q4 verify M && q4 generate M` must not go on
    // with it.
    Ok(if errors + warnings > 0 { Outcome::Found(Code::Findings) } else { Outcome::Done })
}

/// Reads every matrix once more, and the original's.
fn compared(cx: &Context, checkpoint: &Checkpoint, original: Option<&Checkpoint>) -> Result<Vec<Matrix>> {
    let bar = cx.report().bar("comparing");
    let found = matrices(checkpoint, original, &cx.threads(), &mut |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    found
}

/// How far a matrix is from the original's.
fn decibels(m: &Matrix) -> String {
    match m.sqnr_db {
        Some(db) => format!("{db:>7.2} dB"),
        None if m.same == Some(true) => "the same".to_owned(),
        None => String::new(),
    }
}

/// Loads the model, and changed ones where that can tell more.
fn run_text(cx: &Context, checkpoint: &Checkpoint) -> Result<Told> {
    let bar = cx.report().bar("running");
    let mut open = |checkpoint: &Checkpoint, rows: usize| {
        let sizes = ContextOptions {
            context: rows,
            chunk: rows,
            all_logits: true,
            kv: cx.kv(KvType::F32),
            many: None,
        };
        Session::load(cx, Session::dispatch(cx)?, checkpoint, None, sizes)?.runner()
    };
    let told = run::run(checkpoint, &mut open, &mut |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    told
}
