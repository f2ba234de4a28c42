//! A killed run goes on as if nothing had happened, to the byte.
#![cfg(feature = "torch")]
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const STEPS: u64 = 12;

/// A tiny model's directory, its data and its configuration.
fn prepare(dir: &Path) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo");
    let model = dir.join("model");
    std::fs::create_dir(&model).expect("directory");
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(demo.join(file), model.join(file)).expect("copied");
    }
    let config = r#"{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":64,"intermediate_size":96,
        "num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32,"vocab_size":2048,
        "max_position_embeddings":128,"rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":true,
        "hidden_act":"silu","attention_bias":false,"eos_token_id":2,"torch_dtype":"bfloat16"}"#;
    std::fs::write(model.join("config.json"), config).expect("written");
    let rows: String = (0..40)
        .map(|i| {
            format!(
                "{{\"messages\":[{{\"role\":\"user\",\"content\":\"What is {i} plus 1?\"}},\
                 {{\"role\":\"assistant\",\"content\":\"{i} plus 1 is {}.\"}}]}}\n",
                i + 1
            )
        })
        .collect();
    std::fs::write(dir.join("data.jsonl"), rows).expect("written");
    let toml = format!(
        "[model]\npath = \"model\"\ninit = \"random\"\n[data]\ntrain = [\"data.jsonl\"]\nvalid = [\"data.jsonl\"]\n\
         seq = 48\nrows = 2\n[train]\nsteps = {STEPS}\naccumulate = 2\n[optimizer]\nlr = 1e-3\n\
         [checkpoint]\ndir = \"ck\"\nevery = 2\nkeep = 20\n[eval]\nevery = 4\n"
    );
    std::fs::write(dir.join("run.toml"), toml).expect("written");
}

fn start(dir: &Path, more: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_q4-train"))
        .current_dir(dir)
        .args(["run.toml", "--threads", "1", "--quiet"])
        .args(more)
        .stdout(Stdio::null())
        .spawn()
        .expect("q4-train starts")
}

fn files(checkpoint: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all: Vec<_> = std::fs::read_dir(checkpoint)
        .expect("a checkpoint")
        .map(|e| e.expect("an entry").path())
        .map(|p| (PathBuf::from(p.file_name().expect("a name")), std::fs::read(&p).expect("read")))
        .collect();
    all.sort();
    all
}

#[test]
fn killed_and_resumed_is_uninterrupted() {
    for (state, master) in [("f32", "f32"), ("8bit", "f32"), ("4bit", "bf16"), ("nvfp4", "bf16")] {
        let (a, b) = (tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b"));
        let (state, master) = (format!("optimizer.state={state}"), format!("optimizer.master={master}"));
        let sets = ["--set", state.as_str(), "--set", master.as_str()];
        for dir in [a.path(), b.path()] {
            prepare(dir);
        }
        assert!(start(a.path(), &sets).wait().expect("ends").success());
        let mut child = start(b.path(), &sets);
        let begun = Instant::now();
        while !b.path().join("ck/step-000000004").exists() {
            assert!(begun.elapsed() < Duration::from_secs(300), "no checkpoint");
            assert!(child.try_wait().expect("asked").is_none(), "ended before it could be killed");
            std::thread::sleep(Duration::from_millis(2));
        }
        child.kill().expect("killed");
        child.wait().expect("reaped");
        let resumed = [&sets[..], &["--resume"]].concat();
        assert!(start(b.path(), &resumed).wait().expect("ends").success());
        let last = format!("ck/step-{STEPS:09}");
        let (whole, parts) = (files(&a.path().join(&last)), files(&b.path().join(&last)));
        assert!(whole.len() >= 4, "{} files", whole.len());
        for ((name, x), (other, y)) in whole.iter().zip(&parts) {
            assert_eq!(name, other);
            assert!(x == y, "{state}: {} differs after the kill", name.display());
        }
        // And the next checkpoint before it is another: the comparison can fail.
        let earlier = files(&a.path().join(format!("ck/step-{:09}", STEPS - 2)));
        assert!(earlier.iter().zip(&whole).any(|(x, y)| x != y));
    }
}

#[test]
fn what_cannot_be_done_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    prepare(dir.path());
    let status = |more: &[&str]| {
        let status = start(dir.path(), more).wait().expect("ends");
        status.code().expect("a code")
    };
    assert_eq!(status(&["--memory-limit", "1MiB"]), 7);
    assert_eq!(status(&["--set", "train.stepz=1"]), 2);
    assert_eq!(status(&["--set", "data.train=[\"nowhere.jsonl\"]"]), 4);
}
