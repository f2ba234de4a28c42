//! Header of a safetensors file, read strictly and once.
//!
//! The `safetensors` crate leaves duplicate keys, ranks and empty tensors alone, its errors do not name the
//! tensor, and its index would stand beside ours in memory.
use super::stored::Index;
use super::table::{Kind, Tensor};
use super::unique::{Texts, check_length, within};
use q4_core::{Code, DType, Error, Result, detect::TensorMeta};
use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Largest header in bytes, as the format states it.
const HEADER_LIMIT: u64 = 100_000_000;
/// Most dimensions a tensor may have.
const RANK_LIMIT: usize = 8;

/// The shortest entry: `"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}`.
const SHORTEST: usize = 48;

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
            .have(length.to_string())
            .fix("copy or download the file again"));
    }
    let (json, data) = rest.split_at(length as usize);
    if json.first() != Some(&b'{') {
        return Err(damaged("header".into()).need("JSON that begins with `{`").have("something else"));
    }
    let unreadable = |have: String| {
        let error = damaged("header".into()).need("JSON as the format defines it").have(have);
        error.fix("copy or download the file again")
    };
    let mut index = parse(json).map_err(|e| unreadable(e.to_string()))?;
    let tensors = &mut index.tensors;
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some([twice, _]) = tensors.array_windows().find(|[a, b]| a.name == b.name) {
        return Err(unreadable(format!("duplicate key `{}`", twice.name)));
    }
    check_coverage(tensors, data.len()).map_err(|e| e.within(file))?;
    let base = 8 + json.len();
    tensors.iter_mut().for_each(|t| t.range = base + t.range.start..base + t.range.end);
    Ok(index)
}

/// Every tensor has the bytes its shape and type take, and together they cover the data once, without a hole.
fn check_coverage(tensors: &[Tensor], data: usize) -> Result<()> {
    for Tensor { name, meta: TensorMeta { shape, .. }, kind, range, .. } in tensors {
        let damaged = |what: &str| Error::new(Code::Container, format!("tensor `{name}`: {what}"));
        let bits = shape.iter().try_fold(kind.bits, |n, &d| n.checked_mul(d));
        match bits {
            Some(0) => {
                return Err(damaged("has no element").need("extents above zero").have(format!("{shape:?}")));
            }
            Some(bits) if range.start <= range.end && bits % 8 == 0 && bits / 8 == range.len() => {}
            _ => {
                return Err(damaged("shape and type do not match its bytes")
                    .need(format!("the size of {shape:?} of {}", kind.spelled))
                    .have(format!("bytes {} to {}", range.start, range.end)));
            }
        }
    }
    // No header of at most 100 MB has more tensors than a u32 counts.
    let mut order: Vec<u32> = (0..tensors.len() as u32).collect();
    order.sort_unstable_by_key(|&i| tensors[i as usize].range.start);
    let mut at = 0;
    for Tensor { name, range, .. } in order.into_iter().map(|i| &tensors[i as usize]) {
        if range.start != at {
            let fault =
                if range.start < at { "overlaps the one before it" } else { "leaves a hole before it" };
            return Err(Error::new(Code::Container, format!("tensor `{name}`: {fault}"))
                .need(format!("a start at byte {at} of the data"))
                .have(range.start.to_string()));
        }
        at = range.end;
    }
    if at != data {
        return Err(Error::new(Code::Container, "the tensors do not end where the file ends")
            .need(format!("{at} bytes of data"))
            .have(format!("{data}"))
            .fix("copy or download the file again"));
    }
    Ok(())
}

/// The entries as they stand there, with ranges of the data. Nothing but what is handed over is kept of the
/// text, and there is room for as many as it can hold, so that the list is never copied to a longer one.
fn parse(json: &[u8]) -> serde_json::Result<Index> {
    let braces = json.iter().filter(|&&b| b == b'{').count();
    let mut text = serde_json::Deserializer::from_slice(json);
    let index = text.deserialize_map(Entries { room: braces.min(json.len() / SHORTEST) })?;
    text.end()?;
    Ok(index)
}

/// How a type is spelled, and which of ours it is.
fn kind(stored: Dtype) -> &'static Kind {
    use DType as D;
    macro_rules! kinds {
        ($($name:ident $bits:literal $dtype:expr;)*) => {
            match stored {
                $(Dtype::$name => const { &Kind::new(stringify!($name), $bits, $dtype) },)*
                // Of no size, so that no tensor of it passes.
                _ => const { &Kind::new("another type", 0, None) },
            }
        };
    }
    kinds! {
        BOOL 8 None;
        F4 4 None;
        F6_E2M3 6 None;
        F6_E3M2 6 None;
        U8 8 Some(D::U8);
        I8 8 Some(D::I8);
        F8_E5M2 8 None;
        F8_E4M3 8 Some(D::F8E4M3);
        F8_E4M3FNUZ 8 None;
        F8_E5M2FNUZ 8 None;
        F8_E8M0 8 None;
        I16 16 None;
        U16 16 None;
        F16 16 Some(D::F16);
        BF16 16 Some(D::BF16);
        I32 32 Some(D::I32);
        U32 32 None;
        F32 32 Some(D::F32);
        F64 64 Some(D::F64);
        I64 64 Some(D::I64);
        U64 64 None;
        C64 64 None;
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (usize, usize),
}

struct Shape(Box<[usize]>);

struct Entries {
    room: usize,
}

impl<'de> Visitor<'de> for Entries {
    type Value = Index;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Index, A::Error> {
        let (mut tensors, mut metadata) = (Vec::with_capacity(self.room), None);
        while let Some(name) = entries.next_key::<String>()? {
            if name == "__metadata__" {
                let texts: Texts = entries.next_value().map_err(|e| within(&name, &e))?;
                if metadata.replace(texts.0).is_some() {
                    return Err(A::Error::custom("duplicate key `__metadata__`"));
                }
                continue;
            }
            check_length(&name)?;
            let raw: Raw = entries.next_value().map_err(|e| within(&name, &e))?;
            let kind = kind(raw.dtype);
            tensors.push(Tensor {
                name: name.into(),
                meta: TensorMeta { dtype: kind.dtype, shape: raw.shape.0 },
                kind,
                file: 0,
                range: raw.data_offsets.0..raw.data_offsets.1,
            });
        }
        Ok(Index { tensors, metadata: metadata.unwrap_or_default() })
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
                let (mut shape, mut rank) = ([0; RANK_LIMIT], 0);
                while let Some(extent) = extents.next_element()? {
                    if rank == RANK_LIMIT {
                        return Err(A::Error::custom(format!("shape: more than {RANK_LIMIT} dimensions")));
                    }
                    shape[rank] = extent;
                    rank += 1;
                }
                Ok(Shape(shape[..rank].into()))
            }
        }
        d.deserialize_seq(Extents)
    }
}
