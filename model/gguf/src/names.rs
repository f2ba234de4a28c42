//! Names of tensors, here and in a checkpoint of transformers.
use crate::{Gguf, Tensor, cursor::brief};
use q4_core::{Code, Error, Result};

/// Modules that a model has once.
const OUTER: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Modules of a layer.
const INNER: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Tensors of a module. The scales of NVFP4, one f32 for the weight and one for its inputs, are named as
/// ModelOpt does, whose values they have.
const PARTS: [(&str, &str); 4] =
    [("weight", "weight"), ("bias", "bias"), ("scale", "weight_scale_2"), ("input_scale", "input_scale")];

/// What a tensor of qwen3 or qwen2 is called in a checkpoint of transformers, if it has a name there:
/// `model.layers.0.self_attn.q_proj.weight` for `blk.0.attn_q.weight`.
///
/// ```
/// let name = q4_gguf::hf_name("blk.11.ffn_down.scale").unwrap();
/// assert_eq!(name, "model.layers.11.mlp.down_proj.weight_scale_2");
/// assert_eq!(q4_gguf::gguf_name(&name).unwrap(), "blk.11.ffn_down.scale");
/// assert_eq!(q4_gguf::hf_name("blk.0.ssm_a"), None);
/// ```
pub fn hf_name(gguf: &str) -> Option<String> {
    let (module, part) = gguf.rsplit_once('.')?;
    let part = second(&PARTS, part)?;
    match module.strip_prefix("blk.") {
        None => Some(format!("{}.{part}", second(&OUTER, module)?)),
        Some(rest) => {
            let (layer, module) = rest.split_once('.')?;
            Some(format!("model.layers.{}.{}.{part}", number(layer)?, second(&INNER, module)?))
        }
    }
}

/// The way back.
pub fn gguf_name(hf: &str) -> Option<String> {
    let (module, part) = hf.rsplit_once('.')?;
    let part = first(&PARTS, part)?;
    match module.strip_prefix("model.layers.") {
        None => Some(format!("{}.{part}", first(&OUTER, module)?)),
        Some(rest) => {
            let (layer, module) = rest.split_once('.')?;
            Some(format!("blk.{}.{}.{part}", number(layer)?, first(&INNER, module)?))
        }
    }
}

/// The tensors under the names of transformers, in their order; one that has none there keeps its own.
///
/// # Errors
/// [`Code::Container`] where two would have the same name.
pub fn weights<'g, 'a>(gguf: &'g Gguf<'a>) -> Result<Vec<(String, &'g Tensor<'a>)>> {
    let named = |t: &'g Tensor<'a>| (hf_name(t.name).unwrap_or_else(|| t.name.to_owned()), t);
    let mut weights: Vec<_> = gguf.tensors().iter().map(named).collect();
    weights.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    match weights.array_windows().find(|[a, b]| a.0 == b.0) {
        None => Ok(weights),
        Some([a, b]) => Err(Error::new(Code::Container, format!("tensor `{}` is stored twice", brief(&a.0)))
            .need("one of the two")
            .have(format!("`{}` and `{}`", brief(a.1.name), brief(b.1.name)))),
    }
}

fn second(table: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    table.iter().find(|row| row.0 == name).map(|row| row.1)
}

fn first(table: &[(&'static str, &str)], name: &str) -> Option<&'static str> {
    table.iter().find(|row| row.1 == name).map(|row| row.0)
}

/// A number as both write it: `07` would not come back.
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|n: &u32| n.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_comes_back() {
        let outer = OUTER.iter().map(|row| row.0.to_owned());
        let inner = INNER.iter().flat_map(|row| [0, 7, 63].map(|n| format!("blk.{n}.{}", row.0)));
        let mut seen = std::collections::BTreeSet::new();
        for module in outer.chain(inner) {
            for (part, _) in PARTS {
                let name = format!("{module}.{part}");
                let hf = hf_name(&name).expect("known");
                assert_eq!(gguf_name(&hf), Some(name));
                assert!(seen.insert(hf));
            }
        }
        assert_eq!(seen.len(), (3 + 3 * 11) * 4);
    }

    #[test]
    fn others_have_none() {
        for name in [
            "",
            ".",
            "weight",
            "blk.weight",
            "blk..attn_q.weight",
            "blk.07.attn_q.weight",
            "blk.+7.attn_q.weight",
            "blk.99999999999.attn_q.weight",
            "blk.0.output.weight",
            "blk.0.attn_q.weight_scale_2",
            "attn_q.weight",
            "rope_freqs.weight",
            "model.embed_tokens.weight",
        ] {
            assert_eq!(hf_name(name), None, "{name}");
        }
        for name in [
            "lm_head",
            "model.layers.0.lm_head.weight",
            "token_embd.weight",
            "model.layers.x.mlp.up_proj.bias",
        ] {
            assert_eq!(gguf_name(name), None, "{name}");
        }
    }
}
