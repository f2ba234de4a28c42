//! Ctrl-C and closed pipes end the process as a shell expects.
#![cfg(unix)]
use crate::{err, golden_arg, out, q4};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

#[test]
fn ctrl_c_is_130() {
    let mut child =
        q4().args(["chat", "--json"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"Who are you?\n").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("q4.chat/1"), "it waits for the next message now");
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    // The reader is gone before q4 starts, so there is no race to lose.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = q4().arg("inspect").stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let output = output.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(13), "{:?}", output.status);
    assert_eq!(err(&output), "");
    let line = format!("{} inspect | head -1", env!("CARGO_BIN_EXE_q4"));
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    assert_eq!((out(&output).lines().count(), err(&output).as_str()), (1, ""));
}

#[test]
fn a_model_that_is_being_written_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("model");
    for signal in ["-INT", "-TERM"] {
        let mut child =
            q4().args(["bench", "--shape", "qwen3-0.6b", "--write"]).arg(&target).spawn().unwrap();
        while std::fs::read_dir(dir.path()).unwrap().next().is_none() {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it began to write");
            std::thread::yield_now();
        }
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        assert_eq!(child.wait().unwrap().code(), Some(130), "{signal}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{signal}: nothing is left");
    }
}

#[test]
fn a_file_that_may_not_grow_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (model, target) = (golden_arg("qwen3_tiny_a"), dir.path().join("model"));
    // In blocks of 512 bytes.
    let line =
        format!("ulimit -f 16; exec {} quantize {model} {}", env!("CARGO_BIN_EXE_q4"), target.display());
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    assert_eq!(output.status.code(), Some(8), "{}", err(&output));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
}
