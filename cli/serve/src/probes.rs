//! What is asked about the server itself.
use crate::dialect::{Dialect, json_of};
use crate::server::Server;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde_json::json;
use std::sync::Arc;

/// `GET /health`: the process lives.
pub async fn health() -> Response {
    json_of(&json!({"status": "ok"}))
}

/// `GET /ready`: requests are answered, else why they are not.
pub async fn ready(State(server): State<Arc<Server>>) -> Response {
    match server.unready() {
        None => json_of(&json!({"status": "ready", "model": server.served.name})),
        Some(refusal) => Dialect::OpenAi.refuse(&refusal),
    }
}

/// `GET /version`.
pub async fn version() -> Response {
    json_of(&json!({"name": "q4", "version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /metrics`.
pub async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let text = server.metrics.text(&server.served.name, &server.engine.gauges(), server.memory.kept());
    let mut response = Response::new(Body::from(text));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// `GET /v1/q4/certificates`: what proof there is of those who compute the model.
pub async fn certificates(State(server): State<Arc<Server>>) -> Response {
    json_of(&server.served.certificates)
}

/// `GET /v1/q4/explain`: what computes the model, and why.
pub async fn explain(State(server): State<Arc<Server>>) -> Response {
    json_of(&server.served.explain)
}
