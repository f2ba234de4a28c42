//! The backend `nvfp4-kernel`: NVFP4 products by libNVFP4, a shared library that is found, checked and called
//! through one table, so that kernels can be replaced without rebuilding the program and a bad library is a
//! refusal, not a crash.
//!
//! `find` decides which files may be loaded, `elf` and `library` load one and check its table, `probe` says
//! what can be served from facts alone, `prepare` and `forward` translate. Only these have `unsafe`:
//! `library`, `table`, `prepare` and `forward`.
#[path = "../native/src/abi.rs"]
mod abi;
mod backend;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod elf;
mod find;
mod forward;
mod library;
mod prepare;
mod probe;
mod table;

pub use backend::{Nvfp4Kernel, construct};
pub use probe::{BLACKWELL, NAME};

q4_core::inventory::submit! {
    q4_core::Registration { name: NAME, construct }
}
