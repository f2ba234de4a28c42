//! Products on packed weights whose codes name values, sixteen of them or sums of two of sixteen, or are
//! bytes that are numbers: what NF4, MXFP4, int4, blocks of GGML and FP8 share. The weights stay
//! packed from memory to register. Of the first three there are kernels for CUDA devices too.
//!
//! Sixteen output rows are interleaved so that a lane is an output row and no horizontal sum is needed.
//! Arithmetic, which is part of the numerics: `y = Σ_blocks scale · Σ_k (values[code] - zero) · x` in f32,
//! where few formats have a zero point and the difference is exact. Where groups have minima, or biases, the
//! sum is `Σ_blocks Σ_k (values[code] · scale - minimum) · x`, of values rounded as the format says. The
//! inner sum runs over at most 64 of k in two chains (even and odd k) and is scaled once; the outer sum adds
//! those in order of k. The order depends on k alone, so neither the number of rows in a call nor the number
//! of threads changes a bit. `int8` activations are rounded to int8 with an f32 scale per 16, and `q ·
//! scale`, rounded to f32, takes the place of x; but where codes are integers, or halves of them, the
//! products of each 16 are summed exactly, and these sums are scaled.
#[cfg(target_arch = "x86_64")]
mod avx2;
mod backend;
mod cuda;
mod dots;
mod encoding;
mod exact;
mod forward;
mod integers;
mod kernel;
mod layout;
mod many;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pages;
mod prepare;
mod probe;
mod shape;
mod simd;
mod stored;

pub use backend::{OnCuda, Own, Place, Prepare, Refuse, each, width_of};
pub use cuda::{Engine, Levels, Width};
pub use encoding::{Bytes, Encoding, Kept, NEST, Offset, Scale, Values};
pub use layout::{LEAST_GROUP, scale_group};
pub use q4_simd::{E8m0, Widen};
pub use stored::{Flat, FlatWithBiases, Run, Stored, scales};
