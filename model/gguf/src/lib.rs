//! GGUF files (versions 2 and 3, little-endian), read from bytes that the caller maps.
//!
//! Every number of a file is untrusted. Names and texts are borrowed from it and arrays stay where they are,
//! so that what an index takes is bounded by the bytes it was read from ([`Gguf::index_bytes`]).
mod config;
mod container;
mod cursor;
mod facts;
mod ggml;
mod names;
mod tensors;
mod value;

pub use config::config;
pub use container::Gguf;
pub use ggml::GgmlType;
pub use names::{gguf_name, hf_name, weights};
pub use tensors::Tensor;
pub use value::{Array, Value};
