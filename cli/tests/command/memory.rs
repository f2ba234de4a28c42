//! `--memory-limit`: a run is refused with what all of it takes, before anything is loaded, or it keeps the
//! limit. `Q4_MEMORY_SHAPE=qwen3-0.6b` does the same with a published shape and twenty limits, by hand.
use crate::{document, err, json, q4, run};
use q4_model::executor::Shape;
use q4_model::synthetic;
use serde_json::Value;

const SMALL: Shape =
    Shape { hidden: 256, heads: 8, kv_heads: 4, head_dim: 32, intermediate: 1024, vocab: 50_000, layers: 4 };

/// What a limit came to.
struct Tried {
    limit: u64,
    peak: Option<u64>,
    /// Of a refusal.
    need: Option<String>,
}

fn try_limits(verb: &str, args: &[&str], limits: &[u64]) -> Vec<Tried> {
    let one = |limit: &u64| {
        let text = limit.to_string();
        let output = q4().args(["--json", "--memory-limit", &text, verb]).args(args).output().expect("runs");
        match output.status.code() {
            Some(0) => {
                let body = document(verb, &output);
                assert_eq!(body["memory"]["limit_bytes"], *limit);
                Tried { limit: *limit, peak: body["peak_bytes"].as_u64(), need: None }
            }
            Some(7) => {
                let error = document("error", &output);
                assert!(error["fix"].as_str().unwrap().contains("--memory-limit"), "{error}");
                let need = error["need"].as_str().unwrap().to_owned();
                Tried { limit: *limit, peak: None, need: Some(need) }
            }
            other => panic!("{limit}: {other:?} {}", err(&output)),
        }
    };
    limits.iter().map(one).collect()
}

/// Each is refused below the one total that the plan states, and kept from there on.
fn check(verb: &str, args: &[&str], count: u64) {
    let body = json(verb, args);
    let planned = body["memory"]["planned_bytes"].as_u64().unwrap();
    let parts = body["memory"]["parts"].as_array().unwrap();
    assert_eq!(parts.iter().map(|p| p["bytes"].as_u64().unwrap()).sum::<u64>(), planned);
    let mut limits: Vec<u64> = (1..=count).map(|i| planned * 2 * i / count).collect();
    limits.extend([1, planned - 1, planned]);
    limits.sort_unstable();
    let tried = try_limits(verb, args, &limits);
    let mut needs: Vec<_> = tried.iter().filter_map(|t| t.need.clone()).collect();
    needs.dedup();
    assert_eq!(needs.len(), 1, "one total whatever the limit: {needs:?}");
    for t in &tried {
        assert_eq!(t.limit < planned, t.need.is_some(), "{} of {planned}", t.limit);
        // Not every system says what is resident.
        if let Some(peak) = t.peak {
            println!(
                "limit {:>11}  peak {peak:>11}  {:.3} of the limit",
                t.limit,
                peak as f64 / t.limit as f64
            );
            assert!(peak <= t.limit + t.limit / 20, "{peak} bytes resident with a limit of {}", t.limit);
        }
    }
    println!("{verb}: planned {planned}, {} refused: {}", needs.len(), needs[0]);
}

#[test]
fn the_demo_keeps_its_limit_or_is_refused() {
    check("generate", &["demo", "-p", "Who are you?", "-n", "24"], 4);
}

#[test]
fn a_file_keeps_its_limit_or_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model");
    let (shape, count) = match std::env::var("Q4_MEMORY_SHAPE") {
        Ok(name) => (synthetic::shape(&name).unwrap(), 20),
        Err(_) => (SMALL, 4),
    };
    synthetic::write(&shape, &out, &mut |_| Ok(())).unwrap();
    let (model, ids) =
        (out.display().to_string(), (1..=40).map(|i| (i * 1000).to_string()).collect::<Vec<_>>());
    let logits = dir.path().join("logits").display().to_string();
    let args = [model.as_str(), "--ids", &ids.join(","), "--out", &logits];
    // An output is never overwritten.
    let once = |extra: &[&str]| {
        let _ = std::fs::remove_file(&logits);
        run(&[extra, &["--json", "logits"], &args].concat())
    };
    let body = document("logits", &once(&[]));
    let planned = body["memory"]["planned_bytes"].as_u64().unwrap();
    let mut need: Option<Value> = None;
    for i in (1..=count).chain([0]) {
        let limit = if i == 0 { planned } else { planned * 2 * i / count };
        let output = once(&["--memory-limit", &limit.to_string()]);
        if limit < planned {
            assert_eq!(output.status.code(), Some(7), "{limit}: {}", err(&output));
            let error = document("error", &output)["need"].clone();
            assert_eq!(need.get_or_insert_with(|| error.clone()), &error);
            println!("limit {limit:>11}  refused: {error}");
            continue;
        }
        assert!(output.status.success(), "{limit}: {}", err(&output));
        let Some(peak) = document("logits", &output)["peak_bytes"].as_u64() else { continue };
        println!("limit {limit:>11}  peak {peak:>11}  {:.3} of the limit", peak as f64 / limit as f64);
        assert!(peak <= limit + limit / 20, "{peak} bytes resident with a limit of {limit}");
    }
    assert!(need.is_some());
}

#[test]
fn a_context_that_fits_is_the_advice() {
    let planned = |context: &str| {
        let body = json("generate", &["demo", "-p", "hello", "-n", "2", "--context", context]);
        body["memory"]["planned_bytes"].as_u64().unwrap()
    };
    let (short, long) = (planned("1024"), planned("2048"));
    assert!(long > short);
    let limit = ((short + long) / 2).to_string();
    let args = ["--memory-limit", &limit, "generate", "demo", "-p", "hello", "-n", "2", "--context"];
    let refused = run(&[&args[..], &["2048"]].concat());
    assert_eq!(refused.status.code(), Some(7));
    let text = err(&refused);
    let advice = text.split("--context ").nth(1).and_then(|rest| rest.split(',').next()).expect("advice");
    let followed = run(&[&args[..], &[advice]].concat());
    assert!(followed.status.success(), "{advice}: {}", err(&followed));
}

#[test]
fn the_plan_is_shown_to_who_asks() {
    let text = err(&run(&["-v", "generate", "demo", "-p", "hello", "-n", "2"]));
    for word in ["program", "weights", "embedding", "cache", "activations", "planned", "resident at most"] {
        assert!(text.contains(word), "no {word} in\n{text}");
    }
    assert!(text.contains("device cpu ("), "{text}");
}
