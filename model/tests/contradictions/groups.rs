//! Groups of compressed-tensors, and the tensors of a layer in that layout.
use super::handmade::{Model, Tensor};
use super::{Case, K, Q, UP, narrow, said};
use q4_core::Code::{ConfigInvalid, SchemaInvalid};
use serde_json::json;

pub const GROUPS: [Case; 17] = [
    (
        "a group of all before those of some",
        "mixed_ct",
        |m| {
            let groups = said(m)["config_groups"].as_object_mut().unwrap();
            let all: Vec<_> = std::mem::take(groups).into_iter().collect();
            groups.extend(all.into_iter().rev());
        },
        SchemaInvalid,
        Q,
        [
            "nvfp4 with a scale per 16, as config.json: quantization_config: config_groups.group_1",
            "q_proj.weight`",
        ],
    ),
    (
        "a wildcard that takes what a later group names",
        "mixed_ct",
        |m| {
            said(m)["config_groups"]["group_0"]["targets"] = json!(["re:.*mlp.*"]);
            said(m)["config_groups"]["group_1"]["targets"] = json!(["re:.*"]);
        },
        SchemaInvalid,
        Q,
        [
            "config_groups.group_1 declares",
            "fp8 with a scale per out feature: `model.layers.0.self_attn.q_proj",
        ],
    ),
    (
        "a packed layer of no group",
        "mixed_ct",
        |m| {
            said(m)["config_groups"]["group_0"]["targets"] = json!([Q]);
            said(m)["config_groups"]["group_1"]["targets"] = json!(["re:.*mlp.*"]);
        },
        SchemaInvalid,
        K,
        [
            "config_groups.group_0 and config.json: quantization_config: config_groups.group_1",
            "k_proj.weight`",
        ],
    ),
    (
        "groups of another size than the scales have",
        "int4_ct",
        |m| said(m)["config_groups"]["group_0"]["weights"]["group_size"] = json!(64),
        SchemaInvalid,
        Q,
        [
            "per 64, as config.json: quantization_config: config_groups.group_0",
            "per 32: `model.layers.0.self_attn",
        ],
    ),
    (
        "a scale for each out feature, and scales of groups",
        "int4_ct",
        |m| said(m)["config_groups"]["group_0"]["weights"]["strategy"] = json!("channel"),
        SchemaInvalid,
        Q,
        [
            "per out feature, as config.json: quantization_config: config_groups.group_0",
            "q_proj.weight_scale`",
        ],
    ),
    (
        "bits that the packing does not have",
        "int4_ct",
        |m| said(m)["config_groups"]["group_0"]["weights"]["num_bits"] = json!(8),
        ConfigInvalid,
        "num_bits",
        ["config_groups.group_0.weights.num_bits", "4, for its format is pack-quantized"],
    ),
    (
        "words under the format of nibbles",
        "int4_ct",
        |m| *said(m) = Model::golden("a", "nvfp4_ct_w4a16").config["quantization_config"].clone(),
        SchemaInvalid,
        Q,
        ["nvfp4", "int4 with a scale per 32: `model.layers.0.self_attn.q_proj.weight_packed`"],
    ),
    (
        "scales of 32 under the format of 16",
        "mxfp4_ct",
        |m| *said(m) = Model::golden("a", "nvfp4_ct_w4a16").config["quantization_config"].clone(),
        SchemaInvalid,
        Q,
        ["nvfp4 with a scale per 16, as config.json", "mxfp4 with a scale per 32: `model.layers.0"],
    ),
    (
        "zero points that are declared and not there",
        "int4_asym_ct",
        |m| drop(m.remove(&format!("{UP}.weight_zero_point"))),
        SchemaInvalid,
        UP,
        ["int4-asym with a scale per 64, as config.json", "tensors of int4 with"],
    ),
    (
        "zero points that are there and not declared",
        "int4_asym_ct",
        |m| said(m)["config_groups"]["group_0"]["weights"]["symmetric"] = json!(true),
        SchemaInvalid,
        Q,
        ["config_groups.group_0 declares", "q_proj.weight_zero_point`"],
    ),
    (
        "zero points for other groups than the scales'",
        "int4_asym_ct",
        |m| narrow(m, UP, "weight_zero_point", [1, 2]),
        SchemaInvalid,
        UP,
        ["up_proj.weight_zero_point", "beside weight_scale [192, 1]"],
    ),
    (
        "extents that the words do not have",
        "int4_ct",
        |m| m.edit(&format!("{UP}.weight_shape")).bytes[..8].copy_from_slice(&64i64.to_le_bytes()),
        SchemaInvalid,
        UP,
        ["up_proj.weight_shape`", "[192, 64], as `model.layers.0.mlp.up_proj.weight_packed` has"],
    ),
    (
        "an order of groups beside words in order",
        "int4_ct",
        |m| m.tensors.push(Tensor::new(&format!("{UP}.weight_g_idx"), "I32", &[64], vec![0; 256])),
        SchemaInvalid,
        UP,
        ["up_proj.weight_g_idx`", "beside `model.layers.0.mlp.up_proj.weight_packed`"],
    ),
    (
        "a scale for each row on nibbles",
        "nvfp4_ct_w4a16",
        |m| narrow(m, UP, "weight_scale", [192, 1]),
        SchemaInvalid,
        UP,
        ["up_proj.weight_scale: need [192, 4]", "of weight_packed [192, 32]; have [192, 1]"],
    ),
    (
        "FP8's scale for each row on ModelOpt's nibbles",
        "nvfp4_modelopt",
        |m| narrow(m, UP, "weight_scale", [192, 1]),
        SchemaInvalid,
        UP,
        ["up_proj.weight_scale: need [192, 4]", "of weight [192, 32]; have [192, 1]"],
    ),
    (
        "NVFP4 inputs without their scale",
        "nvfp4_ct",
        |m| drop(m.remove(&format!("{UP}.input_global_scale"))),
        SchemaInvalid,
        UP,
        ["up_proj.input_global_scale`", "config.json declares NVFP4 input_activations"],
    ),
    (
        "tiles, and one scale",
        "fp8_channel_ct",
        |m| said(m)["config_groups"]["group_0"]["weights"]["strategy"] = json!("tensor"),
        SchemaInvalid,
        Q,
        ["one scale, as config.json: quantization_config: config_groups.group_0", "q_proj.weight_scale`"],
    ),
];
