//! Backends that end, block or exhaust their process: the child-process runner reports each and survives all.
use serde_json::Value;
use std::process::Command;

#[test]
fn a_process_that_dies_hangs_or_grows_is_an_outcome() {
    for (name, outcome) in [
        ("aborts", "crash"),
        ("exits", "crash"),
        ("panics", "crash"),
        ("never-ends", "hang"),
        ("devours-memory", "error"),
    ] {
        let run = |extra: &[&str]| {
            let out = Command::new(env!("CARGO_BIN_EXE_liars"))
                .args(["--only", name])
                .args(extra)
                .output()
                .expect("runs");
            assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
            String::from_utf8(out.stdout).expect("text")
        };
        let table = run(&[]);
        let row = table.lines().find(|l| l.starts_with(&format!("| {name} |"))).expect("a row");
        assert!(row.contains(&format!("| L2 | {outcome} | L2/")), "{row}");
        if name == "exits" {
            let report: Value = serde_json::from_str(&run(&["--json"])).expect("JSON");
            assert_eq!(report["schema"], "q4.liars/1");
            assert_eq!((&report["liars"], &report["caught"]), (&Value::from(1), &Value::from(1)));
        }
    }
}

#[test]
fn an_unknown_option_is_an_error_of_usage() {
    let out = Command::new(env!("CARGO_BIN_EXE_liars")).arg("--sedes").output().expect("runs");
    assert_eq!(out.status.code(), Some(2));
}

/// It would leave one line of all.
#[test]
fn cases_of_one_mutant_do_not_replace_those_of_all() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("caught.txt");
    std::fs::write(&file, "all of them").expect("written");
    let mut liars = Command::new(env!("CARGO_BIN_EXE_liars"));
    let out = liars.args(["--only", "sign-dropped", "--record"]).arg(&file).output().expect("runs");
    assert_eq!(out.status.code(), Some(2), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(std::fs::read_to_string(&file).expect("read"), "all of them");
}
