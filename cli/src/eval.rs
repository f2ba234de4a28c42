//! `q4 eval`: how well a model predicts a text, or what training would have it learn of rows.
use crate::args::EvalArgs;
use crate::context::Context;
use crate::input;
use crate::report::Outcome;
use crate::rows::Rows;
use crate::session::{Facts, Session};
use crate::windows::{Step, Windows};
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
    /// What became of rows; of a text null.
    rows: Option<q4_rows::Report>,
    #[serde(flatten)]
    facts: Facts,
}

/// What is predicted.
enum Data {
    Text(Windows),
    Rows(Rows),
}

/// Runs the verb.
pub fn run(cx: &Context, args: &EvalArgs) -> Result<Outcome> {
    let dispatch = Session::dispatch(cx)?;
    let text = args.data.as_deref().map(|path| input::data(path).map(|text| (path, text))).transpose()?;
    let checkpoint = cx.open(&args.model)?;
    let context = checkpoint.config().max_position_embeddings;
    let data = match text {
        Some((path, text)) => Data::Text(Windows::new(path, &text, &args.cut, &checkpoint, context)?),
        None => Data::Rows(Rows::load(cx, args, &checkpoint)?),
    };
    let (sizes, positions, window) = match &data {
        Data::Text(windows) => (windows.sizes(cx), windows.predicted(), windows.window()),
        Data::Rows(rows) => (rows.sizes(cx), rows.positions(), rows.window()),
    };
    let steps: Box<dyn Iterator<Item = Step<'_>>> = match &data {
        Data::Text(windows) => Box::new(windows.steps()),
        Data::Rows(rows) => Box::new(rows.steps()),
    };
    let session = Session::load(cx, dispatch, &checkpoint, args.quantize, sizes)?;
    let mut runner = session.runner()?;

    let mut loss = Loss::default();
    let bar = cx.report().bar("evaluating");
    bar.set_length(positions as u64);
    for step in steps {
        if step.is_first {
            runner.truncate(0);
        }
        runner.accept_all(step.ids, &mut |rows| match step.learnt {
            None => loss.add(rows, step.next),
            Some(learnt) => loss.add_learnt(rows, step.next, learnt),
        })?;
        bar.inc(step.next.len() as u64);
    }
    bar.finish_and_clear();

    let rows = match &data {
        Data::Text(_) => None,
        Data::Rows(rows) => Some(rows.report),
    };
    let facts = session.facts();
    if cx.report().is_json() {
        let body = Body {
            model: checkpoint.name(),
            loss: loss.mean(),
            ppl: loss.perplexity(),
            tokens: loss.tokens(),
            window,
            rows,
            facts,
        };
        cx.report().document("eval", &body)?;
    } else {
        let mut lines = vec![
            format!("loss        {:.6}", loss.mean()),
            format!("perplexity  {:.4}", loss.perplexity()),
            format!("tokens      {}", loss.tokens()),
        ];
        lines.extend(rows.map(|report| format!("rows        {report}")));
        cx.report().text(&(lines.join("\n") + "\n"))?;
        facts.detail(cx.report());
    }
    Ok(Outcome::Done)
}
