//! Libraries whose constructors end or hang the process that loads them are found out in a child, and told.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]
mod built;

use q4_core::RejectCode;
use q4_plugin_host::{ChildVerdict, Loader, Prober};
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

fn prober() -> Prober {
    let mut prober = Prober::new(env!("CARGO_BIN_EXE_q4-plugin-probe"), [] as [OsString; 0]);
    prober.limit = Duration::from_secs(3);
    prober
}

fn with_constructor(dir: &Path, name: &str, body: &str) -> ChildVerdict {
    let text =
        format!("#include <stdio.h>\n__attribute__((constructor)) static void early(void) {{ {body} }}");
    let path = built::stub(dir, name, &[("/*EARLY*/", &text)]);
    let verdict = prober().probe(&path);
    // The same in the loader: refused here, and this process goes on.
    let loader = Loader { prober: Some(prober()), ..Loader::default() };
    let refusal = loader.load(&path).err().unwrap();
    let code = match &verdict {
        ChildVerdict::TimedOut(_) => RejectCode::TimedOut,
        _ => RejectCode::DiedInProbe,
    };
    assert_eq!((refusal.reasons[0].code, &*refusal.name), (code, "stub"), "{name}");
    assert!(refusal.reasons[0].have.contains(&*path.to_string_lossy()), "{name}");
    verdict
}

#[test]
fn constructors_that_kill_or_hang_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let with = |name, body| with_constructor(dir.path(), name, body);
    assert_eq!(with("aborts", "abort();"), ChildVerdict::Killed(6));
    assert_eq!(with("faults", "*(volatile int *)8 = 1;"), ChildVerdict::Killed(11));
    assert_eq!(with("exits", "exit(0);"), ChildVerdict::Exited(0));
    assert_eq!(with("leaves", "_exit(6);"), ChildVerdict::Exited(6));
    assert_eq!(with("hangs", "for (;;) pause();"), ChildVerdict::TimedOut(Duration::from_secs(3)));
    let noise = "for (;;) { printf(\"q4-plugin-probe {\\\"loaded\\\":true}\\n\"); fflush(stdout); }";
    assert_eq!(with("floods", noise), ChildVerdict::TimedOut(Duration::from_secs(3)));
    // The verdict is that of the whole life of the process.
    let late = "atexit((void (*)(void))abort);";
    assert_eq!(with("aborts-at-exit", late), ChildVerdict::Killed(6));
}

#[test]
fn good_and_refused_libraries_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let good = built::stub(dir.path(), "good", &[]);
    let ChildVerdict::Loads { descriptor, sha256 } = prober().probe(&good) else { panic!("loads") };
    let examined = Loader::default().examine(&good).unwrap();
    assert_eq!((&descriptor, &*sha256), (&examined.descriptor, examined.sha256()));
    assert_eq!((&*descriptor.name, &*descriptor.version, &*descriptor.vendor), ("stub", "1.0", "nobody"));
    assert!(Loader { prober: Some(prober()), ..Loader::default() }.load(&good).is_ok());
    let text = dir.path().join("text.so");
    std::fs::write(&text, "no library").unwrap();
    let ChildVerdict::Refused(reasons) = prober().probe(&text) else { panic!("refused") };
    assert_eq!(reasons[0].code, RejectCode::LibraryMissing);
    let absent = Prober::new("/nonexistent/q4", ["plugin-probe"]);
    assert!(matches!(absent.probe(&good), ChildVerdict::NotRun(_)));
    assert!(Loader { prober: Some(absent), ..Loader::default() }.load(&good).is_err());
}
