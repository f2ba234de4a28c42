//! `config.json`, made of metadata.
mod support;

use q4_core::Code;
use q4_gguf::{Gguf, config, generation_config, gguf_name, hf_name, tokenizer_config, weights};
use serde_json::{Value, json};
use support::{File, small};

fn made(file: &File) -> q4_core::Result<Value> {
    config(&Gguf::parse("a.gguf", &file.bytes()).expect("a file"))
}

fn refused(file: &File) -> String {
    let error = made(file).expect_err("must be refused");
    assert_eq!(error.code(), Code::ConfigInvalid);
    error.to_string()
}

#[test]
fn qwen3() {
    let expected = json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": null,
        "vocab_size": 6,
        "tie_word_embeddings": true,
        "use_sliding_window": false,
        "attention_bias": false,
        "eos_token_id": 4,
        "torch_dtype": "float16",
    });
    assert_eq!(made(&small()).expect("valid"), expected);
    let untied = small().tensor("output.weight", &[32, 6], 1, 384);
    assert_eq!(made(&untied).expect("valid")["tie_word_embeddings"], false);
    let biased = small().tensor("blk.0.attn_q.bias", &[64], 0, 256);
    assert_eq!(made(&biased).expect("valid")["attention_bias"], true);
}

#[test]
fn qwen2_with_what_its_files_leave_out() {
    let file = File::new()
        .text("general.architecture", "qwen2")
        .u32("qwen2.block_count", 24)
        .u32("qwen2.context_length", 32768)
        .u32("qwen2.embedding_length", 896)
        .u32("qwen2.feed_forward_length", 4864)
        .u32("qwen2.attention.head_count", 14)
        .f32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
        .tensor("token_embd.weight", &[32, 10], 8, 340);
    let c = made(&file).expect("valid");
    assert_eq!(c["architectures"], json!(["Qwen2ForCausalLM"]));
    assert_eq!((&c["head_dim"], &c["num_key_value_heads"]), (&json!(64), &json!(14)));
    assert_eq!(c["rope_theta"], 10_000.0);
    assert!(c.get("torch_dtype").is_none() && c.get("attention_bias").is_none());
    let odd = refused(&file.without("qwen2.attention.head_count").u32("qwen2.attention.head_count", 13));
    assert!(odd.contains("qwen2.attention.key_length: need a width"), "{odd}");
}

#[test]
fn scaling_of_positions() {
    let yarn = small()
        .text("qwen3.rope.scaling.type", "yarn")
        .f32("qwen3.rope.scaling.factor", 4.0)
        .u32("qwen3.rope.scaling.original_context_length", 32768);
    let expected = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768 });
    assert_eq!(made(&yarn).expect("valid")["rope_scaling"], expected);
    let fast = made(&yarn.clone().f32("qwen3.rope.scaling.yarn_beta_fast", 16.0)).expect("valid");
    assert_eq!(fast["rope_scaling"]["beta_fast"], 16.0);
    let other = refused(&yarn.f32("qwen3.rope.scaling.attn_factor", 0.5));
    assert!(other.contains("attn_factor: need 1 or nothing, have 5e-1"), "{other}");

    let linear = small().text("qwen3.rope.scaling.type", "linear").f32("qwen3.rope.scaling.factor", 2.0);
    let expected = json!({ "rope_type": "linear", "factor": 2.0 });
    assert_eq!(made(&linear).expect("valid")["rope_scaling"], expected);
    assert_eq!(
        made(&small().text("qwen3.rope.scaling.type", "none")).expect("valid")["rope_scaling"],
        Value::Null
    );
    let long = refused(&small().text("qwen3.rope.scaling.type", "longrope"));
    assert!(long.contains("need none, linear or yarn, have `longrope`"), "{long}");
    assert!(refused(&small().text("qwen3.rope.scaling.type", "yarn")).contains("rope.scaling.factor: need"));
}

#[test]
fn every_problem_is_named() {
    let file = small()
        .without("qwen3.embedding_length")
        .without("qwen3.block_count")
        .without("qwen3.attention.value_length")
        .without("qwen3.attention.layer_norm_rms_epsilon")
        .f32("qwen3.block_count", 1.0)
        .u32("qwen3.attention.value_length", 8)
        .f32("qwen3.attention.layer_norm_rms_epsilon", f32::NAN)
        .u32("qwen3.rope.dimension_count", 8)
        .u32("qwen3.vocab_size", 7)
        .u32("qwen3.expert_count", 8)
        .flag("qwen3.attention.causal", false);
    let absent = refused(&small().without("qwen3.attention.layer_norm_rms_epsilon"));
    assert!(absent.contains("layer_norm_rms_epsilon: need a number above 0, have nothing"), "{absent}");
    let text = refused(&file);
    for problem in [
        "8 problems",
        "qwen3.embedding_length: need a whole number above 0, have nothing",
        "qwen3.block_count: need a whole number above 0, have 1e0",
        "qwen3.attention.value_length: need 16, the width of a head, have 8",
        "qwen3.attention.layer_norm_rms_epsilon: need a number above 0, have NaN",
        "qwen3.rope.dimension_count: need 16",
        "qwen3.vocab_size: need 6, the rows of the embedding, have 7",
        "qwen3.expert_count: need no such key, for it is not understood, have 8",
        "qwen3.attention.causal: need true, have false",
    ] {
        assert!(text.contains(problem), "{problem} is missing in\n{text}");
    }
}

#[test]
fn other_models_are_refused_by_name() {
    let other = small().without("general.architecture");
    assert!(refused(&other).contains("have: nothing"));
    let text = refused(&other.text("general.architecture", "qwen3moe"));
    assert!(text.contains("need: `qwen3` or `qwen2`\n  have: `qwen3moe`"), "{text}");
    assert!(refused(&small().text("general.type", "adapter")).contains("have: `adapter`"));
    let part = refused(&small().entry("split.count", 2, &[3, 0]));
    assert!(part.contains("one of 3 files") && part.contains("--merge"), "{part}");
    let mut file = small();
    file.tensors.remove(0);
    assert_eq!(made(&file).expect_err("no embedding").code(), Code::TensorMissing);
    let flat = File { tensors: Vec::new(), ..small() }.tensor("token_embd.weight", &[32], 0, 128);
    assert_eq!(made(&flat).expect_err("no matrix").code(), Code::TensorShape);
}

#[test]
fn weights_have_the_names_of_transformers() {
    let bytes = small().tensor("rope_freqs.weight", &[8], 0, 32).bytes();
    let gguf = Gguf::parse("a.gguf", &bytes).expect("valid");
    let weights = weights(&gguf).expect("distinct");
    let found: Vec<_> = weights.iter().map(|(name, t)| (name.as_str(), t.shape())).collect();
    assert_eq!(
        found,
        [
            ("model.embed_tokens.weight", &[6, 32][..]),
            ("model.layers.0.self_attn.q_proj.weight", &[64, 32]),
            ("model.layers.0.self_attn.q_proj.weight_scale_2", &[1]),
            ("model.norm.weight", &[32]),
            ("rope_freqs.weight", &[8]),
        ]
    );
    for (name, tensor) in &weights[..4] {
        assert_eq!(gguf_name(name).as_deref(), Some(tensor.name));
        assert_eq!(hf_name(tensor.name).as_deref(), Some(name.as_str()));
    }
    let bytes = small().tensor("model.norm.weight", &[32], 0, 128).bytes();
    let gguf = Gguf::parse("a.gguf", &bytes).expect("valid");
    let text = q4_gguf::weights(&gguf).expect_err("two of a name").to_string();
    assert!(text.contains("`model.norm.weight` is stored twice"), "{text}");
}

#[test]
fn what_stands_beside_the_tokenizer() {
    let made = |file: File, of: fn(&Gguf<'_>) -> q4_core::Result<Value>| {
        of(&Gguf::parse("a.gguf", &file.bytes()).expect("a file"))
    };
    let file = small()
        .without("tokenizer.ggml.eos_token_id")
        .u32("tokenizer.ggml.eos_token_id", 5)
        .u32("tokenizer.ggml.bos_token_id", 4)
        .text("tokenizer.chat_template", "{{ messages }}");
    let c = made(file.clone(), tokenizer_config).expect("valid");
    assert_eq!((&c["eos_token"], &c["bos_token"]), (&json!("<think>"), &json!("<|endoftext|>")));
    assert_eq!(c["chat_template"], "{{ messages }}");
    assert!(c.get("pad_token").is_none());
    let c = made(file.clone(), generation_config).expect("valid");
    assert_eq!(c, json!({ "bos_token_id": 4, "eos_token_id": [5, 4], "do_sample": false }));

    let file =
        file.f32("general.sampling.temp", 0.6).entry("general.sampling.top_k", 5, &20i32.to_le_bytes());
    let c = made(file.clone(), generation_config).expect("valid");
    assert_eq!((&c["do_sample"], &c["temperature"], &c["top_k"]), (&json!(true), &json!(0.6), &json!(20)));
    let error = made(file.text("general.sampling.top_p", "x"), generation_config).expect_err("a text");
    assert_eq!(error.code(), Code::ConfigInvalid);

    let beyond = small().u32("tokenizer.ggml.padding_token_id", 6);
    for of in [tokenizer_config, generation_config] {
        assert_eq!(made(beyond.clone(), of).expect_err("no token").code(), Code::TokenizerInvalid);
    }
    let error = made(small().u32("tokenizer.chat_template", 1), tokenizer_config).expect_err("no text");
    assert_eq!(error.code(), Code::TemplateInvalid);
}
