//! What MLX says of its words, in two fields, and what the words are.
use super::handmade::{Model, Tensor};
use super::{Case, UP, narrow};
use q4_core::Code::{ConfigInvalid, SchemaInvalid, TensorShape};
use serde_json::{Value, json};

pub const MLX: [Case; 16] = [
    (
        "codes of eight bits",
        "mlx_affine",
        |m| both(m, "bits", json!(8)),
        ConfigInvalid,
        "config.json: quantization: bits",
        ["need: 4", "have: 8"],
    ),
    (
        "groups that the mode has none of",
        "mlx_affine",
        |m| both(m, "group_size", json!(16)),
        ConfigInvalid,
        "config.json: quantization: group_size",
        ["32 or 64 or 128, for mode is affine", "have: 16"],
    ),
    (
        "a mode that nobody knows",
        "mlx_mxfp4",
        |m| both(m, "mode", json!("mxfp8")),
        ConfigInvalid,
        "config.json: quantization: mode",
        ["affine, mxfp4 or nvfp4", "mxfp8"],
    ),
    (
        "two fields that differ",
        "mlx_affine",
        |m| m.config["quantization"]["group_size"] = json!(32),
        ConfigInvalid,
        "quantization",
        ["64, as quantization_config.group_size says", "have 32"],
    ),
    (
        "groups of another size than the scales have",
        "mlx_affine",
        |m| both(m, "group_size", json!(32)),
        SchemaInvalid,
        "model.embed_tokens",
        ["per 32, as config.json: quantization", "per 64: `model.embed_tokens.weight`"],
    ),
    (
        "powers of two over biases",
        "mlx_affine",
        |m| {
            both(m, "mode", json!("mxfp4"));
            both(m, "group_size", json!(32));
        },
        SchemaInvalid,
        "model.embed_tokens",
        ["mxfp4 with a scale per 32, as config.json: quantization", "int4-affine with a scale per 64"],
    ),
    (
        "a module of other groups by name",
        "mlx_affine",
        |m| both(m, UP, json!({"group_size": 32, "bits": 4})),
        SchemaInvalid,
        UP,
        ["per 32, as config.json: quantization.model.layers.0.mlp.up_proj", "per 64"],
    ),
    (
        "a module of six bits by name",
        "mlx_affine",
        |m| both(m, UP, json!({"group_size": 64, "bits": 6})),
        ConfigInvalid,
        "config.json: quantization: model.layers.0.mlp.up_proj.bits",
        ["need: 4", "have: 6"],
    ),
    (
        "a module with a scale for the whole of it",
        "mlx_nvfp4",
        |m| both(m, UP, json!({"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": true})),
        ConfigInvalid,
        "config.json: quantization: model.layers.0.mlp.up_proj.global_scale",
        ["need: group_size, bits and mode alone", "have: true"],
    ),
    (
        "a scale for the whole of a module that has no place for it",
        "mlx_nvfp4",
        |m| m.tensors.push(Tensor::new(&format!("{UP}.global_scale"), "F32", &[], vec![0, 0, 128, 63])),
        SchemaInvalid,
        "model.layers.0.mlp.up_proj.global_scale`",
        ["need: a layer without it", "beside `model.layers.0.mlp.up_proj.weight`"],
    ),
    (
        "biases that are not there",
        "mlx_affine",
        |m| drop(m.remove(&format!("{UP}.biases"))),
        SchemaInvalid,
        UP,
        ["biases: need bfloat16", "no such tensor"],
    ),
    (
        "biases of another type than the scales",
        "mlx_affine",
        |m| m.edit(&format!("{UP}.biases")).dtype = "F16".into(),
        SchemaInvalid,
        UP,
        ["biases: need bfloat16", "have float16"],
    ),
    (
        "biases for half of the out features",
        "mlx_affine",
        |m| narrow(m, UP, "biases", [96, 1]),
        SchemaInvalid,
        UP,
        ["biases: need [192, 1], as scales have", "have [96, 1]"],
    ),
    (
        "biases beside powers of two",
        "mlx_mxfp4",
        |m| m.tensors.push(Tensor::new(&format!("{UP}.biases"), "U8", &[192, 2], vec![0; 384])),
        SchemaInvalid,
        UP,
        ["biases: need none beside scales of a byte", "have a tensor"],
    ),
    (
        "words of eight bits a code",
        "mlx_affine",
        |m| narrow(m, UP, "weight", [192, 16]),
        TensorShape,
        "model.layers.0.mlp.up_proj.weight`",
        ["need: [192, 64], as config.json", "have: [192, 128] of 4 bits, or codes of 8 bits"],
    ),
    (
        "a head of its own beside a tied embedding",
        "mlx_affine",
        |m| {
            for part in ["weight", "scales", "biases"] {
                let tensor = m.get(&format!("model.embed_tokens.{part}")).clone();
                m.tensors.push(Tensor { name: format!("lm_head.{part}"), ..tensor });
            }
        },
        SchemaInvalid,
        "lm_head.weight`: config.json ties it",
        ["tie_word_embeddings is true in config.json", "a head of its own"],
    ),
];

/// A field of both that MLX writes.
fn both(m: &mut Model, field: &str, value: Value) {
    m.config["quantization"][field] = value.clone();
    m.config["quantization_config"][field] = value;
}
