//! Self-checks run once for a build on a machine, and whenever what is remembered of them is not certain.
use crate::{err, out, q4};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Checks that ran, and checks that were remembered.
fn checks(data: &Path, isa: Option<&str>) -> (usize, usize) {
    let mut command = q4();
    command.env("XDG_DATA_HOME", data).args(["generate", "-vv", "-p", "Who are you?", "-n", "1"]);
    if let Some(isa) = isa {
        command.env("Q4_ISA", isa);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    let (log, count) = (err(&output), |log: &str, text| log.lines().filter(|l| l.contains(text)).count());
    (count(&log, "self-check kind"), count(&log, "self-check remembered"))
}

fn file(data: &Path) -> PathBuf {
    let files = fs::read_dir(data.join("q4/self-checks")).unwrap();
    let files: Vec<_> = files.map(|f| f.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

fn passed(data: &Path) -> Value {
    let text = fs::read_to_string(file(data)).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["passed"].clone()
}

#[test]
fn a_build_is_checked_once_on_a_machine() {
    let data = tempfile::tempdir().unwrap();
    let data = data.path();
    let (ran, remembered) = checks(data, None);
    assert!(ran > 0 && remembered == 0, "{ran} {remembered}");
    assert_eq!(checks(data, None), (0, ran));
    let path = file(data);
    let (whole, before) = (fs::read_to_string(&path).unwrap(), passed(data));
    assert_eq!(before.as_array().unwrap().len(), ran);
    let name = whole.find("nvfp4-kernel").unwrap();
    for damaged in [
        String::new(),
        "null".into(),
        whole[..whole.len() / 2].to_owned(),
        whole.replacen("fused-dequant", "native-kernel", 1),
        format!("{}x{}", &whole[..name], &whole[name + 1..]),
    ] {
        fs::write(&path, damaged).unwrap();
        assert_eq!(checks(data, None), (ran, 0));
        assert_eq!(passed(data), before, "it is whole again");
    }
    // Other kernels are other kernels.
    assert_eq!(checks(data, Some("portable")), (ran, 0));
    assert_eq!(checks(data, Some("portable")), (0, ran));
    assert_eq!(fs::read_dir(data.join("q4/self-checks")).unwrap().count(), 2);
    assert_eq!(checks(data, None), (0, ran));
}

#[test]
fn a_check_that_was_skipped_is_not_remembered() {
    let data = tempfile::tempdir().unwrap();
    let mut command = q4();
    command.env("XDG_DATA_HOME", data.path()).args(["generate", "--no-self-check", "-p", "x", "-n", "1"]);
    let output = command.output().unwrap();
    assert!(output.status.success() && err(&output).contains("--no-self-check"), "{}", out(&output));
    assert!(!data.path().join("q4").exists());
    let (ran, remembered) = checks(data.path(), None);
    assert!(ran > 0 && remembered == 0);
}
