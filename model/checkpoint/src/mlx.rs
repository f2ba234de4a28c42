//! Weights of MLX: words of eight codes, the lowest bits first, are the bytes that other tools store, so they
//! are read where they lie.
//!
//! MLX packs the embedding too. Its rows are looked up, so it is decoded once, to the narrowest floats that
//! hold every value: bf16, or f32 where groups have biases. Where it is the head as well, its codes have the
//! head's name.
use super::declared::Declaration;
use super::store::TensorStore;
use super::table::{Kind, Tensor};
use crate::arch::Names;
use half::bf16;
use q4_core::detect::{Detected, TensorMeta, detect};
use q4_core::{Code, DType, Error, OwnedParts, Part, Q4Schema, Result};

static WORDS: Kind = Kind::new("U32", 8, Some(DType::U8));
static BF16: Kind = Kind::new("BF16, decoded", 16, Some(DType::BF16));
static F32: Kind = Kind::new("F32, decoded", 32, Some(DType::F32));

/// What a store's tensors are, and whether the head is the embedding's codes.
pub(super) struct Read {
    pub store: TensorStore,
    pub is_head_tied: bool,
}

/// `store` with its words as bytes and its embedding decoded; the same, where nothing is MLX's.
///
/// # Errors
/// [`Code::SchemaInvalid`] for an embedding whose parts do not fit together or the declaration,
/// [`Code::OutOfMemory`] for one that takes more than `memory` bytes.
pub(super) fn read(
    store: TensorStore,
    declaration: &Declaration,
    names: &Names,
    tied: bool,
    memory: Option<u64>,
) -> Result<Read> {
    let words: Vec<Tensor> = store.table().tensors().iter().filter_map(|t| as_bytes(&store, t)).collect();
    let mut store = store.reread(words);
    let (weight, scales) = (format!("{}.weight", names.embedding), format!("{}.scales", names.embedding));
    let is_packed = store.table().get(&weight).is_some_and(|meta| meta.dtype == Some(DType::U8));
    if !is_packed || !store.table().contains_key(&scales) {
        return Ok(Read { store, is_head_tied: false });
    }
    let no_state = |_: &str| Err(Error::new(Code::Internal, "an embedding of bitsandbytes"));
    let Some(found) = detect(names.embedding, store.table(), &no_state)? else {
        return Ok(Read { store, is_head_tied: false });
    };
    declaration.check(names.embedding, &found)?;
    let (kind, bytes) = decoded(&store, names.embedding, &found, memory)?;
    let parts = [Some(&scales), found.keys.zeros.as_ref()];
    let parts: Vec<String> = parts.into_iter().flatten().cloned().collect();
    let is_head_tied = tied && !store.table().has_prefix(&format!("{}.", names.head));
    if is_head_tied {
        let of_head = |name: &String| {
            let tensor = store.table().find(name)?;
            Some(Tensor { name: name.replacen(names.embedding, names.head, 1).into(), ..tensor.clone() })
        };
        let head: Vec<Tensor> = parts.iter().chain([&weight]).filter_map(of_head).collect();
        store = store.besides(head);
    }
    let meta = TensorMeta { dtype: kind.dtype, shape: [found.n, found.k].into() };
    let table = Tensor { name: weight.into(), meta, kind, file: 0, range: 0..bytes.len() };
    let store = store.with("the embedding decoded", vec![table], bytes.into(), &parts);
    Ok(Read { store, is_head_tied })
}

/// A weight of words with scales, as bytes.
fn as_bytes(store: &TensorStore, tensor: &Tensor) -> Option<Tensor> {
    let layer = tensor.name.strip_suffix(".weight").filter(|_| tensor.kind.spelled == WORDS.spelled)?;
    let [n, words] = <[usize; 2]>::try_from(&*tensor.meta.shape).ok()?;
    store.table().get(&format!("{layer}.scales"))?;
    let meta = TensorMeta { dtype: WORDS.dtype, shape: [n, words.checked_mul(4)?].into() };
    Some(Tensor { meta, kind: &WORDS, ..tensor.clone() })
}

fn decoded(
    store: &TensorStore,
    name: &str,
    found: &Detected,
    memory: Option<u64>,
) -> Result<(&'static Kind, Vec<u8>)> {
    let (n, k) = (found.n, found.k);
    let kind = if matches!(found.schema, Q4Schema::Int4(_)) { &F32 } else { &BF16 };
    let need = n.saturating_mul(k).saturating_mul(kind.bits / 8);
    if let Some(memory) = memory.filter(|m| need as u64 > *m) {
        return Err(Error::new(Code::OutOfMemory, format!("{name}: decoded, for its rows are looked up"))
            .need(format!("{need} bytes"))
            .have(format!("{memory} bytes"))
            .fix("raise --memory-limit"));
    }
    let mut parts = OwnedParts::default();
    for part in found.schema.parts(n, k) {
        let stored = found.keys.of(part.part).map(|key| store.tensor(key)).transpose()?;
        let bytes = stored.map_or_else(Vec::new, |stored| stored.bytes.to_vec());
        parts = parts.with(part.part, part.dtype, &part.shape, bytes);
    }
    let data = parts.lend()?;
    data.need(Part::Codes)?;
    let rows = found.schema.decoder([n, k], &data)?;
    let (mut bytes, mut row) = (Vec::with_capacity(need), vec![0f32; k]);
    for r in 0..n {
        rows.row(r, &mut row);
        match kind.bits {
            16 => bytes.extend(row.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
            _ => bytes.extend(row.iter().flat_map(|v| v.to_le_bytes())),
        }
    }
    Ok((kind, bytes))
}
