//! `q4 trace`: two runs of one prompt side by side, and the first call where they part.
//!
//! Both are planned as an answer is, so that a call has as many rows of as many as it has in `q4 generate`:
//! the prompt, then a few tokens one at a time.
mod codes;
mod page;

use crate::args::TraceArgs;
use crate::context::Context;
use crate::generate;
use crate::input;
use crate::report::Outcome;
use crate::session::{Facts, Planned, Session, chunk};
use crate::text::{Text, context_size};
use codes::{Codes, Flips};
use q4_core::{Code, DType, Device, Dispatch, Error, Executed, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::cpu::KvType;
use q4_model::load::ContextOptions;
use q4_model::runner::Runner;
use q4_model::watch::{Each, Site, Written};
use serde::Serialize;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

/// Tokens that are decoded behind the prompt, greedily by the run to compare with.
const DECODED: usize = 4;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    against: &'a str,
    tokens: usize,
    /// Tokens behind the prompt, a step each.
    decoded: usize,
    tolerance: f64,
    drift: bool,
    first_divergence: Option<&'a Line>,
    layers: &'a [Line],
    /// 4-bit input codes that differ; null where no product has such inputs.
    input_codes: Option<&'a Flips>,
    executed_against: Vec<Executed>,
    #[serde(flatten)]
    facts: Facts,
}

/// How far the two runs are apart behind one call, the worst over all steps.
#[derive(Debug, Serialize)]
struct Line {
    name: String,
    call: &'static str,
    /// Largest magnitude of the run to compare with.
    ref_max: f32,
    /// Largest magnitude of the other.
    got_max: f32,
    /// Largest difference over `ref_max`. In JSON null where it is not finite, as all four are.
    rel: f64,
    /// Cosine of the angle between the two.
    cos: f64,
}

/// A value of the first run.
struct Kept {
    site: Site,
    values: Vec<f32>,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &TraceArgs) -> Result<Outcome> {
    let other = cx.against(&args.against, args.against_device)?;
    // Both first of all: a backend that was named and cannot be used stops the program before anything is
    // computed.
    let dispatch = Session::dispatch(cx)?;
    let other_dispatch = Session::dispatch(&other)?;
    let checkpoint = cx.open(&args.model)?;
    let ids = ids(args, &checkpoint)?;
    let dtype = cx.plan_options(args.quantize, 1)?.dtype;
    let tolerance = args.tolerance.unwrap_or(if dtype == DType::F32 { 1e-3 } else { 2e-2 });

    // Norms are shown on the CPU only.
    let norms = cx.device()? == Device::Cpu && other.device()? == Device::Cpu;
    let codes = match norms {
        true => Codes::of(&checkpoint, &dispatch, &cx.plan_options(args.quantize, 1)?)?,
        false => None,
    };

    let (send, kept) = channel();
    let keep = || -> Each {
        let send = send.clone();
        Box::new(move |w| {
            if norms || !w.site.is_norm() {
                // The receiver outlives the run.
                let _ = send.send(Kept { site: w.site, values: w.values.to_vec() });
            }
            Ok(())
        })
    };
    let context = context_size(None, ids.len() + DECODED, &checkpoint)?;
    let decoded = DECODED.min(context.saturating_sub(ids.len()));
    // One after the other is loaded, and neither where the other does not fit.
    let planned = plan(cx, dispatch, &checkpoint, args, &ids, context)?;
    planned.check()?;
    let session = plan(&other, other_dispatch, &checkpoint, args, &ids, context)?.load()?;
    let mut runner = session.runner()?;
    runner.accept_watched(&ids, keep())?;
    let mut chosen = Vec::new();
    for _ in 0..decoded {
        let id = last(&mut runner, &checkpoint)?;
        chosen.push(id);
        runner.accept_watched(&[id], keep())?;
    }
    drop((runner, send));
    let executed_against = session.facts().executed;
    drop(session);

    let kept = Arc::new(Mutex::new(kept.into_iter()));
    let codes = codes.map(|codes| Arc::new(Mutex::new(codes)));
    let (send, seen) = channel();
    let drift = args.drift;
    let compare = || -> Each {
        let (kept, codes, send) = (kept.clone(), codes.clone(), send.clone());
        Box::new(move |w: Written<'_>| {
            if w.site.is_norm() && !norms {
                return Ok(());
            }
            let next = kept.lock().unwrap_or_else(|e| e.into_inner()).next();
            let Some(reference) = next.filter(|k| k.site == w.site && k.values.len() == w.values.len())
            else {
                return Err(Error::new(
                    Code::Internal,
                    format!("{}: the two runs do not correspond", w.site),
                ));
            };
            if let Some(codes) = &codes {
                let mut codes = codes.lock().unwrap_or_else(|e| e.into_inner());
                codes.compare(w.site, w.rows, &reference.values, w.values)?;
            }
            if !w.site.is_norm() {
                let _ = send.send((w.site, Line::of(w.site, &reference.values, w.values)));
                if !drift {
                    w.values.copy_from_slice(&reference.values);
                }
            }
            Ok(())
        })
    };
    let session = planned.load()?;
    let mut runner = session.runner()?;
    runner.accept_watched(&ids, compare())?;
    for id in chosen {
        runner.accept_watched(&[id], compare())?;
    }
    drop((runner, send));
    let flips = codes.map(|codes| codes.lock().unwrap_or_else(|e| e.into_inner()).flips());

    let mut lines: Vec<(Site, Line)> = Vec::new();
    for (site, line) in seen {
        match lines.iter_mut().find(|(s, _)| *s == site) {
            Some((_, worst)) => worst.widen(&line),
            None => lines.push((site, line)),
        }
    }
    let lines: Vec<Line> = lines.into_iter().map(|(_, line)| line).collect();
    let first = lines.iter().find(|line| line.diverges(tolerance));
    let body = Body {
        model: checkpoint.name(),
        against: &args.against,
        tokens: ids.len(),
        decoded,
        tolerance,
        drift,
        first_divergence: first,
        layers: &lines,
        input_codes: flips.as_ref(),
        executed_against,
        facts: session.facts(),
    };
    if let Some(path) = &args.html {
        page::page(&checkpoint, &body).write(path)?;
    }
    if cx.report().is_json() {
        cx.report().document("trace", &body)?;
    } else {
        cx.report().text(&table(&lines, first, tolerance, &args.against))?;
        if let Some(flips) = flips.as_ref().filter(|f| f.differ > 0) {
            cx.report().text(&flips.text(&args.against))?;
        }
    }
    Ok(if first.is_some() { Outcome::Found(Code::Findings) } else { Outcome::Done })
}

fn ids(args: &TraceArgs, checkpoint: &Checkpoint) -> Result<Vec<u32>> {
    if !args.ids.is_empty() {
        return Ok(args.ids.clone());
    }
    let text = Text::of(checkpoint)?;
    let prompt = input::prompt(args.prompt.as_deref(), "trace --against NAME")?;
    let ids = generate::prompt_ids(&prompt, args.raw, None, checkpoint, &text)?;
    if ids.is_empty() {
        return Err(Error::new(Code::Usage, "an empty prompt").need("at least one token"));
    }
    Ok(ids)
}

/// Rows of a step, the same for both runs, whatever their devices take.
fn rows(ids: &[u32]) -> usize {
    ids.len().min(chunk(Device::Cpu))
}

/// Planned as `q4 generate` plans a context of this size, and keeping the logits of all rows and all values
/// of the run to compare with.
fn plan<'a>(
    cx: &'a Context,
    dispatch: Dispatch,
    checkpoint: &'a Checkpoint,
    args: &TraceArgs,
    ids: &[u32],
    context: usize,
) -> Result<Planned<'a>> {
    let c = checkpoint.config();
    let (q, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let layer = 4 * c.hidden_size + 2 * q + 2 * kv + c.intermediate_size;
    let widths = c.hidden_size + c.vocab_size + c.num_hidden_layers * layer;
    let kept = ((ids.len() + DECODED) * widths * 4) as u64;
    let sizes =
        ContextOptions { context, chunk: rows(ids), all_logits: true, kv: cx.kv(KvType::F32), many: None };
    let max_rows = chunk(cx.device()?).min(context);
    Ok(Session::plan(cx, dispatch, checkpoint, args.quantize, max_rows, sizes)?.with("values", kept))
}

/// The most likely token behind all that was accepted.
fn last(runner: &mut Runner, checkpoint: &Checkpoint) -> Result<u32> {
    let vocab = checkpoint.config().vocab_size;
    let logits = runner.logits()?;
    let row = &logits[logits.len() - vocab..];
    let best = (0..vocab).reduce(|best, i| if row[i] > row[best] { i } else { best });
    Ok(best.unwrap_or(0) as u32)
}

impl Line {
    fn of(site: Site, reference: &[f32], got: &[f32]) -> Self {
        let largest = |v: &[f32]| v.iter().fold(0f32, |m, v| worse(m, v.abs()));
        let (mut apart, mut dot, mut ref_square, mut got_square) = (0f64, 0.0, 0.0, 0.0);
        for (r, g) in reference.iter().zip(got) {
            let (r, g) = (f64::from(*r), f64::from(*g));
            let difference = (g - r).abs();
            apart = worse(apart, difference);
            dot += r * g;
            ref_square += r * r;
            got_square += g * g;
        }
        let (ref_max, got_max) = (largest(reference), largest(got));
        let rel = if apart == 0.0 { 0.0 } else { apart / f64::from(ref_max) };
        let lengths = f64::sqrt(ref_square * got_square);
        let cos = if apart == 0.0 { 1.0 } else { dot / lengths };
        let name = site.layer.map_or("model".to_owned(), |layer| format!("model.layers.{layer}"));
        Self { name, call: site.call, ref_max, got_max, rel, cos }
    }

    fn widen(&mut self, other: &Self) {
        self.ref_max = worse(self.ref_max, other.ref_max);
        self.got_max = worse(self.got_max, other.got_max);
        self.rel = worse(self.rel, other.rel);
        self.cos = -worse(-self.cos, -other.cos);
    }

    fn diverges(&self, tolerance: f64) -> bool {
        !matches!(
            self.rel.partial_cmp(&tolerance),
            Some(std::cmp::Ordering::Less | std::cmp::Ordering::Equal)
        )
    }

    fn full_name(&self) -> String {
        format!("{}.{}", self.name, self.call)
    }
}

/// The larger one; NaN if one is.
fn worse<T: PartialOrd>(a: T, b: T) -> T {
    #[allow(clippy::eq_op)] // only NaN differs from itself
    if a >= b || a != a { a } else { b }
}

fn table(lines: &[Line], first: Option<&Line>, tolerance: f64, against: &str) -> String {
    let width = lines.iter().map(|l| l.full_name().len()).max().unwrap_or(0);
    let mut text =
        format!("{:<width$} {:>10} {:>10} {:>9} {:>10}\n", "call", "ref max", "got max", "rel", "cos");
    for l in lines {
        let mark = if l.diverges(tolerance) { "  differs" } else { "" };
        text.push_str(&format!(
            "{:<width$} {:>10.4} {:>10.4} {:>9.1e} {:>10.7}{mark}\n",
            l.full_name(),
            l.ref_max,
            l.got_max,
            l.rel,
            l.cos
        ));
    }
    text.push_str(&match first {
        Some(l) => format!(
            "first to differ from {against}: {}, by {:.1e} of its largest value; tolerance {tolerance:.1e}\n",
            l.full_name(),
            l.rel
        ),
        None => format!("no call differs from {against} by more than {tolerance:.1e} of its largest value\n"),
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(reference: &[f32], got: &[f32]) -> Line {
        Line::of(Site { layer: Some(3), call: "mlp.down_proj" }, reference, got)
    }

    #[test]
    fn differences_are_shares_of_the_largest_value() {
        let l = line(&[1.0, -4.0, 2.0], &[1.0, -3.0, 2.5]);
        assert_eq!(
            (l.full_name().as_str(), l.ref_max, l.got_max),
            ("model.layers.3.mlp.down_proj", 4.0, 3.0)
        );
        assert_eq!(l.rel, 0.25);
        let cos = (1.0 + 12.0 + 5.0) / (21f64 * (1.0 + 9.0 + 6.25)).sqrt();
        assert!((l.cos - cos).abs() < 1e-12, "{}", l.cos);
        assert!(l.diverges(0.2) && !l.diverges(0.25));
    }

    #[test]
    fn equal_values_agree_and_what_is_not_finite_differs() {
        for v in [&[0.0f32, 0.0][..], &[1.0, -2.0]] {
            let l = line(v, v);
            assert_eq!((l.rel, l.cos, l.diverges(0.0)), (0.0, 1.0, false));
        }
        for (reference, got) in
            [([1.0, 2.0], [f32::NAN, 2.0]), ([1.0, 2.0], [f32::INFINITY, 2.0]), ([0.0, 0.0], [0.0, 1.0])]
        {
            assert!(line(&reference, &got).diverges(1e9), "{got:?}");
        }
    }

    #[test]
    fn the_worst_step_counts() {
        let mut l = line(&[1.0], &[1.0]);
        l.widen(&line(&[2.0], &[1.0]));
        l.widen(&line(&[1.0], &[1.0]));
        assert_eq!((l.rel, l.ref_max), (0.5, 2.0));
        l.widen(&line(&[1.0], &[f32::NAN]));
        l.widen(&line(&[1.0], &[1.0]));
        assert!(l.diverges(1e9), "{l:?}");
    }
}
