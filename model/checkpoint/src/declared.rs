//! What the configuration says about the quantisation, so that it can be held against what the tensors say.
//!
//! An algorithm we do not compute exactly is refused by name here; decoding it as another one would give
//! plausible nonsense.
use crate::words::{Packing, Words};
use q4_core::detect::{Detected, Layout};
use q4_core::formats::{self, Wire, storage::Described};
use q4_core::{Code, Error, Q4Schema, Result};
use q4_files::fields::show;
use serde_json::Value;
use std::fmt;

const CONFIG: &str = "config.json: quantization_config";
const HF_QUANT: &str = "hf_quant_config.json";

/// Tool that wrote the quantised tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Nothing is declared.
    None,
    /// NVIDIA ModelOpt.
    ModelOpt,
    /// llm-compressor, in the compressed-tensors format.
    CompressedTensors,
    /// bitsandbytes.
    Bitsandbytes,
    /// torchao.
    TorchAo,
    /// GPTQModel, AutoGPTQ, or AutoRound in their packing.
    Gptq,
    /// AutoAWQ and those who write as it did.
    Awq,
}

/// The quantisation a checkpoint declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// Tool.
    pub method: Method,
    /// Whether inputs of quantised layers are NVFP4 too; `None` where only the tensors can tell.
    pub activations: Option<bool>,
    /// Formats of the groups; none where the tool's layout says it.
    pub formats: Vec<Declared>,
    /// How words are packed, of tools that pack all of a layer so.
    pub packing: Option<Packing>,
    /// Modules that are declared not to be quantised, as the tool spells them.
    pub excluded: Vec<String>,
    /// Things that are declared but not done, for the user to know.
    pub notes: Vec<String>,
}

/// A format that layers are declared to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Declared {
    /// As its schema is called.
    pub schema: &'static str,
    /// How far a scale reaches.
    pub reach: Reach,
}

/// How many elements of k a scale is declared to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Nobody says.
    Unsaid,
    /// This many.
    Block(u32),
    /// All of an out feature.
    Row,
}

impl Declared {
    fn holds(&self, found: &Detected) -> bool {
        let block = found.schema.block();
        let fits = match self.reach {
            Reach::Unsaid => true,
            Reach::Block(size) => block == size as usize,
            Reach::Row => block == found.k,
        };
        fits && self.schema == found.schema.id().name
    }
}

impl fmt::Display for Declared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reach {
            Reach::Unsaid => f.write_str(self.schema),
            Reach::Block(size) => write!(f, "{} with a scale per {size}", self.schema),
            Reach::Row => write!(f, "{} with a scale per out feature", self.schema),
        }
    }
}

impl Declaration {
    /// A checkpoint without one.
    pub(super) fn none() -> Self {
        let (formats, excluded, notes) = (Vec::new(), Vec::new(), Vec::new());
        Self { method: Method::None, activations: None, formats, packing: None, excluded, notes }
    }

    /// Reads `quantization_config` and `hf_quant_config.json`, which must agree. Contradictions and
    /// algorithms that are not supported are [`Code::ConfigInvalid`].
    pub(super) fn read(config: Option<&Value>, hf_quant: Option<&[u8]>) -> Result<Self> {
        let hf_quant = hf_quant.map(parse_hf_quant).transpose()?;
        let method = match config {
            None => None,
            Some(c) => match text(c, "quant_method") {
                Some(m) => Some(m.to_owned()),
                None if c.get("quant_algo").is_some() || c.get("quantization").is_some() => {
                    Some("modelopt".into())
                }
                None => {
                    return Err(refuse(CONFIG, "quant_method", "the name of a tool", c.get("quant_method")));
                }
            },
        };
        if let (Some(_), Some(m)) = (&hf_quant, &method)
            && !m.starts_with("modelopt")
        {
            return Err(refuse(
                CONFIG,
                "quant_method",
                "modelopt, for there is a hf_quant_config.json",
                Some(&m.as_str().into()),
            ));
        }
        match (method.as_deref(), config, hf_quant) {
            (None, _, None) => Ok(Self::none()),
            (None, _, Some(hf)) => model_opt(HF_QUANT, &hf),
            (Some("modelopt" | "modelopt_fp4"), Some(c), hf) => {
                let own = c.get("quantization").filter(|q| q.is_object()).unwrap_or(c);
                let declared = model_opt(CONFIG, own)?;
                if let Some(hf) = hf {
                    let other = model_opt(HF_QUANT, &hf)?;
                    if declared.activations != other.activations {
                        return Err(refuse(
                            HF_QUANT,
                            "quant_algo",
                            "the same as in config.json",
                            hf.get("quant_algo"),
                        ));
                    }
                    return Ok(Self {
                        notes: [declared.notes, other.notes].concat(),
                        excluded: [declared.excluded, other.excluded].concat(),
                        ..declared
                    });
                }
                Ok(declared)
            }
            (Some("compressed-tensors"), Some(c), _) => compressed_tensors(c),
            (Some("bitsandbytes"), Some(c), _) => bitsandbytes(c),
            (Some("gptq"), Some(c), _) => gptq(c),
            (Some("awq"), Some(c), _) => awq(c),
            (Some("auto-round" | "intel/auto-round"), Some(c), _) => auto_round(c),
            (Some("torchao"), ..) => Ok(Self { method: Method::TorchAo, ..Self::none() }),
            (Some(other), ..) => {
                let need = "modelopt, compressed-tensors, bitsandbytes, torchao, gptq, awq or auto-round";
                Err(refuse(CONFIG, "quant_method", need, Some(&other.into())))
            }
        }
    }

    /// Whether `module` is declared not to be quantised; `None` where an entry is in a spelling that only its
    /// tool reads.
    pub fn excludes(&self, module: &str) -> Option<bool> {
        let mut unsure = false;
        for pattern in &self.excluded {
            match matches(pattern, module) {
                Some(true) => return Some(true),
                Some(false) => {}
                None => unsure = true,
            }
        }
        (!unsure).then_some(false)
    }

    /// Refuses a layer whose layout another tool writes, or whose format is none of those declared.
    pub(super) fn check(&self, layer: &str, found: &Detected) -> Result<()> {
        let (layout, schema) = (found.layout, found.schema.id().name);
        let is_said = found.schema.is_packed() && !self.formats.is_empty();
        if is_said && !self.formats.iter().any(|format| format.holds(found)) {
            let what = format!("{layer}: stored in another format than config.json declares");
            let need: Vec<_> = self.formats.iter().map(Declared::to_string).collect();
            return Err(Error::new(Code::SchemaInvalid, what)
                .need(need.join(" or "))
                .have(format!("the tensors of {schema} with a scale per {}", found.schema.block()))
                .fix("use the config.json that was written with these weights"));
        }
        let fits = match self.method {
            Method::None => true,
            Method::ModelOpt => matches!(layout, Layout::ModelOpt | Layout::Dense),
            Method::CompressedTensors => matches!(layout, Layout::CompressedTensors | Layout::Dense),
            Method::Bitsandbytes => matches!(layout, Layout::Bitsandbytes | Layout::Dense),
            Method::TorchAo => matches!(layout, Layout::TorchAo | Layout::Dense),
            Method::Gptq => matches!(layout, Layout::Gptq | Layout::Dense),
            Method::Awq => matches!(layout, Layout::Awq | Layout::Dense),
        };
        if fits {
            return Ok(());
        }
        Err(Error::new(
            Code::SchemaInvalid,
            format!("{layer}: stored in another layout than config.json declares"),
        )
        .need(format!("the tensors of {:?}", self.method))
        .have(layout.as_str())
        .fix("use the config.json that was written with these weights"))
    }
}

fn parse_hf_quant(bytes: &[u8]) -> Result<Value> {
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|e| Error::new(Code::ConfigInvalid, HF_QUANT).need("valid JSON").have(e.to_string()))?;
    match value.get("quantization") {
        Some(q) if q.is_object() => Ok(q.clone()),
        other => Err(refuse(HF_QUANT, "quantization", "an object", other)),
    }
}

fn model_opt(file: &str, c: &Value) -> Result<Declaration> {
    let algo = present(c, "quant_algo");
    let activations = match (algo.and_then(Value::as_str), groups(c).as_slice()) {
        (Some("NVFP4"), _) => true,
        (Some("W4A16_NVFP4"), _) => false,
        (None, [first, ..]) if algo.is_none() => present(first, "input_activations").is_some(),
        _ => return Err(refuse(file, "quant_algo", "NVFP4 or W4A16_NVFP4", algo)),
    };
    if let Some(size) = present(c, "group_size").filter(|s| s.as_u64() != Some(16)) {
        return Err(refuse(file, "group_size", "16", Some(size)));
    }
    for group in groups(c) {
        check_group(file, group, activations, ("float", true, &|size| size == 16, "16"))?;
    }
    let mut notes = Vec::new();
    if let Some(kv) = present(c, "kv_cache_quant_algo").or(present(c, "kv_cache_scheme")) {
        notes.push(kv_note(file, kv));
    }
    let excluded = [list(c, "exclude_modules"), list(c, "ignore")].concat();
    Ok(Declaration {
        method: Method::ModelOpt,
        activations: Some(activations),
        excluded,
        notes,
        ..Declaration::none()
    })
}

fn compressed_tensors(c: &Value) -> Result<Declaration> {
    let mut known: Vec<(Described, Q4Schema)> =
        formats::names().flat_map(formats::encodings).filter_map(|s| Some((s.described()?, s))).collect();
    known.dedup_by_key(|k| (k.0.format, k.0.symmetric));
    let mut names: Vec<_> = known.iter().map(|k| k.0.format).collect();
    names.dedup();
    let names = names.join(" or ");
    let groups = groups(c);
    let Some(first) = groups.first() else {
        return Err(refuse(CONFIG, "config_groups", "at least one group", c.get("config_groups")));
    };
    let activations = present(first, "input_activations").is_some();
    let mut declared = Vec::new();
    for group in &groups {
        let format = present(group, "format").or(present(c, "format"));
        let called: Vec<_> =
            known.iter().filter(|k| format.and_then(Value::as_str) == Some(k.0.format)).collect();
        let Some(usual) = called.first() else {
            return Err(refuse(CONFIG, "format", &names, format));
        };
        let weights = present(group, "weights");
        let symmetric = weights.and_then(|w| present(w, "symmetric")).and_then(Value::as_bool);
        let (described, schema) = called.iter().find(|k| Some(k.0.symmetric) == symmetric).unwrap_or(usual);
        if present(group, "input_activations").is_some() != activations {
            return Err(refuse(
                CONFIG,
                "config_groups.input_activations",
                "the same for all groups",
                group.get("input_activations"),
            ));
        }
        if let Some(inputs) = present(group, "input_activations")
            && !schema.activations().contains(&"nvfp4")
        {
            let need = format!("null: inputs of {} weights are not quantised here", schema.id().name);
            return Err(refuse(CONFIG, "config_groups.input_activations", &need, Some(inputs)));
        }
        let need = if schema.blocks().is_empty() {
            described.group_size.to_string()
        } else {
            "a multiple of 16".to_owned()
        };
        check_group(
            CONFIG,
            group,
            activations,
            (described.kind, described.symmetric, &|size| has_block(schema, size), &need),
        )?;
        let by_row = weights.and_then(|w| text(w, "strategy")) == Some("channel");
        let size = weights.and_then(|w| present(w, "group_size")).and_then(Value::as_u64);
        let reach = match size.and_then(|size| u32::try_from(size).ok()) {
            _ if by_row && !schema.blocks().is_empty() => Reach::Row,
            Some(size) => Reach::Block(size),
            None => Reach::Unsaid,
        };
        declared.push(Declared { schema: schema.id().name, reach });
    }
    let top = present(c, "format").filter(|f| f.as_str() != Some("mixed-precision"));
    if top.is_some_and(|top| !known.iter().any(|k| top.as_str() == Some(k.0.format))) {
        return Err(refuse(CONFIG, "format", &names, top));
    }
    let idle = |v: &&Value| !v.as_object().is_some_and(|o| o.is_empty());
    if let Some(t) = present(c, "transform_config").filter(idle) {
        return Err(refuse(CONFIG, "transform_config", "none: rotated weights are not supported", Some(t)));
    }
    let sparse = present(c, "sparsity_config")
        .filter(idle)
        .filter(|s| text(s, "format").is_some_and(|f| f != "dense"));
    if sparse.is_some() {
        return Err(refuse(CONFIG, "sparsity_config.format", "dense", sparse.and_then(|s| s.get("format"))));
    }
    let notes = present(c, "kv_cache_scheme").map(|kv| kv_note(CONFIG, kv)).into_iter().collect();
    let excluded = list(c, "ignore");
    let (method, activations) = (Method::CompressedTensors, Some(activations));
    Ok(Declaration { method, activations, formats: declared, excluded, notes, packing: None })
}

fn bitsandbytes(c: &Value) -> Result<Declaration> {
    let kind = present(c, "bnb_4bit_quant_type");
    if kind.and_then(Value::as_str) != Some("nf4") {
        return Err(refuse(CONFIG, "bnb_4bit_quant_type", "nf4", kind));
    }
    let four = present(c, "load_in_4bit").or(present(c, "_load_in_4bit"));
    if four.and_then(Value::as_bool) == Some(false) {
        return Err(refuse(CONFIG, "load_in_4bit", "true", four));
    }
    let mut excluded = list(c, "llm_int8_skip_modules");
    if excluded.is_empty() {
        excluded.push("lm_head".to_owned()); // what transformers leaves out by itself
    }
    let (method, activations) = (Method::Bitsandbytes, Some(false));
    Ok(Declaration { method, activations, excluded, ..Declaration::none() })
}

/// GPTQ's own fields.
fn gptq(c: &Value) -> Result<Declaration> {
    let form = present(c, "checkpoint_format");
    let words = match form.map(|f| f.as_str().unwrap_or_default()) {
        None | Some("gptq") => Words::Gptq,
        Some("gptq_v2") => Words::GptqV2,
        Some(_) => return Err(refuse(CONFIG, "checkpoint_format", "gptq or gptq_v2", form)),
    };
    let idle = |v: &&Value| v.as_object().is_none_or(|o| !o.is_empty());
    if let Some(dynamic) = present(c, "dynamic").filter(idle) {
        let need = "nothing: bits and groups of single modules are not read yet";
        return Err(refuse(CONFIG, "dynamic", need, Some(dynamic)));
    }
    let symmetric = present(c, "sym").and_then(Value::as_bool).unwrap_or(true);
    let in_order = present(c, "desc_act").and_then(Value::as_bool) != Some(true);
    int4(c, (Method::Gptq, Packing { words, symmetric, in_order }), ["bits", "group_size"], Vec::new())
}

/// AWQ's own fields, by the names of transformers or of AutoAWQ.
fn awq(c: &Value) -> Result<Declaration> {
    let is = |field: &str, words: &str| text(c, field).is_none_or(|v| v.eq_ignore_ascii_case(words));
    if !is("version", "gemm") {
        return Err(refuse(CONFIG, "version", "gemm", c.get("version")));
    }
    if let Some(zeros) = present(c, "zero_point").filter(|z| z.as_bool() != Some(true)) {
        return Err(refuse(CONFIG, "zero_point", "true", Some(zeros)));
    }
    let named = |ours, theirs| if present(c, ours).is_some() { ours } else { theirs };
    let fields = [named("bits", "w_bit"), named("group_size", "q_group_size")];
    let packing = Packing { words: Words::Awq, symmetric: false, in_order: true };
    int4(c, (Method::Awq, packing), fields, list(c, "modules_to_not_convert"))
}

/// AutoRound's fields, whose words are those of GPTQ or of AWQ.
fn auto_round(c: &Value) -> Result<Declaration> {
    let packing = present(c, "packing_format");
    let (method, words) = match packing.and_then(Value::as_str) {
        Some("auto_round:auto_gptq" | "auto_gptq") => (Method::Gptq, Words::Gptq),
        Some("auto_round:auto_awq" | "auto_awq") => (Method::Awq, Words::Awq),
        _ => {
            let need = "auto_round:auto_gptq or auto_round:auto_awq";
            return Err(refuse(CONFIG, "packing_format", need, packing));
        }
    };
    if let Some(kind) = present(c, "data_type").filter(|kind| kind.as_str() != Some("int")) {
        return Err(refuse(CONFIG, "data_type", "int", Some(kind)));
    }
    // Layers with fields of their own: those that stay as they were are no layers of int4.
    let mut excluded = Vec::new();
    for (layer, own) in present(c, "extra_config").and_then(Value::as_object).into_iter().flatten() {
        if present(own, "bits").and_then(Value::as_u64).is_none_or(|bits| bits < 16) {
            let field = format!("extra_config.{layer}");
            return Err(refuse(CONFIG, &field, "bits of 16, a layer that is not quantised", Some(own)));
        }
        excluded.push(layer.clone());
    }
    let sym = present(c, "sym").and_then(Value::as_bool).unwrap_or(true);
    let packing = Packing { words, symmetric: sym && words != Words::Awq, in_order: true };
    int4(c, (method, packing), ["bits", "group_size"], excluded)
}

fn int4(
    c: &Value,
    (method, packing): (Method, Packing),
    [bits, size]: [&str; 2],
    excluded: Vec<String>,
) -> Result<Declaration> {
    if present(c, bits).and_then(Value::as_u64) != Some(4) {
        return Err(refuse(CONFIG, bits, "4", c.get(bits)));
    }
    let reach = match present(c, size).and_then(Value::as_i64) {
        Some(-1) => Reach::Row,
        Some(size) if size > 0 && size % 16 == 0 && u32::try_from(size).is_ok() => Reach::Block(size as u32),
        _ => {
            return Err(refuse(
                CONFIG,
                size,
                "a multiple of 16, or -1 for a scale per out feature",
                c.get(size),
            ));
        }
    };
    let formats = vec![Declared { schema: if packing.symmetric { "int4" } else { "int4-asym" }, reach }];
    let (activations, packing) = (Some(false), Some(packing));
    Ok(Declaration { method, activations, formats, packing, excluded, notes: Vec::new() })
}

/// Whether an encoding of this kind has blocks of `size`.
fn has_block(schema: &Q4Schema, size: u64) -> bool {
    let (Ok(block), Some(kind)) = (u32::try_from(size), formats::kind(schema.id().name)) else {
        return false;
    };
    let Ok(other) = (kind.from_wire)(schema.id().name, &Wire { block, ..schema.wire() }) else {
        return false;
    };
    let mut is_fine = other.block() as u64 == size;
    other.check(other.block(), &mut |_| is_fine = false);
    is_fine
}

/// What numbers a group has: their type, whether zero is in their middle, blocks that there are, and these in
/// words.
type Numbers<'a> = (&'a str, bool, &'a dyn Fn(u64) -> bool, &'a str);

/// Weights (and inputs) of a group must be 4-bit `numbers`.
fn check_group(file: &str, group: &Value, activations: bool, numbers: Numbers<'_>) -> Result<()> {
    let (kind, symmetric, is_block, blocks) = numbers;
    for side in ["weights", "input_activations"] {
        let Some(format) = present(group, side) else {
            if side == "weights" {
                return Err(refuse(file, "config_groups.weights", &format!("num_bits 4, type {kind}"), None));
            }
            continue;
        };
        if side == "input_activations" && !activations {
            return Err(refuse(
                file,
                "config_groups.input_activations",
                "null for weight-only quantisation",
                Some(format),
            ));
        }
        let is = |field: &str, ok: &dyn Fn(&Value) -> bool| present(format, field).is_none_or(ok);
        let checks: [(&str, &str, bool); 4] = [
            ("num_bits", "4", format.get("num_bits").is_some_and(|v| v.as_u64() == Some(4))),
            ("type", kind, is("type", &|v| v.as_str() == Some(kind))),
            ("group_size", blocks, is("group_size", &|v| v.as_u64().is_some_and(is_block))),
            (
                "symmetric",
                if symmetric { "true" } else { "false" },
                is("symmetric", &|v| v.as_bool() == Some(symmetric)),
            ),
        ];
        if let Some((field, need, _)) = checks.into_iter().find(|c| !c.2) {
            return Err(refuse(file, &format!("config_groups.{side}.{field}"), need, format.get(field)));
        }
    }
    Ok(())
}

/// A name, a part of one, a pattern with `*`, or a regular expression behind `re:`.
fn matches(pattern: &str, module: &str) -> Option<bool> {
    if let Some(regex) = pattern.strip_prefix("re:") {
        // The pattern is untrusted: what is short and compiles to little is tried, of the rest nothing is
        // said.
        if regex.len() > 256 || regex.contains(['{', '(']) {
            return None;
        }
        return fancy_regex::Regex::new(&format!("^(?:{regex})")).ok()?.is_match(module).ok();
    }
    if pattern.contains(['?', '[']) {
        return None;
    }
    let Some((first, rest)) = pattern.split_once('*') else {
        let part = module == pattern
            || module.starts_with(&format!("{pattern}."))
            || module.ends_with(&format!(".{pattern}"))
            || module.contains(&format!(".{pattern}."));
        return Some(part);
    };
    let Some(mut left) = module.strip_prefix(first) else { return Some(false) };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = left.find(part) else { return Some(false) };
        left = &left[at + part.len()..];
    }
    Some(left.ends_with(last))
}

fn list(c: &Value, field: &str) -> Vec<String> {
    let names = present(c, field).and_then(Value::as_array).map(|l| l.as_slice()).unwrap_or_default();
    names.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn kv_note(file: &str, kv: &Value) -> String {
    format!("{file}: the key/value cache is declared as {}; it is kept in float", show(kv))
}

fn groups(c: &Value) -> Vec<&Value> {
    c.get("config_groups").and_then(Value::as_object).map(|g| g.values().collect()).unwrap_or_default()
}

fn present<'a>(v: &'a Value, field: &str) -> Option<&'a Value> {
    v.get(field).filter(|f| !f.is_null())
}

fn text<'a>(v: &'a Value, field: &str) -> Option<&'a str> {
    v.get(field).and_then(Value::as_str)
}

fn refuse(file: &str, field: &str, need: &str, have: Option<&Value>) -> Error {
    Error::new(Code::ConfigInvalid, format!("{file}: {field}"))
        .need(need)
        .have(have.map_or("nothing".into(), show))
}
