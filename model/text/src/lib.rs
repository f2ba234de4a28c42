//! Between text and tokens: tokenizer, chat template, sampling, stop strings, the parts of an answer,
//! and the wishes of a model directory about them. Nothing here knows weights.
//!
//! Files of a model are untrusted: every reader here is bounded and answers damage with an error.
pub mod constraint;
pub mod generation;
mod quiet;
pub mod reply;
pub mod sampling;
pub mod scan;
pub mod stop;
pub mod template;
pub mod tokenizer;
pub mod wishes;
