//! `config.json` of a decoder, in the published layout and in that of transformers 5, read as its family's
//! description says.
//!
//! Whatever the graph later multiplies by these numbers was checked here, so no layer checks it again.
use crate::arch::{self, Arch, FieldNames, Mlp, Pairs, qwen3::QWEN3};
use q4_core::{DType, Result};
use q4_files::fields::{Fields, show};
use serde_json::Value;
use std::f64::consts::PI;

/// Shapes and constants of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Its family.
    pub arch: &'static Arch,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of `gate_proj` and `up_proj`.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head, even. `num_attention_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Elements of a head that are turned, even.
    pub rotary_dim: usize,
    /// Rows of the embedding, which may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Positions the model was made for. Where YaRN stretches a stated original length beyond the field, as
    /// Qwen's instructions for long texts have it, that many.
    pub max_position_embeddings: usize,
    /// Added to the mean square under the root of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Whether `lm_head` is the embedding.
    pub tie_word_embeddings: bool,
    /// Begin of text, if the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end an answer; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// Type of the dense weights, if stated: float16, bfloat16 or float32.
    pub dtype: Option<DType>,
    /// `quantization_config`, or MLX's `quantization`, as it stands; its reader is the checkpoint's.
    pub quantization: Option<Value>,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the series is stretched for longer contexts.
    pub scaling: RopeScaling,
}

/// Stretching of the rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// YaRN: low frequencies are interpolated, high ones kept, a ramp between (Peng et al., 2023).
    Yarn {
        /// Context length divided by the original one.
        factor: f64,
        /// Context length before stretching.
        original_max_position_embeddings: usize,
        /// Whether the file states it; else it is `max_position_embeddings`.
        stated: bool,
        /// Rotations above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is interpolated.
        beta_slow: f64,
        /// Multiplies cos and sin; absent: `0.1 ln(factor) + 1`.
        attention_factor: Option<f64>,
    },
    /// All frequencies divided by `factor`.
    Linear {
        /// Context length divided by the original one.
        factor: f64,
    },
}

impl DecoderConfig {
    /// Parses and validates.
    ///
    /// # Errors
    /// [`Code::ConfigInvalid`](q4_core::Code::ConfigInvalid) with all problems, a line for each with field,
    /// need and have.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let mut f = Fields::parse("config.json", bytes)?;
        let arch = family(&mut f);
        let names = &arch.fields;
        let heads = f.size(names.heads, 1..=1 << 14);
        let hidden_size = f.size(names.hidden, 1..=1 << 20);
        let kv_heads = match f.get(names.kv_heads) {
            Some(_) => f.size(names.kv_heads, 1..=1 << 14),
            None => heads,
        };
        if !heads.is_multiple_of(kv_heads) {
            f.problem(names.kv_heads, format_args!("a divisor of {} ({heads})", names.heads), kv_heads);
        }
        // As in transformers: a field that is there and null asks for the quotient.
        let absent = !f.names().any(|n| n == names.head_dim);
        let head_dim = match f.get(names.head_dim) {
            Some(_) => f.size(names.head_dim, 2..=1 << 14),
            None => arch.head_dim.filter(|_| absent).unwrap_or_else(|| {
                if !hidden_size.is_multiple_of(heads) {
                    let need = format!("a width, for {} is no multiple of {}", names.hidden, names.heads);
                    f.problem(names.head_dim, need, "null");
                    return 2;
                }
                hidden_size / heads
            }),
        };
        if !head_dim.is_multiple_of(2) {
            f.problem(names.head_dim, "an even number", head_dim);
        }
        let vocab_size = f.size(names.vocab, 1..=1 << 24);
        let max_position_embeddings = f.size(names.positions, 1..=1 << 26);
        let bos = f.token_ids("bos_token_id", vocab_size);
        if bos.len() > 1 {
            f.problem("bos_token_id", "one token id", format_args!("{bos:?}"));
        }
        let rope = rope(&mut f, max_position_embeddings);
        let config = Self {
            arch,
            hidden_size,
            intermediate_size: f.size(names.intermediate, 1..=1 << 22),
            num_hidden_layers: f.size(names.layers, 1..=1024),
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            rotary_dim: rotary_dim(&mut f, arch, head_dim),
            vocab_size,
            max_position_embeddings: max_position_embeddings.max(rope.stretched()),
            rms_norm_eps: rms_norm_eps(&mut f, names.eps),
            rope,
            tie_word_embeddings: f.flag("tie_word_embeddings").unwrap_or(false),
            bos_token_id: bos.first().copied(),
            eos_token_ids: f.token_ids("eos_token_id", vocab_size),
            dtype: dtype(&mut f),
            quantization: quantization(&mut f),
        };
        check_layer_types(&mut f, config.num_hidden_layers);
        check_total(&mut f, &config);
        f.finish()?;
        Ok(config)
    }

    /// How heads are turned.
    pub fn rotation(&self) -> Rotation {
        let (inv_freq, factor) = self.rope.inv_freq(self.rotary_dim);
        Rotation { inv_freq, factor, pairs: self.arch.rotary.pairs }
    }
}

/// `quantization_config`, or what MLX says in a field of its own and often in both.
fn quantization(f: &mut Fields) -> Option<Value> {
    let [usual, mlx] =
        ["quantization_config", "quantization"].map(|name| f.object(name).and_then(|_| f.get(name).cloned()));
    if let (Some(Value::Object(usual)), Some(Value::Object(mlx))) = (&usual, &mlx) {
        let names = usual.keys().chain(mlx.keys());
        if let Some(name) = names.into_iter().find(|name| usual.get(*name) != mlx.get(*name)) {
            let word = |of: &serde_json::Map<_, _>| of.get(name).map_or("nothing".to_owned(), show);
            let need = format!("{}, as quantization_config.{name} says", word(usual));
            f.problem(&format!("quantization.{name}"), need, word(mlx));
        }
    }
    usual.or(mlx)
}

/// How heads are turned: what every executor is told.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// Of every pair.
    pub inv_freq: Vec<f32>,
    /// On cos and sin.
    pub factor: f32,
    /// Which elements a pair is.
    pub pairs: Pairs,
}

impl Rope {
    /// Positions that YaRN stretches the original ones to, within those a file may state.
    fn stretched(&self) -> usize {
        match self.scaling {
            RopeScaling::Yarn {
                factor, original_max_position_embeddings: original, stated: true, ..
            } => ((original as f64 * factor) as usize).min(1 << 26),
            _ => 0,
        }
    }

    /// `head_dim / 2` inverse frequencies and the factor on cos and sin.
    ///
    /// Rounded as transformers' `modeling_rope_utils` does: the power and every later step in f32.
    pub fn inv_freq(&self, head_dim: usize) -> (Vec<f32>, f32) {
        let base = f64::from(self.theta as f32);
        // The power is rounded to f32 before it is inverted: one rounding instead of two gives other bits.
        let power = |i: usize| base.powf(f64::from((2 * i) as f32 / head_dim as f32)) as f32;
        let powers: Vec<f32> = (0..head_dim / 2).map(power).collect();
        match &self.scaling {
            RopeScaling::None => (powers.iter().map(|p| 1.0 / p).collect(), 1.0),
            RopeScaling::Linear { factor } => {
                (powers.iter().map(|p| 1.0 / p / *factor as f32).collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                attention_factor,
                ..
            } => {
                let dim_of = |rotations: f64| {
                    let wavelengths = *original_max_position_embeddings as f64 / (rotations * 2.0 * PI);
                    head_dim as f64 * wavelengths.ln() / (2.0 * self.theta.ln())
                };
                let low = dim_of(*beta_fast).floor().max(0.0);
                let high = dim_of(*beta_slow).ceil().min(head_dim as f64 - 1.0);
                let width = if low == high { 0.001 } else { high - low } as f32;
                let blend = |(i, p): (usize, &f32)| {
                    let keep = 1.0 - ((i as f32 - low as f32) / width).clamp(0.0, 1.0);
                    1.0 / (*factor as f32 * p) * (1.0 - keep) + 1.0 / p * keep
                };
                let default = if *factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
                (powers.iter().enumerate().map(blend).collect(), attention_factor.unwrap_or(default) as f32)
            }
        }
    }
}

/// The description that a file is read by; where there is none for it, that is a problem, and the first one's
/// finds the others.
fn family(f: &mut Fields) -> &'static Arch {
    let named = f.get("model_type").and_then(Value::as_str).and_then(Arch::of);
    let arch = named.unwrap_or(&QWEN3);
    let moe = ["num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"];
    if let Some(name) = moe.into_iter().find(|name| f.get(name).is_some_and(|v| v.as_u64() != Some(0))) {
        f.problem(name, "a dense model: mixtures of experts are not supported", "an expert field");
    }
    if named.is_none() {
        let known: Vec<_> = arch::ALL.iter().map(|a| format!("\"{}\"", a.model_type)).collect();
        let have = f.get("model_type").map_or("nothing".to_owned(), show);
        f.problem("model_type", known.join(" or "), have);
    }
    let (name, need) = (arch.fields.activation, arch.mlp.activation().as_str());
    if let Some(have) = f.get(name).filter(|have| *have != need).map(show) {
        f.problem(name, format_args!("\"{need}\""), have);
    }
    if matches!(arch.mlp, Mlp::Experts(_)) {
        f.problem("model_type", "a family of dense models: experts are not computed yet", arch.model_type);
    }
    (arch.check)(f);
    check_window(f, &arch.fields);
    arch
}

/// Attention is full.
fn check_window(f: &mut Fields, names: &FieldNames) {
    // As in transformers: no window unless it is switched on, and then only from layer `max_window_layers`
    // on.
    let window = f.optional_size("sliding_window", 0..=1 << 26);
    let layers = f.optional_size(names.layers, 1..=1024);
    let first = f.optional_size("max_window_layers", 0..=1 << 20);
    let positions = f.optional_size(names.positions, 1..=1 << 26);
    let reaches = window.is_some_and(|w| positions.is_none_or(|p| w < p));
    let layer = first.zip(layers).is_none_or(|(first, layers)| first < layers);
    if f.flag("use_sliding_window") == Some(true) && reaches && layer {
        f.problem(
            "sliding_window",
            "null, or use_sliding_window false: attention is full",
            "a window in use",
        );
    }
}

fn check_layer_types(f: &mut Fields, layers: usize) {
    let Some(value) = f.get("layer_types") else { return };
    let full = |list: &Vec<Value>| list.len() == layers && list.iter().all(|t| t == "full_attention");
    if !value.as_array().is_some_and(full) {
        let have = show(value);
        f.problem("layer_types", format_args!("{layers} times \"full_attention\""), have);
    }
}

/// Each size alone is in range; their products must be too, or a later multiplication would wrap.
fn check_total(f: &mut Fields, c: &DecoderConfig) {
    let [hidden, inter, heads, kv, dim] =
        [c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim]
            .map(|n| n as u128);
    let layer = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * inter;
    let total = layer * c.num_hidden_layers as u128 + 2 * hidden * c.vocab_size as u128;
    if total > 1 << 42 {
        f.problem("the sizes together", "at most 2^42 weights", total);
    }
}

fn rotary_dim(f: &mut Fields, arch: &Arch, head_dim: usize) -> usize {
    const FIELD: &str = "partial_rotary_factor";
    let Some(default) = arch.rotary.partial else { return head_dim };
    let share = f.number(FIELD, "above 0 and at most 1", |x| x > 0.0 && x <= 1.0).unwrap_or(default);
    let dim = (head_dim as f64 * share) as usize;
    if dim == 0 || !dim.is_multiple_of(2) {
        f.problem(FIELD, format_args!("an even part of {head_dim} elements"), dim);
    }
    dim
}

fn rms_norm_eps(f: &mut Fields, name: &str) -> f32 {
    const NEED: &str = "a positive number below 1";
    f.number(name, NEED, |x| x as f32 > 0.0 && x < 1.0).unwrap_or(1e-6) as f32
}

fn dtype(f: &mut Fields) -> Option<DType> {
    let mut found = None;
    for name in ["torch_dtype", "dtype"] {
        let Some(value) = f.get(name).cloned() else { continue };
        let dtype = match value.as_str().map(|s| s.strip_prefix("torch.").unwrap_or(s)) {
            Some("float16") => DType::F16,
            Some("bfloat16") => DType::BF16,
            Some("float32") => DType::F32,
            _ => {
                f.problem(name, "float16, bfloat16 or float32", show(&value));
                continue;
            }
        };
        if found.is_some_and(|other| other != dtype) {
            f.problem(name, "the same as torch_dtype", dtype);
        }
        found = Some(dtype);
    }
    found
}

/// The published layout has `rope_theta` and `rope_scaling`, the newer one `rope_parameters`; both may not
/// disagree.
fn rope(f: &mut Fields, max_positions: usize) -> Rope {
    const NEED: &str = "a finite number above 1";
    let mut theta = f.number("rope_theta", NEED, valid_theta);
    let mut scaling: Option<RopeScaling> = None;
    for name in ["rope_scaling", "rope_parameters"] {
        let Some(mut inner) = f.object(name) else { continue };
        if let Some(own) = inner.number("rope_theta", NEED, valid_theta) {
            if theta.is_some_and(|other| other != own) {
                inner.problem("rope_theta", "the same value wherever it stands", own);
            }
            theta = Some(own);
        }
        let own = rope_scaling(&mut inner, max_positions);
        if scaling.as_ref().is_some_and(|other| *other != own) {
            inner.problem("rope_type", "the same scaling as in rope_scaling", format_args!("{own:?}"));
        }
        scaling = Some(own);
        f.adopt(name, inner);
    }
    if theta.is_none() && f.get("rope_theta").is_none() {
        f.problem("rope_theta", NEED, "nothing");
    }
    Rope { theta: theta.unwrap_or(1e6), scaling: scaling.unwrap_or(RopeScaling::None) }
}

fn valid_theta(theta: f64) -> bool {
    theta > 1.0 && (theta as f32).is_finite()
}

fn rope_scaling(f: &mut Fields, max_positions: usize) -> RopeScaling {
    const POSITIVE: &str = "a positive number below 1e6";
    let positive = |x: f64| x > 1e-6 && x < 1e6;
    let kind = match (f.get("rope_type").cloned(), f.get("type").cloned()) {
        (Some(a), Some(b)) if a != b => {
            f.problem("type", format_args!("the same as rope_type ({})", show(&a)), show(&b));
            a
        }
        (a, b) => a.or(b).unwrap_or_else(|| "default".into()),
    };
    let known: &[&str] = match kind.as_str() {
        Some("yarn") => {
            &["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"]
        }
        Some("linear") => &["factor"],
        Some("default") => &[],
        _ => {
            f.problem("rope_type", "default, yarn or linear", show(&kind));
            return RopeScaling::None;
        }
    };
    let harmless = |name: &str| match name {
        "rope_type" | "type" | "rope_theta" => true,
        "truncate" => f.get(name) == Some(&true.into()), // the default
        "partial_rotary_factor" => f.get(name).and_then(Value::as_f64) == Some(1.0),
        _ => false,
    };
    let foreign: Vec<String> = f
        .names()
        .filter(|name| !harmless(name) && !known.contains(name) && f.get(name).is_some())
        .map(str::to_owned)
        .collect();
    for name in foreign {
        f.problem(&name, format_args!("no such field for rope_type {}", show(&kind)), "one");
    }
    if known.is_empty() {
        return RopeScaling::None;
    }
    if f.get("factor").is_none() {
        f.problem("factor", POSITIVE, "nothing");
    }
    let factor = f.number("factor", POSITIVE, positive).unwrap_or(1.0);
    if kind == "linear" {
        return RopeScaling::Linear { factor };
    }
    let [beta_fast, beta_slow] =
        [("beta_fast", 32.0), ("beta_slow", 1.0)].map(|(n, d)| f.number(n, POSITIVE, positive).unwrap_or(d));
    if beta_fast < beta_slow {
        f.problem("beta_fast", format_args!("at least beta_slow ({beta_slow})"), beta_fast);
    }
    let original = f.optional_size("original_max_position_embeddings", 1..=1 << 26);
    RopeScaling::Yarn {
        factor,
        original_max_position_embeddings: original.unwrap_or(max_positions),
        stated: original.is_some(),
        beta_fast,
        beta_slow,
        attention_factor: f.number("attention_factor", POSITIVE, positive),
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
