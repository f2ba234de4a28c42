//! The CPU executor: f32 activations, a preallocated cache, products through dispatch.
mod attention;
mod cache;
mod engine;
mod executor;
mod sequences;
mod simd;
mod sums;
mod tensor;

pub use cache::{KvCache, KvShape, KvType};
pub use engine::CpuEngine;
pub(crate) use executor::rotations;
pub use executor::{CpuExecutor, CpuHome, CpuNorm, CpuTable, slot_bytes, slots};
pub use tensor::CpuTensor;
