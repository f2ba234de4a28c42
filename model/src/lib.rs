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
mod fields;
mod files;
pub mod generate;
pub mod generation;
pub mod graph;
pub mod likelihood;
pub mod likely;
pub mod load;
pub mod memory;
pub mod plan;
pub mod quantize;
mod quiet;
pub mod runner;
pub mod sampling;
pub mod stop;
pub mod synthetic;
pub mod template;
pub mod text;
pub mod tokenizer;
pub mod verify;
pub mod watch;
pub mod weights;
