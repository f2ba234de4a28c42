//! The backend `nvfp4-kernel`: NVFP4 products by libNVFP4, a shared library that is found, checked and called
//! through the table of `q4_plugin.h`, so that kernels can be replaced without rebuilding the program and a
//! bad library is a refusal, not a crash.
//!
//! `find` decides which files may be loaded, `library` loads one; what a plugin host makes of its table is
//! the backend.
mod backend;
mod find;
mod library;

pub use backend::{NAME, construct};

q4_core::inventory::submit! {
    q4_core::Registration { name: NAME, construct }
}
