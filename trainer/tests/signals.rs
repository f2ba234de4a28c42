//! A run that is asked to end writes down where it stands, and what goes on from there ends with the same
//! bytes.
#![cfg(feature = "torch")]
use q4_trainer::{checkpoint, metrics, rng::Philox};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};
use tiny::{STEPS, files, prepare, start};

mod tiny;

const SETS: [&str; 8] = [
    "--set",
    "export.dir=out",
    "--set",
    "checkpoint.every=5",
    "--set",
    "sample.every=3",
    "--set",
    "sample.prompts=What is 3 plus 1?",
];

/// As `timeout` does, which sends one wish to the process and to its group.
fn send(child: &Child, signal: Signal) {
    (0..20).for_each(|_| kill_process(Pid::from_child(child), signal).expect("sent"));
}

fn newest(dir: &Path) -> Option<(u64, bool)> {
    let loaded = checkpoint::newest(&dir.join("ck")).expect("what is there loads")?;
    let state = loaded.state().expect("a state");
    Some((state.step, state.owed))
}

fn steps_taken(dir: &Path) -> u64 {
    let lines = metrics::read(&dir.join("ck/metrics.ndjson")).unwrap_or_default();
    lines.iter().filter(|r| r.kind == "train").map(|r| r.step).max().unwrap_or(0)
}

/// `Q4_SIGNALS` says how many, `Q4_SEED` at which moments.
#[test]
fn asked_to_end_and_resumed_is_uninterrupted() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v}: a number")))
    };
    let (wanted, rng) = (number("Q4_SIGNALS", 6), Philox::new(number("Q4_SEED", 1), 0, 1));
    let (a, b) = (tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b"));
    prepare(a.path());
    prepare(b.path());
    let begun = Instant::now();
    assert!(start(a.path(), &SETS).wait().expect("ends").success());
    let whole = begun.elapsed();
    let last = format!("ck/step-{STEPS:09}");
    let lines = |dir: &Path| {
        let lines = metrics::read(&dir.join("ck/metrics.ndjson")).expect("metrics");
        let timeless = ["wall_s", "tokens_per_s", "memory_bytes"];
        let line = |mut r: metrics::Record| {
            r.fields.retain(|name, _| !timeless.contains(&name.as_str()));
            serde_json::Value::Object(r.fields).to_string()
        };
        lines.into_iter().map(line).collect::<Vec<_>>()
    };
    let (mut asked, mut owed, mut early, mut equal, mut tries) = (0u64, 0, 0, 0, 0);
    while asked < wanted || equal == 0 {
        tries += 1;
        assert!(tries < 30 * (wanted + 1), "runs end before they can be asked");
        let before = newest(b.path());
        let words = [&SETS[..], if before.is_some() { &["--resume"] } else { &[] }].concat();
        let mut child = start(b.path(), &words);
        if asked < wanted {
            let share = f64::from(rng.word(tries)) / f64::from(u32::MAX);
            std::thread::sleep(whole.mul_f64(share));
            if child.try_wait().expect("asked").is_none() {
                let signals = [Signal::TERM, Signal::INT, Signal::HUP];
                send(&child, signals[if tries % 4 == 0 { 1 } else { 0 }]);
            }
        }
        let status = child.wait().expect("reaped");
        match (status.code(), status.signal()) {
            (Some(143 | 130), None) => {
                asked += 1;
                let found = newest(b.path());
                // Every step that was taken is in the checkpoint.
                assert_eq!(found.map_or(0, |f| f.0), steps_taken(b.path()), "asked {asked}, try {tries}");
                owed += u64::from(found.is_some_and(|f| f.1));
            }
            // Before the first step nothing can be lost, and the signal ends the process.
            (None, Some(15 | 2)) => {
                early += 1;
                assert_eq!(newest(b.path()), before);
            }
            (Some(0), None) => {
                for folder in [last.as_str(), "out/modelopt"] {
                    assert!(
                        files(&a.path().join(folder)) == files(&b.path().join(folder)),
                        "{folder} differs"
                    );
                }
                assert_eq!(lines(a.path()), lines(b.path()));
                equal += 1;
                std::fs::remove_dir_all(b.path().join("ck")).expect("removed");
                std::fs::remove_dir_all(b.path().join("out")).expect("removed");
            }
            other => panic!("{other:?}"),
        }
    }
    println!("way to lose work: SIGTERM and Ctrl-C at random moments");
    println!(
        "signals {asked}, with an evaluation owed {owed}, before the first step {early}, ends compared {equal}"
    );
}

fn first_step(dir: &Path, child: &mut Child, file: &str) {
    let begun = Instant::now();
    while metrics::read(&dir.join(file)).unwrap_or_default().iter().all(|r| r.kind != "train") {
        assert!(begun.elapsed() < Duration::from_secs(300), "no step");
        assert!(child.try_wait().expect("asked").is_none(), "ended");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn without_a_checkpoint_folder_the_model_is_written_as_it_is() {
    let dir = tempfile::tempdir().expect("directory");
    prepare(dir.path());
    let config = std::fs::read_to_string(dir.path().join("run.toml")).expect("read");
    std::fs::write(dir.path().join("run.toml"), config.replace("dir = \"ck\"\n", "")).expect("written");
    let mut child = start(dir.path(), &["--set", "export.dir=out", "--set", "train.steps=100000"]);
    first_step(dir.path(), &mut child, "out/metrics.ndjson");
    send(&child, Signal::TERM);
    assert_eq!(child.wait().expect("reaped").code(), Some(143));
    let lines = metrics::read(&dir.path().join("out/metrics.ndjson")).expect("metrics");
    let step = lines.iter().map(|r| r.step).max().expect("a step");
    assert!(dir.path().join(format!("out/step-{step:09}/modelopt/model.safetensors")).is_file());
    println!("way to lose work: SIGTERM without a checkpoint folder");
}

/// A run that goes on behind its last step looks at the held-out rows first: a signal there costs the look.
#[test]
fn asked_behind_the_last_step_the_end_can_be_had_again() {
    /// How often the rows are looked at, for seconds.
    const LOOK: usize = 150;
    let dir = tempfile::tempdir().expect("directory");
    prepare(dir.path());
    let rows = std::fs::read_to_string(dir.path().join("data.jsonl")).expect("rows");
    std::fs::write(dir.path().join("valid.jsonl"), rows.repeat(LOOK)).expect("written");
    let sets = ["--set", "train.steps=1", "--set", "eval.every=0", "--set", "data.valid=valid.jsonl"];
    assert!(start(dir.path(), &sets).wait().expect("ends").success());
    let again = [&sets[..], &["--resume", "--set", "export.dir=out"]].concat();
    let asked = (1..).map(|tries| {
        let mut child = start(dir.path(), &again);
        std::thread::sleep(Duration::from_millis(700 * tries));
        send(&child, Signal::TERM);
        child.wait().expect("reaped")
    });
    // Before there is anything to put down, the signal ends the process.
    let status = asked.take(20).find(|status| status.signal().is_none()).expect("a run that answers");
    assert_eq!(status.code(), Some(143));
    assert_eq!(newest(dir.path()), Some((1, false)));
    assert!(!dir.path().join("out/modelopt").exists());
    assert!(start(dir.path(), &again).wait().expect("ends").success());
    assert!(dir.path().join("out/modelopt/model.safetensors").is_file());
    println!("way to lose work: SIGTERM while the last look is taken");
}

#[test]
fn a_closed_terminal_asks_and_nohup_is_respected() {
    let dir = tempfile::tempdir().expect("directory");
    prepare(dir.path());
    let long = [
        "run.toml",
        "--threads",
        "1",
        "--quiet",
        "--set",
        "train.steps=100000",
        "--set",
        "checkpoint.every=0",
    ];
    // This test may itself run under nohup.
    let begin = |words: &[&str], more: &[&str]| {
        std::process::Command::new(words[0])
            .args(&words[1..])
            .arg(env!("CARGO_BIN_EXE_q4-train"))
            .args(long.iter().chain(more))
            .current_dir(dir.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("starts")
    };
    let further = |child: &mut Child, steps: u64| {
        let (begun, from) = (Instant::now(), steps_taken(dir.path()));
        while steps_taken(dir.path()) < from + steps {
            assert!(begun.elapsed() < Duration::from_secs(300), "no step");
            assert!(child.try_wait().expect("asked").is_none(), "ended");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let mut child = begin(&["env", "--default-signal=HUP"], &[]);
    further(&mut child, 1);
    send(&child, Signal::HUP);
    assert_eq!(child.wait().expect("reaped").code(), Some(129));
    assert_eq!(newest(dir.path()).expect("a checkpoint").0, steps_taken(dir.path()));
    println!("way to lose work: SIGHUP of a closed terminal");
    let mut child = begin(&["nohup"], &["--resume"]);
    further(&mut child, 1);
    send(&child, Signal::HUP);
    further(&mut child, 3);
    send(&child, Signal::TERM);
    assert_eq!(child.wait().expect("reaped").code(), Some(143));
    println!("way to lose work: SIGHUP under nohup");
}
