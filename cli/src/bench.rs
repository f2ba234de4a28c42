//! `q4 bench`: tokens a second beside what the machine's bandwidth and arithmetic would allow.
//!
//! The roofline is measured in the same run, on the same threads, so that a noisy machine moves both.
mod cuda;

use crate::args::{BenchArgs, Format};
use crate::context::Context;
use crate::report::Outcome;
use crate::roofline::Roofline;
use q4_core::memory::{human, peak_resident};
use q4_core::{
    Activations, Code, Device, Dispatch, Error, ExecContext, Policy, Q4Linear, Result, TensorView,
    TensorViewMut, ThreadPool,
};
use q4_model::executor::Shape;
use q4_model::load::{ContextOptions, Loaded, Model, load, shape};
use q4_model::plan::{ActivationRequest, Plan, PlanOptions};
use q4_model::runner::Runner;
use q4_model::synthetic::{self, Recipe};
use serde::Serialize;
use std::fmt::Write;
use std::time::Instant;

/// Tokens in the cache before decoding is measured.
const PROMPT: usize = 16;

/// One figure.
#[derive(Serialize)]
struct Row {
    what: String,
    shape: String,
    median: f64,
    min: f64,
    max: f64,
    unit: &'static str,
    roofline: f64,
    fraction: f64,
}

/// Where the memory went.
#[derive(Serialize)]
struct Memory {
    packed_bytes: u64,
    embedding_bytes: u64,
    kv_bytes: u64,
    peak_bytes: Option<u64>,
    /// Peak over the sum of the other three.
    ratio: Option<f64>,
}

#[derive(Serialize)]
struct Body {
    model: String,
    threads: usize,
    activations: &'static str,
    read_gb_s: f64,
    gmac_s: f64,
    results: Vec<Row>,
    memory: Memory,
    executed: Vec<q4_core::Executed>,
    downgraded: usize,
}

/// A model to measure and what one token of it costs.
struct Subject {
    name: String,
    shape: Shape,
    loaded: Loaded,
    activations: Activations,
    /// Bytes a decode step reads: packed products and the head.
    token_bytes: u64,
    embedding_bytes: u64,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &BenchArgs) -> Result<Outcome> {
    if args.repetitions == 0 || args.prefill.contains(&0) {
        return Err(
            Error::new(Code::Usage, "bench").need("at least one repetition and prompts of one token or more")
        );
    }
    let threads = cx.threads();
    if let Device::Cuda(ordinal) = cx.device()? {
        return on_cuda(cx, args, ordinal, &threads);
    }
    let roofline = Roofline::measure(&threads);
    // A figure for one path must not come from another.
    let dispatch = cx.dispatch_with(Policy { deny_downgrade: true, ..cx.policy() })?;
    cx.require_named(&dispatch)?;
    let longest = args.prefill.iter().copied().max().unwrap_or(PROMPT).max(PROMPT);
    let chunk = longest.min(crate::session::chunk(cx.device()?));
    let options = cx.plan_options(args.quantize, chunk)?;
    let budget = cx.budget();
    let subject = match &args.shape {
        Some(name) => synthetic_subject(name, args, &options, &dispatch, &threads, &budget)?,
        None => file_subject(cx, args, &options, &dispatch, &threads, &budget)?,
    };
    let context = longest.max(PROMPT + args.decode) + 1;
    let mut runner = subject.loaded.runner(ContextOptions { context, chunk, all_logits: false }, &budget)?;
    let mut results = Vec::new();
    for &n in &args.prefill {
        let floor =
            roofline.tokens(&subject.activations, subject.token_bytes, synthetic::macs(&subject.shape).0, n);
        results.push(measure(&format!("pp{n}"), &subject.name, args.repetitions, n as f64, floor, || {
            runner.truncate(0);
            timed(|| runner.accept(&prompt(n, &subject.shape)))
        })?);
    }
    if args.decode > 0 {
        let floor = roofline.read_gb_s * 1e9 / subject.token_bytes as f64;
        results.push(measure(
            &format!("tg{}", args.decode),
            &subject.name,
            args.repetitions,
            args.decode as f64,
            floor,
            || decode(&mut runner, &subject.shape, args.decode),
        )?);
    }
    if args.kernels {
        kernels(&subject, &roofline, args.repetitions, chunk, &threads, &mut results)?;
    }
    let s = &subject.shape;
    let kv_bytes = q4_model::cpu::KvCache::bytes(
        q4_model::cpu::KvType::of(options.dtype),
        s.layers,
        s.kv_heads,
        s.head_dim,
        context,
    );
    let parts = subject.token_bytes + subject.embedding_bytes + kv_bytes;
    let peak = peak_resident();
    let body = Body {
        model: subject.name.clone(),
        threads: threads.threads(),
        activations: subject.activations.as_str(),
        read_gb_s: roofline.read_gb_s,
        gmac_s: roofline.gmac_s(&subject.activations),
        results,
        memory: Memory {
            packed_bytes: subject.token_bytes,
            embedding_bytes: subject.embedding_bytes,
            kv_bytes,
            peak_bytes: peak,
            ratio: peak.map(|p| p as f64 / parts as f64),
        },
        executed: dispatch.witness().executed(),
        downgraded: dispatch.witness().downgraded().len(),
    };
    if cx.report().is_json() {
        cx.report().document("bench", &body)?;
    } else {
        cx.report().text(&text(&body))?;
    }
    Ok(Outcome::Done)
}

fn on_cuda(
    cx: &Context,
    args: &BenchArgs,
    ordinal: u32,
    threads: &std::sync::Arc<ThreadPool>,
) -> Result<Outcome> {
    let gpu = q4_cuda::Gpu::open(ordinal)?;
    let dispatch = cx.dispatch_with(Policy { deny_downgrade: true, ..cx.policy() })?;
    cx.require_named(&dispatch)?;
    let longest = args.prefill.iter().copied().max().unwrap_or(PROMPT).max(PROMPT);
    let rows = if args.kernels { 4096 } else { longest.min(crate::session::chunk(gpu.device())) };
    let options = cx.plan_options(args.quantize, rows)?;
    let budget = cx.budget();
    cuda::run(cx, args, &gpu, &dispatch, options.dtype, || match &args.shape {
        Some(name) => synthetic_subject(name, args, &options, &dispatch, threads, &budget),
        None => file_subject(cx, args, &options, &dispatch, threads, &budget),
    })
}

fn synthetic_subject(
    name: &str,
    args: &BenchArgs,
    options: &PlanOptions,
    dispatch: &Dispatch,
    threads: &std::sync::Arc<ThreadPool>,
    budget: &q4_core::memory::Budget,
) -> Result<Subject> {
    let shape = synthetic::shape(name)?;
    let schema = if args.quantize == Some(Format::Nf4) { Recipe::NF4 } else { Recipe::NVFP4 };
    let activations = match options.activations {
        ActivationRequest::Int8 => Activations::Int8,
        ActivationRequest::Nvfp4 => Activations::Nvfp4(q4_core::ActQuant {
            rule: q4_core::Rule::ModelOpt,
            global: q4_core::ActGlobal::None,
        }),
        ActivationRequest::Auto | ActivationRequest::Native => Activations::Native,
    };
    let recipe = Recipe {
        schema,
        activations,
        dtype: options.dtype,
        max_rows: options.max_rows,
        device: options.device,
    };
    let loaded = synthetic::build(&shape, &recipe, dispatch, threads.clone(), budget)?;
    let (token_bytes, embedding_bytes) = synthetic::bytes(&shape, &schema);
    Ok(Subject {
        name: format!("{name} {}", schema.id()),
        shape,
        loaded,
        activations,
        token_bytes,
        embedding_bytes,
    })
}

fn file_subject(
    cx: &Context,
    args: &BenchArgs,
    options: &PlanOptions,
    dispatch: &Dispatch,
    threads: &std::sync::Arc<ThreadPool>,
    budget: &q4_core::memory::Budget,
) -> Result<Subject> {
    let checkpoint = cx.open(&args.model)?;
    let plan = Plan::new(&checkpoint, dispatch, options)?;
    let loaded = load(&checkpoint, &plan, dispatch, options, threads.clone(), budget, &mut |_, _| {})?;
    let packed: u64 = plan.products().map(|p| p.spec.schema.stored_bytes(p.spec.n(), p.spec.k)).sum();
    let embedding = checkpoint.embedding()?.bytes.len() as u64;
    let tied = matches!(plan.head, q4_model::plan::HeadPlan::Dense { .. });
    let activations = plan.products().next().map_or(Activations::Native, |p| p.spec.activations);
    Ok(Subject {
        name: checkpoint.name().to_owned(),
        shape: shape(&checkpoint),
        loaded,
        activations,
        token_bytes: packed + if tied { embedding } else { 0 },
        embedding_bytes: embedding,
    })
}

fn decode(runner: &mut Runner, shape: &Shape, steps: usize) -> Result<f64> {
    runner.truncate(0);
    runner.accept(&prompt(PROMPT, shape))?;
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

/// One warm-up, then `repetitions` runs of `work` units each.
fn measure(
    what: &str,
    shape: &str,
    repetitions: usize,
    work: f64,
    roofline: f64,
    mut once: impl FnMut() -> Result<f64>,
) -> Result<Row> {
    once()?;
    let mut rates = (0..repetitions).map(|_| once().map(|s| work / s)).collect::<Result<Vec<_>>>()?;
    rates.sort_by(f64::total_cmp);
    let median = rates[rates.len() / 2];
    let (what, shape, unit) = (what.to_owned(), shape.to_owned(), "tok/s");
    Ok(Row {
        what,
        shape,
        median,
        min: rates[0],
        max: rates[rates.len() - 1],
        unit,
        roofline,
        fraction: median / roofline,
    })
}

/// Every product of one layer and the head, alone, at several numbers of rows.
fn kernels(
    subject: &Subject,
    roofline: &Roofline,
    repetitions: usize,
    chunk: usize,
    threads: &ThreadPool,
    results: &mut Vec<Row>,
) -> Result<()> {
    let Model::Cpu(model) = &subject.loaded.model else {
        return Err(Error::new(Code::Usage, "--kernels").need("--device cpu").have("a CUDA device"));
    };
    let Some(block) = model.blocks.first() else { return Ok(()) };
    let head = match &model.head {
        q4_model::cpu::CpuHead::Q4(linear) => Some(linear),
        q4_model::cpu::CpuHead::Dense(_) => None,
    };
    let products = [&block.qkv, &block.o, &block.gate_up, &block.down].into_iter().chain(head);
    for (linear, _) in products.flat_map(|l| &l.parts) {
        for m in [1, 8, 64, 512].into_iter().filter(|m| *m <= chunk) {
            results.push(kernel(linear, m, roofline, repetitions, threads)?);
        }
    }
    Ok(())
}

fn kernel(
    linear: &Q4Linear,
    m: usize,
    roofline: &Roofline,
    repetitions: usize,
    threads: &ThreadPool,
) -> Result<Row> {
    let info = linear.info();
    let (n, k) = (info.n, info.k);
    let x: Vec<f32> = (0..m * k).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
    let mut y = vec![0f32; m * n];
    let mut scratch = vec![0u8; linear.workspace(m) + 64];
    let at = scratch.as_ptr().align_offset(64);
    let len = scratch.len() - at;
    let macs = (m * n * k) as f64;
    let floor_s = (info.resident_bytes as f64 / (roofline.read_gb_s * 1e9))
        .max(macs / (roofline.gmac_s(&info.activations) * 1e9));
    // Enough calls that the clock's resolution does not show; short ones repeat on a warm cache, as the row says.
    let calls = (0.02 / floor_s.max(1e-6)).clamp(1.0, 1000.0) as usize;
    let mut row =
        measure("", linear.name(), repetitions, calls as f64 * macs / 1e9, macs / floor_s / 1e9, || {
            timed(|| {
                for _ in 0..calls {
                    let mut cx = ExecContext::cpu(threads);
                    cx.workspace = Some(TensorViewMut::of(&mut scratch[at..], &[len])?);
                    linear.forward(
                        TensorView::of(&x, &[m, k])?,
                        TensorViewMut::of(&mut y, &[m, n])?,
                        &mut cx,
                    )?;
                }
                Ok(())
            })
        })?;
    row.what = format!("{n}x{k} m={m}");
    row.unit = "GMAC/s";
    Ok(row)
}

fn text(b: &Body) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{}, {} activations, {} threads; measured here: reads {:.1} GB/s, arithmetic {:.0} GMAC/s",
        b.model, b.activations, b.threads, b.read_gb_s, b.gmac_s
    );
    let _ = writeln!(
        out,
        "{:<22} {:>10} {:>10} {:>10} {:>10} {:>7}  unit",
        "what", "median", "min", "max", "roofline", "of it"
    );
    for r in &b.results {
        let _ = writeln!(
            out,
            "{:<22} {:>10.2} {:>10.2} {:>10.2} {:>10.1} {:>6.0}%  {}",
            r.what,
            r.median,
            r.min,
            r.max,
            r.roofline,
            r.fraction * 100.0,
            r.unit
        );
    }
    let m = &b.memory;
    let peak = m.peak_bytes.map_or("unknown".into(), human);
    let ratio = m.ratio.map_or(String::new(), |r| format!(", {r:.2} times their sum"));
    let _ = writeln!(
        out,
        "memory: packed {}, embeddings {}, KV {}; peak resident {peak}{ratio}",
        human(m.packed_bytes),
        human(m.embedding_bytes),
        human(m.kv_bytes)
    );
    for e in &b.executed {
        let _ = writeln!(
            out,
            "executed: {} via {}, {} activations, {} calls",
            e.backend, e.path, e.activations, e.calls
        );
    }
    out
}
