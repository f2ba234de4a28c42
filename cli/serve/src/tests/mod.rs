//! Every dialect from request to response, over an engine that says what it is told to say.
mod anthropic;
pub mod calls;
mod chat;
mod completions;
mod doors;
pub mod engine;
mod forms;
mod hostile;
mod log;
mod openapi;
mod others;
mod responses;
mod sockets;

use crate::options::Options;
use crate::router::router;
use crate::server::Server;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request};
use engine::Scripted;
use serde_json::Value;
use std::sync::Arc;
use tower::ServiceExt;

/// A response.
struct Got {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Got {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }
    /// The body for a snapshot: names that differ each time become `ID`, and times 0.
    fn stable(&self) -> String {
        let pretty = match self.header("content-type") {
            "application/json" => serde_json::to_string_pretty(&self.json()).expect("JSON"),
            _ => self.body.clone(),
        };
        stable(&pretty)
    }
    /// The message of OpenAI's error, with its status.
    fn error(&self) -> (u16, String) {
        (self.status, self.json()["error"]["message"].as_str().expect("a message").to_owned())
    }
    /// The documents of an event stream; `[DONE]` is a text.
    fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| data.into())).collect()
    }
}

/// A text without what differs each time.
fn stable(text: &str) -> String {
    let ids = regex::Regex::new(r"\b([a-z]+[-_])[0-9a-f]{24}\b").expect("valid");
    let times = regex::Regex::new(r#""(created|created_at|completed_at)"(: ?)[0-9]+"#).expect("valid");
    let text = ids.replace_all(text, "${1}ID");
    times.replace_all(&text, "\"$1\"${2}0").trim_end().to_owned()
}

/// A server without sockets.
struct House {
    engine: Arc<Scripted>,
    routes: Router,
}

impl House {
    fn with(engine: Scripted, options: Options) -> Self {
        let engine = Arc::new(engine);
        let server = Server::new(engine.served.clone(), engine.clone(), options);
        Self { routes: router(server), engine }
    }
    fn saying(text: &str) -> Self {
        Self::with(Scripted::saying(text), Options::default())
    }
    async fn send(&self, request: Request<Body>) -> Got {
        let response = self.routes.clone().oneshot(request).await.expect("no service fails");
        let (head, body) = response.into_parts();
        let bytes = axum::body::to_bytes(body, 1 << 26).await.expect("a body");
        let body = String::from_utf8(bytes.to_vec()).expect("UTF-8");
        Got { status: head.status.as_u16(), headers: head.headers, body }
    }
    async fn get(&self, path: &str) -> Got {
        self.send(Request::get(path).body(Body::empty()).expect("a request")).await
    }
    async fn post(&self, path: &str, body: &Value) -> Got {
        self.post_text(path, body.to_string()).await
    }
    async fn post_text(&self, path: &str, body: impl Into<Body>) -> Got {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request.body(body.into()).expect("a request")).await
    }
}
