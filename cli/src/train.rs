//! `q4 train`: hands the line to q4-train, the program that links libtorch, so that this one never has to.
use crate::args::TrainArgs;
use crate::report::Outcome;
use q4_core::{Code, Error, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program that trains.
const PROGRAM: &str = "q4-train";

/// Becomes q4-train with the rest of the line; returns only if there is none or it cannot be started.
pub fn run(args: &TrainArgs) -> Result<Outcome> {
    let program = find().ok_or_else(|| {
        Error::new(Code::LibraryRefused, "q4 train: training is a program of its own")
            .need(format!("{PROGRAM} beside q4 or on PATH"))
            .have("none in either place")
            .fix(
                "in the source tree: source trainer/libtorch.sh && \
                 cargo build --release -p q4 -p q4-trainer --features q4-trainer/torch; docs/training.md has its options",
            )
    })?;
    start(&program, &args.line)
}

/// The words behind `train` and the options before it, as they are.
pub fn words(line: &[OsString]) -> Option<TrainArgs> {
    (line.get(1)? == "train").then(|| TrainArgs { line: line[2..].to_vec() })
}

fn find() -> Option<PathBuf> {
    let file = format!("{PROGRAM}{}", std::env::consts::EXE_SUFFIX);
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(&file)));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).filter(|d| d.is_absolute()).map(|d| d.join(&file));
    beside.into_iter().chain(on_path).find(|p| p.is_file())
}

/// libgomp's threads spin for milliseconds after every kernel of libtorch: four times the processor time
/// where others compute, too. It reads how long when it is loaded, so the program that links it cannot say.
fn command(program: &Path, line: &[OsString]) -> Command {
    let mut command = Command::new(program);
    command.args(line);
    if [SPIN, "OMP_WAIT_POLICY"].iter().all(|name| std::env::var_os(name).is_none()) {
        command.env(SPIN, "1000");
    }
    command
}

const SPIN: &str = "GOMP_SPINCOUNT";

#[cfg(unix)]
fn start(program: &Path, line: &[OsString]) -> Result<Outcome> {
    use std::os::unix::process::CommandExt;
    Err(Error::io(program, &command(program, line).exec()))
}

#[cfg(not(unix))]
fn start(program: &Path, line: &[OsString]) -> Result<Outcome> {
    let status = command(program, line).status().map_err(|e| Error::io(program, &e))?;
    std::process::exit(status.code().unwrap_or(i32::from(Code::Internal.exit())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::verb_first;

    #[test]
    fn the_whole_line_is_handed_on() {
        let words_of = |line: &str| words(&verb_first(line.split(' ').map(OsString::from).collect()));
        let args = words_of("q4 --json train --device cuda c.toml --resume").expect("train");
        assert_eq!(args.line, ["--json", "--device", "cuda", "c.toml", "--resume"]);
        assert!(words_of("q4 generate -p train").is_none());
    }
}
