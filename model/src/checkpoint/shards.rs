//! `model.safetensors.index.json`: which shard holds which tensor.
//!
//! The file comes with the checkpoint, so a shard's name may not lead anywhere but into the same directory.
use super::{source::Source, unique::Unique};
use q4_core::{Code, Error, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Largest index in bytes.
const LIMIT: usize = 64 << 20;

#[derive(Deserialize)]
struct Raw {
    weight_map: Unique<String>,
}

/// Tensor name to file name. Damage and names that are no plain `*.safetensors` file name are [`Code::Container`].
pub(super) fn weight_map(source: &Source, name: &str) -> Result<BTreeMap<String, String>> {
    let damaged = |what: String| Error::new(Code::Container, format!("{}: {what}", source.label(name)));
    let bytes = source
        .get(name)?
        .ok_or_else(|| Error::new(Code::ModelMissing, format!("{}: no such file", source.label(name))))?;
    if bytes.len() > LIMIT {
        return Err(damaged("the file is too large".into())
            .need(format!("at most {LIMIT} bytes"))
            .have(format!("{} bytes", bytes.len())));
    }
    let raw: Raw = serde_json::from_slice(&bytes).map_err(|e| {
        damaged("not an index of shards".into()).need("JSON with a weight_map").have(e.to_string())
    })?;
    let map = raw.weight_map.0;
    if map.is_empty() {
        return Err(damaged("weight_map is empty".into()));
    }
    for (tensor, shard) in &map {
        let plain = shard.strip_suffix(".safetensors").is_some_and(|stem| {
            let ordinary = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !stem.is_empty()
                && !stem.starts_with('.')
                && shard.len() <= 255
                && stem.chars().all(ordinary)
                && !stem.contains("..")
        });
        if !plain {
            return Err(damaged(format!("weight_map: tensor `{tensor}`"))
                .need("the name of a .safetensors file in the same directory")
                .have(format!("{:?}", shard.chars().take(80).collect::<String>())));
        }
    }
    Ok(map)
}

/// The shards, each once.
pub(super) fn files(map: &BTreeMap<String, String>) -> Vec<String> {
    map.values().collect::<BTreeSet<_>>().into_iter().cloned().collect()
}
