//! A killed run goes on as if nothing had happened, to the byte.
#![cfg(feature = "torch")]
use q4_trainer::{checkpoint, metrics, rng::Philox};
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

/// The step of the newest checkpoint that loads, 0 without one; a damaged one is never passed over.
fn newest(dir: &Path) -> u64 {
    let found = checkpoint::newest(dir).expect("what is there loads");
    found.map_or(0, |loaded| {
        assert!(loaded.damaged.is_empty(), "{:?}", loaded.damaged);
        assert_eq!(loaded.state().expect("a state").step, loaded.step);
        loaded.step
    })
}

/// Kills at random moments of runs that go on each time; every other one as soon as a save has begun.
/// Q4_KILLS says how many, Q4_SEED which moments.
#[test]
fn no_kill_costs_more_than_the_save_it_hits() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v}: a number")))
    };
    let (kills, rng) = (number("Q4_KILLS", 10), Philox::new(number("Q4_SEED", 1), 0, 0));
    let (a, b) = (tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b"));
    let sets = ["--set", "checkpoint.every=1", "--set", "checkpoint.keep=2", "--resume"];
    for dir in [a.path(), b.path()] {
        prepare(dir);
    }
    let begun = Instant::now();
    assert!(start(a.path(), &sets).wait().expect("ends").success());
    // How far away a moment may lie; half of the runs shall end by themselves, however fast the machine is
    // just now.
    let mut reach = begun.elapsed();
    let ck = b.path().join("ck");
    let last = format!("ck/step-{STEPS:09}");
    let saving = || {
        let names = std::fs::read_dir(&ck).into_iter().flatten().flatten().map(|e| e.file_name());
        names.into_iter().any(|n| n.to_string_lossy().starts_with(".partial-"))
    };
    let (mut done, mut inside, mut equal, mut runs) = (0, 0, 0, 0);
    while done < kills {
        runs += 1;
        assert!(runs < 20 * (kills + 1), "runs end before they can be killed");
        let before = newest(&ck);
        let mut child = start(b.path(), &sets);
        let begun = Instant::now();
        let share = f64::from(rng.word(2 * runs)) / f64::from(u32::MAX);
        let mut at = reach.mul_f64(share);
        let mut aimed = runs % 2 == 0;
        let ended = loop {
            if let Some(status) = child.try_wait().expect("asked") {
                assert!(status.success(), "{status}");
                break true;
            }
            // A save that begins after the random moment; the blow falls somewhere in the next three
            // milliseconds.
            if aimed && begun.elapsed() >= at && saving() {
                aimed = false;
                at = begun.elapsed() + Duration::from_micros(u64::from(rng.below(2 * runs + 1, 3000)));
            }
            if !aimed && begun.elapsed() >= at {
                child.kill().expect("killed");
                child.wait().expect("reaped");
                break false;
            }
            std::thread::sleep(Duration::from_micros(100));
        };
        let after = newest(&ck);
        assert!(after >= before, "step {before} was there and {after} is left");
        if ended {
            let (whole, parts) = (files(&a.path().join(&last)), files(&b.path().join(&last)));
            assert!(whole == parts, "run {runs}: other bytes than without kills");
            equal += 1;
            reach = reach.mul_f64(0.9);
            std::fs::remove_dir_all(&ck).expect("removed");
            continue;
        }
        done += 1;
        reach = reach.mul_f64(1.1);
        inside += u64::from(saving());
        let taken = metrics::read(&ck.join("metrics.ndjson")).unwrap_or_default();
        let taken = taken.iter().filter(|r| r.kind == "train").map(|r| r.step).max().unwrap_or(0);
        assert!(taken <= after + 1, "step {taken} was taken, the newest checkpoint is of {after}");
    }
    assert!(start(b.path(), &sets).wait().expect("ends").success());
    assert!(files(&a.path().join(&last)) == files(&b.path().join(&last)), "other bytes than without kills");
    println!("kills {done}, inside a save {inside}, ends compared {}", equal + 1);
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
