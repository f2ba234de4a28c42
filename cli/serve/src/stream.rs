//! Answers as server-sent events.
use crate::answer::{Answers, Happened};
use crate::refusal::Refusal;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;

/// One event of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Its name, in dialects that name events.
    pub event: Option<&'static str>,
    /// One line.
    pub data: String,
}

impl Frame {
    /// An event without a name.
    pub fn data(data: &Value) -> Self {
        Self { event: None, data: data.to_string() }
    }
    /// An event with a name.
    pub fn named(event: &'static str, data: &Value) -> Self {
        Self { event: Some(event), ..Self::data(data) }
    }
}

impl From<Frame> for Event {
    fn from(frame: Frame) -> Self {
        let event = frame.event.map_or_else(Event::default, |name| Event::default().event(name));
        event.data(frame.data)
    }
}

/// How a dialect writes what happens. Everything goes to the end of `out`.
pub trait Render: Send + 'static {
    /// Before anything happens.
    fn begin(&mut self, out: &mut VecDeque<Frame>);
    /// Something happens to an answer.
    fn happened(&mut self, choice: usize, what: Happened, out: &mut VecDeque<Frame>);
    /// All answers are over.
    fn end(&mut self, out: &mut VecDeque<Frame>);
    /// There is no more, because of this.
    fn failed(&mut self, refusal: &Refusal, out: &mut VecDeque<Frame>);
}

struct Flow<R> {
    answers: Answers,
    render: R,
    frames: VecDeque<Frame>,
    is_over: bool,
}

/// The response whose events are what happens to `answers`.
pub fn respond(answers: Answers, mut render: impl Render) -> Response {
    let keep_alive = KeepAlive::new().interval(answers.server().options.keep_alive).text("q4");
    let mut frames = VecDeque::new();
    render.begin(&mut frames);
    let flow = Flow { answers, render, frames, is_over: false };
    let events = stream::unfold(flow, |mut flow| async move {
        loop {
            if let Some(frame) = flow.frames.pop_front() {
                return Some((Ok::<_, Infallible>(Event::from(frame)), flow));
            }
            if flow.is_over {
                return None;
            }
            match flow.answers.next().await {
                Some(Ok((choice, what))) => flow.render.happened(choice, what, &mut flow.frames),
                Some(Err(refusal)) => {
                    flow.render.failed(&refusal, &mut flow.frames);
                    flow.is_over = true;
                }
                None => {
                    flow.render.end(&mut flow.frames);
                    flow.is_over = true;
                }
            }
        }
    });
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    // Proxies that collect responses would hold every token back.
    let unbuffered = axum::http::HeaderValue::from_static("no");
    response.headers_mut().insert("x-accel-buffering", unbuffered);
    response
}
