//! `q4 bench` on a CUDA device: prompts, decoding, batches and single products beside what the device allows.
use super::report::{Row, table};
use super::together::Together;
use super::{PROMPT, Subject, prompt};
use crate::args::BenchArgs;
use crate::context::Context;
use crate::device_roofline::DeviceRoofline;
use crate::report::Outcome;
use q4_core::memory::human;
use q4_core::{DType, Dispatch, ExecContext, ExecPath, Q4Linear, Result, ThreadPool};
use q4_cuda::{Buffer, Event, Gpu, Stream, libraries, view, view_mut};
use q4_model::cuda::CudaCache;
use q4_model::load::ContextOptions;
use q4_model::synthetic;
use q4_model::weights::Linear;
use serde::Serialize;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

#[derive(Serialize)]
struct Memory {
    packed_bytes: u64,
    embedding_bytes: u64,
    kv_bytes: u64,
    /// What the device has less of than before the model was loaded: the two below.
    used_bytes: u64,
    /// Of it, after loading: weights, tables, kernels.
    loaded_bytes: u64,
    /// Of it, with a context: keys and values, activations, workspace.
    context_bytes: u64,
    /// What was gone before: the driver's own, this process's context and kernels, other processes.
    before_bytes: u64,
}

#[derive(Serialize)]
struct Body {
    model: String,
    device: String,
    driver: u32,
    activations: &'static str,
    dtype: DType,
    read_gb_s: f64,
    gmac_s: f64,
    load_s: f64,
    results: Vec<Row>,
    memory: Memory,
    executed: Vec<q4_core::Executed>,
    downgraded: usize,
}

/// Runs the verb on `gpu`; `load` makes the model.
pub(super) fn run(
    cx: &Context,
    args: &BenchArgs,
    gpu: &Arc<Gpu>,
    dispatch: &Dispatch,
    dtype: DType,
    load: impl FnOnce() -> Result<Subject>,
) -> Result<Outcome> {
    let roofline = DeviceRoofline::measure(gpu)?;
    let (free, all) = gpu.memory()?;
    let start = Instant::now();
    let subject = load()?;
    gpu.synchronize()?;
    let load_s = start.elapsed().as_secs_f64();
    let (loaded, _) = gpu.memory()?;
    let s = &subject.shape;
    let longest = args.prefill.iter().copied().max().unwrap_or(PROMPT).max(PROMPT);
    let deepest = args.depth.iter().copied().max().unwrap_or(0).max(PROMPT);
    let context = longest.max(deepest + args.decode) + 1;
    let chunk = longest.min(crate::session::chunk(gpu.device()));
    let kv = |positions: usize| CudaCache::bytes(dtype, s.layers, s.kv_heads, s.head_dim, positions);
    let mut bench = Bench { subject: &subject, roofline, repetitions: args.repetitions, rows: Vec::new() };
    let budget = cx.budget();
    let mut runner = subject
        .loaded
        .runner(ContextOptions { context, chunk, all_logits: false, kv: subject.kv, many: None }, &budget)?;
    let (rest, _) = gpu.memory()?;
    let (macs, _) = synthetic::macs(s);
    for &n in &args.prefill {
        let ids = prompt(n, s);
        // Attention adds n/2 positions of keys and values for every query.
        let attention = (s.layers * s.heads * s.head_dim * n) as f64;
        let floor = (macs as f64 + attention) * n as f64 / (bench.roofline.gmac_s * 1e9);
        let reading = subject.token_bytes as f64 / (bench.roofline.read_gb_s * 1e9);
        bench.measure(format!("pp{n}"), n as f64, floor.max(reading), || {
            runner.truncate(0);
            let start = Instant::now();
            runner.accept(&ids)?;
            Ok(start.elapsed().as_secs_f64())
        })?;
    }
    for depth in std::iter::once(PROMPT).chain(args.depth.iter().copied()).filter(|_| args.decode > 0) {
        let what = if depth == PROMPT {
            format!("tg{}", args.decode)
        } else {
            format!("tg{} at {depth}", args.decode)
        };
        let mean = depth + args.decode / 2;
        let bytes = (subject.token_bytes + kv(mean)) as f64;
        let floor = args.decode as f64 * bytes / (bench.roofline.read_gb_s * 1e9);
        runner.truncate(0);
        let ids = prompt(depth, s);
        runner.accept(&ids)?;
        bench.measure(what, args.decode as f64, floor, || {
            // From the first token at hand to the last one: as many steps, and none that an earlier
            // repetition left running.
            runner.truncate(depth - 1);
            runner.decode(ids[depth - 1])?;
            let mut id = runner.greedy()?;
            let start = Instant::now();
            for _ in 0..args.decode {
                runner.decode(id)?;
                id = runner.greedy()?;
            }
            Ok(start.elapsed().as_secs_f64())
        })?;
    }
    drop(runner);
    for &n in &args.batch {
        let mut batch = Together::new(&subject, args, n, chunk.max(n), &budget)?;
        let bytes = (subject.token_bytes + kv(PROMPT) * n as u64) as f64 / (bench.roofline.read_gb_s * 1e9);
        let computing = (macs * n as u64) as f64 / (bench.roofline.gmac_s * 1e9);
        let floor = args.decode as f64 * bytes.max(computing);
        bench.measure(format!("batch {n}"), (n * args.decode) as f64, floor, || {
            let start = Instant::now();
            for _ in 0..args.decode {
                batch.step()?;
            }
            Ok(start.elapsed().as_secs_f64())
        })?;
    }
    if args.kernels {
        bench.kernels(gpu, &cx.threads())?;
    }
    let device = format!("{}", gpu.device());
    let name = q4_cuda::devices()?.into_iter().find(|d| format!("cuda:{}", d.ordinal) == device);
    let body = Body {
        model: subject.name.clone(),
        device: name.map_or(device, |d| format!("{} ({})", d.name, d.arch())),
        driver: libraries().driver.version().unwrap_or(0),
        activations: subject.activations.as_str(),
        dtype,
        read_gb_s: bench.roofline.read_gb_s,
        gmac_s: bench.roofline.gmac_s,
        load_s,
        results: bench.rows,
        memory: Memory {
            packed_bytes: subject.token_bytes,
            embedding_bytes: subject.embedding_bytes,
            kv_bytes: kv(context),
            used_bytes: free.saturating_sub(rest),
            loaded_bytes: free.saturating_sub(loaded),
            context_bytes: loaded.saturating_sub(rest),
            before_bytes: all - free,
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

struct Bench<'a> {
    subject: &'a Subject,
    roofline: DeviceRoofline,
    repetitions: usize,
    rows: Vec<Row>,
}

impl Bench<'_> {
    /// One warm-up, then the repetitions; `floor` in seconds for all of `work`.
    fn measure(
        &mut self,
        what: String,
        work: f64,
        floor: f64,
        mut once: impl FnMut() -> Result<f64>,
    ) -> Result<()> {
        once()?;
        let mut rates =
            (0..self.repetitions).map(|_| once().map(|s| work / s)).collect::<Result<Vec<_>>>()?;
        rates.sort_by(f64::total_cmp);
        let (median, roofline) = (rates[rates.len() / 2], work / floor);
        self.rows.push(Row {
            what,
            shape: self.subject.name.clone(),
            median,
            min: rates[0],
            max: rates[rates.len() - 1],
            unit: "tok/s",
            roofline,
            fraction: median / roofline,
        });
        Ok(())
    }

    /// Every product of a layer and the head at several numbers of rows. A graph runs the same product of all
    /// layers one after another, so that no weight is still in the cache when its turn comes again.
    fn kernels(&mut self, gpu: &Arc<Gpu>, threads: &ThreadPool) -> Result<()> {
        let (blocks, head) = (self.subject.loaded.model.blocks(), self.subject.loaded.model.head());
        let whole = |l: &&Linear| l.parts.len() == 1;
        let of = |i: usize| blocks.iter().map(|b| b[i]).filter(whole).map(|l| &l.parts[0].product).collect();
        let groups: [(&str, Vec<&Q4Linear>); 5] = [
            ("qkv", of(0)),
            ("o", of(1)),
            ("gate_up", of(2)),
            ("down", of(3)),
            ("lm_head", head.iter().flat_map(|l| &l.parts).map(|p| &p.product).collect()),
        ];
        // Many rows of every product after few: a processor that has drawn much power runs slower for a
        // while.
        for m in [1, 8, 16, 64, 512, 4096] {
            for (name, products) in &groups {
                if let Some(first) = products.first()
                    && m <= first.max_m()
                    && !(*name == "lm_head" && m > 512)
                {
                    let seconds = self.product(gpu, threads, products, m)?;
                    self.push_product(name, first, m, &seconds);
                }
            }
        }
        Ok(())
    }

    fn product(
        &self,
        gpu: &Arc<Gpu>,
        threads: &ThreadPool,
        products: &[&Q4Linear],
        m: usize,
    ) -> Result<Vec<f64>> {
        let (info, stream) = (products[0].info(), Stream::new(gpu)?);
        let (x_type, y_type) = products[0].types();
        let values: Vec<f32> = (0..m * info.k).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        let x = match x_type {
            DType::F32 => Buffer::of(gpu, &values)?,
            DType::F16 => {
                Buffer::of(gpu, &values.iter().map(|v| half::f16::from_f32(*v)).collect::<Vec<_>>())?
            }
            _ => Buffer::of(gpu, &values.iter().map(|v| half::bf16::from_f32(*v)).collect::<Vec<_>>())?,
        };
        let y = Buffer::new(gpu, m * info.n * y_type.size())?;
        let scratch = Buffer::new(gpu, products[0].workspace(m).max(256))?;
        let issue = || -> Result<()> {
            for p in products {
                let mut cx = ExecContext::on(gpu.device(), stream.raw(), threads);
                cx.workspace = Some(view_mut(&scratch, 0, DType::U8, &[scratch.len()])?);
                p.forward(
                    view(&x, 0, x_type, &[m, info.k])?,
                    view_mut(&y, 0, y_type, &[m, info.n])?,
                    &mut cx,
                )?;
            }
            Ok(())
        };
        issue()?; // loads what is loaded lazily
        stream.synchronize()?;
        let mut graph = stream.capture(issue)?;
        graph.launch(stream.raw())?;
        (0..self.repetitions.max(5))
            .map(|_| {
                let start = Event::record(gpu, stream.raw())?;
                graph.launch(stream.raw())?;
                let end = Event::record(gpu, stream.raw())?;
                Ok(start.seconds_until(&end)? / products.len() as f64)
            })
            .collect()
    }

    fn push_product(&mut self, name: &str, product: &Q4Linear, m: usize, seconds: &[f64]) {
        let info = product.info();
        let mut us: Vec<f64> = seconds.iter().map(|s| s * 1e6).collect();
        us.sort_by(f64::total_cmp);
        let macs = (m * info.n * info.k) as f64;
        let dense = if info.path == ExecPath::DequantMatmul { (info.n * info.k * 2) as u64 } else { 0 };
        let (x, y) = product.types();
        let bytes =
            info.resident_bytes.max(dense) as f64 + (m * (info.n * y.size() + info.k * x.size())) as f64;
        let floor = (macs / (self.roofline.gmac_s * 1e9)).max(bytes / (self.roofline.read_gb_s * 1e9)) * 1e6;
        let median = us[us.len() / 2];
        self.rows.push(Row {
            what: format!("{name} m={m}"),
            shape: format!("{}x{}", info.n, info.k),
            median,
            min: us[0],
            max: us[us.len() - 1],
            unit: "us",
            roofline: floor,
            fraction: floor / median,
        });
    }
}

fn text(b: &Body) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{}, {} activations, {} on {}; measured here: reads {:.0} GB/s, bf16 products {:.0} GMAC/s; loaded in {:.2} s",
        b.model, b.activations, b.dtype, b.device, b.read_gb_s, b.gmac_s, b.load_s
    );
    table(&b.results, &mut out);
    let m = &b.memory;
    let _ = writeln!(
        out,
        "device memory: {} by loading (packed {}, embeddings {}), {} by the context (KV {}); {} before",
        human(m.loaded_bytes),
        human(m.packed_bytes),
        human(m.embedding_bytes),
        human(m.context_bytes),
        human(m.kv_bytes),
        human(m.before_bytes)
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
