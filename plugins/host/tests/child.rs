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
    let says = |verdict: ChildVerdict, signal: i32, words: &[&str]| {
        let ChildVerdict::Killed(by, said) = verdict else { panic!("{verdict:?}") };
        assert_eq!(by, signal, "{said}");
        words.iter().for_each(|word| assert!(said.contains(word), "no {word} in {said}"));
    };
    says(with("aborts", "abort();"), 6, &["signal 6 (SIGABRT) in ", "; on the stack: aborts.so+0x"]);
    let fault = with("faults", "fputs(\"and says why\", stderr); *(volatile int *)8 = 1;");
    says(fault, 11, &["signal 11 (SIGSEGV) at address 0x8 in faults.so+0x", "and says why"]);
    says(with("divides", "volatile int zero = 0; zero = 7 / zero;"), 8, &["(SIGFPE) in divides.so+0x"]);
    says(with("is-no-code", "__builtin_trap();"), 4, &["(SIGILL) in is-no-code.so+0x"]);
    // Without an end: what a compiler makes of this must use the stack.
    let deep =
        "volatile char full[4096]; full[0] = 1; void (*volatile again)(void) = early; again(); full[1] = 2;";
    says(with("is-deep", deep), 11, &["in is-deep.so+0x"]);
    assert_eq!(with("exits", "exit(0);"), ChildVerdict::Exited(0, String::new()));
    let last = with("leaves", "fputs(\"a reason\", stderr); _exit(6);");
    assert_eq!(last, ChildVerdict::Exited(6, "a reason".into()));
    assert_eq!(with("hangs", "for (;;) pause();"), ChildVerdict::TimedOut(Duration::from_secs(3)));
    let noise = "for (;;) { printf(\"q4-plugin-probe {\\\"loaded\\\":true}\\n\"); fflush(stdout); }";
    assert_eq!(with("floods", noise), ChildVerdict::TimedOut(Duration::from_secs(3)));
    // The verdict is that of the whole life of the process.
    let late = "atexit((void (*)(void))abort);";
    says(with("aborts-at-exit", late), 6, &["SIGABRT"]);
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
    let absent = Prober::new(dir.path().join("absent"), ["plugin-probe"]);
    assert!(matches!(absent.probe(&good), ChildVerdict::NotRun(_)));
    assert!(Loader { prober: Some(absent), ..Loader::default() }.load(&good).is_err());
}
