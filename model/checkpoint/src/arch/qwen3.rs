//! Dense Qwen3: norms before each half of a layer and of every head, no biases, SiLU.
use super::{Activation, Arch, FieldNames, Mlp, Names, Pairs, Rotary, Size, Template};
use q4_files::fields::Fields;

/// The family.
pub static QWEN3: Arch = Arch {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    fields: FieldNames::USUAL,
    head_dim: Some(HEAD_DIM), // what transformers takes where the file does not say,
    check,
    names: Names { heads: Some(["self_attn.q_norm", "self_attn.k_norm"]), ..Names::USUAL },
    biases: &[],
    rotary: Rotary { pairs: Pairs::Halves, partial: None },
    mlp: Mlp::Dense(Activation::Silu),
    scaled_embedding: false,
    template: Template {
        family: "Qwen3",
        marker: "<|im_start|>",
        ends: &["<|im_end|>", "<|endoftext|>"],
        source: include_str!("qwen3_instruct.jinja"),
    },
    sizes: &[
        size("qwen3-0.6b", 28, 1024, 3072, 16, true),
        size("qwen3-1.7b", 28, 2048, 6144, 16, true),
        size("qwen3-4b", 36, 2560, 9728, 32, true),
        size("qwen3-8b", 36, 4096, 12288, 32, false),
        size("qwen3-14b", 40, 5120, 17408, 40, false),
        size("qwen3-32b", 64, 5120, 25600, 64, false),
    ],
};

const HEAD_DIM: usize = 128;

const fn size(
    name: &'static str,
    layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    tied: bool,
) -> Size {
    Size { name, layers, hidden, intermediate, heads, kv_heads: 8, head_dim: HEAD_DIM, vocab: 151_936, tied }
}

fn check(f: &mut Fields) {
    if f.flag("attention_bias") == Some(true) {
        f.problem("attention_bias", "false: Qwen3 projections have no bias", "true");
    }
}
