//! What the configuration says about the quantisation, so that it can be held against what the tensors say.
//!
//! An algorithm we do not compute exactly is refused by name here; decoding it as another one would give
//! plausible nonsense.
mod compressed;
mod fp8;
mod int4;
mod mlx;
mod modelopt;
mod patterns;

pub use patterns::{Excluded, Targets};

use crate::words::Packing;
use q4_core::detect::{Detected, Layout};
use q4_core::formats::fp8::grid as fp8_grid;
use q4_core::{Code, Error, Result};
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
    /// FP8 as transformers writes it.
    Fp8,
    /// MLX.
    Mlx,
}

/// The quantisation a checkpoint declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// Tool.
    pub method: Method,
    /// Whether inputs of quantised layers are NVFP4 too; `None` where only the tensors can tell. Of a group,
    /// that says.
    pub activations: Option<bool>,
    /// Groups of layers, the first of which that has a layer counts; none where the tool's layout says it.
    pub groups: Vec<Group>,
    /// How words are packed, of tools that pack all of a layer so.
    pub packing: Option<Packing>,
    /// Lists of modules that are declared not to be quantised.
    pub excluded: Vec<Excluded>,
    /// Things that are declared but not done, for the user to know.
    pub notes: Vec<Note>,
}

/// Something that is declared but not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Stable name, in kebab case.
    pub code: &'static str,
    /// What, and what is done instead.
    pub text: String,
}

/// Layers that are declared together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// File and field that say so.
    pub place: String,
    /// Which.
    pub targets: Targets,
    /// How they are stored.
    pub format: Declared,
    /// Whether their inputs are NVFP4 too.
    pub activations: bool,
    /// How their inputs are rounded to FP8, of FP8 weights.
    pub rounded: Option<Rounded>,
}

/// The scale with which inputs are declared to be rounded to FP8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rounded {
    /// Of each row: a token.
    Row,
    /// Of each 128 in features of a row.
    Block,
    /// The `input_scale` of the layer.
    Stored,
    /// Another, in the words of its configuration.
    Other(String),
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
    /// Tiles of out and in features, 0 for all: [`Format::tile`](q4_core::formats::Format::tile).
    Tile([u32; 2]),
}

impl Declared {
    /// What a layer has.
    fn of(found: &Detected) -> Self {
        let reach = match found.schema.tile() {
            Some(tile) => Reach::Tile(tile),
            None => Reach::Block(found.schema.block() as u32),
        };
        Self { schema: found.schema.id().name, reach }
    }

    fn holds(&self, found: &Detected) -> bool {
        let block = found.schema.block();
        let fits = match self.reach {
            Reach::Unsaid => true,
            Reach::Block(size) => block == size as usize,
            Reach::Row => block == found.k,
            // A matrix of one tile is one of any.
            Reach::Tile(tile) => {
                let grid = |tile| fp8_grid(tile, [found.n, found.k]);
                found.schema.tile().is_some_and(|have| grid(have) == grid(tile))
            }
        };
        fits && self.schema == found.schema.id().name
    }
}

impl fmt::Display for Declared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reach {
            Reach::Unsaid => f.write_str(self.schema),
            Reach::Block(size) => write!(f, "{} with a scale per {size}", self.schema),
            Reach::Row | Reach::Tile([1, 0]) => write!(f, "{} with a scale per out feature", self.schema),
            Reach::Tile([0, 0]) => write!(f, "{} with one scale", self.schema),
            Reach::Tile([rows, columns]) => {
                write!(f, "{} with a scale per {rows} x {columns}", self.schema)
            }
        }
    }
}

impl Declaration {
    /// A checkpoint without one.
    pub(super) fn none() -> Self {
        let (groups, excluded, notes) = (Vec::new(), Vec::new(), Vec::new());
        Self { method: Method::None, activations: None, groups, packing: None, excluded, notes }
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
                // MLX alone names none.
                None if c.get("bits").is_some() && c.get("group_size").is_some() => Some("mlx".into()),
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
            (None, _, Some(hf)) => modelopt::read(&[(HF_QUANT, &hf)]),
            (Some("modelopt" | "modelopt_fp4" | "modelopt_mixed"), Some(c), hf) => {
                let own = c.get("quantization").filter(|q| q.is_object()).unwrap_or(c);
                match &hf {
                    Some(hf) => modelopt::read(&[(CONFIG, own), (HF_QUANT, hf)]),
                    None => modelopt::read(&[(CONFIG, own)]),
                }
            }
            (Some("compressed-tensors"), Some(c), _) => compressed::read(c),
            (Some("bitsandbytes"), Some(c), _) => bitsandbytes(c),
            (Some("gptq"), Some(c), _) => int4::gptq(c),
            (Some("awq"), Some(c), _) => int4::awq(c),
            (Some("auto-round" | "intel/auto-round"), Some(c), _) => int4::auto_round(c),
            (Some("fp8"), Some(c), _) => fp8::read(c),
            (Some("mlx"), Some(c), _) => mlx::read(c),
            (Some("torchao"), ..) => Ok(Self { method: Method::TorchAo, ..Self::none() }),
            (Some(other), ..) => {
                let need =
                    "modelopt, compressed-tensors, bitsandbytes, torchao, gptq, awq, auto-round or fp8";
                Err(refuse(CONFIG, "quant_method", need, Some(&other.into())))
            }
        }
    }

    /// Whether `module` is declared not to be quantised; `None` where an entry is in a spelling that only its
    /// tool reads.
    pub fn excludes(&self, module: &str) -> Option<bool> {
        if self.exclusion(module).is_some() {
            return Some(true);
        }
        self.excluded.iter().all(|list| list.has(module) == Some(false)).then_some(false)
    }

    /// The entry that says that `module` is not quantised, and where it stands, in words.
    pub fn exclusion(&self, module: &str) -> Option<String> {
        let told = |list: &Excluded| Some(format!("`{}` in {}", list.entry(module)?, list.place()));
        self.excluded.iter().find_map(told)
    }

    /// Files that exclude modules, of which one has `layer`: other engines read only one of them.
    fn lists_agree(&self, layer: &str) -> Result<()> {
        for list in &self.excluded {
            let Some(entry) = list.entry(layer) else { continue };
            let lacks =
                |file: &str| self.excluded.iter().all(|l| l.file != file || l.has(layer) == Some(false));
            let other = self.excluded.iter().find(|other| other.file != list.file && lacks(other.file));
            if let Some(other) = other {
                return Err(Error::new(
                    Code::ConfigInvalid,
                    format!("{layer}: two lists declare it differently"),
                )
                .need(format!("an entry for it in {} too, or in neither", other.place()))
                .have(format!("`{entry}` in {} alone", list.place())));
            }
        }
        Ok(())
    }

    /// Whether inputs of `layer` are declared to be NVFP4; `None` where only the tensors can tell.
    ///
    /// # Errors
    /// [`Code::ConfigInvalid`] for a group whose targets cannot be read.
    pub fn inputs(&self, layer: &str) -> Result<Option<bool>> {
        Ok(patterns::first(&self.groups, layer)?.map(|group| group.activations).or(self.activations))
    }

    /// How inputs of `layer` are declared to be rounded to FP8.
    ///
    /// # Errors
    /// As of [`inputs`](Self::inputs).
    pub fn rounded(&self, layer: &str) -> Result<Option<&Rounded>> {
        Ok(patterns::first(&self.groups, layer)?.and_then(|group| group.rounded.as_ref()))
    }

    /// Says of module `other` what is said of `module` by name.
    pub(super) fn alike(&mut self, module: &str, other: &str) {
        for group in &mut self.groups {
            if let Targets::Named(names) = &mut group.targets
                && names.contains(module)
            {
                names.insert(other.to_owned());
            }
        }
    }

    /// Refuses a layer whose layout another tool writes, or whose format is not the one declared.
    pub(super) fn check(&self, layer: &str, found: &Detected) -> Result<()> {
        let layout = found.layout;
        let group = patterns::first(&self.groups, layer)?;
        let is_packed = found.schema.is_packed();
        let by_name = group.is_some_and(|group| matches!(group.targets, Targets::Named(_)));
        let fits = match group {
            Some(group) if is_packed || by_name => group.format.holds(found),
            Some(_) => true,
            None => !is_packed || self.groups.is_empty(),
        };
        if !fits {
            let what = format!("{layer}: stored in another format than config.json declares");
            let need = match group {
                Some(group) => format!("{}, as {} declares", group.format, group.place_of(layer)),
                None => {
                    let mut places: Vec<_> = self.groups.iter().map(|group| group.place.as_str()).collect();
                    places.dedup();
                    format!("a dense matrix: no group has this layer, of {}", places.join(" and "))
                }
            };
            let have = if is_packed { Declared::of(found).to_string() } else { found.schema.to_string() };
            return Err(Error::new(Code::SchemaInvalid, what)
                .need(need)
                .have(format!("the tensors of {have}: {}", stored(found)))
                .fix("use the config.json that was written with these weights"));
        }
        if let Some((group, excluded)) = group.filter(|_| by_name).zip(self.exclusion(layer)) {
            let what = format!("{layer}: in two lists of the configuration");
            return Err(Error::new(Code::SchemaInvalid, what)
                .need("an entry among the quantised layers or among those that are excluded")
                .have(format!("both {} and {excluded}", group.place_of(layer))));
        }
        self.lists_agree(layer)?;
        let fits = match self.method {
            Method::None => true,
            Method::ModelOpt => matches!(layout, Layout::ModelOpt | Layout::Fp8 | Layout::Dense),
            Method::CompressedTensors => {
                matches!(layout, Layout::CompressedTensors | Layout::Fp8 | Layout::Dense)
            }
            Method::Fp8 => matches!(layout, Layout::Fp8 | Layout::Dense),
            Method::Bitsandbytes => matches!(layout, Layout::Bitsandbytes | Layout::Dense),
            Method::TorchAo => matches!(layout, Layout::TorchAo | Layout::Dense),
            Method::Gptq => matches!(layout, Layout::Gptq | Layout::Dense),
            Method::Awq => matches!(layout, Layout::Awq | Layout::Dense),
            Method::Mlx => matches!(layout, Layout::Mlx | Layout::Dense),
        };
        if fits {
            return Ok(());
        }
        Err(Error::new(
            Code::SchemaInvalid,
            format!("{layer}: stored in another layout than config.json declares"),
        )
        .need(format!("the tensors of {:?}, as {CONFIG}: quant_method declares", self.method))
        .have(format!("{}: {}", layout.as_str(), stored(found)))
        .fix("use the config.json that was written with these weights"))
    }
}

impl Group {
    /// What says it of `layer`.
    fn place_of(&self, layer: &str) -> String {
        match self.targets {
            Targets::Named(_) => format!("{}.{layer}", self.place),
            _ => self.place.clone(),
        }
    }
}

/// The tensors that tell a format.
fn stored(found: &Detected) -> String {
    let keys = &found.keys;
    let telling = [Some(&keys.weight), keys.scales.as_ref(), keys.zeros.as_ref()];
    telling.into_iter().flatten().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ")
}

fn parse_hf_quant(bytes: &[u8]) -> Result<Value> {
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|e| Error::new(Code::ConfigInvalid, HF_QUANT).need("valid JSON").have(e.to_string()))?;
    match value.get("quantization") {
        Some(q) if q.is_object() => Ok(q.clone()),
        other => Err(refuse(HF_QUANT, "quantization", "an object", other)),
    }
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
    let mut excluded: Vec<_> = Excluded::of(CONFIG, c, &["llm_int8_skip_modules"]).collect();
    excluded.retain(|list| !list.patterns.is_empty());
    if excluded.is_empty() {
        // What transformers leaves out by itself.
        let patterns = vec!["lm_head".to_owned()];
        excluded.push(Excluded { file: CONFIG, field: "no llm_int8_skip_modules".into(), patterns });
    }
    let (method, activations) = (Method::Bitsandbytes, Some(false));
    Ok(Declaration { method, activations, excluded, ..Declaration::none() })
}

fn list(c: &Value, field: &str) -> Vec<String> {
    let names = present(c, field).and_then(Value::as_array).map(|l| l.as_slice()).unwrap_or_default();
    names.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn kv_note(file: &str, kv: &Value) -> Note {
    let text = format!("{file}: the key/value cache is declared as {}; it is kept in float", show(kv));
    Note { code: "kv-cache-float", text }
}

/// Inputs of FP8 layers are declared to be rounded.
fn inputs_note(file: &str, have: &str) -> Note {
    let text = format!(
        "{file}: inputs of FP8 layers are declared as {have}; they are multiplied as they are, or rounded with \
         --activations fp8"
    );
    Note { code: "inputs-float", text }
}

/// Groups, each with its field.
fn groups(c: &Value) -> Vec<(String, &Value)> {
    let all = c.get("config_groups").and_then(Value::as_object).into_iter().flatten();
    all.map(|(name, group)| (format!("config_groups.{name}"), group)).collect()
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
