//! `q4 bench`: tokens a second beside what the machine's bandwidth and arithmetic would allow, or what users
//! of a server get.
//!
//! The machine's limits are measured before and after the work, on the same threads: a noisy machine moves
//! both.
mod cuda;
mod first_token;
mod kernels;
mod report;
mod server;
mod together;

use crate::args::BenchArgs;
use crate::client::Server;
use crate::context::Context;
use crate::report::Outcome;
use crate::roofline::{Roofline, Work};
use crate::session::warn_of_unscaled;
use crate::writing;
use q4_core::memory::{Budget, forget_peak, peak_resident};
use q4_core::{Activations, Code, Device, Dispatch, Error, Result, ThreadPool};
use q4_model::batch::PAGE;
use q4_model::cpu::{KvCache, KvShape, KvType};
use q4_model::executor::Shape;
use q4_model::load::{ContextOptions, Loaded, load, shape};
use q4_model::plan::{ActivationRequest, HeadPlan, Plan, PlanOptions};
use q4_model::runner::Runner;
use q4_model::synthetic::{self, Recipe};
use report::{Body, Memory, Row};
use std::sync::Arc;
use std::time::Instant;
use together::Together;

/// Tokens in the cache before decoding is measured.
const PROMPT: usize = 16;

/// A model to measure and what one token of it costs.
struct Subject {
    name: String,
    shape: Shape,
    loaded: Loaded,
    activations: Activations,
    kv: KvType,
    /// Products, a 4-bit head among them.
    packed_bytes: u64,
    embedding_bytes: u64,
    /// What a decode step reads: the products and the head.
    token_bytes: u64,
}

/// Rates of one kind of work, in units a second.
struct Figure {
    what: String,
    shape: String,
    unit: &'static str,
    rates: Vec<f64>,
    /// What one unit costs.
    work: Work,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &BenchArgs) -> Result<Outcome> {
    if let Some(server) = Server::of(&args.server, "bench")? {
        return server::run(cx, args, server);
    }
    let start = Instant::now();
    let nothing = [&args.prefill, &args.depth, &args.batch].iter().any(|all| all.contains(&0));
    if args.repetitions == 0 || nothing || args.decode == 0 && !args.batch.is_empty() {
        let need =
            "at least one repetition, prompts, depths and batches of one or more, and for batches --decode";
        return Err(Error::new(Code::Usage, "bench").need(need));
    }
    if let Some(out) = &args.write {
        return write(cx, args, out);
    }
    // A figure for one path does not come from another: no policy downgrades unless the user agreed to it.
    let dispatch = cx.dispatch()?;
    cx.require_named(&dispatch)?;
    let threads = cx.threads();
    if args.first_token {
        return first_token::run(cx, args, &dispatch, &threads, start);
    }
    if let Device::Cuda(ordinal) = cx.device()? {
        return on_cuda(cx, args, ordinal, &dispatch, &threads);
    }
    let before = Roofline::measure(&threads)?;
    forget_peak(); // what was read to measure bandwidth is no memory of the model's
    let longest = args.prefill.iter().copied().max().unwrap_or(PROMPT).max(PROMPT);
    // Every sequence of a batch has a row of each step.
    let most = args.batch.iter().copied().max().unwrap_or(0);
    let chunk = longest.min(crate::session::chunk(cx.device()?)).max(most);
    let budget = cx.budget();
    let subject = subject(cx, args, &dispatch, &threads, chunk, &budget)?;
    let deepest = args.depth.iter().copied().max().unwrap_or(0).max(PROMPT);
    let context = longest.max(deepest + args.decode) + 1;
    let mut runner = subject
        .loaded
        .runner(ContextOptions { context, chunk, all_logits: false, kv: subject.kv, many: None }, &budget)?;
    // Self-checks and first touches of memory are no part of any figure.
    runner.accept(&prompt(PROMPT, &subject.shape))?;
    runner.decode(0)?;
    let mut figures = Vec::new();
    for &n in &args.prefill {
        let rates = measure(args, n as f64, || {
            runner.truncate(0);
            timed(|| runner.accept(&prompt(n, &subject.shape)))
        })?;
        figures.push(subject.figure(format!("pp{n}"), rates, n));
    }
    for depth in std::iter::once(PROMPT).chain(args.depth.iter().copied()).filter(|_| args.decode > 0) {
        let ids = prompt(depth, &subject.shape);
        runner.truncate(0);
        runner.accept(&ids)?;
        let rates = measure(args, args.decode as f64, || decode(&mut runner, &ids, args.decode))?;
        figures.push(subject.decoding(depth, args.decode, rates));
    }
    drop(runner);
    for &n in &args.batch {
        let mut batch = Together::new(&subject, args, n, chunk, &budget)?;
        let rates = measure(args, (n * args.decode) as f64, || {
            timed(|| (0..args.decode).try_for_each(|_| batch.step()))
        })?;
        figures.push(subject.decoding_together(n, args, rates));
    }
    if args.kernels {
        kernels::measure_all(&subject, &before, args, chunk, &threads, &mut figures)?;
    }
    let memory = subject.memory(context.max(most * together::pages(args) * PAGE), peak_resident());
    let roofline = before.or_faster(&Roofline::measure(&threads)?);
    let gmac_s = roofline.gmac_s(&subject.activations);
    let body = Body {
        model: subject.name.clone(),
        threads: threads.threads(),
        isa: cx.isa(),
        activations: subject.activations.as_str(),
        read_gb_s: roofline.read_gb_s,
        gmac_s,
        results: figures.into_iter().map(|f| Row::new(f, roofline.read_gb_s, gmac_s)).collect(),
        memory,
        executed: dispatch.witness().executed(),
        downgraded: dispatch.witness().downgraded().len(),
    };
    cx.report().result("bench", &body, || body.text())?;
    Ok(Outcome::Done)
}

fn on_cuda(
    cx: &Context,
    args: &BenchArgs,
    ordinal: u32,
    dispatch: &Dispatch,
    threads: &Arc<ThreadPool>,
) -> Result<Outcome> {
    let gpu = q4_cuda::Gpu::open(ordinal)?;
    let longest = args.prefill.iter().copied().max().unwrap_or(PROMPT).max(PROMPT);
    let rows = if args.kernels { 4096 } else { longest.min(crate::session::chunk(gpu.device())) };
    let dtype = cx.plan_options(args.quantize, rows)?.dtype;
    let budget = cx.budget();
    cuda::run(cx, args, &gpu, dispatch, dtype, || subject(cx, args, dispatch, threads, rows, &budget))
}

fn write(cx: &Context, args: &BenchArgs, out: &std::path::Path) -> Result<Outcome> {
    if let Some(format) = args.format.filter(|f| f.name != synthetic::WRITTEN) {
        return Err(Error::new(Code::Usage, "--write")
            .need(format!("--format {}", synthetic::WRITTEN))
            .have(format!("--format {}", format.name)));
    }
    let name = args.shape.as_deref().unwrap_or_default();
    let shape = synthetic::shape(name)?;
    let bytes = writing::write(cx, "writing", |progress| synthetic::write(&shape, out, progress))?;
    let body = serde_json::json!({ "model": name, "out": out, "bytes_out": bytes });
    cx.report().result("bench", &body, || {
        format!("{}: {name} with random weights, {}\n", out.display(), q4_core::memory::human(bytes))
    })?;
    Ok(Outcome::Done)
}

fn subject(
    cx: &Context,
    args: &BenchArgs,
    dispatch: &Dispatch,
    threads: &Arc<ThreadPool>,
    chunk: usize,
    budget: &Budget,
) -> Result<Subject> {
    let options = cx.plan_options(args.quantize, chunk)?;
    cx.tell_device()?;
    let subject = match &args.shape {
        Some(name) => synthetic_subject(cx, name, args, &options, dispatch, threads, budget),
        None => file_subject(cx, args, &options, dispatch, threads, budget),
    }?;
    match dispatch.witness().downgraded().len() {
        0 => {}
        n => cx.report().insist(&format!(
            "{n} products run on dense copies of their 4-bit weights, as --compute kernel-or-fallback agreed to"
        )),
    }
    Ok(subject)
}

fn synthetic_subject(
    cx: &Context,
    name: &str,
    args: &BenchArgs,
    options: &PlanOptions,
    dispatch: &Dispatch,
    threads: &Arc<ThreadPool>,
    budget: &Budget,
) -> Result<Subject> {
    let shape = synthetic::shape(name)?;
    let schema = args.format.unwrap_or_default().schema;
    let activations = match options.activations {
        ActivationRequest::Int8 => Activations::Int8,
        ActivationRequest::Nvfp4 => Activations::Nvfp4(q4_core::ActQuant {
            rule: q4_core::Rule::ModelOpt,
            global: q4_core::ActGlobal::None,
        }),
        ActivationRequest::Fp8 => Activations::Fp8(q4_core::Fp8Inputs::PerRow),
        ActivationRequest::Auto | ActivationRequest::Declared | ActivationRequest::Native => {
            Activations::Native
        }
    };
    let recipe = Recipe {
        schema,
        activations,
        dtype: options.dtype,
        max_rows: options.max_rows,
        device: options.device,
    };
    let loaded = synthetic::build(&shape, &recipe, dispatch, threads.clone(), budget)?;
    let (packed_bytes, embedding_bytes) = synthetic::bytes(&shape, &schema);
    Ok(Subject {
        name: format!("{name} {}", schema.id()),
        shape,
        loaded,
        activations,
        kv: cx.kv(KvType::F16),
        packed_bytes,
        embedding_bytes,
        token_bytes: packed_bytes,
    })
}

fn file_subject(
    cx: &Context,
    args: &BenchArgs,
    options: &PlanOptions,
    dispatch: &Dispatch,
    threads: &Arc<ThreadPool>,
    budget: &Budget,
) -> Result<Subject> {
    let checkpoint = cx.open(&args.model)?;
    let plan = Plan::new(&checkpoint, dispatch, options)?;
    warn_of_unscaled(&plan, cx.report());
    let loaded = load(&checkpoint, &plan, dispatch, options, threads.clone(), budget, &mut |_, _| {})?;
    let packed_bytes = plan.products().map(|p| p.spec.schema.stored_bytes(p.spec.n(), p.spec.k)).sum();
    let embedding_bytes = checkpoint.embedding()?.bytes.len() as u64;
    // A dense head is as large as the embedding, whether it is the embedding or not.
    let head = if matches!(plan.head, HeadPlan::Dense { .. }) { embedding_bytes } else { 0 };
    Ok(Subject {
        name: checkpoint.name().to_owned(),
        shape: shape(&checkpoint),
        loaded,
        activations: plan.products().next().map_or(Activations::Native, |p| p.spec.activations),
        kv: cx.kv(KvType::F16),
        packed_bytes,
        embedding_bytes,
        token_bytes: packed_bytes + head,
    })
}

impl Subject {
    /// Tokens a second in steps of `rows`: the weights are read once a step, the products are made for every
    /// row, the head's for the last one only.
    fn figure(&self, what: String, rates: Vec<f64>, rows: usize) -> Figure {
        let (body, all) = synthetic::macs(&self.shape);
        let bytes = self.token_bytes as f64 / rows as f64;
        let macs = body as f64 + (all - body) as f64 / rows as f64;
        Figure { what, shape: self.name.clone(), unit: "tok/s", rates, work: Work { bytes, macs } }
    }

    /// Tokens a second of `steps` behind `depth` positions. Those beyond [`PROMPT`] have keys and values,
    /// which are read once a step.
    fn decoding(&self, depth: usize, steps: usize, rates: Vec<f64>) -> Figure {
        if depth == PROMPT {
            return self.figure(format!("tg{steps}"), rates, 1);
        }
        let mut figure = self.figure(format!("tg{steps} at {depth}"), rates, 1);
        figure.work.bytes += KvCache::bytes(self.kv, KvShape::of(&self.shape), depth + steps / 2) as f64;
        figure
    }

    /// Tokens a second of `n` sequences together: a step reads the weights for all of them, keys and values for
    /// each. A repetition goes on where the one before it stopped; counted are the positions of the middle one.
    fn decoding_together(&self, n: usize, args: &BenchArgs, rates: Vec<f64>) -> Figure {
        let (_, all) = synthetic::macs(&self.shape);
        let before = args.repetitions / 2 + usize::from(!args.no_warm_up);
        let depth = PROMPT + before * args.decode + args.decode / 2;
        let kv = KvCache::bytes(self.kv, KvShape::of(&self.shape), depth) as f64;
        let work = Work { bytes: self.token_bytes as f64 / n as f64 + kv, macs: all as f64 };
        Figure { what: format!("batch {n}"), shape: self.name.clone(), unit: "tok/s", rates, work }
    }

    fn memory(&self, context: usize, peak_bytes: Option<u64>) -> Memory {
        let s = &self.shape;
        let kv_bytes = KvCache::bytes(self.kv, KvShape::of(s), context);
        Memory::new(self.packed_bytes, self.embedding_bytes, kv_bytes, peak_bytes)
    }
}

/// Steps behind `ids`, which are accepted already.
fn decode(runner: &mut Runner, ids: &[u32], steps: usize) -> Result<f64> {
    runner.truncate(ids.len() - 1);
    runner.decode(ids[ids.len() - 1])?;
    timed(|| {
        for _ in 0..steps {
            let id = runner.greedy()?;
            runner.decode(id)?;
        }
        Ok(())
    })
}

fn prompt(n: usize, shape: &Shape) -> Vec<u32> {
    (0..n).map(|i| (i * 104_729 % shape.vocab) as u32).collect()
}

fn timed(f: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}

/// One run that does not count, unless the user does without, then the counted ones of `units` each.
fn measure(args: &BenchArgs, units: f64, mut once: impl FnMut() -> Result<f64>) -> Result<Vec<f64>> {
    if !args.no_warm_up {
        once()?;
    }
    (0..args.repetitions).map(|_| once().map(|s| units / s)).collect()
}
