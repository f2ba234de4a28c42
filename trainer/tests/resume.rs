//! A killed run goes on as if nothing had happened, to the byte.
#![cfg(feature = "torch")]
use q4_trainer::{checkpoint, metrics, rng::Philox};
use std::path::Path;
use std::time::{Duration, Instant};
use tiny::{STEPS, files, prepare, start};

mod tiny;

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
    let sets = ["--set", "checkpoint.every=1", "--set", "checkpoint.keep=2"];
    let going_on = [&sets[..], &["--resume"]].concat();
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
        let mut child = start(b.path(), if before > 0 { &going_on } else { &sets });
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
    let rest = if newest(&ck) > 0 { &going_on[..] } else { &sets };
    assert!(start(b.path(), rest).wait().expect("ends").success());
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
