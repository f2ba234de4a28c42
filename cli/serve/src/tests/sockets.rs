//! What only connections can show: who leaves, and how a server ends.
use super::engine::{Mood, Scripted};
use crate::options::Options;
use crate::run::serve;
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Nothing here should take long; this is only so that a test that hangs says so.
const HANGS: Duration = Duration::from_secs(60);

struct Running {
    address: SocketAddr,
    engine: Arc<Scripted>,
    stop: oneshot::Sender<()>,
    over: JoinHandle<q4_core::Result<()>>,
}

impl Running {
    fn start(engine: Scripted, options: Options) -> Self {
        let engine = Arc::new(engine);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (stop, stopped) = oneshot::channel::<()>();
        let until = async move { drop(stopped.await) };
        let over = tokio::spawn(serve(listener, engine.served.clone(), engine.clone(), options, until));
        Self { address, engine, stop, over }
    }

    /// A request to chat.
    async fn ask(&self, stream: bool) -> TcpStream {
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": stream}).to_string();
        let mut socket = TcpStream::connect(self.address).await.expect("connects");
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(head.as_bytes()).await.expect("writes");
        socket
    }

    async fn end(self) {
        let over = tokio::time::timeout(HANGS, self.over).await.expect("it ends");
        over.expect("no panic").expect("no error");
    }
}

/// Reads until `part` has come; all that has.
async fn until(socket: &mut TcpStream, part: &str) -> String {
    let mut all = Vec::new();
    let read = async {
        loop {
            let text = String::from_utf8_lossy(&all).into_owned();
            if text.contains(part) {
                return text;
            }
            let mut buffer = [0; 4096];
            let n = socket.read(&mut buffer).await.expect("reads");
            assert!(n > 0, "{part} has not come: {text}");
            all.extend_from_slice(&buffer[..n]);
        }
    };
    tokio::time::timeout(HANGS, read).await.expect("it comes")
}

async fn wait_for(what: impl Fn() -> bool) {
    let wait = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(HANGS, wait).await.expect("it happens");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_is_not_answered_any_longer() {
    let running = Running::start(Scripted::in_mood(Mood::Endless), Options::default());
    let mut streamed = running.ask(true).await;
    until(&mut streamed, "Hello").await;
    assert_eq!(running.engine.left.load(SeqCst), 0);
    drop(streamed);
    wait_for(|| running.engine.left.load(SeqCst) == 1).await;
    let whole = running.ask(false).await;
    wait_for(|| running.engine.asked.lock().expect("lock").len() == 2).await;
    drop(whole);
    wait_for(|| running.engine.left.load(SeqCst) == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_say_that_they_are_alive() {
    let options = Options { keep_alive: Duration::from_millis(5), ..Options::default() };
    let running = Running::start(Scripted::in_mood(Mood::Endless), options);
    let mut socket = running.ask(true).await;
    until(&mut socket, "\n: q4\n").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stops_ends_what_it_has_begun() {
    let engine = Scripted { mood: Mood::Slow, ..Scripted::saying(&"Hello".repeat(80)) };
    let running = Running::start(engine, Options::default());
    let mut begun = running.ask(true).await;
    let head = until(&mut begun, "Hello").await;
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("transfer-encoding: chunked"), "{head}");
    running.stop.send(()).expect("it listens");
    let rest = until(&mut begun, "[DONE]").await;
    assert!(rest.contains("\"finish_reason\":\"stop\""), "{rest}");
    let Running { over, .. } = running;
    tokio::time::timeout(HANGS, over).await.expect("it ends").expect("no panic").expect("no error");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stops_takes_nothing_new_and_cuts_what_does_not_end() {
    let options = Options { drain_timeout: Duration::from_millis(300), ..Options::default() };
    let running = Running::start(Scripted::in_mood(Mood::Endless), options);
    let mut streamed = running.ask(true).await;
    until(&mut streamed, "Hello").await;
    let mut whole = running.ask(false).await;
    wait_for(|| running.engine.asked.lock().expect("lock").len() == 2).await;
    let Running { address, engine, stop, over } = running;
    stop.send(()).expect("it listens");
    let running = Running { address, engine, stop: oneshot::channel().0, over };
    // Somebody may be quicker than the signal.
    let refused = loop {
        let mut late = running.ask(false).await;
        let mut first = [0; 12];
        let read = tokio::time::timeout(Duration::from_millis(20), late.read_exact(&mut first)).await;
        if read.is_ok() {
            break until(&mut late, "shutting_down").await;
        }
    };
    assert!(refused.contains("connection: close") && refused.contains("retry-after"), "{refused}");
    let last = until(&mut streamed, "shutting_down").await;
    assert!(last.contains("data: {\"error\""), "{last}");
    let told = until(&mut whole, "shutting_down").await;
    assert!(told.starts_with("HTTP/1.1 503"), "{told}");
    running.end().await;
}
