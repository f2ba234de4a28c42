//! What a route reads.
use crate::memory::Held;
use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;

/// A JSON object that somebody sent, with what it takes of memory.
#[derive(Debug)]
pub struct Asked {
    /// The object.
    pub body: Value,
    /// What the request keeps.
    pub held: Held,
    /// For reading it, until its prompts are there.
    pub work: OwnedSemaphorePermit,
}
