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

/// Words, template and ends of answers come out of the file.
#[test]
fn the_demo_answers_alike_as_one_gguf_file() {
    let dir = tempfile::tempdir().unwrap();
    let [file, back] = ["demo.gguf", "back"].map(|name| dir.path().join(name).to_str().unwrap().to_owned());
    let answer = json("generate", &[&["demo"], &ANSWER[..]].concat());
    let report = json("convert", &["demo", &file, "--layout", "gguf"]);
    assert_eq!((&report["lossless"], &report["layout"]), (&true.into(), &"gguf".into()));
    let same = json("generate", &[&[file.as_str()], &ANSWER[..]].concat());
    assert_eq!((&same["text"], &same["token_ids"]), (&answer["text"], &answer["token_ids"]));
    assert_eq!(json("verify", &[&file])["errors"], 0);
    // It declares nothing of inputs: they are as is usual for such files, and who asks is told.
    let first = |more: &[&str]| json("explain", &[&[file.as_str()], more].concat())["layers"][0].clone();
    let (usual, named) = (first(&[]), first(&["--activations", "native"]));
    assert_eq!((&usual["activations"], &usual["usual_activations"]), (&"int8".into(), &true.into()));
    assert!(named["activations"] == "native" && named.get("usual_activations").is_none(), "{named}");
    assert!(out(&run(&["explain", &file])).contains("--activations native leaves them as they are"));
    let again = json("convert", &[&file, &back, "--layout", "modelopt"]);
    assert_eq!(again["sha256_decoded"], report["sha256_decoded"]);
    assert!(again["notes"].to_string().contains("were int8 and are now native"), "{again}");
    let same = json("generate", &[&[back.as_str()], &ANSWER[..]].concat());
    assert_eq!(same["token_ids"], answer["token_ids"]);
    // Files are told apart by their names.
    let other = dir.path().join("demo.bin");
    let refused = run(&["convert", "demo", other.to_str().unwrap(), "--layout", "gguf"]);
    assert!(refused.status.code() == Some(2) && !other.exists());
    assert!(err(&refused).contains("demo.gguf"), "{}", err(&refused));
}

#[test]
fn int4_keeps_its_hash_from_tool_to_tool() {
    let dir = tempfile::tempdir().unwrap();
    let mut source = golden_arg("qwen3_tiny_a/awq");
    let mut hashes = Vec::new();
    for layout in ["awq", "gptq", "compressed-tensors", "awq"] {
        let target = dir.path().join(format!("{}-{layout}", hashes.len())).to_str().unwrap().to_owned();
        let report = json("convert", &[&source, &target, "--layout", layout]);
        assert_eq!((&report["lossless"], &report["layout"]), (&true.into(), &layout.into()));
        hashes.push(report["sha256_decoded"].as_str().unwrap().to_owned());
        assert_eq!(json("verify", &[&target])["errors"], 0, "{layout}");
        source = target;
    }
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
    let file = |name: &str| std::fs::read(dir.path().join(name).join("model.safetensors")).unwrap();
    assert!(file("0-awq") == file("3-awq"), "there and back is the same file");
}

#[test]
fn the_summary_says_what_changed() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    let output = run(&["convert", "demo", target.to_str().unwrap(), "--layout", "compressed-tensors"]);
    assert!(output.status.success(), "{}", err(&output));
    let text = out(&output);
    let scales = text.lines().filter_map(|l| l.split_once("per-tensor scale ")?.1.split_once(" -> "));
    let product = |(a, b): (&str, &str)| a.parse::<f32>().unwrap() * b.parse::<f32>().unwrap();
    assert_eq!(scales.map(product).filter(|p| *p == 1.0).count(), 42, "{text}");
    assert!(text.contains("42 layers as compressed-tensors, 26 tensors copied"), "{text}");
    assert!(text.lines().last().unwrap().starts_with("lossless: read back, "), "{text}");
    assert_eq!(err(&output), "");
}

#[test]
fn last_bits_may_change_where_that_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    for (variant, layout) in
        [("nvfp4_modelopt", "compressed-tensors"), ("nvfp4_ct", "modelopt"), ("nvfp4_ct", "dat")]
    {
        let model = golden_arg(&format!("qwen3_tiny_b/{variant}"));
        let target = dir.path().join(format!("{variant}-{layout}"));
        let args = ["convert", &model, target.to_str().unwrap(), "--layout", layout];
        let refused = run(&args);
        if layout == "dat" {
            // Scales of inputs have no place there, whatever may change.
            assert_eq!(run(&[&args[..], &["--allow-last-bit"]].concat()).status.code(), Some(2));
            continue;
        }
        assert_eq!(refused.status.code(), Some(2));
        assert!(err(&refused).contains("fix: --allow-last-bit"), "{}", err(&refused));
        let report = json("convert", &[&args[1..], &["--allow-last-bit"]].concat());
        assert_eq!(report["lossless"], false);
        let changed = report["changed"].as_array().unwrap();
        assert!(!changed.is_empty(), "{report}");
        for c in changed {
            let number = |name: &str| c[name].as_f64().unwrap();
            assert!(number("block_scales") >= 1.0 && number("block_scales") <= number("of"), "{c}");
            assert!(number("largest_relative") > 0.0 && number("largest_relative") < 1.2e-7, "{c}");
        }
        // What is not named is the same, bit for bit, and so are all codes: there and back changes no more.
        let logits = |model: &str, name: &str| {
            let file = dir.path().join(name);
            let options = ["--ids", "1,2,3", "--activations", "native", "--out", file.to_str().unwrap()];
            json("logits", &[&[model], &options[..]].concat());
            std::fs::read(file).unwrap()
        };
        let [a, b] = [
            logits(&model, &format!("{variant}-a")),
            logits(target.to_str().unwrap(), &format!("{variant}-b")),
        ];
        let floats = |bytes: &[u8]| -> Vec<f32> {
            let file = safetensors::SafeTensors::deserialize(bytes).unwrap();
            let data = file.tensor("logits").unwrap().data().to_vec();
            data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let (a, b) = (floats(&a), floats(&b));
        let largest = a.iter().fold(0f32, |m, v| m.max(v.abs()));
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-5 * largest), "{variant}");
        let text = out(&run(&[
            "convert",
            &model,
            &format!("{}-text", target.display()),
            "--layout",
            layout,
            "--allow-last-bit",
        ]));
        assert_eq!(text.lines().filter(|l| l.contains("last bit: ")).count(), changed.len(), "{text}");
        assert!(text.lines().last().unwrap().starts_with("read back: the values of "), "{text}");
    }
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
        ("nf4_bnb", "gptq", ["need: int4", "have: nf4@1"]),
        ("gptq", "dat", ["have: int4@1", "q4 quantize"]),
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
