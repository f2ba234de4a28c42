//! Looking at the values between the operations of a step.
use q4_core::Result;
use std::fmt;

/// A value that was just written.
pub struct Written<'a> {
    /// Who wrote it.
    pub site: Site,
    /// Rows of the step, or of the logits.
    pub rows: usize,
    /// `[rows, width]`. What is left here is what the next operation reads, rounded to the type of the slot.
    pub values: &'a mut [f32],
}

/// Where in the graph a value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The layer; `None` for embeddings and logits.
    pub layer: Option<usize>,
    /// The operation, as checkpoints name modules.
    pub call: &'static str,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "model.layers.{layer}.{}", self.call),
            None => f.write_str(self.call),
        }
    }
}

/// Called with every value of a step; an error ends the step.
pub type Each = Box<dyn FnMut(Written<'_>) -> Result<()> + Send>;

/// What an engine does between operations. Anything but `Nothing` costs speed.
#[derive(Default)]
pub enum Watch {
    /// Goes on.
    #[default]
    Nothing,
    /// Ends the step at the first value that is not finite and says where.
    NonFinite,
    /// Hands every value over.
    Each(Each),
}
