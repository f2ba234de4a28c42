//! Greedy answers of the model in training, for samples and behaviour gates.
use super::Tch;
use super::engine::Engine;
use q4_core::{Code, Error, Result};
use q4_model::executor::Logits;
use q4_model::template::{ChatTemplate, Message};
use q4_model::tokenizer::Tokenizer;
use serde_json::Map;

/// A model that answers.
pub struct Speaker<'a> {
    /// The model.
    pub engine: &'a mut Engine,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Its chat template.
    pub template: &'a ChatTemplate,
    /// Ids that end an answer.
    pub stop: &'a [u32],
    /// Longest answer.
    pub max_tokens: usize,
}

impl Speaker<'_> {
    /// The most probable answer to one user message.
    pub fn greedy(&mut self, prompt: &str) -> Result<String> {
        let messages = [Message::new("user", prompt)];
        let text = self.template.render(&messages, None, true, &Map::new())?;
        let ids = self.tokenizer.encode(&text, false)?;
        if ids.is_empty() {
            return Err(Error::new(Code::Usage, "the prompt is empty").need("at least one token"));
        }
        let mut cache = self.engine.executor().sequence()?;
        let (mut answer, mut step) = (Vec::new(), ids);
        while answer.len() < self.max_tokens {
            let logits = self.engine.logits(&step, &mut cache, Logits::Last)?;
            let id = logits.f_argmax(-1, false).t()?.f_int64_value(&[0]).t()? as u32;
            if self.stop.contains(&id) {
                break;
            }
            answer.push(id);
            step = vec![id];
        }
        self.tokenizer.decode(&answer, true)
    }
}
