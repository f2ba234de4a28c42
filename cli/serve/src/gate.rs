//! What every request goes through: a name, the door, and the books.
use crate::context::TraceContext;
use crate::dialect::Dialect;
use crate::page;
use crate::refusal::{Kind, Refusal, shown};
use crate::server::Server;
use crate::trail::{Flight, Followed, Trail};
use crate::words;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::FutureExt;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tracing::Instrument;

/// Name of a request, which a client may choose.
const REQUEST_ID: &str = "x-request-id";
/// What orchestrators look at; like the page, which holds no secrets, it is open to everybody.
const PROBES: [&str; 2] = ["/health", "/ready"];

/// Lets a request in, or says why not; names and follows it either way.
pub async fn pass(State(server): State<Arc<Server>>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let headers = request.headers();
    let trail = Trail::new(id(headers), TraceContext::of(headers), request.method().as_str(), &path);
    let trail = Arc::new(trail);
    let flight = Flight::new(server.clone());
    let origin = request.headers().get(header::ORIGIN).cloned();
    request.extensions_mut().insert(trail.clone());
    let mut response = match admit(&server, &request, &path) {
        Ok(Some(preflight)) => preflight,
        // A bug in a handler is an answer too.
        Ok(None) => {
            let span = tracing::info_span!("request", id = trail.id, trace_id = trail.trace_id());
            let answered = AssertUnwindSafe(next.run(request).instrument(span)).catch_unwind().await;
            answered.unwrap_or_else(|_| {
                let bug = Refusal::new(Kind::Fault, "a bug in q4: a handler panicked");
                Dialect::of(&path).refuse(&bug)
            })
        }
        Err(refusal) => Dialect::of(&path).refuse(&refusal),
    };
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&trail.id) {
        headers.insert(REQUEST_ID, id);
    }
    if !server.options.origins.is_empty() {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    if let Some(origin) = origin.filter(|origin| is_listed(&server, origin)) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(REQUEST_ID));
    }
    if server.is_draining() {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let status = response.status().as_u16();
    response.map(|body| Body::new(Followed { body, trail, status, flight, is_over: false }))
}

/// The client's name for a request if it can be told apart from a log, else a new one.
fn id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let is_plain = |id: &&str| {
        (1..=128).contains(&id.len())
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:/+=".contains(&b))
    };
    given.filter(is_plain).map_or_else(|| words::name("req_"), str::to_owned)
}

/// Whether a request may go on; a question of a browser about another site is answered here.
fn admit(server: &Server, request: &Request, path: &str) -> Result<Option<Response>, Refusal> {
    let headers = request.headers();
    if let Some(host) = asked(request).filter(|host| !is_ours(server, host)) {
        let what = format!(
            "the server is not known as {}: need an address, localhost, or a name that --allowed-host gives",
            shown(&host.into())
        );
        return Err(Refusal::new(Kind::Origin, what).coded("host_not_allowed"));
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let is_listed = is_listed(server, origin);
        if !is_listed && !is_own(server, origin, request) {
            let what = "pages of this origin may not ask here: it is not listed";
            return Err(Refusal::new(Kind::Origin, what).coded("origin_not_allowed"));
        }
        if is_listed && request.method() == Method::OPTIONS {
            return Ok(Some(preflight(headers)));
        }
    }
    if PROBES.contains(&path) || page::FILES.iter().any(|(file, ..)| *file == path) {
        return Ok(None);
    }
    let keys = &server.options.keys;
    if !keys.is_empty() && !keys.admit(keys_of(headers)) {
        let what = "a valid API key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`";
        return Err(Refusal::new(Kind::Key, what).coded("invalid_api_key"));
    }
    // Whoever watches a server may see how it ends.
    let is_watching = request.method() == Method::GET;
    if server.is_draining() && !is_watching {
        return Err(Refusal::draining());
    }
    Ok(None)
}

fn is_listed(server: &Server, origin: &HeaderValue) -> bool {
    server.options.origins.iter().any(|listed| listed.as_bytes() == origin.as_bytes())
}

/// Whether a page asks the server that it came from.
fn is_own(server: &Server, origin: &HeaderValue, request: &Request) -> bool {
    let host = origin.to_str().ok().and_then(|o| o.split_once("://")).map(|(_, host)| host);
    host.is_some_and(|host| asked(request) == Some(host) && is_ours(server, host))
}

/// The name and port that a request is for. Every browser says it; a header that is no text is nobody's name.
fn asked(request: &Request) -> Option<&str> {
    let named = request.headers().get(header::HOST).map(|host| host.to_str().unwrap_or("?"));
    request.uri().authority().map(|authority| authority.as_str()).or(named)
}

/// Whether this server is known by a name. Whoever owns another can let it point here after his page has been
/// loaded, which then reads what it likes. With keys it does not matter: his page has none.
fn is_ours(server: &Server, authority: &str) -> bool {
    let is_port = |port: &str| port.bytes().all(|b| b.is_ascii_digit());
    let host =
        authority.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(authority, |(host, _)| host);
    let is_listed = |listed: &String| listed == "*" || listed.eq_ignore_ascii_case(host);
    !server.options.keys.is_empty() || is_fixed(host) || server.options.hosts.iter().any(is_listed)
}

/// Whether no name server is asked for an address.
fn is_fixed(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    let host = host.to_ascii_lowercase();
    host == "localhost" || host.ends_with(".localhost") || address.parse::<IpAddr>().is_ok()
}

fn preflight(headers: &HeaderMap) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let answer = response.headers_mut();
    answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    answer.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    // Libraries send headers of their own; a listed origin may send any.
    if let Some(wanted) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    response
}

/// What a request shows as keys.
fn keys_of(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let own = headers.get("x-api-key").map(HeaderValue::as_bytes);
    [bearer, own].into_iter().flatten()
}
