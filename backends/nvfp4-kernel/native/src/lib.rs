//! libNVFP4: NVFP4 products on packed weights, as a shared library that every program can load which knows
//! the table of `q4_plugin.h`.
//!
//! `backend` is the backend and `probe` what it can serve; on the CPU `prepare` packs a weight and `forward`
//! multiplies with it, `cuda` does both on a device.
#![allow(non_snake_case)] // the library is called NVFP4
mod activations;
mod backend;
mod backward;
mod call;
mod cuda;
mod forward;
mod kernels;
mod memory;
mod output;
mod prepare;
mod probe;
mod weight;
#[cfg_attr(not(target_arch = "x86_64"), path = "wide/none.rs")]
mod wide;

pub use backend::construct;

/// What the library calls itself.
pub const NAME: &str = "libnvfp4";

q4_plugin_sdk::export_backend!(
    construct = construct,
    name = NAME,
    version = env!("CARGO_PKG_VERSION"),
    vendor = "q4"
);
