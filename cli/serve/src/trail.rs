//! What is known of one request: it ends as one line of the log, once the last byte of its response is gone.
use crate::context::TraceContext;
use crate::metrics::Outcome;
use crate::server::Server;
use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Instant;

/// Facts that come together while a request is answered.
#[derive(Debug)]
pub struct Trail {
    /// Name of the request: the client's, or ours.
    pub id: String,
    context: Option<TraceContext>,
    method: String,
    path: String,
    since: Instant,
    prompt: AtomicUsize,
    cached: AtomicUsize,
    generated: AtomicUsize,
    outcome: AtomicUsize,
}

const UNKNOWN: usize = usize::MAX;

impl Trail {
    /// At the first byte of a request.
    pub fn new(id: String, context: Option<TraceContext>, method: &str, path: &str) -> Self {
        let path = path.chars().take(200).collect();
        let [prompt, cached, generated] = [0; 3].map(AtomicUsize::new);
        let outcome = AtomicUsize::new(UNKNOWN);
        Self {
            id,
            context,
            method: method.to_owned(),
            path,
            since: Instant::now(),
            prompt,
            cached,
            generated,
            outcome,
        }
    }
    /// The trace that it belongs to, if somebody began one.
    pub fn trace_id(&self) -> Option<&str> {
        self.context.as_ref().map(|context| context.trace.as_str())
    }
    /// A prompt is in the cache, where some of it was before.
    pub fn started(&self, prompt: usize, cached: usize) {
        self.prompt.fetch_add(prompt, Relaxed);
        self.cached.fetch_add(cached, Relaxed);
    }
    /// An answer is over.
    pub fn over(&self, outcome: Outcome, tokens: usize) {
        self.generated.fetch_add(tokens, Relaxed);
        self.outcome.store(outcome as usize, Relaxed);
    }
    fn log(&self, status: u16, is_whole: bool) {
        let outcome = [Outcome::Stop, Outcome::Length, Outcome::Abort, Outcome::Error]
            .get(self.outcome.load(Relaxed))
            .map_or("-", |outcome| outcome.name());
        let read = |counter: &AtomicUsize| counter.load(Relaxed);
        tracing::info!(
            id = self.id,
            trace_id = self.trace_id(),
            span_id = self.context.as_ref().map(|context| context.span.as_str()),
            parent_id = self.context.as_ref().map(|context| context.parent.as_str()),
            method = self.method,
            path = self.path,
            status,
            ms = self.since.elapsed().as_millis() as u64,
            prompt = read(&self.prompt),
            cached = read(&self.cached),
            generated = read(&self.generated),
            outcome,
            whole = is_whole,
            "request"
        );
    }
}

/// One more request that a server which stops waits for.
#[derive(Debug)]
pub struct Flight(Arc<Server>);

impl Flight {
    /// Until it is dropped.
    pub fn new(server: Arc<Server>) -> Self {
        server.flights.send_modify(|n| *n += 1);
        Self(server)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.flights.send_modify(|n| *n -= 1);
    }
}

/// A body that tells its trail when it is over, or when the client has left.
#[derive(Debug)]
pub struct Followed {
    /// The bytes.
    pub body: Body,
    /// Whose they are.
    pub trail: Arc<Trail>,
    /// The status that went before.
    pub status: u16,
    /// Keeps a stopping server waiting.
    pub flight: Flight,
    /// The last byte was asked for.
    pub is_over: bool,
}

impl HttpBody for Followed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        self.is_over |= matches!(frame, Poll::Ready(None)) || self.body.is_end_stream();
        frame
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let is_whole = self.is_over || self.body.is_end_stream();
        // With the body go answers that nobody listens to any longer, which the line is to tell.
        drop(std::mem::take(&mut self.body));
        self.flight.0.metrics.responded(self.status);
        self.trail.log(self.status, is_whole);
    }
}
