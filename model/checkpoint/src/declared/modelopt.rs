//! What ModelOpt says, in `config.json` and in a file of its own, which must agree.
use super::compressed::check_group;
use super::{
    Declaration, Declared, Group, Method, Note, Reach, Targets, groups, inputs_note, kv_note, list, present,
    refuse,
};
use q4_core::{Code, Error, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// How layers of an algorithm are stored, and whether their inputs are NVFP4 too.
type Algorithm = (Declared, bool);

/// What one file says.
struct File<'a> {
    name: &'static str,
    said: &'a Value,
    /// Of all layers; `None` where each has its own.
    all: Option<Algorithm>,
    /// Of layers by name.
    layers: BTreeMap<&'a str, Algorithm>,
}

/// Reads the files that there are, the plainest first.
pub(super) fn read(files: &[(&'static str, &Value)]) -> Result<Declaration> {
    let files = files.iter().map(|(name, said)| File::of(name, said)).collect::<Result<Vec<_>>>()?;
    if let [one, other] = &files[..] {
        one.agrees(other)?;
    }
    let listed = files.iter().find(|file| !file.layers.is_empty());
    let (first, layers) = (&files[0], listed.map(|file| &file.layers));
    if first.all.is_none() && layers.is_none() {
        let need = "an algorithm for each layer, for quant_algo is MIXED_PRECISION";
        return Err(refuse(first.name, "quantized_layers", need, first.said.get("quantized_layers")));
    }
    let mut declaration = Declaration { method: Method::ModelOpt, ..Declaration::none() };
    let has_fp8;
    match (first.all, layers) {
        (Some((format, activations)), _) => {
            declaration.activations = Some(activations);
            has_fp8 = (format.schema == "fp8").then_some(first.name);
            declaration.groups.push(Group { targets: Targets::All, format, activations });
        }
        (None, layers) => {
            let mut named: BTreeMap<_, (Algorithm, BTreeSet<String>)> = BTreeMap::new();
            for (layer, algorithm) in layers.into_iter().flatten() {
                let tile = if let Reach::Tile(tile) = algorithm.0.reach { tile } else { [0, 0] };
                let key = (algorithm.0.schema, tile, algorithm.1);
                named.entry(key).or_insert((*algorithm, BTreeSet::new())).1.insert((*layer).to_owned());
            }
            has_fp8 = named.keys().any(|key| key.0 == "fp8").then_some(first.name);
            declaration.activations = Some(false);
            declaration.groups = named
                .into_values()
                .map(|((format, activations), names)| Group {
                    targets: Targets::Named(names),
                    format,
                    activations,
                })
                .collect();
        }
    }
    for file in &files {
        declaration.excluded.extend([list(file.said, "exclude_modules"), list(file.said, "ignore")].concat());
        declaration.notes.extend(file.kv_note());
    }
    declaration.notes.extend(has_fp8.map(|file| inputs_note(file, "FP8")));
    Ok(declaration)
}

impl<'a> File<'a> {
    fn of(name: &'static str, said: &'a Value) -> Result<Self> {
        let algo = present(said, "quant_algo");
        let mut file = Self { name, said, all: None, layers: BTreeMap::new() };
        if algo.and_then(Value::as_str) == Some("MIXED_PRECISION") {
            let layers = present(said, "quantized_layers").and_then(Value::as_object);
            for (layer, own) in layers.into_iter().flatten() {
                let field = format!("quantized_layers.{layer}");
                let known = present(own, "quant_algo").and_then(Value::as_str).and_then(algorithm);
                let Some(known) = known else {
                    let need = NAMES;
                    return Err(refuse(name, &format!("{field}.quant_algo"), need, own.get("quant_algo")));
                };
                if let Some(size) = present(own, "group_size").filter(|size| !is_size(&known.0, size)) {
                    return Err(refuse(name, &format!("{field}.group_size"), size_of(&known.0), Some(size)));
                }
                file.layers.insert(layer, known);
            }
            return Ok(file);
        }
        let known = match (algo.and_then(Value::as_str), groups(said).as_slice()) {
            (Some(algo), _) => algorithm(algo),
            (None, [first, ..]) if algo.is_none() => {
                let inputs = present(first, "input_activations").is_some();
                algorithm(if inputs { "NVFP4" } else { "W4A16_NVFP4" })
            }
            _ => None,
        };
        let Some((format, activations)) = known else {
            let need = format!("{NAMES} or MIXED_PRECISION");
            return Err(refuse(name, "quant_algo", &need, algo));
        };
        if let Some(size) = present(said, "group_size").filter(|size| !is_size(&format, size)) {
            return Err(refuse(name, "group_size", size_of(&format), Some(size)));
        }
        for group in groups(said) {
            match format.schema {
                "nvfp4" => {
                    check_group(name, group, activations, (4, "float", true, &|size| size == 16, "16"))?
                }
                _ => check_group(name, group, true, (8, "float", true, &|_| true, "nothing"))?,
            }
        }
        file.all = Some((format, activations));
        Ok(file)
    }

    /// One place contradicts the other.
    fn agrees(&self, other: &Self) -> Result<()> {
        let same =
            |a: &Algorithm, b: &Algorithm| a.0.schema == b.0.schema && a.0.reach == b.0.reach && a.1 == b.1;
        let is_same = match (&self.all, &other.all) {
            (Some(one), Some(two)) => same(one, two),
            (None, None) => true,
            _ => false,
        };
        if !is_same {
            let need = format!("the same as in {}", self.name);
            return Err(refuse(other.name, "quant_algo", &need, other.said.get("quant_algo")));
        }
        if self.layers.is_empty() || other.layers.is_empty() {
            return Ok(());
        }
        let names: BTreeSet<_> = self.layers.keys().chain(other.layers.keys()).collect();
        for layer in names {
            let [one, two] = [self, other].map(|file| file.layers.get(*layer));
            if !one.zip(two).is_some_and(|(one, two)| same(one, two)) {
                let words = |file: &Self, of: Option<&Algorithm>| match of {
                    Some((format, _)) => format!("{format} in {}", file.name),
                    None => format!("nothing in {}", file.name),
                };
                let what = format!("{layer}: two files declare it differently");
                return Err(Error::new(Code::ConfigInvalid, what)
                    .need(words(self, one))
                    .have(words(other, two)));
            }
        }
        Ok(())
    }

    fn kv_note(&self) -> Option<Note> {
        let kv = present(self.said, "kv_cache_quant_algo").or(present(self.said, "kv_cache_scheme"))?;
        Some(kv_note(self.name, kv))
    }
}

/// Those of [`algorithm`].
const NAMES: &str = "NVFP4, W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO";

fn algorithm(name: &str) -> Option<Algorithm> {
    let nvfp4 = Declared { schema: "nvfp4", reach: Reach::Unsaid };
    let fp8 = |tile| Declared { schema: "fp8", reach: Reach::Tile(tile) };
    Some(match name {
        "NVFP4" => (nvfp4, true),
        "W4A16_NVFP4" => (nvfp4, false),
        "FP8" => (fp8([0, 0]), false),
        "FP8_PER_CHANNEL_PER_TOKEN" => (fp8([1, 0]), false),
        "FP8_PB_WO" | "fp8_pb_wo" => (fp8([128, 128]), false),
        _ => return None,
    })
}

fn is_size(format: &Declared, size: &Value) -> bool {
    match (format.schema, format.reach) {
        ("nvfp4", _) => size.as_u64() == Some(16),
        (_, Reach::Tile([_, columns])) if columns > 0 => size.as_u64() == Some(columns.into()),
        // A writer of one size for all says it of these too.
        _ => true,
    }
}

fn size_of(format: &Declared) -> &'static str {
    if format.schema == "nvfp4" { "16" } else { "128" }
}
