//! `q4 inspect`: what is in a weight file, without a configuration and without reading a weight.
//!
//! A file may list millions of tensors: what is told of each is written as it is found and not kept.
use crate::args::InspectArgs;
use crate::context::Context;
use crate::demo;
use crate::hub;
use crate::mistakes;
use crate::report::Outcome;
use q4_core::detect::{Layout, QuantState, detect};
use q4_core::memory::human;
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::{Order, Table, TensorStore};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::path::Path;

/// Most contradictions that are told one by one.
const TOLD: usize = 1000;
/// Widest column of names; a longer one is not cut, but its line is out of line.
const WIDEST: usize = 100;
/// Bytes of text that are written at once.
const CHUNK: usize = 1 << 16;

#[derive(Serialize)]
struct Body<'a> {
    model: String,
    format: String,
    layout: String,
    bytes: u64,
    weights: u64,
    bits_per_weight: f64,
    kinds: &'a [Kind],
    contradictions: &'a [String],
    #[serde(serialize_with = "entries")]
    tensors: &'a TensorStore,
}

fn entries<S: Serializer>(store: &&TensorStore, s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(store.entries())
}

/// All matrices of one arrangement and encoding.
#[derive(Serialize)]
struct Kind {
    layout: &'static str,
    schema: String,
    matrices: usize,
    weights: u64,
    bytes: u64,
    bits_per_weight: f64,
    /// Matrices whose groups are made of any in features.
    #[serde(skip_serializing_if = "is_none")]
    act_order: usize,
}

fn is_none(count: &usize) -> bool {
    *count == 0
}

/// Runs the verb.
pub fn run(cx: &Context, args: &InspectArgs) -> Result<Outcome> {
    if args.model == Path::new(demo::NAME) {
        return tell(cx, demo::NAME, demo::open()?.store());
    }
    let path = hub::located(&args.model)?;
    mistakes::model(&path)?;
    let store = TensorStore::open_within(&path, cx.memory_limit())?;
    tell(cx, &args.model.display().to_string(), &store)
}

fn tell(cx: &Context, name: &str, store: &TensorStore) -> Result<Outcome> {
    let found = Found::of(store);
    let bytes: u64 = store.entries().map(|e| e.bytes as u64).sum();
    let bits_per_weight = bits(bytes, found.weights);
    let format = serde_json::to_value(store.container()).ok().and_then(|v| v.as_str().map(str::to_owned));
    let format = format.unwrap_or_default();
    let mut layouts: Vec<_> = found.kinds.iter().map(|k| k.layout).filter(|l| *l != "dense").collect();
    layouts.dedup();
    let layout = if layouts.is_empty() { "dense".to_owned() } else { layouts.join("+") };
    if cx.report().is_json() {
        let body = Body {
            model: name.to_owned(),
            format,
            layout,
            bytes,
            weights: found.weights,
            bits_per_weight,
            kinds: &found.kinds,
            contradictions: &found.contradictions,
            tensors: store,
        };
        cx.report().long_document("inspect", &body)?;
        return Ok(Outcome::Done);
    }
    let mut text = String::new();
    let width = store.entries().map(|e| e.name.len()).max().unwrap_or(0).min(WIDEST);
    for e in store.entries() {
        let shape = format!("{:?}", e.shape);
        text.push_str(&format!(
            "{:<width$}  {:<9} {shape:<16} {:>10}  {}\n",
            e.name,
            e.stored_type,
            human(e.bytes as u64),
            e.file
        ));
        if text.len() >= CHUNK {
            cx.report().text(&text)?;
            text.clear();
        }
    }
    for line in &found.contradictions {
        text.push_str(&format!("contradiction: {line}\n"));
    }
    for k in &found.kinds {
        let order = if k.act_order > 0 { format!(" ({} act-order)", k.act_order) } else { String::new() };
        text.push_str(&format!(
            "{} {}: {} matrices{order}, {} weights, {}, {:.2} bits per weight\n",
            k.layout,
            k.schema,
            k.matrices,
            k.weights,
            human(k.bytes),
            k.bits_per_weight
        ));
    }
    text.push_str(&format!(
        "{name}: {format}, {} tensors, {} weights, {}, {bits_per_weight:.2} bits per weight\n",
        store.table().len(),
        found.weights,
        human(bytes)
    ));
    cx.report().text(&text)?;
    Ok(Outcome::Done)
}

struct Found {
    kinds: Vec<Kind>,
    weights: u64,
    contradictions: Vec<String>,
    untold: usize,
}

impl Found {
    fn of(store: &TensorStore) -> Self {
        let table = store.table();
        let mut kinds: BTreeMap<(&'static str, String), Kind> = BTreeMap::new();
        let mut found = Self { kinds: Vec::new(), weights: 0, contradictions: Vec::new(), untold: 0 };
        // In order, for the names are.
        let mut known = Vec::new();
        for module in modules(table) {
            let state = |key: &str| quant_state(key, store);
            match detect(module, table, &state) {
                Ok(Some(d)) => {
                    let order = match d.layout {
                        Layout::Gptq => Order::of(store, module, [d.k, d.k / d.schema.block()]),
                        _ => Ok(None),
                    };
                    let bytes: u64 =
                        d.keys.all().filter_map(|p| store.entry(p)).map(|e| e.bytes as u64).sum();
                    let weights = d.n as u64 * d.k as u64;
                    let (layout, schema) = (d.layout.as_str(), d.schema.to_string());
                    let kind = kinds.entry((layout, schema.clone())).or_insert(Kind {
                        layout,
                        schema,
                        matrices: 0,
                        weights: 0,
                        bytes: 0,
                        bits_per_weight: 0.0,
                        act_order: 0,
                    });
                    kind.matrices += 1;
                    kind.weights += weights;
                    kind.bytes += bytes;
                    kind.act_order += usize::from(matches!(order, Ok(Some(_))));
                    found.weights += weights;
                    known.push(module);
                    if let Err(e) = order {
                        let parts: Vec<_> = e.parts().map(|(part, text)| format!("{part} {text}")).collect();
                        found.contradicts(parts.join("; ").trim_start_matches("what "));
                    }
                }
                Ok(None) => {}
                Err(e) => found.contradicts(e.what()),
            }
        }
        if found.untold > 0 {
            found.contradictions.push(format!("{} more", found.untold));
        }
        // What belongs to no matrix counts as it stands: norms, tables of another rank, tensors nobody knows.
        for (name, meta) in table.iter() {
            if !ancestors(name).any(|module| known.binary_search(&module).is_ok()) {
                found.weights += meta.shape.iter().map(|&d| d as u64).product::<u64>();
            }
        }
        found.kinds =
            kinds.into_values().map(|k| Kind { bits_per_weight: bits(k.bytes, k.weights), ..k }).collect();
        found
    }

    fn contradicts(&mut self, what: &str) {
        match self.contradictions.len() {
            TOLD => self.untold += 1,
            _ => self.contradictions.push(what.to_owned()),
        }
    }
}

/// Modules that may be matrices, in order: those whose codes or weights are stored. Vectors of floats are
/// norms.
fn modules(table: &Table) -> Vec<&str> {
    const CODES: [&str; 6] =
        [".weight_packed", "._weight_qdata", ".weight.qdata", ".qdata", ".qweight", ".weight"];
    let mut modules: Vec<_> = table
        .iter()
        .filter_map(|(name, meta)| {
            let suffix = CODES.iter().find(|s| name.ends_with(**s))?;
            let norm = meta.shape.len() == 1 && meta.dtype.is_some_and(q4_core::DType::is_io);
            (!norm).then(|| &name[..name.len() - suffix.len()])
        })
        .collect();
    modules.sort_unstable();
    modules.dedup();
    modules
}

/// `a.b` and `a` of `a.b.c`.
fn ancestors(name: &str) -> impl Iterator<Item = &str> {
    name.rmatch_indices('.').map(|(at, _)| &name[..at])
}

fn bits(bytes: u64, weights: u64) -> f64 {
    if weights == 0 { 0.0 } else { 8.0 * bytes as f64 / weights as f64 }
}

/// The fields a listing needs of the JSON that bitsandbytes stores beside a weight.
fn quant_state(key: &str, store: &TensorStore) -> Result<QuantState> {
    #[derive(Deserialize)]
    struct Raw {
        quant_type: String,
        blocksize: u32,
        shape: Vec<usize>,
        nested_blocksize: Option<u32>,
        nested_offset: Option<f32>,
    }
    let raw: Raw = serde_json::from_slice(store.tensor(key)?.bytes)
        .map_err(|e| Error::new(Code::SchemaInvalid, format!("`{key}`: {e}")))?;
    let nested = raw.nested_blocksize.zip(raw.nested_offset);
    Ok(QuantState { quant_type: raw.quant_type, block: raw.blocksize, shape: raw.shape, nested })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestors_are_modules() {
        assert_eq!(ancestors("a.b.weight.absmax").collect::<Vec<_>>(), ["a.b.weight", "a.b", "a"]);
        assert_eq!(ancestors("a").count(), 0);
    }
}
