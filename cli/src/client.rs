//! A client of servers that speak OpenAI's API: `q4 serve`, vLLM, llama-server and others.
//!
//! Every request has a connection of its own, which its answer owns: who drops the answer closes the
//! connection at once, and the server sees that nobody listens.
mod address;
mod events;
mod refusal;
mod reply;

pub use address::Address;
pub use reply::{Piece, Reply, Usage};

use crate::args::ServerArgs;
use crate::input;
use events::Events;
use http_body::Body;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use q4_core::{Code, Error, Result};
use serde_json::Value;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(10);
/// Bytes of a document or of a refusal's words that are read.
const DOCUMENT: usize = 4 << 20;
/// The variable that holds a key where no file is named, as for `q4 serve`.
const KEY: &str = "Q4_API_KEY";

/// A server, its key and which of its models.
pub struct Server {
    address: Address,
    authorization: Option<HeaderValue>,
}

/// What runs requests: on the thread that waits for them.
///
/// # Errors
/// [`Code::Io`] where the system gives none.
pub fn runtime() -> Result<Runtime> {
    let built = Builder::new_current_thread().enable_all().build();
    built.map_err(|e| Error::new(Code::Io, format!("requests: {e}")))
}

impl Server {
    /// The server that `args` name, if they name one.
    ///
    /// # Errors
    /// [`Code::Usage`] for what is no address, for keys that cannot be sent, and for options of a server
    /// where none is named.
    pub fn of(args: &ServerArgs, verb: &str) -> Result<Option<Self>> {
        let Some(url) = &args.server else {
            return match (&args.served, &args.api_key_file) {
                (None, None) => Ok(None),
                (Some(name), _) => Err(Error::new(Code::Usage, format!("--model {name} without --server"))
                    .need("--server URL; a model that runs here stands alone, without an option")
                    .fix(format!("q4 {verb} {name}"))),
                (None, Some(_)) => {
                    Err(Error::new(Code::Usage, "--api-key-file without --server").need("--server URL"))
                }
            };
        };
        let key = match &args.api_key_file {
            Some(path) => Some(key_in(path)?),
            None => std::env::var(KEY).ok().filter(|key| !key.is_empty()),
        };
        Self::new(url, key.as_deref()).map(Some)
    }

    /// The server at `url`, and the key that it wants.
    ///
    /// # Errors
    /// [`Code::Usage`] for what is no address, and for a key that cannot be sent.
    pub fn new(url: &str, key: Option<&str>) -> Result<Self> {
        let address = Address::parse(url)?;
        let bearer = |key: &str| {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| {
                Error::new(Code::Usage, "the key of the server").need("printable ASCII on one line")
            })?;
            value.set_sensitive(true);
            Ok::<_, Error>(value)
        };
        Ok(Self { address, authorization: key.map(bearer).transpose()? })
    }

    /// Where it is.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// `named`, else the first of the models it has.
    ///
    /// # Errors
    /// As [`Self::stream`]; [`Code::ServerFailed`] where it has none.
    pub async fn model(&self, named: Option<&str>) -> Result<String> {
        if let Some(name) = named {
            return Ok(name.to_owned());
        }
        let mut answer = self.send(Method::GET, "/v1/models", String::new()).await?;
        let text = answer.all().await?;
        let list: Option<Value> = serde_json::from_slice(&text).ok();
        let first = list.as_ref().and_then(|list| list["data"][0]["id"].as_str());
        first.map(str::to_owned).ok_or_else(|| {
            Error::new(Code::ServerFailed, format!("{}: no list of models", self.address))
                .need(r#"{"data": [{"id": "..."}]} from /v1/models"#)
                .fix("--model NAME asks for one")
        })
    }

    /// Asks at `path` for an answer that comes event by event.
    ///
    /// # Errors
    /// [`Code::Io`] where no connection is to be had, [`Code::ServerRefused`] for what the server says is the
    /// asker's fault, [`Code::ServerFailed`] for everything else but a stream of events.
    pub async fn stream(&self, path: &str, body: &Value) -> Result<Stream> {
        let answer = self.send(Method::POST, path, body.to_string()).await?;
        let kind = answer.response.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
        match kind.unwrap_or("nothing") {
            events if events.starts_with("text/event-stream") => {}
            other => {
                return Err(Error::new(Code::ServerFailed, format!("{}: no events", self.address))
                    .need("text/event-stream, for \"stream\": true")
                    .have(other));
            }
        }
        Ok(Stream { answer, events: Events::default(), ready: VecDeque::new(), is_over: false })
    }

    async fn send(&self, method: Method, path: &str, body: String) -> Result<Answer> {
        let at = &self.address;
        let connecting = timeout(CONNECT, TcpStream::connect((at.host(), at.port()))).await;
        let connected = connecting.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        let unreachable = |e: std::io::Error| {
            Error::new(Code::Io, format!("{at}: {e}"))
                .fix("q4 serve MODEL begins one; or another --server URL")
        };
        let stream = connected.map_err(unreachable)?;
        // Requests are small and must not wait for more.
        let _ = stream.set_nodelay(true);
        // Several buffers at once would be written by a call that a server's end turns into SIGPIPE.
        let handshake = http1::Builder::new().writev(false).handshake(TokioIo::new(stream)).await;
        let (mut sender, wire) = handshake.map_err(|e| refusal::broken(at, &e))?;
        let mut request = Request::builder()
            .method(method)
            .uri(at.path(path))
            .header(header::HOST, at.authority())
            .header(header::USER_AGENT, concat!("q4/", env!("CARGO_PKG_VERSION")))
            .header(header::CONNECTION, "close")
            .header(header::ACCEPT, "text/event-stream, application/json")
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let request =
            request.body(body).map_err(|e| Error::new(Code::Usage, format!("{at}: no request: {e}")))?;
        let mut wire = Wire { connection: Box::pin(wire), is_over: false };
        let response = wire.until(sender.send_request(request)).await.map_err(|e| refusal::broken(at, &e))?;
        let mut answer = Answer { wire, response, address: at.clone() };
        let status = answer.response.status();
        if status.is_success() {
            return Ok(answer);
        }
        let headers = answer.response.headers().clone();
        // What is said beside the status is not worth another error.
        let words = answer.all().await.unwrap_or_default();
        Err(refusal::refused(at, path, status, &headers, &words))
    }
}

/// The key in a file.
///
/// # Errors
/// [`Code::Io`] for what cannot be read, [`Code::Usage`] for a file without one.
pub fn key_in(path: &std::path::Path) -> Result<String> {
    let (name, text) = input::file(path)?;
    let key = text.lines().map(str::trim).find(|line| !line.is_empty());
    key.map(str::to_owned)
        .ok_or_else(|| Error::new(Code::Usage, format!("--api-key-file {name}")).need("a key").have("none"))
}

/// A connection, which moves only while somebody waits for what comes over it.
struct Wire {
    connection: Pin<Box<http1::Connection<TokioIo<TcpStream>, String>>>,
    is_over: bool,
}

impl Wire {
    /// What comes of `work`, which waits for this connection.
    async fn until<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|cx| {
            // Why it ended is told to whoever waits.
            self.is_over = self.is_over || self.connection.as_mut().poll(cx).is_ready();
            work.as_mut().poll(cx)
        })
        .await
    }
}

/// A response of which the head is there.
struct Answer {
    response: Response<Incoming>,
    wire: Wire,
    address: Address,
}

impl Answer {
    /// More of the body; none at its end.
    async fn more(&mut self) -> Result<Option<Bytes>> {
        loop {
            let body = self.response.body_mut();
            let frame = self.wire.until(poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx))).await;
            match frame.transpose().map_err(|e| refusal::broken(&self.address, &e))? {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(bytes) = frame.into_data() {
                        return Ok(Some(bytes));
                    }
                }
            }
        }
    }

    async fn all(&mut self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(bytes) = self.more().await? {
            all.extend_from_slice(&bytes);
            if all.len() > DOCUMENT {
                return Err(Error::new(Code::ServerFailed, format!("{}: a long document", self.address))
                    .need(format!("at most {DOCUMENT} bytes")));
            }
        }
        Ok(all)
    }
}

/// An answer that comes event by event.
pub struct Stream {
    answer: Answer,
    events: Events,
    ready: VecDeque<String>,
    is_over: bool,
}

impl Stream {
    /// The next document; none when the server is done.
    ///
    /// # Errors
    /// [`Code::ServerFailed`] for a server that goes away, for what is no JSON, and for an event that tells
    /// of an error.
    pub async fn next(&mut self) -> Result<Option<Value>> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                if data == "[DONE]" {
                    self.is_over = true;
                    self.ready.clear();
                    return Ok(None);
                }
                return self.document(&data).map(Some);
            }
            if self.is_over {
                return Ok(None);
            }
            match self.answer.more().await? {
                Some(bytes) => self.events.take(&bytes, &mut self.ready).map_err(|e| self.within(e))?,
                None => {
                    self.is_over = true;
                    self.events.end(&mut self.ready);
                }
            }
        }
    }

    fn document(&self, data: &str) -> Result<Value> {
        let failed = |what: &str| Error::new(Code::ServerFailed, format!("{}: {what}", self.answer.address));
        let document: Value = serde_json::from_str(data)
            .map_err(|e| failed("an event that is no JSON").have(format!("{e}: {}", refusal::cut(data))))?;
        match document.get("error").filter(|e| !e.is_null()) {
            Some(_) => Err(failed("the answer failed").have(refusal::words(data.as_bytes()))),
            None => Ok(document),
        }
    }

    fn within(&self, e: Error) -> Error {
        e.within(&self.answer.address)
    }
}
