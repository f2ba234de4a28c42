//! Drives the real `q4`: what scripts rely on is its exit status, its stdout and its numbers, so that is what
//! is tested.
#![allow(clippy::unwrap_used)]

/// A path at which there is nothing.
macro_rules! absent {
    () => {
        absent!("")
    };
    ($below:literal) => {
        concat!(env!("CARGO_TARGET_TMPDIR"), "/absent", $below)
    };
}

mod act_order;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod attack;
mod batch;
mod chat;
#[cfg(unix)]
mod cli_md;
#[cfg(unix)]
mod client;
mod convert;
mod crafted;
mod demo;
#[cfg(unix)]
mod deploy;
#[cfg(unix)]
mod documented;
mod exit;
mod forms;
mod hostile;
mod isolate;
mod judge;
mod listing;
mod loading;
mod measure;
mod memory;
mod mistakes;
mod narrow;
mod output;
mod pages;
mod plugin;
mod predict;
mod prompt;
mod quantize;
mod schemas;
mod selfcheck;
#[cfg(unix)]
mod serve;
mod signals;
mod timeline;
mod tiny;
mod trace;
mod vendor;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The executable without the settings of whoever runs the tests.
pub fn q4() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_q4"));
    for name in [
        "RUST_LOG",
        "Q4_THREADS",
        "Q4_NVFP4_LIB",
        "Q4_ISA",
        "Q4_API_KEY",
        "NO_COLOR",
        "CLICOLOR_FORCE",
        "COLUMNS",
    ] {
        command.env_remove(name);
    }
    // What is computed does not depend on whether this machine has a card.
    command.env("CUDA_VISIBLE_DEVICES", "");
    // Nothing of the user's is read or written.
    command.env("XDG_DATA_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/data"));
    command.args(["--threads", "2"]);
    command
}

/// Runs `q4` with arguments and nothing on standard input.
pub fn run(args: &[&str]) -> Output {
    q4().args(args).output().expect("q4 starts")
}

/// Runs it with `--json`, expects exit status 0, and returns the document.
pub fn json(verb: &str, args: &[&str]) -> Value {
    let output = run(&[&["--json", verb], args].concat());
    assert!(output.status.success(), "{args:?}: {}", err(&output));
    document(verb, &output)
}

/// The one document on stdout, whose first field names its schema.
pub fn document(verb: &str, output: &Output) -> Value {
    let text = out(output);
    let start = format!("{{\"schema\":\"q4.{verb}/1\",");
    assert!(text.starts_with(&start), "{verb}: {text}");
    assert_eq!(text.lines().count(), 1, "{verb}: {text}");
    serde_json::from_str(&text).expect("one JSON document")
}

/// Its stdout.
pub fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// Its stderr.
pub fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// A recorded model.
pub fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/golden").join(path)
}

/// The same as an argument.
pub fn golden_arg(path: &str) -> String {
    golden(path).display().to_string()
}
