//! The CUDA executor: activations, cache and tables on the device, products through the dispatch seam.
//!
//! The residual stream is f32; inputs of products, the cache and what attention reads have the element type of `--dtype`.
//! A decode step is captured once as a graph: it allocates nothing, and only a token and its flags leave the device.
mod batch;
mod cache;
mod draw;
mod engine;
mod executor;
mod kernels;
mod model;
mod slots;
mod tensor;

pub use batch::CudaBatch;
pub use cache::CudaCache;
pub use engine::CudaEngine;
pub use executor::{CudaExecutor, CudaHead, CudaNorm, CudaTable};
pub use model::CudaModel;
pub use slots::Sizes;
pub use tensor::CudaTensor;
