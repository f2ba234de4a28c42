//! Files that contradict themselves, as merging tools, hands and half-finished exports leave them: each is
//! refused, with the layer or tensor that it is about and both of the places that do not agree.
//!
//! Every file is a healthy one of some tool with one change. That the healthy ones raise nothing is tested
//! beside it, so that no check is so strict that it only ever refuses.
#![allow(clippy::unwrap_used)]
mod gguf;
mod groups;
#[path = "../handmade/mod.rs"]
mod handmade;
mod mlx;
mod modelopt;
mod whole;
mod words;

use handmade::gguf::File;
use handmade::{Model, Tensor, VARIANTS, golden};
use q4_core::{Code, Error};
use q4_model::checkpoint::{self, Bytes, Checkpoint};
use q4_model::verify::{Severity, verify};
use serde_json::{Value, json};

const UP: &str = "model.layers.0.mlp.up_proj";
const Q: &str = "model.layers.0.self_attn.q_proj";
const K: &str = "model.layers.0.self_attn.k_proj";

/// What was changed, in which file, the code, what it is about, and the two places.
type Case = (&'static str, &'static str, fn(&mut Model), Code, &'static str, [&'static str; 2]);

#[test]
fn each_is_refused_by_layer_and_both_places() {
    let all = [&modelopt::MODELOPT[..], &groups::GROUPS, &words::WORDS, &mlx::MLX, &whole::WHOLE].concat();
    let count = all.len();
    assert!(count >= 60, "{count}");
    let mut wrong = Vec::new();
    for (what, from, edit, code, about, places) in all {
        let mut m = source(from);
        assert!(m.open().and_then(|c| c.bind_all()).is_ok(), "{what}: {from} is healthy");
        edit(&mut m);
        match m.open().and_then(|c| c.bind_all()) {
            Ok(()) => wrong.push(format!("{what}: accepted")),
            Err(e) => wrong.extend(lacks(&e, code, about, &places).map(|e| format!("{what}: {e}"))),
        }
    }
    assert!(wrong.is_empty(), "{} of them\n{}", wrong.len(), wrong.join("\n\n"));
    println!("{count} contradictions of safetensors refused");
}

#[test]
fn so_is_each_of_gguf() {
    let mut wrong = Vec::new();
    for (what, from, edit, code, about, places) in gguf::GGUF {
        let mut file = blocks(from);
        assert!(open(&file).and_then(|c| c.bind_all()).is_ok(), "{what}: {from} is healthy");
        edit(&mut file);
        match open(&file).and_then(|c| c.bind_all()) {
            Ok(()) => wrong.push(format!("{what}: accepted")),
            Err(e) => wrong.extend(lacks(&e, code, about, &places).map(|e| format!("{what}: {e}"))),
        }
    }
    assert!(wrong.is_empty(), "{} of them\n{}", wrong.len(), wrong.join("\n\n"));
    println!("{} contradictions of GGUF refused", gguf::GGUF.len());
}

/// Places that disagree about something that no product needs, or of which one is the likelier: loading goes
/// on, `verify` tells.
#[test]
fn what_loads_is_told_with_both_places() {
    let told = |from: &str, edit: fn(&mut Model), code: &str, about: &str, place: &str| {
        let mut m = source(from);
        edit(&mut m);
        let c = m.open().unwrap();
        c.bind_all().unwrap();
        let all = verify(&c);
        let found = all.iter().find(|f| f.code == code).unwrap_or_else(|| panic!("{code}: {all:?}"));
        assert!(found.severity == Severity::Warning, "{found:?}");
        assert!(found.tensor.contains(about) && found.message.contains(place), "{found:?}; need {place}");
    };
    let excluded: fn(&mut Model) = |m| said(m)["ignore"] = json!(["lm_head", "re:.*up_proj$"]);
    told(
        "int4_ct",
        excluded,
        "declared-otherwise",
        UP,
        "`re:.*up_proj$` in config.json: quantization_config: ignore",
    );
    let dense: fn(&mut Model) = |m| undo(m, UP);
    told(
        "int4_ct",
        dense,
        "declared-otherwise",
        UP,
        "no entry of config.json: quantization_config: ignore excludes it",
    );
    let keys: fn(&mut Model) = |m| scales_of_cache(m, &["k"]);
    told("nvfp4_modelopt", keys, "kv-scale-alone", "k_proj.k_scale", "v_proj.v_scale`");
    let values: fn(&mut Model) = |m| scales_of_cache(m, &["v"]);
    told("nvfp4_modelopt", values, "kv-scale-alone", "v_proj.v_scale", "k_proj.k_scale`");
    let form: fn(&mut Model) = |m| {
        *said(m) = json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": false});
        said(m)["checkpoint_format"] = json!("gptq_v2");
    };
    told("auto_round", form, "zeros-shifted", "proj", "zero points");
}

/// A file of each layout raises nothing.
#[test]
fn healthy_files_raise_nothing() {
    let words =
        ["int4_ct", "int4_asym_ct", "int4_channel_ct", "gptq", "gptq_v2", "awq", "auto_round", "mxfp4_ct"];
    let bytes = ["fp8_channel_ct", "fp8_tensor_ct", "fp8_blocks", "mixed_ct", "mixture"];
    let mlx = ["mlx_affine", "mlx_mxfp4", "mlx_nvfp4"];
    let mut files = 0;
    for from in VARIANTS.into_iter().chain(words).chain(bytes).chain(mlx) {
        let mut m = source(from);
        quiet(from, &m.open().unwrap());
        scales_of_cache(&mut m, &["k", "v"]);
        quiet(from, &m.open().unwrap());
        files += 1;
    }
    for from in ["mxfp4", "nvfp4", "q4_0", "k_quants"] {
        quiet(from, &open(&blocks(from)).unwrap());
        files += 1;
    }
    assert_eq!(files, 28);
    println!("{files} healthy files raised nothing");
}

fn quiet(from: &str, c: &Checkpoint) {
    c.bind_all().unwrap_or_else(|e| panic!("{from}: {e}"));
    // Those of GGUF have no tokenizer, and so no token that ends an answer; one has blocks of any codes.
    let is_gguf = c.store().container() == checkpoint::Container::Gguf;
    let is_own =
        |code: &str| is_gguf && (code == "eos-missing" || from == "k_quants" && code == "codes-even");
    let bad: Vec<_> =
        verify(c).into_iter().filter(|f| f.severity != Severity::Note && !is_own(f.code)).collect();
    assert!(bad.is_empty(), "{from}: {bad:?}");
}

/// What is wrong with how it was refused.
fn lacks(e: &Error, code: Code, about: &str, places: &[&str]) -> Option<String> {
    let text = e.to_string();
    let missing: Vec<_> =
        [about].iter().chain(places).filter(|words| !text.contains(**words)).copied().collect();
    let is_other = e.code() != code;
    (is_other || !missing.is_empty()).then(|| format!("{text}\n  want {code:?}, lacks {missing:?}"))
}

fn source(from: &str) -> Model {
    if from == "mixture" {
        return Model::mixture();
    }
    let mut m = Model::golden("a", from);
    if !from.contains("modelopt") {
        m.hf_quant = None;
    }
    m
}

fn blocks(from: &str) -> File {
    let path = if from == "k_quants" { "../k_quants.gguf".to_owned() } else { format!("{from}.gguf") };
    File::parse(&std::fs::read(golden("a", &path)).unwrap())
}

fn open(file: &File) -> q4_core::Result<Checkpoint> {
    Checkpoint::from_files("tiny", vec![("tiny.gguf".into(), Bytes::from(file.bytes()))])
}

fn said(m: &mut Model) -> &mut Value {
    &mut m.config["quantization_config"]
}

fn hf(m: &mut Model) -> &mut Value {
    &mut m.hf_quant.as_mut().unwrap()["quantization"]
}

/// An entry of ModelOpt's two lists.
fn both(m: &mut Model, layer: &str, entry: Value) {
    said(m)["quantized_layers"][layer] = entry.clone();
    hf(m)["quantized_layers"][layer] = entry;
}

/// A layer as it was before it was quantised.
fn undo(m: &mut Model, layer: &str) {
    m.tensors.retain(|t| !t.name.starts_with(&format!("{layer}.")));
    m.tensors.push(Model::golden("a", "").get(&format!("{layer}.weight")).clone());
}

/// Another shape of a part, of its first bytes.
fn narrow(m: &mut Model, layer: &str, part: &str, shape: [usize; 2]) {
    let tensor = m.edit(&format!("{layer}.{part}"));
    let size = tensor.bytes.len() / tensor.shape.iter().product::<usize>();
    tensor.shape = shape.to_vec();
    tensor.bytes.resize(shape[0] * shape[1] * size, 0);
}

fn edit_text(m: &mut Model, name: &str, from: &str, to: &str) {
    let tensor = m.edit(name);
    let text = String::from_utf8(tensor.bytes.clone()).unwrap();
    assert!(text.contains(from), "{text}");
    tensor.bytes = text.replace(from, to).into_bytes();
    tensor.shape = vec![tensor.bytes.len()];
}

fn edit_record(m: &mut Model, from: &str, to: &str) {
    let record = &mut m.metadata[&format!("{Q}.weight")];
    let text = record.as_str().unwrap();
    assert!(text.contains(from), "{text}");
    *record = json!(text.replace(from, to));
}

/// The gate of the first layer as the head.
fn packed_head(m: &mut Model) {
    let vocab = m.config["vocab_size"].as_u64().unwrap() as usize;
    for part in ["weight_packed", "weight_scale", "weight_global_scale"] {
        let mut tensor = m.get(&format!("model.layers.0.mlp.gate_proj.{part}")).clone();
        if let [rows, width] = tensor.shape[..] {
            tensor.bytes =
                tensor.bytes.iter().copied().cycle().take(tensor.bytes.len() / rows * vocab).collect();
            tensor.shape = vec![vocab, width];
        }
        m.tensors.push(Tensor { name: format!("lm_head.{part}"), ..tensor });
    }
}

fn scales_of_cache(m: &mut Model, parts: &[&str]) {
    for part in parts {
        let name = format!("model.layers.1.self_attn.{part}_proj.{part}_scale");
        m.tensors.push(Tensor::new(&name, "F32", &[], 1f32.to_le_bytes().to_vec()));
    }
}
