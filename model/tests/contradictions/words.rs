//! Words of GPTQ and AWQ; what bitsandbytes and torchao say beside their tensors.
use super::handmade::{Model, Tensor};
use super::{Case, Q, UP, edit_record, edit_text, narrow, said};
use q4_core::Code::SchemaInvalid;
use serde_json::json;

pub const WORDS: [Case; 22] = [
    (
        "rows, and scales of groups",
        "gptq",
        |m| said(m)["group_size"] = json!(-1),
        SchemaInvalid,
        Q,
        ["out feature, as config.json: quantization_config: group_size", "q_proj.scales`"],
    ),
    (
        "groups of another size than the scales have",
        "awq",
        |m| said(m)["group_size"] = json!(64),
        SchemaInvalid,
        Q,
        [
            "per 64, as config.json: quantization_config: group_size",
            "per 32: `model.layers.0.self_attn.q_proj",
        ],
    ),
    (
        "symmetric with zero points off the middle",
        "gptq_v2",
        |m| said(m)["sym"] = json!(true),
        SchemaInvalid,
        Q,
        ["config.json: quantization_config: group_size and sym declares", "q_proj.qzeros`"],
    ),
    (
        "AWQ over GPTQ's words",
        "gptq",
        |m| said(m)["quant_method"] = json!("awq"),
        SchemaInvalid,
        "model.layers.0.mlp.down_proj.qweight`",
        ["out features in a word, as config.json declares", "eight in features"],
    ),
    (
        "GPTQ over AWQ's words",
        "awq",
        |m| said(m)["quant_method"] = json!("gptq"),
        SchemaInvalid,
        "model.layers.0.mlp.down_proj.qweight`",
        ["in features in a word, as config.json declares", "eight out features"],
    ),
    (
        "zero points that are not there",
        "gptq_v2",
        |m| drop(m.remove(&format!("{UP}.qzeros"))),
        SchemaInvalid,
        UP,
        ["int4-asym with a scale per 64, as config.json", "tensors of int4 with"],
    ),
    (
        "zero points for half of the out features",
        "gptq_v2",
        |m| narrow(m, UP, "qzeros", [1, 12]),
        SchemaInvalid,
        UP,
        ["up_proj.qzeros: need [1, 24]", "beside scales [1, 192]; have [1, 12]"],
    ),
    (
        "scales for half of the out features",
        "gptq",
        |m| narrow(m, UP, "scales", [2, 96]),
        SchemaInvalid,
        UP,
        ["up_proj.scales: need", "of qweight; have [2, 96]"],
    ),
    (
        "q, k and v with an order of groups each, and another declared",
        "gptq",
        |m| {
            for (i, part) in ["q", "k", "v"].into_iter().enumerate() {
                let index = m.edit(&format!("model.layers.0.self_attn.{part}_proj.g_idx"));
                index.bytes.rotate_left(4 * (8 + i));
            }
        },
        SchemaInvalid,
        "model.layers.0.self_attn.k_proj.g_idx`",
        ["in feature 23 in group 1: act-order", "as desc_act false of config.json declares"],
    ),
    (
        "an order of groups that the scales do not have",
        "gptq",
        |m| {
            said(m)["desc_act"] = json!(true);
            m.edit(&format!("{UP}.g_idx")).bytes[4 * 40] = 2;
        },
        SchemaInvalid,
        "model.layers.0.mlp.up_proj.g_idx`",
        ["0 to 1, as `model.layers.0.mlp.up_proj.scales` has them", "in feature 40 in group 2"],
    ),
    (
        "an order with a group below the first",
        "gptq",
        |m| {
            said(m)["desc_act"] = json!(true);
            m.edit(&format!("{UP}.g_idx")).bytes[..4].fill(0xff);
        },
        SchemaInvalid,
        "model.layers.0.mlp.up_proj.g_idx`",
        ["0 to 1, as `model.layers.0.mlp.up_proj.scales` has them", "in feature 0 in group -1"],
    ),
    (
        "an order of groups of two sizes",
        "gptq",
        |m| {
            said(m)["desc_act"] = json!(true);
            m.edit(&format!("{UP}.g_idx")).bytes[4 * 40] = 0;
        },
        SchemaInvalid,
        "model.layers.0.mlp.up_proj.g_idx`",
        [
            "32 in features in each of the 2 groups of `model.layers.0.mlp.up_proj.scales`",
            "have: 33 in group 0",
        ],
    ),
    (
        "an order of groups in numbers that are not whole",
        "gptq",
        |m| {
            said(m)["desc_act"] = json!(true);
            m.edit(&format!("{UP}.g_idx")).dtype = "F32".into();
        },
        SchemaInvalid,
        "model.layers.0.mlp.up_proj.g_idx`",
        ["need: i32", "have: float32"],
    ),
    (
        "an order of groups that is declared and not there",
        "gptq",
        |m| {
            said(m)["desc_act"] = json!(true);
            m.remove(&format!("{UP}.g_idx"));
        },
        SchemaInvalid,
        UP,
        ["g_idx, as desc_act of config.json declares", "no such tensor"],
    ),
    (
        "an order of half of the in features",
        "gptq",
        |m| {
            let index = m.edit(&format!("{UP}.g_idx"));
            index.shape = vec![32];
            index.bytes.truncate(128);
        },
        SchemaInvalid,
        "model.layers.0.mlp.up_proj.g_idx`",
        ["each of the 64 in features of `model.layers.0.mlp.up_proj.qweight`", "have: 32"],
    ),
    (
        "an order of groups in AWQ, which has none",
        "awq",
        |m| {
            let groups = (0..64u32).flat_map(|i| (i % 2).to_le_bytes()).collect();
            m.tensors.push(Tensor::new(&format!("{UP}.g_idx"), "I32", &[64], groups));
        },
        SchemaInvalid,
        "model.layers.0.mlp.up_proj.g_idx`",
        ["in feature 1 in group 1: act-order", "words of AWQ are in no other"],
    ),
    (
        "a dense matrix beside the words",
        "gptq",
        |m| {
            let dense = Model::golden("a", "").get(&format!("{UP}.weight")).clone();
            m.tensors.push(dense);
        },
        SchemaInvalid,
        UP,
        ["gptq and dense", "`model.layers.0.mlp.up_proj.weight`, `model.layers.0.mlp.up_proj.qweight`"],
    ),
    (
        "nibbles of two tools",
        "nvfp4_ct_w4a16",
        |m| {
            let nibbles = m.get(&format!("{UP}.weight_packed")).clone();
            m.tensors.push(Tensor { name: format!("{UP}.weight"), ..nibbles });
        },
        SchemaInvalid,
        UP,
        [
            "compressed-tensors and modelopt",
            "`model.layers.0.mlp.up_proj.weight`, `model.layers.0.mlp.up_proj.weight_packed`",
        ],
    ),
    (
        "a state of bitsandbytes of another shape than its codes",
        "nf4_bnb",
        |m| edit_text(m, &format!("{UP}.weight.quant_state.bitsandbytes__nf4"), "[192, 64]", "[192, 32]"),
        SchemaInvalid,
        UP,
        ["up_proj.weight: need 3072 elements, as the shape of weight.quant_state says", "have [6144, 1]"],
    ),
    (
        "a state of bitsandbytes of other blocks than its absmax",
        "nf4_bnb",
        |m| {
            edit_text(
                m,
                &format!("{UP}.weight.quant_state.bitsandbytes__nf4"),
                "\"blocksize\": 64",
                "\"blocksize\": 32",
            )
        },
        SchemaInvalid,
        UP,
        ["up_proj.weight.absmax: need 384 elements, as blocksize of weight.quant_state says", "have [192]"],
    ),
    (
        "a record of torchao of other blocks than its scales",
        "nvfp4_torchao_gs",
        |m| edit_record(m, "\"block_size\": 16", "\"block_size\": 32"),
        SchemaInvalid,
        "model.layers.0.self_attn.q_proj.weight`: block_size",
        ["__metadata__", "16, as `model.layers.0.self_attn.q_proj._weight_scale` has"],
    ),
    (
        "a record of torchao of rows over scales in tiles",
        "nvfp4_torchao_gs",
        |m| edit_record(m, "\"is_swizzled_scales\": true", "\"is_swizzled_scales\": false"),
        SchemaInvalid,
        "model.layers.0.self_attn.q_proj.weight`: is_swizzled_scales",
        ["__metadata__", "true, as the shape of `model.layers.0.self_attn.q_proj._weight_scale` says"],
    ),
];
