//! Models found and read as transformers does: in the cache of the Hub, without the `model.` prefix, with its
//! sampling wishes.
use crate::{document, err, golden, golden_arg, json, out, q4, run};
use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// Copies the files of a model.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(from).unwrap().map(Result::unwrap).filter(|f| f.path().is_file()) {
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo")
}

#[test]
fn an_id_of_the_hub_is_found_in_the_local_cache() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("hub/models--acme--tiny-1.0");
    copy(&demo(), &model.join("snapshots/0123abcd"));
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), "0123abcd\n").unwrap();
    let q4 = |args: &[&str]| {
        q4().args(args).env_remove("HF_HUB_CACHE").env("HF_HOME", home.path()).output().unwrap()
    };
    for verb in [
        &["generate", "acme/tiny-1.0", "-p", "Hi", "-n", "2"][..],
        &["tokenize", "acme/tiny-1.0", "Hi"],
        &["inspect", "acme/tiny-1.0"],
        &["explain", "acme/tiny-1.0"],
    ] {
        let output = q4(verb);
        assert!(output.status.success(), "{verb:?}: {}", err(&output));
    }
    for (id, said) in [("acme/other", "models--acme--other"), ("acme/half", "refs")] {
        fs::create_dir_all(home.path().join("hub/models--acme--half")).unwrap();
        let output = q4(&["--json", "generate", id, "-p", "Hi"]);
        assert_eq!(output.status.code(), Some(4), "{}", err(&output));
        let error = document("error", &output);
        assert!(error["have"].as_str().unwrap().contains(said), "{error}");
        assert!(error["fix"].as_str().unwrap().contains(&format!("hf download {id}")), "{error}");
    }
    // A name that leads out of the cache is none.
    fs::write(model.join("refs/main"), "../../../..").unwrap();
    assert_eq!(q4(&["inspect", "acme/tiny-1.0"]).status.code(), Some(4));
    // A path that exists is itself.
    copy(&demo(), &home.path().join("acme/tiny-1.0"));
    let output = crate::q4()
        .args(["inspect", "acme/tiny-1.0"])
        .env("HF_HOME", home.path())
        .current_dir(home.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", err(&output));
}

#[test]
fn a_base_model_is_read_under_its_names_in_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = fs::read(golden("qwen3_tiny_a/model.safetensors")).unwrap();
    let whole = SafeTensors::deserialize(&bytes).unwrap();
    let short = |name: &str| name.strip_prefix("model.").unwrap_or(name).to_owned();
    let all: Vec<(String, TensorView<'_>)> =
        whole.tensors().into_iter().map(|(n, t)| (short(&n), t)).collect();
    let base: Vec<_> = all.iter().filter(|(name, _)| name != "lm_head.weight").cloned().collect();
    let config = fs::read_to_string(golden("qwen3_tiny_a/config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let model = |name: &str, tensors: &[(String, TensorView<'_>)], tied: bool| {
        let path = dir.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("model.safetensors"), serialize(tensors.to_vec(), None).unwrap()).unwrap();
        let mut config = config.clone();
        config["tie_word_embeddings"] = tied.into();
        fs::write(path.join("config.json"), config.to_string()).unwrap();
        path.display().to_string()
    };
    let logits = |model: &str, name: &str| {
        let file = dir.path().join(name);
        json("logits", &[model, "--ids", "1,2,3", "--out", file.to_str().unwrap()]);
        fs::read(file).unwrap()
    };
    let tied = config["tie_word_embeddings"] == true;
    let stripped = model("stripped", &all, tied);
    assert!(
        logits(&stripped, "a") == logits(&golden_arg("qwen3_tiny_a"), "b"),
        "other names, the same model"
    );
    assert!(!logits(&model("tied", &base, true), "c").is_empty());
    let headless = run(&["explain", &model("headless", &base, false)]);
    assert_eq!(headless.status.code(), Some(4), "{}", out(&headless));
    assert!(err(&headless).contains("without its head"), "{}", err(&headless));
}

#[test]
fn wishes_that_nothing_obeys_are_named() {
    let dir = tempfile::tempdir().unwrap();
    copy(&demo(), dir.path());
    let file = dir.path().join("generation_config.json");
    let model = dir.path().to_str().unwrap();
    fs::write(&file, r#"{"no_repeat_ngram_size": 3, "top_k": -1, "do_sample": true}"#).unwrap();
    let output = run(&["generate", model, "-p", "Hi", "-n", "1", "--seed", "1"]);
    assert!(output.status.success(), "{}", err(&output));
    assert!(err(&output).contains("no_repeat_ngram_size"), "{}", err(&output));
    fs::write(&file, r#"{"no_repeat_ngram_size": 0, "top_k": -2}"#).unwrap();
    let output = run(&["generate", model, "-p", "Hi", "-n", "1"]);
    assert!(output.status.code() == Some(4) && err(&output).contains("top_k: need"), "{}", err(&output));
}
