//! `q4 bench --first-token`: what a user waits for before the first token, the prompt's own time aside.
use super::report::FirstToken;
use super::{PROMPT, prompt, subject, timed};
use crate::args::BenchArgs;
use crate::context::Context;
use crate::report::Outcome;
use q4_core::memory::peak_resident;
use q4_core::{Dispatch, Result, ThreadPool};
use q4_model::load::ContextOptions;
use std::sync::Arc;
use std::time::Instant;

/// Loads, computes a prompt, and computes it again for comparison: what only the first one took is
/// preparation too.
pub(super) fn run(
    cx: &Context,
    args: &BenchArgs,
    dispatch: &Dispatch,
    threads: &Arc<ThreadPool>,
    start: Instant,
) -> Result<Outcome> {
    let budget = cx.budget();
    let chunk = crate::session::chunk(cx.device()?);
    let subject = subject(cx, args, dispatch, threads, chunk, &budget)?;
    let context = chunk + 1;
    let mut runner = subject
        .loaded
        .runner(ContextOptions { context, chunk, all_logits: false, kv: subject.kv, many: None }, &budget)?;
    let load_s = start.elapsed().as_secs_f64();
    let ids = prompt(PROMPT, &subject.shape);
    let first_s = timed(|| runner.accept(&ids))?;
    let memory = subject.memory(context, peak_resident());
    let again_s = (0..args.repetitions)
        .map(|_| {
            runner.truncate(0);
            timed(|| runner.accept(&ids))
        })
        .collect::<Result<Vec<_>>>()?;
    let warm_s = again_s.iter().copied().fold(f64::INFINITY, f64::min);
    let body = FirstToken {
        model: subject.name.clone(),
        threads: threads.threads(),
        activations: subject.activations.as_str(),
        prompt: PROMPT,
        load_s,
        first_s,
        warm_s,
        again_s,
        work_s: load_s + first_s - warm_s,
        memory,
        executed: dispatch.witness().executed(),
        downgraded: dispatch.witness().downgraded().len(),
    };
    cx.report().result("bench", &body, || body.text())?;
    Ok(Outcome::Done)
}
