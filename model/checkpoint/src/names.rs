//! Names and shapes of the parts of a model, as its family spells them.
use crate::config::DecoderConfig;

/// The seven linear layers of decoder layer `layer` with their out and in features: q, k, v, o, gate, up,
/// down.
pub fn linears(c: &DecoderConfig, layer: usize) -> [(String, usize, usize); 7] {
    let (hidden, inter) = (c.hidden_size, c.intermediate_size);
    let (attn, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let n = &c.arch.names;
    [
        (n.q, attn, hidden),
        (n.k, kv, hidden),
        (n.v, kv, hidden),
        (n.o, hidden, attn),
        (n.gate, inter, hidden),
        (n.up, inter, hidden),
        (n.down, hidden, inter),
    ]
    .map(|(name, out, k)| (n.of(layer, name), out, k))
}

/// The norms of decoder layer `layer` with their lengths: around attention, around the MLP, of heads.
pub fn norms(c: &DecoderConfig, layer: usize) -> Vec<(String, usize)> {
    let n = &c.arch.names;
    let around = [n.attention.before, n.attention.after, n.mlp.before, n.mlp.after];
    let streams = around.into_iter().flatten().map(|name| (name, c.hidden_size));
    let heads = n.heads.into_iter().flatten().map(|name| (name, c.head_dim));
    streams.chain(heads).map(|(name, len)| (n.of(layer, name), len)).collect()
}
