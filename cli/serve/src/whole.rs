//! Answers that are put together before anybody sees them.
use crate::answer::{Answers, End, Happened, Part, Usage};
use crate::refusal::Refusal;
use q4_model::batch::Weighed;

/// A piece of a whole answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// Text.
    Text(String),
    /// A thought.
    Thought(String),
    /// A call; those of an answer that is over are complete.
    Call {
        /// Without the prefix of a dialect.
        id: String,
        /// The tool.
        name: String,
        /// JSON text.
        arguments: String,
        /// Nobody should run one that is not.
        is_complete: bool,
    },
}

impl Answers {
    /// Waits for all answers.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub async fn all(mut self) -> Result<Vec<Whole>, Refusal> {
        let mut wholes = vec![Whole::default(); self.len()];
        while let Some(next) = self.next().await {
            let (choice, happened) = next?;
            wholes[choice].take(happened);
        }
        Ok(wholes)
    }
}

/// An answer as a whole.
#[derive(Clone, Debug, Default)]
pub struct Whole {
    /// The prompt's tokens, if they are weighed.
    pub prompt: Vec<Weighed>,
    /// Its pieces in order; neighbours are of different kinds, or calls.
    pub blocks: Vec<Block>,
    /// Its tokens, if they are weighed.
    pub tokens: Vec<Weighed>,
    /// `None` only before it is over.
    pub end: Option<End>,
}

impl Whole {
    /// Adds what happens to it.
    pub fn take(&mut self, happened: Happened) {
        let parts = match happened {
            Happened::Started { prompt, .. } => {
                self.prompt = prompt;
                return;
            }
            Happened::Step { parts, token } => {
                self.tokens.extend(token);
                parts
            }
            Happened::Ended { parts, end } => {
                self.end = Some(end);
                parts
            }
        };
        for part in parts {
            self.add(part);
        }
        if self.end.is_some() {
            self.blocks.retain(|block| !matches!(block, Block::Call { is_complete: false, .. }));
        }
    }

    fn add(&mut self, part: Part) {
        match (part, self.blocks.last_mut()) {
            (Part::Text(more), Some(Block::Text(text))) => text.push_str(&more),
            (Part::Thought(more), Some(Block::Thought(text))) => text.push_str(&more),
            (Part::Arguments { delta, .. }, Some(Block::Call { arguments, .. })) => {
                arguments.push_str(&delta)
            }
            (Part::Text(text), _) => self.blocks.push(Block::Text(text)),
            (Part::Thought(text), _) => self.blocks.push(Block::Thought(text)),
            (Part::Call { id, name, .. }, _) => {
                self.blocks.push(Block::Call { id, name, arguments: String::new(), is_complete: false });
            }
            (Part::Called { .. }, Some(Block::Call { is_complete, .. })) => *is_complete = true,
            (Part::Arguments { .. } | Part::Called { .. }, _) => {}
        }
    }

    /// All its text.
    pub fn text(&self) -> String {
        let text = |block: &Block| if let Block::Text(text) = block { Some(text.clone()) } else { None };
        self.blocks.iter().filter_map(text).collect()
    }

    /// All its thoughts.
    pub fn thoughts(&self) -> String {
        let text = |block: &Block| if let Block::Thought(text) = block { Some(text.clone()) } else { None };
        self.blocks.iter().filter_map(text).collect()
    }

    /// Tokens it took.
    pub fn usage(&self) -> Usage {
        self.end.as_ref().map_or_else(Usage::default, |end| end.usage)
    }
}
