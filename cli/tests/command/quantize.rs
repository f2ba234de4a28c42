//! What `q4 quantize` writes, `q4` reads: every layout, with the loss it reported.
use crate::{err, golden_arg, json, out, run};

#[test]
fn every_layout_is_written_verified_and_run() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&str, &[&str], &str); 14] = [
        ("modelopt", &[], "nvfp4"),
        ("modelopt-46", &["--method", "four-over-six"], "nvfp4"),
        ("modelopt-rtn", &["--method", "rtn"], "nvfp4"),
        ("ct", &["--layout", "compressed-tensors"], "nvfp4"),
        ("a.dat", &["--layout", "dat", "--method", "rtn"], "nvfp4"),
        ("b.dat", &["--layout", "dat", "--scales", "two-level", "--method", "rtn"], "nvfp4"),
        ("nf4", &["--format", "nf4"], "nf4"),
        ("nf4-dq", &["--format", "nf4", "--double-quant", "--block-size", "32"], "nf4-dq"),
        ("c.dat", &["--format", "nf4", "--layout", "dat"], "nf4"),
        ("mxfp4", &["--format", "mxfp4"], "mxfp4"),
        ("int4", &["--format", "int4", "--block-size", "16"], "int4"),
        ("int4-rtn", &["--format", "int4", "--block-size", "16", "--method", "rtn"], "int4"),
        ("gptq", &["--format", "int4", "--block-size", "16", "--layout", "gptq"], "int4"),
        // It has no way to be without zero points.
        ("awq", &["--format", "int4", "--block-size", "16", "--layout", "awq"], "int4-asym"),
    ];
    let source = golden_arg("qwen3_tiny_b");
    let mut loss = Vec::new();
    for (name, options, schema) in cases {
        let target = dir.path().join(name);
        let target = target.to_str().unwrap();
        let report = json("quantize", &[&[source.as_str(), target], options].concat());
        let tensors = report["tensors"].as_array().unwrap();
        let layout = report["layout"].as_str().unwrap();
        assert!(
            ["modelopt", "compressed-tensors", "bitsandbytes", "gptq", "awq", "dat"].contains(&layout),
            "as --layout has it"
        );
        let worst = tensors.iter().map(|t| t["sqnr_db"].as_f64().unwrap()).fold(f64::INFINITY, f64::min);
        assert!(worst > 10.0, "{name}: {worst} dB");
        loss.push((name, worst));
        let config = if name.ends_with(".dat") { vec!["--config", source.as_str()] } else { vec![] };
        let verified = json("verify", &[&[target], &config[..]].concat());
        assert_eq!(verified["errors"], 0, "{name}: {verified}");
        let plan = json("explain", &[&[target], &config[..]].concat());
        let layers = plan["layers"].as_array().unwrap();
        assert!(layers.iter().all(|l| l["schema"] == format!("{schema}@1")), "{name}: {plan}");
        let logits = dir.path().join(format!("{name}.logits"));
        json(
            "logits",
            &[&[target, "--ids", "1,2,3", "--out", logits.to_str().unwrap()], &config[..]].concat(),
        );
    }
    let of = |name: &str| loss.iter().find(|l| l.0 == name).unwrap().1;
    assert!(of("b.dat") > of("a.dat"), "two levels lose less than one: {loss:?}");
    assert!(of("int4") > of("int4-rtn") && of("gptq") == of("awq"), "{loss:?}");
    assert!(of("modelopt-46") > of("modelopt-rtn") && of("modelopt") > of("modelopt-46"), "{loss:?}");
}

#[test]
fn nothing_is_overwritten_and_nothing_is_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    std::fs::create_dir(&target).unwrap();
    std::fs::write(target.join("precious"), "x").unwrap();
    let tiny = golden_arg("qwen3_tiny_a");
    let refused = run(&["quantize", &tiny, target.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(2), "{}", err(&refused));
    let nothing = dir.path().join("none");
    let refused = run(&["quantize", &tiny, nothing.to_str().unwrap(), "--exclude", "no.such.layer"]);
    assert_eq!(refused.status.code(), Some(2), "{}", err(&refused));
    assert!(err(&refused).contains("no.such.layer"));
    let single = run(&["quantize", &tiny, nothing.to_str().unwrap(), "--scales", "single"]);
    assert_eq!(single.status.code(), Some(2));
    for part in ["have: nvfp4 with block scales alone", "fix: --layout dat"] {
        assert!(err(&single).contains(part), "{part} in {}", err(&single));
    }
    for (options, parts) in [
        (&["--layout", "gptq"][..], ["need: int4 without zero points", "have: nvfp4 with block scales"]),
        (
            &["--format", "int4", "--layout", "modelopt"],
            ["have: int4", "fix: --layout compressed-tensors, gptq"],
        ),
        (&["--format", "int4", "--layout", "awq", "--block-size", "48"], ["groups of 48", "--block-size 16"]),
        (&["--format", "mxfp4", "--layout", "awq"], ["have: mxfp4", "fix: --layout compressed-tensors"]),
        (&["--format", "mxfp4", "--block-size", "16"], ["--block-size is about", "nf4 or int4"]),
    ] {
        let refused = run(&[&["quantize", &tiny, nothing.to_str().unwrap()], options].concat());
        assert_eq!(refused.status.code(), Some(2), "{options:?}");
        assert!(parts.iter().all(|part| err(&refused).contains(part)), "{options:?}: {}", err(&refused));
    }
    let four_bit = golden_arg("qwen3_tiny_a/nvfp4_ct");
    assert_eq!(run(&["quantize", &four_bit, nothing.to_str().unwrap()]).status.code(), Some(2));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(&target).unwrap().count(), 1);
}

#[test]
fn globs_choose_layers() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    let tiny = golden_arg("qwen3_tiny_b");
    let options = ["--include", "lm_head", "--exclude", "model.layers.1.*"];
    let output = run(&[&["quantize", &tiny, target.to_str().unwrap()], &options[..]].concat());
    assert!(output.status.success(), "{}", err(&output));
    let text = out(&output);
    assert!(text.contains("lm_head") && text.contains("8 layers quantised"), "{text}");
    assert!(!text.contains("layers.1."), "{text}");
}
