//! Adapters beside some modules, adapters that were trained before, and weights that stay, through the
//! program.
#![cfg(feature = "torch")]
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::Path;
use tiny::{files, line, prepare, run};

mod tiny;

const LORA: &str = "[model]\npath = \"demo\"\n[data]\ntrain = [\"data.jsonl\"]\nvalid = [\"data.jsonl\"]\nseq = 48\nrows = 2\n\
    [train]\nsteps = 3\n[optimizer]\nlr = 1e-2\n[lora]\nrank = 4\nbase = \"decoded\"\ntargets = [\"q_proj\", \"v_proj\", \"down_proj\"]\n";

fn ok(dir: &Path, words: &[&str]) -> Value {
    let output = line(dir, &[words, &["--threads", "1", "--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("a report")
}

fn says(dir: &Path, words: &[&str], text: &str) {
    let output = line(dir, &[words, &["--threads", "1"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(text), "need {text}: {said}");
}

#[test]
fn adapters_stand_beside_their_targets_and_are_gone_on_with() {
    let dir = tempfile::tempdir().expect("directory");
    let d = dir.path();
    prepare(d);
    std::fs::write(d.join("lora.toml"), LORA).expect("written");
    for base in ["decoded", "packed"] {
        let set = format!("lora.base={base}");
        let out = format!("export.dir={base}");
        let trained = ok(d, &["lora.toml", "--set", &set, "--set", &out]);
        let peft = d.join(base).join("peft");
        let bytes = std::fs::read(peft.join("adapter_model.safetensors")).expect("adapters");
        let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
        assert_eq!(tensors.len(), 6 * 3 * 2, "{:?}", tensors.names());
        let config: Value =
            serde_json::from_slice(&std::fs::read(peft.join("adapter_config.json")).expect("read"))
                .expect("JSON");
        assert_eq!(config["target_modules"], serde_json::json!(["down_proj", "q_proj", "v_proj"]));
        let part = |name: &str| {
            let name = format!("base_model.model.model.layers.1.self_attn.{name}.weight");
            tensors.tensor(&name).expect("a tensor").data().to_vec()
        };
        assert_ne!(part("q_proj.lora_A"), part("v_proj.lora_A"), "matrices of their own");
        assert!(part("v_proj.lora_B").iter().any(|b| *b != 0), "it learnt");
        // Read again they have the loss they ended with, and written again they are the same bytes.
        let init = format!("lora.init={}", peft.display());
        let again =
            ok(d, &["lora.toml", "--set", &set, "--set", &init, "--set", "lora.rank=9", "--eval-only"]);
        assert_eq!(again["valid_loss"], trained["valid_loss"], "{base}");
        let still = format!("export.dir={base}-again");
        ok(
            d,
            &[
                "lora.toml",
                "--set",
                &set,
                "--set",
                &init,
                "--set",
                &still,
                "--set",
                "optimizer.lr=1e-30",
                "--set",
                "optimizer.weight_decay=0",
                "--set",
                "train.steps=1",
            ],
        );
        assert!(files(&d.join(format!("{base}-again/peft"))) == files(&peft), "{base}: other bytes");
    }
    // Merged, they are base and adapter as well.
    ok(
        d,
        &[
            "lora.toml",
            "--set",
            "lora.base=merged",
            "--set",
            "lora.init=decoded/peft",
            "--set",
            "export.dir=m",
        ],
    );
    says(d, &["lora.toml", "--set", "lora.targets=[\"qkv\"]"], "q_proj");
    says(d, &["lora.toml", "--set", "lora.init=nowhere", "--dry-run"], "adapter_config.json");
    says(d, &["lora.toml", "--set", "train.freeze=[\"*\"]"], "lora.targets");
    let dry = ok(d, &["lora.toml", "--dry-run"]);
    assert_eq!(dry["moves"].as_array().map(Vec::len), Some(6 * 3));
}

#[test]
fn what_is_frozen_keeps_its_bytes() {
    let dir = tempfile::tempdir().expect("directory");
    let d = dir.path();
    prepare(d);
    let still = "train.freeze=[\"model.layers.0.*\", \"model.embed_tokens\"]";
    let lines = ["--set", "checkpoint.dir=c", "--set", "export.layouts=[\"bf16\"]", "--set", "train.steps=2"];
    let words = |out: &'static str, dir: &'static str| [&lines[..], &["--set", out, "--set", dir]].concat();
    let free = run(d, &words("export.dir=free", "checkpoint.dir=c1"));
    assert!(free.status.success(), "{}", String::from_utf8_lossy(&free.stderr));
    let held = run(d, &[&words("export.dir=held", "checkpoint.dir=c2")[..], &["--set", still]].concat());
    assert!(held.status.success(), "{}", String::from_utf8_lossy(&held.stderr));
    let more = ["--set", "optimizer.lr=1e-30", "--set", "optimizer.weight_decay=0"];
    let none = run(d, &[&words("export.dir=none", "checkpoint.dir=c3")[..], &more].concat());
    assert!(none.status.success(), "{}", String::from_utf8_lossy(&none.stderr));
    let read = |name: &str| std::fs::read(d.join(name).join("bf16/model.safetensors")).expect("a model");
    let (free, held, none) = (read("free"), read("held"), read("none"));
    let [free, held, none] = [&free, &held, &none].map(|b| SafeTensors::deserialize(b).expect("safetensors"));
    for (name, t) in held.tensors() {
        let stays = name.contains("layers.0.") || name.contains("embed_tokens");
        let of = |s: &SafeTensors<'_>| s.tensor(&name).expect("a tensor").data().to_vec();
        assert_eq!(t.data() == of(&none), stays || of(&free) == of(&none), "{name}");
    }
    says(d, &["run.toml", "--set", "train.freeze=[\"model.layer.0.*\"]", "--dry-run"], "model.layer.0.*");
    says(d, &["run.toml", "--set", "train.freeze=[\"*.q_proj\"]", "--dry-run"], "one matrix");
}
