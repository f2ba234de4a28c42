//! What a training run is told: a TOML file, presets, and flags as dotted overrides; every problem is
//! reported at once.
//!
//! Each section is a struct with defaults. A preset changes defaults, the file changes both, an override
//! changes all three.
use crate::data::{Format, Packing, Supervise, Truncate};
use crate::optim::{MasterFormat, ScaleChoice, StateFormat};
use crate::schedule::{Kind, Schedule};
use q4_core::{Code, Error, Result, memory};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

mod mix;
mod sections;
mod table;
#[cfg(test)]
mod tests;
mod validate;

pub use mix::Mix;
pub use sections::*;
pub use table::START;

/// The effective configuration of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Config {
    /// What is trained.
    pub model: ModelConfig,
    /// What it learns from.
    pub data: DataConfig,
    /// How long and in which pieces.
    pub train: TrainConfig,
    /// AdamW.
    pub optimizer: OptimizerConfig,
    /// Learning rate over the steps.
    pub schedule: ScheduleConfig,
    /// What a bad step is.
    pub guard: GuardOptions,
    /// 4-bit weights and activations of the forward pass.
    pub quant: QuantConfig,
    /// Low-rank adapters on a frozen base; absent: all weights are trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// What it may use.
    pub memory: MemoryConfig,
    /// Where it can go on from.
    pub checkpoint: CheckpointConfig,
    /// Loss on held-out data.
    pub eval: EvalConfig,
    /// Answers written down on the way.
    pub sample: SampleConfig,
    /// Prompts with answers that must and must not come.
    pub behaviour: BehaviourConfig,
    /// What is written in the end.
    pub export: ExportConfig,
}

const SECTIONS: [&str; 14] = [
    "model",
    "data",
    "train",
    "optimizer",
    "schedule",
    "guard",
    "quant",
    "lora",
    "memory",
    "checkpoint",
    "eval",
    "sample",
    "behaviour",
    "export",
];
/// The layout of adapters alone.
pub const PEFT: &str = "peft";
/// Bytes a configuration may have.
const LIMIT: usize = 1 << 20;

impl Config {
    /// Reads a file; relative paths in it are relative to its folder. As [`Config::parse`].
    pub fn from_file(path: &Path, overrides: &[(String, String)]) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, &e))?;
        let mut config = Self::parse(&text, overrides).map_err(|e| e.within(path.display()))?;
        let base = path.parent().unwrap_or(Path::new("."));
        let resolve = |p: &mut PathBuf| {
            if p.is_relative() {
                *p = base.join(&*p);
            }
        };
        // What an override names is relative to where the user stands.
        let given = |key: &str| overrides.iter().any(|(k, _)| k == key);
        let (train, valid) = (&mut config.data.train.paths, &mut config.data.valid);
        for (key, paths) in [("data.train", train), ("data.valid", valid)] {
            if !given(key) {
                paths.iter_mut().for_each(resolve);
            }
        }
        if !given("behaviour.suite") {
            config.behaviour.suite.iter_mut().for_each(resolve);
        }
        if let Some(lora) = &mut config.lora
            && !given("lora.init")
        {
            lora.init.iter_mut().for_each(resolve);
        }
        if !given("model.path") && config.model.path != Path::new("demo") {
            resolve(&mut config.model.path);
        }
        Ok(config)
    }

    /// Parses `text` and applies overrides such as `("optimizer.lr", "1e-4")`: the value is TOML, or else a
    /// string.
    ///
    /// # Errors
    /// One [`Code::Usage`] with a line for every problem: sections, fields and values that do not exist,
    /// numbers out of range, settings that exclude each other.
    pub fn parse(text: &str, overrides: &[(String, String)]) -> Result<Self> {
        if text.len() > LIMIT {
            return Err(Error::new(Code::Usage, "configuration").need(format!("at most {LIMIT} bytes")));
        }
        let mut table: Table = text.parse().map_err(|e: toml::de::Error| {
            Error::new(Code::Usage, "configuration: not TOML").have(e.to_string().trim())
        })?;
        let mut problems = Problems(Vec::new());
        one_length(&mut table, overrides);
        for (key, value) in overrides {
            set(&mut table, key, value, &mut problems);
        }
        if let Some(Value::Table(train)) = table.get("train")
            && train.contains_key("steps")
            && train.contains_key("epochs")
        {
            problems.add("train.epochs", "train.steps or train.epochs", "both");
        }
        for name in table.keys().filter(|name| !SECTIONS.contains(&name.as_str())) {
            problems.add(name, format!("one of the sections {}", SECTIONS.join(", ")), "another");
        }
        let preset = section::<MemoryConfig>(&table, "memory", MemoryConfig::default(), &mut problems);
        let base = Self::preset(preset.preset);
        let lora = match table.contains_key("lora") {
            true => Some(section(&table, "lora", base.lora.unwrap_or_default(), &mut problems)),
            false => base.lora,
        };
        let p = &mut problems;
        let config = Self {
            model: section(&table, "model", base.model, p),
            data: section(&table, "data", base.data, p),
            train: section(&table, "train", base.train, p),
            optimizer: section(&table, "optimizer", base.optimizer, p),
            schedule: section(&table, "schedule", base.schedule, p),
            guard: section(&table, "guard", base.guard, p),
            quant: section(&table, "quant", base.quant, p),
            lora,
            memory: preset,
            checkpoint: section(&table, "checkpoint", base.checkpoint, p),
            eval: section(&table, "eval", base.eval, p),
            sample: section(&table, "sample", base.sample, p),
            behaviour: section(&table, "behaviour", base.behaviour, p),
            export: section(&table, "export", base.export, p),
        };
        config.validate(p);
        problems.finish()?;
        Ok(config)
    }

    /// The defaults a preset stands for. Memory of Qwen3-4B without activations: 32 GB, 13 GB, 4 GB.
    pub fn preset(preset: Preset) -> Self {
        let mut c = Self::default();
        match preset {
            Preset::None => {}
            Preset::Full128g => {
                c.train.recompute = true;
                c.train.keep_values = false;
                c.optimizer.state = StateFormat::Int8;
            }
            Preset::Full24g => {
                c.train.recompute = true;
                c.train.keep_values = false;
                c.train.update_in_backward = true;
                c.train.clip_scope = ClipScope::Block;
                c.optimizer.state = StateFormat::Nvfp4;
                c.optimizer.master = MasterFormat::Bf16;
            }
            Preset::Lora8g => {
                c.train.recompute = true;
                c.train.keep_values = false;
                c.lora = Some(LoraConfig::default());
            }
        }
        c.memory.preset = preset;
        c
    }

    /// The effective configuration as TOML; parsing it gives this configuration again.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(&self.table()?).map_err(|e| Error::new(Code::Internal, format!("configuration: {e}")))
    }

    /// Sections with their keys. Steps that follow from epochs are no key.
    fn table(&self) -> Result<Table> {
        let mut table = table::of(self)?;
        if let (Some(Value::Table(train)), true) = (table.get_mut("train"), self.train.epochs.is_some()) {
            train.remove("steps");
        }
        Ok(table)
    }

    /// What is exported, by name. Nothing where that depends on a base that is not known yet.
    pub fn layouts(&self) -> Vec<&str> {
        if self.export.layouts != ["auto"] {
            return self.export.layouts.iter().map(String::as_str).collect();
        }
        match self.lora.as_ref().map(|l| l.base) {
            Some(BaseForm::Auto) => Vec::new(),
            Some(BaseForm::Packed | BaseForm::Decoded) => vec![PEFT],
            Some(BaseForm::Merged) | None => vec!["modelopt"],
        }
    }

    /// The schedule over all steps.
    pub fn schedule(&self) -> Schedule {
        let ScheduleConfig { kind, warmup, min_ratio, decay } = self.schedule;
        Schedule { kind, peak: self.optimizer.lr, min_ratio, warmup, steps: self.train.steps, decay }
    }
}

/// Lines of one error.
pub(crate) struct Problems(Vec<String>);

impl Problems {
    fn add(&mut self, field: &str, need: impl std::fmt::Display, have: impl std::fmt::Display) {
        self.0.push(format!("{field}: need {need}, have {have}"));
    }

    fn finish(self) -> Result<()> {
        let n = self.0.len();
        if n == 0 {
            return Ok(());
        }
        let plural = if n == 1 { "" } else { "s" };
        Err(Error::new(Code::Usage, format!("configuration: {n} problem{plural}")).have(self.0.join("\n")))
    }
}

/// An override that says how long a run is stands for what the file says of it.
fn one_length(table: &mut Table, overrides: &[(String, String)]) {
    let given = |key: &str| overrides.iter().any(|(k, _)| k == key);
    let other = match (given("train.steps"), given("train.epochs")) {
        (true, false) => "epochs",
        (false, true) => "steps",
        _ => return,
    };
    if let Some(Value::Table(train)) = table.get_mut("train") {
        train.remove(other);
    }
}

fn set(table: &mut Table, key: &str, value: &str, problems: &mut Problems) {
    let Some((section, field)) = key.split_once('.') else {
        return problems.add(key, "section.field", "no dot");
    };
    // Text that is no TOML value is meant as it stands: paths and names need no quotes.
    let parsed = format!("x = {value}").parse::<Table>().ok().and_then(|mut t| t.remove("x"));
    let value = parsed.unwrap_or_else(|| Value::String(value.to_owned()));
    let mut at = table;
    let mut path: Vec<&str> = std::iter::once(section).chain(field.split('.')).collect();
    let Some(last) = path.pop() else { return };
    for name in path {
        match at.entry(name).or_insert_with(|| Value::Table(Table::new())) {
            Value::Table(inner) => at = inner,
            _ => return problems.add(key, format!("`{name}` to be a section"), "a value"),
        }
    }
    at.insert(last.to_owned(), value);
}

/// `base` with the fields of the section, each tried by itself so that all bad ones are found.
fn section<T: Serialize + DeserializeOwned>(
    table: &Table,
    name: &str,
    base: T,
    problems: &mut Problems,
) -> T {
    let given = match table.get(name) {
        None => return base,
        Some(Value::Table(given)) => given,
        Some(_) => {
            problems.add(name, "a section", "a value");
            return base;
        }
    };
    let Ok(mut fields) = Table::try_from(&base) else { return base };
    let mut result = base;
    for (field, value) in given {
        let value = match (fields.get(field), value) {
            // One is a list of one.
            (Some(Value::Array(_)), one) if !one.is_array() => Value::Array(vec![one.clone()]),
            _ => value.clone(),
        };
        let before = fields.insert(field.clone(), value.clone());
        let read = T::deserialize(Value::Table(fields.clone())).or_else(|e| match value {
            // A folder may be called 2024, and bytes need no unit.
            Value::Integer(n) => {
                fields.insert(field.clone(), Value::String(n.to_string()));
                T::deserialize(Value::Table(fields.clone())).map_err(|again| {
                    // That one names what there is.
                    if again.message().contains("unknown variant") { again } else { e }
                })
            }
            _ => Err(e),
        });
        match read {
            Ok(next) => result = next,
            Err(e) => {
                let (need, have) = plain(e.message(), &value);
                problems.add(&format!("{name}.{field}"), need, have);
                match before {
                    Some(old) => fields.insert(field.clone(), old),
                    None => fields.remove(field),
                };
            }
        }
    }
    result
}

/// What a reader of values needed and what it found, in the words of a configuration.
fn plain(message: &str, value: &Value) -> (String, String) {
    let (why, expected) = message.trim().split_once("expected ").unwrap_or((message, "another value"));
    let need = match expected {
        "u64" | "u32" | "u16" | "usize" => "a whole number".into(),
        "f64" | "f32" => "a number".into(),
        "a boolean" => "true or false".into(),
        "a string" | "string" => "a text".into(),
        "path string" => "a path".into(),
        "a sequence" => "a list".into(),
        "a map" => "a table".into(),
        names if names.starts_with('`') => format!("one of {}", names.replace(" or ", ", ")),
        other => other.to_owned(),
    };
    let have = match why.strip_prefix("unknown field ") {
        Some(name) => format!("the unknown field {}", name.trim_end_matches([',', ' '])),
        None => show(value),
    };
    (need, have)
}

fn show(value: &Value) -> String {
    value.to_string().chars().take(60).collect()
}
