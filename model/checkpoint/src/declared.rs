//! What the configuration says about the quantisation, so that it can be held against what the tensors say.
//!
//! An algorithm we do not compute exactly is refused by name here; decoding it as another one would give
//! plausible nonsense.
use q4_core::detect::{Detected, Layout};
use q4_core::formats::{self, storage::Described};
use q4_core::{Code, Error, Q4Schema, Result};
use q4_files::fields::show;
use serde_json::Value;

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
}

/// The quantisation a checkpoint declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// Tool.
    pub method: Method,
    /// Whether inputs of quantised layers are NVFP4 too; `None` where only the tensors can tell.
    pub activations: Option<bool>,
    /// Formats of the groups, as their schemas are called; none where the tool's layout says it.
    pub schemas: Vec<&'static str>,
    /// Modules that are declared not to be quantised, as the tool spells them.
    pub excluded: Vec<String>,
    /// Things that are declared but not done, for the user to know.
    pub notes: Vec<String>,
}

impl Declaration {
    /// A checkpoint without one.
    pub(super) fn none() -> Self {
        let (schemas, excluded, notes) = (Vec::new(), Vec::new(), Vec::new());
        Self { method: Method::None, activations: None, schemas, excluded, notes }
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
            (Some("torchao"), ..) => Ok(Self { method: Method::TorchAo, ..Self::none() }),
            (Some(other), ..) => {
                let need = "modelopt, compressed-tensors, bitsandbytes or torchao";
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
        if found.schema.is_4bit() && !self.schemas.is_empty() && !self.schemas.contains(&schema) {
            let what = format!("{layer}: stored in another format than config.json declares");
            return Err(Error::new(Code::SchemaInvalid, what)
                .need(self.schemas.join(" or "))
                .have(format!("the tensors of {schema}"))
                .fix("use the config.json that was written with these weights"));
        }
        let fits = match self.method {
            Method::None => true,
            Method::ModelOpt => matches!(layout, Layout::ModelOpt | Layout::Dense),
            Method::CompressedTensors => matches!(layout, Layout::CompressedTensors | Layout::Dense),
            Method::Bitsandbytes => matches!(layout, Layout::Bitsandbytes | Layout::Dense),
            Method::TorchAo => matches!(layout, Layout::TorchAo | Layout::Dense),
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
        check_group(file, group, activations, 16)?;
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
    known.dedup_by_key(|k| k.0.format);
    let names = known.iter().map(|k| k.0.format).collect::<Vec<_>>().join(" or ");
    let named = |v: Option<&Value>| known.iter().find(|k| v.and_then(Value::as_str) == Some(k.0.format));
    let groups = groups(c);
    let Some(first) = groups.first() else {
        return Err(refuse(CONFIG, "config_groups", "at least one group", c.get("config_groups")));
    };
    let activations = present(first, "input_activations").is_some();
    let mut schemas = Vec::new();
    for group in &groups {
        let format = present(group, "format").or(present(c, "format"));
        let Some((described, schema)) = named(format) else {
            return Err(refuse(CONFIG, "format", &names, format));
        };
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
        check_group(CONFIG, group, activations, described.group_size)?;
        schemas.push(schema.id().name);
    }
    let top = present(c, "format").filter(|f| f.as_str() != Some("mixed-precision"));
    if top.is_some() && named(top).is_none() {
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
    Ok(Declaration { method, activations, schemas, excluded, notes })
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

/// Weights (and inputs) of a group must be 4-bit floats in blocks of `size`, symmetric.
fn check_group(file: &str, group: &Value, activations: bool, size: u32) -> Result<()> {
    for side in ["weights", "input_activations"] {
        let Some(format) = present(group, side) else {
            if side == "weights" {
                return Err(refuse(file, "config_groups.weights", "num_bits 4, type float", None));
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
            ("type", "float", is("type", &|v| v.as_str() == Some("float"))),
            ("group_size", &size.to_string(), is("group_size", &|v| v.as_u64() == Some(size.into()))),
            ("symmetric", "true", is("symmetric", &|v| v.as_bool() == Some(true))),
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
