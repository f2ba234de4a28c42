//! Everything between a model directory and the next token: configuration, tokenizer, chat template,
//! sampling.
//!
//! Files of a model come from strangers: every reader here is bounded and answers damage with an error.
pub mod arch;
mod assemble;
pub mod checkpoint;
pub mod config;
pub mod cpu;
pub mod cuda;
pub mod executor;
pub mod export;
pub mod generate;
pub mod graph;
pub mod likelihood;
pub mod likely;
pub mod load;
pub mod memory;
pub mod plan;
pub mod quantize;
pub mod runner;
pub mod synthetic;
pub mod text;
pub mod verify;
pub mod watch;
pub mod weights;

pub(crate) use q4_text::{fields, files};
pub use q4_text::{generation, sampling, stop, template, tokenizer};
