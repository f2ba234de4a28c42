//! Counts, places and types of a GGUF file, and its metadata against its tensors.
use super::handmade::gguf::{File, Tensor};
use q4_core::Code::{
    self, ConfigInvalid, Container, ScaleInvalid, SchemaInvalid, TensorMissing, TensorShape,
};

/// What was changed, in which file, the code, what it is about, and the two places.
pub type Ggml = (&'static str, &'static str, fn(&mut File), Code, &'static str, [&'static str; 2]);

pub const GGUF: [Ggml; 17] = [
    (
        "more tensors than there are",
        "mxfp4",
        |f| f.counts[0] = Some(f.tensors.len() as u64 + 1),
        Container,
        "tensor",
        ["tiny.gguf", "need:"],
    ),
    (
        "more metadata than there are",
        "mxfp4",
        |f| f.counts[1] = Some(f.entries.len() as u64 + 1),
        Container,
        "the file ends inside the name of a tensor",
        ["tiny.gguf", "at byte"],
    ),
    (
        "two tensors at one place",
        "mxfp4",
        |f| f.tensors[1].offset = Some(0),
        Container,
        "tensor `token_embd.weight`",
        ["overlaps", "behind tensor `blk.0.attn_norm.weight`"],
    ),
    (
        "a tensor beyond the file",
        "mxfp4",
        |f| f.tensor("output_norm.weight").offset = Some(1 << 40),
        Container,
        "tensor `output_norm.weight`",
        ["1099511628032 bytes of data", "132608 bytes"],
    ),
    (
        "a tensor between two steps of the alignment",
        "mxfp4",
        |f| f.tensors[1].offset = Some(f.tensors[0].data.len().next_multiple_of(32) as u64 + 8),
        Container,
        "blk.0.",
        ["tiny.gguf", "32"],
    ),
    (
        "blocks longer than the rows",
        "mxfp4",
        |f| f.tensor("blk.0.ffn_down.weight").kind = 12,
        Container,
        "blk.0.ffn_down.weight",
        ["Q4_K", "256"],
    ),
    (
        "a name twice",
        "mxfp4",
        |f| f.tensor("blk.1.ffn_up.weight").name = "blk.0.ffn_up.weight".into(),
        Container,
        "blk.0.ffn_up.weight",
        ["stands in the file twice", "tiny.gguf"],
    ),
    (
        "one tensor under two names",
        "mxfp4",
        |f| f.tensor("blk.1.ffn_up.weight").name = "model.layers.0.mlp.up_proj.weight".into(),
        Container,
        "model.layers.0.mlp.up_proj.weight",
        ["`blk.0.ffn_up.weight`", "`model.layers.0.mlp.up_proj.weight`"],
    ),
    (
        "a vocabulary of another size than the embedding's",
        "mxfp4",
        |f| f.u32("qwen3.vocab_size", 300),
        ConfigInvalid,
        "qwen3.vocab_size",
        ["256, the rows of the embedding", "300"],
    ),
    (
        "a width that the embedding does not have",
        "mxfp4",
        |f| f.u32("qwen3.embedding_length", 128),
        TensorShape,
        "model.embed_tokens.weight",
        ["[256, 128], as config.json says", "[256, 64]"],
    ),
    (
        "heads that the keys do not have",
        "mxfp4",
        |f| f.u32("qwen3.attention.head_count_kv", 4),
        TensorShape,
        "k_proj",
        ["[128, 64], as config.json says", "[64, 64]"],
    ),
    (
        "a layer more than there are",
        "mxfp4",
        |f| f.u32("qwen3.block_count", 3),
        TensorMissing,
        "model.layers.2",
        ["model.layers.2.input_layernorm.weight", "3 layers, as num_hidden_layers of config.json says"],
    ),
    (
        "values of another width than the keys",
        "mxfp4",
        |f| f.u32("qwen3.attention.value_length", 16),
        ConfigInvalid,
        "qwen3.attention.value_length",
        ["32, the width of a head", "16"],
    ),
    (
        "another architecture than its keys",
        "mxfp4",
        |f| {
            let (key, value) = (8u32.to_le_bytes(), b"qwen2");
            f.entries.retain(|e| e.0 != "general.architecture");
            let bytes = [&key[..], &5u64.to_le_bytes(), value].concat();
            f.entries.push(("general.architecture".into(), bytes));
        },
        ConfigInvalid,
        "qwen2.embedding_length",
        ["need a whole number", "have nothing"],
    ),
    (
        "a factor beside blocks that have none",
        "k_quants",
        |f| factor(f, "blk.0.attn_q.scale"),
        SchemaInvalid,
        "q_proj.weight_scale_2`",
        ["would change the product", "beside `model.layers.0.self_attn.q_proj.weight.q4_k`"],
    ),
    (
        "a factor beside blocks that are taken apart",
        "q4_0",
        |f| factor(f, "blk.0.attn_q.scale"),
        SchemaInvalid,
        "q_proj.weight_scale_2`",
        ["would change the product", "q_proj.weight_packed`"],
    ),
    (
        "NVFP4 whose factor is none",
        "nvfp4",
        |f| f.tensor("blk.0.attn_q.scale").data[..4].copy_from_slice(&f32::NAN.to_le_bytes()),
        ScaleInvalid,
        "q_proj.weight_scale_2`",
        ["need", "have"],
    ),
];

fn factor(f: &mut File, name: &str) {
    let data = 2f32.to_le_bytes().to_vec();
    let tensor = Tensor { name: name.into(), extents: vec![1], kind: 0, offset: None, data };
    f.tensors.push(tensor);
}
