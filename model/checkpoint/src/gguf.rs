//! GGUF files as checkpoints: their tensors under the names of Hugging Face, and the files that their
//! metadata stand for.
//!
//! Blocks of MXFP4, NVFP4 and Q4_0, which is int4 in groups of 32, hold codes and scales side by side and
//! halves of a block in a byte. They are taken apart once, into the parts that those formats have elsewhere,
//! which is exact. Blocks that are a format of their own are read where they lie, under a name that says
//! their type, an embedding's, where it is the head too, also under that of the head. An embedding of Q4_0,
//! whose rows are looked up, is decoded to F32. Everything else is read where it lies; of other blocks the
//! list says the type, and nobody multiplies by them.
use super::Bytes;
use super::blocks::{apart, decode, own};
use super::table::{Kind, Tensor};
use super::unique::brief;
use q4_core::detect::TensorMeta;
use q4_core::formats::ggml::Blocks;
use q4_core::{Code, DType, Error, Result};
use q4_gguf::{GgmlType, Gguf};
use std::collections::{BTreeMap, BTreeSet};

/// What a file holds.
pub(super) struct Opened {
    /// Tensors that are read where they lie.
    pub tensors: Vec<Tensor>,
    /// Parts that were taken out of blocks, and their bytes.
    pub parts: (Vec<Tensor>, Bytes),
}

/// Tensors of `bytes`; `file` is how errors call it.
///
/// # Errors
/// [`Code::Container`] for damage, [`Code::OutOfMemory`] for more than `memory` bytes of parts.
pub(super) fn open(file: &str, bytes: &[u8], memory: Option<u64>) -> Result<Opened> {
    let gguf = Gguf::parse(file, bytes)?;
    let weights = q4_gguf::weights(&gguf)?;
    let apart_bytes: usize = weights.iter().map(|(name, stored)| taken(name, stored)).sum();
    if let Some(memory) = memory.filter(|m| apart_bytes as u64 > *m) {
        return Err(Error::new(Code::OutOfMemory, format!("{file}: its blocks taken apart"))
            .need(format!("{apart_bytes} bytes"))
            .have(format!("{memory} bytes"))
            .fix("raise --memory-limit"));
    }
    let (mut tensors, mut parts, mut packed) = (Vec::new(), Vec::new(), Vec::with_capacity(apart_bytes));
    let names: BTreeSet<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
    let has_head = names.contains(HEAD);
    for (name, stored) in &weights {
        let blocks = &bytes[stored.range.clone()];
        let (shape, layer) = (stored.shape(), name.strip_suffix(".weight"));
        if let (Some(of), &[n, k]) = (own(stored.kind), shape) {
            let shape = [n, of.row(k)];
            let named = |name: &str| tensor(&of.tensor(name), block_kind(of), &shape, stored.range.clone());
            tensors.push(named(name));
            tensors.extend((name == EMBEDDING && !has_head).then(|| named(HEAD)));
            continue;
        }
        let mut part = |name: String, kind: &'static Kind, shape: &[usize], fill: &dyn Fn(&mut Vec<u8>)| {
            let start = packed.len();
            fill(&mut packed);
            parts.push(tensor(&name, kind, shape, start..packed.len()));
        };
        if is_floats(name, stored) {
            part(name.clone(), &DECODED, shape, &|to| decode(blocks, to));
            continue;
        }
        match (stored.kind, layer, shape) {
            (GgmlType::MXFP4, Some(layer), &[n, k]) => {
                let (codes, scales) = apart::<17, 1, 16>(blocks);
                part(format!("{layer}.weight_packed"), &U8, &[n, k / 2], &|to| to.extend(&codes));
                part(format!("{layer}.weight_scale"), &U8, &[n, k / 32], &|to| to.extend(&scales));
            }
            (GgmlType::NVFP4, Some(layer), &[n, k]) => {
                let (codes, scales) = apart::<36, 4, 8>(blocks);
                part(format!("{layer}.weight"), &U8, &[n, k / 2], &|to| to.extend(&codes));
                part(format!("{layer}.weight_scale"), &E4M3, &[n, k / 16], &|to| to.extend(&scales));
                let global = format!("{layer}.weight_scale_2");
                if !names.contains(global.as_str()) {
                    part(global, &F32, &[], &|to| to.extend(1f32.to_le_bytes()));
                }
            }
            (GgmlType::Q4_0, Some(layer), &[n, k]) => {
                let (codes, scales) = apart::<18, 2, 16>(blocks);
                part(format!("{layer}.weight_packed"), &I32, &[n, k / 8], &|to| to.extend(&codes));
                part(format!("{layer}.weight_scale"), &F16, &[n, k / 32], &|to| to.extend(&scales));
            }
            _ => tensors.push(tensor(name, kind(stored.kind), shape, stored.range.clone())),
        }
    }
    Ok(Opened { tensors, parts: (parts, packed.into()) })
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Whether a tensor is an embedding in blocks that are decoded.
fn is_floats(name: &str, stored: &q4_gguf::Tensor<'_>) -> bool {
    name == EMBEDDING && stored.kind == GgmlType::Q4_0
}

/// Bytes that take the place of those of a tensor.
fn taken(name: &str, stored: &q4_gguf::Tensor<'_>) -> usize {
    match stored.kind {
        _ if is_floats(name, stored) => {
            stored.shape().iter().product::<usize>().saturating_mul(size_of::<f32>())
        }
        GgmlType::MXFP4 | GgmlType::NVFP4 | GgmlType::Q4_0 => stored.range.len() + size_of::<f32>(),
        _ => 0,
    }
}

/// Files that the metadata stand for, by the names they have in a directory: configuration and tokenizer,
/// unless the caller has others.
///
/// # Errors
/// [`Code::ConfigInvalid`] and [`Code::TokenizerInvalid`] for what is missing or not known.
pub(super) fn files(
    file: &str,
    bytes: &[u8],
    [config, tokenizer]: [bool; 2],
) -> Result<BTreeMap<String, Bytes>> {
    let gguf = Gguf::parse(file, bytes)?;
    let mut files = BTreeMap::new();
    let mut add = |name: &str, value: serde_json::Value| {
        files.insert(name.to_owned(), Bytes::from(value.to_string().into_bytes()));
    };
    if config {
        add("config.json", q4_gguf::config(&gguf)?);
        add("generation_config.json", q4_gguf::generation_config(&gguf)?);
    }
    // `none` is how files say that they have none.
    let is_there = |model: &q4_gguf::Value<'_>| model.text() != Some("none");
    if tokenizer && gguf.get("tokenizer.ggml.model").is_some_and(is_there) {
        add("tokenizer.json", q4_gguf::tokenizer(&gguf)?);
        add("tokenizer_config.json", q4_gguf::tokenizer_config(&gguf)?);
    }
    Ok(files)
}

fn tensor(name: &str, kind: &'static Kind, shape: &[usize], range: std::ops::Range<usize>) -> Tensor {
    let meta = TensorMeta { dtype: kind.dtype, shape: shape.into() };
    Tensor { name: name.into(), meta, kind, file: 0, range }
}

static U8: Kind = Kind::new("U8", 8, Some(DType::U8));
static E4M3: Kind = Kind::new("F8_E4M3", 8, Some(DType::F8E4M3));
static I32: Kind = Kind::new("I32", 32, Some(DType::I32));
static F32: Kind = Kind::new("F32", 32, Some(DType::F32));
static F16: Kind = Kind::new("F16", 16, Some(DType::F16));
static BF16: Kind = Kind::new("BF16", 16, Some(DType::BF16));
static DECODED: Kind = Kind::new("F32 of Q4_0", 32, Some(DType::F32));

/// Blocks that are a format of their own.
fn block_kind(of: Blocks) -> &'static Kind {
    static KINDS: [Kind; 4] = [
        Kind::new("Q4_K", 8, Some(DType::U8)),
        Kind::new("Q5_K", 8, Some(DType::U8)),
        Kind::new("Q6_K", 8, Some(DType::U8)),
        Kind::new("Q8_0", 8, Some(DType::U8)),
    ];
    match of {
        Blocks::Q4K => &KINDS[0],
        Blocks::Q5K => &KINDS[1],
        Blocks::Q6K => &KINDS[2],
        Blocks::Q80 => &KINDS[3],
    }
}

/// Types of floats, and names of the others, which no weight of ours has.
fn kind(of: GgmlType) -> &'static Kind {
    match of {
        GgmlType::F32 => &F32,
        GgmlType::F16 => &F16,
        GgmlType::BF16 => &BF16,
        other => &OTHERS[other.number() as usize % OTHERS.len()],
    }
}

/// By number.
static OTHERS: [Kind; LAST + 1] = {
    let mut all = [const { Kind::new("another type", 8, None) }; LAST + 1];
    let mut i = 0;
    while i < GgmlType::ALL.len() {
        let of = GgmlType::ALL[i];
        all[of.number() as usize] = Kind::new(of.name(), 8, None);
        i += 1;
    }
    all
};

/// The largest number of a type.
const LAST: usize = 41;

/// What to say of blocks that no kernel takes.
pub(super) fn refusal(name: &str, spelled: &str) -> Error {
    Error::new(Code::TensorType, format!("`{}`", brief(name)))
        .need("F32, F16, BF16, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, MXFP4 or NVFP4")
        .have(format!("blocks of {spelled}"))
        .fix("a GGUF of one of those, or the safetensors files that it was made from")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_name() {
        for of in GgmlType::ALL {
            assert_eq!(kind(*of).spelled.to_lowercase(), of.name().to_lowercase());
        }
    }
}
