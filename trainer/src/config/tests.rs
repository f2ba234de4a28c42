use super::*;

const MINIMAL: &str = "[data]\ntrain = [\"a.jsonl\"]\n";

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

#[test]
fn defaults_presets_files_and_overrides_come_in_this_order() {
    let c = Config::parse(MINIMAL, &[]).expect("valid");
    assert_eq!((c.optimizer.state, c.train.clip), (StateFormat::F32, 1.0));
    let text =
        format!("{MINIMAL}[memory]\npreset = \"full-24g\"\n[optimizer]\nlr = 2e-5\nstate = \"nvfp4\"\n");
    let c = Config::parse(&text, &[]).expect("valid");
    assert_eq!(
        (c.optimizer.state, c.optimizer.master, c.optimizer.lr),
        (StateFormat::Nvfp4, MasterFormat::Bf16, 2e-5)
    );
    assert!(c.train.update_in_backward && c.train.recompute);
    let o = pairs(&[
        ("optimizer.state", "8bit"),
        ("optimizer.lr", "1e-3"),
        ("memory.preset", "full-128g"),
        ("data.train", "[\"x.tsv\", \"y.tsv\"]"),
        ("behaviour.gates.ufo", "1"),
        ("behaviour.suite", "b.jsonl"),
    ]);
    let c = Config::parse(&text, &o).expect("valid");
    assert_eq!(
        (c.optimizer.state, c.optimizer.master, c.optimizer.lr),
        (StateFormat::Int8, MasterFormat::F32, 1e-3)
    );
    assert_eq!((c.data.train.paths.len(), c.behaviour.gates["ufo"]), (2, 1.0));
    assert!(Config::parse(MINIMAL, &pairs(&[("memory.preset", "lora-8g")])).expect("valid").lora.is_some());
}

#[test]
fn every_problem_is_in_one_error() {
    let text = "[data]\nseq = 1\ntrian = [\"a\"]\n[optimizer]\nlr = -1.0\nstate = \"5bit\"\nbeta2 = 1\n[colour]\nx = 1\n\
                [train]\nsteps = \"ten\"\nupdate_in_backward = true\n[memory]\nlimit = \"much\"\n";
    let e = Config::parse(text, &pairs(&[("train.nonsense", "1"), ("lr", "1")]))
        .expect_err("problems")
        .to_string();
    for field in [
        "data.seq",
        "data.trian",
        "data.train",
        "optimizer.lr",
        "optimizer.state",
        "optimizer.beta2",
        "colour",
        "train.steps",
        "train.clip_scope",
        "memory.limit",
        "train.nonsense",
        "lr: need section.field",
    ] {
        assert!(e.contains(field), "{field} is missing in {e}");
    }
    assert!(e.contains("12 problems"), "{e}");
    assert_eq!(Config::parse("[data", &[]).expect_err("no TOML").code(), Code::Usage);
}

#[test]
fn a_number_is_a_text_where_a_text_is_meant() {
    let given = [("memory.limit", "129400934"), ("checkpoint.dir", "2024")];
    let c = Config::parse(MINIMAL, &pairs(&given)).expect("valid");
    assert_eq!(c.memory.limit.as_deref(), Some("129400934"));
    assert_eq!(c.checkpoint.dir.as_deref(), Some(std::path::Path::new("2024")));
    let e = Config::parse(MINIMAL, &pairs(&[("optimizer.state", "5")])).expect_err("no such state");
    assert!(e.to_string().contains("optimizer.state: need one of"), "{e}");
}

#[test]
fn the_effective_configuration_reads_back() {
    for preset in [Preset::None, Preset::Full128g, Preset::Full24g, Preset::Lora8g] {
        let mut c = Config::preset(preset);
        c.data.train = vec!["a b.jsonl".into()].into();
        c.behaviour.suite = Some("s".into());
        c.behaviour.gates.insert("who-am-i".into(), 0.95);
        let text = c.to_toml().expect("TOML");
        assert_eq!(Config::parse(&text, &[]).expect("valid"), c, "{text}");
    }
}

#[test]
fn paths_are_relative_to_the_file() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("run.toml");
    std::fs::write(&path, MINIMAL).expect("written");
    let c = Config::from_file(&path, &pairs(&[("data.valid", "[\"v.jsonl\"]")])).expect("valid");
    assert_eq!(
        (c.data.train.paths[0].clone(), c.data.valid[0].clone()),
        (dir.path().join("a.jsonl"), "v.jsonl".into())
    );
    assert_eq!(c.model.path, Path::new("demo"));
}

#[test]
fn files_are_mixed_as_people_write_it() {
    let mix = |text: &str| Config::parse(&format!("[data]\ntrain = {text}\n"), &[]).map(|c| c.data.train);
    let weighed = Mix { paths: vec!["a.jsonl".into(), "b".into()], weights: vec![1.0, 3.0] };
    for text in [
        "[\"a.jsonl\", { path = \"b\", weight = 3 }]",
        "{ \"a.jsonl\" = 1, b = 3.0 }",
        "[{ path = \"a.jsonl\" }, { b = 3 }]",
    ] {
        assert_eq!(mix(text).expect(text), weighed, "{text}");
    }
    assert_eq!(mix("\"a\"").expect("one"), vec!["a".into()].into());
    for text in
        ["[1]", "3", "[{ path = \"a\", wieght = 2 }]", "{ a = \"x\" }", "[{}]", "{ a = 0 }", "{ a = -1.0 }"]
    {
        let e = mix(text).expect_err(text).to_string();
        assert!(e.contains("data.train") && e.contains("weight"), "{text}: {e}");
    }
    let text = "[data]\ntrain = [{ path = \"a\", weight = 2.5 }, \"b\"]\n[train]\nepochs = 2.5\n";
    let c = Config::parse(text, &[]).expect("valid");
    assert_eq!(Config::parse(&c.to_toml().expect("TOML"), &[]).expect("valid"), c);
    assert_eq!(Config::parse(&c.commented().expect("TOML"), &[]).expect("valid"), c);
}

#[test]
fn a_run_is_as_long_as_its_steps_or_its_epochs_say() {
    let parse = |train: &str, o: &[(&str, &str)]| {
        Config::parse(&format!("{MINIMAL}[train]\n{train}\n"), &pairs(o))
            .map(|c| (c.train.steps, c.train.epochs))
    };
    assert_eq!(parse("epochs = 2", &[]).expect("epochs"), (1000, Some(2.0)));
    assert!(parse("epochs = 2\nsteps = 3", &[]).expect_err("both").to_string().contains("train.epochs"));
    // The line has the last word.
    assert_eq!(parse("steps = 3", &[("train.epochs", "1")]).expect("epochs"), (1000, Some(1.0)));
    assert_eq!(parse("epochs = 2", &[("train.steps", "7")]).expect("steps"), (7, None));
    assert!(parse("", &[("train.steps", "7"), ("train.epochs", "7")]).is_err());
    for epochs in ["0", "-1.0", "\"two\"", "inf", "true"] {
        assert!(parse(&format!("epochs = {epochs}"), &[]).is_err(), "{epochs}");
    }
    let random = [("model.shape", "0.6b"), ("model.init", "random")];
    assert!(parse("epochs = 1", &random).expect_err("no data").to_string().contains("train.steps"));
}
