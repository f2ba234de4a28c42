//! GGUF files (versions 2 and 3, little-endian), read from bytes that the caller maps, and the heads of new
//! ones.
//!
//! [`Gguf`] is the container: metadata and the places of tensors. The rest says what a model directory in the
//! layout of Hugging Face would hold for it: [`config`], [`tokenizer`], [`tokenizer_config`],
//! [`generation_config`], and [`weights`], the tensors under the names they have there. Blocks are not
//! decoded here. The way back is [`Head`], what a file says before its data, [`put_tokenizer`] and
//! [`gguf_name`].
//!
//! Every number of a file is untrusted. Names and texts are borrowed from it and arrays stay where they are,
//! so that what an index takes is bounded by the bytes it was read from ([`Gguf::index_bytes`]).
//!
//! ```
//! use q4_gguf::{Gguf, GgmlType, weights};
//!
//! let bytes = include_bytes!("../golden/qwen2.gguf");
//! let gguf = Gguf::parse("qwen2.gguf", bytes)?;
//! let (name, tensor) = &weights(&gguf)?[0];
//! assert_eq!(name, "model.embed_tokens.weight");
//! assert_eq!((tensor.kind, tensor.shape()), (GgmlType::F16, &[1448, 2][..]));
//! assert_eq!(bytes[tensor.range.clone()].len(), 1448 * 2 * 2);
//! assert_eq!(q4_gguf::config(&gguf)?["model_type"], "qwen3");
//! # Ok::<(), q4_core::Error>(())
//! ```
mod config;
mod container;
mod cursor;
mod facts;
mod generation;
mod ggml;
mod head;
mod names;
mod tensors;
mod tokenizer;
mod value;
mod words;

pub use config::config;
pub use container::Gguf;
pub use generation::{generation_config, tokenizer_config};
pub use ggml::GgmlType;
pub use head::{Head, gap};
pub use names::{gguf_name, hf_name, weights};
pub use tensors::Tensor;
pub use tokenizer::tokenizer;
pub use value::{Array, Value};
pub use words::put_tokenizer;
