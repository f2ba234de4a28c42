//! `eval` and `compare`: how well a text is predicted, against the logits that the program writes, and what
//! is refused.
use crate::{document, err, golden, golden_arg, json, out, q4, run};
use safetensors::SafeTensors;
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;
use tempfile::TempDir;

/// What the demo model says of itself; it predicts this better than anything else.
const TEXT: &str = "I am the q4 demo model, made of four-bit numbers.";

/// A folder with one text.
fn data(text: impl AsRef<[u8]>) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text.txt");
    std::fs::write(&file, text).unwrap();
    let name = file.to_str().unwrap().to_owned();
    (dir, name)
}

fn number(report: &Value, field: &str) -> f64 {
    report[field].as_f64().unwrap_or_else(|| panic!("{field} of {report}"))
}

#[test]
fn the_loss_is_that_of_the_logits() {
    let (dir, file) = data(TEXT);
    let report = json("eval", &["--data", &file, "--kv-cache", "float32"]);
    let demo = include_bytes!("../../demo/tokenizer.json");
    let ids = q4_model::tokenizer::Tokenizer::from_bytes(demo).unwrap().encode(TEXT, false).unwrap();
    let want = loss(&dir.path().join("logits"), &ids);
    assert!((number(&report, "loss") - want).abs() < 1e-5, "{report}, logits say {want}");
    assert!((number(&report, "ppl") - want.exp()).abs() < 1e-4, "{report}");
    assert_eq!(report["tokens"], ids.len() - 1);
    assert_eq!(report["executed"][0]["calls"], 24, "one step through 6 layers of 4 products");
    assert_eq!(report["downgraded"], 0);

    // Two windows, each from an empty cache; a third has one token, which nothing predicts.
    let half = (ids.len() - 1) / 2;
    let (window, most) = (half.to_string(), (2 * half + 1).to_string());
    let args = ["--data", &file, "--kv-cache", "float32", "--window", &window, "--tokens", &most];
    let cut = json("eval", &args);
    let want = [0, half]
        .map(|at| loss(&dir.path().join(format!("logits-{at}")), &ids[at..at + half]))
        .iter()
        .sum::<f64>()
        / 2.0;
    assert!((number(&cut, "loss") - want).abs() < 1e-5, "{cut}, logits say {want}");
    assert_eq!(cut["tokens"], 2 * (half - 1));
    assert!(number(&cut, "loss") > number(&report, "loss"), "less of the text is known");
}

/// Mean loss of `ids` by what `q4 logits` writes.
fn loss(path: &std::path::Path, ids: &[u32]) -> f64 {
    losses(path, ids).iter().sum::<f64>() / (ids.len() - 1) as f64
}

/// Of every token but the first.
fn losses(path: &std::path::Path, ids: &[u32]) -> Vec<f64> {
    let list: Vec<_> = ids.iter().map(u32::to_string).collect();
    json("logits", &["demo", "--ids", &list.join(","), "--out", path.to_str().unwrap()]);
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor("logits").unwrap();
    let vocab = tensor.shape()[1];
    let logits: Vec<f64> =
        tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect();
    let rows = logits.chunks_exact(vocab).zip(&ids[1..]);
    rows.map(|(row, id)| row.iter().map(|l| l.exp()).sum::<f64>().ln() - row[*id as usize]).collect()
}

#[test]
fn rows_are_judged_by_what_training_learns_of_them() {
    let rows = [("Who are you?", TEXT), ("Hi", "Good day to you.")];
    let lines: Vec<_> =
        rows.map(|(a, b)| serde_json::json!({ "prompt": a, "completion": b }).to_string()).into();
    let (dir, text) = data(lines.join("\n"));
    let file = text.replace("text.txt", "rows.jsonl");
    std::fs::rename(&text, &file).unwrap();
    let demo = include_bytes!("../../demo/tokenizer.json");
    let tokenizer = q4_model::tokenizer::Tokenizer::from_bytes(demo).unwrap();
    let (mut learnt, mut all) = (Vec::new(), Vec::new());
    for (i, (asked, said)) in rows.iter().enumerate() {
        let prompt = format!("<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n");
        let mut ids = tokenizer.encode(&prompt, false).unwrap();
        let begin = ids.len();
        ids.extend(tokenizer.encode(&format!("{said}<|im_end|>"), false).unwrap());
        let end = ids.len();
        ids.extend(tokenizer.encode("\n", false).unwrap());
        let of = losses(&dir.path().join(format!("logits-{i}")), &ids);
        learnt.extend_from_slice(&of[begin - 1..end - 1]);
        all.extend(of);
    }
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
    for (more, want) in [(&[][..], &learnt), (&["--supervise", "all"], &all)] {
        let line = [&["--rows", file.as_str(), "--kv-cache", "float32"], more].concat();
        let report = json("eval", &line);
        assert!((number(&report, "loss") - mean(want)).abs() < 1e-5, "{report}, logits say {}", mean(want));
        assert_eq!((&report["tokens"], &report["rows"]["rows"]), (&want.len().into(), &2.into()), "{report}");
    }
    // What does not fit is cut and counted, and said to people too.
    let cut = json("eval", &["--rows", &file, "--window", "20"]);
    assert!(cut["rows"]["cut"] == 1 && number(&cut["rows"], "cut_tokens") > 0.0, "{cut}");
    assert!(out(&run(&["eval", "demo", "--rows", &file, "--window", "20"])).contains("1 rows cut by"));
    // Twice the same file is every row twice.
    let twice = json("eval", &["--rows", &file, "--rows", &file]);
    assert_eq!(twice["tokens"], 2 * learnt.len());
}

#[test]
fn rows_that_cannot_be_read_are_named_with_their_line() {
    let (_dir, file) = data("{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": \"a\"}\n");
    let jsonl = file.replace("text.txt", "rows.jsonl");
    std::fs::rename(&file, &jsonl).unwrap();
    let failed = run(&["eval", "demo", "--rows", &jsonl]);
    assert_eq!(failed.status.code(), Some(4), "{}", err(&failed));
    assert!(err(&failed).contains("rows.jsonl") && err(&failed).contains("line 2"), "{}", err(&failed));
    for wrong in [
        &["--rows", &jsonl, "--data", &jsonl][..],
        &["--rows", &jsonl, "--tokens", "9"],
        &["--data", &jsonl, "--supervise", "all"],
        &[],
    ] {
        let failed = run(&[&["eval", "demo"], wrong].concat());
        assert_eq!(failed.status.code(), Some(2), "{wrong:?}: {}", err(&failed));
    }
}

#[test]
fn a_text_of_many_steps_is_read_from_standard_input_as_from_a_file() {
    let text = "Once upon a time there was a number. ".repeat(30);
    let (_dir, file) = data(&text);
    let plain = json("eval", &["--data", &file, "--window", "200"]);
    assert!(number(&plain, "tokens") > 200.0, "{plain}");
    let mut child = q4()
        .args(["eval", "demo", "--json", "--data", "-", "--window", "200"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let piped = document("eval", &child.wait_with_output().unwrap());
    assert_eq!((&piped["loss"], &piped["tokens"]), (&plain["loss"], &plain["tokens"]));
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    let (_dir, file) = data(TEXT);
    let report = json("compare", &["demo", "demo", "--data", &file, "--max-kl-mean", "0", "--min-top1", "1"]);
    assert!(number(&report, "kl_max") < 1e-9 && number(&report, "kl_mean") < 1e-9, "{report}");
    assert_eq!(number(&report, "top1_agreement"), 1.0);
    assert_eq!(report["ppl_a"], report["ppl_b"]);
    let alone = json("eval", &["--data", &file]);
    assert_eq!((&report["ppl_a"], &report["tokens"]), (&alone["ppl"], &alone["tokens"]));
    for side in ["a", "b"] {
        assert_eq!(report[side]["model"], "demo");
        assert_eq!(report[side]["executed"], alone["executed"], "each counts its own products");
    }
    let text = out(&run(&["compare", "demo", "demo", "--data", &file]));
    assert!(text.starts_with("KL mean          0.000000\n") && text.lines().count() == 9, "{text}");
}

/// A tokenizer of the words `w0`, `w1`, ... for recorded models, which have none, and a text of them.
fn words(dir: &TempDir, vocab: usize) -> PathBuf {
    let entries = (0..vocab).map(|i| (format!("w{i}"), i.into()));
    let file = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": serde_json::Map::from_iter(entries), "unk_token": "w0" }
    });
    let path = dir.path().join(format!("words-{vocab}.json"));
    std::fs::write(&path, file.to_string()).unwrap();
    path
}

#[test]
fn quantising_costs_something_and_bounds_make_it_a_finding() {
    let text: Vec<_> = (0..100).map(|i| format!("w{}", i * 37 % 150)).collect();
    let (dir, file) = data(text.join(" "));
    let tokenizer = words(&dir, 150);
    let dense = golden_arg("qwen3_tiny_b");
    let packed = dir.path().join("packed");
    json("quantize", &[&dense, packed.to_str().unwrap(), "--format", "nf4"]);
    let compare = |b: &str, more: &[&str]| {
        let args =
            ["compare", &dense, b, "--data", &file, "--tokenizer", tokenizer.to_str().unwrap(), "--json"];
        let output = run(&[&args[..], more].concat());
        let report = matches!(output.status.code(), Some(0 | 3)).then(|| document("compare", &output));
        (output.status.code(), report.unwrap_or_else(|| panic!("{}", err(&output))))
    };
    let (status, stored) = compare(packed.to_str().unwrap(), &[]);
    assert_eq!((status, &stored["findings"]), (Some(0), &serde_json::json!([])));
    let kl = number(&stored, "kl_mean");
    assert!(
        kl > 1e-6 && number(&stored, "kl_p99") > kl && number(&stored, "kl_max") >= number(&stored, "kl_p99")
    );
    assert_ne!(stored["ppl_a"], stored["ppl_b"]);
    assert_eq!(stored["tokens"], 99);
    assert_eq!(stored["b"]["executed"][0]["backend"], "nf4-kernel");
    assert_eq!(compare(&dense, &["--quantize", "nf4"]).1["kl_mean"], stored["kl_mean"], "the same, on load");

    let (below, above) = ((kl / 2.0).to_string(), (kl * 2.0).to_string());
    let (status, report) = compare(packed.to_str().unwrap(), &["--max-kl-mean", &below]);
    assert_eq!(status, Some(3));
    let finding = &report["findings"][0];
    assert_eq!((&finding["what"], number(finding, "have")), (&"kl_mean".into(), kl));
    assert_eq!(compare(packed.to_str().unwrap(), &["--max-kl-mean", &above]).0, Some(0));

    let top1 = number(&stored, "top1_agreement");
    assert!(top1 < 1.0, "{stored}");
    let (status, report) = compare(packed.to_str().unwrap(), &["--min-top1", "1"]);
    assert_eq!((status, &report["findings"][0]["what"]), (Some(3), &"top1_agreement".into()));
    assert_eq!(compare(packed.to_str().unwrap(), &["--min-top1", &top1.to_string()]).0, Some(0));
}

#[test]
fn models_that_cannot_be_compared_are_refused() {
    let (dir, file) = data("w1 w2 w3");
    let (a, b) = (golden_arg("qwen3_tiny_a"), golden_arg("qwen3_tiny_b"));
    let tokenizer = words(&dir, 150);
    let tokenizer = tokenizer.to_str().unwrap();
    let refused = run(&["compare", &a, &b, "--data", &file, "--tokenizer", tokenizer]);
    assert_eq!(refused.status.code(), Some(2));
    for part in ["Q4-E0101", "need: 256 tokens", "have: 192 tokens"] {
        assert!(err(&refused).contains(part), "{part} in {}", err(&refused));
    }
    // The same sizes, another reading of the text.
    let [mine, other] = ["mine", "other"].map(|name| dir.path().join(name));
    for (model, words) in [(&mine, "w1"), (&other, "w7")] {
        std::fs::create_dir(model).unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(golden("qwen3_tiny_a").join(name), model.join(name)).unwrap();
        }
        let text = std::fs::read_to_string(tokenizer).unwrap();
        let text = text.replace("\"w1\":", "\"x\":").replace(&format!("\"{words}\":"), "\"w1\":");
        std::fs::write(model.join("tokenizer.json"), text.replace("\"x\":", "\"w1\":")).unwrap();
    }
    let refused = run(&["compare", mine.to_str().unwrap(), other.to_str().unwrap(), "--data", &file]);
    assert_eq!(refused.status.code(), Some(2), "{}", err(&refused));
    assert!(
        err(&refused).contains("id 1 as token 0") && err(&refused).contains("have: id 7"),
        "{}",
        err(&refused)
    );
    let tokenizer = words(&dir, 300);
    let (_more, file) = data("w1 w299");
    let refused = run(&["eval", &a, "--data", &file, "--tokenizer", tokenizer.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(4));
    assert!(err(&refused).contains("ids below 256") && err(&refused).contains("id 299"), "{}", err(&refused));
}

#[test]
fn data_that_predicts_nothing_is_refused() {
    for (text, status) in [(&b""[..], 4), (b"I", 4), (b"I am\xff", 4), (b"I am", 0)] {
        let (_dir, file) = data(text);
        for args in [&["eval", "demo"][..], &["compare", "demo", "demo"]] {
            let output = run(&[args, &["--data", &file]].concat());
            assert_eq!(output.status.code(), Some(status), "{args:?} {text:?}: {}", err(&output));
        }
    }
    let status = |args: &[&str]| run(args).status.code();
    assert_eq!(status(&["eval", "--data", absent!("/text")]), Some(8));
    assert_eq!(status(&["eval"]), Some(2), "--data is needed");
    let (_dir, file) = data(TEXT);
    assert_eq!(status(&["eval", "--data", &file, "--window", "1"]), Some(2));
    assert_eq!(status(&["eval", "--data", &file, "--window", "999999"]), Some(2));
    assert_eq!(status(&["compare", "demo", "demo", "--data", &file, "--max-kl-mean", "NaN"]), Some(2));
    assert_eq!(status(&["compare", "demo", "demo", "--data", &file, "--min-top1", "1.5"]), Some(2));
}

#[test]
fn two_models_share_one_memory_limit() {
    let (_dir, file) = data(TEXT);
    let limited = |limit: u64, args: &[&str]| {
        let limit = limit.to_string();
        run(&[&["--memory-limit", &limit], args, &["--data", &file]].concat()).status.code()
    };
    let fits = |args: &[&str]| {
        let (mut low, mut high) = (0u64, 1 << 30);
        while high - low > 1 << 16 {
            let middle = (low + high) / 2;
            match limited(middle, args) {
                Some(0) => high = middle,
                status => {
                    assert_eq!(status, Some(7));
                    low = middle;
                }
            }
        }
        high
    };
    let (one, two) = (fits(&["eval", "demo"]), fits(&["compare", "demo", "demo"]));
    let plan = json("eval", &["demo", "--data", &file])["memory"]["parts"].clone();
    let is_once = |part: &&serde_json::Value| matches!(part["name"].as_str(), Some("program" | "loading"));
    let once: u64 =
        plan.as_array().unwrap().iter().filter(is_once).map(|p| p["bytes"].as_u64().unwrap()).sum();
    assert!(two.abs_diff(2 * one - once) < 1 << 18, "{one} bytes for one, {two} for two, {once} of both");
}

#[test]
fn two_backends_are_compared() {
    let (_dir, file) = data(TEXT);
    let report = json("compare", &["demo", "--against", "reference", "--data", &file]);
    let ran = |side: &str| report[side]["executed"][0]["backend"].as_str().unwrap().to_owned();
    assert_eq!((ran("a"), ran("b")), ("reference".to_owned(), "nvfp4-kernel".to_owned()));
    assert_eq!((&report["a"]["backend"], &report["b"]["backend"]), (&"reference".into(), &Value::Null));
    let kl = number(&report, "kl_max");
    assert!(kl > 0.0 && kl < 1e-2, "{report}");
    for words in [
        &["compare", "demo", "--data", &file][..],
        &["compare", "demo", "--against-device", "cpu", "--data", &file],
    ] {
        assert_eq!(run(words).status.code(), Some(2), "{words:?}");
    }
    let nobody = run(&["compare", "demo", "--against", "nobody", "--data", &file]);
    assert_eq!(nobody.status.code(), Some(6), "{}", err(&nobody));
}

#[test]
fn each_model_has_its_configuration() {
    let (dir, file) = data(TEXT);
    let weights = dir.path().join("demo.dat").to_str().unwrap().to_owned();
    assert!(run(&["convert", "demo", &weights, "--layout", "dat"]).status.success());
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/demo");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(format!("{demo}/config.json")).unwrap()).unwrap();
    config["rms_norm_eps"] = 0.1.into();
    let other = dir.path().join("config.json").to_str().unwrap().to_owned();
    std::fs::write(&other, config.to_string()).unwrap();
    let compare = |more: &[&str]| {
        let both = [&weights, &weights, "--config", demo, "--tokenizer", demo, "--data", &file];
        number(&json("compare", &[&both[..], more].concat()), "kl_mean")
    };
    assert_eq!(compare(&[]), 0.0);
    assert!(compare(&["--config-b", &other]) > 0.0);
    assert_eq!(compare(&["--config-b", demo, "--tokenizer-b", demo]), 0.0);
}
