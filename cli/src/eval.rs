//! `q4 eval`: how well a model predicts a text.
use crate::args::EvalArgs;
use crate::context::Context;
use crate::input;
use crate::report::Outcome;
use crate::session::{Facts, Session};
use crate::windows::Windows;
use q4_core::Result;
use q4_model::likelihood::Loss;
use serde::Serialize;

/// The document of `--json`.
#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    /// Mean of -ln p, in nats.
    loss: f64,
    /// exp(loss); null where no f64 is that large.
    ppl: f64,
    /// Tokens that were predicted.
    tokens: usize,
    window: usize,
    #[serde(flatten)]
    facts: Facts,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &EvalArgs) -> Result<Outcome> {
    let dispatch = Session::dispatch(cx)?;
    let text = input::data(&args.data.data)?;
    let checkpoint = cx.open(&args.model)?;
    let context = checkpoint.config().max_position_embeddings;
    let windows = Windows::new(&text, &args.data, &checkpoint, context)?;
    let session = Session::load(cx, dispatch, &checkpoint, args.quantize, windows.sizes(cx))?;
    let mut runner = session.runner()?;

    let mut loss = Loss::default();
    let bar = cx.report().bar("evaluating");
    bar.set_length(windows.predicted() as u64);
    for step in windows.steps() {
        if step.is_first {
            runner.truncate(0);
        }
        runner.accept_all(step.ids, &mut |rows| loss.add(rows, step.next))?;
        bar.inc(step.next.len() as u64);
    }
    bar.finish_and_clear();

    let facts = session.facts();
    if cx.report().is_json() {
        let body = Body {
            model: checkpoint.name(),
            loss: loss.mean(),
            ppl: loss.perplexity(),
            tokens: loss.tokens(),
            window: windows.window(),
            facts,
        };
        cx.report().document("eval", &body)?;
    } else {
        let lines = [
            format!("loss        {:.6}", loss.mean()),
            format!("perplexity  {:.4}", loss.perplexity()),
            format!("tokens      {}", loss.tokens()),
        ];
        cx.report().text(&(lines.join("\n") + "\n"))?;
        facts.detail(cx.report());
    }
    Ok(Outcome::Done)
}
