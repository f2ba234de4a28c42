//! Refusals as the clients of an API expect them.
use crate::refusal::{Kind, Refusal};
use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::{Value, json};

/// Whose API a path belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Everything but the paths below.
    OpenAi,
    /// `/v1/messages` and below.
    Anthropic,
}

impl Dialect {
    /// The dialect of a path.
    pub fn of(path: &str) -> Self {
        let is_messages = path == "/v1/messages" || path.starts_with("/v1/messages/");
        if is_messages { Self::Anthropic } else { Self::OpenAi }
    }

    /// The document of a refusal.
    pub fn document(self, refusal: &Refusal) -> Value {
        let Refusal { kind, message, param, code, .. } = refusal;
        match self {
            Self::OpenAi => {
                let kind = openai(*kind);
                json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
            }
            Self::Anthropic => {
                json!({"type": "error", "error": {"type": anthropic(*kind), "message": message}})
            }
        }
    }

    /// A refusal as a response.
    pub fn refuse(self, refusal: &Refusal) -> Response {
        let mut response = json_of(&self.document(refusal));
        *response.status_mut() =
            StatusCode::from_u16(refusal.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if let Some(seconds) = refusal.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if refusal.kind == Kind::Key {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

fn openai(kind: Kind) -> &'static str {
    match kind {
        Kind::Key => "authentication_error",
        Kind::Origin => "permission_error",
        Kind::Missing => "not_found_error",
        Kind::Busy => "rate_limit_error",
        Kind::Unready => "service_unavailable_error",
        Kind::Fault => "server_error",
        Kind::Invalid | Kind::Method | Kind::Slow | Kind::TooLarge => "invalid_request_error",
    }
}

fn anthropic(kind: Kind) -> &'static str {
    match kind {
        Kind::Key => "authentication_error",
        Kind::Origin => "permission_error",
        Kind::Missing => "not_found_error",
        Kind::TooLarge => "request_too_large",
        Kind::Busy => "rate_limit_error",
        Kind::Unready => "overloaded_error",
        Kind::Fault => "api_error",
        Kind::Invalid | Kind::Method | Kind::Slow => "invalid_request_error",
    }
}

/// A document as a response.
pub fn json_of(document: &Value) -> Response {
    let mut response = Response::new(Body::from(document.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
