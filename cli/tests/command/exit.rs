//! Exit status and error text of every kind of failure.
use crate::{document, err, golden, golden_arg, json, out, q4, run};
use insta::assert_snapshot;
use std::path::Path;

/// Runs with and without `--json`, expects `status` both times, and returns the text, in which paths are made
/// stable.
fn fails(status: i32, args: &[&str]) -> String {
    let plain = run(args);
    assert_eq!(plain.status.code(), Some(status), "{args:?}: {}{}", out(&plain), err(&plain));
    let structured = run(&[&["--json"], args].concat());
    assert_eq!(structured.status.code(), Some(status), "{args:?}");
    let document = document("error", &structured);
    assert_eq!(document["exit"], status);
    // What the parser of the command line says quotes the options that were given.
    if err(&plain).starts_with("Q4-") {
        assert_eq!(err(&structured), err(&plain), "{args:?}: the text is the same");
        assert!(err(&plain).contains(document["code"].as_str().unwrap()));
        assert!(err(&plain).contains(document["what"].as_str().unwrap().lines().next().unwrap()));
    }
    err(&plain).replace(&golden_arg(""), "GOLDEN/").replace(absent!(), "ABSENT")
}

#[test]
fn usage_is_2() {
    assert!(fails(2, &["generate", "--no-such-option"]).contains("--no-such-option"));
    assert!(fails(2, &["nonsense"]).contains("nonsense"));
    fails(2, &["generate", "--compute", "fast"]);
    fails(2, &["--memory-limit", "lots", "generate"]);
    fails(2, &["generate", "--context", "999999", "-p", "x"]);
    fails(2, &["generate", "--temperature", "-1", "-p", "x"]);
    fails(2, &["generate", "demo", "--config", "x", "-p", "x"]);
    fails(2, &["quantize", "demo", "/tmp", "--double-quant"]);
    assert_snapshot!("no-prompt", fails(2, &["generate"]));
    assert_snapshot!(
        "two-backends",
        fails(2, &["--backend", "reference", "explain", "--backend", "nf4-kernel"])
    );
    assert_eq!(run(&[]).status.code(), Some(2));
}

#[test]
fn a_model_that_cannot_be_used_is_4() {
    assert_snapshot!("no-model", fails(4, &["explain", absent!("/model")]));
    assert_snapshot!("no-tokenizer", fails(4, &["generate", &golden_arg("qwen3_tiny_a"), "-p", "x"]));
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| std::fs::copy(golden("qwen3_tiny_a").join(name), dir.path().join(name)).unwrap();
    copy("config.json");
    let whole = std::fs::read(golden("qwen3_tiny_a/model.safetensors")).unwrap();
    let file = dir.path().join("model.safetensors");
    for size in [0, 7, 100, whole.len() - 1] {
        std::fs::write(&file, &whole[..size]).unwrap();
        for verb in ["inspect", "verify", "explain"] {
            let text = fails(4, &[verb, dir.path().to_str().unwrap()]);
            assert!(text.contains("model.safetensors"), "{verb} of {size} bytes: {text}");
        }
    }
    copy("model.safetensors");
    std::fs::write(dir.path().join("config.json"), "{").unwrap();
    assert!(fails(4, &["verify", dir.path().to_str().unwrap()]).contains("config.json"));
}

#[test]
fn findings_are_3() {
    let dir = tempfile::tempdir().unwrap();
    let source = golden("qwen3_tiny_a/nvfp4_modelopt");
    for name in ["config.json", "hf_quant_config.json"] {
        std::fs::copy(source.join(name), dir.path().join(name)).unwrap();
    }
    let mut bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let name = "model.layers.1.mlp.up_proj.weight_scale";
    let at = {
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        file.tensor(name).unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize
    };
    bytes[at + 5] = 0x7f; // NaN in E4M3
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let model = dir.path().to_str().unwrap();
    let output = run(&["verify", model, "--json"]);
    assert_eq!(output.status.code(), Some(3), "{}", err(&output));
    let report = document("verify", &output);
    assert_eq!(report["errors"], 1);
    assert_eq!(
        (&report["findings"][0]["tensor"], &report["findings"][0]["severity"]),
        (&name.into(), &"error".into())
    );
    assert!(fails(4, &["logits", model, "--ids", "1", "--out", absent!("/x")]).contains(name));
    assert_eq!(json("verify", &[source.to_str().unwrap()])["errors"], 0);
}

#[test]
fn what_this_build_does_not_have_is_6() {
    let text = fails(6, &["generate", "-p", "x", "--device", "cuda:63"]);
    for part in ["Q4-E0312", "--device cuda:63", "need: ", "have: ", "fix: --device cpu"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    // Which part is missing depends on the machine; without a driver it is the driver, and where it was
    // looked for.
    if text.contains("libcuda") {
        assert!(text.contains("libcuda.so.1") && text.contains("Q4_CUDA_LIBS"), "{text}");
    }
    assert_snapshot!("plugin", fails(6, &["--plugin", "./x.so", "generate", "-p", "x"]));
    assert_snapshot!("plugin-dir", fails(8, &["diagnose", "--plugin-dir", absent!("/plugins")]));
    let managed = ["--device", "cpu", "--unified-memory", "require", "generate", "-p", "x"];
    assert_snapshot!("unified-memory", fails(6, &managed));
    assert_snapshot!("unknown-backend", fails(6, &["--backend", "nvfp5-kernel", "generate", "-p", "x"]));
    let preferred =
        run(&["--device", "cpu", "--unified-memory", "prefer", "generate", "-p", "Who are you?", "-n", "1"]);
    assert!(preferred.status.success() && err(&preferred).contains("warning"), "{}", err(&preferred));
}

#[test]
fn a_library_that_is_not_there_is_named_with_what_works_instead() {
    let missing = ["--nvfp4-lib", absent!(), "--backend", "nvfp4-kernel", "generate"];
    let text = fails(6, &missing);
    for part in ["nvfp4-kernel", "libNVFP4", "ABSENT", "q4 --backend dequant-matmul generate"] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    assert_snapshot!("library-missing", text);
    let works =
        run(&["--nvfp4-lib", absent!(), "--backend", "dequant-matmul", "generate", "-p", "Who are you?"]);
    assert!(works.status.success(), "{}", err(&works));
    // Without a request for the kernel it is a downgrade: refused unless agreed to, then said once, whatever
    // is asked to be quiet, and counted.
    let missing = ["--nvfp4-lib", absent!()];
    for verb in [&["generate", "-p", "x"][..], &["bench", "-r", "1"]] {
        let refused = fails(6, &[&missing, verb].concat());
        for part in ["Q4-E0304", "library-missing", "fix: --compute kernel-or-fallback"] {
            assert!(refused.contains(part), "{part} is missing in\n{refused}");
        }
    }
    let agreed = [&missing[..], &["--compute", "kernel-or-fallback"]].concat();
    let downgraded = run(&[&agreed[..], &["-q", "--json", "generate", "-p", "Who are you?"]].concat());
    let report = document("generate", &downgraded);
    assert_eq!(report["downgraded"], 24);
    assert_eq!(report["executed"][0]["backend"], "dequant-matmul");
    let warning = err(&downgraded);
    assert_eq!(warning.lines().count(), 1, "{warning}");
    for part in ["24 of 24", absent!(), "--compute kernel-or-fallback"] {
        assert!(warning.contains(part), "{part} is missing in {warning}");
    }
    let denied = fails(6, &["--nvfp4-lib", absent!(), "--compute", "kernel-only", "generate", "-p", "x"]);
    assert!(denied.contains("library-missing"), "{denied}");
}

#[test]
fn explain_prints_the_plan_it_refuses() {
    let args = ["explain", "--nvfp4-lib", absent!(), "--compute", "kernel-only"];
    let output = run(&args);
    assert_eq!(output.status.code(), Some(6));
    assert!(out(&output).contains("nobody") && err(&output).contains("Q4-E0301"), "{}", err(&output));
    let output = run(&[&args[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(6));
    let report = document("explain", &output);
    assert_eq!(report["layers"].as_array().unwrap().len(), 24);
    assert!(report["layers"][0]["chosen"].is_null());
    assert_eq!(report["refused"]["code"], "Q4-E0301");
    let tiny = golden_arg("qwen3_tiny_a");
    assert_snapshot!("dense-kernel-only", err(&run(&["--compute", "kernel-only", "explain", &tiny])));
    assert_snapshot!("backend-unused", err(&run(&["--backend", "nf4-kernel", "explain", &tiny])));
}

#[test]
fn memory_is_refused_before_it_is_taken() {
    // Not `fails`: what the program itself takes is measured, and two runs may differ.
    let line = ["--memory-limit", "1MiB", "generate", "-p", "x"];
    let plain = run(&line);
    assert_eq!(plain.status.code(), Some(7), "{}", err(&plain));
    assert!(err(&plain).contains("--memory-limit"), "{}", err(&plain));
    assert_eq!(document("error", &run(&[&["--json"], &line[..]].concat()))["exit"], 7);
}

#[test]
fn output_that_cannot_be_written_is_8() {
    let tiny = golden_arg("qwen3_tiny_a");
    assert_snapshot!("no-directory", fails(8, &["logits", &tiny, "--ids", "1", "--out", absent!("/x")]));
    let quantized = run(&["quantize", &tiny, absent!("/out")]);
    assert_eq!(quantized.status.code(), Some(8), "{}", err(&quantized));
    fails(8, &["generate", "--turns", absent!("/turns")]);
    if Path::new("/dev/full").exists() {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let status = q4().args(["inspect", "--json"]).stdout(full).status().unwrap();
        assert_eq!(status.code(), Some(8));
    }
}
