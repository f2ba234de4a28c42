//! `--trace-out`: the file, its spans and how they lie in each other, whatever becomes of the run.
use crate::{err, q4, run};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// A span: the path of names to it, and its fields at either end.
type Span = (String, Map<String, Value>);

/// The spans of a timeline, in the order of their ends, and those that have none.
fn spans(path: &Path) -> (Vec<Span>, Vec<String>) {
    let text = std::fs::read_to_string(path).expect("a timeline");
    assert!(text.starts_with("{\"schema\":\"q4.timeline/1\","), "{text}");
    let file: Value = serde_json::from_str(&text).expect("one JSON document");
    let mut open: BTreeMap<u64, Vec<Span>> = BTreeMap::new();
    let (mut closed, mut last) = (Vec::new(), BTreeMap::new());
    for event in file["traceEvents"].as_array().expect("a list") {
        let (phase, name) = (event["ph"].as_str().unwrap(), event["name"].as_str().unwrap());
        let thread = event["tid"].as_u64().unwrap();
        if phase == "M" {
            continue;
        }
        let time = event["ts"].as_f64().unwrap();
        assert!(last.insert(thread, time).is_none_or(|before| before <= time), "time goes on");
        let fields = event["args"].as_object().cloned().unwrap_or_default();
        let stack = open.entry(thread).or_default();
        match phase {
            "B" => {
                let above = stack.last().map_or(String::new(), |(path, _)| format!("{path}/"));
                stack.push((format!("{above}{name}"), fields));
            }
            "E" => {
                let (path, mut all) = stack.pop().expect("a span that began");
                assert_eq!(path.rsplit('/').next(), Some(name), "the innermost ends first");
                all.extend(fields);
                closed.push((path, all));
            }
            _ => assert_eq!(phase, "i"),
        }
    }
    (closed, open.into_values().flatten().map(|(path, _)| path).collect())
}

fn count(spans: &[Span], path: &str) -> usize {
    spans.iter().filter(|(p, _)| p == path).count()
}

fn first<'a>(spans: &'a [Span], path: &str) -> &'a Map<String, Value> {
    let names: Vec<_> = spans.iter().map(|(p, _)| p).collect();
    &spans.iter().find(|(p, _)| p == path).unwrap_or_else(|| panic!("{path} is none of {names:?}")).1
}

#[test]
fn a_run_has_its_phases_with_their_fields() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let file = path.to_str().unwrap();
    let plain = run(&["generate", "-p", "Who are you?"]);
    let output = run(&["generate", "-p", "Who are you?", "--trace-out", file]);
    assert!(output.status.success(), "{}", err(&output));
    assert_eq!((&output.stdout, &output.stderr), (&plain.stdout, &plain.stderr), "nothing else changes");
    let (all, open) = spans(&path);
    assert_eq!(open, [""; 0]);
    assert_eq!(first(&all, "q4")["verb"], "generate");
    let plan = first(&all, "q4/plan");
    assert_eq!((plan["layers"].as_u64(), plan["products"].as_u64()), (Some(6), Some(24)));
    assert!(plan["model"].is_string());
    let load = first(&all, "q4/load");
    assert_eq!((&load["device"], load["model"] == plan["model"]), (&"cpu".into(), true));
    assert_eq!(count(&all, "q4/load/prepare"), 24);
    let prepared = all.iter().filter(|(p, _)| p == "q4/load/prepare");
    let bytes: u64 = prepared.map(|(_, f)| f["bytes"].as_u64().unwrap()).sum();
    assert!(load["bytes"].as_u64().unwrap() >= bytes && bytes > 1 << 20, "{load:?}");
    let prepare = first(&all, "q4/load/prepare");
    assert_eq!((&prepare["backend"], &prepare["path"]), (&"nvfp4-kernel".into(), &"fused-dequant".into()));
    assert!(prepare["layer"].as_str().unwrap().contains("layers.0."), "{prepare:?}");
    assert_eq!(prepare["activations"], "native");
    let prefill = first(&all, "q4/prefill");
    assert!(prefill["tokens"].as_u64().unwrap() > 3 && prefill["position"] == 0, "{prefill:?}");
    let tokens = count(&all, "q4/decode");
    // The one that ends the answer is drawn and not decoded.
    assert!(tokens > 5 && count(&all, "q4/sample") == tokens + 1, "{tokens}");
    // The log lines of -v are no spans, and an earlier timeline is replaced.
    let loud = run(&["-v", "generate", "-p", "Who are you?", "-n", "2", "--trace-out", file]);
    let shown = err(&loud).lines().map(str::to_owned).collect::<Vec<_>>();
    assert!(shown.iter().any(|l| l.starts_with("prompt ")), "{shown:?}");
    assert!(!shown.iter().any(|l| l.contains("prefill{") || l.contains("q4{")), "{shown:?}");
    assert_eq!(count(&spans(&path).0, "q4/decode"), 2);
}

#[test]
fn every_case_of_the_suite_is_one_span_whoever_runs_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    for (place, under) in [(None, "case"), (Some("--in-process"), "q4/case")] {
        let mut command = q4();
        command.args([
            "conformance",
            "--backend",
            "nf4-kernel",
            "--level",
            "L1",
            "--sample",
            "2",
            "--no-certificate",
        ]);
        let output = command.args(place).arg("--trace-out").arg(&path).output().unwrap();
        assert!(output.status.success(), "{}", err(&output));
        let text = crate::out(&output);
        let (all, open) = spans(&path);
        assert_eq!(open, [""; 0]);
        let cases = count(&all, under);
        assert!(cases > 2 && text.contains(&format!("{cases} passed")), "{cases} in {text}");
        let fields = first(&all, under);
        assert_eq!((&fields["backend"], &fields["outcome"]), (&"nf4-kernel".into(), &"pass".into()));
        assert!(fields["id"].as_str().unwrap().starts_with("L1/") && fields["level"] == "L1", "{fields:?}");
    }
}

#[test]
fn a_run_that_fails_leaves_what_it_did() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let failed = q4()
        .args(["generate", "-p", "x", "--memory-limit", "1MiB", "--trace-out"])
        .arg(&path)
        .output()
        .unwrap();
    assert_eq!(failed.status.code(), Some(7), "{}", err(&failed));
    let (all, open) = spans(&path);
    assert_eq!((count(&all, "q4"), count(&all, "q4/plan"), open.len()), (1, 1, 0));
    // What is no timeline is not replaced, and nothing runs.
    std::fs::write(&path, "mine").unwrap();
    let refused = q4().args(["generate", "-p", "x", "--trace-out"]).arg(&path).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", err(&refused));
    assert!(err(&refused).contains("exists") && refused.stdout.is_empty(), "{}", err(&refused));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_leaves_a_whole_document() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let mut command = q4();
    command.args(["generate", "-p", "x", "--ignore-eos", "-n", "4000", "--trace-out"]).arg(&path);
    let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    let has_begun = || std::fs::read_to_string(&path).is_ok_and(|t| t.contains("\"decode\""));
    let begun = std::time::Instant::now();
    while !has_begun() && begun.elapsed().as_secs() < 60 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let (all, open) = spans(&path);
    // The signal may come in the first step of all.
    let is_open = |name: &str| open.iter().any(|o| o == name);
    assert!((count(&all, "q4/decode") > 0 || is_open("q4/decode")) && is_open("q4"), "{open:?}");
}
