//! What answers: the scheduler as the server sees it.
use q4_core::Error;
use q4_model::batch::{Gauges, Request, Sink};

/// The queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Seconds after which there may be room.
    pub retry_after: u64,
}

/// Whether requests are answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Readiness {
    /// Every layer's backend has proven itself.
    Ready,
    /// Not yet, because of this.
    NotYet(String),
    /// Never.
    Failed(Error),
}

/// Continues sequences, many at once.
pub trait Engine: Send + Sync {
    /// Takes a request; `sink` is told what happens to it. Must not wait for an answer.
    ///
    /// # Errors
    /// [`Busy`] where the queue is full: `sink` is told nothing.
    fn submit(&self, request: Request, sink: Box<dyn Sink>) -> Result<(), Busy>;
    /// Requests that it can have at once, those that wait included; more never fit.
    fn capacity(&self) -> usize;
    /// What it is doing now, and what it has done since it began.
    fn gauges(&self) -> Gauges;
    /// Whether it answers.
    fn readiness(&self) -> Readiness;
}
