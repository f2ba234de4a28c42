//! Faults planted in healthy checkpoints that load, compute, and compute nonsense: what `verify` says about
//! them.
//!
//! Every planting is one that somebody's exporter has made or could make. The figures of docs/verify.md are
//! printed by these tests.
#![allow(clippy::unwrap_used)]
mod handmade;
mod support;

use handmade::{Model, Tensor, VARIANTS};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::verify::run::{self, Told};
use q4_model::verify::{Finding, Severity, verify};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo")
}

/// The demo model with its text files.
fn demo_model() -> Model {
    let read = |name: &str| std::fs::read(demo().join(name)).unwrap();
    let (tensors, metadata) = handmade::parse(&read("model.safetensors"));
    let config = serde_json::from_slice(&read("config.json")).unwrap();
    let hf_quant = Some(serde_json::from_slice(&read("hf_quant_config.json")).unwrap());
    let texts = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
    let others = texts.iter().map(|name| ((*name).to_owned(), read(name))).collect();
    Model { tensors, metadata, config, hf_quant, others }
}

/// Findings that end `q4 verify` with status 3.
fn alarms(m: &Model) -> Vec<Finding> {
    let mut findings = verify(&m.open().unwrap());
    findings.retain(|f| f.severity != Severity::Note);
    findings
}

fn f32s(t: &mut Tensor, change: impl Fn(f32) -> f32) {
    for b in t.bytes.chunks_exact_mut(4) {
        let value = f32::from_le_bytes((&*b).try_into().unwrap());
        b.copy_from_slice(&change(value).to_le_bytes());
    }
}

fn bf16s(t: &mut Tensor, change: impl Fn(usize, f32) -> f32) {
    for (i, b) in t.bytes.chunks_exact_mut(2).enumerate() {
        let v = half::bf16::from_le_bytes((&*b).try_into().unwrap()).to_f32();
        b.copy_from_slice(&half::bf16::from_f32(change(i, v)).to_le_bytes());
    }
}

/// Every tensor whose name ends so.
fn all(m: &mut Model, suffix: &str, change: impl Fn(&mut Tensor)) {
    let hit = m.tensors.iter_mut().filter(|t| t.name.ends_with(suffix)).map(&change).count();
    assert!(hit > 0, "no tensor ends with {suffix}");
}

fn text(m: &mut Model, name: &str, change: impl Fn(&mut Value)) {
    let file = m.others.iter_mut().find(|f| f.0 == name).unwrap();
    let mut json: Value = serde_json::from_slice(&file.1).unwrap();
    change(&mut json);
    file.1 = json.to_string().into_bytes();
}

fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state >> 33
    }
}

type Plant = Box<dyn Fn(&mut Model)>;

/// What the files alone tell, each planted in a model that has what it needs.
fn in_files() -> Vec<(&'static str, Model, Plant)> {
    let a = |variant| Model::golden("a", variant);
    let up = "model.layers.1.mlp.up_proj";
    let tensor = move |suffix: &str| format!("{up}{suffix}");
    let (codes, scales, global) = (tensor(".weight"), tensor(".weight_scale"), tensor(".weight_scale_2"));
    let each = |suffix: &'static str, change: fn(f32) -> f32| -> Plant {
        Box::new(move |m| all(m, suffix, |t| f32s(t, change)))
    };
    let with = |name: String, change: fn(&mut Tensor)| -> Plant { Box::new(move |m| change(m.edit(&name))) };
    vec![
        ("input_scale of 1e6", a("nvfp4_modelopt"), each(".input_scale", |_| 1e6)),
        ("input_scale of 1e-12", a("nvfp4_modelopt"), each(".input_scale", |_| 1e-12)),
        ("input_scale reciprocal", a("nvfp4_modelopt"), each(".input_scale", |x| 1.0 / x)),
        ("input_global_scale reciprocal", a("nvfp4_ct"), each(".input_global_scale", |x| 1.0 / x)),
        (
            "input scales under W4A16",
            a("nvfp4_modelopt"),
            Box::new(|m| {
                m.config["quantization_config"]["quant_algo"] = json!("W4A16_NVFP4");
                m.config["quantization_config"]["config_groups"]["group_0"]["input_activations"] =
                    Value::Null;
                m.hf_quant = None;
            }),
        ),
        (
            "W4A4 without input scales",
            a("nvfp4_modelopt"),
            Box::new(|m| m.tensors.retain(|t| !t.name.ends_with(".input_scale"))),
        ),
        (
            "nested_offset of 0",
            a("nf4_bnb_dq"),
            Box::new(|m| {
                all(m, "quant_state.bitsandbytes__nf4", |t| {
                    let mut state: Value = serde_json::from_slice(&t.bytes).unwrap();
                    state["nested_offset"] = json!(0.0);
                    t.bytes = state.to_string().into_bytes();
                    t.shape = vec![t.bytes.len()];
                });
            }),
        ),
        (
            "a nested_quant_map of even steps",
            a("nf4_bnb_dq"),
            Box::new(|m| {
                let even: Vec<u8> = (0..256).flat_map(|i| (i as f32 / 127.5 - 1.0).to_le_bytes()).collect();
                all(m, "nested_quant_map", |t| t.bytes.clone_from(&even));
            }),
        ),
        (
            "half of the codes zero",
            a("nvfp4_modelopt"),
            with(codes.clone(), |t| {
                let half = t.bytes.len() / 2;
                t.bytes[..half].fill(0);
            }),
        ),
        (
            "half of the NF4 codes zero",
            a("nf4_bnb"),
            with(codes.clone(), |t| {
                let half = t.bytes.len() / 2;
                t.bytes[..half].fill(0);
            }),
        ),
        (
            "random codes",
            a("nvfp4_modelopt"),
            with(codes.clone(), |t| {
                let mut random = random(1);
                t.bytes.iter_mut().for_each(|b| *b = random() as u8);
            }),
        ),
        (
            "half of the embedding zero",
            demo_model(),
            Box::new(|m| {
                let width = 256;
                bf16s(
                    m.edit("model.embed_tokens.weight"),
                    |i, v| if i % width < width / 2 { 0.0 } else { v },
                );
            }),
        ),
        (
            "final norm times 1000",
            demo_model(),
            Box::new(|m| bf16s(m.edit("model.norm.weight"), |_, v| v * 1000.0)),
        ),
        (
            "block scales as integers",
            a("nvfp4_modelopt"),
            with(scales.clone(), |t| {
                let largest = t.bytes.iter().map(|b| q4_core::formats::e4m3::decode(*b)).fold(0.0, f32::max);
                for b in &mut t.bytes {
                    *b = (q4_core::formats::e4m3::decode(*b) / largest * 126.0).round() as u8;
                }
            }),
        ),
        (
            "block scales as E5M2",
            a("nvfp4_modelopt"),
            with(scales.clone(), |t| {
                for b in &mut t.bytes {
                    let half = half::f16::from_f32(q4_core::formats::e4m3::decode(*b)).to_bits();
                    *b = ((half + 0x80) >> 8) as u8;
                }
            }),
        ),
        ("block scales of one value", a("nvfp4_modelopt"), with(scales.clone(), |t| t.bytes.fill(0x70))),
        ("weight_scale_2 times 100", a("nvfp4_modelopt"), with(global, |t| f32s(t, |x| x * 100.0))),
        (
            "zero scales over codes in a row",
            a("nvfp4_modelopt"),
            Box::new(move |m| {
                let t = m.edit(&scales);
                let blocks = t.shape[1];
                t.bytes[..blocks].fill(0);
            }),
        ),
        (
            "layer 1 a copy of layer 0",
            a("nvfp4_modelopt"),
            Box::new(|m| {
                let copies: Vec<_> =
                    m.tensors.iter().filter(|t| t.name.contains("layers.0.")).cloned().collect();
                for c in copies {
                    m.edit(&c.name.replace("layers.0.", "layers.1.")).bytes = c.bytes;
                }
            }),
        ),
        ("a layer of zero codes", a("nvfp4_modelopt"), with(codes.clone(), |t| t.bytes.fill(0))),
        (
            "an added token the library will not give",
            demo_model(),
            Box::new(|m| {
                text(m, "tokenizer.json", |t| {
                    let added = t["added_tokens"].as_array_mut().unwrap();
                    let id = added.last().unwrap()["id"].as_u64().unwrap();
                    let mut token = added.last().unwrap().clone();
                    token["id"] = json!(id + 40);
                    token["content"] = json!("<|extra|>");
                    added.push(token);
                });
            }),
        ),
        (
            "an eos that is ordinary text",
            demo_model(),
            Box::new(|m| {
                m.config["eos_token_id"] = json!(300);
                text(m, "generation_config.json", |g| g["eos_token_id"] = json!(300));
            }),
        ),
        (
            "a template whose markers are no tokens",
            demo_model(),
            Box::new(|m| {
                let file = m.others.iter_mut().find(|f| f.0 == "chat_template.jinja").unwrap();
                file.1 = String::from_utf8(file.1.clone()).unwrap().replace("im_start", "begin").into_bytes();
            }),
        ),
        (
            "BPE without merges",
            demo_model(),
            Box::new(|m| {
                text(m, "tokenizer.json", |t| t["model"]["merges"] = json!([]));
            }),
        ),
        (
            "no pre_tokenizer under a ByteLevel decoder",
            demo_model(),
            Box::new(|m| {
                text(m, "tokenizer.json", |t| t["pre_tokenizer"] = Value::Null);
            }),
        ),
        (
            "a vocabulary of other ids",
            demo_model(),
            Box::new(|m| {
                text(m, "tokenizer.json", |t| {
                    let count = t["model"]["vocab"].as_object().unwrap().len() as u64;
                    for id in t["model"]["vocab"].as_object_mut().unwrap().values_mut() {
                        let old = id.as_u64().unwrap();
                        *id = json!(if old < 300 {
                            old
                        } else {
                            300 + (old - 300) * 7 % (count - 300).next_power_of_two() % (count - 300)
                        });
                    }
                });
            }),
        ),
        (
            "layers that are excluded and packed",
            a("nvfp4_modelopt"),
            Box::new(|m| {
                m.config["quantization_config"]["ignore"] = json!(["model.layers.1.mlp*"]);
                m.hf_quant = None;
            }),
        ),
        (
            "dense layers that are not excluded",
            a("nvfp4_modelopt"),
            Box::new(|m| {
                let dense = Model::golden("a", "");
                let name = "model.layers.0.mlp.gate_proj";
                m.tensors.retain(|t| !t.name.starts_with(name));
                m.tensors.push(dense.get(&format!("{name}.weight")).clone());
            }),
        ),
    ]
}

#[test]
fn what_the_files_tell_is_told() {
    let (mut told, mut silent) = (Vec::new(), Vec::new());
    for (name, mut m, plant) in in_files() {
        let before = alarms(&m);
        assert!(before.is_empty(), "{name}: healthy, and yet {before:?}");
        plant(&mut m);
        let found = alarms(&m);
        match found.first() {
            Some(f) => told.push(format!("{name}: {} {}: {}", f.code, f.tensor, f.message)),
            None => silent.push(name),
        }
    }
    println!("{} of {} told\n{}", told.len(), told.len() + silent.len(), told.join("\n"));
    assert!(silent.is_empty(), "silent: {silent:?}");
}

#[test]
fn healthy_checkpoints_raise_no_alarm() {
    let (mut count, mut alarms) = (0, Vec::new());
    let mut check = |name: &str, checkpoint: Checkpoint| {
        let findings = verify(&checkpoint).into_iter().filter(|f| f.severity != Severity::Note);
        alarms.extend(findings.map(|f| (name.to_owned(), f)));
        count += 1;
    };
    for model in ["a", "b"] {
        for variant in VARIANTS {
            check(
                variant,
                Checkpoint::open(&handmade::golden(model, variant), &OpenOptions::default()).unwrap(),
            );
        }
    }
    check("demo", Checkpoint::open(&demo(), &OpenOptions::default()).unwrap());
    println!("{count} healthy checkpoints, {} alarms", alarms.len());
    assert!(alarms.is_empty(), "{alarms:?}");
}

/// `q4 verify --run` without a command line: both parts.
fn run_alarms(m: &Model) -> (Vec<Finding>, Told) {
    let told = told(&m.open().unwrap());
    let mut findings = alarms(m);
    findings.extend(told.findings.iter().filter(|f| f.severity != Severity::Note).cloned());
    (findings, told)
}

fn told(checkpoint: &Checkpoint) -> Told {
    let mut open = |c: &Checkpoint, rows: usize| {
        let setup =
            support::Setup { chunk: rows, context: rows, all_logits: true, ..support::Setup::default() };
        let dispatch = setup.dispatch()?;
        setup.runner(&setup.load(c, &dispatch)?)
    };
    run::run(checkpoint, &mut open, &mut |_, _| {}).unwrap()
}

/// Rows of a 4-bit matrix and of its scales in another order.
fn reorder(m: &mut Model, module: &str, order: impl Fn(usize, usize) -> usize) {
    for suffix in [".weight", ".weight_scale"] {
        let t = m.edit(&format!("{module}{suffix}"));
        let (n, width) = (t.shape[0], t.bytes.len() / t.shape[0]);
        let old = t.bytes.clone();
        for r in 0..n {
            let from = order(r, n);
            t.bytes[r * width..(r + 1) * width].copy_from_slice(&old[from * width..(from + 1) * width]);
        }
    }
}

/// Everything of two modules, names aside.
fn exchange(m: &mut Model, a: &str, b: &str) {
    for t in &mut m.tensors {
        let dotted = |module: &str| t.name.starts_with(&format!("{module}."));
        if dotted(a) {
            t.name = t.name.replacen(a, b, 1);
        } else if dotted(b) {
            t.name = t.name.replacen(b, a, 1);
        }
    }
}

fn shuffled(seed: u64, n: usize) -> Vec<usize> {
    let (mut random, mut order) = (random(seed), (0..n).collect::<Vec<_>>());
    for i in (1..n).rev() {
        order.swap(i, random() as usize % (i + 1));
    }
    order
}

const DEMO: (usize, usize) = (6, 64);

/// What a run can tell, each planted in the demo model: systematically where an exporter's mistake is, else
/// in layer 3.
fn in_runs() -> Vec<(&'static str, Plant)> {
    const PARTS: [&str; 7] = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    let module = |i: usize, part: &str| format!("model.layers.{i}.{part}");
    let everywhere = move |change: fn(&mut Model, &str)| -> Plant {
        Box::new(move |m| {
            for i in 0..DEMO.0 {
                PARTS.iter().for_each(|part| change(m, &module(i, part)));
            }
        })
    };
    let once = move |part: &'static str, change: fn(&mut Model, &str)| -> Plant {
        Box::new(move |m| change(m, &module(3, part)))
    };
    let pairs = move |a: &'static str, b: &'static str| -> Plant {
        Box::new(move |m| (0..DEMO.0).for_each(|i| exchange(m, &module(i, a), &module(i, b))))
    };
    let nibbles = |m: &mut Model, module: &str| {
        m.edit(&format!("{module}.weight")).bytes.iter_mut().for_each(|b| *b = b.rotate_left(4));
    };
    let rows = |m: &mut Model, module: &str| {
        let order = shuffled(5, m.get(&format!("{module}.weight")).shape[0]);
        reorder(m, module, |r, _| order[r]);
    };
    let signs = |m: &mut Model, module: &str| {
        m.edit(&format!("{module}.weight")).bytes.iter_mut().for_each(|b| *b ^= 0x88);
    };
    let scales = |m: &mut Model, module: &str| {
        let t = m.edit(&format!("{module}.weight_scale"));
        let (old, order) = (t.bytes.clone(), shuffled(6, t.bytes.len()));
        order.iter().enumerate().for_each(|(i, from)| t.bytes[i] = old[*from]);
    };
    let transposed = |m: &mut Model, module: &str| {
        let t = m.edit(&format!("{module}.weight_scale"));
        let (old, n, k) = (t.bytes.clone(), t.shape[0], t.shape[1]);
        (0..n * k).for_each(|i| t.bytes[i] = old[i % n * k + i / n]);
    };
    // The scales of tiles of 128 rows and 4 columns, left where they are and declared row-major.
    let swizzled = |m: &mut Model, module: &str| {
        let t = m.edit(&format!("{module}.weight_scale"));
        let (old, n, k) = (t.bytes.clone(), t.shape[0], t.shape[1]);
        let at =
            |r: usize, c: usize| ((r / 128) * (k / 4) + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
        (0..n * k).for_each(|i| t.bytes[at(i / k, i % k)] = old[i]);
    };
    let rotary = |m: &mut Model, module: &str| {
        let dim = DEMO.1;
        reorder(m, module, |r, _| r / dim * dim + r % dim % 2 * (dim / 2) + r % dim / 2);
    };
    let times = |m: &mut Model, module: &str| f32s(m.edit(&format!("{module}.weight_scale_2")), |x| x * 2.0);
    vec![
        ("nibbles swapped", everywhere(nibbles)),
        ("nibbles swapped in one matrix", once("mlp.down_proj", nibbles)),
        ("rows permuted", once("mlp.up_proj", rows)),
        ("rows of an output permuted", once("mlp.down_proj", rows)),
        (
            "query heads permuted",
            Box::new(move |m| {
                (0..DEMO.0).for_each(|i| reorder(m, &module(i, PARTS[0]), |r, n| (r + DEMO.1) % n));
            }),
        ),
        (
            "value heads permuted",
            Box::new(move |m| reorder(m, &module(3, PARTS[2]), |r, n| (r + DEMO.1) % n)),
        ),
        ("block scales permuted", once("self_attn.k_proj", scales)),
        ("block scales transposed", once("mlp.gate_proj", transposed)),
        ("swizzled scales declared linear", everywhere(swizzled)),
        ("k and v exchanged", pairs(PARTS[1], PARTS[2])),
        ("gate and up exchanged", pairs(PARTS[4], PARTS[5])),
        ("layers 0 and 1 exchanged", Box::new(|m| exchange(m, "model.layers.0", "model.layers.1"))),
        ("layers 2 and 3 exchanged", Box::new(|m| exchange(m, "model.layers.2", "model.layers.3"))),
        (
            "norms of a layer exchanged",
            Box::new(move |m| {
                exchange(m, &module(3, "input_layernorm"), &module(3, "post_attention_layernorm"));
            }),
        ),
        (
            "rotary order",
            Box::new(move |m| {
                (0..DEMO.0).for_each(|i| PARTS[..2].iter().for_each(|part| rotary(m, &module(i, part))));
            }),
        ),
        (
            "embedding shifted by a row",
            Box::new(|m| {
                let t = m.edit("model.embed_tokens.weight");
                let width = t.bytes.len() / t.shape[0];
                t.bytes.rotate_right(width);
            }),
        ),
        ("rope_theta of 1e4", Box::new(|m| m.config["rope_parameters"]["rope_theta"] = json!(1e4))),
        ("rms_norm_eps of 1e-5", Box::new(|m| m.config["rms_norm_eps"] = json!(1e-5))),
        (
            "YaRN that was not trained",
            Box::new(|m| {
                m.config["rope_parameters"] = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                "original_max_position_embeddings": 512});
            }),
        ),
        ("signs of one matrix", once("mlp.up_proj", signs)),
        (
            "one bit of an exponent",
            Box::new(|m| m.edit("model.embed_tokens.weight").bytes[2 * 77 + 1] ^= 0x40),
        ),
        ("a per-tensor scale doubled", once("self_attn.v_proj", times)),
        (
            "per-tensor scales exchanged",
            // Most are equal: the first two of one layer that are not.
            Box::new(move |m| {
                let scale = |i: usize, part: &str| module(i, part) + ".weight_scale_2";
                let pairs =
                    (0..DEMO.0).flat_map(|i| PARTS.iter().map(move |b| (scale(i, PARTS[0]), scale(i, b))));
                let differ = |(a, b): &(String, String)| m.get(a).bytes != m.get(b).bytes;
                let (a, b) = pairs.into_iter().find(differ).unwrap();
                let (x, y) = (m.get(&a).bytes.clone(), m.get(&b).bytes.clone());
                (m.edit(&a).bytes, m.edit(&b).bytes) = (y, x);
            }),
        ),
        (
            "every per-tensor scale halved",
            everywhere(|m, module| {
                f32s(m.edit(&format!("{module}.weight_scale_2")), |x| x / 2.0);
            }),
        ),
        (
            "two ids exchanged",
            Box::new(|m| {
                text(m, "tokenizer.json", |t| {
                    let vocab = t["model"]["vocab"].as_object_mut().unwrap();
                    let of = |id: u64| vocab.iter().find(|e| *e.1 == json!(id)).unwrap().0.clone();
                    let (a, b) = (of(700), of(900));
                    vocab.insert(a, json!(900));
                    vocab.insert(b, json!(700));
                });
            }),
        ),
    ]
}

#[test]
fn what_a_run_tells() {
    let healthy = run_alarms(&demo_model());
    assert!(healthy.0.is_empty(), "healthy: {healthy:?}");
    assert!(healthy.1.trained);
    let (mut told, mut silent) = (Vec::new(), Vec::new());
    for (name, plant) in in_runs() {
        let mut m = demo_model();
        plant(&mut m);
        let (found, told_run) = run_alarms(&m);
        let loss = told_run.loss.unwrap_or(f64::NAN);
        match found.first() {
            Some(f) => told.push(format!("{name} (loss {loss:.3}): {} {}: {}", f.code, f.tensor, f.message)),
            None => silent.push(format!("{name} (loss {loss:.3})")),
        }
    }
    println!(
        "{} of {} told\n{}\nsilent: {silent:#?}",
        told.len(),
        told.len() + silent.len(),
        told.join("\n")
    );
    assert!(told.len() >= 18, "only {} of {}; silent: {silent:#?}", told.len(), told.len() + silent.len());
}

#[test]
fn a_run_of_random_weights_calls_them_untrained_and_nothing_else() {
    for model in ["a", "b"] {
        for variant in VARIANTS {
            let told =
                told(&Checkpoint::open(&handmade::golden(model, variant), &OpenOptions::default()).unwrap());
            assert!(!told.trained, "{model} {variant}");
            assert!(
                told.findings.iter().all(|f| f.severity == Severity::Note),
                "{model} {variant}: {told:?}"
            );
        }
    }
    // With a tokenizer, so that the text is run.
    let mut m = demo_model();
    let mut random = random(9);
    for t in &mut m.tensors {
        match t.name.rsplit('.').next().unwrap() {
            "weight" if t.dtype == "U8" => t.bytes.iter_mut().for_each(|b| *b = random() as u8),
            "weight_scale" => t.bytes.iter_mut().for_each(|b| *b = 0x70 | random() as u8 & 7),
            "weight" if t.name.contains("norm") => bf16s(t, |_, _| 1.0),
            _ => {}
        }
    }
    bf16s(m.edit("model.embed_tokens.weight"), |i, _| {
        ((i as u64).wrapping_mul(0x9e37_79b9) >> 7 & 0xff) as f32 / 2000.0 - 0.064
    });
    let told = told(&m.open().unwrap());
    assert!(!told.trained && told.findings.iter().all(|f| f.severity == Severity::Note), "{told:?}");
}
