//! Adapters beside a base that stays packed: the gradients and the curve of training on its decoded values,
//! without their memory.
#![cfg(feature = "torch")]
use q4_core::detect::Layout;
use q4_core::oracle::{Units, bound};
use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, Code, DType, ExecContext, ExecPath, HostEnv, LinearSpec, OpSet,
    PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Registration, Reject, RejectCode, Result, ThreadPool,
    Verdict, inventory,
};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::executor::Executor;
use q4_model::export::{ExportPlan, export};
use q4_model::quantize::{Target, ToNf4};
use q4_trainer::config::{BaseForm, Config};
use q4_trainer::data::{LoadOptions, Loader, LoaderOptions};
use q4_trainer::optim::{Hyper, Share};
use q4_trainer::torch::engine::{Engine, Rows};
use q4_trainer::torch::executor::{LowRank, TorchLinear, Weight};
use q4_trainer::torch::loss;
use q4_trainer::torch::phases::Phases;
use q4_trainer::torch::products::Products;
use q4_trainer::torch::session::{self, Base};
use q4_trainer::torch::weights::{Source, bytes};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tch::{Device, Kind, Tensor};
use tiny::{STEPS, files, line, prepare, run, start, sums};

mod tiny;

/// Half a unit in the last place of f32.
const U: f64 = 1.0 / (1 << 24) as f64;

fn demo_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo")
}

fn demo() -> Result<Checkpoint> {
    Checkpoint::open(&demo_dir(), &OpenOptions::default())
}

/// A model with adapters, as a run would have it before its first step.
struct Start {
    config: Config,
    base: Base,
    products: Option<Products>,
    pool: Arc<ThreadPool>,
}

impl Start {
    fn new(model: &Path, sets: &[(&str, &str)]) -> Result<Self> {
        let mut all = vec![
            ("model.path".to_owned(), model.display().to_string()),
            ("data.train".to_owned(), "none.jsonl".to_owned()),
            ("data.rows".to_owned(), "2".to_owned()),
            ("data.seq".to_owned(), "32".to_owned()),
            ("lora.rank".to_owned(), "4".to_owned()),
        ];
        all.extend(sets.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
        let config = Config::parse("", &all)?;
        let base = Base::open(&config.model, &demo)?;
        let config = session::settled(&config, &base)?;
        session::device("cpu", 1)?;
        let pool = Arc::new(ThreadPool::new(2));
        let products = session::products(&config, &base, Device::Cpu, &pool)?;
        Ok(Self { config, base, products, pool })
    }

    fn engine(&self) -> Result<Engine> {
        let products = self.products.as_ref();
        session::engine(&self.config, &self.base, Device::Cpu, self.pool.clone(), products, Share::WHOLE)
    }

    fn checkpoint(&self) -> &Checkpoint {
        self.base.checkpoint.as_ref().expect("a checkpoint")
    }

    fn weight(&self, module: &str) -> Result<Weight> {
        let products = self.products.as_ref().expect("packed");
        Ok(Weight::Packed(products.prepare(self.checkpoint(), module)?.expect("a product")))
    }

    /// Losses of some steps over sums, and the seconds of all but the first.
    fn curve(&self, steps: u64) -> Result<(Vec<f64>, f64)> {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("sums.jsonl");
        std::fs::write(&file, sums(64)).expect("written");
        let (c, d) = (&self.config, &self.config.data);
        let options = LoadOptions {
            format: d.format,
            max_len: Some(d.seq + 1),
            truncate: d.truncate,
            supervise: d.supervise,
        };
        let data = self.base.language()?.load(&[file], &options, &self.pool)?;
        let options =
            LoaderOptions { rows: d.rows, seq: d.seq, packing: d.packing, seed: 0, shuffle: true, pad: 0 };
        let mut loader = Loader::new(&data, options)?;
        let (mut engine, mut phases) = (self.engine()?, Phases::new(Device::Cpu, None));
        let (mut losses, mut begun) = (Vec::new(), Instant::now());
        for step in 1..=steps {
            let b = loader.next_batch();
            let ids: Vec<u32> = b.ids.iter().map(|id| *id as u32).collect();
            let rows = Rows {
                rows: b.rows,
                seq: b.seq,
                ids: &ids,
                positions: &b.positions,
                documents: b.documents.iter().any(|d| *d != 0).then_some(&b.documents),
                target: loss::Target::Tokens(&b.targets),
            };
            let o = &c.optimizer;
            let (beta1, beta2, eps) = (o.beta1 as f32, o.beta2 as f32, o.eps as f32);
            let hyper = Hyper { lr: 1e-3, beta1, beta2, eps, weight_decay: 0.0, step, grad_scale: 1.0 };
            losses.push(engine.step(&[rows], &hyper, &mut |_, _| Ok(true), &mut phases)?.loss);
            if step == 1 {
                begun = Instant::now();
            }
        }
        Ok((losses, begun.elapsed().as_secs_f64() / (steps - 1).max(1) as f64))
    }
}

/// The demo model in NF4, made of its own values.
fn nf4(dir: &Path) -> Result<PathBuf> {
    let start = Start::new(&demo_dir(), &[("lora.base", "decoded")])?;
    let engine = start.engine()?;
    let dense = dir.join("dense");
    let (params, kernels, side) = (&engine.params, &engine.kernels, &start.base.side);
    let base = Some(start.checkpoint());
    q4_trainer::torch::export::write(params, kernels, side, base, &dense, "bf16".parse()?)?;
    let out = dir.join("nf4");
    let dense = Checkpoint::open(&dense, &OpenOptions::default())?;
    let plan = ExportPlan::new(Layout::Bitsandbytes, Target::Nf4(ToNf4 { block: 64, double: false }));
    export(&dense, &out, &plan, &start.pool, &mut |_| Ok(()))?;
    Ok(out)
}

fn both(dir: &Path) -> Result<[(&'static str, PathBuf); 2]> {
    Ok([("nvfp4", demo_dir()), ("nf4", nf4(dir)?)])
}

/// Numbers of a stream, f32.
fn noise(shape: [i64; 2], stream: u32) -> Tensor {
    let rng = q4_trainer::rng::Philox::new(3, 0, stream);
    let values: Vec<f32> = (0..(shape[0] * shape[1]) as u64).map(|i| rng.normal(i)).collect();
    Tensor::from_slice(&values).view(shape)
}

fn wide(t: &Tensor) -> Tensor {
    t.detach().to_kind(Kind::Double)
}

fn numbers(t: &Tensor) -> Vec<f64> {
    Vec::try_from(t.contiguous().view([-1])).expect("numbers")
}

/// Every product of the first layer against the exact one in f64, forward and backward, under the bound that
/// every backend is held to.
#[test]
fn a_product_and_its_gradient_are_exact_but_for_rounding() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    for (format, model) in both(dir.path())? {
        let start = Start::new(&model, &[])?;
        assert_eq!(start.config.lora.as_ref().map(|l| l.base), Some(BaseForm::Packed));
        for module in ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"] {
            let weight = start.weight(&format!("model.layers.0.{module}"))?;
            let Weight::Packed(parts) = &weight else { panic!("{module} is dense") };
            let [part] = parts.as_slice() else { panic!("{module}: {} products", parts.len()) };
            let info = part.linear().info();
            assert_eq!(info.path, ExecPath::FusedDequant, "{format}: {module}");
            let (n, k, m) = (info.n, info.k, 19i64);
            let x = noise([m, k as i64], 1).set_requires_grad(true);
            let r = noise([m, n as i64], 2);
            let y = weight.product(&x)?;
            let dx = Tensor::run_backward(&[(&y * &r).sum(Kind::Float)], &[&x], false, false).remove(0);
            let w = wide(&weight.decoded()?);
            let exact = [wide(&x).matmul(&w.tr()), wide(&r).matmul(&w)];
            let abs = [wide(&x).abs().matmul(&w.abs().tr()), wide(&r).abs().matmul(&w.abs())];
            let mut worst = 0f64;
            for ((got, chain), (exact, abs)) in [(y, k), (dx, n)].iter().zip(exact.iter().zip(&abs)) {
                for ((got, exact), abs) in numbers(&wide(got)).iter().zip(numbers(exact)).zip(numbers(abs)) {
                    let limit = bound(info.path, Units::Full, DType::F32, *chain, exact, abs);
                    assert!(
                        (got - exact).abs() <= limit,
                        "{format}: {module}: {got}, exact {exact} within {limit}"
                    );
                    worst = worst.max((got - exact).abs() / limit);
                }
            }
            println!("lora product {format} {module}: {worst:.3} of the bound");
        }
    }
    Ok(())
}

/// What `d` additions in f32 may differ by from `d` others of the same numbers, of the sum of their sizes.
fn sums_differ(d: i64) -> f64 {
    (d as f64 * 17.0 / 16.0 + 64.0) * U
}

/// Two layers with adapters and a linear loss, whose gradients are bilinear: what products may differ by
/// ([`bound`] for the kernel, a chain of k for libtorch) goes through the other factors, element by element.
///
/// With `E0` the difference of the first layer's outputs and `E1` that of the second's input gradients, and
/// |.| for absolute values: `|dA1 - dA1'| <= s (|r||B1|)^T E0`, `|dB1 - dB1'| <= s |r|^T E0 |A1|^T`,
/// `|dA0 - dA0'| <= s (E1 |B0|)^T |x|`, `|dB0 - dB0'| <= s E1^T |x| |A0|^T`, each and the rounding of its own
/// sum.
#[test]
fn gradients_of_adapters_are_those_on_decoded_values() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    for (format, model) in both(dir.path())? {
        let start = Start::new(&model, &[])?;
        let mut engine = start.engine()?;
        let (m, k, rank, s) = (19i64, 256i64, 4i64, 2.0);
        let weights = [0, 1].map(|l| start.weight(&format!("model.layers.{l}.self_attn.o_proj")));
        let [w0, w1] = weights;
        let weights = [w0?, w1?];
        let halves: Vec<Tensor> = (0..4u32)
            .map(|i| {
                let shape = if i % 2 == 0 { [rank, k] } else { [k, rank] };
                (noise(shape, 10 + i) * 0.05).detach().set_requires_grad(true)
            })
            .collect();
        let (x, r) = (noise([m, k], 1).set_requires_grad(true), noise([m, k], 2));
        let mut found = Vec::new();
        for packed in [true, false] {
            let mut at = x.shallow_clone();
            for (l, w) in weights.iter().enumerate() {
                let weight = if packed { w.share() } else { Weight::Dense(w.decoded()?) };
                let (a, b) = (halves[2 * l].shallow_clone(), halves[2 * l + 1].shallow_clone());
                let linear = TorchLinear { weight, adapter: Some(LowRank { a, b, scale: s }) };
                let mut out = Tensor::new();
                engine.executor().linear(&at, &linear, &mut out)?;
                at = out;
            }
            let inputs: Vec<&Tensor> = halves.iter().chain([&x]).collect();
            found.push(Tensor::run_backward(&[(&at * &r).sum(Kind::Float)], &inputs, false, false));
        }
        let size = |t: &Tensor| wide(t).abs();
        let (x, r) = (size(&x), size(&r));
        let [a0, b0, a1, b1] = [0, 1, 2, 3].map(|i| size(&halves[i]));
        let [w0, w1] = [size(&weights[0].decoded()?), size(&weights[1].decoded()?)];
        // Sizes of the first layer's outputs and the second's input gradients, and what those may differ by.
        let y0 = x.matmul(&w0.tr()) + x.matmul(&a0.tr()).matmul(&b0.tr()) * s;
        let d1 = r.matmul(&w1) + r.matmul(&b1).matmul(&a1) * s;
        let d0 = d1.matmul(&w0) + d1.matmul(&b0).matmul(&a0) * s;
        let (e0, e1) = (&y0 * sums_differ(k), &d1 * sums_differ(k));
        let own = 2.0 * sums_differ(k + m + rank);
        let limits = [
            (&e1 + &d1 * own).matmul(&b0).tr().matmul(&x) * s,
            (&e1 + &d1 * own).tr().matmul(&x.matmul(&a0.tr())) * s,
            r.matmul(&b1).tr().matmul(&(&e0 + &y0 * own)) * s,
            r.tr().matmul(&(&e0 + &y0 * own).matmul(&a1.tr())) * s,
            e1.matmul(&w0) + e1.matmul(&b0).matmul(&a0) * s + d0 * own,
        ];
        let mut worst = 0f64;
        let mut differ = 0;
        for (i, name) in ["A0", "B0", "A1", "B1", "x"].iter().enumerate() {
            let (p, d) = (numbers(&wide(&found[0][i])), numbers(&wide(&found[1][i])));
            for ((p, d), limit) in p.iter().zip(&d).zip(numbers(&limits[i])) {
                assert!((p - d).abs() <= limit, "{format}: d{name}: {p} and {d} within {limit}");
                worst = worst.max((p - d).abs() / limit);
                differ += usize::from(p != d);
            }
            // Sums of sizes are far above sums; the bound is still below the gradients themselves.
            let largest = numbers(&limits[i]).into_iter().fold(0.0, f64::max);
            assert!(largest < 0.2 * p.iter().fold(0f64, |a, v| a.max(v.abs())), "d{name}: {largest}");
        }
        assert!(differ > 0, "two orders of addition gave the same bits: nothing was compared");
        println!("lora gradients {format}: {worst:.4} of the bound, {differ} elements differ");
    }
    Ok(())
}

/// Rounding is what training on decoded values differs by from products that are exact: the reference
/// backend's, on the same packed weights. The kernels' curve may differ from the decoded one by no more than
/// sixteen times that at its largest, and by no more than the first-order bound: in each step every product
/// of the forward pass by `sums_differ(k)` of the loss, and as much for the backward pass. Q4_LORA_STEPS says
/// how many steps.
#[test]
fn the_curve_is_that_of_training_on_decoded_values() -> Result<()> {
    let steps = std::env::var("Q4_LORA_STEPS").map_or(6, |v| v.parse().expect("a number"));
    let dir = tempfile::tempdir().expect("a folder");
    let mut decoded_curves = Vec::new();
    for (format, model) in both(dir.path())? {
        let (packed, seconds) = Start::new(&model, &[])?.curve(steps)?;
        let (decoded, dense_seconds) = Start::new(&model, &[("lora.base", "decoded")])?.curve(steps)?;
        let (exact, _) = Start::new(&model, &[("quant.backend", "reference")])?.curve(steps.min(6))?;
        let differ = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        let (products, widest) = (4 * 6, 768);
        let limit = 2.0 * steps as f64 * f64::from(products) * sums_differ(widest) * decoded[0];
        let (found, rounding) = (differ(&packed, &decoded), differ(&exact, &decoded));
        println!(
            "lora curve {format}: {steps} steps, loss {:.6} -> {:.6}, largest difference {found:.3e}, bound {limit:.3e}, \
             exact products differ by {rounding:.3e}; seconds a step packed {seconds:.4} decoded {dense_seconds:.4}",
            packed[0],
            packed[packed.len() - 1]
        );
        assert!(packed[packed.len() - 1] < packed[0], "nothing was learnt: {packed:?}");
        assert!(found <= limit, "{format}: {found} above {limit}");
        let first = differ(&packed[..exact.len()], &decoded[..exact.len()]);
        assert!(first <= 16.0 * rounding.max(decoded[0] * U), "{format}: {first}, rounding {rounding}");
        decoded_curves.push((decoded, limit));
    }
    // Other weights are seen: the same model in another format is outside of the bound.
    let [(a, limit), (b, _)] = decoded_curves.as_slice() else { panic!("two formats") };
    assert!(a.iter().zip(b).any(|(a, b)| (a - b).abs() > *limit), "{a:?} {b:?}");
    Ok(())
}

/// Inputs in NVFP4: the backend rounds them, the gradient passes straight through.
#[test]
fn rounded_inputs_pass_the_gradient_straight_through() -> Result<()> {
    let start = Start::new(&demo_dir(), &[("quant.activations", "nvfp4")])?;
    let weight = start.weight("model.layers.0.self_attn.o_proj")?;
    let x = noise([19, 256], 1).set_requires_grad(true);
    let r = noise([19, 256], 2);
    let y = weight.product(&x)?;
    let dx = Tensor::run_backward(&[(&y * &r).sum(Kind::Float)], &[&x], false, false).remove(0);
    let w = wide(&weight.decoded()?);
    let close =
        |a: &Tensor, b: &Tensor| f64::try_from((a - b).abs().max() / b.abs().max()).expect("a number");
    assert!(close(&wide(&dx), &wide(&r).matmul(&w)) < 1e-5);
    let rounded = close(&wide(&y), &wide(&x).matmul(&w.tr()));
    assert!(rounded > 1e-3, "inputs were not rounded: {rounded}");
    // NF4 has no such product, which is said before anything is trained.
    let dir = tempfile::tempdir().expect("a folder");
    let e = Start::new(&nf4(dir.path())?, &[("quant.activations", "nvfp4")]).err().expect("refused");
    assert!(e.to_string().contains("activations-unsupported"), "{e}");
    Ok(())
}

#[test]
fn the_base_takes_its_packed_size_and_no_gradient() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    for (format, model) in both(dir.path())? {
        let start = Start::new(&model, &[])?;
        let engine = start.engine()?;
        let linears: usize =
            engine.linears().map(|i| engine.params.all[i].shape.iter().product::<usize>()).sum();
        // Codes and scales: E4M3 of 16 elements, f32 of 64.
        let stored = linears / 2 + linears / 16;
        let kept = engine.params.base_bytes();
        let dense = Start::new(&model, &[("lora.base", "decoded")])?.engine()?.params.base_bytes();
        println!("lora base {format}: {kept} bytes packed, {stored} stored, {dense} decoded");
        assert_eq!(dense, 4 * linears as u64);
        let planned = start.products.as_ref().expect("packed").resident();
        assert!(kept.abs_diff(planned) as f64 <= 0.02 * kept as f64, "{kept} of {planned} planned");
        assert!(kept >= stored as u64 && kept as f64 <= 1.02 * stored as f64, "{kept} of {stored}");
        let moving: usize = engine.params.trained().map(|t| t.master.numel()).sum();
        assert_eq!(engine.params.counts().0, moving);
        assert!(engine.params.all.iter().all(|p| match &p.source {
            Source::Frozen(Weight::Packed(_), adapter) => adapter.is_some(),
            Source::Fixed(_) => true,
            _ => false,
        }));
    }
    Ok(())
}

inventory::submit! {
    Registration { name: FORWARD_ONLY, construct: forward_only }
}
const FORWARD_ONLY: &str = "forward-only";

fn forward_only(_: &BuiltinOptions, _: &HostEnv) -> std::result::Result<Built, Vec<Reject>> {
    Ok(Built::new(Arc::new(ForwardOnly(BackendDescriptor {
        name: FORWARD_ONLY.into(),
        version: "1".into(),
        vendor: "a test".into(),
        priority: -200,
        offers: vec![("nvfp4".into(), ExecPath::FusedDequant)],
    }))))
}

/// A backend as inference needs it, without gradients.
struct ForwardOnly(BackendDescriptor);

impl Q4Backend for ForwardOnly {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.0
    }
    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        Vec::new()
    }
    fn can_prepare(&self, spec: &LinearSpec, _: ExecPath, _: &HostEnv) -> Verdict {
        match spec.ops.contains(OpSet::BACKWARD_INPUT) {
            true => Err(vec![Reject::new(RejectCode::OpUnsupported, "forward alone", "backward_input too")]),
            false => Ok(()),
        }
    }
    fn prepare(
        &self,
        _: &Q4Weight<'_>,
        _: &LinearSpec,
        _: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        Err(q4_core::Error::new(Code::Internal, "it is never chosen"))
    }
}

#[test]
fn what_nobody_may_multiply_is_refused_before_the_first_step() {
    let refused = |sets: &[(&str, &str)]| Start::new(&demo_dir(), sets).err().expect("refused");
    let e = refused(&[("quant.backend", FORWARD_ONLY), ("quant.compute", "kernel-only")]);
    let text = e.to_string();
    assert_eq!(e.code(), Code::NoneEligible, "{text}");
    for word in ["training on a packed base", "forward-only", "op-unsupported", "backward_input too"] {
        assert!(text.contains(word), "{word} is missing in {text}");
    }
    let e = refused(&[("quant.backend", "nf4-kernel")]);
    assert!(e.to_string().contains("schema-unsupported"), "{e}");
    let e = refused(&[("quant.backend", "nobody")]);
    assert_eq!(e.code(), Code::UnknownBackend, "{e}");
    let e = refused(&[("quant.backend", "reference"), ("quant.compute", "kernel-only")]);
    assert!(e.to_string().contains("path-not-admitted"), "{e}");
    let e = refused(&[("quant.backend", "reference"), ("lora.base", "merged")]);
    assert!(e.to_string().contains("lora.base = \"merged\""), "{e}");
    let e = refused(&[("lora.base", "packed"), ("model.init", "random")]);
    assert!(e.to_string().contains("random weights"), "{e}");
}

/// Inputs would have to change places, and their gradients back: it is refused, with what takes such a base.
#[test]
fn act_order_is_refused_as_a_packed_base() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/golden/qwen3_tiny_a/gptq");
    let mut file = std::fs::read(from.join("model.safetensors")).expect("read");
    let start = 8 + u64::from_le_bytes(*file.first_chunk().expect("a length")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..start]).expect("JSON");
    let offsets = &header["model.layers.1.mlp.down_proj.g_idx"]["data_offsets"];
    let [first, end] = [0, 1].map(|i| start + offsets[i].as_u64().expect("an offset") as usize);
    file[first..end].rotate_left(4 * 8);
    std::fs::write(dir.path().join("model.safetensors"), file).expect("written");
    let config = std::fs::read_to_string(from.join("config.json")).expect("read");
    let config = config.replace("\"desc_act\": false", "\"desc_act\": true");
    std::fs::write(dir.path().join("config.json"), config).expect("written");

    let e = Start::new(dir.path(), &[]).err().expect("refused");
    assert_eq!(e.code(), Code::Unsupported, "{e}");
    let text = e.to_string();
    for word in ["model.layers.1.mlp.down_proj", "act-order", "lora.base = \"decoded\""] {
        assert!(text.contains(word), "{word} is missing in {text}");
    }
    assert!(Start::new(dir.path(), &[("lora.base", "decoded")])?.products.is_none());
    Ok(())
}

/// Adapters for the demo model, in a folder of its own.
fn demo_run(dir: &Path) {
    prepare(dir);
    let toml = format!(
        "[model]\npath = \"demo\"\n[data]\ntrain = [\"data.jsonl\"]\nvalid = [\"data.jsonl\"]\nseq = 48\nrows = 2\n\
         [train]\nsteps = {STEPS}\naccumulate = 2\nprofile = [1]\n[optimizer]\nlr = 1e-3\n[lora]\nrank = 4\n\
         [checkpoint]\ndir = \"ck\"\nevery = 4\nkeep = 20\n"
    );
    std::fs::write(dir.join("run.toml"), toml).expect("written");
}

#[test]
fn a_run_that_stopped_goes_on_to_the_same_bytes() {
    let dirs = [tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b")];
    let [a, b] = [dirs[0].path(), dirs[1].path()];
    demo_run(a);
    demo_run(b);
    assert!(start(a, &["--set", "train.recompute=true"]).wait().expect("ends").success());
    assert!(
        start(b, &["--set", "train.steps=4", "--set", "schedule.kind=constant"])
            .wait()
            .expect("ends")
            .success()
    );
    assert!(start(b, &["--resume"]).wait().expect("ends").success());
    // Another schedule before the stop is another run: the comparison can fail.
    let last = format!("ck/step-{STEPS:09}");
    assert!(files(&a.join(&last)) != files(&b.join(&last)));
    std::fs::remove_dir_all(b.join("ck")).expect("removed");
    let mut child = start(b, &[]);
    while !b.join("ck/step-000000004").exists() {
        assert!(child.try_wait().expect("asked").is_none(), "ended before it could be killed");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    child.kill().expect("killed");
    child.wait().expect("reaped");
    assert!(start(b, &["--resume"]).wait().expect("ends").success());
    let (whole, parts) = (files(&a.join(&last)), files(&b.join(&last)));
    for ((name, x), (_, y)) in whole.iter().zip(&parts) {
        // How blocks are computed is of the configuration, not of the result.
        assert!(
            x == y || name.ends_with("state.json") || name.ends_with("manifest.json"),
            "{}",
            name.display()
        );
    }
}

#[test]
fn the_report_says_what_the_base_is_and_adapters_are_exported_alone() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    demo_run(dir.path());
    let out = run(dir.path(), &["--json", "--set", "export.dir=out", "--backend", "nvfp4-kernel"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("base packed: 24 products by nvfp4-kernel (fused-dequant, native)"), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).expect("a document");
    let packed = report["base_bytes"].as_u64().expect("bytes");
    assert_eq!(report["base"], "packed");
    assert!(
        report["phases"].as_array().expect("phases").iter().all(|p| p["base_bytes"] == packed),
        "{report}"
    );
    assert_eq!(report["executed"][0]["backend"], "nvfp4-kernel");
    // Four products a layer, six layers, two micro-batches: forward and, but for the first input, backward.
    assert!(report["executed"][0]["calls"].as_u64() >= Some(2 * 24 * 2 * STEPS), "{report}");
    // What was exported is what was trained.
    let adapters = std::fs::read(dir.path().join("out/peft/adapter_model.safetensors")).expect("adapters");
    let adapters = safetensors::SafeTensors::deserialize(&adapters).expect("safetensors");
    assert_eq!(adapters.len(), 6 * 7 * 2);
    let config = std::fs::read(dir.path().join("out/peft/adapter_config.json")).expect("a configuration");
    let config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(4), Some(32.0)));
    assert_eq!(config["target_modules"].as_array().map(Vec::len), Some(7));
    let masters = std::fs::read(dir.path().join(format!("ck/step-{STEPS:09}/masters.bin"))).expect("masters");
    let name =
        |module: &str, half: &str| format!("base_model.model.model.layers.0.{module}.lora_{half}.weight");
    let tensor =
        |module: &str, half: &str| adapters.tensor(&name(module, half)).expect("a tensor").data().to_vec();
    let a = tensor("self_attn.q_proj", "A");
    assert_eq!((&a, &a), (&tensor("self_attn.k_proj", "A"), &masters[..a.len()].to_vec()));
    let b: Vec<u8> =
        ["q", "k", "v"].iter().flat_map(|m| tensor(&format!("self_attn.{m}_proj"), "B")).collect();
    assert!(b == masters[a.len()..][..b.len()] && b.iter().any(|b| *b != 0));
    // A merge is had where it is asked for, and says what it is.
    let merged = ["--set", "train.steps=1", "--set", "checkpoint.dir=ck2", "--set", "export.dir=merged"];
    let merged = run(dir.path(), &[&merged[..], &["--set", "export.layouts=[\"bf16\"]"]].concat());
    let said = String::from_utf8_lossy(&merged.stderr);
    assert!(merged.status.success() && said.contains("a merge rounds anew"), "{said}");
    assert!(Checkpoint::open(&dir.path().join("merged/bf16"), &OpenOptions::default()).is_ok());
    Ok(())
}

#[test]
fn words_that_mean_nothing_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    demo_run(dir.path());
    let refused = |words: &[&str], said: &str| {
        let out = line(dir.path(), &[&["run.toml", "--threads", "1"], words].concat());
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && text.contains(said), "{words:?}: {text}");
        assert!(!dir.path().join("ck").exists(), "{words:?} left a folder");
    };
    refused(&["--compute", "fast"], "quant.compute");
    refused(&["--backend", "reference", "--set", "lora.base=decoded"], "lora.base = \"decoded\"");
    refused(&["--backend", "a", "--backend", "b"], "two backends for all layers");
    refused(&["--backend", "dequant-matmul", "--compute", "kernel-only"], "path-not-admitted");
    refused(&["--set", "export.layouts=[\"peft\"]", "--set", "lora.base=merged"], "export.layouts");
}

/// Merging the adapters decodes; nothing of the parameters is lost by it.
#[test]
fn a_merge_is_base_and_adapter() -> Result<()> {
    let start = Start::new(&demo_dir(), &[("export.layouts", "[\"bf16\"]")])?;
    let engine = start.engine()?;
    let index = engine.linears().next().expect("a product");
    let Source::Frozen(weight, Some(adapter)) = &engine.params.all[index].source else {
        panic!("not frozen")
    };
    let _ = adapter.b.master.shallow_clone().fill_(0.5);
    let want = weight.decoded()? + adapter.b.master.matmul(&adapter.a.master) * adapter.scale;
    let got = engine.params.value(index, &engine.kernels)?;
    assert_eq!(bytes(&want)?, bytes(&got)?);
    Ok(())
}
