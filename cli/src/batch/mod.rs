//! `q4 generate --batch`: a file of requests, many computed at once, a line an answer in the order of the
//! file.
//!
//! On the CPU an answer is the one that `q4 generate` gives to its request alone. A run that was cut short is
//! taken up where its file of answers ends.
mod answers;
mod identity;
mod requests;

use crate::args::GenerateArgs;
use crate::context::Context;
use crate::generate::ROOM;
use crate::prompt;
use crate::report::Outcome;
use crate::session::{Session, shared_chunk};
use crate::signals;
use crate::text::{Text, context_size};
use answers::Answers;
use q4_core::{Code, Error, Result};
use q4_model::batch::{Event, Scheduler, Sink};
use q4_model::cpu::KvType;
use q4_model::generate::Answer;
use q4_model::load::ContextOptions;
use q4_model::plan::Plan;
use requests::{Asked, Reader};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Requests at once where nobody says.
const PARALLEL: u16 = 16;

/// What became of a request, once it is known.
type Kept = Arc<Mutex<Option<Result<Answer>>>>;

struct Keeper(Kept);

impl Sink for Keeper {
    fn tell(&mut self, event: Event) {
        let outcome = match event {
            Event::Ended { answer, .. } => Ok(*answer),
            Event::Failed(e) => Err(e),
            Event::Started { .. } | Event::Token { .. } => return,
        };
        // Nobody panics while he holds it.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

/// Runs the verb.
pub fn run(cx: &Context, args: &GenerateArgs, batch: &Path) -> Result<Outcome> {
    let how = &args.batch;
    let dispatch = Session::dispatch(cx)?;
    let checkpoint = cx.open(&args.model)?;
    let mut text = Text::of(&checkpoint)?;
    prompt::give_to(&mut text, &args.answer.prompt, &checkpoint, cx.report())?;
    let seed = text.sampling(&args.answer, cx.report())?.seed;
    let limits = text.limits(&args.answer);
    let reader = Reader::new(args, &checkpoint, &text, seed, limits)?;
    let requests = reader.read(batch)?;
    let room = ROOM.max(args.answer.max_tokens.unwrap_or(0));
    let need = |a: &Asked| a.request.prompt.len().saturating_add(a.request.limits.max_tokens.min(room));
    let most = requests.iter().map(need).max().unwrap_or(1);
    let context = context_size(args.answer.context, most, &checkpoint)?;
    if let Some(at) = requests.iter().position(|a| a.request.prompt.len() > context) {
        return Err(Error::new(
            Code::ContextFull,
            format!("{}: line {}: the prompt", batch.display(), at + 1),
        )
        .need(format!("{} positions", requests[at].request.prompt.len()))
        .have(format!("{context} positions")));
    }
    let sequences = usize::from(how.parallel.unwrap_or(PARALLEL)).min(requests.len()).max(1);
    let rows = shared_chunk(cx.device()?, sequences);
    let sizes =
        ContextOptions { context, chunk: rows, all_logits: false, kv: cx.kv(KvType::F16), many: None };
    let plan = Plan::new(&checkpoint, &dispatch, &cx.plan_options(args.answer.quantize, rows)?)?;
    plan.require(&dispatch)?;
    let computed = format!("{} {:?} {:?}", cx.device()?, cx.isa(), sizes.kv);
    let run = identity::run(&checkpoint, &plan, &computed, cx.threads().threads())?;
    let mut out = Answers::open(how.output.as_deref(), &requests, run)?;
    if let Some((count, first)) = out.stale {
        cx.report().warn(&format!(
            "{count} requests failed in an earlier run and are not asked again; cut the file of answers before line {} \
             to ask from there on",
            first + 1
        ));
    }
    let session = Session::load_many(cx, dispatch, &checkpoint, args.answer.quantize, sizes, sequences, 0)?;
    if let Some(first) = session.dependents()?.first() {
        cx.report().warn(&format!(
            "answers may differ in the last bits from those of q4 generate: {}: {}",
            first.layer, first.why
        ));
    }
    let (engine, bounds) = session.sequences()?;
    let mut scheduler = Scheduler::new(engine, &text.tokenizer, bounds);
    let hold = signals::cleanup();
    let bar = cx.report().bar("answers");
    bar.set_length(requests.len() as u64);
    let start = Instant::now();
    let (first, mut next) = (out.written, out.written);
    let mut kept: Vec<Kept> = Vec::new();
    while out.written < requests.len() && !signals::interrupted() {
        while next < requests.len() && scheduler.gauges().waiting < sequences {
            kept.push(Kept::default());
            let keeper = Keeper(kept[next - first].clone());
            scheduler.submit(requests[next].request.clone(), Box::new(keeper));
            next += 1;
        }
        scheduler.step();
        while out.written < next && out.say(&requests, &kept[out.written - first])? {
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    drop(hold);
    let (gauges, seconds) = (scheduler.gauges(), start.elapsed().as_secs_f64());
    let (tokens, prompts, shared) = (gauges.answer_tokens, gauges.prompt_tokens, gauges.cached_tokens);
    cx.report().detail(&format!(
        "{} answers, {tokens} tokens in {seconds:.2} s, {:.1} tok/s; prompts {prompts} tokens, {shared} of them \
         shared; {sequences} sequences at once",
        out.written - first,
        tokens as f64 / seconds,
    ));
    session.facts().detail(cx.report());
    match (out.written < requests.len(), out.failed) {
        (true, _) => Ok(Outcome::Interrupted),
        (false, None) => Ok(Outcome::Done),
        (false, Some(code)) => Ok(Outcome::Found(code)),
    }
}
