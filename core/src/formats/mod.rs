//! The bits of the 4-bit formats and their scalar codecs: the one place where a code becomes a number.
//!
//! Everything here is plain IEEE f32 (subnormals included) and allocation-free per row, so it is the
//! reference that kernels are compared with and what they fall back on for ragged edges.
pub mod e2m1;
pub mod e4m3;
pub mod int8;
pub mod nf4;
pub mod nvfp4;
pub mod swizzle;

#[cfg(test)]
mod oracle;
