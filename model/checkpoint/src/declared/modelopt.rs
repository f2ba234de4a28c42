//! What ModelOpt says, in `config.json` and in a file of its own, which must agree.
use super::compressed::{Numbers, check_group};
use super::{
    Declaration, Declared, Excluded, Group, Method, Note, Reach, Rounded, Targets, groups, inputs_note,
    kv_note, present, refuse,
};
use q4_core::{Code, Error, Result};
use q4_files::fields::show;
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
    /// The field that lists them.
    listed: &'static str,
    /// Layers that are listed as what was not quantised.
    dense: Vec<String>,
}

/// Reads the files that there are, the plainest first.
pub(super) fn read(files: &[(&'static str, &Value)]) -> Result<Declaration> {
    let files = files.iter().map(|(name, said)| File::of(name, said)).collect::<Result<Vec<_>>>()?;
    if let [one, other] = &files[..] {
        one.agrees(other)?;
    }
    let listed = files.iter().find(|file| !file.layers.is_empty());
    let first = &files[0];
    if first.all.is_none() && listed.is_none() {
        let need = "an algorithm for each layer, here or in config_groups, for quant_algo is MIXED_PRECISION";
        return Err(refuse(first.name, "quantized_layers", need, first.said.get("quantized_layers")));
    }
    let mut declaration = Declaration { method: Method::ModelOpt, ..Declaration::none() };
    let has_fp8;
    match (first.all, listed) {
        (Some((format, activations)), _) => {
            declaration.activations = Some(activations);
            has_fp8 = (format.schema == "fp8").then_some(first.name);
            let place = format!("{}: quant_algo", first.name);
            let (targets, rounded) = (Targets::All, rounded(&format));
            declaration.groups.push(Group { place, targets, format, activations, rounded });
        }
        (None, listed) => {
            let mut named: BTreeMap<_, (Algorithm, BTreeSet<String>)> = BTreeMap::new();
            for (layer, algorithm) in listed.iter().flat_map(|file| &file.layers) {
                let tile = if let Reach::Tile(tile) = algorithm.0.reach { tile } else { [0, 0] };
                let key = (algorithm.0.schema, tile, algorithm.1);
                named.entry(key).or_insert((*algorithm, BTreeSet::new())).1.insert((*layer).to_owned());
            }
            has_fp8 = named.keys().any(|key| key.0 == "fp8").then_some(first.name);
            declaration.activations = Some(false);
            declaration.groups = named
                .into_values()
                .map(|((format, activations), names)| Group {
                    place: listed.map_or_else(String::new, |file| format!("{}: {}", file.name, file.listed)),
                    targets: Targets::Named(names),
                    format,
                    activations,
                    rounded: rounded(&format),
                })
                .collect();
        }
    }
    for file in &files {
        let field = "quantized_layers, as UNQUANTIZED".to_owned();
        let dense = Excluded { file: file.name, field, patterns: file.dense.clone() };
        declaration.excluded.extend(Some(dense).filter(|list| !list.patterns.is_empty()));
        declaration.excluded.extend(Excluded::of(file.name, file.said, &["exclude_modules", "ignore"]));
        declaration.notes.extend(file.kv_note());
    }
    declaration.notes.extend(has_fp8.map(|file| inputs_note(file, "FP8")));
    Ok(declaration)
}

impl<'a> File<'a> {
    fn of(name: &'static str, said: &'a Value) -> Result<Self> {
        let algo = present(said, "quant_algo");
        let (listed, dense) = ("quantized_layers", Vec::new());
        let mut file = Self { name, said, all: None, layers: BTreeMap::new(), listed, dense };
        if algo.and_then(Value::as_str) == Some("MIXED_PRECISION") {
            let layers = present(said, "quantized_layers").and_then(Value::as_object);
            for (layer, own) in layers.into_iter().flatten() {
                let field = format!("quantized_layers.{layer}");
                if present(own, "quant_algo").and_then(Value::as_str) == Some("UNQUANTIZED") {
                    file.dense.push(layer.clone());
                    continue;
                }
                let known = present(own, "quant_algo").and_then(Value::as_str).and_then(algorithm);
                let Some(known) = known else {
                    let need = NAMES;
                    return Err(refuse(name, &format!("{field}.quant_algo"), need, own.get("quant_algo")));
                };
                if let Some(size) = present(own, "group_size").filter(|size| !is_size(&known.0, size)) {
                    let need = size_of(&known.0, own.get("quant_algo"));
                    return Err(refuse(name, &format!("{field}.group_size"), &need, Some(size)));
                }
                file.layers.insert(layer, known);
            }
            file.compare_groups()?;
            return Ok(file);
        }
        let known = match (algo.and_then(Value::as_str), groups(said).as_slice()) {
            (Some(algo), _) => algorithm(algo),
            (None, [(_, first), ..]) if algo.is_none() => {
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
            return Err(refuse(name, "group_size", &size_of(&format, algo), Some(size)));
        }
        for (place, group) in groups(said) {
            let is_nvfp4 = format.schema == "nvfp4";
            let numbers = Numbers {
                bits: if is_nvfp4 { 4 } else { 8 },
                kind: "float",
                symmetric: true,
                is_block: &|size| !is_nvfp4 || size == 16,
                blocks: if is_nvfp4 { "16" } else { "nothing" },
                why: &because(algo),
            };
            check_group(name, (&place, group), activations || !is_nvfp4, numbers)?;
        }
        file.all = Some((format, activations));
        Ok(file)
    }

    /// Groups whose targets are layers say the same as the list of layers, or what it would say.
    fn compare_groups(&mut self) -> Result<()> {
        let (is_listed, name) = (!self.layers.is_empty(), self.name);
        for (place, group) in groups(self.said) {
            let targets = present(group, "targets").and_then(Value::as_array).into_iter().flatten();
            let is_name = |target: &&str| target.contains('.') && !target.contains([':', '*']);
            let named: Vec<&'a str> = targets.filter_map(Value::as_str).filter(is_name).collect();
            if named.is_empty() {
                continue;
            }
            let Some(known) = present(group, "weights").and_then(|weights| of_group(group, weights)) else {
                let need = "numbers of NVFP4 or FP8";
                return Err(refuse(name, &format!("{place}.weights"), need, group.get("weights")));
            };
            for layer in named {
                let listed = self.layers.get(layer).filter(|_| is_listed);
                if let Some((format, _)) = listed.filter(|(format, _)| format.schema != known.0.schema) {
                    let what = format!("{layer}: two lists declare it differently");
                    return Err(Error::new(Code::ConfigInvalid, what)
                        .need(format!("{format}, as {name}: quantized_layers.{layer} says"))
                        .have(format!("{}, as {place} says", known.0)));
                }
                if !is_listed
                    && self.layers.insert(layer, known).is_some_and(|other| !is_same(&other, &known))
                {
                    let what = format!("{layer}: two lists declare it differently");
                    return Err(Error::new(Code::ConfigInvalid, what)
                        .need(format!("one group of {name}: config_groups"))
                        .have(format!("{place} and another")));
                }
                self.listed = if is_listed { self.listed } else { "config_groups" };
            }
        }
        Ok(())
    }

    /// One place contradicts the other.
    fn agrees(&self, other: &Self) -> Result<()> {
        let agree = match (&self.all, &other.all) {
            (Some(one), Some(two)) => is_same(one, two),
            (None, None) => true,
            _ => false,
        };
        if !agree {
            let said = self.said.get("quant_algo").map_or_else(|| "that of its groups".to_owned(), show);
            let need = format!("the same as in {}, {said}", self.name);
            return Err(refuse(other.name, "quant_algo", &need, other.said.get("quant_algo")));
        }
        if let (Some(one), Some(two)) = (kv_bits(self.said), kv_bits(other.said))
            && one != two
        {
            let of = |file: &Self, bits| format!("{bits} bits, as {} says", file.name);
            let what = format!("{}: kv_cache_quant_algo", other.name);
            return Err(Error::new(Code::ConfigInvalid, what).need(of(self, one)).have(of(other, two)));
        }
        if self.layers.is_empty() || other.layers.is_empty() {
            return Ok(());
        }
        let names: BTreeSet<_> = self.layers.keys().chain(other.layers.keys()).collect();
        for layer in names {
            let [one, two] = [self, other].map(|file| file.layers.get(*layer));
            if !one.zip(two).is_some_and(|(one, two)| is_same(one, two)) {
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

/// What an algorithm does with inputs of FP8 layers. Squares are of weights only.
fn rounded(format: &Declared) -> Option<Rounded> {
    match format.reach {
        Reach::Tile([0, 0]) => Some(Rounded::Stored),
        Reach::Tile([1, 0]) => Some(Rounded::Row),
        _ => None,
    }
}

fn is_same(a: &Algorithm, b: &Algorithm) -> bool {
    (a.0.schema, a.0.reach, a.1) == (b.0.schema, b.0.reach, b.1)
}

/// What the numbers of a group are.
fn of_group(group: &Value, weights: &Value) -> Option<Algorithm> {
    if let Some(name) = present(weights, "quant_algo").and_then(Value::as_str) {
        return algorithm(name);
    }
    let strategy = present(weights, "strategy").and_then(Value::as_str);
    match present(weights, "num_bits").and_then(Value::as_u64)? {
        4 if present(group, "input_activations").is_some() => algorithm("NVFP4"),
        4 => algorithm("W4A16_NVFP4"),
        8 => algorithm(match strategy {
            Some("channel") => "FP8_PER_CHANNEL_PER_TOKEN",
            Some("block") => "FP8_PB_WO",
            _ => "FP8",
        }),
        _ => None,
    }
}

fn is_size(format: &Declared, size: &Value) -> bool {
    match (format.schema, format.reach) {
        ("nvfp4", _) => size.as_u64() == Some(16),
        (_, Reach::Tile([_, columns])) if columns > 0 => size.as_u64() == Some(columns.into()),
        // A writer of one size for all says it of these too.
        _ => true,
    }
}

fn size_of(format: &Declared, algo: Option<&Value>) -> String {
    format!("{}, {}", if format.schema == "nvfp4" { "16" } else { "128" }, because(algo))
}

fn because(algo: Option<&Value>) -> String {
    match algo.and_then(Value::as_str) {
        Some(algo) => format!("for quant_algo is {algo}"),
        None => "for config_groups are of NVFP4".to_owned(),
    }
}

/// Bits of a key/value cache, in the words of either file.
fn kv_bits(said: &Value) -> Option<u64> {
    if let Some(scheme) = present(said, "kv_cache_scheme") {
        return present(scheme, "num_bits").and_then(Value::as_u64);
    }
    match present(said, "kv_cache_quant_algo").and_then(Value::as_str)? {
        "FP8" => Some(8),
        "NVFP4" => Some(4),
        _ => None,
    }
}
