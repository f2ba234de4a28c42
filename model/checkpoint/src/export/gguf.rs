//! Writes GGUF files: what a checkpoint says of itself as metadata, then its tensors under GGUF's names.
//!
//! What was written is read again before it has its name, the metadata too ([`agrees`]).
use super::Sink;
use super::front::Front;
use super::safetensors::Entry;
use crate::Checkpoint;
use crate::config::{DecoderConfig, RopeScaling};
use q4_core::{Code, DType, Error, Result};
use q4_gguf::{GgmlType, Head, gap, gguf_name, put_tokenizer};
use serde_json::Value;
use std::fs::File;
use std::path::Path;

/// A file under construction.
pub(super) struct Writer(Front);

impl Writer {
    /// Starts a file whose `head` describes tensors for all `entries`.
    pub fn new(file: File, path: &Path, mut head: Head, entries: &[Vec<Entry>]) -> Result<Self> {
        for entry in entries.iter().flatten() {
            let (name, kind, shape) = described(entry)?;
            head.tensor(&name, kind, &shape);
        }
        Front::new(file, path, entries.iter().map(Vec::len).sum(), &head.bytes()).map(Self)
    }

    /// Syncs the file and returns its size in bytes.
    pub fn finish(self) -> Result<u64> {
        self.0.finish()
    }
}

impl Sink for Writer {
    fn begin(&mut self, _item: usize) -> Result<()> {
        Ok(())
    }

    fn write(&mut self, entry: &Entry, bytes: &[u8]) -> Result<()> {
        self.0.take(entry, bytes)?;
        self.0.put(bytes)?;
        self.0.put(&vec![0; gap(bytes.len() as u64)])
    }
}

/// Name, type and extents of a tensor in the file; bytes of blocks have the name of their type behind their
/// own.
fn described(entry: &Entry) -> Result<(String, GgmlType, Vec<usize>)> {
    let homeless = || {
        Error::new(Code::Usage, format!("`{}`: layout gguf has no place for it", entry.name))
            .need("tensors that GGUF has a name for; nothing is dropped")
            .have("another")
            .fix("keep the layout")
    };
    let kind = match entry.dtype {
        DType::F32 => Some(GgmlType::F32),
        DType::F16 => Some(GgmlType::F16),
        DType::BF16 => Some(GgmlType::BF16),
        _ => None,
    };
    if let Some(kind) = kind {
        return Ok((gguf_name(&entry.name).ok_or_else(homeless)?, kind, entry.shape.clone()));
    }
    let (name, suffix) = entry.name.rsplit_once('.').ok_or_else(homeless)?;
    let kind =
        GgmlType::ALL.iter().find(|kind| kind.name().eq_ignore_ascii_case(suffix)).ok_or_else(homeless)?;
    let &[n, bytes] = &entry.shape[..] else { return Err(homeless()) };
    let shape = vec![n, bytes / kind.block_bytes() * kind.block_elements()];
    Ok((gguf_name(name).ok_or_else(homeless)?, *kind, shape))
}

/// [`Code::Usage`] for a tensor without a name there.
pub(super) fn check(entries: &[Entry]) -> Result<()> {
    entries.iter().try_for_each(|entry| described(entry).map(drop))
}

/// Everything but the tensors. [`Code::TokenizerInvalid`] for a tokenizer that is missing or cannot be said.
pub(super) fn head(checkpoint: &Checkpoint) -> Result<Head> {
    let c = checkpoint.config();
    let arch = c.arch.model_type;
    let mut head = Head::default();
    head.text("general.architecture", arch);
    head.text("general.type", "model");
    head.u32("general.quantization_version", 2);
    let mut size = |key: &str, value: usize| head.u32(&format!("{arch}.{key}"), value as u32);
    size("context_length", c.max_position_embeddings);
    size("embedding_length", c.hidden_size);
    size("feed_forward_length", c.intermediate_size);
    size("block_count", c.num_hidden_layers);
    size("attention.head_count", c.num_attention_heads);
    size("attention.head_count_kv", c.num_key_value_heads);
    size("attention.key_length", c.head_dim);
    size("attention.value_length", c.head_dim);
    head.f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), c.rms_norm_eps);
    head.f32(&format!("{arch}.rope.freq_base"), c.rope.theta as f32);
    put_scaling(&mut head, arch, &c.rope.scaling);

    let json = |name: &str| {
        let bytes = checkpoint.file(name)?;
        serde_json::from_slice::<Value>(&bytes).ok()
    };
    let tokenizer = json("tokenizer.json").ok_or_else(|| {
        Error::new(Code::TokenizerInvalid, "tokenizer.json")
            .need("the model's, for a GGUF file holds it")
            .have("none that can be read")
            .fix("--tokenizer PATH")
    })?;
    put_tokenizer(&mut head, &tokenizer, c.vocab_size)?;
    let (said, generation) = (json("tokenizer_config.json"), json("generation_config.json"));
    put_ends(&mut head, c, &tokenizer, [said.as_ref(), generation.as_ref()])?;
    put_wishes(&mut head, generation);
    let template = checkpoint.file("chat_template.jinja").and_then(|t| String::from_utf8(t.to_vec()).ok());
    let stored = || json("chat_template.json").into_iter().chain(said).find_map(|file| template_of(&file));
    if let Some(template) = template.or_else(stored) {
        head.text("tokenizer.chat_template", &template);
    }
    Ok(head)
}

fn put_scaling(head: &mut Head, arch: &str, scaling: &RopeScaling) {
    let mut put = |key: &str, value: f64| head.f32(&format!("{arch}.rope.scaling.{key}"), value as f32);
    match scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            put("factor", *factor);
            head.text(&format!("{arch}.rope.scaling.type"), "linear");
        }
        RopeScaling::Yarn { factor, original_max_position_embeddings, beta_fast, beta_slow, .. } => {
            put("factor", *factor);
            put("yarn_beta_fast", *beta_fast);
            put("yarn_beta_slow", *beta_slow);
            let original = *original_max_position_embeddings as u32;
            head.u32(&format!("{arch}.rope.scaling.original_context_length"), original);
            head.text(&format!("{arch}.rope.scaling.type"), "yarn");
        }
    }
}

/// The template of a file: its only one, or the one that is used unless another is named.
fn template_of(file: &Value) -> Option<String> {
    let stored = &file["chat_template"];
    let default = || stored.as_array()?.iter().find(|t| t["name"] == "default")?["template"].as_str();
    stored.as_str().or_else(default).map(str::to_owned)
}

/// The tokens that begin and end texts, by the configuration, others that end an answer, and the one that
/// fills texts up. [`Code::ConfigInvalid`] for more than a file has room for.
fn put_ends(
    head: &mut Head,
    c: &DecoderConfig,
    tokenizer: &Value,
    [said, generation]: [Option<&Value>; 2],
) -> Result<()> {
    let added = |text: &str| {
        let mut all = tokenizer["added_tokens"].as_array().into_iter().flatten();
        all.find(|token| token["content"] == text)?["id"].as_u64().map(|id| id as u32)
    };
    if let Some(bos) = c.bos_token_id {
        head.u32("tokenizer.ggml.bos_token_id", bos);
    }
    let lacks = |file: &str, need: &str, have: &[u32]| {
        Error::new(Code::ConfigInvalid, format!("{file}: eos_token_id: a GGUF file has no room for it"))
            .need(need)
            .have(format!("{have:?}"))
    };
    if let [_, _, ..] = c.eos_token_ids[..] {
        let need = "one token; others that end an answer stand in generation_config.json";
        return Err(lacks("config.json", need, &c.eos_token_ids));
    }
    let listed = generation.map(|g| &g["eos_token_id"]).into_iter();
    let listed = listed.flat_map(|ids| ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice));
    let mut ends: Vec<u32> = c.eos_token_ids.clone();
    for id in listed.filter_map(Value::as_u64).map(|id| id as u32) {
        // Readers take it for one by its text.
        if !ends.contains(&id) && (ends.is_empty() || added("<|endoftext|>") != Some(id)) {
            ends.push(id);
        }
    }
    if ends.len() > 3 {
        return Err(lacks("generation_config.json", "three tokens at most, besides <|endoftext|>", &ends));
    }
    for (name, id) in ["eos", "eot", "eom"].into_iter().zip(ends) {
        head.u32(&format!("tokenizer.ggml.{name}_token_id"), id);
    }
    let pad = said.and_then(|said| said["pad_token"].as_str().or(said["pad_token"]["content"].as_str()));
    if let Some(id) = pad.and_then(added) {
        head.u32("tokenizer.ggml.padding_token_id", id);
    }
    Ok(())
}

/// How the model wishes to be sampled.
fn put_wishes(head: &mut Head, generation: Option<Value>) {
    let Some(wishes) = generation.filter(|g| g["do_sample"].as_bool() == Some(true)) else { return };
    let wish = |name: &str| wishes[name].as_f64().map(|number| number as f32);
    for (key, name) in [
        ("temp", "temperature"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("penalty_repeat", "repetition_penalty"),
    ] {
        if let Some(number) = wish(name) {
            head.f32(&format!("general.sampling.{key}"), number);
        }
    }
    if let Some(top_k) = wishes["top_k"].as_u64() {
        head.u32("general.sampling.top_k", top_k as u32);
    }
}

/// The metadata say what the configuration did. `has_head`: the output layer is packed, tied or not.
///
/// [`Code::ConfigInvalid`] names what a GGUF file cannot say.
pub(super) fn agrees(original: &DecoderConfig, written: &DecoderConfig, has_head: bool) -> Result<()> {
    let mut want = original.clone();
    want.tie_word_embeddings &= !has_head;
    // Said by the tensors, and of the original.
    (want.dtype, want.quantization) = (written.dtype, written.quantization.clone());
    if want == *written {
        return Ok(());
    }
    let told = |c: &DecoderConfig| {
        [
            ("bos_token_id", format!("{:?}", c.bos_token_id)),
            ("eos_token_id", format!("{:?}", c.eos_token_ids)),
            ("rms_norm_eps", c.rms_norm_eps.to_string()),
            ("how heads are turned", format!("{:?} of {} elements", c.rope, c.rotary_dim)),
            ("tie_word_embeddings", c.tie_word_embeddings.to_string()),
        ]
    };
    let other = told(&want).into_iter().zip(told(written)).find(|(a, b)| a != b);
    let (want, have) = other.unwrap_or((("its sizes", format!("{want:?}")), ("", format!("{written:?}"))));
    Err(Error::new(Code::ConfigInvalid, format!("config.json: {}: a GGUF file cannot say it", want.0))
        .need(want.1)
        .have(have.1))
}
