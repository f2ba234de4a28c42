//! `q4 serve`: what a real client of a real process gets.
use crate::{err, out, q4, run};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

/// A server that takes requests; ended when it is dropped.
pub struct Server {
    child: Child,
    pub address: String,
    begun: Value,
    said: BufReader<ChildStderr>,
}

/// Has it compute with sums of one order.
pub fn of_one_order(command: &mut Command) -> &mut Command {
    if cfg!(target_arch = "x86_64") {
        command.env("Q4_ISA", if std::is_x86_feature_detected!("avx2") { "avx2" } else { "portable" });
    }
    command
}

impl Server {
    /// On a free port, with sums of one order.
    pub fn start(args: &[&str]) -> Self {
        Self::of(q4(), args)
    }

    /// The same of a command with options of its own.
    pub fn of(mut command: Command, args: &[&str]) -> Self {
        of_one_order(&mut command);
        let line = ["--json", "--device", "cpu", "serve", "demo", "--port", "0"];
        let mut child =
            command.args(line).args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let begun: Value = serde_json::from_str(&first).expect("one document");
        assert_eq!(begun["schema"], "q4.serve/1");
        let url = begun["url"].as_str().unwrap();
        let address = url.trim_start_matches("http://").trim_end_matches('/').to_owned();
        let said = BufReader::new(child.stderr.take().unwrap());
        Self { child, address, begun, said }
    }

    /// The next line on standard error that has `part`.
    fn hears(&mut self, part: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "it never says {part}");
            if line.contains(part) {
                return line;
            }
        }
    }

    pub fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        write!(
            stream,
            "{head} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    /// Status and body.
    pub fn ask(&self, head: &str, body: &str) -> (u16, String) {
        let mut text = String::new();
        self.send(head, body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn chat(&self, body: &Value) -> Value {
        let (status, body) = self.ask("POST /v1/chat/completions", &body.to_string());
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    pub fn wait_until_ready(&self) {
        while self.ask("GET /ready", "").0 != 200 {
            std::thread::yield_now();
        }
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    pub fn end(mut self, signal: &str) -> Option<i32> {
        self.signal(signal);
        self.child.wait().unwrap().code()
    }

    fn signal(&self, signal: &str) {
        assert!(
            Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success()
        );
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A question whose answers have a form.
const FORMED: &str = "What is 3 plus 4?";
const FORM: &str = "([a-z]{2,7} ){4,9}[0-9]{2}[.]";

#[test]
fn answers_are_those_of_generate_whoever_else_is_served() {
    let says = ["Who are you?", "Tell me a story about a cat and a boat.", "你是誰", "What is 3 plus 4?"];
    let alone: Vec<String> = says
        .iter()
        .map(|prompt| {
            let mut command = q4();
            if cfg!(target_arch = "x86_64") && std::is_x86_feature_detected!("avx2") {
                command.env("Q4_ISA", "avx2");
            }
            let args = ["generate", "-n", "40", "--temperature", "0.9", "--seed", "11", "--no-stream", "-p"];
            command.args(["--device", "cpu"]).args(args).arg(prompt);
            if *prompt == FORMED {
                command.args(["--regex", FORM]);
            }
            out(&command.output().unwrap())
        })
        .collect();
    let server = Server::start(&["--reproducible", "--parallel", "5"]);
    assert_eq!(server.begun["reproducible"], true);
    server.wait_until_ready();
    std::thread::scope(|scope| {
        for client in 0..8 {
            let (server, alone) = (&server, &alone);
            scope.spawn(move || {
                for turn in 0..6 {
                    let which = (client + turn) % says.len();
                    let mut body = json!({
                        "messages": [{"role": "user", "content": says[which]}],
                        "max_tokens": 40, "temperature": 0.9, "seed": 11,
                    });
                    if says[which] == FORMED {
                        body["structured_outputs"] = json!({"regex": FORM});
                    }
                    // Somebody who leaves changes nothing for those who stay.
                    if turn == 3 && client % 2 == 0 {
                        drop(server.send("POST /v1/chat/completions", &body.to_string()));
                        continue;
                    }
                    let answer = server.chat(&body);
                    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
                    assert_eq!(format!("{text}\n"), alone[which], "client {client}, turn {turn}");
                }
            });
        }
    });
    let explained: Value = serde_json::from_str(&server.ask("GET /v1/q4/explain", "").1).unwrap();
    assert_eq!((&explained["reproducible"], &explained["model"]), (&true.into(), &"demo".into()));
    assert_eq!(server.ask("POST /v1/chat/completions", "{").0, 400);
    let (status, page) = server.ask("GET /", "");
    assert!(status == 200 && page.contains("<title>"), "{status}");
    assert_eq!(server.end("-TERM"), Some(0));
}

#[test]
fn a_server_that_is_stopped_lets_answers_end() {
    let server = Server::start(&["--parallel", "2"]);
    server.wait_until_ready();
    let body = json!({
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 400, "ignore_eos": true, "stream": true, "temperature": 0,
    });
    let stream = server.send("POST /v1/chat/completions", &body.to_string());
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("content")), "it has begun");
    // As `timeout` does: one wish is heard many times, and nobody insists.
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").arg("-INT").args(vec![&pid; 20]).status().unwrap().success());
    let rest: Vec<String> = lines.collect();
    assert!(rest.iter().any(|line| line.contains("\"finish_reason\":\"length\"")), "{:?}", rest.last());
    assert!(rest.iter().any(|line| line == "data: [DONE]"), "{:?}", rest.last());
    assert_eq!(server.end("-CONT"), Some(0));
}

#[test]
fn doors_that_cannot_work_are_refused_before_a_model_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "\n\n").unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (args, status, word) in [
        (&["--port", &port][..], 8, "--port"),
        (&["--port", "0", "--api-key-file", keys.to_str().unwrap()], 2, "a key on each line"),
        (&["--port", "0", "--api-key", "open sesame"], 2, "API key"),
        (&["--port", "0", "--cors-origin", "example.org"], 2, "example.org"),
        (&["--port", "0", "--api-key-file", absent!()], 8, "--api-key-file"),
        (&["--port", "0", "--context", "99999999"], 2, "--context"),
        (&["--port", "0", "--parallel", "0"], 2, "--parallel"),
        (&["--port", "65536"], 2, "--port"),
        (&["--port", "0", "--allowed-host", "https://example.org"], 2, "https://example.org"),
        (&["--port", "0", "--request-memory", "1MiB"], 2, "at least 16.00 MiB"),
        (&["--port", "0", "--request-memory", "much"], 2, "--request-memory"),
        (&["--host", "nowhere.invalid", "--port", "0"], 8, "nowhere.invalid"),
    ] {
        let output = run(&[&["--device", "cpu", "serve", "demo"], args].concat());
        let text = err(&output);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {text}");
        assert!(text.contains(word), "{args:?}: {text}");
    }
    let server = Server::start(&["--api-key", "open-sesame"]);
    assert_eq!(server.ask("GET /v1/models", "").0, 401);
    assert_eq!(server.ask("GET /v1/models HTTP/1.1\r\nauthorization: Bearer open-sesame\r\nx:", "").0, 200);
    assert_eq!(server.ask("GET /health", "").0, 200);
}

#[test]
fn keys_are_read_again_on_sighup() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    std::fs::write(&file, "old\n").unwrap();
    let mut server = Server::start(&["--api-key-file", file.to_str().unwrap()]);
    let ask = |server: &Server, key: &str| {
        server.ask(&format!("GET /v1/models HTTP/1.1\r\nx-api-key: {key}\r\nx:"), "").0
    };
    assert_eq!((ask(&server, "old"), ask(&server, "new")), (200, 401));
    std::fs::write(&file, "new\nother\n").unwrap();
    assert_eq!((ask(&server, "old"), ask(&server, "new")), (200, 401), "nobody has said so yet");
    server.signal("-HUP");
    assert_eq!(server.hears("SIGHUP"), "SIGHUP: keys are read again: 2\n");
    assert_eq!((ask(&server, "old"), ask(&server, "new")), (401, 200));
    for bad in ["\n", "a b\n"] {
        std::fs::write(&file, bad).unwrap();
        server.signal("-HUP");
        let said = server.hears("SIGHUP");
        assert!(said.contains("keys stay as they were: 2"), "{said}");
        assert_eq!((ask(&server, "old"), ask(&server, "new")), (401, 200));
    }
    std::fs::remove_file(&file).unwrap();
    server.signal("-HUP");
    let said = server.hears("SIGHUP");
    assert!(said.contains("keys stay as they were: 2") && said.contains("--api-key-file"), "{said}");
    assert_eq!(ask(&server, "other"), 200);
    assert_eq!(server.end("-TERM"), Some(0));
}

#[test]
fn without_a_file_of_keys_sighup_ends_a_server_as_every_program() {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    let mut command = q4();
    // Whoever runs the tests under nohup ignores the signal, and hands that on.
    // SAFETY: signal(2) may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGHUP, libc::SIG_DFL);
            Ok(())
        });
    }
    let mut server = Server::of(command, &["--api-key", "secret"]);
    server.signal("-HUP");
    assert_eq!(server.child.wait().unwrap().signal(), Some(1));
}

#[test]
fn half_a_body_does_not_keep_a_server_that_stops() {
    let server = Server::start(&["--drain-timeout", "3600"]);
    server.wait_until_ready();
    let mut stream = TcpStream::connect(&server.address).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100";
    write!(stream, "{head}\r\nexpect: 100-continue\r\n\r\n").unwrap();
    // It says so once it waits for the body.
    let mut begun = [0; 12];
    stream.read_exact(&mut begun).unwrap();
    assert_eq!(&begun, b"HTTP/1.1 100");
    write!(stream, "{{\"prompt\":").unwrap();
    server.signal("-TERM");
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("HTTP/1.1 503") && text.contains("shutting_down"), "{text}");
    let mut server = server;
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_server_says_what_proof_there_is_of_who_computes() {
    let proofs = certificates(q4(), &[]);
    assert_eq!((&proofs["model"], &proofs["device"]), (&json!("demo"), &json!("cpu")));
    let backends = proofs["backends"].as_array().unwrap();
    assert!(!backends.is_empty());
    for proof in backends {
        assert_eq!(
            (&proof["origin"], &proof["self_check"]),
            (&json!("built-in"), &json!("passed")),
            "{proof}"
        );
        assert!(proof["products"].as_u64() > Some(0) && proof["certificate"].is_null(), "{proof}");
    }
    let proofs = certificates(q4(), &["--no-self-check"]);
    assert!(proofs["skipped_self_checks"].as_u64() > Some(0), "{proofs}");
    assert_eq!(proofs["backends"][0]["self_check"], "skipped");
}

/// What a server of a command with these options says of proof.
pub fn certificates(command: Command, args: &[&str]) -> Value {
    let server = Server::of(command, args);
    let (status, body) = server.ask("GET /v1/q4/certificates", "");
    assert_eq!(status, 200, "{body}");
    let proofs: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(proofs["schema"], "q4.certificates/1");
    proofs
}

#[test]
fn a_line_of_the_log_is_json_and_knows_its_trace() {
    let mut server = Server::start(&["-v", "--log-format", "json"]);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let headers = format!("x-request-id: log-one\r\ntraceparent: 00-{trace}-b7ad6b7169203331-01");
    assert_eq!(server.ask(&format!("GET /health HTTP/1.1\r\n{headers}\r\nx:"), "").0, 200);
    let line: Value = serde_json::from_str(&server.hears("log-one")).expect("JSON");
    assert_eq!(
        (&line["level"], &line["message"], &line["status"]),
        (&json!("INFO"), &json!("request"), &json!(200))
    );
    assert_eq!((&line["trace_id"], &line["parent_id"]), (&json!(trace), &json!("b7ad6b7169203331")));
    assert!(line["span_id"].is_string() && line["timestamp"].is_string(), "{line}");
}
