//! `config.json` of the model in a file.
use crate::facts::Facts;
use crate::{GgmlType, Gguf};
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value, json};

/// An architecture of GGUF, and what transformers calls it.
struct Family {
    name: &'static str,
    class: &'static str,
    /// Whether `attention_bias` is a field of it. Qwen2 has biases on q, k and v always.
    optional_bias: bool,
}

static FAMILIES: [Family; 2] = [
    Family { name: "qwen3", class: "Qwen3ForCausalLM", optional_bias: true },
    Family { name: "qwen2", class: "Qwen2ForCausalLM", optional_bias: false },
];

/// The `config.json` that transformers has for the model, in the published layout: `rope_theta` and
/// `rope_scaling`. `vocab_size` is the rows of the embedding, `tie_word_embeddings` is true without
/// `output.weight`, and `torch_dtype` is there where the embedding is dense.
///
/// # Errors
/// [`Code::ConfigInvalid`] for another architecture than qwen3 and qwen2, for a part of a model, and with
/// every problem of the metadata at once; keys of the architecture that are not understood are problems too.
/// [`Code::TensorMissing`] without an embedding, [`Code::TensorShape`] for one that is no matrix.
pub fn config(gguf: &Gguf<'_>) -> Result<Value> {
    whole_model(gguf)?;
    let family = family(gguf)?;
    let embedding = gguf.tensor("token_embd.weight").ok_or_else(|| {
        Error::new(Code::TensorMissing, "token_embd.weight")
            .need("the embedding")
            .have("no tensor of that name")
    })?;
    let &[rows, _] = embedding.shape() else {
        return Err(Error::new(Code::TensorShape, "token_embd.weight")
            .need("two extents")
            .have(format!("{:?}", embedding.shape())));
    };

    let mut f = Facts::of(gguf, family.name);
    let hidden = f.size("embedding_length");
    let heads = f.size("attention.head_count");
    let kv_heads = f.optional_size("attention.head_count_kv").unwrap_or(heads);
    let head_dim = head_dim(&mut f, hidden, heads);
    let positions = f.size("context_length");
    let eps = f.positive("attention.layer_norm_rms_epsilon");
    f.only("vocab_size", &format!("{rows}, the rows of the embedding"), |v| v.whole() == Some(rows as u64));
    f.only("attention.causal", "true", |v| v.flag() == Some(true));

    let mut c = Map::new();
    let mut put = |name: &str, value: Value| c.insert(name.to_owned(), value);
    put("architectures", json!([family.class]));
    put("model_type", family.name.into());
    put("hidden_size", hidden.into());
    put("intermediate_size", f.size("feed_forward_length").into());
    put("num_hidden_layers", f.size("block_count").into());
    put("num_attention_heads", heads.into());
    put("num_key_value_heads", kv_heads.into());
    put("head_dim", head_dim.into());
    put("hidden_act", "silu".into());
    put("max_position_embeddings", positions.into());
    put("rms_norm_eps", eps.into());
    put("rope_theta", f.optional_positive("rope.freq_base").unwrap_or(10_000.0).into());
    put("rope_scaling", rope_scaling(&mut f, positions));
    put("vocab_size", rows.into());
    put("tie_word_embeddings", gguf.tensor("output.weight").is_none().into());
    put("use_sliding_window", false.into());
    if family.optional_bias {
        put("attention_bias", gguf.tensor("blk.0.attn_q.bias").is_some().into());
    }
    for name in ["bos_token_id", "eos_token_id"] {
        if let Some(id) = gguf.get(&format!("tokenizer.ggml.{name}")).and_then(|v| v.whole()) {
            put(name, id.into());
        }
    }
    let dtype = match embedding.kind {
        GgmlType::F32 => Some("float32"),
        GgmlType::F16 => Some("float16"),
        GgmlType::BF16 => Some("bfloat16"),
        _ => None,
    };
    if let Some(dtype) = dtype {
        put("torch_dtype", dtype.into());
    }
    f.finish()?;
    Ok(Value::Object(c))
}

fn family(gguf: &Gguf<'_>) -> Result<&'static Family> {
    let named = gguf.get("general.architecture");
    let family = named.and_then(|v| v.text()).and_then(|name| FAMILIES.iter().find(|f| f.name == name));
    family.ok_or_else(|| {
        Error::new(Code::ConfigInvalid, "GGUF metadata `general.architecture`")
            .need(FAMILIES.iter().map(|f| format!("`{}`", f.name)).collect::<Vec<_>>().join(" or "))
            .have(named.map_or("nothing".to_owned(), |v| v.to_string()))
    })
}

/// Neither an adapter nor one of several files.
fn whole_model(gguf: &Gguf<'_>) -> Result<()> {
    if let Some(kind) = gguf.get("general.type").filter(|v| v.text() != Some("model")) {
        return Err(Error::new(Code::ConfigInvalid, "GGUF metadata `general.type`")
            .need("`model`")
            .have(kind.to_string()));
    }
    if let Some(parts) = gguf.get("split.count").filter(|v| !matches!(v.whole(), Some(0 | 1))) {
        return Err(Error::new(Code::ConfigInvalid, "the file is a part of a model")
            .need("a model in one file")
            .have(format!("one of {parts} files"))
            .fix("merge them: llama-gguf-split --merge FIRST OUT"));
    }
    Ok(())
}

/// Where the file does not say, hidden / heads. Keys, values and what is turned are all that wide.
fn head_dim(f: &mut Facts<'_, '_>, hidden: u64, heads: u64) -> u64 {
    let stated = f.optional_size("attention.key_length");
    if stated.is_none() && hidden % heads != 0 {
        let need = format!("a width, for {hidden} is no multiple of {heads} heads");
        f.problem("attention.key_length", need, "nothing");
    }
    let dim = stated.unwrap_or(hidden / heads);
    for key in ["attention.value_length", "rope.dimension_count"] {
        f.only(key, &format!("{dim}, the width of a head"), |v| v.whole() == Some(dim));
    }
    dim
}

/// Null, or YaRN or linear scaling in the words of transformers. YaRN's factor on cos and sin is the usual
/// one of both: `0.1 ln(factor) + 1`.
fn rope_scaling(f: &mut Facts<'_, '_>, positions: u64) -> Value {
    let kind = f.get("rope.scaling.type");
    let known = match kind.map(|v| v.text()) {
        None | Some(Some("none")) => return Value::Null,
        Some(Some(name @ ("yarn" | "linear"))) => name,
        _ => {
            let have = kind.map(ToString::to_string).unwrap_or_default();
            f.problem("rope.scaling.type", "none, linear or yarn", have);
            return Value::Null;
        }
    };
    let factor = f.positive("rope.scaling.factor");
    let original = f.optional_size("rope.scaling.original_context_length");
    f.only("rope.scaling.finetuned", "true or false", |v| v.flag().is_some());
    if known == "linear" {
        return json!({ "rope_type": known, "factor": factor });
    }
    for key in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"] {
        f.only(key, "1 or nothing", |v| v.number() == Some(1.0));
    }
    let mut scaling = json!({
        "rope_type": known,
        "factor": factor,
        "original_max_position_embeddings": original.unwrap_or(positions),
    });
    for (key, name) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
        if let Some(beta) = f.optional_positive(&format!("rope.scaling.{key}")) {
            scaling[name] = beta.into();
        }
    }
    scaling
}
