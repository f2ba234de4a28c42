//! `model.safetensors.index.json`: which shard holds which tensor.
//!
//! The file comes with the checkpoint, so a shard's name may not lead anywhere but into the same directory.
use super::source::Source;
use super::unique::{check_length, within};
use q4_core::{Code, Error, Result};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::{collections::BTreeMap, fmt};

/// Largest index in bytes.
const LIMIT: usize = 64 << 20;
/// Most shards.
const SHARD_LIMIT: usize = 4096;

/// Tensors with their shards, both by name. A name of a shard is kept once.
pub(super) struct Shards {
    pub files: Vec<String>,
    tensors: Vec<(Box<str>, u32)>,
}

impl Shards {
    /// Tensor and shard, in the order of the tensors.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tensors.iter().map(|(tensor, shard)| (&**tensor, self.files[*shard as usize].as_str()))
    }
}

/// Damage and names that are no plain `*.safetensors` file name are [`Code::Container`].
pub(super) fn weight_map(source: &Source, name: &str) -> Result<Shards> {
    let damaged = |what: String| Error::new(Code::Container, format!("{}: {what}", source.label(name)));
    let bytes = source
        .get(name)?
        .ok_or_else(|| Error::new(Code::ModelMissing, format!("{}: no such file", source.label(name))))?;
    if bytes.len() > LIMIT {
        return Err(damaged("the file is too large".into())
            .need(format!("at most {LIMIT} bytes"))
            .have(format!("{} bytes", bytes.len())));
    }
    let Raw { weight_map } = serde_json::from_slice(&bytes).map_err(|e| {
        damaged("not an index of shards".into()).need("JSON with a weight_map").have(e.to_string())
    })?;
    let map = shards(weight_map).map_err(damaged)?;
    if map.tensors.is_empty() {
        return Err(damaged("weight_map is empty".into()));
    }
    if let Some((tensor, shard)) = map.tensors().find(|(_, shard)| !is_plain(shard)) {
        return Err(damaged(format!("weight_map: tensor `{tensor}`"))
            .need("the name of a .safetensors file in the same directory")
            .have(format!("{:?}", shard.chars().take(80).collect::<String>())));
    }
    Ok(map)
}

fn shards(mut raw: RawMap) -> Result<Shards, String> {
    raw.tensors.sort_unstable();
    if let Some([(name, _), _]) = raw.tensors.array_windows().find(|[a, b]| a.0 == b.0) {
        return Err(format!("weight_map: duplicate key `{name}`"));
    }
    // Numbers were given in the order of the file.
    let mut files = vec![String::new(); raw.shards.len()];
    raw.shards.into_iter().for_each(|(name, number)| files[number as usize] = name);
    Ok(Shards { files, tensors: raw.tensors })
}

fn is_plain(shard: &str) -> bool {
    shard.strip_suffix(".safetensors").is_some_and(|stem| {
        let ordinary = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !stem.is_empty()
            && !stem.starts_with('.')
            && shard.len() <= 255
            && stem.chars().all(ordinary)
            && !stem.contains("..")
    })
}

#[derive(Deserialize)]
struct Raw {
    weight_map: RawMap,
}

#[derive(Default)]
struct RawMap {
    tensors: Vec<(Box<str>, u32)>,
    shards: BTreeMap<String, u32>,
}

impl<'de> Deserialize<'de> for RawMap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of file names")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<RawMap, A::Error> {
                let mut map = RawMap::default();
                while let Some(tensor) = entries.next_key::<String>()? {
                    check_length(&tensor)?;
                    let shard: String = entries.next_value().map_err(|e| within(&tensor, &e))?;
                    let new = map.shards.len() as u32;
                    let number = match map.shards.get(&shard) {
                        Some(number) => *number,
                        None if map.shards.len() == SHARD_LIMIT => {
                            return Err(A::Error::custom(format!("more than {SHARD_LIMIT} files")));
                        }
                        None => *map.shards.entry(shard).or_insert(new),
                    };
                    map.tensors.push((tensor.into(), number));
                }
                Ok(map)
            }
        }
        d.deserialize_map(Entries)
    }
}
