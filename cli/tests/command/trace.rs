//! `q4 trace`: two runs agree call by call, or the first call that differs is named.
use crate::{document, err, json, run};
use serde_json::Value;

/// Names of the calls that differ at all.
fn different(document: &Value) -> Vec<String> {
    let layers = document["layers"].as_array().unwrap();
    let differs = layers.iter().filter(|l| l["rel"].as_f64() != Some(0.0));
    differs.map(|l| format!("{}.{}", l["name"].as_str().unwrap(), l["call"].as_str().unwrap())).collect()
}

fn backends(executed: &Value) -> Vec<&str> {
    executed.as_array().unwrap().iter().map(|e| e["backend"].as_str().unwrap()).collect()
}

#[test]
fn kernels_agree_with_the_oracle_behind_every_call() {
    for activations in ["native", "int8", "nvfp4"] {
        let options = ["--backend", "nvfp4-kernel", "--activations", activations];
        let seen = json("trace", &[&["-p", "Who are you?", "--against", "reference"], &options[..]].concat());
        let layers = seen["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 6 * 5 + 2, "{activations}");
        // A call is one product, so no code flips inside it: whatever the inputs are, they are the same.
        for l in layers {
            assert!(l["rel"].as_f64().unwrap() < 1e-6 && l["ref_max"].as_f64().unwrap() > 0.01, "{l}");
        }
        assert_ne!(
            different(&seen),
            Vec::<String>::new(),
            "{activations}: an oracle that rounds as a kernel does?"
        );
        assert_eq!(seen["first_divergence"], Value::Null);
        let codes = &seen["input_codes"];
        if activations == "nvfp4" {
            let count = |what: &str| codes[what].as_u64().unwrap();
            assert!(count("compared") > 10_000 && count("differ") * 1000 < count("compared"), "{codes}");
        } else {
            assert_eq!(codes, &Value::Null);
        }
        assert_eq!(backends(&seen["executed"]), ["nvfp4-kernel"]);
        assert_eq!(backends(&seen["executed_against"]), ["reference"]);
    }
}

#[test]
fn the_layer_that_another_backend_computes_is_named() {
    const LAYER: &str = "*.layers.3.mlp.*=dequant-matmul";
    let options = ["--backend", "nvfp4-kernel", "--backend", LAYER, "--json", "trace", "-p", "Who are you?"];
    let against = ["--against", "nvfp4-kernel", "--tolerance", "0"];
    let trace = |more: &[&str]| {
        let output = run(&[&options, &against[..], more].concat());
        assert_eq!(output.status.code(), Some(3), "{}", err(&output));
        document("trace", &output)
    };
    let seen = trace(&[]);
    let mlp = ["model.layers.3.mlp.{gate,up}_proj", "model.layers.3.mlp.down_proj"];
    assert_eq!(different(&seen), mlp, "each call starts from the same values");
    assert_eq!(seen["first_divergence"]["call"], "mlp.{gate,up}_proj");
    let drifting = trace(&["--drift"]);
    assert_eq!(drifting["first_divergence"]["name"], "model.layers.3");
    let later = different(&drifting);
    assert_eq!((later.len(), later[0].as_str()), (2 + 2 * 5 + 1, mlp[0]), "{later:?}");
    let down = ["--backend", "nvfp4-kernel", "--backend", "*.layers.3.mlp.down_proj=dequant-matmul"];
    let seen = json("trace", &[&["-p", "Who are you?", "--against", "nvfp4-kernel"], &down[..]].concat());
    assert_eq!(different(&seen), [mlp[1]], "one product");
    let loose = run(&[&options, &against[..2], &["--tolerance", "0.001"]].concat());
    assert!(loose.status.success(), "{}", err(&loose));
}

#[test]
fn a_prompt_of_several_steps_has_one_line_a_call() {
    let ids = vec!["7"; 600].join(",");
    let seen = json("trace", &["--ids", &ids, "--against", "dequant-matmul"]);
    assert_eq!((seen["layers"].as_array().unwrap().len(), &seen["tokens"]), (32, &Value::from(600)));
    assert_eq!(seen["decoded"], 4, "and as many calls of one row each");
    assert_eq!(seen["first_divergence"], Value::Null);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    for (line, exit, says) in [
        (&["-p", "x", "--against", "nope"][..], 6, "nope"),
        (&["-p", "x", "--against", "nf4-kernel"], 6, "nf4-kernel"),
        (&["-p", "x", "--against", "reference", "--against-device", "cuda:77"], 6, "--against-device"),
        (&["--raw", "-p", "", "--against", "reference"], 2, "empty prompt"),
        (&["-p", "x", "--against", "reference", "--tolerance", "-1"], 2, "--tolerance"),
        (&["-p", "x"], 2, "--against"),
    ] {
        let output = run(&[&["trace"], line].concat());
        assert_eq!(output.status.code(), Some(exit), "{line:?}: {}", err(&output));
        assert!(err(&output).contains(says), "{line:?}: {}", err(&output));
    }
}
