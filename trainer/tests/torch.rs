//! The step under libtorch: it learns, its variants agree, and what it exports is what it trained.
#![cfg(feature = "torch")]
use q4_core::memory::Budget;
use q4_core::{
    Activations, BuiltinOptions, DType, Device, Dispatch, OpSet, Overrides, Policy, Registry, Result,
    ThreadPool,
};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::config::DecoderConfig;
use q4_model::executor::{Logits, Shape};
use q4_model::load::{ContextOptions, load};
use q4_model::plan::{ActivationRequest, Plan, PlanOptions};
use q4_trainer::optim::{Hyper, MasterFormat, ScaleChoice, Share, StateFormat};
use q4_trainer::torch::TorchExecutor;
use q4_trainer::torch::engine::{ClipScope, Engine, Options, Rows};
use q4_trainer::torch::export::{self, Form, Side};
use q4_trainer::torch::kernels::Kernels;
use q4_trainer::torch::loss::Target;
use q4_trainer::torch::phases::Phases;
use q4_trainer::torch::weights::{Decay, Keep, Params, bytes};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Once};
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
    share: Share::WHOLE,
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
    let config = DecoderConfig::parse(config(tied).as_bytes())?;
    let kernels = Kernels::new(tch::Device::Cpu, Arc::new(ThreadPool::new(2)), ScaleChoice::PowerOfTwo)?;
    let params = Params::random(&config, keep, 11, &kernels)?;
    engine_of(&config, params, kernels, options)
}

fn engine_of(c: &DecoderConfig, params: Params, kernels: Kernels, options: Options) -> Result<Engine> {
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

/// Two rows of 24 tokens; the second holds two documents. Tokens follow a rule that has to be learnt by
/// heart.
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
        same_gradients(&whole, &parts)?;
    }
    Ok(())
}

/// Moments hold the gradients; the step itself is a sign at first. The bound is that of sums in another order.
fn same_gradients(a: &Engine, b: &Engine) -> Result<()> {
    for (x, y) in a.params.trained().zip(b.params.trained()) {
        let m = |t: &tch::Tensor, len: usize| -> Result<Vec<f32>> { Ok(floats(&bytes(t)?[..len * 4])) };
        let (x, y) = (m(&x.state, x.layout.len())?, m(&y.state, y.layout.len())?);
        let largest = x.iter().fold(0f32, |a, v| a.max(v.abs()));
        let worst = x.iter().zip(&y).fold(0f32, |a, (x, y)| a.max((x - y).abs()));
        assert!(worst <= 1e-5 * largest, "{worst} of {largest}");
    }
    Ok(())
}

/// Documents that share rows, each in a row of its own with padding behind, and each as a micro-batch: one
/// gradient.
#[test]
fn packed_rows_have_the_gradient_of_unpacked_ones() -> Result<()> {
    let lens = [24, 10, 14, 3, 17, 4];
    let documents: Vec<(Vec<u32>, Vec<i64>)> = lens
        .iter()
        .enumerate()
        .map(|(d, n)| {
            let ids: Vec<u32> =
                (0..*n as u32 + 1).map(|i| (i * i * 7 + i * 13 + 5 * d as u32) % 96).collect();
            // The first tokens of each are read and not learnt.
            let targets =
                ids[1..].iter().enumerate().map(|(i, id)| if i < 2 { -100 } else { i64::from(*id) });
            (ids[..*n].to_vec(), targets.collect())
        })
        .collect();
    // Rows of documents, each cut off or filled to `seq` positions.
    let laid = |rows: &[&[usize]], seq: usize| -> Data {
        let mut data = Data { ids: vec![], targets: vec![], positions: vec![], documents: vec![] };
        for row in rows {
            for (number, d) in row.iter().enumerate() {
                let (ids, targets) = &documents[*d];
                data.ids.extend(ids);
                data.targets.extend(targets);
                data.positions.extend(0..ids.len() as i64);
                data.documents.extend(ids.iter().map(|_| number as i32));
            }
            let end = data.ids.len().next_multiple_of(seq);
            data.ids.resize(end, 0);
            data.targets.resize(end, -100);
            data.positions.resize(end, 0);
            data.documents.resize(end, -1);
        }
        data
    };
    let batch = |data: &Data, seq: usize| -> Result<Engine> {
        let mut engine = engine(true, KEEP, Options { clip: 0.0, ..OPTIONS })?;
        let rows = Rows { rows: data.ids.len() / seq, seq, ..data.rows() };
        train(&mut engine, &[rows], 1)?;
        Ok(engine)
    };
    let packed = batch(&laid(&[&[0], &[1, 2], &[3, 4, 5]], SEQ), SEQ)?;
    let alone = laid(&[&[0], &[1], &[2], &[3], &[4], &[5]], SEQ);
    same_gradients(&packed, &batch(&alone, SEQ)?)?;
    let far = 4 * SEQ;
    same_gradients(&packed, &batch(&laid(&[&[0], &[1], &[2], &[3], &[4], &[5]], far), far)?)?;
    // Without any packing or padding: plain causal rows of one document, whose sum is the gradient.
    let rows: Vec<Data> = (0..lens.len()).map(|d| laid(&[&[d]], lens[d])).collect();
    let plain: Vec<Rows<'_>> =
        rows.iter().zip(lens).map(|(r, n)| Rows { rows: 1, seq: n, documents: None, ..r.rows() }).collect();
    let mut each = engine(true, KEEP, Options { clip: 0.0, ..OPTIONS })?;
    train(&mut each, &plain, 1)?;
    same_gradients(&packed, &each)?;
    // The comparison can fail: documents in another row, seen by the one before.
    let mut mixed = laid(&[&[0], &[1, 2], &[3, 4, 5]], SEQ);
    mixed.documents.iter_mut().for_each(|d| *d = (*d).min(0));
    let mixed = batch(&mixed, SEQ)?;
    assert!(
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| same_gradients(&packed, &mixed))).is_err()
    );
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

/// `q4`, which is built here where it is not there yet: no test before needs it.
fn q4() -> Command {
    let q4 = Path::new(env!("CARGO_BIN_EXE_q4-train")).with_file_name("q4");
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        if !q4.exists() {
            let release = !cfg!(debug_assertions);
            let profile = release.then_some("--release");
            let args = ["build", "--locked", "-p", "q4"].into_iter().chain(profile);
            assert!(Command::new(env!("CARGO")).args(args).status().expect("cargo").success());
        }
    });
    let mut command = Command::new(q4);
    command.args(["--device", "cpu", "--threads", "2", "--quiet"]);
    command
}

/// Logits through `q4 logits`.
fn by_program(dir: &Path, ids: &[u32], out: &Path) -> Vec<f32> {
    let ids = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let status = q4()
        .args(["--backend", "reference", "--activations", "native", "--dtype", "float32", "logits"])
        .arg(dir)
        .args(["--ids", &ids, "--out"])
        .arg(out)
        .status();
    assert!(status.expect("q4").success());
    let file = std::fs::read(out).expect("logits");
    let tensors = safetensors::SafeTensors::deserialize(&file).expect("safetensors");
    floats(tensors.tensor("logits").expect("logits").data())
}

/// `q4 eval` on the rows that a run judges by says what the run says.
#[test]
fn q4_eval_gives_the_loss_of_training_on_the_same_rows() {
    let dir = tempfile::tempdir().expect("directory");
    let at = |name: &str| dir.path().join(name);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo");
    let rows = [
        ("Who are you?", "I am the q4 demo model, made of four-bit numbers."),
        ("Count to six.", "one, two, three, four, five, six."),
        ("What is this, and why does it go on for longer than a row of the data may have?", "It is cut."),
        ("Hi", "Hello! What a day, and what a long answer this is, longer than a row."),
    ];
    let line = |(a, b)| serde_json::json!({ "prompt": a, "completion": b }).to_string();
    std::fs::write(at("valid.jsonl"), rows.map(line).join("\n")).expect("written");
    std::fs::write(at("run.toml"), format!("[model]\npath = {:?}\n", demo.display().to_string()))
        .expect("written");
    let number = |command: &mut Command, field: &str| -> f64 {
        let out = command.output().expect("started");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).expect("a report");
        report[field].as_f64().unwrap_or_else(|| panic!("{field} of {report}"))
    };
    for supervise in ["response", "all"] {
        let mut train = Command::new(env!("CARGO_BIN_EXE_q4-train"));
        train.arg(at("run.toml")).args(["--eval-only", "--json", "--quiet", "--device", "cpu"]);
        for set in ["data.valid=valid.jsonl", "data.seq=32", "data.rows=2"] {
            train.args(["--set", set]);
        }
        train.args(["--set", &format!("data.eval_supervise={supervise}")]).current_dir(&dir);
        let want = number(&mut train, "valid_loss");
        let mut eval = q4();
        eval.args(["--json", "--activations", "native", "--kv-cache", "float32", "eval"]).arg(&demo);
        eval.args(["--window", "32", "--supervise", supervise, "--rows"]).arg(at("valid.jsonl"));
        let loss = number(&mut eval, "loss");
        assert!((loss - want).abs() < 1e-5, "{supervise}: {loss}, in training {want}");
        println!("{supervise}: {want} in training, {:.1e} apart", (loss - want).abs());
    }
}

/// Logits through the model crate: what `q4 logits` computes.
fn served(dir: &Path, ids: &[u32], backend: &str) -> Result<Vec<f32>> {
    let checkpoint = Checkpoint::open(dir, &OpenOptions::default())?;
    let overrides = Overrides { all: Some(backend.into()), ..Overrides::default() };
    let policy = Policy { overrides, ..Policy::default() };
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
    let sizes = ContextOptions {
        context: 64,
        chunk: 64,
        all_logits: true,
        kv: q4_model::cpu::KvType::F32,
        many: None,
    };
    let mut logits = Vec::new();
    loaded.runner(sizes, &budget)?.accept_all(ids, &mut |rows| logits.extend_from_slice(rows))?;
    Ok(logits)
}

#[test]
fn an_exported_model_gives_the_logits_of_the_training_forward() -> Result<()> {
    let data = data();
    let dir = tempfile::tempdir().map_err(|e| q4_core::Error::io(Path::new("tmp"), &e))?;
    let mut error = 0f32;
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
            export::write(&engine.params, &engine.kernels, &side, None, &out, form.parse::<Form>()?)?;
            let backend = if form == "bf16" { "dequant-matmul" } else { "reference" };
            let served = served(&out, ids, backend)?;
            if form == "modelopt" {
                assert_eq!(served, by_program(&out, ids, &dir.path().join(format!("{tied}.safetensors"))));
            }
            let largest = own.iter().fold(0f32, |a, v| a.max(v.abs()));
            let worst = own.iter().zip(&served).fold(0f32, |a, (x, y)| a.max((x - y).abs()));
            assert!(served.len() == own.len() && worst <= 1e-5 * largest, "{form}: {worst} of {largest}");
            error = error.max(worst / largest);
            // Layouts differ in bytes, not in values.
            if form != "bf16" {
                assert_eq!(first.get_or_insert_with(|| served.clone()), &served, "{form}");
            }
        }
    }
    println!("exported logits: {error:.2e} of the largest");
    Ok(())
}

/// Entries of a `.dat` file: type code, extents and data by name.
fn entries(path: &Path) -> BTreeMap<String, (u64, Vec<u64>, Vec<u8>)> {
    let file = std::fs::read(path).expect("a file");
    let mut rest = &file[..];
    fn number(rest: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = rest[0];
            *rest = &rest[1..];
            value |= u64::from(byte & 127) << shift;
            shift += 7;
            if byte < 128 {
                return value;
            }
        }
    }
    fn take<'a>(rest: &mut &'a [u8], n: u64) -> &'a [u8] {
        let (head, tail) = rest.split_at(n as usize);
        *rest = tail;
        head
    }
    let count = number(&mut rest);
    let mut found = BTreeMap::new();
    for _ in 0..count {
        let len = number(&mut rest);
        let name = String::from_utf8(take(&mut rest, len).to_vec()).expect("a name");
        let code = number(&mut rest);
        let shape: Vec<u64> = (0..number(&mut rest)).map(|_| number(&mut rest)).collect();
        let size = match code {
            0 | 1 | 101 => 1,
            5 | 15 => 2,
            6 => 4,
            other => panic!("{name}: type {other}"),
        };
        let data = take(&mut rest, size * shape.iter().product::<u64>()).to_vec();
        assert!(found.insert(name, (code, shape, data)).is_none());
    }
    assert!(rest.is_empty());
    found
}

#[test]
fn a_dat_file_has_everything_trained_and_keeps_the_rest_to_the_byte() -> Result<()> {
    let dir = tempfile::tempdir().map_err(|e| q4_core::Error::io(Path::new("tmp"), &e))?;
    let side = Side::new(config(false).as_bytes(), Vec::new())?;
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("config.json"), config(false)).expect("written");
    let dat = |engine: &Engine, base: Option<&Checkpoint>, name: &str| -> Result<_> {
        export::write(&engine.params, &engine.kernels, &side, base, &path(name), "dat".parse()?)?;
        Ok(entries(&path(name)))
    };
    let data = data();
    // Everything moves: every tensor of the file does.
    let mut engine = engine(false, KEEP, OPTIONS)?;
    let before = dat(&engine, None, "before.dat")?;
    train(&mut engine, &[data.rows()], 20)?;
    let after = dat(&engine, None, "after.dat")?;
    assert!(before.keys().eq(after.keys()));
    for (name, entry) in &before {
        let scalar = entry.1.iter().product::<u64>() == 1;
        assert!(scalar || entry != &after[name], "{name} was trained and is as it was");
    }
    // And says what was trained, once it is read again.
    let checkpoint = Checkpoint::open(&path("after.dat"), &OpenOptions::default())?;
    let again = Params::load(&checkpoint, KEEP, 11, &engine.kernels)?;
    for i in (0..again.all.len()).filter(|i| *i != again.head()) {
        let (want, have) = (engine.params.value(i, &engine.kernels)?, again.value(i, &engine.kernels)?);
        assert_eq!(bytes(&want)?, bytes(&have)?, "parameter {i}");
    }
    // A stranger's file: norms in f32, and an entry no model has.
    let mut strange = after.clone();
    for (name, (code, _, data)) in &mut strange {
        if name.contains("norm") {
            let wide = data.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32() + 1e-5);
            (*code, *data) = (6, wide.flat_map(f32::to_le_bytes).collect());
        }
    }
    strange.insert("rotary.inv_freq".into(), (6, vec![3], vec![1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9, 0]));
    let mut file = vec![strange.len() as u8];
    for (name, (code, shape, data)) in &strange {
        file.extend([name.len() as u8]);
        file.extend(name.as_bytes());
        file.extend([*code as u8, shape.len() as u8]);
        for extent in shape {
            let low = (*extent % 128) as u8;
            file.extend(if *extent < 128 { vec![low] } else { vec![low | 128, (*extent / 128) as u8] });
        }
        file.extend(data);
    }
    std::fs::write(path("strange.dat"), file).expect("written");
    // Adapters move the linear layers alone.
    let base = Checkpoint::open(&path("strange.dat"), &OpenOptions::default())?;
    let keep = Keep { lora: Some((8, 16.0)), ..KEEP };
    let c = DecoderConfig::parse(config(false).as_bytes())?;
    let kernels = Kernels::new(tch::Device::Cpu, Arc::new(ThreadPool::new(2)), ScaleChoice::PowerOfTwo)?;
    let params = Params::load(&base, keep, 11, &kernels)?;
    let mut adapted = engine_of(&c, params, kernels, OPTIONS)?;
    // Adding nothing to a weight of -0 makes it 0.
    let unsigned = |entry: &(u64, Vec<u64>, Vec<u8>)| -> Vec<u8> {
        let nibble = |n: u8| if n == 8 { 0 } else { n };
        entry.2.iter().map(|b| nibble(b & 15) | nibble(b >> 4) << 4).collect()
    };
    let still = dat(&adapted, Some(&base), "still.dat")?;
    assert!(still.keys().eq(strange.keys()));
    for (name, entry) in &strange {
        let packed = name.contains("_proj") && name.ends_with("qdata");
        let same = if packed { unsigned(entry) == unsigned(&still[name]) } else { *entry == still[name] };
        assert!(same, "{name} is another before anything was trained");
    }
    train(&mut adapted, &[data.rows()], 20)?;
    let moved = dat(&adapted, Some(&base), "moved.dat")?;
    assert!(moved.keys().eq(strange.keys()));
    for (name, entry) in &strange {
        match name.contains("_proj") {
            true => assert!(!name.ends_with("qdata") || unsigned(entry) != unsigned(&moved[name]), "{name}"),
            false => assert!(*entry == moved[name], "{name} did not move and changed"),
        }
    }
    Ok(())
}
