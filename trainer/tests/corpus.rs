//! A tiny model learns a small corpus from nothing, and its export is as good as it was in training.
#![cfg(feature = "torch")]
use q4_trainer::corpus::{Sizes, generate};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Nats a token on held-out rows: 7.6 before the first step; 1.33 were seen.
const STATED: f64 = 1.5;

fn report(dir: &Path, more: &[&str]) -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_q4-train"))
        .current_dir(dir)
        .args(["run.toml", "--threads", "1", "--quiet", "--json"])
        .args(more)
        .output()
        .expect("q4-train starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("a report")
}

#[test]
fn a_small_corpus_is_learnt() {
    let dir = tempfile::tempdir().expect("directory");
    let dir = dir.path();
    generate(1, Sizes { train: 600, valid: 40 }).write(&dir.join("corpus")).expect("written");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo");
    std::fs::create_dir(dir.join("model")).expect("directory");
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(demo.join(file), dir.join("model").join(file)).expect("copied");
    }
    let config = r#"{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":96,"intermediate_size":256,
        "num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32,"vocab_size":2048,
        "max_position_embeddings":128,"rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":true,
        "hidden_act":"silu","attention_bias":false,"eos_token_id":2,"torch_dtype":"bfloat16"}"#;
    std::fs::write(dir.join("model/config.json"), config).expect("written");
    let toml = "[model]\npath = \"model\"\ninit = \"random\"\n[data]\ntrain = [\"corpus/train.jsonl\"]\n\
        valid = [\"corpus/valid.jsonl\"]\nsupervise = \"all\"\neval_supervise = \"all\"\npacking = \"stream\"\n\
        eval_packing = \"stream\"\nseq = 96\nrows = 4\n[train]\nsteps = 500\n[optimizer]\nlr = 5e-3\n\
        [schedule]\nkind = \"linear\"\nwarmup = 20\nmin_ratio = 0.0\n[export]\ndir = \"out\"\n";
    std::fs::write(dir.join("run.toml"), toml).expect("written");
    let loss = |r: &Value| r["valid_loss"].as_f64().expect("a loss");
    let before = loss(&report(dir, &["--eval-only"]));
    assert!(before > 7.0, "{before} before the first step");
    let after = loss(&report(dir, &[]));
    assert!(after < STATED, "{after} nats a token, stated {STATED}");
    let exported = report(
        dir,
        &[
            "--eval-only",
            "--set",
            "model.path=out/modelopt",
            "--set",
            "model.init=checkpoint",
            "--set",
            "quant.weights=none",
        ],
    );
    let gap = (loss(&exported) - after).abs();
    assert!(gap < 1e-5, "{} exported, {after} in training", loss(&exported));
    println!(
        "{before:.3} before, {after:.4} after 500 steps, {:.4} exported, {gap:.2e} apart",
        loss(&exported)
    );
}
