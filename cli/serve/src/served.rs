//! The model that is served.
use q4_model::constraint::Grammars;
use q4_model::generation::GenerationConfig;
use q4_model::template::ChatTemplate;
use q4_model::tokenizer::Tokenizer;
use serde_json::{Map, Value};

/// The text side of a model, and what is told about it.
#[derive(Debug)]
pub struct Served {
    /// As `GET /v1/models` names it.
    pub name: String,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// What compiles forms of answers for it.
    pub grammars: Grammars,
    /// Its chat template.
    pub template: ChatTemplate,
    /// Variables of the template that belong to the model: its tokens with a role, such as `eos_token`.
    pub variables: Map<String, Value>,
    /// How it wishes to be sampled.
    pub generation: GenerationConfig,
    /// Ids that end an answer.
    pub stop_ids: Vec<u32>,
    /// Positions that a sequence may have.
    pub context: usize,
    /// Document of `GET /v1/q4/explain`.
    pub explain: Value,
    /// Document of `GET /v1/q4/certificates`.
    pub certificates: Value,
    /// Since when it is served, in seconds since 1970.
    pub created: u64,
}
