//! Names and shapes of the parts of a Qwen3 model, as its published checkpoints spell them.
//!
//! A linear layer or norm is called by its module, without `.weight`, because its tensors' suffixes depend on
//! the layout.
use crate::config::Qwen3Config;

/// The embedding's module.
pub const EMBEDDING: &str = "model.embed_tokens";
/// The last norm's module.
pub const FINAL_NORM: &str = "model.norm";
/// The output projection's module.
pub const HEAD: &str = "lm_head";

macro_rules! modules {
    ($($name:ident = $suffix:literal, $doc:literal;)*) => { $(
        #[doc = $doc]
        pub fn $name(layer: usize) -> String {
            format!(concat!("model.layers.{}.", $suffix), layer)
        }
    )* };
}

modules! {
    q = "self_attn.q_proj", "Query projection, `[heads * head_dim, hidden]`.";
    k = "self_attn.k_proj", "Key projection, `[kv_heads * head_dim, hidden]`.";
    v = "self_attn.v_proj", "Value projection, `[kv_heads * head_dim, hidden]`.";
    o = "self_attn.o_proj", "Output projection of attention, `[hidden, heads * head_dim]`.";
    gate = "mlp.gate_proj", "Gate projection, `[intermediate, hidden]`.";
    up = "mlp.up_proj", "Up projection, `[intermediate, hidden]`.";
    down = "mlp.down_proj", "Down projection, `[hidden, intermediate]`.";
    input_norm = "input_layernorm", "Norm before attention, `[hidden]`.";
    post_attention_norm = "post_attention_layernorm", "Norm before the MLP, `[hidden]`.";
    q_norm = "self_attn.q_norm", "Norm of each query head, `[head_dim]`.";
    k_norm = "self_attn.k_norm", "Norm of each key head, `[head_dim]`.";
}

/// The seven linear layers of decoder layer `layer` with their out and in features.
pub fn linears(c: &Qwen3Config, layer: usize) -> [(String, usize, usize); 7] {
    let (hidden, inter) = (c.hidden_size, c.intermediate_size);
    let (attn, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    [
        (q(layer), attn, hidden),
        (k(layer), kv, hidden),
        (v(layer), kv, hidden),
        (o(layer), hidden, attn),
        (gate(layer), inter, hidden),
        (up(layer), inter, hidden),
        (down(layer), hidden, inter),
    ]
}

/// The four norms of decoder layer `layer` with their lengths.
pub fn norms(c: &Qwen3Config, layer: usize) -> [(String, usize); 4] {
    [
        (input_norm(layer), c.hidden_size),
        (post_attention_norm(layer), c.hidden_size),
        (q_norm(layer), c.head_dim),
        (k_norm(layer), c.head_dim),
    ]
}

/// The decoder layer a tensor belongs to, by its name.
pub fn layer_of(tensor: &str) -> Option<usize> {
    tensor.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}
