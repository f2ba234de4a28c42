//! Which tokens a text is made of: those of thoughts, calls and the words between them are told with none.
use crate::openai::likely;
use crate::served::Served;
use q4_model::batch::Weighed;
use serde_json::Value;
use std::sync::Arc;

/// Weighed tokens on their way to the text that they become.
pub struct Told {
    served: Arc<Served>,
    /// Tokens that no piece of the answer has been told for.
    pending: Vec<Weighed>,
}

impl Told {
    /// Before anything has happened.
    pub fn new(served: Arc<Served>) -> Self {
        Self { served, pending: Vec::new() }
    }

    /// A token was drawn; what it becomes is told later.
    pub fn add(&mut self, token: Option<Weighed>) {
        self.pending.extend(token);
    }

    /// The tokens of `text`. Where it begins after something else, what came before it is left out: a tag, an
    /// empty line.
    pub fn text(&mut self, text: &str, is_begun: bool) -> Vec<Value> {
        let mut tokens = std::mem::take(&mut self.pending);
        if !is_begun {
            let lengths: Vec<usize> =
                tokens.iter().map(|token| likely::bytes(&self.served.tokenizer, token.id).len()).collect();
            let mut rest: usize = lengths.iter().sum();
            let is_before = |length: &&usize| {
                let is_left = rest.saturating_sub(**length) >= text.len();
                rest -= if is_left { **length } else { 0 };
                is_left
            };
            let before = lengths.iter().take_while(is_before).count();
            tokens.drain(..before);
        }
        likely::entries(&self.served.tokenizer, &tokens)
    }

    /// The tokens became something else.
    pub fn other(&mut self) {
        self.pending.clear();
    }
}
