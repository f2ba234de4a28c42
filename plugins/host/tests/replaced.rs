//! What was examined is what is mapped: nothing before, and nothing else, whoever writes to the file.
#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
#![allow(clippy::unwrap_used)]
mod built;

use q4_core::{Candidate, RejectCode};
use q4_plugin_host::{Loader, Prober, Refusal};
use std::fs;

fn is_another(refusal: &Refusal) {
    let [reason] = &refusal.reasons[..] else { panic!("{refusal}") };
    assert_eq!(reason.code, RejectCode::LibraryMissing, "{refusal}");
    let examined = refusal.sha256.as_deref().unwrap();
    assert!(reason.need.ends_with(examined), "{refusal}");
    assert!(reason.have.starts_with("sha256 ") && !reason.have.contains(examined), "{refusal}");
}

#[test]
fn examining_maps_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let early = "__attribute__((constructor)) static void early(void) { abort(); }";
    let path = built::stub(dir.path(), "aborts", &[("/*EARLY*/", early)]);
    let examined = Loader::default().examine(&path).unwrap();
    assert_eq!((&*examined.descriptor.name, examined.sha256().len()), ("stub", 64));
}

#[test]
fn a_file_that_changed_since_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = built::stub(dir.path(), "first", &[]);
    let early = "__attribute__((constructor)) static void early(void) { abort(); }";
    let other = built::stub(dir.path(), "second", &[("/*EARLY*/", early)]);
    let examined = Loader::default().examine(&path).unwrap();
    // The same file with other bytes, not another file of that name.
    fs::copy(&other, &path).unwrap();
    is_another(&examined.load().err().unwrap());
}

#[test]
fn a_child_runs_what_was_examined_or_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let ran = dir.path().join("ran");
    let early = format!(
        "__attribute__((constructor)) static void early(void) {{ mkdir(\"{}\", 0700); }}",
        ran.display()
    );
    let edits =
        [("#include <unistd.h>", "#include <unistd.h>\n#include <sys/stat.h>"), ("/*EARLY*/", &*early)];
    let (path, other) = (built::stub(dir.path(), "first", &[]), built::stub(dir.path(), "second", &edits));
    let script = format!(
        "cp '{}' \"$0\"; exec '{}' \"$0\" \"$1\"",
        other.display(),
        env!("CARGO_BIN_EXE_q4-plugin-probe")
    );
    let loader = Loader { prober: Some(Prober::new("sh", ["-c", &*script])), ..Loader::default() };
    let refusal = loader.examine(&path).unwrap().load().err().unwrap();
    assert!(refusal.reasons[0].need.contains("the library that was examined"), "{refusal}");
    assert!(!ran.exists());
}

#[test]
fn a_library_outlives_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = built::stub(dir.path(), "gone", &[]);
    let Candidate::Live(backend) = q4_plugin_host::load(&path).unwrap().candidate else { panic!("live") };
    // A page of a file that was cut off cannot be read any more.
    fs::write(&path, "").unwrap();
    // Its `destroy` runs.
    drop(backend);
}

#[test]
fn the_same_bytes_are_one_library() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) =
        ("static struct q4_backend BACKEND;", "static struct q4_backend BACKEND; static int created;");
    let create = "*out = &BACKEND; return say(err, Q4_OK, \"\");";
    let once = format!("if (created++) return say(err, Q4_E_DEVICE, \"a second one\"); {create}");
    let path = built::stub(dir.path(), "once", &[(from, to), (create, &once)]);
    let copy = dir.path().join("copy.so");
    fs::copy(&path, &copy).unwrap();
    assert!(q4_plugin_host::load(&path).is_ok());
    let refusal = q4_plugin_host::load(&copy).err().unwrap();
    assert!(refusal.reasons[0].have.contains("a second one"), "{refusal}");
}
