//! FP8 as two tools write it, alone and beside 4-bit layers: opened, verified, and refused where two places
//! contradict each other.
#![allow(clippy::unwrap_used)]
mod handmade;

use handmade::{Model, Tensor, golden};
use q4_core::detect::Layout;
use q4_core::{Activations, Code, DType, Fp8, OwnedParts, Part, Q4Schema, Result};
use q4_model::checkpoint::{Checkpoint, OpenOptions, names};
use q4_model::verify::{Severity, verify};
use serde_json::{Value, json};

const UP: &str = "model.layers.0.mlp.up_proj";
const Q: &str = "model.layers.0.self_attn.q_proj";

/// Folder, tile of `q_proj`, and the schema of `up_proj`.
const WRITTEN: [(&str, [u32; 2], &str); 4] = [
    ("fp8_channel_ct", [1, 0], "fp8"),
    ("fp8_tensor_ct", [0, 0], "fp8"),
    ("fp8_blocks", [0, 0], "fp8"),
    ("mixed_ct", [1, 0], "nvfp4"),
];

#[test]
fn what_tools_write_is_recognised_and_healthy() {
    for (name, tile, other) in WRITTEN {
        let c = Checkpoint::open(&golden("a", name), &OpenOptions::default()).unwrap();
        let found = c.layer(Q, 128, 64).unwrap();
        let Q4Schema::Fp8(format) = found.detected.schema else { panic!("{name}: {found:?}") };
        assert_eq!((found.detected.layout, format.tile), (Layout::Fp8, tile), "{name}");
        assert_eq!(found.declared, Activations::Native, "{name}");
        assert_eq!(c.layer(UP, 192, 64).unwrap().detected.schema.id().name, other, "{name}");
        layers(&c).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (notes, bad): (Vec<_>, Vec<_>) =
            verify(&c).into_iter().partition(|f| f.severity == Severity::Note);
        assert!(bad.is_empty(), "{name}: {bad:?}");
        assert!(notes.iter().any(|f| f.code == "inputs-float"), "{name}: {notes:?}");
    }
}

/// Everything that a model reads of a layer.
fn layers(c: &Checkpoint) -> Result<()> {
    for i in 0..c.config().num_hidden_layers {
        for (name, n, k) in names::linears(c.config(), i) {
            c.layer(&name, n, k)?;
        }
    }
    Ok(())
}

#[test]
fn mixtures_of_modelopt_are_read_layer_by_layer() {
    let m = Model::mixture();
    let c = m.open().unwrap();
    layers(&c).unwrap();
    assert_eq!(c.layer(Q, 128, 64).unwrap().declared, Activations::Native);
    assert!(matches!(c.layer(UP, 192, 64).unwrap().declared, Activations::Nvfp4(_)));
    let found = verify(&c);
    assert!(found.iter().all(|f| f.severity == Severity::Note), "{found:?}");
    // One of the files may say it alone, whatever the other lacks.
    let mut one = m.clone();
    one.config["quantization_config"].as_object_mut().unwrap().remove("quantized_layers");
    layers(&one.open().unwrap()).unwrap();
    let mut other = m;
    other.hf_quant = None;
    layers(&other.open().unwrap()).unwrap();
}

#[test]
fn a_contradiction_names_its_layer_and_both_places() {
    let error = |mut m: Model, edit: &dyn Fn(&mut Model)| {
        edit(&mut m);
        match m.open() {
            Err(e) => e,
            Ok(c) => layers(&c).expect_err("a contradiction"),
        }
    };
    let refused = |m: Model, edit: &dyn Fn(&mut Model), code: Code, words: &[&str]| {
        let e = error(m, edit);
        let text = e.to_string();
        assert!(
            e.code() == code && words.iter().all(|w| text.contains(w)),
            "{text}; need {code:?} {words:?}"
        );
    };
    let of = |name: &str| {
        let mut m = Model::golden("a", name);
        m.hf_quant = None;
        m
    };
    let config = |field: &'static str, value: Value| {
        move |m: &mut Model| {
            let at = m.config["quantization_config"].pointer_mut(field);
            *at.unwrap_or_else(|| panic!("{field}")) = value.clone();
        }
    };
    let add = |name: &'static str, value: Value| {
        move |m: &mut Model| m.config["quantization_config"][name] = value.clone()
    };
    let both = |field: &'static str, value: Value| {
        move |m: &mut Model| {
            let own = &mut m.config["quantization_config"]["quantized_layers"];
            own[field] = value.clone();
            m.hf_quant.as_mut().unwrap()["quantization"]["quantized_layers"][field] = value.clone();
        }
    };
    use Code::{ConfigInvalid, SchemaInvalid, ValueInvalid};
    let other = "another format than config.json declares";

    // Two files, or two lists.
    let algo = |m: &mut Model| {
        m.hf_quant.as_mut().unwrap()["quantization"]["quantized_layers"][UP]["quant_algo"] = json!("FP8");
    };
    let words = [UP, "nvfp4 in config.json", "fp8 with one scale in hf_quant_config.json"];
    refused(Model::mixture(), &algo, ConfigInvalid, &words);
    let missing = |m: &mut Model| {
        let layers = &mut m.hf_quant.as_mut().unwrap()["quantization"]["quantized_layers"];
        layers.as_object_mut().unwrap().remove(Q);
    };
    refused(Model::mixture(), &missing, ConfigInvalid, &[Q, "nothing in hf_quant_config.json"]);
    let plain = |m: &mut Model| {
        m.hf_quant.as_mut().unwrap()["quantization"]["quant_algo"] = json!("NVFP4");
    };
    refused(
        Model::mixture(),
        &plain,
        ConfigInvalid,
        &["hf_quant_config.json", "quant_algo", "the same as in"],
    );
    let excluded = |m: &mut Model| m.config["quantization_config"]["ignore"] = json!(["lm_head", UP]);
    refused(Model::mixture(), &excluded, SchemaInvalid, &[UP, "two lists", "both"]);
    let none = |m: &mut Model| {
        m.config["quantization_config"].as_object_mut().unwrap().remove("quantized_layers");
        m.hf_quant = None;
    };
    refused(Model::mixture(), &none, ConfigInvalid, &["quantized_layers", "MIXED_PRECISION"]);

    // One algorithm for all, and a layer of another: told by the tensors alone it would be taken.
    let one = |m: &mut Model| {
        m.hf_quant = None;
        m.config["quantization_config"] = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    };
    refused(Model::mixture(), &one, SchemaInvalid, &[Q, other, "need: nvfp4", "fp8 with one scale"]);

    // The lists against the tensors.
    refused(Model::mixture(), &both(UP, json!({"quant_algo": "FP8"})), SchemaInvalid, &[UP, other, "nvfp4"]);
    let nvfp4 = json!({"quant_algo": "NVFP4"});
    refused(
        Model::mixture(),
        &both(Q, nvfp4),
        SchemaInvalid,
        &[Q, other, "need: nvfp4", "fp8 with one scale"],
    );
    let rows = json!({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"});
    refused(Model::mixture(), &both(Q, rows), SchemaInvalid, &[Q, other, "per out feature", "one scale"]);
    refused(
        Model::mixture(),
        &both(Q, json!({"quant_algo": "MXFP8"})),
        ConfigInvalid,
        &[Q, "MXFP8", "FP8_PB_WO"],
    );
    let size = json!({"quant_algo": "NVFP4", "group_size": 32});
    refused(Model::mixture(), &both(UP, size), ConfigInvalid, &[UP, "group_size", "need: 16"]);
    let unlisted = |m: &mut Model| {
        m.hf_quant = None;
        m.config["quantization_config"]["quantized_layers"].as_object_mut().unwrap().remove(UP);
    };
    refused(Model::mixture(), &unlisted, SchemaInvalid, &[UP, other, "no group has this layer"]);
    let prefix = |m: &mut Model| {
        m.hf_quant = None;
        let layers = m.config["quantization_config"]["quantized_layers"].as_object_mut().unwrap();
        let renamed = std::mem::take(layers).into_iter();
        layers.extend(renamed.map(|(k, v)| (k.replace("model.", "model.language_model."), v)));
    };
    refused(Model::mixture(), &prefix, SchemaInvalid, &[Q, "no group has this layer"]);
    let dense = |m: &mut Model| {
        let plain = Model::golden("a", "");
        m.tensors.retain(|t| !t.name.starts_with(&format!("{UP}.")));
        m.tensors.push(plain.get(&format!("{UP}.weight")).clone());
    };
    refused(Model::mixture(), &dense, SchemaInvalid, &[UP, other, "need: nvfp4", "dense"]);

    // Groups of compressed-tensors: the first that has a layer counts.
    let swapped = |m: &mut Model| {
        let groups = m.config["quantization_config"]["config_groups"].as_object_mut().unwrap();
        let all: Vec<_> = std::mem::take(groups).into_iter().collect();
        groups.extend(all.into_iter().rev());
    };
    refused(of("mixed_ct"), &swapped, SchemaInvalid, &[Q, other, "need: nvfp4", "fp8"]);
    let targets = |value: Value| config("/config_groups/group_0/targets", value);
    refused(of("mixed_ct"), &targets(json!([Q])), SchemaInvalid, &["k_proj", other, "fp8"]);
    let ahead = targets(json!(["re:(?=model).*attn.*"]));
    refused(of("mixed_ct"), &ahead, ConfigInvalid, &["targets", "look-around", "(?=model)"]);
    let weights = |field: &str| -> &'static str {
        Box::leak(format!("/config_groups/group_0/weights/{field}").into_boxed_str())
    };
    let of_weights = |field: &str, value: Value| config(weights(field), value);
    refused(of("fp8_channel_ct"), &of_weights("num_bits", json!(4)), ConfigInvalid, &["num_bits", "need: 8"]);
    refused(of("fp8_channel_ct"), &of_weights("type", json!("int")), ConfigInvalid, &["type", "float"]);
    let whole = of_weights("strategy", json!("tensor"));
    refused(of("fp8_channel_ct"), &whole, SchemaInvalid, &["q_proj", other, "one scale", "out feature"]);
    let group = of_weights("strategy", json!("group"));
    refused(of("fp8_channel_ct"), &group, ConfigInvalid, &["strategy", "tensor, channel or block"]);
    let block = of_weights("strategy", json!("block"));
    refused(of("fp8_channel_ct"), &block, ConfigInvalid, &["block_structure", "[128, 128]"]);
    let inputs = config("/config_groups/group_0/input_activations/num_bits", json!(4));
    refused(of("fp8_channel_ct"), &inputs, ConfigInvalid, &["input_activations.num_bits", "need: 8"]);

    // Transformers' own fields.
    refused(
        of("fp8_blocks"),
        &add("weight_block_size", json!([64, 64])),
        ConfigInvalid,
        &["weight_block_size"],
    );
    refused(of("fp8_blocks"), &add("fmt", json!("e5m2")), ConfigInvalid, &["fmt", "e4m3"]);
    refused(of("fp8_blocks"), &add("scale_fmt", json!("ue8m0")), ConfigInvalid, &["scale_fmt", "float"]);
    let table = add("modules_to_convert", json!(["embed_tokens"]));
    refused(of("fp8_blocks"), &table, ConfigInvalid, &["modules_to_convert"]);
    let awq = add("quant_method", json!("modelopt"));
    refused(of("fp8_blocks"), &awq, ConfigInvalid, &["quant_algo"]);

    // The tensors of a layer against each other.
    let edit = |tensor: &'static str, edit: fn(&mut Tensor)| {
        move |m: &mut Model| edit(m.edit(&format!("{UP}.{tensor}")))
    };
    let drop = |m: &mut Model| {
        m.remove(&format!("{UP}.weight_scale"));
    };
    refused(of("fp8_channel_ct"), &drop, SchemaInvalid, &[UP, "weight_scale_inv", "neither"]);
    let twice = |m: &mut Model| {
        let again =
            Tensor { name: format!("{UP}.weight_scale_inv"), ..m.get(&format!("{UP}.weight_scale")).clone() };
        m.tensors.push(again);
    };
    refused(of("fp8_channel_ct"), &twice, SchemaInvalid, &[UP, "both"]);
    let shape = edit("weight_scale", |t| t.shape = vec![1, 192]);
    refused(of("fp8_channel_ct"), &shape, SchemaInvalid, &[UP, "weight_scale", "[192, 1]", "[1, 192]"]);
    let kind = edit("weight_scale", |t| t.dtype = "I16".into());
    refused(of("fp8_channel_ct"), &kind, SchemaInvalid, &[UP, "weight_scale", "another type"]);
    let fnuz = edit("weight", |t| t.dtype = "F8_E4M3FNUZ".into());
    refused(of("fp8_channel_ct"), &fnuz, SchemaInvalid, &[UP, "weight"]);
    let nan = edit("weight", |t| t.bytes[70] = 0xff);
    refused(of("fp8_channel_ct"), &nan, ValueInvalid, &[UP, "0xff", "row 1, column 6"]);
    let infinite = edit("weight_scale", |t| t.bytes[..2].copy_from_slice(&[0x80, 0x7f]));
    refused(of("fp8_channel_ct"), &infinite, ValueInvalid, &[UP, "finite"]);
    let nibbles = |m: &mut Model| {
        // A scale for an out feature fits nibbles as well: nothing but the type tells.
        let t = m.edit(&format!("{UP}.weight"));
        (t.dtype, t.shape) = ("U8".into(), vec![192, 64]);
    };
    refused(of("fp8_channel_ct"), &nibbles, SchemaInvalid, &[UP, "weight_scale"]);
}

#[test]
fn weights_are_those_that_transformers_decodes() {
    let file = std::fs::read(golden("a", "../fp8_transformers.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let of = |name: &str| file.tensor(name).unwrap().data();
    let schema = Q4Schema::Fp8(Fp8 { tile: [128, 128], scales: DType::F32 });
    let parts = OwnedParts::default().with(Part::Codes, DType::U8, &[256, 384], of("weight").to_vec()).with(
        Part::Scales,
        DType::F32,
        &[2, 3],
        of("weight_scale_inv").to_vec(),
    );
    let data = parts.lend().unwrap();
    let rows = schema.decoder([256, 384], &data).unwrap();
    let mut row = vec![0f32; 384];
    for (r, want) in of("decoded").chunks_exact(4 * 384).enumerate() {
        rows.row(r, &mut row);
        let want = want.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
        assert!(row.iter().map(|v| v.to_bits()).eq(want), "row {r}");
    }
}
