//! `--html FILE`: pages that say what the text says, alone in their file.
use crate::{document, err, golden_arg, out, run};
use std::path::Path;

fn page(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.starts_with("<!DOCTYPE html>") && text.ends_with("</html>\n"));
    for bad in ["<script", "<link", "<img", "src=", "href=", "http", "url(", "@import", "onload", "NaN"] {
        assert!(!text.contains(bad), "{bad}");
    }
    text
}

fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn each_verb_writes_a_page_beside_its_result() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let verbs: [(&[&str], &[&str]); 4] = [
        (&["verify", "demo"], &["0 errors, 0 warnings", "nvfp4@1", "Nothing was found", "down_proj"]),
        (
            &["explain", "demo"],
            &["every product has a backend", "nvfp4-kernel fused-dequant", "not-selected"],
        ),
        (
            &["trace", "--ids", "1,2,3", "--against", "reference"],
            &["Call by call", "mlp.down_proj", "tolerance"],
        ),
        (&["diagnose"], &["this machine", "What was computed", "nf4-kernel", "the bound"]),
    ];
    for (words, parts) in verbs {
        let path = at(&format!("{}.html", words[0]));
        let options = ["--html", path.to_str().unwrap()];
        let output = run(&[words, &options].concat());
        assert!(!out(&output).is_empty() && output.status.code() == Some(0), "{}", err(&output));
        has(&page(&path), parts);
        // Again, over what is there, and with a document on stdout.
        let output = run(&[&["--json"], words, &options].concat());
        document(words[0], &output);
        page(&path);
    }
}

#[test]
fn distances_from_the_original_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v.html");
    let (model, original) = (golden_arg("qwen3_tiny_a/mixed_ct"), golden_arg("qwen3_tiny_a"));
    let words = ["verify", &model, "--original", &original, "--html", path.to_str().unwrap()];
    let output = run(&words);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let told = out(&output);
    let of = |name: &str| -> f64 {
        let line =
            told.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {told}"));
        line.split_whitespace().rev().nth(1).unwrap().parse().unwrap()
    };
    // FP8 with a scale for each row, and NVFP4.
    let [q, up] = ["self_attn.q_proj", "mlp.up_proj"].map(|part| of(&format!("model.layers.0.{part}")));
    assert!((30.0..35.0).contains(&q) && (19.0..22.0).contains(&up), "{q} {up}");
    has(
        &page(&path),
        &["SQNR by layer", &format!("{q:.2} dB"), &format!("{up:.2} dB"), "fp8@1: 8", "nvfp4@1: 6"],
    );
    let seen = document("verify", &run(&[&["--json"], &words[..4]].concat()));
    let matrices = seen["matrices"].as_array().unwrap();
    assert_eq!(matrices.len(), 14);
    assert!((matrices[0]["sqnr_db"].as_f64().unwrap() - q).abs() < 0.006, "{matrices:?}");
    // A model is as far from itself as nothing is.
    let seen = document("verify", &run(&["--json", "verify", &original, "--original", &original]));
    let same = |m: &serde_json::Value| m["same"] == true && m["sqnr_db"].is_null();
    assert!(seen["matrices"].as_array().unwrap().iter().all(same), "{seen}");
    // Without an original nothing is compared, and a model of other shapes is none.
    assert!(document("verify", &run(&["--json", "verify", &model])).get("matrices").is_none());
    let output = run(&["verify", &model, "--original", "demo"]);
    assert!(output.status.code() == Some(4) && err(&output).contains("the original: "), "{}", err(&output));
}

/// Names are what somebody wrote into a file.
#[test]
fn a_hostile_name_stays_a_name() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("<script>alert(1)<");
    std::fs::create_dir(&model).unwrap();
    let source = crate::golden("qwen3_tiny_a");
    std::fs::copy(source.join("config.json"), model.join("config.json")).unwrap();
    let whole = std::fs::read(source.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let name = "</style></td><script>alert(2)</script><svg onload=\"alert(3)\">\u{202e}\u{1b}[31m";
    let data = whole.len() - 8 - length;
    header[name] = serde_json::json!({"dtype": "U8", "shape": [1], "data_offsets": [data, data + 1]});
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend(&whole[8 + length..]);
    bytes.push(0);
    std::fs::write(model.join("model.safetensors"), bytes).unwrap();
    let path = dir.path().join("v.html");
    let output = run(&["verify", model.to_str().unwrap(), "--html", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(3), "{}", err(&output));
    let text = std::fs::read_to_string(&path).unwrap();
    for bad in ["<script", "</style></td>", "<svg onload", "onload=\"", "\u{202e}", "\u{1b}"] {
        assert!(!text.contains(bad), "{bad}");
    }
    has(&text, &["unknown-tensor", "&lt;script&gt;alert(2)&lt;/script&gt;", r"\u{202e}\u{1b}[31m"]);
}

#[test]
fn a_page_that_cannot_be_written_is_an_error() {
    for words in [&["verify", "demo"][..], &["explain", "demo"]] {
        let output = run(&[words, &["--html", "/nowhere/at/all.html"]].concat());
        assert!(output.status.code() == Some(8), "{:?}", output.status);
        assert!(err(&output).contains("/nowhere/at/all.html"), "{}", err(&output));
    }
    let output = run(&["diagnose", "--matrix", "--html", "d.html"]);
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
}
