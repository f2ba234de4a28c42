//! The step under libtorch: it learns, its variants agree, and what it exports is what it trained.
#![cfg(feature = "torch")]
use q4_core::memory::Budget;
use q4_core::{
    Activations, BuiltinOptions, ComputePath, DType, Device, Dispatch, OpSet, Overrides, Policy, Registry,
    Result, ThreadPool,
};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::config::Qwen3Config;
use q4_model::executor::{Logits, Shape};
use q4_model::load::{ContextOptions, load};
use q4_model::plan::{ActivationRequest, Plan, PlanOptions};
use q4_trainer::optim::{Hyper, MasterFormat, ScaleChoice, StateFormat};
use q4_trainer::torch::TorchExecutor;
use q4_trainer::torch::engine::{ClipScope, Engine, Options, Rows};
use q4_trainer::torch::export::{self, Form, Side};
use q4_trainer::torch::kernels::Kernels;
use q4_trainer::torch::loss::Target;
use q4_trainer::torch::phases::Phases;
use q4_trainer::torch::weights::{Decay, Keep, Params, bytes};
use std::path::Path;
use std::sync::Arc;
use tch::Kind;
use {q4_dequant_matmul as _, q4_nvfp4_kernel as _, q4_reference as _};

const CONFIG: &str = r#"{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":64,"intermediate_size":96,
 "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":32,"vocab_size":96,
 "max_position_embeddings":128,"rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":TIED,
 "hidden_act":"silu","attention_bias":false,"torch_dtype":"bfloat16"}"#;

fn config(tied: bool) -> String {
    CONFIG.replace("TIED", &tied.to_string())
}

const KEEP: Keep = Keep {
    state: StateFormat::F32,
    master: MasterFormat::F32,
    lora: None,
    quantised: true,
    decay: Decay { linear: 0.0, norm: 0.0, table: 0.0 },
};
const OPTIONS: Options = Options {
    recompute: true,
    update_in_backward: false,
    clip: 1.0,
    clip_scope: ClipScope::Global,
    chunk: 7,
    keep_values: true,
};
const HYPER: Hyper =
    Hyper { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, step: 1, grad_scale: 1.0 };

fn engine(tied: bool, keep: Keep, options: Options) -> Result<Engine> {
    // Tests run side by side; threads of their own would only wait for each other.
    tch::set_num_threads(1);
    let config = Qwen3Config::parse(config(tied).as_bytes())?;
    let kernels = Kernels::new(tch::Device::Cpu, Arc::new(ThreadPool::new(2)), ScaleChoice::PowerOfTwo)?;
    let params = Params::random(&config, keep, 11, &kernels)?;
    engine_of(&config, params, kernels, options)
}

fn engine_of(c: &Qwen3Config, params: Params, kernels: Kernels, options: Options) -> Result<Engine> {
    let shape = Shape {
        hidden: c.hidden_size,
        heads: c.num_attention_heads,
        kv_heads: c.num_key_value_heads,
        head_dim: c.head_dim,
        intermediate: c.intermediate_size,
        vocab: c.vocab_size,
        layers: c.num_hidden_layers,
    };
    let ex = TorchExecutor::new(c, shape, tch::Device::Cpu, Activations::Native)?;
    Ok(Engine::new(params, kernels, ex, c.rms_norm_eps, options, 11))
}

/// Two rows of 24 tokens; the second holds two documents. Tokens follow a rule that has to be learnt by heart.
struct Data {
    ids: Vec<u32>,
    targets: Vec<i64>,
    positions: Vec<i64>,
    documents: Vec<i32>,
}

const SEQ: usize = 24;

fn data() -> Data {
    let ids: Vec<u32> = (0..2 * SEQ as u32).map(|i| (i * i * 7 + i * 13 + 5) % 96).collect();
    let mut targets: Vec<i64> = ids.iter().skip(1).map(|id| i64::from(*id)).chain([-100]).collect();
    targets[SEQ - 1] = -100;
    let second = SEQ + 10;
    let positions = (0..2 * SEQ).map(|i| if i >= second { i - second } else { i % SEQ } as i64).collect();
    let documents = (0..2 * SEQ).map(|i| i32::from(i >= second)).collect();
    Data { ids, targets, positions, documents }
}

impl Data {
    fn rows(&self) -> Rows<'_> {
        Rows {
            rows: 2,
            seq: SEQ,
            ids: &self.ids,
            positions: &self.positions,
            documents: Some(&self.documents),
            target: Target::Tokens(&self.targets),
        }
    }

    /// One row of the two, as a batch of its own.
    fn row(&self, i: usize) -> Rows<'_> {
        let at = i * SEQ..(i + 1) * SEQ;
        Rows {
            rows: 1,
            seq: SEQ,
            ids: &self.ids[at.clone()],
            positions: &self.positions[at.clone()],
            documents: Some(&self.documents[at.clone()]),
            target: Target::Tokens(&self.targets[at]),
        }
    }
}

fn train(engine: &mut Engine, rows: &[Rows<'_>], steps: u64) -> Result<Vec<f64>> {
    let mut phases = Phases::new(tch::Device::Cpu, None);
    (1..=steps)
        .map(|step| {
            let hyper = Hyper { step, ..HYPER };
            let report = engine.step(rows, &hyper, &mut |_, _| Ok(true), &mut phases)?;
            assert!(!report.skipped);
            Ok(report.loss)
        })
        .collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn masters(engine: &Engine) -> Result<Vec<Vec<u8>>> {
    engine.params.trained().map(|t| bytes(&t.master)).collect()
}

#[test]
fn one_batch_is_learnt_by_heart_in_every_format() -> Result<()> {
    let data = data();
    for (state, master) in [
        (StateFormat::F32, MasterFormat::F32),
        (StateFormat::Int8, MasterFormat::F32),
        (StateFormat::Int4, MasterFormat::Bf16),
        (StateFormat::Nvfp4, MasterFormat::Bf16),
    ] {
        let mut engine = engine(true, Keep { state, master, ..KEEP }, OPTIONS)?;
        let losses = train(&mut engine, &[data.rows()], 150)?;
        assert!(losses[0] > 4.0 && losses[0] < 5.2, "{state:?}: starts near ln 96, not at {}", losses[0]);
        let last = losses[losses.len() - 1];
        assert!(last < 0.01, "{state:?}, {master:?}: {last} after 150 steps");
    }
    Ok(())
}

#[test]
fn recomputing_a_block_gives_the_same_bits() -> Result<()> {
    let data = data();
    let mut bits = Vec::new();
    for (recompute, keep_values) in [(true, true), (false, true), (true, false)] {
        let mut engine = engine(true, KEEP, Options { recompute, keep_values, ..OPTIONS })?;
        train(&mut engine, &[data.rows()], 3)?;
        bits.push(masters(&engine)?);
    }
    assert!(bits[0] == bits[1], "recompute changes the gradient");
    assert!(bits[0] == bits[2], "keeping decoded weights changes the gradient");
    Ok(())
}

#[test]
fn updating_in_the_backward_pass_is_the_same_step() -> Result<()> {
    let data = data();
    for tied in [true, false] {
        let mut bits = Vec::new();
        for update_in_backward in [false, true] {
            let mut engine = engine(tied, KEEP, Options { update_in_backward, clip: 0.0, ..OPTIONS })?;
            train(&mut engine, &[data.rows()], 3)?;
            bits.push(masters(&engine)?);
        }
        assert!(bits[0] == bits[1], "tied: {tied}");
    }
    Ok(())
}

#[test]
fn micro_batches_weigh_by_their_tokens() -> Result<()> {
    let mut data = data();
    // The first row supervises four tokens only: a mean of means would give them too much weight.
    data.targets[4..SEQ].fill(-100);
    for update_in_backward in [false, true] {
        let options = Options { update_in_backward, clip: 0.0, ..OPTIONS };
        let (mut whole, mut parts) = (engine(true, KEEP, options)?, engine(true, KEEP, options)?);
        let a = train(&mut whole, &[data.rows()], 1)?;
        let b = train(&mut parts, &[data.row(0), data.row(1)], 1)?;
        assert!((a[0] - b[0]).abs() < 1e-6 * a[0], "{a:?} {b:?}");
        // Moments hold the gradients; the step itself is a sign at first.
        for (x, y) in whole.params.trained().zip(parts.params.trained()) {
            let m = |t: &tch::Tensor, len: usize| -> Result<Vec<f32>> { Ok(floats(&bytes(t)?[..len * 4])) };
            let (x, y) = (m(&x.state, x.layout.len())?, m(&y.state, y.layout.len())?);
            let largest = x.iter().fold(0f32, |a, v| a.max(v.abs()));
            let worst = x.iter().zip(&y).fold(0f32, |a, (x, y)| a.max((x - y).abs()));
            assert!(worst <= 1e-5 * largest, "{worst} of {largest}");
        }
    }
    Ok(())
}

#[test]
fn documents_of_a_row_do_not_see_each_other() -> Result<()> {
    let data = data();
    let mut engine = engine(true, KEEP, OPTIONS)?;
    let packed = engine.evaluate(&data.rows())?;
    let mut changed = Data { ids: data.ids.clone(), ..self::data() };
    // Another first document in the second row must not change the loss of the document behind it.
    let second = SEQ + 10;
    for t in &mut changed.targets[..second] {
        *t = -100;
    }
    let before = engine.evaluate(&changed.rows())?;
    for id in &mut changed.ids[SEQ..second] {
        *id = (*id + 17) % 96;
    }
    let after = engine.evaluate(&changed.rows())?;
    assert_eq!(before, after);
    assert!(packed.1 > before.1);
    Ok(())
}

#[test]
fn adapters_learn_and_leave_the_base_alone() -> Result<()> {
    let data = data();
    let keep = Keep { lora: Some((8, 16.0)), ..KEEP };
    let mut engine = engine(true, keep, OPTIONS)?;
    let (moving, all) = engine.params.counts();
    assert!(moving < all / 2);
    let losses = train(&mut engine, &[data.rows()], 120)?;
    // Embeddings, norms and head are random and stay so: there is only so much to gain.
    assert!(losses[119] < 0.8 * losses[0], "{} -> {}", losses[0], losses[119]);
    Ok(())
}

#[test]
fn the_scalar_loss_pulls_hidden_states() -> Result<()> {
    let data = data();
    let mut engine = engine(true, KEEP, OPTIONS)?;
    let wanted = tch::Tensor::ones([2 * SEQ as i64, 64], (Kind::Float, tch::Device::Cpu)) * 0.1;
    let rows = || Rows { target: Target::Hidden(&wanted), ..data.rows() };
    let losses = train(&mut engine, &[rows()], 60)?;
    assert!(losses[59] < 0.5 * losses[0], "{} -> {}", losses[0], losses[59]);
    Ok(())
}

#[test]
fn a_refused_step_moves_nothing() -> Result<()> {
    let data = data();
    for update_in_backward in [false, true] {
        let mut engine = engine(true, KEEP, Options { update_in_backward, ..OPTIONS })?;
        let before = masters(&engine)?;
        let mut phases = Phases::new(tch::Device::Cpu, None);
        let report = engine.step(&[data.rows()], &HYPER, &mut |_, _| Ok(false), &mut phases)?;
        assert!(report.skipped && before == masters(&engine)?);
    }
    Ok(())
}

/// Logits through the model crate: what `q4 logits` computes.
fn served(dir: &Path, ids: &[u32], backend: &str) -> Result<Vec<f32>> {
    let checkpoint = Checkpoint::open(dir, &OpenOptions::default())?;
    let overrides = Overrides { all: Some(backend.into()), ..Overrides::default() };
    let policy = Policy { compute: ComputePath::Auto, deny_downgrade: false, overrides };
    let dispatch = Dispatch::new(Registry::builtin(&BuiltinOptions::default())?, policy);
    let options = PlanOptions {
        activations: ActivationRequest::Native,
        dtype: DType::F32,
        device: Device::Cpu,
        quantize: None,
        max_rows: 64,
        ops: OpSet::FORWARD,
    };
    let plan = Plan::new(&checkpoint, &dispatch, &options)?;
    let threads = Arc::new(ThreadPool::new(2));
    let budget = Budget::of_machine();
    let loaded = load(&checkpoint, &plan, &dispatch, &options, threads, &budget, &mut |_, _| {})?;
    let sizes = ContextOptions { context: 64, chunk: 64, all_logits: true, kv: q4_model::cpu::KvType::F32 };
    let mut logits = Vec::new();
    loaded.runner(sizes, &budget)?.accept_all(ids, &mut |rows| logits.extend_from_slice(rows))?;
    Ok(logits)
}

#[test]
fn an_exported_model_gives_the_logits_of_the_training_forward() -> Result<()> {
    let data = data();
    let dir = tempfile::tempdir().map_err(|e| q4_core::Error::io(Path::new("tmp"), &e))?;
    for tied in [true, false] {
        let mut engine = engine(tied, KEEP, OPTIONS)?;
        train(&mut engine, &[data.rows()], 40)?;
        let ids = &data.ids[..SEQ];
        let mut cache = engine.executor().sequence()?;
        let own = engine.logits(ids, &mut cache, Logits::All)?;
        let own = floats(&bytes(&own)?);
        let side = Side::new(config(tied).as_bytes(), Vec::new())?;
        let mut first: Option<Vec<f32>> = None;
        for form in ["modelopt", "compressed-tensors", "bf16"] {
            let out = dir.path().join(format!("{form}-{tied}"));
            export::write(&engine.params, &engine.kernels, &side, &out, form.parse::<Form>()?)?;
            let backend = if form == "bf16" { "dequant-matmul" } else { "reference" };
            let served = served(&out, ids, backend)?;
            let largest = own.iter().fold(0f32, |a, v| a.max(v.abs()));
            let worst = own.iter().zip(&served).fold(0f32, |a, (x, y)| a.max((x - y).abs()));
            assert!(served.len() == own.len() && worst <= 1e-5 * largest, "{form}: {worst} of {largest}");
            // Layouts differ in bytes, not in values.
            if form != "bf16" {
                assert_eq!(first.get_or_insert_with(|| served.clone()), &served, "{form}");
            }
        }
    }
    Ok(())
}
