//! A model over HTTP: the dialects of OpenAI and Anthropic, probes, metrics and a page.
//!
//! Every dialect parses into one question, which is prepared on threads that may block and given to an
//! [`Engine`]; what that tells becomes one stream of happenings, which every dialect renders. Whoever leaves
//! is noticed by the engine, and what went wrong is said in the form that the client expects.
mod answer;
mod anthropic;
mod ask;
mod asked;
mod constraint;
mod context;
mod dialect;
mod engine;
mod fields;
mod gate;
mod keys;
mod memory;
mod metrics;
mod openai;
mod openapi;
mod options;
mod page;
mod patience;
mod prepare;
mod probes;
mod refusal;
mod router;
mod run;
mod served;
mod server;
mod stream;
#[cfg(test)]
mod tests;
mod tokens;
mod trail;
mod whole;
mod words;
mod worker;

pub use engine::{Busy, Engine, Readiness};
pub use keys::Keys;
pub use options::Options;
pub use run::{run, serve};
pub use served::Served;
pub use worker::Worker;
