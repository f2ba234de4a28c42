//! Everything between a model directory and the next token: the graph, its executors, plans and conversations
//! on the rooms below, whose modules are handed on: checkpoints and families, and text.
//!
//! Files of a model are untrusted: every reader here is bounded and answers damage with an error.
mod assemble;
pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod draft;
pub mod executor;
pub mod generate;
pub mod graph;
pub mod likelihood;
pub mod likely;
pub mod load;
pub mod memory;
pub mod places;
pub mod plan;
pub mod runner;
pub mod synthetic;
pub mod text;
pub mod verify;
pub mod watch;
pub mod weights;

pub use q4_checkpoint::{self as checkpoint, arch, config, export, quantize};
pub use q4_text::{constraint, generation, reply, sampling, scan, stop, template, tokenizer, wishes};
