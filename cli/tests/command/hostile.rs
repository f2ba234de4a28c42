//! Libraries that mean harm, through the real `q4`: they are refused, and nobody is believed.
use crate::plugin::{User, built};
use crate::{document, err, out, q4};
use q4_conformance::{Certificates, Library};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// What replaces what in the stub, and the reason it is refused for.
type Hostile = (&'static str, &'static [(&'static str, &'static str)], &'static str);

const DESCRIPTOR: &str = "Q4_PLUGIN_DESCRIPTOR(NAME, \"1.0\", \"nobody\");";
const CREATE: &str = "*out = &BACKEND; return say(err, Q4_OK, \"\");";
const ANSWER: &str = "out->table = &TABLE;\n    return Q4_OK;";
const QUERY: &str = "q4_status q4_plugin_query(uint32_t major";
const SIZE: &str = ".struct_size = sizeof(q4_backend_v1)";
macro_rules! early {
    ($body:literal) => {
        &[("/*EARLY*/", concat!("__attribute__((constructor)) static void early(void) { ", $body, " }"))]
    };
}
macro_rules! descriptor {
    ($size:literal, $major:literal, $name:literal) => {
        &[(
            DESCRIPTOR,
            concat!(
                "Q4_EXPORT const q4_descriptor q4_plugin_descriptor = {{'q','4','p','l','u','g','i','n'}, ",
                $size,
                ", ",
                $major,
                ", 1u, 0u, ",
                $name,
                ", \"1.0\", \"nobody\"};"
            ),
        )]
    };
}

const HOSTILE: [Hostile; 22] = [
    ("no-symbol", &[(DESCRIPTOR, "")], "symbol-missing"),
    ("no-query", &[(QUERY, "static q4_status ask(uint32_t major")], "symbol-missing"),
    ("newer-major", descriptor!("sizeof(q4_descriptor)", "2u", "NAME"), "abi-mismatch"),
    ("older-major", descriptor!("sizeof(q4_descriptor)", "0u", "NAME"), "library-too-old"),
    ("short-descriptor", descriptor!("24u", "1u", "NAME"), "abi-mismatch"),
    ("name-with-a-path", descriptor!("sizeof(q4_descriptor)", "1u", "\"../stub\""), "abi-mismatch"),
    (
        "older-minor-with-too-little",
        &[(SIZE, ".struct_size = offsetof(q4_backend_v1, probe) - 1")],
        "abi-mismatch",
    ),
    ("wrong-struct-size", &[(SIZE, ".struct_size = 8")], "abi-mismatch"),
    ("table-of-another-major", &[(".abi_major = Q4_ABI_MAJOR", ".abi_major = 2")], "abi-mismatch"),
    ("null-function", &[(".forward = forward", ".forward = NULL")], "abi-mismatch"),
    ("data-as-code", &[(".forward = forward", ".forward = (void *)OFFERS")], "abi-mismatch"),
    ("wild-table", &[(ANSWER, "out->table = (void *)16; return Q4_OK;")], "abi-mismatch"),
    ("no-table", &[(ANSWER, "out->table = 0; return Q4_OK;")], "abi-mismatch"),
    ("name-of-a-builtin", &[(".name = Q4_STR(NAME)", ".name = Q4_STR(\"nvfp4-kernel\")")], "abi-mismatch"),
    ("a-billion-offers", &[(".n_offers = 1", ".n_offers = 1000000000")], "abi-mismatch"),
    ("panicking-query", &[(ANSWER, "return Q4_E_PANICKED;")], "panicked"),
    ("panicking-create", &[(CREATE, "return say(err, Q4_E_PANICKED, \"index out of bounds\");")], "panicked"),
    ("create-without-a-backend", &[(CREATE, "return say(err, Q4_OK, \"\");")], "internal"),
    ("constructor-aborts", early!("abort();"), "died-in-probe"),
    ("constructor-faults", early!("*(volatile int *)8 = 1;"), "died-in-probe"),
    ("constructor-exits", early!("_exit(0);"), "died-in-probe"),
    ("constructor-kills-its-parent-s-child", early!("raise(9);"), "died-in-probe"),
];

const INCLUDE: (&str, &str) =
    ("#include <unistd.h>", "#include <unistd.h>\n#include <signal.h>\n#include <stdio.h>");

/// Those of them that a look at the file finds: nothing of them runs anywhere.
const SEEN: [&str; 6] =
    ["no-symbol", "no-query", "newer-major", "older-major", "short-descriptor", "name-with-a-path"];

/// Builds each of them into `dir`.
fn hostile(dir: &Path) -> Vec<(PathBuf, &'static str)> {
    let build = |(name, edits, reason): &Hostile| {
        (built::stub(dir, name, &[&[INCLUDE][..], *edits].concat()), *reason)
    };
    let mut all: Vec<_> = HOSTILE.iter().map(build).collect();
    let good = fs::read(built::stub(dir, "good", &[])).unwrap();
    fs::remove_file(dir.join("good.so")).unwrap();
    let mut file = |name: &str, bytes: &[u8], reason| {
        let path = dir.join(name);
        fs::write(&path, bytes).unwrap();
        all.push((path, reason));
    };
    let patched = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    file("empty.so", b"", "library-missing");
    file("not-elf.so", b"#!/bin/sh\nrm -rf /\n", "library-missing");
    file("truncated.so", &good[..good.len() / 2], "library-missing");
    file("garbage-tail.so", &[&good[..], b"garbage"].concat(), "library-missing");
    file("wrong-architecture.so", &patched(18, 8), "abi-mismatch");
    file("32-bit.so", &patched(4, 1), "abi-mismatch");
    all
}

#[test]
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn every_hostile_library_is_refused_with_6_and_a_code() {
    let (user, dir) = (User::new(), tempfile::tempdir().unwrap());
    let mut all = hostile(dir.path());
    let is_seen = |path: &Path, reason: &str| {
        let name = path.file_stem().unwrap().to_str().unwrap();
        SEEN.contains(&name) || HOSTILE.iter().all(|h| h.0 != name) && reason != "timed-out"
    };
    // All of them in one process, which lives to tell of each.
    let mut command = q4();
    command.env("XDG_DATA_HOME", user.0.path()).args(["--json", "diagnose", "--plugin-dir"]);
    let output = command.arg(dir.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", err(&output));
    let report = document("diagnose", &output).to_string();
    for (path, reason) in &all {
        let name = path.display().to_string();
        assert!(report.contains(&name), "{name} is not in {report}");
        let told =
            format!("\"code\":\"{}\",", if is_seen(path, reason) { reason } else { "conformance-missing" });
        assert!(report.contains(&told), "{name}: no {told}");
    }
    assert!(report.contains("name-taken"), "they share a name");

    // What only a path of its own can be.
    all.extend(by_path(dir.path()));
    assert!(all.len() >= 35, "{}", all.len());
    for (path, reason) in &all {
        let says = |error: &Value, reason: &str| {
            assert_eq!(error["code"], "Q4-E0306", "{}", path.display());
            let what = error["what"].as_str().unwrap();
            assert!(what.ends_with(&format!("is refused: {reason}")), "{}: {error}", path.display());
        };
        let seen = is_seen(path, reason);
        says(&user.refused(path, "stub"), if seen { reason } else { "conformance-missing" });
        if !seen {
            // The suite lets a child process load it.
            let output = user.q4(path).args(["--json", "conformance", "--list"]).output().unwrap();
            // What ends the process that loads it does not conform; anything else is a library that is
            // refused.
            let is_fatal = matches!(*reason, "died-in-probe" | "timed-out");
            let status = if is_fatal { 5 } else { 6 };
            assert_eq!(output.status.code(), Some(status), "{}: {}", path.display(), out(&output));
            if !is_fatal {
                says(&document("error", &output), reason);
            }
        }
    }
}

/// C that is true where a word is in the command line of the process.
fn command_line_has(word: &str) -> String {
    let read = "FILE *f = fopen(\"/proc/self/cmdline\", \"r\"); char line[4096] = {0}; size_t n = fread(line, 1, 4095, f);";
    let words = "fclose(f); for (size_t i = 0; i < n; i++) if (!line[i]) line[i] = ' ';";
    format!("({{ {read} {words} strstr(line, \"{word}\") != 0; }})")
}

fn constructor(body: &str) -> String {
    format!("__attribute__((constructor)) static void early(void) {{ {body} }}")
}

/// Libraries that live where they are tried and end any other process that maps them, and the file that
/// remembers it.
fn two_faced(dir: &Path) -> [(PathBuf, PathBuf); 2] {
    let count = dir.join("count");
    let first = format!("FILE *f = fopen(\"{}\", \"a\"); fseek(f, 0, SEEK_END);", count.display());
    let bodies = [
        ("spares-its-trial", format!("if (!{}) abort();", command_line_has("plugin-probe"))),
        ("lives-once", format!("{first} if (ftell(f)) abort(); fputc('1', f); fclose(f);")),
    ];
    bodies.map(|(name, body)| {
        (built::stub(dir, name, &[INCLUDE, ("/*EARLY*/", &constructor(&body))]), count.clone())
    })
}

/// Nothing of a library without a certificate is in the process that refuses it.
#[test]
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn a_library_that_behaves_in_its_trial_is_refused_unmapped() {
    let (user, dir) = (User::new(), tempfile::tempdir().unwrap());
    for (plugin, count) in two_faced(dir.path()) {
        let fresh = || fs::remove_file(&count).unwrap_or_default();
        let command = format!("q4 conformance --plugin {}", fs::canonicalize(&plugin).unwrap().display());
        fresh();
        let error = user.refused(&plugin, "stub");
        assert_eq!(
            (&error["code"], &error["fix"]),
            (&"Q4-E0306".into(), &command.as_str().into()),
            "{error}"
        );
        assert!(error["what"].as_str().unwrap().ends_with("conformance-missing"), "{error}");
        for verb in [&["diagnose"][..], &["--backend", "stub", "explain", "demo"], &["explain", "demo"]] {
            fresh();
            let output = user.q4(&plugin).arg("--json").args(verb).output().unwrap();
            assert_eq!(output.status.code(), Some(6), "{verb:?}: {}", err(&output));
            assert!(out(&output).contains("conformance-missing"), "{verb:?}: {}", out(&output));
            assert!(!count.exists(), "{verb:?}: it ran");
        }
        // The suite has it mapped, in process after process, and lives to tell.
        fresh();
        let output = user.q4(&plugin).args(["--json", "conformance"]).output().unwrap();
        assert_eq!(output.status.code(), Some(5), "{}{}", out(&output), err(&output));
        assert!(out(&output).contains("signal: 6"), "{}", out(&output));
        assert_eq!(user.certificates(), Vec::<PathBuf>::new());
    }
}

/// An error of the suite with exit status 5, which says `word`.
fn does_not_conform(output: &Output, word: &str) {
    assert_eq!(output.status.code(), Some(5), "{}{}", out(output), err(output));
    let error = document("error", output);
    assert_eq!(error["code"], "Q4-E0601");
    assert!(error["have"].as_str().unwrap().contains(word), "{error}");
}

const ASKED: &str = "q4_reject_fn sink, void *user, q4_error *err)\n{";

/// It loads, and faults when it is asked what it computes: the suite says so and lives, also when it only
/// lists its cases.
#[test]
#[cfg(target_os = "linux")]
fn a_library_that_faults_when_it_is_asked_does_not_conform() {
    let (user, dir) = (User::new(), tempfile::tempdir().unwrap());
    let path = built::stub(dir.path(), "faults", &[(ASKED, &format!("{ASKED} *(volatile int *)8 = 1;"))]);
    for options in [&[][..], &["--list"]] {
        let output = user.q4(&path).args(["--json", "conformance"]).args(options).output().unwrap();
        does_not_conform(&output, "signal: 11");
    }
    assert_eq!(user.certificates(), Vec::<PathBuf>::new());
}

/// The exit status of a process that a library ended says nothing about the library.
#[test]
#[cfg(target_os = "linux")]
fn a_library_that_ends_the_suite_with_success_does_not_conform() {
    let (user, dir) = (User::new(), tempfile::tempdir().unwrap());
    let path = built::stub(dir.path(), "leaves", &[(ASKED, &format!("{ASKED} _exit(0);"))]);
    let output = user.q4(&path).args(["--json", "conformance"]).output().unwrap();
    does_not_conform(&output, "exit status: 0");
}

/// Nobody waits for it any more, so it does not go on.
#[test]
#[cfg(target_os = "linux")]
fn the_process_that_runs_a_library_ends_with_the_one_that_judges_it() {
    let (user, dir) = (User::new(), tempfile::tempdir().unwrap());
    let (partial, file) = (dir.path().join("partial"), dir.path().join("pid"));
    let tell = format!(
        "FILE *p = fopen(\"{}\", \"w\"); fprintf(p, \"%d\", getpid()); fclose(p); rename(\"{0}\", \"{}\");",
        partial.display(),
        file.display()
    );
    let body = format!("if (!{}) {{ {tell} for (;;) pause(); }}", command_line_has("plugin-probe"));
    let path = built::stub(dir.path(), "waits", &[INCLUDE, ("/*EARLY*/", &constructor(&body))]);
    let mut command = user.q4(&path);
    let mut parent = command.arg("conformance").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let wait = |what: &dyn Fn() -> bool| {
        (0..1000).any(|_| {
            what() || {
                std::thread::sleep(Duration::from_millis(20));
                false
            }
        })
    };
    assert!(wait(&|| file.exists()), "it is not loaded");
    let status = format!("/proc/{}/stat", fs::read_to_string(&file).unwrap());
    // Whoever inherits it may be slow to collect it.
    let is_gone = || fs::read_to_string(&status).map_or(true, |text| text.contains(") Z "));
    assert!(!is_gone());
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert!(wait(&is_gone), "it goes on");
}

/// A report is about one file.
#[test]
#[cfg(target_os = "linux")]
fn a_library_that_changes_while_it_is_judged_does_not_conform() {
    let (user, dir) = (User::new(), tempfile::tempdir().unwrap());
    // The index of the names of sections in an ELF header means nothing to a loader.
    let write = format!(
        "FILE *e = fopen(\"{}\", \"r+\"); fseek(e, 62, SEEK_SET); fputc('x', e); fclose(e);",
        dir.path().join("changes.so").display()
    );
    // Tried, loaded where its cases are listed, and where they run.
    let count = dir.path().join("count");
    let first = format!(
        "FILE *f = fopen(\"{}\", \"a\"); fputc('1', f); long n = ftell(f); fclose(f);",
        count.display()
    );
    let body = format!("{first} if (n == 4) {{ {write} }}");
    let path = built::stub(dir.path(), "changes", &[INCLUDE, ("/*EARLY*/", &constructor(&body))]);
    let output = user.q4(&path).args(["--json", "conformance", "--level", "L0"]).output().unwrap();
    let now = Library::of(&path).unwrap().sha256;
    does_not_conform(&output, &now);
}

/// A constructor that never comes back costs the time that a call may take.
#[test]
#[cfg(target_os = "linux")]
fn a_library_that_hangs_is_given_up() {
    let (user, dir) = (User::new(), tempfile::tempdir().unwrap());
    let path = built::stub(dir.path(), "hangs", early!("for (;;) pause();"));
    let output =
        user.q4(&path).args(["--json", "conformance", "--list", "--time-limit", "2"]).output().unwrap();
    assert_eq!(output.status.code(), Some(5), "{}", err(&output));
    let error = document("error", &output);
    assert!(error["what"].as_str().unwrap().ends_with("cannot be judged"), "{error}");
    assert!(error["have"].as_str().unwrap().contains("no answer within 2 s"), "{error}");
}

#[cfg(unix)]
fn by_path(dir: &Path) -> Vec<(PathBuf, &'static str)> {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let writable = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    let good = built::stub(dir, "good", &[]);
    let copy = |name: &str| {
        let to = dir.join(name);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(&good, &to).unwrap();
        to
    };
    let (file, folder, deep) = (copy("open.so"), copy("open/p.so"), copy("above/below/p.so"));
    writable(&file);
    writable(folder.parent().unwrap());
    writable(deep.parent().unwrap().parent().unwrap());
    symlink(dir.join("loop-b.so"), dir.join("loop-a.so")).unwrap();
    symlink(dir.join("loop-a.so"), dir.join("loop-b.so")).unwrap();
    let pipe = dir.join("pipe.so");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut all = vec![
        (file, "library-untrusted"),
        (folder, "library-untrusted"),
        (deep, "library-untrusted"),
        (dir.join("loop-a.so"), "library-missing"),
        (pipe, "library-missing"),
        (dir.join("absent.so"), "library-missing"),
        (dir.to_owned(), "library-missing"),
        // No folder is searched, the current one least of all.
        (PathBuf::from("good.so"), "library-missing"),
    ];
    if Path::new("/proc/self/mem").exists() {
        // Unreadable for everybody, root included.
        all.push((PathBuf::from("/proc/self/mem"), "library-missing"));
    }
    all
}

/// A stub with a certificate that it did not earn.
fn certified(user: &User, name: &str, edits: &[(&str, &str)]) -> PathBuf {
    let plugin = built::stub(user.0.path(), name, edits);
    let certificate = user.certificate(&plugin, "stub", "1.0", &["nvfp4@1/native/cpu/fused-dequant"]);
    Certificates::under(&user.data()).write(&certificate).unwrap();
    plugin
}

#[test]
#[cfg(target_os = "linux")]
fn a_certificate_is_not_enough() {
    let user = User::new();
    let call = "const q4_env *e, q4_reject_fn sink, void *user, q4_error *err)\n{\n    return say(err, Q4_OK, \"\");";
    let says = |text: &str| call.replace("return say(err, Q4_OK, \"\");", text);
    let (silent, nonsense) = (says("return Q4_E_UNSUPPORTED;"), says("return -4711;"));
    let made = "o->path = p->path";
    for (name, edits, code, word) in [
        ("verdict-without-a-reason", &[(call, &*silent)][..], "Q4-E0301", "a refusal without a reason"),
        ("verdict-of-nonsense", &[(call, &*nonsense)], "Q4-E0301", "status -4711"),
        ("another-path", &[(made, "o->path = Q4_PATH_DEQUANT_MATMUL")], "Q4-E0310", "dequant-matmul"),
        ("fewer-rows", &[("o->n = p->n", "o->n = p->n - 1")], "Q4-E0310", "[511,"),
        ("success-without-a-weight", &[("*out = p;\n", "")], "Q4-E0313", "NULL and success"),
        ("computes-nothing", &[], "Q4-E0307", "self-check"),
    ] {
        let plugin = certified(&user, name, edits);
        let error = user.refused(&plugin, "stub");
        let text = error.to_string();
        assert!(error["code"] == code && (text.contains(word) || code == "Q4-E0307"), "{name}: {error}");
    }
}

/// Good in its trial, and another one where it is used.
#[test]
#[cfg(target_os = "linux")]
fn a_certificate_lets_no_broken_table_in() {
    let user = User::new();
    let body = format!("if (!{}) TABLE.forward = NULL;\n    {ANSWER}", command_line_has("plugin-probe"));
    let plugin = certified(&user, "table-that-changes", &[INCLUDE, (ANSWER, &body)]);
    let error = user.refused(&plugin, "stub");
    assert!(error["what"].as_str().unwrap().ends_with("is refused: abi-mismatch"), "{error}");
}
