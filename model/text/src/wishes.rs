//! Sampling as far as somebody asks for it: what an option, a request or a file leaves out is as others wish.
use crate::generation::GenerationConfig;
use crate::sampling::SamplingParams;
use q4_core::Result;
use serde::{Deserialize, Serialize};

/// What is asked for. [`Default`] asks for nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wishes {
    /// Divides the logits; 0 is greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Probability mass kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Tokens kept by rank; 0 keeps all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// Least probability kept, relative to the most probable token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// Penalty of tokens seen before; 1 changes nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
    /// Seed of the draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

impl Wishes {
    /// These, and those of `others` where these are silent.
    pub fn or(&self, others: &Self) -> Self {
        Self {
            temperature: self.temperature.or(others.temperature),
            top_p: self.top_p.or(others.top_p),
            top_k: self.top_k.or(others.top_k),
            min_p: self.min_p.or(others.min_p),
            repetition_penalty: self.repetition_penalty.or(others.repetition_penalty),
            seed: self.seed.or(others.seed),
        }
    }

    /// Settled parameters with these over them.
    ///
    /// # Errors
    /// As [`SamplingParams::validate`].
    pub fn upon(&self, settled: SamplingParams) -> Result<SamplingParams> {
        let params = SamplingParams {
            temperature: self.temperature.unwrap_or(settled.temperature),
            top_k: self.top_k.unwrap_or(settled.top_k),
            top_p: self.top_p.unwrap_or(settled.top_p),
            min_p: self.min_p.unwrap_or(settled.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(settled.repetition_penalty),
            seed: self.seed.unwrap_or(settled.seed),
        };
        params.validate()?;
        Ok(params)
    }

    /// The model's wishes with these over them. Who asks for a temperature decides whether anything is drawn;
    /// how, where he is silent, is as the model wishes. `seed` counts where none is asked for.
    ///
    /// # Errors
    /// As [`SamplingParams::validate`].
    pub fn over(&self, model: &GenerationConfig, seed: u64) -> Result<SamplingParams> {
        let mut model = model.clone();
        if let Some(temperature) = self.temperature {
            model.do_sample = Some(temperature != 0.0);
        }
        self.upon(model.sampling(seed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_go_over_those_of_the_model() {
        let model = GenerationConfig { do_sample: Some(true), top_p: Some(0.8), ..Default::default() };
        let wishes = Wishes { temperature: Some(0.5), top_k: Some(3), ..Wishes::default() };
        let params = wishes.over(&model, 9).expect("valid");
        assert_eq!((params.temperature, params.top_p, params.top_k, params.seed), (0.5, 0.8, 3, 9));
        // Who asks for a temperature samples, also where the model would not, and as it wishes then.
        let quiet = GenerationConfig { do_sample: None, ..model.clone() };
        let params = wishes.over(&quiet, 1).expect("valid");
        assert_eq!((params.temperature, params.top_p), (0.5, 0.8));
        let greedy = Wishes { temperature: Some(0.0), ..wishes };
        let params = greedy.over(&model, 9).expect("valid");
        assert_eq!((params.temperature, params.top_p), (0.0, 1.0));
        assert!(Wishes { top_p: Some(2.0), ..Wishes::default() }.over(&model, 0).is_err());
    }

    #[test]
    fn the_nearer_wish_counts() {
        let near = Wishes { temperature: Some(0.5), seed: Some(1), ..Wishes::default() };
        let far = Wishes { temperature: Some(0.9), min_p: Some(0.1), ..Wishes::default() };
        let both = near.or(&far);
        assert_eq!((both.temperature, both.min_p, both.seed), (Some(0.5), Some(0.1), Some(1)));
        let settled = SamplingParams { top_k: 7, ..SamplingParams::default() };
        let params = both.upon(settled).expect("valid");
        assert_eq!((params.temperature, params.top_k, params.seed), (0.5, 7, 1));
        assert_eq!(serde_json::to_string(&near).expect("JSON"), r#"{"temperature":0.5,"seed":1}"#);
    }
}
