//! What is printed where: help, plans, documents, colours.
use crate::{err, golden_arg, json, out, q4, run};
use insta::assert_snapshot;

#[test]
fn help_lists_every_verb_and_option() {
    let help = run(&["--help"]);
    assert!(help.status.success());
    assert_snapshot!("help", out(&help));
    for verb in [
        "generate", "chat", "explain", "inspect", "verify", "quantize", "convert", "eval", "compare",
        "logits", "tokenize", "bench", "diagnose",
    ] {
        let text = out(&run(&[verb, "--help"]));
        assert!(text.contains("--backend") && text.contains("--json"), "{verb}");
    }
    assert!(out(&run(&["--version"])).starts_with("q4 "));
}

#[test]
fn a_plan_groups_equal_layers() {
    let model = golden_arg("qwen3_tiny_a/nvfp4_modelopt");
    let plan = run(&["explain", &model, "--activations", "native"]);
    assert!(plan.status.success(), "{}", err(&plan));
    let report = json("explain", &[&model, "--activations", "native"]);
    let isa = format!("instruction set {}", report["isa"].as_str().unwrap());
    let plan = out(&plan).replace(&model, "MODEL").replace(&isa, "instruction set ISA");
    assert_snapshot!("explain", plan);
    let report = json("explain", &[&model, "--backend", "*.mlp.*=dequant-matmul", "--activations", "native"]);
    for layer in report["layers"].as_array().unwrap() {
        let mlp = layer["name"].as_str().unwrap().contains(".mlp.");
        let backend = if mlp { "dequant-matmul" } else { "nvfp4-kernel" };
        assert_eq!(layer["chosen"]["backend"], backend, "{layer}");
        assert!(
            layer["rejected"]
                .as_array()
                .unwrap()
                .iter()
                .all(|r| !r["reasons"].as_array().unwrap().is_empty())
        );
    }
}

#[test]
fn global_options_work_on_both_sides_of_the_verb() {
    let tiny = golden_arg("qwen3_tiny_a/nf4_bnb");
    let before = run(&["--backend", "reference", "--json", "explain", &tiny]);
    let after = run(&["explain", &tiny, "--json", "--backend", "reference"]);
    assert!(before.status.success(), "{}", err(&before));
    assert_eq!(out(&before), out(&after));
    let split = json("explain", &[&tiny, "--backend", "*.mlp.*=dequant-matmul"]);
    let both = run(&[
        "--json",
        "--backend",
        "*.self_attn.*=reference",
        "explain",
        &tiny,
        "--backend",
        "*.mlp.*=dequant-matmul",
    ]);
    let both: serde_json::Value = serde_json::from_str(&out(&both)).unwrap();
    assert_eq!(split["layers"][0]["chosen"]["backend"], "nf4-kernel");
    assert_eq!(both["layers"][0]["chosen"]["backend"], "reference");
    assert_eq!(both["layers"][2]["chosen"]["backend"], "dequant-matmul");
}

#[test]
fn inspect_says_what_is_in_a_file() {
    for (path, layout, matrices) in [
        ("qwen3_tiny_a", "dense", 0),
        ("qwen3_tiny_a/nvfp4_ct", "compressed-tensors", 14),
        ("qwen3_tiny_a/nvfp4_modelopt", "modelopt", 14),
        ("qwen3_tiny_b/nvfp4_torchao_gs", "torchao", 14),
        ("qwen3_tiny_b/nf4_bnb_dq", "bitsandbytes", 14),
    ] {
        let report = json("inspect", &[&golden_arg(path)]);
        assert_eq!((&report["layout"], &report["format"]), (&layout.into(), &"safetensors".into()), "{path}");
        assert_eq!(report["contradictions"], serde_json::json!([]));
        let kinds = report["kinds"].as_array().unwrap();
        if let Some(kind) = kinds.iter().find(|k| k["layout"] == layout && layout != "dense") {
            assert_eq!(kind["matrices"], matrices, "{path}");
            // 4.5 and 4.13; scales of 128x4 tiles are padded.
            let bits = kind["bits_per_weight"].as_f64().unwrap();
            assert!((4.1..5.0).contains(&bits), "{path}: {bits}");
        }
        let weights = report["weights"].as_u64().unwrap();
        let dense = json("inspect", &[&golden_arg(&path[..12])]);
        assert_eq!(weights, dense["weights"].as_u64().unwrap(), "{path}: the same model");
    }
    let demo = json("inspect", &[]);
    let bytes: u64 = demo["tensors"].as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert_eq!(demo["bytes"].as_u64(), Some(bytes));
}

#[test]
fn the_demo_has_no_findings() {
    let report = json("verify", &[]);
    assert_eq!(report["findings"], serde_json::json!([]));
}

#[test]
fn inputs_that_are_not_what_was_declared_are_announced_once_and_under_q_too() {
    let dir = tempfile::tempdir().unwrap();
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
    for file in std::fs::read_dir(&demo).unwrap().map(|e| e.unwrap().path()) {
        let bytes = std::fs::read(&file).unwrap();
        let name = file.file_name().unwrap();
        let bytes = match name.to_str().unwrap() {
            // The weights have no scales of inputs, for they were exported for float ones.
            "config.json" | "hf_quant_config.json" => {
                String::from_utf8(bytes).unwrap().replace("W4A16_NVFP4", "NVFP4").into_bytes()
            }
            _ => bytes,
        };
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    let declared = dir.path().to_str().unwrap();
    let told = |args: &[&str]| {
        let output = run(args);
        assert!(output.status.success(), "{args:?}: {}", err(&output));
        err(&output).matches("no input_scale, and config.json declares NVFP4 inputs").count()
    };
    let answer = ["-p", "Who are you?", "--max-tokens", "1"];
    for verb in ["generate", "-q generate"] {
        let verb: Vec<_> = verb.split(' ').collect();
        let generate = |model: &str, more: &[&str]| told(&[&verb, &[model][..], &answer, more].concat());
        assert_eq!(generate(declared, &[]), 1, "{verb:?}");
        assert_eq!(generate(declared, &["--activations", "native"]), 0, "{verb:?}: as asked for");
        assert_eq!(generate(demo.to_str().unwrap(), &[]), 0, "{verb:?}: as declared");
    }
    assert_eq!(told(&["explain", declared]), 1);
    let report = run(&["--json", "verify", declared]);
    assert!(out(&report).contains("input-scale-missing"), "{}", out(&report));
}

#[test]
fn stdout_has_results_only() {
    let quiet = run(&["generate", "-q", "-p", "Who are you?"]);
    let loud = run(&["generate", "-vv", "-p", "Who are you?"]);
    assert_eq!(out(&quiet), out(&loud));
    assert_eq!(err(&quiet), "");
    assert!(err(&loud).contains("self-check") && err(&loud).contains("tok/s"), "{}", err(&loud));
}

#[test]
fn skipped_self_checks_are_loud_and_counted() {
    let output = run(&["generate", "--json", "--no-self-check", "-p", "Who are you?"]);
    let report: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    assert_eq!(report["skipped_self_checks"], 24);
    assert!(err(&output).contains("--no-self-check"), "{}", err(&output));
}

#[test]
fn colour_is_asked_for_or_absent() {
    let warn = ["--unified-memory", "prefer", "verify"];
    assert!(err(&run(&[&warn[..], &["--color", "always"]].concat())).contains('\x1b'));
    assert!(!err(&run(&warn)).contains('\x1b'), "not a terminal");
    let refused = q4().args(warn).env("NO_COLOR", "1").output().unwrap();
    assert!(!err(&refused).contains('\x1b'));
}

#[test]
fn completions_know_the_verbs() {
    for shell in ["bash", "zsh", "fish"] {
        let script = out(&run(&["completions", shell]));
        assert!(script.contains("quantize") && script.contains("nvfp4-lib"), "{shell}");
    }
}

#[test]
fn the_manual_has_a_page_for_every_verb() {
    let help = out(&run(&["--help"]));
    let list = help.split_once("Commands:\n").unwrap().1.split_once("\n\n").unwrap().0;
    let verbs: Vec<_> =
        list.lines().filter_map(|l| l.split_whitespace().next()).filter(|v| *v != "help").collect();
    assert!(verbs.len() > 10, "{verbs:?}");
    let all = out(&run(&["man"]));
    assert!(all.starts_with(".ie") || all.starts_with(".TH"), "{}", &all[..100]);
    assert_eq!(all.lines().filter(|l| l.starts_with(".TH ")).count(), 1 + verbs.len());
    for verb in verbs {
        let page = out(&run(&["man", verb]));
        assert!(page.contains(&format!(".TH q4-{verb} 1 ")) && all.contains(&page), "{verb}: {page}");
        assert!(page.contains("memory\\-limit"), "{verb}: global options");
    }
    let examples = all.matches("\n.nf\n  ").count();
    assert!(examples > 5 && examples == all.matches("\n.fi\n").count(), "{examples}");
    let unknown = run(&["man", "nonsense"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(err(&unknown).contains("need: one of generate, "), "{}", err(&unknown));
}
