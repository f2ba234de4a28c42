use super::House;
use super::engine::{Mood, Scripted};
use crate::options::Options;
use axum::body::Body;
use axum::http::Request;
use futures_util::StreamExt;
use serde_json::json;
use std::io::Write;
use std::sync::{Arc, Mutex};
use tower::ServiceExt;
use tracing_subscriber::fmt::MakeWriter;

/// Keeps what is logged.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("lock").write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Kept {
    type Writer = Self;
    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Kept {
    /// The lines about three requests; other tests write here too.
    fn lines(&self) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().expect("lock").clone()).expect("UTF-8");
        let ours =
            |line: &&str| ["log-first", "/log/nothing", "log-third"].iter().any(|ours| line.contains(ours));
        text.lines().filter(ours).map(str::to_owned).collect()
    }
}

#[tokio::test]
async fn every_request_is_one_line() {
    let kept = Kept::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(kept.clone()).finish();
    // For all threads: one that has no subscriber would switch a line off for the others too.
    tracing::subscriber::set_global_default(subscriber).expect("nobody else does");
    let house = House::saying("Hello, you.");
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": true});
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let ask = |id: &str| {
        let request = Request::post("/v1/chat/completions").header("x-request-id", id);
        let request = request.header("traceparent", format!("00-{trace}-b7ad6b7169203331-01"));
        request.body(Body::from(body.to_string())).expect("a request")
    };
    house.send(ask("log-first")).await;
    house.get("/log/nothing").await;
    // One who leaves in the middle.
    let endless = House::with(Scripted::in_mood(Mood::Endless), Options::default());
    let response = endless.routes.clone().oneshot(ask("log-third")).await.expect("no service fails");
    let mut events = response.into_body().into_data_stream();
    events.next().await.expect("an event").expect("bytes");
    assert_eq!(kept.lines().len(), 2, "it is not over");
    drop(events);
    let lines = kept.lines();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(!lines[1].contains("trace_id"), "{lines:?}");
    let answered = "prompt=13 cached=6 generated=2 outcome=\"length\" whole=true";
    for (line, parts) in lines.iter().zip([
        &[
            "INFO",
            "id=\"log-first\"",
            "trace_id=\"0af7651916cd43dd8448eb211c80319c\" span_id=\"",
            "parent_id=\"b7ad6b7169203331\"",
            "status=200",
            answered,
        ][..],
        &["id=\"req_", "method=\"GET\" path=\"/log/nothing\" status=404", "outcome=\"-\" whole=true"],
        &["id=\"log-third\"", "status=200", "outcome=\"abort\" whole=false"],
    ]) {
        for part in parts {
            assert!(line.contains(part), "{part} is missing in {line}");
        }
    }
}
