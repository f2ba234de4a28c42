//! Semantic checks of a checkpoint, run to the end: what loads may still be wrong.
//!
//! A scale of the wrong convention or a buffer in the wrong order decodes to finite, plausible, useless
//! weights; nothing but a look at the numbers tells.
mod declared;
pub mod original;
pub mod run;
mod together;
mod words;

use crate::checkpoint::{Checkpoint, Container, Elements, Head, Layer, Method, Stored, names, values};
use crate::{text, tokenizer::Tokenizer};
use q4_core::formats::{facts::Facts, ggml::Blocks};
use q4_core::{Code, Convention, Error, GlobalScale, Part, Result};
use serde::Serialize;
use std::{borrow::Cow, collections::BTreeMap, collections::BTreeSet, ops::RangeInclusive};
use together::{Input, Seen};

/// Largest absolute weight that trained layers have been seen with, generously.
const PLAUSIBLE: RangeInclusive<f64> = 1e-4..=1e3;
/// Median of the weights of a norm.
const NORM: RangeInclusive<f32> = 1e-3..=100.0;

/// Most tensors, and layers, that are named one by one for being of no use.
const NAMED: usize = 1000;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The model cannot be used.
    Error,
    /// The model loads and is probably wrong.
    Warning,
    /// Worth knowing.
    Note,
}

/// One result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable name of the check, in kebab case.
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// Tensor, layer or file.
    pub tensor: String,
    /// What was found.
    pub message: String,
}

/// Runs every check and returns all findings, worst first. Reads all weights once.
pub fn verify(checkpoint: &Checkpoint) -> Vec<Finding> {
    let tokenizer = checkpoint.file(text::TOKENIZER).map(|_| text::tokenizer(checkpoint));
    let mut v = Verifier {
        c: checkpoint,
        findings: Vec::new(),
        known: BTreeSet::new(),
        seen: Vec::new(),
        act_order: Vec::new(),
        tokenizer,
    };
    v.weights();
    v.act_order();
    v.together();
    v.strangers();
    v.declaration();
    v.words();
    v.findings.sort_by_key(|f| f.severity);
    v.findings
}

struct Verifier<'a> {
    c: &'a Checkpoint,
    findings: Vec<Finding>,
    /// Modules that were looked at, each with a dot at the end.
    known: BTreeSet<String>,
    /// What the matrices amount to, to compare them with each other.
    seen: Vec<Seen>,
    /// Layers whose groups are made of any in features.
    act_order: Vec<String>,
    /// If there is one: usable, or why not.
    tokenizer: Option<Result<Tokenizer>>,
}

impl Verifier<'_> {
    fn weights(&mut self) {
        let c = self.c;
        let config = c.config();
        let modules = &config.arch.names;
        self.known.insert(format!("{}.", modules.embedding));
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let is_block = matches!(c.embedding_elements(), Ok(Elements::Blocks(_)));
        match is_block {
            true => self.layer(modules.embedding, vocab, hidden, Input::behind(None)),
            false => match c.floats(&format!("{}.weight", modules.embedding), &[vocab, hidden]) {
                Err(e) => self.error(modules.embedding, &e),
                Ok(table) => self.table(modules.embedding, &table),
            },
        }
        for i in 0..config.num_hidden_layers {
            let mut inputs = BTreeMap::new();
            for (name, len) in names::norms(config, i) {
                if let Some(weight) = self.norm(&name, len) {
                    inputs.insert(name, weight);
                }
            }
            for (at, (name, n, k)) in names::linears(config, i).into_iter().enumerate() {
                // q, k, v, o, gate, up, down: what a norm writes is bounded, the rest is not.
                let norm = match at {
                    0..=2 => modules.attention.before,
                    4 | 5 => modules.mlp.before,
                    _ => None,
                };
                let norm = norm.and_then(|norm| inputs.get(&modules.of(i, norm)));
                self.layer(&name, n, k, Input::behind(norm.map(|w| w.as_slice())));
            }
        }
        self.norm(modules.final_norm, config.hidden_size);
        self.known.insert(format!("{}.", modules.head));
        match c.bind_head() {
            // Blocks of the embedding under another name.
            Ok(Head::Quantised(_)) if is_block && config.tie_word_embeddings => {}
            Ok(Head::Quantised(layer)) => self.values(&layer, Input::behind(None)),
            Ok(_) => match c.head() {
                Err(e) => self.error(modules.head, &e),
                Ok(Head::Dense(stored)) => self.table(modules.head, &stored),
                Ok(_) => {}
            },
            Err(e) => self.error(modules.head, &e),
        }
    }

    fn norm(&mut self, name: &str, len: usize) -> Option<Vec<f32>> {
        self.known.insert(format!("{name}."));
        let values = match self.c.norm(name, len) {
            Ok(values) => values,
            Err(e) => {
                self.error(name, &e);
                return None;
            }
        };
        let mut sizes: Vec<f32> = values.iter().map(|v| v.abs()).collect();
        sizes.sort_unstable_by(f32::total_cmp);
        let (median, most) = (sizes[sizes.len() / 2], sizes[sizes.len() - 1]);
        if most == 0.0 {
            self.add("norm-all-zero", Severity::Warning, name, "all weights of the norm are zero".into());
        } else if !NORM.contains(&median) {
            let message = format!(
                "half of the weights are above {median:.3e}, expected {:e} to {:e}",
                NORM.start(),
                NORM.end()
            );
            self.add("norm-size", Severity::Warning, name, message);
        }
        Some(values)
    }

    fn layer(&mut self, name: &str, n: usize, k: usize, input: Input) {
        self.known.insert(format!("{name}."));
        match self.c.bind(name, n, k) {
            Ok(layer) => {
                self.declared(name, layer.detected.layout, &layer.detected.keys.weight);
                self.values(&layer, input);
            }
            Err(e) => self.error(name, &e),
        }
    }

    fn values(&mut self, layer: &Layer<'_>, input: Input) {
        if layer.order.is_some() {
            self.act_order.push(layer.name.clone());
        }
        match values::problems(|name| self.c.tensor(name), &layer.detected, None) {
            Ok(problems) if problems.is_empty() => {
                if let Err(e) = self.plausibility(layer, input) {
                    self.error(&layer.name, &e);
                }
            }
            Ok(problems) => {
                for p in problems {
                    let message = format!("need {}; have {}", p.need, p.have);
                    self.add(kebab(p.code), Severity::Error, &p.tensor, message);
                }
            }
            Err(e) => self.error(&layer.name, &e),
        }
    }

    fn act_order(&mut self) {
        if let [first, ..] = &self.act_order[..] {
            let (subject, count) = (format!("{first}.g_idx"), self.act_order.len());
            let message = format!(
                "inputs of {count} layers are put into the order of their groups before they are multiplied"
            );
            self.add("act-order", Severity::Note, &subject, message);
        }
    }

    fn plausibility(&mut self, layer: &Layer<'_>, input: Input) -> Result<()> {
        let d = &layer.detected;
        let scales_name =
            d.keys.scales.as_deref().or(d.keys.absmax.as_deref()).unwrap_or(&d.keys.weight).to_owned();
        let data = &layer.segment.data;
        if !d.schema.is_packed() {
            let stored = self.c.tensor(&d.keys.weight)?;
            self.table(&layer.name, &stored);
            return Ok(());
        }
        // Of blocks, scales are a part of the codes.
        let stored = data.get(Part::Scales).map_or(Ok(&[][..]), |scales| scales.as_bytes())?;
        let linear = d.schema.in_rows(Part::Scales, stored, [d.n, d.k])?;
        if let Cow::Owned(linear) = &linear {
            let used = |bytes: &[u8]| bytes.iter().filter(|b| **b != 0).count();
            if used(stored) != used(linear) {
                let message =
                    "bytes that pad the 128x4 tiles are not zero: the scales may not be swizzled at all";
                self.add("scale-padding", Severity::Warning, &scales_name, message.into());
            }
        }
        if let (Some(g), Some(name)) = (data.global, &d.keys.global) {
            self.convention(name, g);
        }
        let Some(facts) = d.schema.facts([d.n, d.k], data, &linear)? else { return Ok(()) };
        let (codes, global) = (data.need(Part::Codes)?, data.global);
        let codes = codes.as_bytes()?;
        self.amount(layer, &scales_name, facts, codes, global);
        self.inputs(layer, input);
        Ok(())
    }

    fn amount(
        &mut self,
        layer: &Layer<'_>,
        scales: &str,
        facts: Facts,
        codes: &[u8],
        global: Option<GlobalScale>,
    ) {
        if facts.all_zero {
            let message = "every block scale is zero, so is every weight";
            self.add("scales-all-zero", Severity::Warning, scales, message.into());
        } else {
            self.range(scales, facts.amax, global);
        }
        if facts.lost > 0 {
            let message = format!("{} blocks have a zero scale over codes that are not zero", facts.lost);
            self.add("scale-underflow", Severity::Note, scales, message);
        }
        for (code, message) in facts.odd {
            self.add(code, Severity::Warning, &layer.name, message);
        }
        let multiplier = global.map_or(1.0, GlobalScale::multiplier);
        self.seen.push(Seen::new(&layer.name, facts.mean_square.sqrt() * multiplier, codes));
    }

    /// A float matrix: how much of it is zero, and how large it is. Rows that no token has may be anything.
    fn table(&mut self, name: &str, stored: &Stored<'_>) {
        let rows = stored.shape.first().copied().unwrap_or(1).max(1);
        let modules = &self.c.config().arch.names;
        let used = match name == modules.embedding || name == modules.head {
            true => self.tokens().map_or(rows, |n| n.min(rows)),
            false => rows,
        };
        let bytes = &stored.bytes[..stored.bytes.len() / rows * used];
        let Ok(values) = (Stored { bytes, ..*stored }).to_f32() else { return };
        let zeros = values.iter().filter(|v| **v == 0.0).count();
        let squares: f64 = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        let most = values.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        if f64::from(most) > *PLAUSIBLE.end() {
            let message = format!("the largest weight is {most:.3e}, expected at most {:e}", PLAUSIBLE.end());
            self.add("scale-range", Severity::Warning, name, message);
        }
        if zeros == values.len() {
            self.add("weights-zero", Severity::Warning, name, "every weight is zero".into());
        } else if zeros * 5 > values.len() {
            let message = format!("{} % of the weights are zero", 100 * zeros / values.len());
            self.add("weights-zero", Severity::Warning, name, message);
        }
        self.seen.push(Seen::new(name, (squares / values.len() as f64).sqrt(), stored.bytes));
    }

    /// Ids that the tokenizer uses, if there is one.
    fn tokens(&self) -> Option<usize> {
        let tokenizer = self.tokenizer.as_ref()?.as_ref().ok()?;
        Some(tokenizer.highest_id() as usize + 1)
    }

    fn range(&mut self, name: &str, unscaled: f64, global: Option<GlobalScale>) {
        let multiplier = global.map_or(1.0, GlobalScale::multiplier);
        let amax = unscaled * multiplier;
        if PLAUSIBLE.contains(&amax) {
            return;
        }
        let other = unscaled / multiplier;
        let hint = if global.is_some() && PLAUSIBLE.contains(&other) {
            format!("; with the per-tensor scale inverted it would be {other:.3e}")
        } else {
            String::new()
        };
        let message = format!(
            "the largest weight is {amax:.3e}, expected {:e} to {:e}{hint}",
            PLAUSIBLE.start(),
            PLAUSIBLE.end()
        );
        self.add("scale-range", Severity::Warning, name, message);
    }

    fn convention(&mut self, name: &str, g: GlobalScale) {
        let message = match g.convention() {
            Convention::Multiply if g.value() > 1.0 => {
                "multiplies and is above 1: perhaps the reciprocal is stored"
            }
            Convention::Divide if g.value() < 1.0 => {
                "divides and is below 1: perhaps the reciprocal is stored"
            }
            _ => return,
        };
        self.add("scale-convention", Severity::Warning, name, format!("{} {message}", g.value()));
    }

    /// Tensors that no part of the model uses. A file may be full of them: the first ones are named, the
    /// others counted.
    fn strangers(&mut self) {
        let (layers, modules) = (self.c.config().num_hidden_layers, &self.c.config().arch.names);
        let mut extra = BTreeMap::<usize, usize>::new();
        let (mut told, mut untold, mut worst) = (0, 0, Severity::Note);
        for name in self.c.table().keys() {
            let (code, severity, message) = match modules.layer_of(name) {
                Some(i) if i >= layers && (extra.contains_key(&i) || extra.len() < NAMED) => {
                    *extra.entry(i).or_default() += 1;
                    continue;
                }
                _ if name.ends_with(".k_scale") || name.ends_with(".v_scale") => match other_scale(name) {
                    other if self.c.table().contains_key(&other) => {
                        let message = "scale of a quantised key/value cache, which stays in float".to_owned();
                        ("kv-scale", Severity::Note, message)
                    }
                    other => {
                        let message = format!("a scale of a key/value cache, without `{other}`");
                        ("kv-scale-alone", Severity::Warning, message)
                    }
                },
                _ if name.ends_with("rotary_emb.inv_freq") => {
                    ("unused-tensor", Severity::Note, "recomputed from config.json".to_owned())
                }
                _ if !self.is_part(name) => {
                    ("unknown-tensor", Severity::Warning, "no part of the model uses it".to_owned())
                }
                _ => continue,
            };
            if told == NAMED {
                (untold, worst) = (untold + 1, worst.min(severity));
                continue;
            }
            told += 1;
            self.add(code, severity, name, message);
        }
        if untold > 0 {
            let message = format!("{untold} more tensors that no part of the model uses as they are");
            self.add("unknown-tensor", worst, self.c.name(), message);
        }
        for (i, count) in extra {
            let message = format!("{count} tensors of a layer beyond the {layers} of config.json");
            self.add("extra-layer", Severity::Warning, &format!("model.layers.{i}"), message);
        }
    }

    /// Whether `name` is a tensor of a module of the model with a suffix that some layout has.
    fn is_part(&self, name: &str) -> bool {
        const SUFFIXES: [&str; 32] = [
            "weight",
            "weight_scale",
            "weight_scale_inv",
            "weight_scale_2",
            "input_scale",
            "weight_packed",
            "weight_zero_point",
            "weight_shape",
            "qweight",
            "scales",
            "qzeros",
            "biases",
            "g_idx",
            "weight_global_scale",
            "input_global_scale",
            "_weight_qdata",
            "_weight_scale",
            "_weight_per_tensor_scale",
            "_weight_act_per_tensor_scale",
            "weight.qdata",
            "weight.scale",
            "weight.global_scale",
            "qdata",
            "scale",
            "global_scale",
            "absmax",
            "quant_map",
            "weight.absmax",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            "weight.quant_state.bitsandbytes__nf4",
        ];
        let blocks = Blocks::ALL.map(|blocks| blocks.tensor("weight"));
        let mut suffixes = SUFFIXES.into_iter().chain(blocks.iter().map(String::as_str));
        suffixes.any(|s| name.strip_suffix(s).is_some_and(|module| self.known.contains(module)))
    }

    fn declaration(&mut self) {
        for note in &self.c.declaration().notes {
            self.add(note.code, Severity::Note, "config.json", note.text.clone());
        }
        // GGUF says it by the types of its tensors.
        let undeclared =
            self.c.declaration().method == Method::None && self.c.store().container() != Container::Gguf;
        let marks = [".weight_scale_2", ".weight_packed"];
        if undeclared && self.c.table().keys().any(|name| marks.iter().any(|m| name.ends_with(m))) {
            let message =
                "no quantization_config: whether inputs are NVFP4 is taken from the stored input scales";
            self.add("undeclared", Severity::Warning, "config.json", message.into());
        }
    }

    fn error(&mut self, subject: &str, e: &Error) {
        let text: Vec<_> = e
            .parts()
            .map(|(part, text)| if part == "what" { text.to_owned() } else { format!("{part} {text}") })
            .collect();
        self.add(kebab(e.code()), Severity::Error, subject, text.join("; "));
    }

    fn add(&mut self, code: &'static str, severity: Severity, subject: &str, message: String) {
        self.findings.push(Finding { code, severity, tensor: subject.to_owned(), message });
    }
}

/// The scale of values beside one of keys, and the other way round.
fn other_scale(name: &str) -> String {
    match name.strip_suffix(".k_scale") {
        Some(module) => format!("{}.v_scale", module.replace("k_proj", "v_proj")),
        None => format!("{}.k_scale", name.trim_end_matches(".v_scale").replace("v_proj", "k_proj")),
    }
}

fn kebab(code: Code) -> &'static str {
    match code {
        Code::ModelMissing => "model-missing",
        Code::Container => "container",
        Code::TensorMissing => "tensor-missing",
        Code::TensorShape => "tensor-shape",
        Code::TensorType => "tensor-type",
        Code::ScaleInvalid => "scale-invalid",
        Code::SchemaInvalid => "schema-invalid",
        Code::ConfigInvalid => "config-invalid",
        Code::ValueInvalid => "value-invalid",
        Code::TokenizerInvalid => "tokenizer-invalid",
        Code::TemplateInvalid => "template-invalid",
        _ => "error",
    }
}
