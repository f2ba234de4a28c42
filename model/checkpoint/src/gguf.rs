//! GGUF files as checkpoints: their tensors under the names of Hugging Face, and the files that their metadata
//! stand for.
//!
//! Blocks of MXFP4 and NVFP4 hold codes and scales side by side and halves of a block in a byte. They are taken
//! apart once, into the parts that those formats have elsewhere, which is exact; everything else is read where
//! it lies. Of other blocks the list says the type, and nobody multiplies by them.
use super::Bytes;
use super::table::{Kind, Tensor};
use super::unique::brief;
use q4_core::detect::TensorMeta;
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
    let is_apart = |kind| matches!(kind, GgmlType::MXFP4 | GgmlType::NVFP4);
    let apart_bytes: usize =
        weights.iter().filter(|(_, t)| is_apart(t.kind)).map(|(_, t)| t.range.len() + size_of::<f32>()).sum();
    if let Some(memory) = memory.filter(|m| apart_bytes as u64 > *m) {
        return Err(Error::new(Code::OutOfMemory, format!("{file}: its blocks taken apart"))
            .need(format!("{apart_bytes} bytes"))
            .have(format!("{memory} bytes"))
            .fix("raise --memory-limit"));
    }
    let (mut tensors, mut parts, mut packed) = (Vec::new(), Vec::new(), Vec::with_capacity(apart_bytes));
    let names: BTreeSet<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
    for (name, stored) in &weights {
        let blocks = &bytes[stored.range.clone()];
        let (shape, layer) = (stored.shape(), name.strip_suffix(".weight"));
        let mut part = |name: String, kind: &'static Kind, shape: &[usize], data: Vec<u8>| {
            let range = packed.len()..packed.len() + data.len();
            packed.extend(data);
            parts.push(tensor(&name, kind, shape, range));
        };
        match (stored.kind, layer, shape) {
            (GgmlType::MXFP4, Some(layer), &[n, k]) => {
                let (codes, scales) = apart::<17, 1, 16>(blocks);
                part(format!("{layer}.weight_packed"), &U8, &[n, k / 2], codes);
                part(format!("{layer}.weight_scale"), &U8, &[n, k / 32], scales);
            }
            (GgmlType::NVFP4, Some(layer), &[n, k]) => {
                let (codes, scales) = apart::<36, 4, 8>(blocks);
                part(format!("{layer}.weight"), &U8, &[n, k / 2], codes);
                part(format!("{layer}.weight_scale"), &E4M3, &[n, k / 16], scales);
                let global = format!("{layer}.weight_scale_2");
                if !names.contains(global.as_str()) {
                    part(global, &F32, &[], 1f32.to_le_bytes().to_vec());
                }
            }
            _ => tensors.push(tensor(name, kind(stored.kind), shape, stored.range.clone())),
        }
    }
    Ok(Opened { tensors, parts: (parts, packed.into()) })
}

/// Files that the metadata stand for, by the names they have in a directory: configuration and tokenizer, unless
/// the caller has others.
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
    if tokenizer && gguf.get("tokenizer.ggml.model").is_some() {
        add("tokenizer.json", q4_gguf::tokenizer(&gguf)?);
        add("tokenizer_config.json", q4_gguf::tokenizer_config(&gguf)?);
    }
    Ok(files)
}

/// Codes, low nibble first, and scales of blocks of `BLOCK` bytes: `SCALES` of those first, then as many runs
/// of `CODES` bytes, byte j of which holds elements j and `CODES` + j.
fn apart<const BLOCK: usize, const SCALES: usize, const CODES: usize>(blocks: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let count = blocks.len() / BLOCK;
    let (mut codes, mut scales) =
        (Vec::with_capacity(count * SCALES * CODES), Vec::with_capacity(count * SCALES));
    for block in blocks.as_chunks::<BLOCK>().0 {
        let (of, runs) = block.split_at(SCALES);
        scales.extend_from_slice(of);
        for run in runs.as_chunks::<CODES>().0 {
            let pairs = run.as_chunks::<2>().0;
            codes.extend(pairs.iter().map(|[a, b]| a & 15 | (b & 15) << 4));
            codes.extend(pairs.iter().map(|[a, b]| a >> 4 | b & 0xf0));
        }
    }
    (codes, scales)
}

fn tensor(name: &str, kind: &'static Kind, shape: &[usize], range: std::ops::Range<usize>) -> Tensor {
    let meta = TensorMeta { dtype: kind.dtype, shape: shape.into() };
    Tensor { name: name.into(), meta, kind, file: 0, range }
}

static U8: Kind = Kind::new("U8", 8, Some(DType::U8));
static E4M3: Kind = Kind::new("F8_E4M3", 8, Some(DType::F8E4M3));
static F32: Kind = Kind::new("F32", 32, Some(DType::F32));
static F16: Kind = Kind::new("F16", 16, Some(DType::F16));
static BF16: Kind = Kind::new("BF16", 16, Some(DType::BF16));

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
        .need("F32, F16, BF16, MXFP4 or NVFP4")
        .have(format!("blocks of {spelled}"))
        .fix("a GGUF of one of those, or the safetensors files that it was made from")
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::formats::{mxfp4, nvfp4};
    use safetensors::SafeTensors;

    /// Blocks, and what the gguf package decodes them to.
    fn recorded(name: &str) -> (Vec<u8>, Vec<f32>) {
        let file = include_bytes!("../../../conformance/golden/gguf.safetensors");
        let file = SafeTensors::deserialize(file).expect("the record");
        let get = |part: &str| file.tensor(&format!("{name}.{part}")).expect(part).data().to_vec();
        let floats = get("dequant").as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (get("blocks"), floats)
    }

    #[test]
    fn blocks_decode_as_the_gguf_package_decodes_them() {
        let (blocks, want) = recorded("mxfp4");
        let ((codes, scales), mut got) = (apart::<17, 1, 16>(&blocks), vec![0.0; want.len()]);
        mxfp4::dequantize_row(&codes, &scales, &mut got);
        assert_eq!(got, want);
        for name in ["nvfp4", "nvfp4_raw"] {
            let (blocks, want) = recorded(name);
            let ((codes, scales), mut got) = (apart::<36, 4, 8>(&blocks), vec![0.0; want.len()]);
            // GGML takes the byte of NaN for zero, which q4 refuses.
            let scales: Vec<u8> = scales.into_iter().map(|s| if s == 0x7f { 0 } else { s }).collect();
            nvfp4::dequantize_row(&codes, &scales, None, &mut got);
            assert_eq!(got, want, "{name}");
        }
    }

    #[test]
    fn every_type_has_its_name() {
        for of in GgmlType::ALL {
            assert_eq!(kind(*of).spelled.to_lowercase(), of.name().to_lowercase());
        }
    }
}
