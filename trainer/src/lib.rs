//! The trainer: the model's own graph under autograd, NVFP4 weights with straight-through gradients, masters
//! that move, states that fit the memory, checkpoints that resume to the bit.
//!
//! Everything here is plain Rust except what the feature `torch` adds in `torch`: the executor over libtorch
//! and the binary `q4-train`.
pub mod adapters;
pub mod behaviour;
pub mod checkpoint;
pub mod compare;
pub mod config;
pub mod corpus;
pub mod data;
pub mod freeze;
pub mod guard;
pub mod metrics;
pub mod optim;
pub mod plan;
pub mod preflight;
pub mod progress;
pub mod ranks;
pub mod rng;
pub mod schedule;
pub mod sources;
pub mod stop;
#[cfg(feature = "torch")]
pub mod torch;
