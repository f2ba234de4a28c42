//! Ranks that share a run have the bits of one rank, whoever starts them and however they end.
#![cfg(feature = "torch")]
use q4_trainer::{checkpoint, metrics, rng::Philox};
use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};
use tiny::{STEPS, files, outputs, prepare, start_ranks, start_ranks_with};

mod tiny;

/// What ends at a step, of whoever has computed it: masters and moments, byte for byte.
fn tensors(dir: &Path, step: u64) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut all = files(&dir.join(format!("ck/step-{step:09}")));
    // How many ranks and micro-batches there were is in state.json, whose hash is in manifest.json.
    all.retain(|(name, _)| !name.ends_with("state.json") && !name.ends_with("manifest.json"));
    assert_eq!(all.len(), 3, "masters.bin, states.bin, last_norm");
    all
}

/// Losses, norms and held-out losses, in all their digits.
fn curve(dir: &Path) -> Vec<String> {
    let lines = metrics::read(&dir.join("ck/metrics.ndjson")).expect("metrics");
    let timeless = ["wall_s", "tokens_per_s", "memory_bytes"];
    let line = |mut r: metrics::Record| {
        r.fields.retain(|name, _| !timeless.contains(&name.as_str()));
        serde_json::Value::Object(r.fields).to_string()
    };
    lines.into_iter().map(line).collect()
}

fn fine(out: &[Output]) {
    for (rank, out) in out.iter().enumerate() {
        assert!(out.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(out.stdout.is_empty(), rank > 0, "one report");
    }
}

fn run(dir: &Path, ranks: usize, accumulate: usize, more: &[&str]) {
    let own = format!("train.accumulate={accumulate}");
    let sets = [&["--set", own.as_str(), "--set", "export.dir=out"], more].concat();
    fine(&outputs(start_ranks(dir, ranks, &sets)));
}

#[test]
fn ranks_are_one_rank_that_accumulates() {
    for (state, master, counts) in
        [("f32", "f32", &[2, 4][..]), ("8bit", "f32", &[4]), ("nvfp4", "bf16", &[2]), ("4bit", "bf16", &[2])]
    {
        let (state, master) = (format!("optimizer.state={state}"), format!("optimizer.master={master}"));
        let sets = ["--set", state.as_str(), "--set", master.as_str()];
        let one = tempfile::tempdir().expect("one");
        prepare(one.path());
        run(one.path(), 1, 4, &sets);
        assert!(curve(one.path()).len() as u64 > STEPS);
        for ranks in counts {
            let many = tempfile::tempdir().expect("many");
            prepare(many.path());
            run(many.path(), *ranks, 4 / ranks, &sets);
            assert_eq!(curve(one.path()), curve(many.path()), "{ranks} ranks, {state}");
            assert!(tensors(one.path(), STEPS) == tensors(many.path(), STEPS), "{ranks} ranks, {state}");
            let model = "out/modelopt";
            assert!(files(&one.path().join(model)) == files(&many.path().join(model)), "{ranks}: exports");
        }
        // The comparison can fail.
        assert!(tensors(one.path(), STEPS) != tensors(one.path(), STEPS - 2));
    }
}

/// Blocks that move in the backward pass, adapters, a head of its own; and a round in which a rank has
/// nothing to compute.
#[test]
fn every_way_of_training_can_be_shared() {
    let untied = |dir: &Path| {
        let path = dir.join("model/config.json");
        let text = std::fs::read_to_string(&path).expect("read");
        std::fs::write(&path, text.replace("\"tie_word_embeddings\":true", "\"tie_word_embeddings\":false"))
            .expect("written");
    };
    let backward = ["--set", "train.update_in_backward=true", "--set", "train.clip_scope=block"];
    let previous = ["--set", "train.update_in_backward=true", "--set", "train.clip_scope=previous"];
    let again = ["--set", "train.recompute=true", "--set", "train.keep_values=false"];
    let lora = ["--set", "lora.rank=4", "--set", "lora.base=merged", "--set", "export.layouts=bf16"];
    for (sets, head) in [(&backward[..], false), (&previous, false), (&again, true), (&lora, false)] {
        let (a, b) = (tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b"));
        for dir in [a.path(), b.path()] {
            prepare(dir);
            if head {
                untied(dir);
            }
        }
        // Of three micro-batches two ranks have two rounds, the second with one of them idle. Whoever goes
        // on, steps stay what three ranks have begun.
        let begin = [sets, &["--set", "train.steps=2", "--set", "schedule.kind=constant"]].concat();
        let rest = [sets, &["--set", "schedule.kind=constant", "--resume"]].concat();
        let on = [sets, &["--set", "schedule.kind=constant", "--set", "train.steps=6", "--resume"]].concat();
        for (dir, course) in [(a.path(), [1, 3]), (b.path(), [2, 1])] {
            let begun = [&["--set", "train.accumulate=1"], &begin[..]].concat();
            fine(&outputs(start_ranks(dir, 3, &begun)));
            fine(&outputs(start_ranks(
                dir,
                course[0],
                &[&["--set", "train.accumulate=1"], &on[..]].concat(),
            )));
            run(dir, course[1], 1, &rest);
        }
        assert_eq!(curve(a.path()), curve(b.path()), "{sets:?}");
        assert!(tensors(a.path(), STEPS) == tensors(b.path(), STEPS), "{sets:?}");
    }
}

#[test]
fn two_runs_are_equal_to_the_byte() {
    let (a, b) = (tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b"));
    for dir in [a.path(), b.path()] {
        prepare(dir);
        run(dir, 2, 1, &[]);
    }
    let last = format!("ck/step-{STEPS:09}");
    assert!(files(&a.path().join(&last)) == files(&b.path().join(&last)));
    assert_eq!(curve(a.path()), curve(b.path()));
}

fn until_step(dir: &Path, children: &mut [Child], step: u64) {
    let begun = Instant::now();
    while !dir.join(format!("ck/step-{step:09}")).exists() {
        assert!(begun.elapsed() < Duration::from_secs(300), "no checkpoint");
        for child in &mut *children {
            if child.try_wait().expect("asked").is_some() {
                let mut said = String::new();
                child.stderr.take().expect("piped").read_to_string(&mut said).expect("read");
                panic!("a rank has ended: {said}");
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The longest time until all have ended, and what they said.
fn ends(children: Vec<Child>) -> (Duration, Vec<Output>) {
    let begun = Instant::now();
    let out = outputs(children);
    (begun.elapsed(), out)
}

/// kill -9 of one rank. Q4_KILLS says how often, Q4_SEED which rank and when.
#[test]
fn a_rank_that_dies_ends_all_and_nothing_is_lost() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v}: a number")))
    };
    let (kills, rng) = (number("Q4_KILLS", 4), Philox::new(number("Q4_SEED", 1), 0, 0));
    let sets = ["--set", "train.accumulate=1", "--set", "checkpoint.every=1"];
    let whole = tempfile::tempdir().expect("whole");
    prepare(whole.path());
    fine(&outputs(start_ranks(whole.path(), 4, &sets)));
    let going_on = [&sets[..], &["--resume"]].concat();
    let mut slowest = Duration::ZERO;
    for kill in 0..kills {
        let dir = tempfile::tempdir().expect("directory");
        prepare(dir.path());
        let mut children = start_ranks(dir.path(), 4, &sets);
        until_step(dir.path(), &mut children, 1 + u64::from(rng.below(3 * kill, STEPS as u32 - 4)));
        std::thread::sleep(Duration::from_millis(rng.below(3 * kill + 1, 30).into()));
        // The first rank writes, and is asked by all others: its death is one of its own.
        let victim = if kill == 0 { 0 } else { rng.below(3 * kill + 2, 4) as usize };
        children[victim].kill().expect("killed");
        let (took, out) = ends(children);
        slowest = slowest.max(took);
        // Whoever hangs waits for minutes; seconds are for bench/trainer-scale.sh to count.
        assert!(took < Duration::from_secs(100), "{took:?} after the death of rank {victim}");
        for (rank, out) in out.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(8), "rank {rank}: {said}");
            assert!(said.contains("Q4-E0504") && said.contains(&format!("rank {victim} ")), "{said}");
        }
        let ranks = [4, 1, 2, 3][kill as usize % 4];
        fine(&outputs(start_ranks(dir.path(), ranks, &going_on)));
        let end = format!("ck/step-{STEPS:09}");
        if ranks == 4 {
            assert!(files(&whole.path().join(&end)) == files(&dir.path().join(&end)), "kill {kill}");
        }
        assert!(
            tensors(whole.path(), STEPS) == tensors(dir.path(), STEPS),
            "{ranks} ranks after kill {kill}"
        );
        assert_eq!(curve(whole.path()), curve(dir.path()), "{ranks} ranks after kill {kill}");
    }
    println!("kills {kills}, slowest end of the others {} ms", slowest.as_millis());
}

/// A rank that has come and cannot be connected: the others hear nothing of it any more.
#[test]
fn a_rank_that_ends_while_the_others_connect_is_missed() {
    for lost in [0, 1] {
        let dir = tempfile::tempdir().expect("directory");
        prepare(dir.path());
        let own = |rank: usize, command: &mut Command| {
            if rank == lost {
                command.env("GLOO_SOCKET_IFNAME", "no-such-interface");
            }
        };
        let (took, out) = ends(start_ranks_with(dir.path(), 3, &[], &own));
        assert!(took < Duration::from_secs(20), "{took:?}");
        for (rank, out) in out.iter().enumerate() {
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(8), "rank {rank}: {said}");
            assert!(said.contains("Q4-E0504"), "rank {rank}: {said}");
        }
        let said = String::from_utf8_lossy(&out[2].stderr);
        assert!(lost == 0 || said.contains("rank 1 of 3 has died"), "{said}");
        assert!(!dir.path().join("ck").exists());
    }
}

#[test]
fn a_signal_to_one_rank_is_heard_by_all() {
    let sets = [
        "--set",
        "train.accumulate=1",
        "--set",
        "train.steps=60",
        "--set",
        "sample.every=5",
        "--set",
        "sample.prompts=What is 3 plus 1?",
    ];
    let (a, b) = (tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b"));
    prepare(a.path());
    fine(&outputs(start_ranks(a.path(), 2, &sets)));
    prepare(b.path());
    for (asked, (victim, signal, status)) in
        [(1, Signal::TERM, 143), (0, Signal::INT, 130)].into_iter().enumerate()
    {
        let more: &[&str] = if asked == 0 { &[] } else { &["--resume"] };
        let mut children = start_ranks(b.path(), 2, &[&sets[..], more].concat());
        until_step(b.path(), &mut children, [2, 6][asked]);
        kill_process(Pid::from_child(&children[victim]), signal).expect("sent");
        for (rank, out) in outputs(children).iter().enumerate() {
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(status), "rank {rank}: {said}");
        }
    }
    let stopped = checkpoint::newest(&b.path().join("ck")).expect("whole").expect("one").step;
    assert!((6..=60).contains(&stopped), "{stopped}");
    fine(&outputs(start_ranks(b.path(), 2, &[&sets[..], &["--resume"]].concat())));
    assert_eq!(curve(a.path()), curve(b.path()));
    assert!(tensors(a.path(), 60) == tensors(b.path(), 60));
}

/// What one rank alone would be told, all are told once, and all end with the same status.
#[test]
fn all_ranks_take_the_same_decision() {
    let dir = tempfile::tempdir().expect("directory");
    let ended = |more: &[&str], status: i32, words: &[&str]| {
        let _ = std::fs::remove_dir_all(dir.path().join("ck"));
        let out = outputs(start_ranks(dir.path(), 2, more));
        let said: Vec<_> = out.iter().map(|o| String::from_utf8_lossy(&o.stderr).into_owned()).collect();
        for (rank, out) in out.iter().enumerate() {
            assert_eq!(out.status.code(), Some(status), "rank {rank}: {said:?}");
        }
        for word in words {
            assert!(said[0].contains(word), "{word}: {said:?}");
        }
        said
    };
    prepare(dir.path());
    let wild = "optimizer.lr=1 optimizer.weight_decay=10 schedule.kind=constant train.clip=0 train.steps=400 \
                eval.every=0 guard.patience=2 checkpoint.every=5";
    let wild: Vec<&str> = wild.split_whitespace().flat_map(|set| ["--set", set]).collect();
    // Steps that are not finite, judged by all; the last good checkpoint is kept by all.
    let said = ended(&wild, 4, &["Q4-E0211", "first in", "the last good checkpoint is of step"]);
    assert!(!said[1].contains("Q4-E"), "{said:?}");
    // The same where blocks move in the backward pass, and a gradient that is not finite stops it half-way.
    let backward = "train.update_in_backward=true train.clip_scope=block train.accumulate=1";
    let backward: Vec<&str> = backward.split_whitespace().flat_map(|set| ["--set", set]).collect();
    ended(&[&wild[..], &backward].concat(), 4, &["Q4-E0211"]);
    // Training that ends early.
    ended(&["--set", "eval.every=1", "--set", "eval.patience=1", "--set", "optimizer.lr=1e-9"], 0, &[]);
    let state =
        checkpoint::newest(&dir.path().join("ck")).expect("whole").expect("one").state().expect("state");
    assert!(state.step < STEPS && state.stale == 1, "{}", state.step);
    // A checkpoint that cannot be written is told by the first, and is everybody's error in the end.
    let mut children =
        start_ranks(dir.path(), 2, &["--set", "train.steps=40", "--set", "checkpoint.dir=lost"]);
    let lost = dir.path().join("lost");
    let begun = Instant::now();
    while !lost.join("step-000000002").exists() && begun.elapsed() < Duration::from_secs(100) {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::remove_dir_all(&lost).expect("removed");
    std::fs::write(&lost, "").expect("in its place");
    for out in outputs(std::mem::take(&mut children)) {
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(8), "{said}");
        assert!(!said.contains("rank"), "{said}");
    }
    // Data that no rank can read is said once.
    std::fs::write(dir.path().join("bad.jsonl"), "no JSON\n").expect("written");
    let said = ended(&["--set", "data.train=bad.jsonl"], 4, &["bad.jsonl", "line 1"]);
    assert!(!said[1].contains("bad.jsonl"), "{said:?}");
    // A gate that only the first rank asks for.
    let suite = r#"{"group": "a", "prompt": "What is 3 plus 1?", "must": ["no such answer"]}"#;
    std::fs::write(dir.path().join("suite.jsonl"), suite).expect("written");
    let gate = ["--set", "behaviour.suite=suite.jsonl", "--set", "behaviour.gates.a=1.0"];
    ended(&gate, 3, &["Q4-E0102"]);
    // A name that is taken.
    std::fs::create_dir_all(dir.path().join("ck")).expect("made");
    std::fs::write(dir.path().join("out"), "").expect("written");
    let said = ended(&["--set", "export.dir=out"], 2, &["out: is no folder"]);
    assert!(!said[1].contains("Q4-E"), "{said:?}");
}

#[test]
fn memory_is_that_of_the_plan() {
    for (ranks, state) in [(2, "f32"), (4, "8bit"), (4, "nvfp4")] {
        let dir = tempfile::tempdir().expect("directory");
        prepare(dir.path());
        let state = format!("optimizer.state={state}");
        let out =
            outputs(start_ranks(dir.path(), ranks, &["--json", "--set", &state, "--set", "train.steps=1"]));
        fine(&out);
        let report: serde_json::Value = serde_json::from_slice(&out[0].stdout).expect("JSON");
        let of = |name: &str| {
            let list = report["ranks"].as_array().expect("a list").iter();
            list.map(|rank| rank[name].as_u64().expect("bytes")).collect::<Vec<_>>()
        };
        let (planned, have) = (of("planned_state_bytes"), of("state_bytes"));
        assert_eq!((planned.len(), &planned), (ranks, &have), "{state}");
        let (least, most) = (have.iter().min().expect("one"), have.iter().max().expect("one"));
        // Small tensors are not cut.
        assert!(most - least < 200_000 && *most < have.iter().sum::<u64>() / 2 + 100_000, "{have:?}");
    }
}

#[test]
fn ranks_that_do_not_fit_together_are_refused() {
    let dir = tempfile::tempdir().expect("directory");
    prepare(dir.path());
    // Machines with other data, another configuration, a folder of checkpoints that is taken.
    let other = tempfile::tempdir().expect("directory");
    prepare(other.path());
    std::fs::write(other.path().join("data.jsonl"), tiny::sums(39)).expect("written");
    let elsewhere = |rank: usize, command: &mut Command| {
        if rank == 1 {
            command.current_dir(other.path());
        }
    };
    let otherwise = |rank: usize, command: &mut Command| {
        if rank == 1 {
            command.args(["--set", "optimizer.lr=2e-3"]);
        }
    };
    for (way, words) in [
        (&elsewhere as &dyn Fn(usize, &mut Command), "rank 1 has another data than rank 0"),
        (&otherwise, "rank 1 has another configuration than rank 0"),
    ] {
        let out = outputs(start_ranks_with(dir.path(), 2, &[], way));
        let said: Vec<_> = out.iter().map(|o| String::from_utf8_lossy(&o.stderr)).collect();
        assert!(out.iter().all(|o| o.status.code() == Some(2)), "{said:?}");
        assert!(said[0].contains(words) && !said[1].contains("Q4-E"), "{said:?}");
        assert!(!dir.path().join("ck").exists() && !other.path().join("ck").exists());
    }
    let held = checkpoint::Store::open(&dir.path().join("ck"), checkpoint::Keep { last: 1, best: false });
    let out = outputs(start_ranks(dir.path(), 2, &[]));
    let said: Vec<_> = out.iter().map(|o| String::from_utf8_lossy(&o.stderr)).collect();
    assert!(out.iter().all(|o| o.status.code() == Some(2)), "{said:?}");
    assert!(said[0].contains("in use") && !said[1].contains("in use"), "{said:?}");
    drop(held);
    std::fs::remove_dir_all(dir.path().join("ck")).expect("removed");
    // One process alone with a variable of ranks.
    let out = Command::new(env!("CARGO_BIN_EXE_q4-train"))
        .args(["run.toml", "--quiet"])
        .current_dir(dir.path())
        .env("RANK", "0")
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("WORLD_SIZE"), "{said}");
    assert!(!dir.path().join("ck").exists());
}

#[test]
fn gpus_starts_ranks_and_nothing_more() {
    let (a, b) = (tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b"));
    for (dir, words) in [(a.path(), ["--gpus", "2"]), (b.path(), ["--set", "train.accumulate=4"])] {
        prepare(dir);
        let out = tiny::run(dir, &words);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let report = String::from_utf8_lossy(&out.stdout);
        assert_eq!(report.matches("train_loss").count(), 1, "{report}");
    }
    assert_eq!(curve(a.path()), curve(b.path()));
    assert!(tensors(a.path(), STEPS) == tensors(b.path(), STEPS));
    let out = tiny::run(a.path(), &["--gpus", "2"]);
    assert_eq!(out.status.code(), Some(2), "{}", String::from_utf8_lossy(&out.stderr));
}
