//! A server of HTTP that says what it is told to say.
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a connection gets.
pub enum Says {
    /// These bytes, then its end.
    Bytes(Vec<u8>),
    /// These bytes, and nothing until the client leaves.
    Waits(Vec<u8>),
}

/// It lives as long as the test's process.
pub struct Mock {
    pub url: String,
    /// The path and document of every request.
    pub asked: Arc<Mutex<Vec<(String, Value)>>>,
    /// The key of every request.
    pub keys: Arc<Mutex<Vec<Option<String>>>>,
    left: Receiver<()>,
}

impl Mock {
    /// `says` is given the path and the document of each request.
    pub fn start(says: impl Fn(&str, &Value) -> Says + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let keys = Arc::new(Mutex::new(Vec::new()));
        let (leaves, left) = channel();
        let (kept, keyed, says) = (asked.clone(), keys.clone(), Arc::new(says));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (kept, keyed) = (kept.clone(), keyed.clone());
                let (says, leaves) = (says.clone(), leaves.clone());
                std::thread::spawn(move || {
                    let Some((path, key, body)) = request(&stream) else { return };
                    keyed.lock().unwrap().push(key);
                    kept.lock().unwrap().push((path.clone(), body.clone()));
                    let mut stream = stream;
                    match says(&path, &body) {
                        Says::Bytes(bytes) => drop(stream.write_all(&bytes)),
                        Says::Waits(bytes) => {
                            stream.write_all(&bytes).unwrap();
                            // Nothing more comes from a client but its end.
                            let _ = stream.read(&mut [0]);
                            let _ = leaves.send(());
                        }
                    }
                });
            }
        });
        Self { url, asked, keys, left }
    }

    /// One that answers every conversation with these bytes, and has the models `m` and `other`.
    pub fn answering(bytes: Vec<u8>) -> Self {
        Self::start(move |path, _| if path == "/v1/models" { models() } else { Says::Bytes(bytes.clone()) })
    }

    /// The documents of all conversations so far.
    pub fn bodies(&self) -> Vec<Value> {
        self.asked.lock().unwrap().iter().filter(|(p, _)| p != "/v1/models").map(|(_, b)| b.clone()).collect()
    }

    /// Waits until a client has left that was kept waiting.
    pub fn until_left(&self) {
        self.left.recv_timeout(Duration::from_secs(120)).expect("a client that leaves");
    }
}

/// Path, key and document.
fn request(stream: &TcpStream) -> Option<(String, Option<String>, Value)> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok()?;
    let path = first.split(' ').nth(1)?.to_owned();
    let (mut length, mut key) = (0, None);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("authorization: Bearer ") {
            key = Some(value.trim().to_owned());
        }
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path, key, serde_json::from_slice(&body).unwrap_or(Value::Null)))
}

/// A document with a status and further lines of its head.
pub fn document(status: &str, head: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\n{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

pub fn models() -> Says {
    Says::Bytes(document("200 OK", "", &json!({"data": [{"id": "m"}, {"id": "other"}]})))
}

/// The head of a stream that ends with the connection, and these events.
pub fn events(all: &[Value]) -> Vec<u8> {
    let mut text = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n".to_owned();
    for event in all {
        text += &format!("data: {event}\n\n");
    }
    text.into_bytes()
}

/// The events and the word that they are all.
pub fn whole(all: &[Value]) -> Vec<u8> {
    [events(all), b"data: [DONE]\n\n".to_vec()].concat()
}

/// A delta of an answer.
pub fn delta(delta: Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

/// How an answer ends, and its counts.
pub fn end(finish: &str, prompt: usize, answer: usize) -> [Value; 2] {
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": answer});
    [
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}),
        json!({"choices": [], "usage": usage}),
    ]
}
