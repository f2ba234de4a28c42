//! Parts of the suite, and who starts its child processes.
use crate::{document, q4};
use serde_json::Value;

/// One case of each claim of the reference, with further arguments; the exit status and the report.
fn judge(more: &[&str]) -> (Option<i32>, Value) {
    let part = ["--json", "--backend", "reference", "conformance", "--level", "L1", "--sample", "1"];
    let output = q4().args(part).arg("--no-certificate").args(more).output().unwrap();
    (output.status.code(), document("conformance", &output))
}

#[test]
fn a_sample_is_no_complete_run() {
    let (status, report) = judge(&[]);
    let claims = report["claims"].as_array().unwrap().len();
    assert_eq!((status, &report["passed"]), (Some(0), &claims.into()), "one of each claim");
    assert_eq!(report["complete"], false);
    let again = judge(&[]).1;
    assert_eq!(report["values"], again["values"], "the seed chooses");
    assert_eq!(crate::run(&["conformance", "--sample", "0"]).status.code(), Some(2));
}

#[test]
fn a_claim_of_some_says_nothing_about_others() {
    let part = ["--json", "conformance", "--claim", "mxfp4*", "--level", "L1", "--sample", "1"];
    let output = q4().args(part).arg("--no-certificate").output().unwrap();
    let report = document("conformance", &output);
    let judged: Vec<_> = report["backends"].as_array().unwrap().iter().map(|b| &b["name"]).collect();
    assert_eq!(judged, ["dequant-matmul", "mxfp4-kernel", "reference"], "those that multiply by it");
    assert_eq!((output.status.code(), &report["conformant"]), (Some(0), &true.into()), "{report}");
    // Whoever is named is judged, or the line is wrong.
    let part = ["--backend", "nf4-kernel", "conformance", "--claim", "mxfp4*", "--no-certificate"];
    assert_eq!(crate::run(&part).status.code(), Some(2));
}

#[cfg(unix)]
#[test]
fn a_runner_starts_the_children() {
    // Runs the command it is given, like an emulator.
    assert_eq!(judge(&["--runner", "env Q4_THREADS=1"]).0, Some(0));
    let (status, report) = judge(&["--runner", absent!("/emulator -L /")]);
    assert_eq!((status, &report["passed"]), (Some(5), &0.into()));
}
