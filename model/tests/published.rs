//! The configurations that the most downloaded files have, with all of their fields, over random weights of a
//! small model in the same layout: they load, and give the logits of the same weights under a configuration
//! that says no more than it has to. What is no model of ours is refused by name.
#![allow(clippy::unwrap_used)]
mod handmade;
#[path = "support/mod.rs"]
mod support;

use handmade::gguf::File;
use handmade::{Model, Tensor, golden};
use q4_core::{Code, Result};
use q4_model::checkpoint::{Bytes, Checkpoint};
use q4_model::verify::{Severity, verify};
use serde_json::{Value, json};
use support::Setup;

/// Whose, the layout of its weights, and what its files say.
struct Published {
    like: &'static str,
    layout: &'static str,
    config: Value,
    hf_quant: Option<Value>,
    /// Fields of `config.json` beside what is quantised.
    fields: Value,
}

fn plain(like: &'static str, layout: &'static str, config: Value) -> Published {
    Published { like, layout, config, hf_quant: None, fields: json!({}) }
}

/// What every group of ModelOpt has.
fn nvfp4() -> Value {
    json!({"dynamic": false, "num_bits": 4, "type": "float", "group_size": 16})
}

fn weights(bits: u64, kind: &str, strategy: &str, group: Value) -> Value {
    json!({
        "actorder": null, "block_structure": null, "dynamic": false, "group_size": group, "num_bits": bits,
        "observer": "minmax", "observer_kwargs": {}, "strategy": strategy, "symmetric": true, "type": kind,
    })
}

fn compressed(format: &str, groups: Value) -> Value {
    json!({
        "config_groups": groups, "format": format, "global_compression_ratio": 1.8, "ignore": ["lm_head"],
        "kv_cache_scheme": null, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.10.3.dev47",
    })
}

fn all() -> Vec<Published> {
    let linear = |weights: Value, inputs: Value, format: Value| {
        json!({"format": format, "input_activations": inputs, "output_activations": null,
               "targets": ["Linear"], "weights": weights})
    };
    let groups = |group: Value| json!({"group_0": group});
    let mut nvfp4_weights = weights(4, "float", "tensor_group", json!(16));
    nvfp4_weights["scale_dtype"] = json!("torch.float8_e4m3fn");
    nvfp4_weights["zp_dtype"] = Value::Null;
    let mut nvfp4_inputs = nvfp4_weights.clone();
    nvfp4_inputs["dynamic"] = json!("local");
    nvfp4_inputs["observer"] = json!("static_minmax");
    let mut asymmetric = weights(4, "int", "group", json!(64));
    asymmetric["symmetric"] = json!(false);
    asymmetric["actorder"] = json!("weight");
    let tokens = json!({
        "actorder": null, "block_structure": null, "dynamic": true, "group_size": null, "num_bits": 8,
        "observer": null, "observer_kwargs": {}, "strategy": "token", "symmetric": true, "type": "float",
    });
    let gptq = json!({
        "bits": 4, "checkpoint_format": "gptq", "damp_percent": 0.01, "desc_act": false, "group_size": 32,
        "model_file_base_name": null, "model_name_or_path": null, "quant_method": "gptq",
        "static_groups": false, "sym": true, "true_sequential": true,
    });
    let gptqmodel = json!({
        "bits": 4, "checkpoint_format": "gptq", "desc_act": false, "dynamic": null, "group_size": 32,
        "hyb_act": false, "lm_head": false, "pack_dtype": "int32", "quant_method": "gptq", "sym": true,
        "meta": {"act_group_aware": true, "damp_auto_increment": 0.01, "damp_percent": 0.05, "mse": 0.0,
                 "quantizer": ["gptqmodel:7.7.0"], "static_groups": false, "true_sequential": true,
                 "uri": "https://example.org/gptqmodel"},
    });
    let awq = json!({
        "backend": "autoawq", "bits": 4, "do_fuse": false, "exllama_config": null, "fuse_max_seq_len": null,
        "group_size": 32, "modules_to_fuse": null, "modules_to_not_convert": null, "quant_method": "awq",
        "version": "gemm", "zero_point": true,
    });
    let norm = |i: usize| format!("model.layers.{i}.input_layernorm");
    let auto_round = json!({
        "autoround_version": "0.14.2", "bits": 4, "data_type": "int", "group_size": 64, "iters": 0,
        "model_free": true, "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round",
        "sym": false, "extra_config": {"lm_head": {"bits": 16, "data_type": "float"},
                                       norm(0): {"bits": 16, "data_type": "float"}},
    });
    let fp8 = json!({
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", norm(0), norm(1), "model.embed_tokens"],
    });
    let bnb = |double: bool, skip: Value| {
        json!({
            "_load_in_4bit": true, "_load_in_8bit": false, "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double, "llm_int8_enable_fp32_cpu_offload": false,
            "llm_int8_has_fp16_weight": false, "llm_int8_skip_modules": skip, "llm_int8_threshold": 6.0,
            "load_in_4bit": true, "load_in_8bit": false, "quant_method": "bitsandbytes",
        })
    };
    let skip = json!(["lm_head", "multi_modal_projector", "merger", "modality_projection"]);
    let unsloth = json!({"pad_token_id": 0, "unsloth_fixed": true, "unsloth_version": "2025.5.1",
                         "layer_types": ["full_attention", "full_attention"]});
    let producer = json!({"name": "modelopt", "version": "0.35.0"});
    let modelopt = json!({
        "config_groups": {"group_0":
            {"input_activations": nvfp4(), "weights": nvfp4(), "targets": ["Linear"]}},
        "ignore": ["lm_head"], "quant_algo": "NVFP4", "producer": producer, "quant_method": "modelopt",
        "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"},
    });
    let hf_quant = json!({"producer": producer, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"],
    }});
    let v5 = json!({"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
                    "rope_theta": null, "rope_scaling": null, "torch_dtype": null, "pad_token_id": null});
    vec![
        Published {
            like: "nvidia/Qwen3-8B-NVFP4",
            layout: "nvfp4_modelopt",
            config: modelopt.clone(),
            hf_quant: Some(hf_quant.clone()),
            fields: json!({}),
        },
        Published {
            like: "nvidia/Qwen3-8B-FP4, whose config.json does not say",
            layout: "nvfp4_modelopt",
            config: Value::Null,
            hf_quant: Some(hf_quant),
            fields: v5,
        },
        plain("RedHatAI/Qwen3-8B-NVFP4", "nvfp4_ct", {
            let group = linear(nvfp4_weights.clone(), nvfp4_inputs, json!("nvfp4-pack-quantized"));
            compressed("nvfp4-pack-quantized", groups(group))
        }),
        plain("RedHatAI/Qwen3-8B-NVFP4A16", "nvfp4_ct_w4a16", {
            let group = linear(nvfp4_weights, Value::Null, json!("nvfp4-pack-quantized"));
            compressed("nvfp4-pack-quantized", groups(group))
        }),
        plain("RedHatAI/Qwen3-8B-quantized.w4a16", "int4_ct", {
            let group = linear(weights(4, "int", "group", json!(32)), Value::Null, Value::Null);
            compressed("pack-quantized", groups(group))
        }),
        plain("cyankiwi/Qwen3-4B-AWQ-4bit, llm-compressor's AWQ", "int4_asym_ct", {
            compressed("pack-quantized", groups(linear(asymmetric, Value::Null, Value::Null)))
        }),
        plain("RedHatAI/Qwen3-8B-FP8-dynamic", "fp8_channel_ct", {
            let group = linear(weights(8, "float", "channel", Value::Null), tokens, Value::Null);
            compressed("float-quantized", groups(group))
        }),
        plain("Qwen/Qwen3-8B-AWQ", "awq", awq),
        plain("JunHowie/Qwen3-8B-GPTQ-Int4", "gptq", gptq),
        plain("GPTQModel of this year", "gptq", gptqmodel),
        plain("Intel's AutoRound W4A16", "auto_round", auto_round),
        plain("Qwen/Qwen3-8B-FP8", "fp8_blocks", fp8),
        Published {
            fields: unsloth.clone(),
            ..plain("unsloth/Qwen3-8B-bnb-4bit", "nf4_bnb_dq", bnb(true, Value::Null))
        },
        Published {
            fields: unsloth,
            ..plain("unsloth/Qwen3-8B-unsloth-bnb-4bit", "nf4_bnb", bnb(false, skip))
        },
    ]
}

#[test]
fn they_load_and_compute_what_they_hold() -> Result<()> {
    println!("{} published configurations", all().len());
    for p in all() {
        let mut m = Model::golden("a", p.layout);
        m.hf_quant = m.hf_quant.filter(|_| p.layout.contains("modelopt"));
        let want = logits(&m.open()?)?;
        m.config["quantization_config"] = p.config;
        m.hf_quant = p.hf_quant;
        for (field, value) in p.fields.as_object().unwrap() {
            m.config[field] = value.clone();
        }
        if p.like.starts_with("nvidia") {
            scales_of_cache(&mut m);
        }
        let c = m.open().unwrap_or_else(|e| panic!("{}: {e}", p.like));
        assert!(logits(&c)? == want, "{}", p.like);
        healthy(p.like, &c);
    }
    Ok(())
}

/// Mixed precision, as nvidia/Qwen3.6 has it and as a dense model of ours would: a list in both files, and
/// groups that say it again.
#[test]
fn mixtures_are_read_from_lists_and_from_groups() -> Result<()> {
    let mut m = Model::mixture();
    let want = logits(&m.open()?)?;
    let listed = m.config["quantization_config"]["quantized_layers"].clone();
    let of = |algo: &str| -> Vec<String> {
        let named = listed.as_object().unwrap().iter().filter(|(_, own)| own["quant_algo"] == algo);
        named.map(|(name, _)| name.clone()).collect()
    };
    let eight = json!({"dynamic": false, "num_bits": 8, "type": "float"});
    let groups = json!({
        "group_0": {"input_activations": eight, "weights": eight, "targets": of("FP8")},
        "group_1": {"input_activations": nvfp4(), "weights": nvfp4(), "targets": of("NVFP4")},
    });
    let both = json!({
        "config_groups": groups, "quantized_layers": listed, "ignore": [], "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.44.0"}, "quant_method": "modelopt",
    });
    scales_of_cache(&mut m);
    m.hf_quant = Some(json!({"producer": {"name": "modelopt", "version": "0.44.0"}, "quantization": {
        "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": listed,
    }}));
    for fields in [&["", ""][..], &["quantized_layers"], &["config_groups"]] {
        m.config["quantization_config"] = both.clone();
        for field in fields {
            m.config["quantization_config"].as_object_mut().unwrap().remove(*field);
        }
        let c = m.open()?;
        assert!(logits(&c)? == want, "without {fields:?}");
        healthy("a mixture", &c);
    }
    // Groups alone are enough.
    m.config["quantization_config"] = both.clone();
    m.config["quantization_config"].as_object_mut().unwrap().remove("quantized_layers");
    m.hf_quant = None;
    assert!(logits(&m.open()?)? == want, "groups alone");
    // And have to say the same as the list.
    m.config["quantization_config"] = both;
    let up = "model.layers.0.mlp.up_proj";
    m.config["quantization_config"]["config_groups"]["group_0"]["targets"]
        .as_array_mut()
        .unwrap()
        .push(json!(up));
    let e = m.open().unwrap_err();
    let text = e.to_string();
    let places = [
        up,
        "nvfp4, as config.json: quantization_config: quantized_layers.",
        "as config_groups.group_0 says",
    ];
    assert!(e.code() == Code::ConfigInvalid && places.iter().all(|p| text.contains(p)), "{text}");
    Ok(())
}

/// A layer that is listed as what was not quantised.
#[test]
fn layers_may_be_listed_as_unquantized() -> Result<()> {
    let mut m = Model::mixture();
    let name = "model.layers.0.mlp.up_proj";
    m.tensors.retain(|t| !t.name.starts_with(&format!("{name}.")));
    m.tensors.push(Model::golden("a", "").get(&format!("{name}.weight")).clone());
    m.config["quantization_config"]["quantized_layers"][name] = json!({"quant_algo": "UNQUANTIZED"});
    let listed = m.config["quantization_config"]["quantized_layers"].clone();
    m.hf_quant.as_mut().unwrap()["quantization"]["quantized_layers"] = listed;
    let c = m.open()?;
    c.bind_all()?;
    assert_eq!(c.declaration().excludes(name), Some(true));
    healthy("with a dense layer", &c);
    Ok(())
}

/// The metadata that converters, quantisers and their publishers write beside what a model needs.
#[test]
fn metadata_of_published_gguf_say_nothing_else() -> Result<()> {
    for name in ["q4_0.gguf", "mxfp4.gguf", "nvfp4.gguf", "../k_quants.gguf"] {
        let mut file = File::parse(&std::fs::read(golden("a", name)).unwrap());
        let want = logits(&of(&file)?)?;
        for (key, text) in [
            ("general.type", "model"),
            ("general.name", "Qwen3 0.6B Instruct"),
            ("general.finetune", "Instruct"),
            ("general.basename", "Qwen3"),
            ("general.size_label", "0.6B"),
            ("general.license", "apache-2.0"),
            ("general.license.link", "https://example.org/Qwen3-0.6B/LICENSE"),
            ("general.base_model.0.name", "Qwen3 0.6B Base"),
            ("general.quantized_by", "Unsloth"),
            ("general.repo_url", "https://example.org/unsloth"),
            ("quantize.imatrix.file", "Qwen3-0.6B-GGUF/imatrix_unsloth.dat"),
            ("quantize.imatrix.dataset", "unsloth_calibration_Qwen3-0.6B.txt"),
        ] {
            file.text(key, text);
        }
        for (key, number) in [
            ("general.file_type", 15),
            ("general.quantization_version", 2),
            ("general.base_model.count", 1),
            ("quantize.imatrix.entries_count", 196),
            ("quantize.imatrix.chunks_count", 685),
        ] {
            file.u32(key, number);
        }
        let c = of(&file)?;
        assert!(logits(&c)? == want, "{name}");
    }
    Ok(())
}

/// Families, and tools, that are none of ours.
#[test]
fn others_are_refused_by_name() {
    let refused = |fields: Value, words: &[&str]| {
        let mut m = Model::golden("a", "");
        for (field, value) in fields.as_object().unwrap() {
            m.config[field] = value.clone();
        }
        let e = m.open().unwrap_err();
        let text = e.to_string();
        assert!(e.code() == Code::ConfigInvalid && words.iter().all(|w| text.contains(w)), "{text}");
    };
    let mxfp4 = json!({"quant_method": "mxfp4", "modules_to_not_convert":
        ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]});
    let oss = ["GptOssForCausalLM"];
    refused(
        json!({"model_type": "gpt_oss", "architectures": oss, "quantization_config": mxfp4}),
        &["gpt_oss"],
    );
    let moe = json!({"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]});
    refused(moe, &["qwen3_5_moe"]);
    refused(json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}), &["qwen3_moe"]);
    refused(json!({"quantization_config": mxfp4}), &["quant_method", "mxfp4"]);
    let mlx = json!({"group_size": 64, "bits": 8, "mode": "affine"});
    refused(json!({"quantization": mlx, "quantization_config": mlx}), &["quantization: bits", "have: 8"]);
    refused(json!({"quantization_config": {"quant_method": "hqq"}}), &["quant_method", "hqq"]);
}

fn of(file: &File) -> Result<Checkpoint> {
    Checkpoint::from_files("m", vec![("m.gguf".into(), Bytes::from(file.bytes()))])
}

fn logits(c: &Checkpoint) -> Result<Vec<f32>> {
    let setup = Setup { all_logits: true, ..Setup::default() };
    let dispatch = setup.dispatch()?;
    let loaded = setup.load(c, &dispatch)?;
    let mut got = Vec::new();
    setup.runner(&loaded)?.accept_all(&[5, 17, 3, 200, 41], &mut |rows| got.extend_from_slice(rows))?;
    assert!(!got.is_empty() && got.iter().all(|v| v.is_finite()));
    Ok(got)
}

fn healthy(like: &str, c: &Checkpoint) {
    let bad: Vec<_> = verify(c).into_iter().filter(|f| f.severity != Severity::Note).collect();
    assert!(bad.is_empty(), "{like}: {bad:?}");
}

fn scales_of_cache(m: &mut Model) {
    for part in ["k", "v"] {
        for i in 0..2 {
            let name = format!("model.layers.{i}.self_attn.{part}_proj.{part}_scale");
            m.tensors.push(Tensor::new(&name, "F32", &[], 1f32.to_le_bytes().to_vec()));
        }
    }
}
