//! The ways to lose work in a training, each tried: what must be refused is refused before the first step,
//! and what happens on the way takes nothing with it.
#![cfg(feature = "torch")]
use q4_trainer::{checkpoint, metrics};
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};
use tiny::{STEPS, files, line, prepare, run, start, start_telling, sums};

mod tiny;

/// Says which way was tried.
fn way(name: &str) {
    println!("way to lose work: {name}");
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn steps_taken(dir: &Path, file: &str) -> u64 {
    let lines = metrics::read(&dir.join(file)).unwrap_or_default();
    lines.iter().filter(|r| r.kind == "train").map(|r| r.step).max().unwrap_or(0)
}

/// Ends with this status and these words, and nothing in `dir` has changed.
fn refused(name: &str, dir: &Path, more: &[&str], exit: i32, words: &[&str]) {
    let listed = |dir: &Path| {
        let mut all = Vec::new();
        let mut left = vec![dir.to_owned()];
        while let Some(dir) = left.pop() {
            for entry in std::fs::read_dir(&dir).expect("listed").map(|e| e.expect("an entry")) {
                // The file that is held while a run looks may stay; it says nothing.
                if entry.file_name() == ".lock" {
                    continue;
                }
                let meta = entry.metadata().expect("metadata");
                all.push((entry.path(), meta.len(), meta.modified().expect("a time")));
                if meta.is_dir() {
                    left.push(entry.path());
                }
            }
        }
        all.retain(|(p, ..)| p.is_file());
        all.sort();
        all
    };
    let before = listed(dir);
    ends(name, dir, more, exit, words);
    assert_eq!(listed(dir), before, "{name}");
}

/// Ends before the first step with this status and these words.
fn ends(name: &str, dir: &Path, more: &[&str], exit: i32, words: &[&str]) {
    let output = run(dir, more);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(exit), "{name}: {said}");
    for word in words {
        assert!(said.contains(word), "{name}: {word} is missing in {said}");
    }
    assert!(!said.contains("step 1/"), "{name}: {said}");
    way(name);
}

fn set(key_value: &str) -> [&str; 2] {
    ["--set", key_value]
}

#[test]
fn what_would_be_lost_is_refused_before_the_first_step() {
    let dir = tempfile::tempdir().expect("directory");
    let d = dir.path();
    prepare(d);
    let config = std::fs::read_to_string(d.join("run.toml")).expect("read");
    let keep_nothing = config.replace("dir = \"ck\"\n", "");
    std::fs::write(d.join("run.toml"), keep_nothing).expect("written");
    refused(
        "nothing is kept",
        d,
        &[],
        2,
        &["keep nothing", "q4 train run.toml --threads 1 --set export.dir=out"],
    );
    let dry = run(d, &["--dry-run"]);
    assert!(dry.status.success(), "{}", text(&dry));
    assert!(run(d, &["--eval-only"]).status.success());
    std::fs::write(d.join("run.toml"), config).expect("written");

    // Names that are taken.
    std::fs::create_dir_all(d.join("out/modelopt")).expect("folder");
    std::fs::write(d.join("out/model.dat"), "x").expect("written");
    std::fs::write(d.join("file"), "x").expect("written");
    let export = set("export.dir=out");
    refused("the model's name is taken", d, &export, 2, &["out/modelopt: exists", "export.dir=out-2"]);
    let dat = [&export[..], &set("export.layouts=dat")].concat();
    refused("the name of a .dat file is taken", d, &dat, 2, &["out/model.dat: exists"]);
    std::os::unix::fs::symlink("nowhere", d.join("out/bf16")).expect("link");
    let link = [&export[..], &set("export.layouts=bf16")].concat();
    refused("the name is a link that leads nowhere", d, &link, 2, &["out/bf16: exists"]);
    refused("export.dir is a file", d, &set("export.dir=file"), 2, &["is no folder"]);
    refused("checkpoint.dir is a file", d, &set("checkpoint.dir=file"), 2, &["is no folder"]);
    let inside = [&set("export.dir=o")[..], &set("checkpoint.dir=o/modelopt/ck")].concat();
    refused("checkpoints where the model goes", d, &inside, 2, &["is where a model goes"]);
    let twice = [&set("export.dir=o")[..], &set("export.layouts=[\"bf16\", \"bf16\"]")].concat();
    refused("a layout twice", d, &twice, 2, &["each once"]);
    let none = [&set("export.dir=o")[..], &set("export.layouts=[]")].concat();
    refused("an export of nothing", d, &none, 2, &["at least one of"]);
    refused(
        "a folder that cannot be made for checkpoints",
        d,
        &set("checkpoint.dir=/dev/null/ck"),
        8,
        &["need"],
    );
    refused("a folder that cannot be made for models", d, &set("export.dir=/dev/null/o"), 8, &["need"]);

    // Room.
    refused("checkpoints that no disk takes", d, &set("checkpoint.keep=1000000"), 8, &["too small", "free"]);
    let limited = std::process::Command::new("sh")
        .args(["-c", "ulimit -f 100; exec \"$0\" run.toml --threads 1"])
        .arg(env!("CARGO_BIN_EXE_q4-train"))
        .current_dir(d)
        .output()
        .expect("sh");
    assert_eq!(limited.status.code(), Some(8), "{}", text(&limited));
    assert!(text(&limited).contains("ulimit -f unlimited"), "{}", text(&limited));
    way("files larger than the process may write");

    // Going on with nothing.
    refused("--resume without a folder", d, &["--resume"], 2, &["no such folder", "begin without --resume"]);
    std::fs::create_dir(d.join("ck")).expect("folder");
    refused("--resume in an empty folder", d, &["--resume"], 2, &["a folder without"]);

    // Early ends and best steps that could not be kept.
    let patience =
        |more: &[&'static str]| [&["--set", "eval.patience=2", "--set", "export.dir=o"], more].concat();
    refused("early stopping without evaluations", d, &patience(&set("eval.every=0")), 2, &["eval.every"]);
    refused("early stopping without held-out data", d, &patience(&set("data.valid=[]")), 2, &["data.valid"]);
    let lost = patience(&set("checkpoint.keep_best=false"));
    refused("a best step that is not kept", d, &lost, 2, &["checkpoint.keep_best", "export.step"]);

    for words in [&["init", "run.toml"][..], &["--write-corpus", "out"]] {
        assert_eq!(line(d, words).status.code(), Some(2), "{words:?}");
        way(&format!("{} over what is there", words[0].trim_start_matches("--")));
    }
    assert!(line(d, &["init", "new.toml"]).status.success() && d.join("new.toml").is_file());
}

#[test]
fn a_used_folder_is_gone_on_with_as_it_was_or_not_at_all() {
    let dir = tempfile::tempdir().expect("directory");
    let d = dir.path();
    prepare(d);
    let short = set("train.steps=4");
    let first = run(d, &short);
    assert!(first.status.success(), "{}", text(&first));
    refused("a used checkpoint folder", d, &[], 2, &["has checkpoints of a run", "--resume"]);
    let typo = ["--resume", "--set", "checkpoint.dir=ckk"];
    refused("--resume with a mistyped folder", d, &typo, 2, &["ck (step 4)", "checkpoint.dir=ck,"]);
    std::fs::create_dir_all(d.join("out/modelopt")).expect("folder");
    let taken = ["--resume", "--set", "export.dir=out"];
    refused("--resume to a name that is taken", d, &taken, 2, &["out/modelopt: exists"]);

    std::fs::write(d.join("other.jsonl"), sums(39)).expect("written");
    std::fs::create_dir(d.join("model2")).expect("folder");
    for (name, bytes) in files(&d.join("model")) {
        std::fs::write(d.join("model2").join(name), bytes).expect("written");
    }
    let template = d.join("model2/chat_template.jinja");
    let changed = std::fs::read_to_string(&template).expect("read") + "{# another #}";
    std::fs::write(template, changed).expect("written");
    for (name, change, word) in [
        ("--resume with other data", "data.train=other.jsonl", "data.train: 40 rows"),
        ("--resume with other held-out data", "data.valid=other.jsonl", "data.valid: 40 rows"),
        ("--resume with another model", "model.path=model2", "model: "),
        ("--resume with other rows of tokens", "data.seq=40", "data.seq: 48 -> 40"),
        ("--resume with other rows of a step", "data.rows=4", "data.rows: 2 -> 4"),
        ("--resume with another accumulation", "train.accumulate=1", "train.accumulate: 2 -> 1"),
        ("--resume with another packing", "data.packing=rows", "data.packing"),
        ("--resume with another seed", "train.seed=9", "train.seed: 0 -> 9"),
        ("--resume with other moments", "optimizer.state=8bit", "optimizer.state"),
        ("--resume with other masters", "optimizer.master=bf16", "optimizer.master"),
        ("--resume with another optimiser", "optimizer.beta2=0.9", "optimizer.beta2: 0.95 -> 0.9"),
        ("--resume with another precision", "quant.weights=none", "quant.weights"),
        ("--resume with adapters", "lora.rank=4", "lora.rank"),
    ] {
        let more = [&["--resume"], &set(change)[..]].concat();
        refused(name, d, &more, 2, &["belongs to another run", word, "--allow-changes"]);
    }

    let lines = || metrics::read(&d.join("ck/metrics.ndjson")).expect("metrics");
    let before = lines();
    // What may change is told, and taken.
    let more = ["--resume", "--set", "optimizer.lr=2e-3", "--set", "train.steps=6", "--quiet"];
    let on = run(d, &more);
    let said = text(&on);
    assert!(on.status.success(), "{said}");
    assert!(said.contains("optimizer.lr: 0.001 -> 0.002") && said.contains("train.steps: 4 -> 6"), "{said}");
    assert_eq!(lines()[..before.len()], before[..]);
    assert_eq!(steps_taken(d, "ck/metrics.ndjson"), 6);
    way("the record of a run that goes on");
    // On purpose everything can be mixed.
    let more = ["--resume", "--allow-changes", "--set", "train.steps=7", "--set", "data.train=other.jsonl"];
    let on = run(d, &more);
    assert!(on.status.success() && text(&on).contains("(mixed)"), "{}", text(&on));
    way("mixed without a word");

    // A newest checkpoint that is damaged costs what it held, and is named.
    let newest = checkpoint::newest(&d.join("ck")).expect("loads").expect("there is one").path;
    std::fs::write(newest.join("masters.bin"), "damage").expect("written");
    let on = run(d, &["--resume", "--allow-changes", "--quiet"]);
    assert!(on.status.success() && text(&on).contains("passed over"), "{}", text(&on));
    way("a damaged checkpoint");

    // What an earlier run recorded in a folder without checkpoints stays.
    std::fs::create_dir(d.join("fresh")).expect("folder");
    std::fs::write(d.join("fresh/metrics.ndjson"), "{\"kind\":\"train\",\"step\":1}\n").expect("written");
    let fresh = run(d, &["--set", "checkpoint.dir=fresh", "--set", "train.steps=1", "--quiet"]);
    assert!(fresh.status.success() && text(&fresh).contains("metrics.1.ndjson"), "{}", text(&fresh));
    assert!(d.join("fresh/metrics.1.ndjson").is_file());
    way("the record of an earlier run");
}

/// Waits until the run has taken so many steps.
fn reaches(dir: &Path, child: &mut std::process::Child, file: &str, step: u64) {
    let begun = Instant::now();
    while steps_taken(dir, file) < step {
        assert!(begun.elapsed() < Duration::from_secs(300), "step {step} does not come");
        assert!(child.try_wait().expect("asked").is_none(), "ended before step {step}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes a file may have while the disk is full.
const FULL: u64 = 1 << 16;

#[test]
fn what_happens_on_the_way_takes_nothing_with_it() {
    let dir = tempfile::tempdir().expect("directory");
    let d = dir.path();
    prepare(d);
    let long = [&set("export.dir=out")[..], &set("train.steps=100000"), &set("checkpoint.keep=2")].concat();
    // The log has reached the size that files may have below, so what is told then cannot be told.
    std::fs::write(d.join("log"), vec![b'\n'; FULL as usize]).expect("written");
    let log = std::fs::File::options().append(true).open(d.join("log")).expect("opened");
    let mut child = start_telling(d, &long, log.into());
    reaches(d, &mut child, "ck/metrics.ndjson", 4);
    ends("two runs in one checkpoint folder", d, &["--resume"], 2, &["in use"]);
    let beside = ["--set", "export.dir=out", "--set", "checkpoint.dir=ck2"];
    ends("two runs that export to one folder", d, &beside, 2, &["out: in use"]);
    assert!(d.join("ck/metrics.html").is_file(), "the page is there while the run lasts");

    // The disk is full for a while: what cannot be written is told, and written when there is room.
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Pid, Resource, Rlimit, prlimit};
        let process = Some(Pid::from_child(&child));
        let limit = |bytes| {
            let old = prlimit(process, Resource::Fsize, Rlimit { current: bytes, maximum: None });
            old.expect("limited");
        };
        limit(Some(FULL));
        let newest = || checkpoint::steps(&d.join("ck")).expect("listed").pop().expect("there is one").0;
        let full_at = newest();
        let begun = Instant::now();
        std::thread::sleep(Duration::from_millis(300));
        let stuck = newest();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(newest(), stuck, "nothing was refused");
        assert!(child.try_wait().expect("asked").is_none(), "a full disk ended the run");
        limit(None);
        while newest() <= stuck + 4 {
            assert!(begun.elapsed() < Duration::from_secs(300), "no checkpoint after {full_at}");
            std::thread::sleep(Duration::from_millis(5));
        }
        way("a disk that is full for a while");
    }

    // Somebody takes the name meanwhile; a second signal ends the run at once.
    std::fs::create_dir_all(d.join("out/modelopt")).expect("folder");
    let pid = rustix::process::Pid::from_child(&child);
    for _ in 0..2 {
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("sent");
    }
    assert_eq!(child.wait().expect("reaped").code(), Some(143));
    way("a second signal");
    let newest = checkpoint::newest(&d.join("ck")).expect("loads").expect("there is one");
    assert!(newest.damaged.is_empty());
}

#[test]
fn a_name_that_is_taken_meanwhile_does_not_stop_the_export() {
    let dir = tempfile::tempdir().expect("directory");
    let d = dir.path();
    prepare(d);
    let more = ["--set", "export.dir=out", "--set", "train.steps=40", "--set", "checkpoint.every=0"];
    let mut child = start(d, &more);
    reaches(d, &mut child, "ck/metrics.ndjson", 1);
    std::fs::create_dir(d.join("out/modelopt")).expect("folder");
    assert!(child.wait().expect("reaped").success());
    assert!(d.join("out/modelopt-2/model.safetensors").is_file());
    assert_eq!(files(&d.join("out/modelopt")).len(), 0);
    way("a name that somebody takes during the run");
}

/// The rate is far too high: the loss is best in the beginning.
#[test]
fn the_best_step_is_kept_and_exported() {
    let dir = tempfile::tempdir().expect("directory");
    let d = dir.path();
    prepare(d);
    let wild = ["--set", "optimizer.lr=0.5", "--set", "train.clip=0", "--set", "schedule.kind=constant"];
    let often = [
        "--set",
        "eval.every=3",
        "--set",
        "eval.patience=2",
        "--set",
        "checkpoint.every=100",
        "--set",
        "checkpoint.keep=1",
    ];
    let words =
        [&wild[..], &often, &["--set", "export.dir=out", "--set", "train.steps=60", "--json"]].concat();
    let output = run(d, &words);
    assert!(output.status.success(), "{}", text(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
    let evals: Vec<_> = metrics::read(&d.join("ck/metrics.ndjson"))
        .expect("metrics")
        .into_iter()
        .filter(|r| r.kind == "eval" && r.step > 0)
        .map(|r| (r.step, r.number("loss").unwrap_or(f64::INFINITY)))
        .collect();
    let best = *evals.iter().min_by(|a, b| a.1.total_cmp(&b.1)).expect("evaluations");
    assert_eq!(report["exported_step"], best.0, "{report}");
    assert!(report["steps"].as_u64() > Some(best.0) && report["steps"].as_u64() < Some(60), "{report}");
    // The exported model has the loss of the best step.
    let look =
        ["--eval-only", "--json", "--set", "model.init=checkpoint", "--set", "model.path=out/modelopt"];
    let judged: serde_json::Value = serde_json::from_slice(&run(d, &look).stdout).expect("a report");
    let loss = judged["valid_loss"].as_f64().expect("a loss");
    assert!((loss - best.1).abs() < 1e-5, "{loss} instead of {}", best.1);
    way("early stopping");
    way("a best step between two checkpoints");

    let last = ["--resume", "--set", "export.dir=last", "--set", "export.step=last", "--json"];
    let output = run(d, &[&wild[..], &often, &last].concat());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!(report["exported_step"], report["steps"], "{report}");
    assert!(files(&d.join("last/modelopt")) != files(&d.join("out/modelopt")));
}

#[test]
fn rows_without_anything_to_learn_are_passed_over() {
    let dir = tempfile::tempdir().expect("directory");
    let d = dir.path();
    prepare(d);
    let narrow = [
        "--set",
        "data.seq=8",
        "--set",
        "data.rows=1",
        "--set",
        "data.packing=stream",
        "--set",
        "train.accumulate=1",
        "--set",
        "data.valid=[]",
    ];
    let output =
        run(d, &[&narrow[..], &["--set", "train.steps=60", "--set", "eval.every=0", "--json"]].concat());
    let said = text(&output);
    assert!(output.status.success() && said.contains("no token of its rows is to be learnt"), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
    let told = said.matches("no token of its rows is to be learnt").count();
    assert!(told > 0 && report["skipped"] == told, "{told} times: {report}");
    way("a step without a token to learn");
}

#[test]
fn errors_are_documents() {
    let dir = tempfile::tempdir().expect("directory");
    prepare(dir.path());
    for (words, what) in [
        (&["run.toml", "--json", "--set", "train.steps=ten"][..], "configuration: 1 problem"),
        (&["run.toml", "--json", "--bananas"], "unexpected argument '--bananas' found"),
    ] {
        let output = line(dir.path(), words);
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a document");
        assert_eq!((output.status.code(), &document["schema"]), (Some(2), &"q4.error/1".into()));
        assert_eq!((&document["exit"], &document["code"]), (&2.into(), &"Q4-E0101".into()));
        assert!(document["what"].as_str().is_some_and(|w| w.contains(what)), "{document}");
        assert!(document.get("need").is_some() && document.get("fix").is_some(), "{document}");
    }
    let output = line(dir.path(), &["run.toml", "--print-config"]);
    let config = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(
        output.status.success() && config.contains("[checkpoint]") && config.contains("steps = 12"),
        "{config}"
    );
    assert_eq!(STEPS, 12);
}

/// Weights that leave what f32 holds: the run ends with the step, the layer and the last good checkpoint,
/// and does not go through its steps for nothing.
#[test]
fn divergence_names_step_layer_and_the_last_good_checkpoint() {
    let dir = tempfile::tempdir().expect("directory");
    let d = dir.path();
    prepare(d);
    let wild = "optimizer.lr=1 optimizer.weight_decay=10 schedule.kind=constant train.clip=0 train.steps=400 \
                eval.every=0 guard.patience=2 checkpoint.every=5";
    let wild: Vec<&str> = wild.split_whitespace().flat_map(|set| ["--set", set]).collect();
    let output = run(d, &wild);
    let said = text(&output);
    assert!(!output.status.success() && steps_taken(d, "ck/metrics.ndjson") < 100, "{said}");
    for words in ["not finite: loss", "first in ", "the last good checkpoint is of step ", "ck/step-"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(said.contains("layer") || said.contains("model.") || said.contains("embeddings"), "{said}");
    println!("{}", said.lines().rev().take(8).collect::<Vec<_>>().join("\n"));
    way("a run that diverges");
}
