//! The CUDA executor: activations, cache and tables on the device, products through the dispatch seam.
//!
//! The residual stream is f32; inputs of products, the cache and what attention reads have the element type
//! of `--dtype`. A decode step is captured once as a graph of kernels: it allocates nothing, only a token and
//! its flags leave the device, and the next one starts while the host reads them.
mod ahead;
mod cache;
mod draw;
mod engine;
mod executor;
mod kernels;
mod model;
mod outbox;
mod sequences;
mod slots;
mod state;
mod tensor;
#[cfg(test)]
mod tests;

/// Bytes of a device that loaded kernels and the libraries behind them take, about.
pub const KERNELS: u64 = 48 << 20;

pub use cache::CudaCache;
pub use engine::CudaEngine;
pub use executor::{CudaExecutor, CudaNorm, CudaTable};
pub use model::{CudaHome, CudaModel};
pub use sequences::CudaSequences;
pub use slots::context_bytes;
pub use tensor::CudaTensor;
