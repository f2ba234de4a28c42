//! GPTQ whose groups are made of any in features, through the program: computed, told, and kept or refused.
use crate::{err, golden, json, out, run};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::Path;

/// A recorded model whose in features are in the groups of those eight places further on.
fn model(dir: &Path, desc_act: bool) -> String {
    let (from, to) = (golden("qwen3_tiny_a/gptq"), dir.join(format!("model-{desc_act}")));
    std::fs::create_dir(&to).unwrap();
    let mut file = std::fs::read(from.join("model.safetensors")).unwrap();
    let start = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..start]).unwrap();
    for (_, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| name.ends_with(".g_idx")) {
        let at = |i: usize| start + tensor["data_offsets"][i].as_u64().unwrap() as usize;
        file[at(0)..at(1)].rotate_left(4 * 8);
    }
    std::fs::write(to.join("model.safetensors"), file).unwrap();
    let text = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["quantization_config"]["desc_act"] = desc_act.into();
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    to.to_str().unwrap().to_owned()
}

#[test]
fn logits_are_those_of_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), true);
    let logits = |backend: &str, activations: &str| -> Vec<f32> {
        let file = dir.path().join(format!("{backend}-{activations}"));
        let options = ["--ids", "5,6,7,8,9", "--out", file.to_str().unwrap(), "--backend", backend];
        json("logits", &[&[&model[..]], &options[..], &["--activations", activations]].concat());
        let bytes = std::fs::read(file).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let data = file.tensor("logits").unwrap().data().to_vec();
        data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    for (activations, limit) in [("native", 1e-5), ("int8", 1e-3)] {
        let (want, got) = (logits("reference", activations), logits("int4-kernel", activations));
        let largest = want.iter().fold(0f32, |most, v| most.max(v.abs()));
        let worst = got.iter().zip(&want).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
        println!("{activations}: {worst:e} of {largest}");
        assert!(got.len() == 5 * 256 && worst <= limit * largest, "{activations}: {worst:e} of {largest}");
    }
}

#[test]
fn it_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), true);
    let plan = json("explain", &[&model]);
    let layers = plan["layers"].as_array().unwrap();
    assert!(layers.len() == 8 && layers.iter().all(|l| l["act_order"] == true), "{plan}");
    assert!(layers.iter().all(|l| l["chosen"]["backend"] == "int4-kernel"), "{plan}");
    let text = out(&run(&["explain", &model]));
    assert!(text.contains("gptq, act-order: inputs are permuted, native activations"), "{text}");
    let kinds = json("inspect", &[&model])["kinds"].clone();
    let is_told = |k: &Value| k["layout"] == "gptq" && k["act_order"] == 14;
    assert!(kinds.as_array().unwrap().iter().any(is_told), "{kinds}");
    let text = out(&run(&["inspect", &model]));
    assert!(text.contains("gptq int4") && text.contains("14 matrices (14 act-order)"), "{text}");
    let found = json("verify", &[&model])["findings"].clone();
    let note = found.as_array().unwrap().iter().find(|f| f["code"] == "act-order").unwrap();
    assert!(note["severity"] == "note" && note["message"].as_str().unwrap().contains("14 layers"), "{note}");

    // Nothing of it where groups are in order.
    let plain = golden("qwen3_tiny_a/gptq").to_str().unwrap().to_owned();
    assert!(json("explain", &[&plain])["layers"][0].get("act_order").is_none());
    let kinds = json("inspect", &[&plain])["kinds"].clone();
    assert!(kinds.as_array().unwrap().iter().all(|k| k.get("act_order").is_none()), "{kinds}");
}

#[test]
fn it_is_kept_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), true);
    let to = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let report = json("convert", &[&model, &to("gptq"), "--layout", "gptq"]);
    assert_eq!(report["lossless"], true);
    let again = json("convert", &[&to("gptq"), &to("again"), "--layout", "gptq"]);
    assert_eq!(again["sha256_decoded"], report["sha256_decoded"]);
    let compared = json("verify", &[&to("gptq"), "--original", &model]);
    assert!(compared["matrices"].as_array().unwrap().iter().all(|m| m["same"] == true), "{compared}");
    for layout in ["awq", "compressed-tensors"] {
        let refused = run(&["convert", &model, &to(layout), "--layout", layout]);
        assert_eq!(refused.status.code(), Some(2), "{layout}");
        assert!(err(&refused).contains("g_idx`: act-order"), "{}", err(&refused));
    }
}

#[test]
fn a_declaration_of_the_contrary_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = run(&["explain", &model(dir.path(), false)]);
    let text = err(&refused);
    assert_eq!(refused.status.code(), Some(4), "{text}");
    assert!(text.contains("mlp.down_proj.g_idx`") && text.contains("desc_act false"), "{text}");
}
