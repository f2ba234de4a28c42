//! The examples of `docs/cli.md`, run as they stand there.
use crate::cli_md::{Section, sections, setup};
use crate::golden;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;

/// An installed q4: the executable and the library beside it, and nothing else.
fn install(folder: &Path) {
    let program = Path::new(env!("CARGO_BIN_EXE_q4"));
    std::fs::create_dir(folder).unwrap();
    std::fs::copy(program, folder.join("q4")).unwrap();
    let library = "libNVFP4.so";
    std::fs::copy(program.with_file_name("deps").join(library), folder.join(library)).unwrap();
}

/// What a shell makes of `script`, with that q4 first on its path.
fn shell(script: &str, bin: &Path, folder: &Path) -> Output {
    let mut search = vec![bin.to_owned()];
    search.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let mut command = Command::new("sh");
    command.args(["-euc", script]).current_dir(folder).env("PATH", std::env::join_paths(&search).unwrap());
    for name in ["RUST_LOG", "Q4_THREADS", "Q4_NVFP4_LIB", "Q4_ISA", "NO_COLOR"] {
        command.env_remove(name);
    }
    command.env("XDG_DATA_HOME", bin.with_file_name("data")).stdin(Stdio::null());
    command.output().unwrap()
}

/// Runs the examples of a section one after the other, each once.
fn run(section: &Section, bin: &Path, folder: &Path) -> Vec<String> {
    let (mut wrong, mut done) = (Vec::new(), BTreeSet::new());
    let examples = section.rows.iter().flat_map(|row| row.examples().map(move |example| (row, example)));
    for (row, example) in examples.filter(|e| done.insert(e.1)) {
        let output = shell(example, bin, folder);
        if !output.status.success() {
            let (out, err) = (crate::out(&output), crate::err(&output));
            let of = format!("{} {}: {}", section.command, row.option, row.does);
            wrong.push(format!("{of}\n{example}\n{}\n{out}{err}", output.status));
        }
    }
    wrong
}

#[test]
fn every_example_runs() {
    let dir = tempfile::tempdir().unwrap();
    let (bin, begin) = (dir.path().join("bin"), dir.path().join("begin"));
    install(&bin);
    std::fs::create_dir_all(begin.join("tiny")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("qwen3_tiny_a").join(name), begin.join("tiny").join(name)).unwrap();
    }
    let made = shell(setup(), &bin, &begin);
    assert!(setup().contains("q4 ") && made.status.success(), "{}", crate::err(&made));
    let sections = sections();
    assert!(sections.len() > 15, "{}", sections.len());
    let (next, wrong) = (Mutex::new(sections.iter()), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let Some(section) = next.lock().unwrap().next() else { return };
            let folder = dir.path().join(section.command.replace(' ', "-"));
            assert!(Command::new("cp").arg("-r").args([&begin, &folder]).status().unwrap().success());
            let seen = run(section, &bin, &folder);
            wrong.lock().unwrap().extend(seen);
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(work))));
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
