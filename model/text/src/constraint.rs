//! Answers that keep to a form: JSON of a schema, text of a pattern or a grammar, calls of tools.
//!
//! A [`Constraint`] says what is asked. [`Grammars`] compiles it, once a request, into a [`Grammar`], whose
//! [`Matcher`] says before each draw which tokens may come: no other token is drawn, so an answer cannot
//! leave its form, and it ends where the form may end and nowhere else. An answer that is cut, by a number of
//! tokens or a stop string, is the beginning of one that keeps to it.
//!
//! Schemas, patterns and grammars are untrusted: what compiles is bounded in size, work and depth, and so is
//! every mask. What a schema says and nobody here can keep to is refused by name; nothing of it is passed
//! over.
mod calls;
mod compile;
mod lexicon;
mod matcher;
mod schema;
#[cfg(test)]
mod tests;
mod words;

use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
pub use compile::Grammar;
use lexicon::Lexicon;
pub use matcher::Matcher;
use once_cell::sync::OnceCell;
use q4_core::Result;
use serde_json::Value;
use std::fmt;

/// Texts to choose from, at most.
pub const MOST_CHOICES: usize = 1024;

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema admits.
    JsonSchema(Value),
    /// Text that a pattern matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of a grammar in the dialect of Lark that llguidance has.
    Grammar(String),
    /// Calls of tools and nothing else.
    Calls(Calls),
}

impl Constraint {
    /// As messages name it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::JsonObject => "a JSON object",
            Self::JsonSchema(_) => "a JSON schema",
            Self::Regex(_) => "a pattern",
            Self::Choice(_) => "a list of choices",
            Self::Grammar(_) => "a grammar",
            Self::Calls(_) => "a call that must happen",
        }
    }
}

/// Calls that must happen, at least one.
#[derive(Clone, Debug, PartialEq)]
pub struct Calls {
    /// Tools in OpenAI's form: `[{"type": "function", "function": {"name", "parameters"}}]`.
    pub tools: Value,
    /// The one that may be called; absent is any.
    pub named: Option<String>,
    /// Whether several calls may be made.
    pub several: bool,
    /// How the model writes them.
    pub form: CallForm,
}

/// How a model writes calls, both between `<tool_call>` and `</tool_call>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallForm {
    /// `{"name": "f", "arguments": {...}}`.
    Json,
    /// `<function=f>` with a `<parameter=a>` for each argument.
    Tags,
}

impl CallForm {
    /// The form that a template teaches its model.
    pub fn of(template: &ChatTemplate) -> Self {
        if template.says("<function=") { Self::Tags } else { Self::Json }
    }
}

/// What an answer begins with before its form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thoughts {
    /// Nothing: its first token belongs to the form.
    #[default]
    None,
    /// The model may think: its first token may be `<think>`, and the form begins behind `</think>`.
    Possible,
    /// The prompt ended inside an open `<think>`: the form begins behind `</think>`.
    Begun,
}

impl Thoughts {
    /// Of the answer to a prompt that `template` made.
    pub fn of(prompt: &str, template: &ChatTemplate) -> Self {
        let prompt = prompt.trim_end();
        if prompt.ends_with("<think>") {
            Self::Begun
        } else if template.reads("enable_thinking") && !prompt.ends_with("</think>") {
            Self::Possible
        } else {
            Self::None
        }
    }
}

/// Compiles constraints for one tokenizer. What that takes of the tokenizer, some ten MB and half a second
/// for 150 000 tokens, is made when it is first asked for.
#[derive(Default)]
pub struct Grammars {
    lexicon: OnceCell<Lexicon>,
}

impl Grammars {
    /// The grammar of a constraint, always for the same `tokenizer`.
    ///
    /// # Errors
    /// [`Code::Usage`](q4_core::Code::Usage) for what is damaged, too large, contradicts itself or asks for
    /// what nobody here can keep to; [`Code::Unsupported`](q4_core::Code::Unsupported) where the tokens of
    /// the vocabulary are no bytes.
    pub fn compile(
        &self,
        tokenizer: &Tokenizer,
        constraint: &Constraint,
        thoughts: Thoughts,
    ) -> Result<Grammar> {
        let lexicon = self.lexicon.get_or_try_init(|| Lexicon::new(tokenizer))?;
        compile::compile(lexicon, constraint, thoughts)
    }
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("is_ready", &self.lexicon.get().is_some()).finish()
    }
}
