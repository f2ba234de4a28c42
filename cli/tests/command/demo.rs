//! The embedded model answers as its bfloat16 original does, on packed weights, in little memory.
use crate::{err, json, out, q4, run};
use serde_json::Value;
use std::io::Write;
use std::process::Stdio;

/// Everything that pins how it is computed.
const PINNED: [&str; 8] = [
    "--backend",
    "nvfp4-kernel",
    "--compute",
    "kernel-only",
    "--activations",
    "native",
    "--temperature",
    "0",
];

fn reference() -> Vec<(String, String)> {
    let file: Value = serde_json::from_str(include_str!("../data/reference.json")).unwrap();
    let samples = file["samples"].as_object().unwrap();
    samples.iter().map(|(q, a)| (q.clone(), a.as_str().unwrap().to_owned())).collect()
}

#[test]
fn the_answers_are_those_of_the_original() {
    let prompts: Vec<_> = reference().into_iter().filter(|(q, _)| !q.starts_with("<raw>")).collect();
    assert_eq!(prompts.len(), 9);
    for (prompt, answer) in &prompts {
        let report = json("generate", &[&PINNED[..], &["-p", prompt]].concat());
        let same = report["text"] == answer.as_str();
        if !same {
            println!("{prompt}\n  original: {answer}\n  4-bit:    {}", report["text"]);
        }
        // A story draws its colours and names from equals: the last bit of a logit may choose another.
        assert!(same || prompt.contains("story"), "{report}");
        let executed = report["executed"].as_array().unwrap();
        assert_eq!(executed.len(), 1, "{report}");
        assert_eq!(executed[0]["backend"], "nvfp4-kernel");
        assert_eq!(executed[0]["activations"], "native");
        // 6 layers of 4 products; the prompt is one step, each accepted token another.
        let steps = 1 + report["token_ids"].as_array().unwrap().len() as u64;
        assert_eq!(executed[0]["calls"], 24 * steps);
        assert_eq!(report["downgraded"], 0);
        assert_eq!(report["finish_reason"], "stop");
        assert_eq!(report["dense"], serde_json::json!(["lm_head"]));
        assert_eq!(report.get("skipped_self_checks"), None);
        let peak = report["peak_bytes"].as_u64();
        assert!(peak.is_none_or(|b| b < 60_000_000), "{peak:?} bytes");
    }
}

#[test]
fn raw_text_is_continued_as_it_is() {
    let (begun, whole) = reference().into_iter().find(|(q, _)| q.starts_with("<raw>")).unwrap();
    let begun = begun.strip_prefix("<raw> ").unwrap();
    let raw = json("generate", &[&PINNED[..], &["--raw", "-p", begun, "-n", "16"]].concat());
    let text = format!("{begun}{}", raw["text"].as_str().unwrap());
    assert!(whole.starts_with(&text), "{text}");
    assert_eq!(raw["finish_reason"], "length");
    let chat = json("generate", &[&PINNED[..], &["-p", begun, "-n", "1"]].concat());
    assert!(raw["prompt_tokens"].as_u64() < chat["prompt_tokens"].as_u64());
}

#[test]
fn text_is_the_same_streamed_piped_and_on_any_number_of_threads() {
    let plain = run(&["generate", "-p", "Who are you?"]);
    assert_eq!(out(&plain), "I am the q4 demo model, made of four-bit numbers.\n");
    assert_eq!(out(&run(&["generate", "demo", "--no-stream", "-p", "Who are you?"])), out(&plain));
    let mut child = q4()
        .args(["generate", "--json"])
        .env("Q4_THREADS", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"Who are you?\n").unwrap();
    let piped: Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(format!("{}\n", piped["text"].as_str().unwrap()), out(&plain));
}

#[test]
fn stop_strings_and_limits_end_an_answer() {
    let stopped = json("generate", &["-p", "Who are you?", "--stop", "demo", "--stop", "xyz"]);
    assert_eq!(
        (&stopped["text"], &stopped["finish_reason"]),
        (&"I am the q4 ".into(), &"stop-string".into())
    );
    let short = json("generate", &["-p", "Who are you?", "-n", "3"]);
    assert_eq!(short["token_ids"].as_array().unwrap().len(), 3);
    assert_eq!(short["finish_reason"], "length");
    let full = json("generate", &["-p", "Who are you?", "--context", "20"]);
    let used = full["prompt_tokens"].as_u64().unwrap() + full["token_ids"].as_array().unwrap().len() as u64;
    assert_eq!((used, &full["finish_reason"]), (20, &"context".into()));
    let on = json("generate", &["-p", "Who are you?", "--ignore-eos", "-n", "30"]);
    assert_eq!(on["token_ids"].as_array().unwrap().len(), 30);
}

#[test]
fn an_answer_that_is_cut_says_so_beside_it() {
    let told = |args: &[&str]| {
        let output = run(&[&["generate", "-p", "Who are you?"], args].concat());
        assert!(output.status.success());
        assert!(!out(&output).contains("cut"), "{}", out(&output));
        err(&output)
    };
    assert!(told(&["-n", "3"]).contains("cut after 3 tokens; a larger -n"));
    assert!(told(&["--context", "20"]).contains("the context of 20 positions is full; a larger --context"));
    assert_eq!(told(&["-n", "3", "-q"]), "");
    assert_eq!(told(&[]), "", "an answer that ends by itself");
    let all = told(&["--ignore-eos", "--context", "2048", "--raw"]);
    assert!(all.contains("2048 positions is full, all that the model has"), "{all}");
}

#[test]
fn an_instruction_set_that_is_unknown_or_not_here_is_refused() {
    let with = |isa: &str| q4().env("Q4_ISA", isa).args(["generate", "-p", "x", "-n", "1"]).output().unwrap();
    let unknown = with("sse9");
    assert_eq!(unknown.status.code(), Some(2));
    assert!(err(&unknown).contains("avx2, neoni8mm"), "{}", err(&unknown));
    let foreign = with(if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" });
    assert_eq!(foreign.status.code(), Some(6), "{}", err(&foreign));
    assert_eq!(with("portable").status.code(), Some(0));
}

#[test]
fn a_seed_decides_a_sampled_answer() {
    let ask = |seed| {
        let args = ["-p", "Tell me a story.", "--temperature", "1.5", "-n", "24", "--seed", seed];
        json("generate", &args)
    };
    let (a, b, c) = (ask("1"), ask("1"), ask("2"));
    assert_eq!(a["token_ids"], b["token_ids"]);
    assert_ne!(a["token_ids"], c["token_ids"]);
    assert_eq!(a["seed"], 1);
}

#[test]
fn a_conversation_computes_only_what_is_new() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("turns.txt");
    std::fs::write(&file, "Who are you?\n\nWho am I?\r\n").unwrap();
    let report = json("generate", &["--turns", file.to_str().unwrap()]);
    let turns = report["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 2);
    assert_eq!(turns[1]["user"], "Who am I?");
    for turn in turns {
        let alone = json("generate", &["-p", turn["user"].as_str().unwrap()]);
        assert_eq!(turn["prompt_tokens"], alone["prompt_tokens"], "only the new message is computed");
    }
    let chat = q4_chat("Who are you?\nWho am I?\n/reset\nWho am I?\n/exit\nnever read\n");
    let lines: Vec<Value> = chat.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 3, "{chat}");
    for (i, line) in lines.iter().enumerate() {
        assert_eq!(line["schema"], "q4.chat/1");
        assert_eq!(line["turn"], i + 1);
    }
    assert_eq!((&lines[0]["text"], &lines[1]["text"]), (&turns[0]["text"], &turns[1]["text"]));
    let used = |i: usize| lines[i]["context_used"].as_u64().unwrap();
    assert!(used(1) > used(0) && used(2) < used(1), "{chat}");
    let alone = json("generate", &["-p", "Who am I?"]);
    assert_eq!(lines[2]["text"], alone["text"], "nothing is left after a reset");
}

fn q4_chat(input: &str) -> String {
    let mut child =
        q4().args(["chat", "--json"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    out(&output)
}

#[test]
fn plain_chat_prints_answers_and_nothing_else_on_stdout() {
    let mut child = q4().arg("chat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Who are you?\n/help\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(out(&output), "I am the q4 demo model, made of four-bit numbers.\n");
}
