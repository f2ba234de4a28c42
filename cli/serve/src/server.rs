//! What every handler knows: the model, the engine, the figures, and whether the server is about to stop.
use crate::engine::{Engine, Readiness};
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::refusal::{Kind, Refusal};
use crate::served::Served;
use std::fmt;
use std::sync::Arc;
use tokio::sync::watch;

/// How far a server is from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// It takes requests.
    Open,
    /// It ends what it has begun.
    Draining,
    /// Answers in flight are told that they end now.
    Cut,
}

/// The state of a server.
pub struct Server {
    /// The model.
    pub served: Arc<Served>,
    /// What answers.
    pub engine: Arc<dyn Engine>,
    /// Bounds and doors.
    pub options: Options,
    /// What requests in flight take.
    pub memory: Arc<Memory>,
    /// Figures since the start.
    pub metrics: Metrics,
    /// Only ever goes on.
    pub phase: watch::Sender<Phase>,
    /// Requests whose last byte is not gone.
    pub flights: watch::Sender<usize>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("served", &self.served.name).finish_non_exhaustive()
    }
}

impl Server {
    /// A server that takes requests.
    pub fn new(served: Arc<Served>, engine: Arc<dyn Engine>, options: Options) -> Arc<Self> {
        let memory = Memory::new(options.request_memory);
        Arc::new(Self {
            served,
            engine,
            options,
            memory,
            metrics: Metrics::default(),
            phase: watch::Sender::new(Phase::Open),
            flights: watch::Sender::new(0),
        })
    }

    /// Why nothing is answered now, if so.
    pub fn unready(&self) -> Option<Refusal> {
        if self.is_draining() {
            return Some(Refusal::draining());
        }
        let why = match self.engine.readiness() {
            Readiness::Ready => return None,
            Readiness::NotYet(why) => Refusal::new(Kind::Unready, format!("not ready yet: {why}")),
            Readiness::Failed(error) => {
                let inner = Refusal::from(error);
                Refusal { kind: Kind::Unready, ..inner }
            }
        };
        Some(why.again_after(1))
    }

    /// Waits until no new request is taken.
    pub async fn drains(&self) {
        // The sender is in here: it cannot be gone.
        let _ = self.phase.subscribe().wait_for(|phase| *phase >= Phase::Draining).await;
    }

    /// Whether no new request is taken.
    pub fn is_draining(&self) -> bool {
        *self.phase.borrow() >= Phase::Draining
    }

    /// Runs work that computes where it stops nobody.
    ///
    /// # Errors
    /// Its own, and 500 where it panics.
    pub async fn aside<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Server) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let (server, span) = (self.clone(), tracing::Span::current());
        let done = tokio::task::spawn_blocking(move || span.in_scope(|| work(&server))).await;
        done.unwrap_or_else(|e| Err(Refusal::new(Kind::Fault, format!("a bug in q4: {e}"))))
    }
}
