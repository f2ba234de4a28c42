//! Header of a safetensors file, read strictly and once.
//!
//! The `safetensors` crate leaves duplicate keys, ranks and empty tensors alone, its errors do not name the tensor, and its index
//! would stand beside ours in memory.
use super::store::{Index, Placed};
use super::unique::{Unique, brief, insert};
use q4_core::{Code, DType, Error, Result, detect::TensorMeta};
use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::{collections::BTreeMap, fmt};

/// Largest header in bytes, as the format states it.
const HEADER_LIMIT: u64 = 100_000_000;
/// Most dimensions a tensor may have.
const RANK_LIMIT: usize = 8;

/// Places of all tensors of `bytes`; `file` is how errors call it. Every fault is [`Code::Container`].
pub(super) fn index(file: &str, bytes: &[u8]) -> Result<Index> {
    let damaged = |what: String| Error::new(Code::Container, format!("{file}: {what}"));
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(damaged("too short for a safetensors header".into())
            .need("8 bytes and a header")
            .have(format!("{} bytes", bytes.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_LIMIT || length > rest.len() as u64 {
        return Err(damaged("header length".into())
            .need(format!(
                "at most {}, what the file holds after its first 8 bytes",
                HEADER_LIMIT.min(rest.len() as u64)
            ))
            .have(length.to_string()));
    }
    let (json, data) = rest.split_at(length as usize);
    if json.first() != Some(&b'{') {
        return Err(damaged("header".into()).need("JSON that begins with `{`").have("something else"));
    }
    let header: Header = serde_json::from_slice(json)
        .map_err(|e| damaged("header".into()).need("JSON as the format defines it").have(e.to_string()))?;
    check_coverage(&header.tensors, data.len()).map_err(|e| e.within(file))?;
    let base = 8 + json.len();
    let place = |(name, raw): (String, Raw)| {
        let range = base + raw.data_offsets.0..base + raw.data_offsets.1;
        let meta = TensorMeta { dtype: dtype(raw.dtype), shape: raw.shape.0 };
        (name, Placed { meta, stored_type: spelled(raw.dtype), range })
    };
    Ok(Index { tensors: header.tensors.into_iter().map(place).collect(), metadata: header.metadata })
}

/// Every tensor has the bytes its shape and type take, and together they cover the data once, without a hole.
fn check_coverage(tensors: &BTreeMap<String, Raw>, data: usize) -> Result<()> {
    let mut order: Vec<_> = tensors.iter().map(|(name, raw)| (raw.data_offsets, name.as_str())).collect();
    order.sort_unstable();
    for (name, raw) in tensors {
        let damaged = |what: &str| Error::new(Code::Container, format!("tensor `{name}`: {what}"));
        let (start, end) = raw.data_offsets;
        let bits = raw.shape.0.iter().try_fold(raw.dtype.bitsize(), |n, &d| n.checked_mul(d));
        match bits {
            Some(0) => {
                return Err(damaged("has no element")
                    .need("extents above zero")
                    .have(format!("{:?}", raw.shape.0)));
            }
            Some(bits) if start <= end && bits % 8 == 0 && bits / 8 == end - start => {}
            _ => {
                return Err(damaged("shape and type do not match its bytes")
                    .need(format!("the size of {:?} of {}", raw.shape.0, raw.dtype))
                    .have(format!("bytes {start} to {end}")));
            }
        }
    }
    let mut at = 0;
    for ((start, end), name) in order {
        if start != at {
            let fault = if start < at { "overlaps the one before it" } else { "leaves a hole before it" };
            return Err(Error::new(Code::Container, format!("tensor `{name}`: {fault}"))
                .need(format!("a start at byte {at} of the data"))
                .have(start.to_string()));
        }
        at = end;
    }
    if at != data {
        return Err(Error::new(Code::Container, "the tensors do not end where the file ends")
            .need(format!("{at} bytes of data"))
            .have(format!("{data}"))
            .fix("copy or download the file again"));
    }
    Ok(())
}

/// How the format spells a type.
fn spelled(stored: Dtype) -> &'static str {
    match stored {
        Dtype::BOOL => "BOOL",
        Dtype::F4 => "F4",
        Dtype::F6_E2M3 => "F6_E2M3",
        Dtype::F6_E3M2 => "F6_E3M2",
        Dtype::U8 => "U8",
        Dtype::I8 => "I8",
        Dtype::F8_E5M2 => "F8_E5M2",
        Dtype::F8_E4M3 => "F8_E4M3",
        Dtype::F8_E4M3FNUZ => "F8_E4M3FNUZ",
        Dtype::F8_E5M2FNUZ => "F8_E5M2FNUZ",
        Dtype::F8_E8M0 => "F8_E8M0",
        Dtype::I16 => "I16",
        Dtype::U16 => "U16",
        Dtype::F16 => "F16",
        Dtype::BF16 => "BF16",
        Dtype::I32 => "I32",
        Dtype::U32 => "U32",
        Dtype::F32 => "F32",
        Dtype::F64 => "F64",
        Dtype::I64 => "I64",
        Dtype::U64 => "U64",
        Dtype::C64 => "C64",
        _ => "another type",
    }
}

/// The types weights of ours have; others are listed but never bound.
fn dtype(stored: Dtype) -> Option<DType> {
    Some(match stored {
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        _ => return None,
    })
}

struct Header {
    tensors: BTreeMap<String, Raw>,
    metadata: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (usize, usize),
}

struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Header, A::Error> {
                let (mut tensors, mut metadata) = (BTreeMap::new(), None);
                while let Some(key) = entries.next_key::<String>()? {
                    let named = |e: A::Error| A::Error::custom(format!("`{}`: {e}", brief(&key)));
                    if key != "__metadata__" {
                        let raw = entries.next_value::<Raw>().map_err(named)?;
                        insert(&mut tensors, key, raw)?;
                    } else if metadata
                        .replace(entries.next_value::<Unique<String>>().map_err(named)?.0)
                        .is_some()
                    {
                        return Err(A::Error::custom("duplicate key `__metadata__`"));
                    }
                }
                Ok(Header { tensors, metadata: metadata.unwrap_or_default() })
            }
        }
        d.deserialize_map(Entries)
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Extents;
        impl<'de> Visitor<'de> for Extents {
            type Value = Shape;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {RANK_LIMIT} extents")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut extents: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(extent) = extents.next_element()? {
                    if shape.len() == RANK_LIMIT {
                        return Err(A::Error::custom(format!("shape: more than {RANK_LIMIT} dimensions")));
                    }
                    shape.push(extent);
                }
                Ok(Shape(shape))
            }
        }
        d.deserialize_seq(Extents)
    }
}
