//! Semantic checks of a checkpoint, run to the end: what loads may still be wrong.
//!
//! A scale of the wrong convention or a buffer in the wrong order decodes to finite, plausible, useless weights; nothing
//! but a look at the numbers tells.
use crate::{
    checkpoint::{Checkpoint, Head, Layer, Method, names, values},
    generation::GenerationConfig,
};
use q4_core::{
    Code, Convention, Error, GlobalScale, Q4Schema, Result, ScaleLayout, SegmentData,
    detect::Layout,
    formats::{e2m1, e4m3, nvfp4, swizzle},
};
use serde::{
    Deserialize, Serialize,
    de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{borrow::Cow, collections::BTreeMap, collections::BTreeSet, fmt, ops::RangeInclusive};

/// Largest absolute weight that trained layers have been seen with, generously.
const PLAUSIBLE: RangeInclusive<f64> = 1e-4..=1e3;

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
    let mut v = Verifier { c: checkpoint, findings: Vec::new(), known: BTreeSet::new() };
    v.weights();
    v.strangers();
    v.declaration();
    v.tokenizer();
    v.generation();
    v.findings.sort_by_key(|f| f.severity);
    v.findings
}

struct Verifier<'a> {
    c: &'a Checkpoint,
    findings: Vec<Finding>,
    /// Modules that were looked at, each with a dot at the end.
    known: BTreeSet<String>,
}

impl Verifier<'_> {
    fn weights(&mut self) {
        let c = self.c;
        let config = c.config();
        self.known.insert(format!("{}.", names::EMBEDDING));
        if let Err(e) = c.embedding() {
            self.error(names::EMBEDDING, &e);
        }
        for i in 0..config.num_hidden_layers {
            for (name, len) in names::norms(config, i) {
                self.norm(&name, len);
            }
            for (name, n, k) in names::linears(config, i) {
                self.layer(&name, n, k);
            }
        }
        self.norm(names::FINAL_NORM, config.hidden_size);
        self.known.insert(format!("{}.", names::HEAD));
        match c.bind_head() {
            Ok(Head::Quantised(layer)) => self.values(&layer),
            Ok(_) => {
                if let Err(e) = c.head() {
                    self.error(names::HEAD, &e);
                }
            }
            Err(e) => self.error(names::HEAD, &e),
        }
    }

    fn norm(&mut self, name: &str, len: usize) {
        self.known.insert(format!("{name}."));
        match self.c.norm(name, len) {
            Err(e) => self.error(name, &e),
            Ok(values) if values.iter().all(|v| *v == 0.0) => {
                self.add("norm-all-zero", Severity::Warning, name, "all weights of the norm are zero".into());
            }
            Ok(_) => {}
        }
    }

    fn layer(&mut self, name: &str, n: usize, k: usize) {
        self.known.insert(format!("{name}."));
        match self.c.bind(name, n, k) {
            Ok(layer) => self.values(&layer),
            Err(e) => self.error(name, &e),
        }
    }

    fn values(&mut self, layer: &Layer<'_>) {
        match values::problems(self.c.store(), &layer.detected, None) {
            Ok(problems) if problems.is_empty() => {
                if let Err(e) = self.plausibility(layer) {
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

    fn plausibility(&mut self, layer: &Layer<'_>) -> Result<()> {
        let d = &layer.detected;
        let scales_name =
            d.keys.scales.as_deref().or(d.keys.absmax.as_deref()).unwrap_or(&d.keys.weight).to_owned();
        match &layer.segment.data {
            SegmentData::Nvfp4 { codes, scales, global } => {
                let stored = scales.as_bytes()?;
                let blocks = d.k / nvfp4::BLOCK;
                let mut linear = Cow::Borrowed(stored);
                if matches!(d.schema, Q4Schema::Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, .. }) {
                    linear = Cow::Owned(swizzle::from_blocked(stored, d.n, blocks)?);
                    let used = |bytes: &[u8]| bytes.iter().filter(|b| **b != 0).count();
                    if used(stored) != used(&linear) {
                        let message = "bytes that pad the 128x4 tiles are not zero: the scales may not be swizzled at all";
                        self.add("scale-padding", Severity::Warning, &scales_name, message.into());
                    }
                }
                let facts = Facts::of(codes.as_bytes()?, &linear);
                if facts.all_zero {
                    self.add(
                        "scales-all-zero",
                        Severity::Warning,
                        &scales_name,
                        "every block scale is zero, so is every weight".into(),
                    );
                } else {
                    self.range(&scales_name, facts.amax, *global);
                }
                if facts.lost > 0 {
                    let message =
                        format!("{} blocks have a zero scale over codes that are not zero", facts.lost);
                    self.add("scale-underflow", Severity::Note, &scales_name, message);
                }
                if let (Some(g), Some(name)) = (global, &d.keys.global) {
                    self.convention(name, *g);
                }
            }
            SegmentData::Nf4 { absmax, .. } => {
                let amax = absmax.to_f32()?.iter().fold(0.0f64, |most, a| most.max(f64::from(a.abs())));
                if amax == 0.0 {
                    self.add(
                        "scales-all-zero",
                        Severity::Warning,
                        &scales_name,
                        "every absmax is zero, so is every weight".into(),
                    );
                } else {
                    self.range(&scales_name, amax, None);
                }
            }
            _ => {}
        }
        if d.layout == Layout::ModelOpt
            && d.keys.input_global.is_none()
            && self.c.declaration().activations == Some(true)
        {
            let message =
                "config.json declares NVFP4 inputs but there is no input_scale: inputs stay as they are";
            self.add("input-scale-missing", Severity::Warning, &layer.name, message.into());
        }
        Ok(())
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

    /// Tensors that no part of the model uses.
    fn strangers(&mut self) {
        let layers = self.c.config().num_hidden_layers;
        let mut extra = BTreeMap::<usize, usize>::new();
        for name in self.c.table().keys() {
            match names::layer_of(name) {
                Some(i) if i >= layers => *extra.entry(i).or_default() += 1,
                _ if name.ends_with(".k_scale") || name.ends_with(".v_scale") => {
                    self.add(
                        "kv-scale",
                        Severity::Note,
                        name,
                        "scale of a quantised key/value cache, which stays in float".into(),
                    );
                }
                _ if name.ends_with("rotary_emb.inv_freq") => {
                    self.add("unused-tensor", Severity::Note, name, "recomputed from config.json".into());
                }
                _ if !self.is_part(name) => {
                    self.add(
                        "unknown-tensor",
                        Severity::Warning,
                        name,
                        "no part of the model uses it".into(),
                    );
                }
                _ => {}
            }
        }
        for (i, count) in extra {
            let message = format!("{count} tensors of a layer beyond the {layers} of config.json");
            self.add("extra-layer", Severity::Warning, &format!("model.layers.{i}"), message);
        }
    }

    /// Whether `name` is a tensor of a module of the model with a suffix that some layout has.
    fn is_part(&self, name: &str) -> bool {
        const SUFFIXES: [&str; 24] = [
            "weight",
            "weight_scale",
            "weight_scale_2",
            "input_scale",
            "weight_packed",
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
        SUFFIXES.iter().any(|s| name.strip_suffix(s).is_some_and(|module| self.known.contains(module)))
    }

    fn declaration(&mut self) {
        for note in &self.c.declaration().notes {
            self.add("kv-cache-float", Severity::Note, "config.json", note.clone());
        }
        let undeclared = self.c.declaration().method == Method::None;
        let marks = [".weight_scale_2", ".weight_packed"];
        if undeclared && self.c.table().keys().any(|name| marks.iter().any(|m| name.ends_with(m))) {
            let message =
                "no quantization_config: whether inputs are NVFP4 is taken from the stored input scales";
            self.add("undeclared", Severity::Warning, "config.json", message.into());
        }
    }

    fn tokenizer(&mut self) {
        const FILE: &str = "tokenizer.json";
        let Some(bytes) = self.c.file(FILE) else {
            return self.add(
                "tokenizer-missing",
                Severity::Note,
                FILE,
                "the model has no tokenizer beside it".into(),
            );
        };
        let vocab = self.c.config().vocab_size;
        match serde_json::from_slice::<Tokenizer>(&bytes) {
            Err(e) => self.add("tokenizer-invalid", Severity::Error, FILE, e.to_string()),
            Ok(t) => {
                let added = t.added_tokens.iter().map(|a| a.id).max();
                if let Some(id) = t.model.vocab.0.max(added).filter(|id| *id >= vocab as u64) {
                    let message = format!("token id {id}, but the embedding has {vocab} rows");
                    self.add("tokenizer-range", Severity::Error, FILE, message);
                }
            }
        }
    }

    fn generation(&mut self) {
        const FILE: &str = "generation_config.json";
        let config = self.c.config();
        let mut ends = config.eos_token_ids.clone();
        if let Some(bytes) = self.c.file(FILE) {
            match GenerationConfig::parse(&bytes, config.vocab_size) {
                Err(e) => self.error(FILE, &e),
                Ok(g) => {
                    let lacks = config.eos_token_ids.iter().any(|id| !g.eos_token_ids.contains(id));
                    if lacks && !g.eos_token_ids.is_empty() {
                        let message = format!(
                            "eos_token_id {:?} lacks some of config.json's {:?}",
                            g.eos_token_ids, config.eos_token_ids
                        );
                        self.add("eos-mismatch", Severity::Warning, FILE, message);
                    }
                    ends.extend(g.eos_token_ids);
                }
            }
        }
        if ends.is_empty() {
            self.add(
                "eos-missing",
                Severity::Warning,
                "config.json",
                "no eos_token_id: answers end at their token limit".into(),
            );
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

/// What the codes and row-major scales of an NVFP4 layer amount to, before the per-tensor scale.
struct Facts {
    amax: f64,
    /// Blocks whose codes are lost under a zero scale.
    lost: usize,
    all_zero: bool,
}

impl Facts {
    fn of(codes: &[u8], scales: &[u8]) -> Self {
        let mut facts = Self { amax: 0.0, lost: 0, all_zero: true };
        for (block, scale) in codes.as_chunks::<{ nvfp4::BLOCK / 2 }>().0.iter().zip(scales) {
            let magnitude = block.iter().fold(0, |most: u8, b| most.max(b & 7).max(b >> 4 & 7));
            facts.all_zero &= *scale == 0;
            facts.lost += usize::from(*scale == 0 && magnitude > 0);
            facts.amax = facts.amax.max(f64::from(e2m1::decode(magnitude) * e4m3::decode(*scale)));
        }
        facts
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
        _ => "error",
    }
}

/// The ids in a `tokenizer.json`, without building a tokenizer.
#[derive(Deserialize)]
struct Tokenizer {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Model {
    vocab: MaxId,
}

#[derive(Deserialize)]
struct Added {
    id: u64,
}

/// Largest id of a vocabulary, written as an object of ids or as a list in their order.
struct MaxId(Option<u64>);

impl<'de> Deserialize<'de> for MaxId {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct Ids;
        impl<'de> Visitor<'de> for Ids {
            type Value = MaxId;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<MaxId, A::Error> {
                let mut most = None;
                while let Some((_, id)) = map.next_entry::<IgnoredAny, u64>()? {
                    most = most.max(Some(id));
                }
                Ok(MaxId(most))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<MaxId, A::Error> {
                let mut count = 0u64;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(MaxId(count.checked_sub(1)))
            }
        }
        d.deserialize_any(Ids)
    }
}
