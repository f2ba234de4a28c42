//! `generation_config.json`: how the authors of a model want it to be sampled.
//!
//! The file is optional and every field in it is too; what is absent stays absent, so that a caller can tell.
use crate::sampling::SamplingParams;
use q4_core::Result;
use q4_files::fields::Fields;

/// Tokens kept by rank where a file asks for sampling and does not say how many, as in transformers.
const TOP_K: usize = 50;

/// The sampling wishes of a model directory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// False or absent: greedy.
    pub do_sample: Option<bool>,
    /// Divides the logits; 0 is greedy.
    pub temperature: Option<f32>,
    /// Tokens kept by rank; 0 keeps all, and so does -1 in the file. A file that asks for sampling and has
    /// no such field means 50.
    pub top_k: Option<usize>,
    /// Probability mass kept.
    pub top_p: Option<f32>,
    /// Least probability kept, relative to the most probable token.
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens seen before.
    pub repetition_penalty: Option<f32>,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Longest answer in tokens.
    pub max_new_tokens: Option<usize>,
    /// Wishes that q4 does not follow.
    pub ignored: Vec<String>,
}

/// Fields that would change what is sampled, with the values that change nothing. q4 has none of them.
const UNKNOWN: [(&str, &[f64]); 22] = [
    ("bad_words_ids", &[]),
    ("begin_suppress_tokens", &[]),
    ("diversity_penalty", &[0.0]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("encoder_repetition_penalty", &[1.0]),
    ("epsilon_cutoff", &[0.0]),
    ("eta_cutoff", &[0.0]),
    ("exponential_decay_length_penalty", &[]),
    ("forced_bos_token_id", &[]),
    ("forced_eos_token_id", &[]),
    ("frequency_penalty", &[0.0]),
    ("guidance_scale", &[1.0]),
    ("length_penalty", &[1.0]),
    ("min_length", &[0.0]),
    ("min_new_tokens", &[0.0]),
    ("no_repeat_ngram_size", &[0.0]),
    ("num_beams", &[1.0]),
    ("penalty_alpha", &[0.0]),
    ("presence_penalty", &[0.0]),
    ("sequence_bias", &[]),
    ("suppress_tokens", &[]),
    ("typical_p", &[1.0]),
];

impl GenerationConfig {
    /// Parses and validates against the rows of the embedding.
    ///
    /// # Errors
    /// [`Code::ConfigInvalid`](q4_core::Code::ConfigInvalid) with all problems.
    pub fn parse(bytes: &[u8], vocab_size: usize) -> Result<Self> {
        let mut f = Fields::parse("generation_config.json", bytes)?;
        let do_sample = f.flag("do_sample");
        let top_k = match f.get("top_k").and_then(|k| k.as_i64()) {
            Some(-1) => Some(0),
            _ => f.optional_size("top_k", 0..=1 << 24).or((do_sample == Some(true)).then_some(TOP_K)),
        };
        let config = Self {
            do_sample,
            temperature: f
                .number("temperature", "a number from 0 to 100", |x| (0.0..=100.0).contains(&x))
                .map(|x| x as f32),
            top_k,
            top_p: f
                .number("top_p", "a number above 0, at most 1", |x| x as f32 > 0.0 && x <= 1.0)
                .map(|x| x as f32),
            min_p: f
                .number("min_p", "a number from 0, below 1", |x| x >= 0.0 && (x as f32) < 1.0)
                .map(|x| x as f32),
            repetition_penalty: f
                .number("repetition_penalty", "a number above 0, at most 100", |x| {
                    x as f32 > 0.0 && x <= 100.0
                })
                .map(|x| x as f32),
            eos_token_ids: f.token_ids("eos_token_id", vocab_size),
            max_new_tokens: f.optional_size("max_new_tokens", 1..=1 << 26),
            ignored: ignored(&f),
        };
        f.finish()?;
        Ok(config)
    }

    /// The parameters these wishes amount to: greedy unless `do_sample`, and what is absent is off.
    pub fn sampling(&self, seed: u64) -> SamplingParams {
        let off = SamplingParams { seed, ..SamplingParams::default() };
        let repetition_penalty = self.repetition_penalty.unwrap_or(off.repetition_penalty);
        if self.do_sample != Some(true) {
            return SamplingParams { repetition_penalty, ..off };
        }
        SamplingParams {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(off.top_k),
            top_p: self.top_p.unwrap_or(off.top_p),
            min_p: self.min_p.unwrap_or(off.min_p),
            repetition_penalty,
            seed,
        }
    }
}

fn ignored(f: &Fields) -> Vec<String> {
    let asks = |name: &str, neutral: &[f64]| {
        f.get(name).is_some_and(|value| match value {
            serde_json::Value::Bool(wanted) => *wanted,
            serde_json::Value::Array(items) => !items.is_empty(),
            other => !other.as_f64().is_some_and(|v| neutral.contains(&v)),
        })
    };
    UNKNOWN.iter().filter(|(name, neutral)| asks(name, neutral)).map(|(name, _)| (*name).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::Code;

    #[test]
    fn published_values_are_read() {
        let json =
            br#"{"do_sample":true,"temperature":0.7,"top_p":0.8,"top_k":20,"eos_token_id":[151645,151643],
                        "bos_token_id":151643,"transformers_version":"4.51.0"}"#;
        let c = GenerationConfig::parse(json, 151_936).expect("valid");
        assert_eq!(c.eos_token_ids, [151_645, 151_643]);
        let p = c.sampling(5);
        assert_eq!((p.temperature, p.top_k, p.top_p, p.min_p, p.seed), (0.7, 20, 0.8, 0.0, 5));
        p.validate().expect("usable");
    }

    #[test]
    fn top_k_means_what_it_means_to_others() {
        let top_k = |json: &str| {
            GenerationConfig::parse(json.as_bytes(), 256).map(|c| c.sampling(0).top_k).expect("valid")
        };
        assert_eq!(top_k(r#"{"do_sample":true}"#), 50);
        assert_eq!(top_k(r#"{"do_sample":true,"top_k":20}"#), 20);
        assert_eq!(top_k(r#"{"do_sample":true,"top_k":0}"#), 0);
        assert_eq!(top_k(r#"{"do_sample":true,"top_k":-1}"#), 0);
        assert_eq!(top_k("{}"), 0, "greedy");
        // Who asks for sampling himself is not given more than he asked for.
        let mut quiet = GenerationConfig::parse(b"{}", 256).expect("valid");
        quiet.do_sample = Some(true);
        assert_eq!(quiet.sampling(0).top_k, 0);
    }

    #[test]
    fn wishes_that_nobody_follows_are_named_where_they_change_something() {
        let json = br#"{"no_repeat_ngram_size":3,"presence_penalty":1.5,"typical_p":1.0,"num_beams":1,
                        "suppress_tokens":[],"bad_words_ids":[[1]],"min_length":0,"frequency_penalty":null,
                        "transformers_version":"4.51.0","temperature":0.7}"#;
        let c = GenerationConfig::parse(json, 256).expect("valid");
        assert_eq!(c.ignored, ["bad_words_ids", "no_repeat_ngram_size", "presence_penalty"]);
    }

    #[test]
    fn without_do_sample_it_is_greedy() {
        let c = GenerationConfig::parse(br#"{"eos_token_id":2,"temperature":0.7}"#, 256).expect("valid");
        assert_eq!(c.sampling(0).temperature, 0.0);
        assert_eq!(c.eos_token_ids, [2]);
    }

    #[test]
    fn every_bad_field_is_named() {
        let json =
            br#"{"temperature":-1,"top_p":0,"top_k":-5,"min_p":1,"repetition_penalty":0,"eos_token_id":[300],
                        "max_new_tokens":0,"do_sample":"yes"}"#;
        let error = GenerationConfig::parse(json, 256).expect_err("must be refused");
        assert_eq!(error.code(), Code::ConfigInvalid);
        let text = error.to_string();
        for field in [
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "eos_token_id",
            "max_new_tokens",
            "do_sample",
        ] {
            assert!(text.contains(&format!("{field}: need")), "{field} is missing in\n{text}");
        }
        assert!(text.contains("generation_config.json"));
        assert!(GenerationConfig::parse(br#"{"temperature":NaN}"#, 256).is_err());
    }
}
