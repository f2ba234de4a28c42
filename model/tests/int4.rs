//! int4 as four tools write it: opened, verified, and refused where two places contradict each other.
#![allow(clippy::unwrap_used)]
mod handmade;

use handmade::{Model, golden};
use q4_core::detect::Layout;
use q4_core::{Code, Q4Schema, Result};
use q4_model::checkpoint::{Checkpoint, OpenOptions, names};
use q4_model::verify::{Severity, verify};
use serde_json::{Value, json};

/// Folder, layout, schema and group of each.
const WRITTEN: [(&str, Layout, &str, usize); 6] = [
    ("int4_ct", Layout::CompressedTensors, "int4", 32),
    ("int4_asym_ct", Layout::CompressedTensors, "int4-asym", 64),
    ("gptq", Layout::Gptq, "int4", 32),
    ("gptq_v2", Layout::Gptq, "int4-asym", 64),
    ("awq", Layout::Awq, "int4-asym", 32),
    ("auto_round", Layout::Gptq, "int4-asym", 64),
];
const UP: &str = "model.layers.0.mlp.up_proj";

#[test]
fn what_tools_write_is_recognised_and_healthy() {
    for (name, layout, schema, group) in WRITTEN {
        let c = Checkpoint::open(&golden("a", name), &OpenOptions::default()).unwrap();
        let found = c.layer(UP, 192, 64).unwrap().detected;
        let Q4Schema::Int4(format) = found.schema else { panic!("{name}: {found:?}") };
        assert_eq!((found.layout, found.schema.id().name), (layout, schema), "{name}");
        assert_eq!(format.group as usize, group, "{name}");
        layers(&c).unwrap_or_else(|e| panic!("{name}: {e}"));
        let bad: Vec<_> = verify(&c).into_iter().filter(|f| f.severity != Severity::Note).collect();
        assert!(bad.is_empty(), "{name}: {bad:?}");
    }
    let c = Checkpoint::open(&golden("a", "int4_channel_ct"), &OpenOptions::default()).unwrap();
    // One scale for all of an out feature, of which there are several lengths.
    assert_eq!(c.layer(UP, 192, 64).unwrap().detected.schema.block(), 64);
    assert_eq!(c.layer("model.layers.0.mlp.down_proj", 64, 192).unwrap().detected.schema.block(), 192);
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
fn layouts_hold_the_same_codes() {
    // AutoRound stores zero points one less than GPTQ's second form: bytes differ, values do not.
    let values = |name: &str| {
        let c = Checkpoint::open(&golden("a", name), &OpenOptions::default()).unwrap();
        let layer = c.layer(UP, 192, 64).unwrap();
        let rows = layer.detected.schema.decoder([192, 64], &layer.segment.data).unwrap();
        let mut out = vec![0.0; 192 * 64];
        out.chunks_mut(64).enumerate().for_each(|(r, out)| rows.row(r, out));
        out
    };
    assert_eq!(values("gptq_v2"), values("auto_round"));
}

#[test]
fn zero_points_of_the_other_form_are_noticed() {
    // What AutoRound stores is one less; as GPTQ's second form every weight is a step off.
    let mut m = Model::golden("a", "auto_round");
    let declared = json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": false});
    m.config["quantization_config"] = declared;
    let shifted = |m: &Model| verify(&m.open().unwrap()).iter().filter(|f| f.code == "zeros-shifted").count();
    assert_eq!(shifted(&m), 0);
    m.config["quantization_config"]["checkpoint_format"] = json!("gptq_v2");
    assert_eq!(shifted(&m), 14, "every layer");
}

#[test]
fn a_contradiction_names_its_layer_and_both_places() {
    let error = |name: &str, edit: &dyn Fn(&mut Model)| {
        let mut m = Model::golden("a", name);
        m.hf_quant = None;
        edit(&mut m);
        match m.open() {
            Err(e) => e,
            Ok(c) => layers(&c).expect_err(name),
        }
    };
    let config = |field: &'static str, value: Value| {
        move |m: &mut Model| {
            let at = m.config["quantization_config"].pointer_mut(field);
            *at.unwrap_or_else(|| panic!("{field}")) = value.clone();
        }
    };
    let refused = |name: &str, edit: &dyn Fn(&mut Model), code: Code, words: &[&str]| {
        let e = error(name, edit);
        let text = e.to_string();
        assert!(e.code() == code && words.iter().all(|w| text.contains(w)), "{name}: {text}; need {words:?}");
    };
    use Code::{ConfigInvalid, SchemaInvalid, TensorMissing};
    let weights = "/config_groups/group_0/weights";
    let field = |field: &str| -> &'static str { Box::leak(format!("{weights}/{field}").into_boxed_str()) };

    // The configuration against the tensors.
    let other = "another format than config.json declares";
    refused(
        "int4_ct",
        &config(field("group_size"), json!(64)),
        SchemaInvalid,
        &["q_proj", other, "per 64", "per 32"],
    );
    refused("int4_ct", &config(field("symmetric"), json!(false)), SchemaInvalid, &["q_proj", "int4-asym"]);
    refused(
        "int4_asym_ct",
        &config(field("symmetric"), json!(true)),
        SchemaInvalid,
        &["q_proj", "int4-asym"],
    );
    refused("gptq", &config("/group_size", json!(-1)), SchemaInvalid, &[other, "per out feature", "per 32"]);
    refused("gptq_v2", &config("/sym", json!(true)), SchemaInvalid, &[other, "the tensors of int4-asym"]);
    refused(
        "gptq",
        &config("/quant_method", json!("awq")),
        SchemaInvalid,
        &["qweight", "out features in a word"],
    );
    refused(
        "awq",
        &config("/quant_method", json!("gptq")),
        SchemaInvalid,
        &["qweight", "in features in a word"],
    );
    let none = |m: &mut Model| m.config["quantization_config"] = Value::Null;
    refused("gptq", &none, SchemaInvalid, &["qweight", "gptq, awq or auto-round"]);

    // What tools can write and q4 does not read is named.
    refused("int4_ct", &config(field("num_bits"), json!(8)), ConfigInvalid, &["num_bits", "need: 4"]);
    refused("int4_ct", &config(field("type"), json!("float")), ConfigInvalid, &["type", "need: int"]);
    refused("int4_ct", &config(field("group_size"), json!(24)), ConfigInvalid, &["multiple of 16", "24"]);
    refused("gptq", &config("/bits", json!(3)), ConfigInvalid, &["bits", "have: 3"]);
    refused("awq", &config("/version", json!("gemv")), ConfigInvalid, &["version", "gemm", "gemv"]);
    refused("awq", &config("/zero_point", json!(false)), ConfigInvalid, &["zero_point"]);
    let packing = config("/packing_format", json!("auto_round:exllamav2"));
    refused("auto_round", &packing, ConfigInvalid, &["packing_format", "exllamav2"]);
    let add = |name: &'static str, value: Value| {
        move |m: &mut Model| m.config["quantization_config"][name] = value.clone()
    };
    refused(
        "gptq",
        &add("checkpoint_format", json!("marlin")),
        ConfigInvalid,
        &["checkpoint_format", "marlin"],
    );
    for of in
        [json!({"+:.*up_proj": {"bits": 8}}), json!({"-:.*up_proj": {}, ".*q_proj": {"bits": 8}}), json!([])]
    {
        refused("gptq", &add("dynamic", of), ConfigInvalid, &["dynamic", "patterns behind `-:`"]);
    }
    let extra = add("extra_config", json!({UP: {"bits": 8}}));
    refused("auto_round", &extra, ConfigInvalid, &["extra_config", UP, "bits of 16"]);

    // The tensors of a layer against each other.
    let edit = |tensor: &'static str, edit: fn(&mut handmade::Tensor)| {
        move |m: &mut Model| edit(m.edit(&format!("{UP}.{tensor}")))
    };
    let drop = |tensor: &'static str| {
        move |m: &mut Model| {
            m.remove(&format!("{UP}.{tensor}"));
        }
    };
    refused("int4_asym_ct", &drop("weight_zero_point"), SchemaInvalid, &[UP, other]);
    refused("int4_ct", &drop("weight_scale"), SchemaInvalid, &[UP, "weight_scale", "no such tensor"]);
    refused("gptq", &drop("scales"), SchemaInvalid, &[UP, "scales", "no such tensor"]);
    refused("gptq", &drop("qweight"), TensorMissing, &[UP]);
    refused("gptq_v2", &drop("qzeros"), SchemaInvalid, &[UP, other]);
    refused("gptq", &drop("qzeros"), SchemaInvalid, &[UP, "qzeros"]);
    let act_order = edit("g_idx", |t| t.bytes.swap(0, 4 * 40));
    refused("gptq", &act_order, SchemaInvalid, &[UP, "g_idx", "act-order", "desc_act false"]);
    let declared = |edit: fn(&mut handmade::Tensor)| {
        move |m: &mut Model| {
            m.config["quantization_config"]["desc_act"] = json!(true);
            edit(m.edit(&format!("{UP}.g_idx")));
        }
    };
    let negative = declared(|t| t.bytes[..4].fill(0xff));
    refused("gptq", &negative, SchemaInvalid, &[UP, "g_idx", "0 to 1", "in feature 0 in group -1"]);
    let beyond = declared(|t| t.bytes[4 * 63] = 2);
    refused("gptq", &beyond, SchemaInvalid, &[UP, "g_idx", "scales`", "in feature 63 in group 2"]);
    let unequal = declared(|t| t.bytes[0] = 1);
    refused("gptq", &unequal, SchemaInvalid, &[UP, "g_idx", "32 in features in each", "31 in group 0"]);
    let floats = declared(|t| t.dtype = "F32".into());
    refused("gptq", &floats, SchemaInvalid, &[UP, "g_idx", "i32", "float32"]);
    let sixteen = edit("qzeros", |t| t.bytes[0] |= 0x0f);
    refused("auto_round", &sixteen, Code::ScaleInvalid, &[UP, "zero points of 0 to 15"]);
    let infinite = edit("scales", |t| t.bytes[..2].copy_from_slice(&[0, 0x7c]));
    refused("awq", &infinite, Code::ValueInvalid, &[UP, "finite"]);
    let shorter = edit("qzeros", |t| {
        t.shape[1] /= 2;
        t.bytes.truncate(t.bytes.len() / 2);
    });
    refused("gptq_v2", &shorter, SchemaInvalid, &[UP, "qzeros"]);
    let declared = |m: &mut Model| {
        m.config["quantization_config"]["desc_act"] = json!(true);
        m.remove(&format!("{UP}.g_idx"));
    };
    refused("gptq", &declared, SchemaInvalid, &[UP, "g_idx", "desc_act"]);
    // What a reader puts in place of words is no word of a file.
    let bytes = |t: &mut handmade::Tensor| {
        t.dtype = "U8".into();
        t.shape[1] *= 4;
    };
    for (name, part) in [
        ("gptq", "qweight"),
        ("awq", "qweight"),
        ("gptq_v2", "qzeros"),
        ("int4_asym_ct", "weight_zero_point"),
    ] {
        refused(name, &edit(part, bytes), SchemaInvalid, &[UP, part, "words: i32", "u8"]);
    }
    let index = |m: &mut Model| {
        let name = format!("{UP}.weight_g_idx");
        m.tensors.push(handmade::Tensor::new(&name, "I32", &[64], vec![0; 256]));
    };
    refused("int4_ct", &index, SchemaInvalid, &[UP, "weight_g_idx"]);
}
