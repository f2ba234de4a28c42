use super::*;
use crate::optim::Share;
use crate::plan::{Base, Machine, predict};
use std::os::unix::fs::PermissionsExt;

const LINE: &str = "q4 train run.toml";

fn config(dir: &Path, text: &str) -> Config {
    let text = text.replace("DIR", &dir.display().to_string());
    Config::parse(&format!("[data]\ntrain = [\"a.jsonl\"]\n{text}"), &[]).expect("valid")
}

fn refused(result: Result<()>, code: Code) -> String {
    let e = result.expect_err("refused");
    assert_eq!(e.code(), code, "{e}");
    e.to_string()
}

#[test]
fn a_run_that_keeps_nothing_is_refused_with_the_line_that_works() {
    let dir = tempfile::tempdir().expect("directory");
    let e = refused(keeps_something(&config(dir.path(), ""), LINE), Code::Usage);
    assert!(e.contains("q4 train run.toml --set export.dir=out"), "{e}");
    for kept in ["[export]\ndir = \"DIR/x\"", "[checkpoint]\ndir = \"DIR/x\""] {
        keeps_something(&config(dir.path(), kept), LINE).expect("kept");
    }
}

#[test]
fn taken_names_are_refused_and_free_ones_proposed() {
    let dir = tempfile::tempdir().expect("directory");
    let c = config(dir.path(), "[export]\ndir = \"DIR/out\"\nlayouts = [\"bf16\", \"dat\"]");
    names(&c, LINE).expect("free");
    fs::create_dir(dir.path().join("out")).expect("folder");
    names(&c, LINE).expect("an empty folder is free");
    fs::write(dir.path().join("out/model.dat"), "x").expect("written");
    fs::create_dir(dir.path().join("out-2")).expect("folder");
    let e = refused(names(&c, LINE), Code::Usage);
    assert!(e.contains("out/model.dat: exists") && e.contains("out-3"), "{e}");
    // A link that leads nowhere is a name, too.
    let c = config(dir.path(), "[export]\ndir = \"DIR/out-2\"");
    std::os::unix::fs::symlink("/dev/null/nothing", dir.path().join("out-2/modelopt")).expect("link");
    refused(names(&c, LINE), Code::Usage);
    let c = config(dir.path(), "[export]\ndir = \"DIR/out/model.dat\"");
    assert!(refused(names(&c, LINE), Code::Usage).contains("is no folder"));
    let c = config(dir.path(), "[export]\ndir = \"DIR/o\"\n[checkpoint]\ndir = \"DIR/o/modelopt/ck\"");
    refused(names(&c, LINE), Code::Usage);
}

#[test]
fn used_and_empty_checkpoint_folders_are_told_apart() {
    let dir = tempfile::tempdir().expect("directory");
    let text = "[checkpoint]\ndir = \"DIR/ck\"\n";
    names(&config(dir.path(), text), LINE).expect("new");
    let e = refused(names(&config(dir.path(), &format!("{text}resume = true")), LINE), Code::Usage);
    assert!(e.contains("no such folder"), "{e}");
    for (name, step) in [("other", 3), ("ck-1", 12)] {
        fs::create_dir_all(dir.path().join(name).join(format!("step-{step:09}"))).expect("folder");
    }
    fs::create_dir(dir.path().join("ck")).expect("folder");
    let e = refused(names(&config(dir.path(), &format!("{text}resume = true")), LINE), Code::Usage);
    let at = |what: &str| e.find(what).unwrap_or_else(|| panic!("{what} in {e}"));
    assert!(at("ck-1 (step 12)") < at("other (step 3)") && e.contains("ck-1, or begin without"), "{e}");
    fs::create_dir_all(dir.path().join("ck/step-000000006")).expect("folder");
    let e = refused(names(&config(dir.path(), text), LINE), Code::Usage);
    assert!(e.contains("step 6") && e.contains("--resume"), "{e}");
    names(&config(dir.path(), &format!("{text}resume = true")), LINE).expect("goes on");
}

#[test]
fn what_is_predicted_is_compared_with_the_disk() {
    let dir = tempfile::tempdir().expect("directory");
    let json = r#"{"model_type": "qwen3", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 2048,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": true}"#;
    let shapes = Shapes::of(&q4_model::config::DecoderConfig::parse(json.as_bytes()).expect("configuration"));
    let c = config(
        dir.path(),
        "[export]\ndir = \"DIR/o\"\nlayouts = [\"bf16\", \"modelopt\"]\n[checkpoint]\ndir = \"DIR/ck\"\n",
    );
    let plan = predict(&shapes, &c, &Machine { compute: 4, context: 0 }, Base::Merged, Share::WHOLE);
    let found = bytes(&c, &shapes, &plan, 0);
    let weights = shapes.elements(|_| true);
    assert!(found.checkpoint > 12 * weights && found.checkpoint < 12 * weights + (8 << 20), "{found:?}");
    assert!(found.exports[0].0 > 2 * weights && found.exports[1].1 > 0);
    space(&c, &found).expect("a few megabytes");
    let e = refused(space(&c, &Bytes { checkpoint: 1 << 60, ..found }), Code::Io);
    assert!(e.contains("free") && e.contains("ck: "), "{e}");
}

#[test]
fn folders_are_created_tried_and_held() {
    let dir = tempfile::tempdir().expect("directory");
    let c = config(dir.path(), "[export]\ndir = \"DIR/a/o\"\n[checkpoint]\ndir = \"DIR/ck\"");
    let held = hold(&c).expect("held");
    assert!(held.store.is_some() && dir.path().join("a/o").is_dir());
    let other = config(dir.path(), "[export]\ndir = \"DIR/a/o\"");
    assert_eq!(hold(&other).err().expect("in use").code(), Code::Usage);
    drop(held);
    hold(&other).expect("free again");
    assert_eq!(fs::read_dir(dir.path().join("a/o")).expect("listed").count(), 0, "nothing is left behind");
    let both = config(dir.path(), "[export]\ndir = \"DIR/x\"\n[checkpoint]\ndir = \"DIR/./x\"");
    hold(&both).expect("one folder for both");

    let shut = dir.path().join("shut");
    fs::create_dir(&shut).expect("folder");
    fs::set_permissions(&shut, fs::Permissions::from_mode(0o500)).expect("mode");
    // The administrator may write everywhere.
    if fs::write(shut.join("x"), "").is_err() {
        let c = config(dir.path(), "[export]\ndir = \"DIR/shut/o\"");
        assert_eq!(hold(&c).err().expect("refused").code(), Code::Io);
    }
    let c = config(dir.path(), "[export]\ndir = \"/dev/null/o\"");
    assert_eq!(hold(&c).err().expect("refused").code(), Code::Io);
}
