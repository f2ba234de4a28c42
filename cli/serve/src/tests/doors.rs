use super::engine::{Mood, Scripted};
use super::{Got, House};
use crate::engine::Readiness;
use crate::keys::Keys;
use crate::options::Options;
use crate::router::router;
use crate::server::{Phase, Server};
use axum::body::{Body, Bytes};
use axum::http::Request;
use futures_util::stream::unfold;
use futures_util::{FutureExt, StreamExt};
use q4_core::{Code, Error};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tokio::time::Instant;
use tower::ServiceExt;

const CHAT: &str = "/v1/chat/completions";

fn hello() -> String {
    json!({"messages": [{"role": "user", "content": "Hi"}]}).to_string()
}

fn locked() -> House {
    let keys = Keys::new(vec!["secret".into(), "other".into()]).expect("usable");
    House::with(Scripted::saying("Hello"), Options { keys, ..Options::default() })
}

async fn with_header(house: &House, path: &str, name: &str, value: &str) -> Got {
    let request = Request::post(path).header(name, value).body(Body::from(hello()));
    house.send(request.expect("a request")).await
}

#[tokio::test]
async fn a_key_opens_the_door_in_either_header() {
    let house = locked();
    for (name, value, status) in [
        ("authorization", "Bearer secret", 200),
        ("authorization", "bearer other", 200),
        ("x-api-key", "secret", 200),
        ("authorization", "Bearer secre", 401),
        ("authorization", "Bearer secrets", 401),
        ("authorization", "Basic secret", 401),
        ("authorization", "Bearer", 401),
        ("x-api-key", "", 401),
        ("x-other", "secret", 401),
    ] {
        assert_eq!(with_header(&house, CHAT, name, value).await.status, status, "{name}: {value}");
    }
    let got = with_header(&house, CHAT, "x", "y").await;
    assert_eq!(got.header("www-authenticate"), "Bearer");
    assert_eq!(got.json()["error"]["code"], "invalid_api_key");
    let got = with_header(&house, "/v1/messages", "x", "y").await;
    assert_eq!((got.status, got.json()["error"]["type"].as_str()), (401, Some("authentication_error")));
}

#[tokio::test]
async fn only_the_page_and_the_probes_need_no_key() {
    let house = locked();
    for path in ["/", "/app.js", "/view.js", "/style.css", "/health", "/ready"] {
        assert_eq!(house.get(path).await.status, 200, "{path}");
    }
    for path in ["/v1/models", "/metrics", "/version", "/v1/q4/explain", "/nothing"] {
        assert_eq!(house.get(path).await.status, 401, "{path}");
    }
}

#[tokio::test]
async fn wrong_paths_and_methods_are_told_apart() {
    let house = House::saying("Hello");
    let missing = house.get("/v1/nothing").await;
    assert_eq!((missing.status, missing.json()["error"]["type"].as_str()), (404, Some("not_found_error")));
    let wrong = house.get(CHAT).await;
    assert_eq!((wrong.status, wrong.json()["error"]["code"].as_str()), (405, Some("method_not_allowed")));
    assert!(wrong.header("allow").contains("POST"));
    assert_eq!(house.post("/health", &json!({})).await.status, 405);
}

#[tokio::test]
async fn bodies_that_are_no_objects_are_refused() {
    let house = House::saying("Hello");
    for body in ["", "{", "[]", "7", "null", "{\"messages\": [}", "\u{0}", "{\"a\": 1e999}", "{} {}"] {
        let (status, message) = house.post_text(CHAT, body).await.error();
        assert_eq!(status, 400, "{body}");
        assert!(message.starts_with("the body"), "{message}");
    }
    // Too deep; and so many values that reading them would take more than requests may.
    for (depth, status) in [(2_000, 400), (200_000, 413)] {
        let deep = format!("{{\"messages\": {}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(house.post_text(CHAT, deep).await.status, status, "{depth}");
    }
    assert_eq!(house.post_text(CHAT, &b"{\"a\": \"\xff\"}"[..]).await.status, 400);
}

#[tokio::test]
async fn a_body_that_is_too_long_is_refused_whether_or_not_it_says_so() {
    let options = Options { max_body: 100, ..Options::default() };
    let house = House::with(Scripted::saying("Hello"), options);
    assert_eq!(house.post_text(CHAT, hello()).await.status, 200);
    let long = "x".repeat(101);
    let (status, message) = house.post_text(CHAT, long.clone()).await.error();
    assert_eq!(status, 413);
    assert!(message.contains("at most 100 bytes"), "{message}");
    let pieces = long
        .into_bytes()
        .chunks(10)
        .map(|c| Ok::<_, std::io::Error>(Bytes::copy_from_slice(c)))
        .collect::<Vec<_>>();
    let body = Body::from_stream(futures_util::stream::iter(pieces));
    assert_eq!(house.post_text(CHAT, body).await.status, 413);
    let got = house.post_text("/v1/messages", "x".repeat(101)).await;
    assert_eq!(got.json()["error"]["type"], "request_too_large");
}

/// Half of a body, and then nothing.
fn half() -> Body {
    let begun = Ok::<_, std::io::Error>(Bytes::from_static(b"{\"messages\": ["));
    Body::from_stream(futures_util::stream::iter([begun]).chain(futures_util::stream::pending()))
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let house = House::saying("Hello");
    let body = Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>());
    for body in [body, half()] {
        let begun = Instant::now();
        assert_eq!(house.post_text(CHAT, body).await.status, 408);
        // The clock stands still but for what is waited for.
        assert_eq!(begun.elapsed().as_secs(), Options::default().idle_timeout.as_secs());
    }
    // A byte now and then does not keep it either.
    let drop = |at: u8| async move {
        tokio::time::sleep(Duration::from_secs(4)).await;
        Some((Ok::<_, std::io::Error>(Bytes::from_static(b" ")), at))
    };
    let begun = Instant::now();
    assert_eq!(house.post_text(CHAT, Body::from_stream(unfold(0, drop))).await.status, 408);
    assert_eq!(begun.elapsed().as_secs(), Options::default().read_timeout.as_secs());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_stops_waits_for_no_body() {
    let engine = Arc::new(Scripted::saying("Hello"));
    let server = Server::new(engine.served.clone(), engine.clone(), Options::default());
    let house = House { routes: router(server.clone()), engine };
    let begun = Instant::now();
    let stop = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        server.phase.send_replace(Phase::Draining);
    };
    let (got, ()) = tokio::join!(house.post_text(CHAT, half()), stop);
    assert_eq!((got.status, got.json()["error"]["code"].as_str()), (503, Some("shutting_down")));
    assert_eq!(begun.elapsed().as_secs(), 1);
    assert_eq!((*server.flights.borrow(), server.memory.kept()), (0, 0));
}

#[tokio::test]
async fn bodies_in_flight_are_counted() {
    let (engine, options) = (Arc::new(Scripted::in_mood(Mood::Endless)), Options::default());
    let server =
        Server::new(engine.served.clone(), engine.clone(), Options { request_memory: 16 << 20, ..options });
    let house = House { routes: router(server.clone()), engine };
    // Three bodies of two MiB that never end take six MiB each of the eight.
    let long = || {
        let begun = Ok::<_, std::io::Error>(Bytes::from(vec![b' '; 2 << 20]));
        Body::from_stream(futures_util::stream::iter([begun]).chain(futures_util::stream::pending()))
    };
    let first = house.post_text(CHAT, long());
    tokio::pin!(first);
    assert!(first.as_mut().now_or_never().is_none());
    assert_eq!(server.memory.kept(), 6 << 20);
    let got = house.post_text(CHAT, long()).await;
    assert_eq!((got.status, got.header("retry-after")), (429, "1"));
    assert_eq!(got.json()["error"]["code"], "memory_full");
    // What is small is answered all the same.
    assert_eq!(house.post_text("/tokenize", json!({"prompt": "a"}).to_string()).await.status, 200);
    assert_eq!(server.memory.kept(), 6 << 20);
    let got = house.post_text("/v1/messages", long()).await;
    assert_eq!(got.json()["error"]["type"], "rate_limit_error");
}

#[tokio::test]
async fn a_body_that_is_too_much_to_read_is_refused_whatever_comes() {
    let options = Options { request_memory: 16 << 20, ..Options::default() };
    let house = House::with(Scripted::saying("Hello"), options);
    let body = format!("{{\"messages\": [{}]}}", vec!["[]"; 20_000].join(","));
    let (status, message) = house.post_text(CHAT, body).await.error();
    assert_eq!(status, 413);
    assert!(message.contains("need at most 8.00 MiB") && message.contains("40003 values"), "{message}");
}

#[tokio::test]
async fn an_answer_keeps_its_prompt_and_nothing_else() {
    let (engine, options) = (Arc::new(Scripted::in_mood(Mood::Slow)), Options::default());
    let server = Server::new(engine.served.clone(), engine.clone(), options);
    let house = House { routes: router(server.clone()), engine };
    let body = json!({"prompt": "Hello", "stream": true, "user": "u".repeat(100_000)});
    let request = Request::post("/v1/completions").body(Body::from(body.to_string())).expect("a request");
    let response = house.routes.clone().oneshot(request).await.expect("no service fails");
    let kept = server.memory.kept();
    assert!((1..10_000).contains(&kept), "{kept}");
    drop(response);
    assert_eq!(server.memory.kept(), 0);
}

#[tokio::test]
async fn more_answers_than_ever_fit_are_no_reason_to_come_again() {
    let house = House::with(Scripted { capacity: 3, ..Scripted::saying("Hello") }, Options::default());
    let body = |n: usize| json!({"messages": [{"role": "user", "content": "Hi"}], "n": n});
    assert_eq!(house.post(CHAT, &body(3)).await.status, 200);
    let got = house.post(CHAT, &body(4)).await;
    let (status, message) = got.error();
    assert_eq!((status, got.header("retry-after"), &got.json()["error"]["param"]), (400, "", &json!("n")));
    assert!(
        message.starts_with("n: need at most 3 answers in one request") && message.ends_with("have 4"),
        "{message}"
    );
    let got = house.post("/v1/completions", &json!({"prompt": ["a", "b", "c", "d"]})).await;
    assert_eq!((got.status, &got.json()["error"]["param"]), (400, &json!("prompt")));
}

#[tokio::test]
async fn a_prompt_that_is_far_too_long_never_becomes_tokens() {
    let house = House::saying("Hello");
    let long = "the same words ".repeat(10_000);
    let talk = json!({"messages": [{"role": "user", "content": long}]});
    for (path, body) in [("/v1/completions", json!({"prompt": long})), (CHAT, talk)] {
        let (status, message) = house.post(path, &body).await.error();
        assert_eq!(status, 400);
        assert!(message.contains("need: at most 200 tokens; have: at least "), "{message}");
    }
    // What a bound cannot tell is told by counting.
    let (_, message) = house.post("/v1/completions", &json!({"prompt": "a b ".repeat(120)})).await.error();
    assert!(message.contains("need: at most 200 tokens; have: 24"), "{message}");
    let ids = vec![5; 300];
    let (_, message) = house.post("/v1/completions", &json!({"prompt": ids})).await.error();
    assert!(message.contains("have: 300 tokens"), "{message}");
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_again() {
    let house = House::with(Scripted::in_mood(Mood::Full), Options::default());
    let got = house.post_text(CHAT, hello()).await;
    assert_eq!((got.status, got.header("retry-after")), (429, "3"));
    assert_eq!(got.json()["error"]["type"], "rate_limit_error");
}

#[tokio::test]
async fn before_it_is_ready_a_server_says_why() {
    let house = House::saying("Hello");
    *house.engine.readiness.lock().expect("lock") = Readiness::NotYet("layer 3 of 6 proves itself".into());
    for got in [house.get("/ready").await, house.post_text(CHAT, hello()).await] {
        assert_eq!((got.status, got.header("retry-after")), (503, "1"));
        assert_eq!(got.error().1, "not ready yet: layer 3 of 6 proves itself");
    }
    assert_eq!(house.get("/health").await.status, 200);
    let error = Error::new(Code::SelfCheckFailed, "layer 3").need("1.0").have("1.1");
    *house.engine.readiness.lock().expect("lock") = Readiness::Failed(error);
    let got = house.get("/ready").await;
    assert_eq!((got.status, got.json()["error"]["code"].as_str()), (503, Some("Q4-E0307")));
    assert_eq!(got.error().1, "Q4-E0307: layer 3; need: 1.0; have: 1.1");
}

#[tokio::test]
async fn a_fault_of_the_engine_is_no_fault_of_the_client() {
    let house = House::with(Scripted::in_mood(Mood::Failing), Options::default());
    let got = house.post_text(CHAT, hello()).await;
    assert_eq!((got.status, got.json()["error"]["type"].as_str()), (500, Some("server_error")));
    // In the middle of a stream it is the last event.
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true});
    let got = house.post(CHAT, &body).await;
    let last = got.events().pop().expect("events");
    assert_eq!((got.status, &last["error"]["code"]), (200, &json!("Q4-E0211")));
}

#[tokio::test]
async fn requests_have_names() {
    let house = House::saying("Hello");
    let named = with_header(&house, CHAT, "x-request-id", "abc-1:2").await;
    assert_eq!(named.header("x-request-id"), "abc-1:2");
    for bad in ["a b", "a\"b", &"x".repeat(129)] {
        let got = with_header(&house, CHAT, "x-request-id", bad).await;
        assert!(got.header("x-request-id").starts_with("req_"), "{bad}");
    }
    assert!(house.get("/nothing").await.header("x-request-id").starts_with("req_"));
}

#[tokio::test]
async fn pages_of_other_sites_ask_only_where_they_are_listed() {
    let listed = "https://app.example";
    let keys = Keys::new(vec!["k".into()]).expect("usable");
    let options = Options { origins: vec![listed.into()], keys, ..Options::default() };
    let house = House::with(Scripted::saying("Hello"), options);
    let preflight = |origin: &str| {
        let request = Request::options(CHAT)
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,x-stainless-os");
        request.body(Body::empty()).expect("a request")
    };
    let got = house.send(preflight(listed)).await;
    assert_eq!((got.status, got.header("access-control-allow-origin")), (204, listed));
    assert_eq!(got.header("access-control-allow-headers"), "authorization,x-stainless-os");
    assert_eq!(got.header("vary"), "origin");
    let got = house.send(preflight("https://evil.example")).await;
    assert_eq!((got.status, got.header("access-control-allow-origin")), (403, ""));
    let ask = |origin: &str| {
        let request = Request::post(CHAT).header("origin", origin).header("host", "localhost:8000");
        request.header("x-api-key", "k").body(Body::from(hello())).expect("a request")
    };
    let got = house.send(ask(listed)).await;
    assert_eq!((got.status, got.header("access-control-allow-origin")), (200, listed));
    for (origin, status) in [
        ("http://localhost:8000", 200),
        ("http://localhost:8001", 403),
        ("null", 403),
        ("https://app.example.evil", 403),
    ] {
        assert_eq!(house.send(ask(origin)).await.status, status, "{origin}");
    }
    // Without a list nobody else may ask.
    let house = House::saying("Hello");
    assert_eq!(house.send(preflight(listed)).await.status, 403);
    assert_eq!(house.send(ask(listed)).await.status, 403);
}

#[tokio::test]
async fn without_keys_a_name_that_may_point_anywhere_is_no_origin_of_ours() {
    let house = House::saying("Hello");
    for (host, status) in [
        ("localhost:8000", 200),
        ("q4.localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.5", 200),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
    ] {
        let request = Request::post(CHAT).header("origin", format!("http://{host}")).header("host", host);
        let got = house.send(request.body(Body::from(hello())).expect("a request")).await;
        assert_eq!(got.status, status, "{host}");
        let request = Request::post(CHAT).header("origin", format!("http://{host}")).header("host", host);
        let request = request.header("x-api-key", "secret").body(Body::from(hello())).expect("a request");
        assert_eq!(locked().send(request).await.status, 200, "{host} with a key");
    }
}

#[tokio::test]
async fn a_name_that_may_point_anywhere_is_not_answered_whatever_is_asked() {
    let named = |house: &House, path: &str, host: &str| {
        let request = Request::get(path).header("host", host).body(Body::empty()).expect("a request");
        house.routes.clone().oneshot(request)
    };
    let options = Options { hosts: vec!["q4.example".into()], ..Options::default() };
    let (plain, listed) = (House::saying(""), House::with(Scripted::saying(""), options));
    let every = House::with(Scripted::saying(""), Options { hosts: vec!["*".into()], ..Options::default() });
    let keyed = locked();
    for (host, statuses) in [
        ("localhost:8080", [200, 200, 200]),
        ("LOCALHOST", [200, 200, 200]),
        ("127.0.0.1:8080", [200, 200, 200]),
        ("10.1.2.3", [200, 200, 200]),
        ("[::1]:8080", [200, 200, 200]),
        ("q4.example", [403, 200, 200]),
        ("Q4.Example:8080", [403, 200, 200]),
        ("evil.example:8080", [403, 403, 200]),
        ("q4.example.evil", [403, 403, 200]),
        ("127.0.0.1.evil.example", [403, 403, 200]),
        ("", [403, 403, 200]),
    ] {
        for path in ["/", "/v1/models", "/v1/q4/explain", "/metrics", "/health", "/ready"] {
            for (house, status) in [&plain, &listed, &every].into_iter().zip(statuses) {
                let got = named(house, path, host).await.expect("no service fails");
                assert_eq!(got.status(), status, "{host} {path}");
            }
        }
        // His page has no key, and what needs none has no secrets.
        assert_eq!(named(&keyed, "/health", host).await.expect("no service fails").status(), 200, "{host}");
    }
    let request = Request::get("http://evil.example/v1/models").body(Body::empty()).expect("a request");
    let got = plain.send(request).await;
    assert_eq!((got.status, got.json()["error"]["code"].as_str()), (403, Some("host_not_allowed")));
    assert!(got.error().1.contains("--allowed-host"), "{}", got.body);
    assert_eq!(plain.get("/v1/models").await.status, 200, "who says no name is no browser");
}

#[tokio::test]
async fn keys_are_exchanged_while_requests_are_served() {
    let keys = Keys::new(vec!["old".into()]).expect("usable");
    let options = Options { keys: keys.clone(), ..Options::default() };
    let house = House::with(Scripted::saying("Hello"), options);
    assert_eq!(with_header(&house, CHAT, "x-api-key", "old").await.status, 200);
    keys.replace(vec!["new".into()]).expect("usable");
    assert_eq!(with_header(&house, CHAT, "x-api-key", "old").await.status, 401);
    assert_eq!(with_header(&house, CHAT, "x-api-key", "new").await.status, 200);
}

#[tokio::test]
async fn a_server_that_stops_can_still_be_watched() {
    let engine = Arc::new(Scripted::saying("Hello"));
    let server = Server::new(engine.served.clone(), engine.clone(), Options::default());
    let house = House { routes: router(server.clone()), engine };
    server.phase.send_replace(Phase::Draining);
    for (path, status) in [("/health", 200), ("/metrics", 200), ("/v1/models", 200), ("/ready", 503)] {
        let got = house.get(path).await;
        assert_eq!((got.status, got.header("connection")), (status, "close"), "{path}");
    }
    let got = house.post_text(CHAT, hello()).await;
    assert_eq!((got.status, got.header("connection")), (503, "close"));
    assert_eq!(got.json()["error"]["code"], "shutting_down");
    let got = house.post_text("/v1/messages", hello()).await;
    assert_eq!((got.status, got.json()["error"]["type"].as_str()), (503, Some("overloaded_error")));
}

#[tokio::test]
async fn where_there_is_no_room_for_all_answers_none_is_given() {
    let house = House::with(Scripted::in_mood(Mood::Small), Options::default());
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "n": 2});
    assert_eq!(house.post(CHAT, &body).await.status, 429);
    // The first one notices that nobody listens.
    while house.engine.left.load(SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_answer_that_the_engine_breaks_off_is_no_answer() {
    let house = House::with(Scripted::in_mood(Mood::Ending), Options::default());
    let got = house.post_text(CHAT, hello()).await;
    assert_eq!((got.status, got.json()["error"]["code"].as_str()), (503, Some("shutting_down")));
}

#[tokio::test]
async fn an_engine_that_forgets_is_a_fault() {
    let house = House::with(Scripted::in_mood(Mood::Silent), Options::default());
    let (status, message) = house.post_text(CHAT, hello()).await.error();
    assert_eq!((status, message.as_str()), (500, "the engine has stopped"));
}

#[tokio::test]
async fn a_bug_is_an_answer() {
    let house = House::with(Scripted::in_mood(Mood::Panicking), Options::default());
    let got = house.post_text(CHAT, hello()).await;
    assert_eq!((got.status, got.json()["error"]["type"].as_str()), (500, Some("server_error")));
}

#[tokio::test]
async fn a_prompt_may_have_a_bound_of_its_own() {
    let options = Options { max_prompt: Some(5), ..Options::default() };
    let house = House::with(Scripted::saying("Hello"), options);
    let (status, message) = house.post_text(CHAT, hello()).await.error();
    assert_eq!(status, 400);
    assert!(message.contains("need: at most 5 tokens"), "{message}");
}
