//! The trainer: the model's own graph under autograd, NVFP4 weights with straight-through gradients, masters that move,
//! states that fit the memory, checkpoints that resume to the bit.
//!
//! Everything here is plain Rust except what the feature `torch` adds in `torch`: the executor over libtorch and the
//! binary `q4-train`.
pub mod optim;
pub mod rng;
#[cfg(feature = "torch")]
pub mod torch;
