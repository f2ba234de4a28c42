//! Whatever bodies come, and however many at once: what the process takes stays below `request_memory`. A
//! process of its own, since everything that is allocated counts.
use q4_heap::{COUNTED, Heap};
use q4_model::batch::{Event, Gauges, Request, Sink};
use q4_model::constraint::Grammars;
use q4_model::generate::{Answer, FinishReason};
use q4_model::generation::GenerationConfig;
use q4_model::likely::Ranking;
use q4_model::template::ChatTemplate;
use q4_model::tokenizer::Tokenizer;
use q4_serve::{Busy, Engine, Options, Readiness, Served, serve};
use serde_json::{Map, Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[global_allocator]
static HEAP: Heap = COUNTED;

/// What requests may take.
const BOUND: usize = 64 << 20;
/// What is no request's: threads, sockets, the responses.
const OTHERS: usize = 6 << 20;
/// Clients at once.
const CLIENTS: usize = 6;
/// Nothing here should take long; this is only so that a test that hangs says so.
const HANGS: Duration = Duration::from_secs(120);

/// Answers everybody with nothing.
struct Mute;

impl Engine for Mute {
    fn submit(&self, request: Request, mut sink: Box<dyn Sink>) -> Result<(), Busy> {
        sink.tell(Event::Started { cached: 0, prompt: Vec::new() });
        let answer = Answer {
            text: String::new(),
            ids: Vec::new(),
            prompt_tokens: request.prompt.len(),
            finish: FinishReason::Stop,
            likely: Ranking::default(),
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
        };
        sink.tell(Event::Ended { text: String::new(), answer: Box::new(answer) });
        Ok(())
    }
    fn capacity(&self) -> usize {
        1000
    }
    fn gauges(&self) -> Gauges {
        Gauges::default()
    }
    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

fn served() -> Served {
    let template = "{% if tools %}{{ tools | tojson }}{% endif %}\
                    {% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}";
    Served {
        name: "demo".to_owned(),
        tokenizer: Tokenizer::from_bytes(include_bytes!("../../demo/tokenizer.json")).expect("a tokenizer"),
        template: ChatTemplate::compile(template).expect("compiles"),
        variables: Map::new(),
        generation: GenerationConfig::default(),
        stop_ids: vec![2],
        // No prompt is refused for its length.
        context: 1 << 24,
        explain: Value::Null,
        certificates: Value::Null,
        created: 0,
        grammars: Grammars::default(),
    }
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// Bodies of about `size` bytes, each hard on another part of what reads them.
fn shapes(size: usize) -> Vec<(&'static str, &'static str, String)> {
    let fill = |piece: &str| piece.repeat(size / piece.len());
    let list = |piece: &str| {
        let all = fill(&format!("{piece},"));
        all.trim_end_matches(',').to_owned()
    };
    let deep = format!("{}{}", "[".repeat(100), "]".repeat(100));
    let talk = r#""messages":[{"role":"user","content":"a"}]"#;
    vec![
        ("words", TEXT, json!({"prompt": fill("some words ")}).to_string()),
        ("short words, eight times", TEXT, json!({"prompt": fill("a b c d "), "n": 8}).to_string()),
        ("characters", TEXT, json!({"prompt": fill("你好🦀")}).to_string()),
        ("one long word", TEXT, json!({"prompt": fill("x")}).to_string()),
        ("escapes", TEXT, format!("{{\"prompt\":\"{}\"}}", fill("\\n"))),
        ("ids", TEXT, format!("{{\"prompt\":[{}]}}", list("5"))),
        (
            "ids, eight times and repeated",
            TEXT,
            format!("{{\"n\":8,\"echo\":true,\"prompt\":[{}]}}", list("5")),
        ),
        ("lists of ids", TEXT, format!("{{\"prompt\":[{}]}}", list("[5]"))),
        ("turns", CHAT, format!("{{\"messages\":[{}]}}", list(r#"{"role":"user","content":"a"}"#))),
        ("empty lists", CHAT, format!("{{\"messages\":[{}]}}", list("[]"))),
        ("empty objects", CHAT, format!("{{{talk},\"tools\":[{}]}}", list("{}"))),
        ("small objects", CHAT, format!("{{{talk},\"x\":[{}]}}", list("{\"\":0}"))),
        ("deep lists", CHAT, format!("{{{talk},\"x\":[{}]}}", list(&deep))),
        ("numbers", CHAT, format!("{{{talk},\"x\":[{}]}}", list("0"))),
        ("texts", CHAT, format!("{{{talk},\"x\":[{}]}}", list("\"\""))),
        (
            "parts",
            CHAT,
            format!(
                "{{\"messages\":[{{\"role\":\"user\",\"content\":[{}]}}]}}",
                list(r#"{"type":"text","text":"a"}"#)
            ),
        ),
        (
            "tools",
            CHAT,
            format!("{{{talk},\"tools\":[{}]}}", list(r#"{"type":"function","function":{"name":"f"}}"#)),
        ),
        (
            "items",
            "/v1/responses",
            format!("{{\"input\":[{}]}}", list(r#"{"role":"assistant","content":"a"}"#)),
        ),
        (
            "blocks",
            "/v1/messages",
            format!(
                "{{\"max_tokens\":9,\"messages\":[{{\"role\":\"user\",\"content\":[{}]}}]}}",
                list(r#"{"type":"text","text":"a"}"#)
            ),
        ),
        ("pieces", "/tokenize", json!({"content": fill("a b "), "with_pieces": true}).to_string()),
        ("tokens", "/detokenize", format!("{{\"tokens\":[{}]}}", list("500"))),
    ]
}

/// The status of the answer.
async fn ask(address: SocketAddr, path: &str, body: &str) -> u16 {
    let mut socket = TcpStream::connect(address).await.expect("connects");
    let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
    let head = format!("{head}content-length: {}\r\n\r\n", body.len());
    socket.write_all(head.as_bytes()).await.expect("writes");
    // Who is refused before his body is there may find the door shut.
    let _ = socket.write_all(body.as_bytes()).await;
    let mut first = [0; 12];
    socket.read_exact(&mut first).await.expect("an answer");
    let _ = tokio::io::copy(&mut socket, &mut tokio::io::sink()).await;
    std::str::from_utf8(&first[9..]).expect("text").parse().expect("a status")
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_bodies_come_at_once_the_bound_holds() {
    let options = Options { request_memory: BOUND as u64, ..Options::default() };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(serve(listener, Arc::new(served()), Arc::new(Mute), options, std::future::pending()));
    let mut wrong = Vec::new();
    for at in 0..shapes(1000).len() {
        // The longest that is read at all.
        let (mut size, mut status) = (1 << 19, 413);
        while status == 413 {
            size /= 2;
            let (_, path, body) = shapes(size).swap_remove(at);
            let asked = tokio::time::timeout(HANGS, ask(address, path, &body));
            status = asked.await.expect("an answer comes");
        }
        let (name, path, body) = shapes(size).swap_remove(at);
        let body = Arc::new(body);
        let before = q4_heap::begin();
        let asks: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let body = body.clone();
                tokio::spawn(async move { ask(address, path, &body).await })
            })
            .collect();
        for asked in asks {
            let status =
                tokio::time::timeout(HANGS, asked).await.expect("an answer comes").expect("no panic");
            assert!(matches!(status, 200 | 400 | 429), "{name}: {status}");
        }
        let taken = q4_heap::peak() - before;
        println!("{name}: {size} bytes, {status}, {} KiB at most", taken >> 10);
        // Only one of them is worked on at a time: the bound on work is less than what two would take.
        if taken > BOUND / 2 + OTHERS {
            wrong.push(format!("{name}: {size} bytes: {taken} bytes taken"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
