//! Layouts that must be read, configurations that must be refused, frequencies that must match bit for bit.
use super::*;
use q4_core::Code;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance/golden").join(file)
}

fn published(file: &str) -> DecoderConfig {
    DecoderConfig::parse(&std::fs::read(golden(file)).expect("golden")).expect("a layout that is read")
}

fn f32s(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = tensors.tensor(name).expect("golden tensor").data().to_vec();
    data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// The tiny configuration with `change` applied, as an error text.
fn refused(change: &str) -> String {
    let mut json: Value =
        serde_json::from_slice(&std::fs::read(golden("qwen3_tiny_a/config.json")).expect("golden"))
            .expect("json");
    let change: serde_json::Map<String, Value> = serde_json::from_str(change).expect("change is json");
    json.as_object_mut().expect("object").extend(change);
    let error = DecoderConfig::parse(json.to_string().as_bytes()).expect_err("must be refused");
    assert_eq!(error.code(), Code::ConfigInvalid);
    error.to_string()
}

#[test]
fn both_layouts_give_the_same_model() {
    for model in ["qwen3_tiny_a", "qwen3_tiny_b"] {
        let old = published(&format!("{model}/config.json"));
        let new = published(&format!("{model}/config.v5.json"));
        assert_eq!(old, new);
        assert_eq!(old.eos_token_ids, [2]);
    }
    let a = published("qwen3_tiny_a/config.json");
    assert_eq!((a.hidden_size, a.num_attention_heads, a.num_key_value_heads, a.head_dim), (64, 4, 2, 32));
    assert_eq!(a.dtype, Some(DType::F32));
    assert!(a.tie_word_embeddings && a.quantization.is_none());
    let q = published("qwen3_tiny_a/nvfp4_ct/config.json");
    assert_eq!(q.quantization.expect("kept")["quant_method"], "compressed-tensors");
}

#[test]
fn rotary_frequencies_match_the_golden_bits() {
    let bytes = std::fs::read(golden("qwen3_tiny_a/expected.safetensors")).expect("golden");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let plain = Rope { theta: 1e6, scaling: RopeScaling::None };
    assert_eq!(plain.inv_freq(32), (f32s(&tensors, "rope.inv_freq"), 1.0));
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: 16,
        stated: true,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
    };
    let (freq, factor) = Rope { theta: 1e6, scaling }.inv_freq(32);
    assert_eq!(freq, f32s(&tensors, "dense_yarn.inv_freq"));
    assert_eq!([factor].as_slice(), f32s(&tensors, "dense_yarn.attention_factor"));
    let linear = Rope { theta: 1e6, scaling: RopeScaling::Linear { factor: 2.0 } };
    assert_eq!(linear.inv_freq(32).0[0], 0.5);
}

#[test]
fn yarn_is_read_from_both_places() {
    let yarn = r#"{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":16}"#;
    let base = std::fs::read_to_string(golden("qwen3_tiny_a/config.json")).expect("golden");
    let old = base.replace("\"rope_scaling\": null", &format!("\"rope_scaling\": {yarn}"));
    let c = DecoderConfig::parse(old.as_bytes()).expect("yarn");
    assert!(matches!(
        c.rope.scaling,
        RopeScaling::Yarn { factor: 4.0, original_max_position_embeddings: 16, beta_fast: 32.0, .. }
    ));
    let new = old.replace("rope_scaling", "rope_parameters");
    assert_eq!(DecoderConfig::parse(new.as_bytes()).expect("yarn"), c);
}

#[test]
fn all_problems_come_at_once() {
    let text = refused(
        r#"{"hidden_size":0,"num_key_value_heads":3,"rms_norm_eps":-1,"hidden_act":"gelu","num_experts":128,
            "eos_token_id":[2,256],"vocab_size":256,"attention_bias":true}"#,
    );
    for field in [
        "hidden_size",
        "num_key_value_heads",
        "rms_norm_eps",
        "hidden_act",
        "num_experts",
        "eos_token_id",
        "attention_bias",
    ] {
        assert!(
            text.lines().any(|l| l.contains(&format!("{field}: need "))),
            "{field} is missing in\n{text}"
        );
    }
    assert!(text.contains("7 problems"), "{text}");
}

#[test]
fn contradictions_and_foreign_features_are_refused() {
    for (change, field) in [
        (r#"{"dtype":"bfloat16"}"#, "dtype"),
        (r#"{"rope_parameters":{"rope_type":"default","rope_theta":5e6}}"#, "rope_parameters.rope_theta"),
        (
            r#"{"rope_scaling":{"type":"linear","factor":2},"rope_parameters":{"rope_type":"default"}}"#,
            "rope_parameters.rope_type",
        ),
        (r#"{"rope_scaling":{"rope_type":"longrope"}}"#, "rope_scaling.rope_type"),
        (r#"{"rope_scaling":{"rope_type":"yarn","factor":4,"mscale":1.0}}"#, "rope_scaling.mscale"),
        (r#"{"rope_parameters":{"full_attention":{"rope_theta":1e6}}}"#, "rope_parameters.full_attention"),
        (r#"{"use_sliding_window":true,"sliding_window":16,"max_window_layers":1}"#, "sliding_window"),
        (r#"{"head_dim":33}"#, "head_dim"),
        (r#"{"head_dim":null,"hidden_size":66}"#, "head_dim"),
        (r#"{"layer_types":["full_attention","sliding_attention"]}"#, "layer_types"),
        (r#"{"model_type":"qwen3_moe"}"#, "model_type"),
        (r#"{"rope_theta":1e300}"#, "rope_theta"),
        (r#"{"torch_dtype":"int8"}"#, "torch_dtype"),
        (
            r#"{"hidden_size":1048576,"intermediate_size":4194304,"num_hidden_layers":1024}"#,
            "the sizes together",
        ),
    ] {
        let text = refused(change);
        assert!(text.contains(&format!("{field}: need")), "{change} gave\n{text}");
    }
}

#[test]
fn absent_head_dim_is_128_and_null_hidden_over_heads() {
    let base = std::fs::read_to_string(golden("qwen3_tiny_a/config.json")).expect("golden");
    let parse = |field: &str| {
        DecoderConfig::parse(base.replace("\"head_dim\": 32,", field).as_bytes()).expect("config").head_dim
    };
    assert_eq!((parse(""), parse("\"head_dim\": null,")), (128, 16));
}

#[test]
fn what_changes_nothing_is_no_reason_to_refuse() {
    let base = std::fs::read_to_string(golden("qwen3_tiny_a/config.json")).expect("golden");
    for change in [
        r#"{"use_sliding_window":true,"sliding_window":2048}"#,
        r#"{"use_sliding_window":true,"sliding_window":16,"max_window_layers":2}"#,
        r#"{"use_sliding_window":null,"sliding_window":16,"max_window_layers":0}"#,
        r#"{"rope_scaling":{"rope_type":"yarn","factor":4,"truncate":true}}"#,
        r#"{"rope_scaling":{"rope_type":"default","partial_rotary_factor":1.0}}"#,
        r#"{"rms_norm_eps":null,"hidden_act":null}"#,
    ] {
        let mut json: serde_json::Value = serde_json::from_str(&base).expect("json");
        for (field, value) in serde_json::from_str::<serde_json::Map<_, _>>(change).expect("json") {
            json[field] = value;
        }
        let config = DecoderConfig::parse(json.to_string().as_bytes()).expect(change);
        assert_eq!(config.rms_norm_eps, 1e-6);
    }
}

#[test]
fn yarn_beyond_the_stated_positions_extends_them() {
    let base = std::fs::read_to_string(golden("qwen3_tiny_a/config.json")).expect("golden");
    for (yarn, positions) in [
        (r#"{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":2048}"#, 8192),
        (r#"{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":16}"#, 2048),
        (r#"{"rope_type":"yarn","factor":4.0}"#, 2048),
    ] {
        let text = base.replace("\"rope_scaling\": null", &format!("\"rope_scaling\": {yarn}"));
        assert_eq!(DecoderConfig::parse(text.as_bytes()).expect("yarn").max_position_embeddings, positions);
    }
}
