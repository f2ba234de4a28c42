//! `q4 bench --server`: nothing is left out of a figure.
use super::mock::{Mock, Says, delta, document, end, models, whole};
use crate::serve::Server;
use crate::{document as read, err, out, q4, run};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An answer of `tokens` to a prompt whose template takes three.
fn answer(body: &Value, tokens: usize) -> Says {
    let words = body["messages"][0]["content"].as_str().unwrap().split(' ').count();
    let mut all = vec![delta(json!({"content": "a "})); tokens.min(3)];
    all.extend(end("length", 3 + 2 * words, tokens));
    Says::Bytes(whole(&all))
}

fn asked(body: &Value) -> usize {
    body["max_tokens"].as_u64().unwrap() as usize
}

#[test]
fn a_server_of_q4_answers_as_many_tokens_as_are_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let plot = dir.path().join("users.svg");
    let server = Server::start(&["--parallel", "4"]);
    server.wait_until_ready();
    let url = format!("http://{}", server.address);
    let more = [
        "--users",
        "1,3",
        "--rate",
        "40",
        "--requests",
        "5",
        "--prompt-tokens",
        "40",
        "--answer-tokens",
        "6",
    ];
    let args = [&["--json", "bench", "--server", &url, "--plot", plot.to_str().unwrap()][..], &more].concat();
    let output = run(&args);
    assert!(output.status.success(), "{}", err(&output));
    let report = read("bench-server", &output);
    assert_eq!(report["servers"][0], json!({"url": url, "model": "demo", "ignores_eos": true}));
    let rows = report["results"].as_array().unwrap();
    assert_eq!((rows.len(), &rows[1]["users"], &rows[2]["rate"]), (3, &3.into(), &40.0.into()));
    for row in rows {
        let counts = ["requests", "ok", "failed", "short", "tokens", "cached_tokens"]
            .map(|name| row[name].as_u64().unwrap());
        assert_eq!(counts, [5, 5, 0, 0, 30, 0], "{row}");
        let prompt = row["prompt_tokens"].as_f64().unwrap();
        assert!((30.0..=50.0).contains(&prompt), "{prompt} tokens for 40");
        let first = &row["first_token_s"];
        let times = ["p50", "p90", "p99", "max"].map(|name| first[name].as_f64().unwrap());
        assert!(times[0] > 0.0 && times.is_sorted(), "{row}");
        assert_eq!(row["starvation"].as_f64().unwrap(), times[3] / times[0]);
    }
    let drawn = std::fs::read_to_string(&plot).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.contains("3 users") && drawn.contains("40/s"), "{drawn}");
    // Never over a file that is there, and that is told before anything is measured.
    let again = run(&args);
    assert_eq!(again.status.code(), Some(2));
    assert!(err(&again).contains("--plot") && std::fs::read_to_string(&plot).unwrap() == drawn);
}

#[test]
fn requests_that_fail_are_counted_and_short_answers_said() {
    let count = Arc::new(AtomicUsize::new(0));
    let mock = Mock::start(move |path, body| match asked_at(path, body, &count) {
        None => models(),
        Some((_, 1)) => answer(body, 1),
        Some((at, _)) if at % 4 == 0 => Says::Bytes(document("500 Oh", "", &json!({"error": "tired"}))),
        Some((at, _)) if at % 4 == 1 => answer(body, 5),
        Some((_, tokens)) => answer(body, tokens),
    });
    let args = [
        "bench",
        "--server",
        &mock.url,
        "--users",
        "2",
        "--requests",
        "8",
        "--no-warm-up",
        "--answer-tokens",
        "8",
    ];
    let output = run(&args);
    assert_eq!(output.status.code(), Some(3), "{}", err(&output));
    let text = out(&output);
    for part in [
        "2 failed: Q4-E0503",
        "tired",
        "2 of 6 answers have fewer than 8 tokens, 7.0 on average",
        "(129.0 counted)",
    ] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    let output = run(&[&["--json"], &args[..]].concat());
    assert_eq!(output.status.code(), Some(3));
    let report: Value = serde_json::from_str(&out(&output)).unwrap();
    let row = &report["results"][0];
    assert_eq!(
        (&row["ok"], &row["failed"], &row["short"], &row["tokens"]),
        (&6.into(), &2.into(), &2.into(), &42.into())
    );
    assert_eq!(
        (&row["failures"][0]["times"], &row["failures"][0]["error"]["code"]),
        (&2.into(), &"Q4-E0503".into())
    );
    // The same prompts in the same order, run for run.
    let prompts = |bodies: &[Value]| {
        let mut all: Vec<_> =
            bodies.iter().filter(|b| asked(b) == 8).map(|b| b["messages"].to_string()).collect();
        all.sort();
        all
    };
    let bodies = mock.bodies();
    let (first, second) = bodies.split_at(bodies.len() / 2);
    assert_eq!(prompts(first), prompts(second));
    assert_eq!(prompts(first).len(), 8);
}

/// Counts the requests that ask for an answer; none for the list of models.
fn asked_at(path: &str, body: &Value, count: &AtomicUsize) -> Option<(usize, usize)> {
    let tokens = (path != "/v1/models").then(|| asked(body))?;
    let at = if tokens > 1 { count.fetch_add(1, Ordering::SeqCst) } else { 0 };
    Some((at, tokens))
}

#[test]
fn a_server_that_knows_openais_fields_alone_is_measured_and_told() {
    let mock = Mock::start(|path, body| match body.get("ignore_eos") {
        _ if path == "/v1/models" => models(),
        Some(_) => {
            Says::Bytes(document("400 Bad Request", "", &json!({"error": {"message": "unknown field"}})))
        }
        None => answer(body, asked(body)),
    });
    let output =
        run(&["bench", "--server", &mock.url, "--users", "1", "--requests", "2", "--answer-tokens", "2"]);
    assert!(output.status.success(), "{}", err(&output));
    assert!(out(&output).contains("refuses ignore_eos"), "{}", out(&output));
    let bodies = mock.bodies();
    // Each request otherwise says that it is new to every cache.
    assert!(bodies[0]["cache_salt"].is_string() && bodies[1].get("cache_salt").is_none());
}

#[test]
fn two_servers_take_turns_on_the_same_prompts() {
    let order = Arc::new(std::sync::Mutex::new(String::new()));
    let start = |letter: char| {
        let order = order.clone();
        Mock::start(move |path, body| match path {
            "/v1/models" => models(),
            _ => {
                if asked(body) > 1 {
                    order.lock().unwrap().push(letter);
                }
                answer(body, asked(body))
            }
        })
    };
    let (a, b) = (start('a'), start('b'));
    let more = ["--compare", &b.url, "--compare-model", "other", "--rate", "200,100,50", "--requests", "2"];
    let args = [&["--json", "bench", "--server", &a.url, "--answer-tokens", "3", "--no-warm-up"][..], &more]
        .concat();
    let output = q4().args(args).env("Q4_API_KEY", "mine").output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    assert_eq!(*order.lock().unwrap(), "aabbbbaaaabb");
    // A key is for the server it was given for.
    assert!(a.keys.lock().unwrap().iter().all(|key| key.as_deref() == Some("mine")));
    assert!(b.keys.lock().unwrap().iter().all(Option::is_none));
    let report = read("bench-server", &output);
    let models: Vec<_> = report["servers"].as_array().unwrap().iter().map(|s| &s["model"]).collect();
    assert_eq!(models, ["m", "other"]);
    let (rows, ratios) = (report["results"].as_array().unwrap(), report["ratios"].as_array().unwrap());
    assert_eq!((rows.len(), ratios.len(), &ratios[1]["rate"]), (6, 3, &100.0.into()));
    let rate = |at: usize| rows[at]["tok_s"].as_f64().unwrap();
    assert_eq!(ratios[1]["tok_s"].as_f64().unwrap(), rate(2) / rate(3));
    let prompts = |mock: &Mock| {
        let bodies = mock.bodies().into_iter().filter(|body| asked(body) > 1);
        let mut all: Vec<_> = bodies.map(|b| b["messages"].to_string()).collect();
        all.sort();
        all
    };
    assert_eq!(prompts(&a), prompts(&b));
}

#[test]
fn what_measures_no_server_is_refused_beside_one() {
    let url = "http://127.0.0.1:9";
    for args in [
        &["bench", "--users", "2"][..],
        &["bench", "--rate", "2"],
        &["bench", "--plot", "x.svg"],
        &["bench", "--server", url, "--prefill", "8"],
        &["bench", "--server", url, "--kernels"],
        &["bench", "--server", url, "--shape", "qwen3-0.6b"],
        &["bench", "--server", url, "--users", "0"],
        &["bench", "--server", url, "--rate", "0"],
        &["bench", "--server", url, "--rate", "NaN"],
        &["bench", "--server", url, "--compare-model", "m"],
        &["bench", "--server", url, "--plot", "/no/such/folder/x.svg"],
        &["--device", "cpu", "bench", "--server", url],
    ] {
        assert_eq!(run(args).status.code(), Some(2), "{args:?}: {}", err(&run(args)));
    }
    // Nobody is there.
    assert_eq!(run(&["bench", "--server", url]).status.code(), Some(8));
    // Somebody who counts nothing.
    let mock = Mock::answering(whole(&[delta(json!({"content": "a"})), end("stop", 1, 1)[0].clone()]));
    let output = run(&["bench", "--server", &mock.url]);
    assert_eq!(output.status.code(), Some(8));
    assert!(err(&output).contains("usage"), "{}", err(&output));
}
