//! The CPU executor: f32 activations, a preallocated cache, products through the dispatch seam.
mod attention;
mod cache;
mod engine;
mod executor;
#[cfg(target_arch = "aarch64")]
mod neon;
mod simd;
mod sums;
mod tensor;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use cache::{KvCache, KvType};
pub use engine::CpuEngine;
pub(crate) use executor::rotations;
pub use executor::{CpuExecutor, CpuHome, CpuNorm, CpuTable, slot_bytes, slots};
pub use tensor::CpuTensor;
