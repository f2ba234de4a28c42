//! Products on packed weights whose 4-bit codes name one of sixteen values: what NF4, MXFP4 and int4 share on
//! the CPU. The weights stay 4-bit from memory to register.
//!
//! Sixteen output rows are interleaved so that a lane is an output row and no horizontal sum is needed.
//! Arithmetic, which is part of the numerics: `y = Σ_blocks scale · Σ_k (values[code] - zero) · x` in f32,
//! where few formats have a zero point and the difference is exact. The inner
//! sum runs over at most 64 of k in two chains (even and odd k) and is scaled once; the outer sum adds those
//! in order of k. The order depends on k alone, so neither the number of rows in a call nor the number of
//! threads changes a bit. `int8` activations are rounded to int8 with an f32 scale per 16, and `q · scale`,
//! rounded to f32, takes the place of x.
mod backend;
mod forward;
mod kernel;
mod layout;
mod many;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pages;
mod prepare;
mod probe;
mod simd;

pub use backend::{Own, Prepare, Refuse};
pub use layout::scale_group;
pub use prepare::{Codes, Packed, Scale, Stored, footprint, pack, scales};
pub use probe::{operands, probe};
pub use q4_simd::{E8m0, Widen};
