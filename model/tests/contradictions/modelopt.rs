//! Lists of ModelOpt's two files.
use super::handmade::Model;
use super::{Case, Q, UP, both, hf, said, undo};
use q4_core::Code::{ConfigInvalid, SchemaInvalid};
use serde_json::json;

const HF: &str = "hf_quant_config.json";

pub const MODELOPT: [Case; 17] = [
    (
        "a layer that is listed and, in the same file, excluded",
        "mixture",
        |m| said(m)["ignore"] = json!(["lm_head", UP]),
        SchemaInvalid,
        UP,
        [
            "config.json: quantization_config: quantized_layers.model.layers.0.mlp.up_proj",
            "quantization_config: ignore",
        ],
    ),
    (
        "a layer that is listed in one file and excluded in the other",
        "mixture",
        |m| {
            said(m).as_object_mut().unwrap().remove("ignore");
            hf(m)["exclude_modules"] = json!(["lm_head", Q]);
        },
        SchemaInvalid,
        Q,
        ["quantized_layers.model.layers.0.self_attn.q_proj", "hf_quant_config.json: exclude_modules"],
    ),
    (
        "a wildcard that excludes listed layers",
        "mixture",
        |m| said(m)["ignore"] = json!(["lm_head", "model.layers.0.mlp*"]),
        SchemaInvalid,
        "model.layers.0.mlp.gate_proj",
        ["quantized_layers.model.layers.0.mlp.gate_proj", "`model.layers.0.mlp*`"],
    ),
    (
        "two algorithms for one layer",
        "mixture",
        |m| hf(m)["quantized_layers"][UP]["quant_algo"] = json!("FP8"),
        ConfigInvalid,
        UP,
        ["nvfp4 in config.json", "fp8 with one scale in hf_quant_config.json"],
    ),
    (
        "a layer that one of the files does not list",
        "mixture",
        |m| drop(hf(m)["quantized_layers"].as_object_mut().unwrap().remove(Q)),
        ConfigInvalid,
        Q,
        ["fp8 with one scale in config.json", "nothing in hf_quant_config.json"],
    ),
    (
        "one algorithm for all, and one for each",
        "mixture",
        |m| hf(m)["quant_algo"] = json!("NVFP4"),
        ConfigInvalid,
        "quant_algo",
        ["the same as in config.json: quantization_config, \"MIXED_PRECISION\"", HF],
    ),
    (
        "NVFP4 inputs in one file, none in the other",
        "nvfp4_modelopt",
        |m| hf(m)["quant_algo"] = json!("W4A16_NVFP4"),
        ConfigInvalid,
        "quant_algo",
        ["the same as in config.json: quantization_config, \"NVFP4\"", HF],
    ),
    (
        "a layer that one list excludes and the other does not",
        "nvfp4_modelopt",
        |m| {
            hf(m)["exclude_modules"] = json!(["lm_head", "model.embed_tokens", "model.layers.0.self_attn*"]);
            undo(m, Q);
        },
        ConfigInvalid,
        Q,
        ["config.json: quantization_config: ignore", "`model.layers.0.self_attn*` in hf_quant_config.json"],
    ),
    (
        "caches of two widths",
        "mixture",
        |m| said(m)["kv_cache_scheme"] = json!({"num_bits": 4, "type": "float"}),
        ConfigInvalid,
        "kv_cache_quant_algo",
        ["4 bits, as config.json", "8 bits, as hf_quant_config.json"],
    ),
    (
        "names with the prefix of a wrapper over tensors without",
        "mixture",
        |m| {
            m.hf_quant = None;
            let layers = said(m)["quantized_layers"].as_object_mut().unwrap();
            let renamed = std::mem::take(layers).into_iter();
            layers.extend(renamed.map(|(k, v)| (k.replace("model.", "model.language_model."), v)));
        },
        SchemaInvalid,
        Q,
        ["no group has this layer, of config.json: quantization_config: quantized_layers", "q_proj.weight`"],
    ),
    (
        "groups that the algorithm does not have",
        "mixture",
        |m| {
            m.hf_quant = None;
            said(m)["quantized_layers"][UP]["group_size"] = json!(32);
        },
        ConfigInvalid,
        UP,
        ["up_proj.group_size", "16, for quant_algo is NVFP4"],
    ),
    (
        "one algorithm for all over a layer of another",
        "mixture",
        |m| {
            m.hf_quant = None;
            *said(m) = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
        },
        SchemaInvalid,
        Q,
        ["need: nvfp4, as config.json: quantization_config: quant_algo declares", "q_proj.weight_scale`"],
    ),
    (
        "listed as FP8, stored as NVFP4",
        "mixture",
        |m| both(m, UP, json!({"quant_algo": "FP8"})),
        SchemaInvalid,
        UP,
        ["quantized_layers.model.layers.0.mlp.up_proj declares", "tensors of nvfp4"],
    ),
    (
        "listed with a scale for each out feature, stored with one",
        "mixture",
        |m| both(m, Q, json!({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"})),
        SchemaInvalid,
        Q,
        ["out feature, as config.json: quantization_config: quantized_layers", "one scale: `model.layers.0"],
    ),
    (
        "listed and stored as floats",
        "mixture",
        |m| undo(m, UP),
        SchemaInvalid,
        UP,
        [
            "quantized_layers.model.layers.0.mlp.up_proj declares",
            "dense (float32): `model.layers.0.mlp.up_proj.weight`",
        ],
    ),
    (
        "a group of other numbers than the algorithm's",
        "nvfp4_modelopt",
        |m| {
            m.hf_quant = None;
            said(m)["config_groups"]["group_0"]["weights"]["num_bits"] = json!(8);
        },
        ConfigInvalid,
        "num_bits",
        ["config_groups.group_0.weights.num_bits", "4, for quant_algo is NVFP4"],
    ),
    (
        "another tool in one of the files",
        "nvfp4_ct",
        |m| m.hf_quant = Model::golden("a", "nvfp4_modelopt").hf_quant,
        ConfigInvalid,
        "quant_method",
        ["config.json: quantization_config: quant_method", "there is a hf_quant_config.json"],
    ),
];
