//! What `q4 convert` writes answers as what it read; what it cannot keep exactly it refuses and leaves
//! nothing.
use crate::{document, err, golden, golden_arg, json, out, run};
use std::path::Path;

/// Greedy, on inputs as they are: `.dat` files declare others.
const ANSWER: [&str; 8] = ["-p", "Who are you?", "-n", "12", "--temperature", "0", "--activations", "native"];

#[test]
fn the_demo_answers_alike_in_every_layout_of_its_format() {
    let dir = tempfile::tempdir().unwrap();
    let answer = json("generate", &[&["demo"], &ANSWER[..]].concat());
    let mut hashes = Vec::new();
    let mut source = "demo".to_owned();
    for (name, layout) in [
        ("a", "modelopt"),
        ("b", "compressed-tensors"),
        ("c.dat", "dat"),
        ("d", "compressed-tensors"),
        ("e", "modelopt"),
    ] {
        let target = dir.path().join(name).to_str().unwrap().to_owned();
        let beside = dir.path().join("a").to_str().unwrap().to_owned();
        let needed = |file: &str| match file.ends_with(".dat") {
            true => vec!["--config".to_owned(), beside.clone(), "--tokenizer".to_owned(), beside.clone()],
            false => Vec::new(),
        };
        let options = needed(&source);
        let mut args = vec![source.as_str(), &target, "--layout", layout];
        args.extend(options.iter().map(String::as_str));
        let report = json("convert", &args);
        assert_eq!((&report["lossless"], &report["layout"]), (&true.into(), &layout.into()));
        assert_eq!(report["tensors"].as_array().unwrap().len(), 42);
        hashes.push(report["sha256_decoded"].as_str().unwrap().to_owned());
        let options = needed(&target);
        let mut args = vec![target.as_str()];
        args.extend(options.iter().map(String::as_str));
        let same = json("generate", &[&args[..], &ANSWER[..]].concat());
        assert_eq!((&same["text"], &same["token_ids"]), (&answer["text"], &answer["token_ids"]), "{layout}");
        let verified = json(
            "verify",
            &[&args[..1], &options.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat(),
        );
        assert_eq!(verified["errors"], 0, "{verified}");
        source = target;
    }
    assert!(hashes[0].len() == 64 && hashes.iter().all(|h| *h == hashes[0]), "{hashes:?}");
    let file = |name: &str| std::fs::read(dir.path().join(name).join("model.safetensors")).unwrap();
    assert!(file("a") == file("e") && file("b") == file("d"), "there and back is the same file");
}

#[test]
fn the_summary_says_what_changed() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    let output = run(&["convert", "demo", target.to_str().unwrap(), "--layout", "compressed-tensors"]);
    assert!(output.status.success(), "{}", err(&output));
    let text = out(&output);
    assert_eq!(
        text.lines()
            .filter(|l| l.contains("per-tensor scale 0.000061035156 -> 16384")
                || l.contains("0.00012207031 -> 8192"))
            .count(),
        42
    );
    assert!(text.contains("42 layers as compressed-tensors, 26 tensors copied"), "{text}");
    assert!(text.lines().last().unwrap().starts_with("lossless: read back, "), "{text}");
    assert_eq!(err(&output), "");
}

#[test]
fn what_would_change_a_value_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    let target = target.to_str().unwrap();
    for (variant, layout, parts) in [
        ("nvfp4_modelopt", "compressed-tensors", ["weight_scale_2`", "another last bit"]),
        ("nvfp4_ct", "modelopt", ["weight_global_scale`", "another last bit"]),
        ("nf4_bnb_dq", "dat", ["weight.absmax`", "double quantisation"]),
        ("nf4_bnb", "modelopt", ["have: nf4@1", "q4 quantize"]),
        ("", "modelopt", ["no 4-bit layer", "q4 quantize"]),
    ] {
        let source = golden_arg(&format!("qwen3_tiny_a/{variant}"));
        let refused = run(&["--json", "convert", &source, target, "--layout", layout]);
        assert_eq!(refused.status.code(), Some(2), "{variant}: {}", err(&refused));
        let report = document("error", &refused);
        assert!(report["need"].is_string() && report["have"].is_string(), "{report}");
        assert!(parts.iter().all(|part| err(&refused).contains(part)), "{}", err(&refused));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{variant}");
    }
    let source = golden_arg("qwen3_tiny_a/nf4_bnb");
    assert_eq!(run(&["convert", &source, target]).status.code(), Some(2), "--layout has no default");
}

#[test]
fn damaged_input_and_taken_output_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("in"), dir.path().join("out"));
    std::fs::create_dir(&source).unwrap();
    let from = golden("qwen3_tiny_a/nf4_bnb");
    std::fs::copy(from.join("config.json"), source.join("config.json")).unwrap();
    let whole = std::fs::read(from.join("model.safetensors")).unwrap();
    let convert =
        |from: &Path| run(&["convert", from.to_str().unwrap(), target.to_str().unwrap(), "--layout", "dat"]);
    for length in [4, whole.len() / 2, whole.len() - 1] {
        std::fs::write(source.join("model.safetensors"), &whole[..length]).unwrap();
        let refused = convert(&source);
        assert_eq!(refused.status.code(), Some(4), "{length}: {}", err(&refused));
        assert!(!target.exists());
    }
    std::fs::write(&target, "precious").unwrap();
    let refused = convert(&from);
    assert_eq!(refused.status.code(), Some(2), "{}", err(&refused));
    assert!(err(&refused).contains("exists"));
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}
