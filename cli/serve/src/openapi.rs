//! `GET /openapi.json`: every route with what it takes and how it answers, for programs that write clients
//! and tests.
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde_json::Value;
use std::sync::LazyLock;

static DOCUMENT: LazyLock<String> = LazyLock::new(|| document().to_string());

/// The document; its version is that of the program.
pub fn document() -> Value {
    // That it is JSON is what tests look at first.
    let mut document: Value = serde_json::from_str(include_str!("openapi.json")).unwrap_or_default();
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    document
}

/// Answers a request.
pub async fn get() -> Response {
    let mut response = Response::new(Body::from(DOCUMENT.as_str()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
