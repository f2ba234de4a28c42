//! Heads, sizes, and parts of a layer that its layout has no place for.
use super::handmade::Tensor;
use super::{Case, UP, packed_head};
use q4_core::Code::{SchemaInvalid, TensorMissing, TensorShape};
use serde_json::json;

pub const WHOLE: [Case; 8] = [
    (
        "a tied head with values of its own",
        "",
        |m| {
            let mut head = m.get("model.embed_tokens.weight").clone();
            head.bytes[0] ^= 1;
            m.tensors.push(Tensor { name: "lm_head.weight".into(), ..head });
        },
        SchemaInvalid,
        "lm_head.weight`",
        ["config.json ties it", "the same values as model.embed_tokens.weight"],
    ),
    (
        "a tied head with a packed copy",
        "nvfp4_ct_w4a16",
        |m| packed_head(m),
        SchemaInvalid,
        "lm_head.weight_packed`",
        ["tie_word_embeddings is true in config.json", "a head of its own"],
    ),
    (
        "a head of its own that is not there",
        "",
        |m| m.config["tie_word_embeddings"] = json!(false),
        TensorMissing,
        "lm_head.weight`",
        ["a head of its own", "tie_word_embeddings is false in config.json"],
    ),
    (
        "a width that the layers do not have",
        "int4_ct",
        |m| m.config["intermediate_size"] = json!(128),
        TensorShape,
        "model.layers.0.mlp.gate_proj.weight_packed`",
        ["[128, 64], as config.json says", "have: [192, 64]"],
    ),
    (
        "a layer more than there are",
        "gptq",
        |m| m.config["num_hidden_layers"] = json!(3),
        TensorMissing,
        "model.layers.2",
        ["model.layers.2.input_layernorm.weight", "3 layers, as num_hidden_layers of config.json says"],
    ),
    (
        "a scale of a tensor beside FP8",
        "fp8_tensor_ct",
        |m| m.tensors.push(Tensor::new(&format!("{UP}.weight_scale_2"), "F32", &[], vec![0; 4])),
        SchemaInvalid,
        UP,
        ["up_proj.weight_scale_2", "none beside FP8 weights"],
    ),
    (
        "scales of two conventions",
        "fp8_channel_ct",
        |m| {
            let again = m.get(&format!("{UP}.weight_scale")).clone();
            m.tensors.push(Tensor { name: format!("{UP}.weight_scale_inv"), ..again });
        },
        SchemaInvalid,
        UP,
        ["weight_scale: need it or weight_scale_inv", "have both"],
    ),
    (
        "a factor of inputs that the layout does not have",
        "int4_ct",
        |m| m.tensors.push(Tensor::new(&format!("{UP}.pre_quant_scale"), "F32", &[64], vec![0; 256])),
        SchemaInvalid,
        UP,
        ["up_proj.pre_quant_scale`", "beside `model.layers.0.mlp.up_proj.weight_packed`"],
    ),
];
