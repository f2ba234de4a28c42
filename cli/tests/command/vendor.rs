//! What an author does with nothing but `q4`: a project from `q4 plugin new` becomes a certified backend, and
//! its faults are found with the tools that authors have. Tools that are not installed are skipped, and said
//! to be.
use crate::{document, err, out, q4};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A small product with two tiles of rows, as `--replay` takes it.
const CASE: &str =
    "L2/nvfp4@1/native/cpu/fused-dequant/nan/nvfp4.row-major.single/native/float32/n33.k80.m5of32/s0";

/// An author's folder: no source tree of q4 above it, and a place for certificates.
struct Desk(TempDir);

impl Desk {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn home(&self, command: &mut Command) {
        command.env("XDG_DATA_HOME", self.path("data")).current_dir(self.0.path());
    }
    fn q4(&self, args: &[&str]) -> Output {
        let mut command = q4();
        self.home(&mut command);
        command.args(args).output().unwrap()
    }
    /// A tool that runs `q4` with these arguments; it cannot hang for ever.
    fn under(&self, tool: &[&str], args: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        self.home(&mut command);
        command.args(["-k", "1", "300"]).args(tool).arg(env!("CARGO_BIN_EXE_q4")).args(["--threads", "2"]);
        command.args(args).output().unwrap()
    }
    /// The C project, built with these flags after `edit` of its kernel.
    fn volta(&self, flags: &str, edit: (&str, &str)) -> String {
        let made = self.q4(&["plugin", "new", "--lang", "c", "volta"]);
        assert!(made.status.success(), "{}", err(&made));
        let kernel = self.path("volta/kernel.c");
        let source = fs::read_to_string(&kernel).unwrap();
        assert!(source.contains(edit.0), "`{}` is not in the kernel any more", edit.0);
        fs::write(&kernel, source.replace(edit.0, edit.1)).unwrap();
        self.build("volta", "make", &[&format!("CFLAGS={flags}")]);
        self.path("volta/libvolta.so").display().to_string()
    }
    fn build(&self, folder: &str, tool: &str, args: &[&str]) {
        let mut command = Command::new(tool);
        for name in ["CARGO_TARGET_DIR", "RUSTFLAGS", "CFLAGS", "CXXFLAGS", "MAKEFLAGS", "Q4"] {
            command.env_remove(name);
        }
        let built = command.current_dir(self.path(folder)).args(args).output().unwrap();
        assert!(built.status.success(), "{tool}: {}{}", out(&built), err(&built));
        // Warnings are faults of ours: nobody has touched it yet.
        assert!(!err(&built).contains("warning"), "{tool}: {}", err(&built));
    }
}

fn has(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|o| o.status.success());
    if !found {
        skipped(tool);
    }
    found
}

/// Said also by a run that passes: what macros print is kept back then.
fn skipped(what: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: no {what} here");
}

const READS_PAST_THE_END: (&str, &str) =
    ("sums[r] = lanes[r][0];", "sums[r] = lanes[r][0] + 0.f * w->scales[w->n * (w->k / GROUP) + row];");
const FAULTS: (&str, &str) = ("sums[r] = lanes[r][0];", "sums[r] = *(volatile float *)8;");

fn from_nothing_to_an_answer(language: &str, tool: &str, args: &[&str], library: &str) {
    if !has(tool) {
        return;
    }
    let desk = Desk::new();
    let made = desk.q4(&["--json", "plugin", "new", "--lang", language, "Volta_One"]);
    assert!(made.status.success(), "{}", err(&made));
    let report = document("plugin-new", &made);
    assert_eq!((&report["name"], &report["library"]), (&"volta-one".into(), &"libvolta_one.so".into()));
    for file in report["files"].as_array().unwrap() {
        let text = fs::read_to_string(desk.path("Volta_One").join(file.as_str().unwrap())).unwrap();
        for place in ["{{name}}", "{{lib}}", "{{so}}", "{{vendor}}", "{{q4}}"] {
            assert!(!text.contains(place), "{file} has a place that was not filled in: {place}");
        }
    }
    desk.build("Volta_One", tool, args);
    let library = desk.path("Volta_One").join(library).display().to_string();
    let plugin = ["--plugin", &library, "--backend", "volta-one"];
    let judged = desk.q4(&[&plugin[..], &["--json", "conformance"]].concat());
    assert!(judged.status.success(), "{}{}", out(&judged), err(&judged));
    let report = document("conformance", &judged);
    assert_eq!((&report["conformant"], &report["complete"]), (&true.into(), &true.into()));
    assert_eq!(fs::read_dir(desk.path("data/q4/certificates")).unwrap().count(), 1);
    let prompt = ["--json", "generate", "demo", "-p", "Who are you?", "--temperature", "0"];
    let answer = desk.q4(&[&plugin[..], &prompt].concat());
    assert!(answer.status.success(), "{}", err(&answer));
    let report = document("generate", &answer);
    assert_eq!(report["text"], "I am the q4 demo model, made of four-bit numbers.");
    let executed = report["executed"].as_array().unwrap();
    assert_eq!((executed.len(), &executed[0]["backend"]), (1, &"volta-one".into()), "{report}");

    // A debugger on a program that uses it: the loader's name of the library must not be one of the
    // debugger's own pipes.
    if language == "c" && has("gdb") {
        let gdb =
            ["gdb", "-q", "-batch", "-ex", "set debuginfod enabled off", "-ex", "set breakpoint pending on"];
        let gdb = [&gdb[..], &["-ex", "break kernel_row", "-ex", "run", "-ex", "bt 3", "--args"]].concat();
        let seen = desk.under(&gdb, &[&plugin[..], &["generate", "demo", "-p", "Who are you?"]].concat());
        let text = out(&seen);
        for words in ["#0  kernel_row (", " at kernel.c:", " in forward_task (", " at plugin.c:"] {
            assert!(text.contains(words), "no `{words}`: {text}{}", err(&seen));
        }
    }
}

#[test]
fn a_c_project_is_certified_and_answers() {
    from_nothing_to_an_answer("c", "make", &[], "libvolta_one.so");
}

#[test]
fn a_cpp_project_is_certified_and_answers() {
    from_nothing_to_an_answer("cpp", "make", &[], "libvolta_one.so");
}

#[test]
fn a_rust_project_is_certified_and_answers() {
    let library = "target/release/libvolta_one.so";
    from_nothing_to_an_answer("rust", "cargo", &["build", "--release", "--offline"], library);
}

#[test]
fn a_project_is_written_whole_or_not_at_all() {
    let desk = Desk::new();
    let new = |args: &[&str]| desk.q4(&[&["plugin", "new", "--lang", "c++"][..], args].concat());
    let refused = |args: &[&str], word: &str| {
        let output = new(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", err(&output));
        assert!(err(&output).contains(word), "{args:?}: {}", err(&output));
    };
    fs::create_dir_all(desk.path("full")).unwrap();
    fs::write(desk.path("full/thesis.txt"), "years").unwrap();
    fs::write(desk.path("file"), "a file").unwrap();
    std::os::unix::fs::symlink(desk.path("nowhere"), desk.path("link")).unwrap();
    refused(&["full"], "files in it");
    refused(&["file"], "a file");
    refused(&["link"], "leads nowhere");
    refused(&["9lives"], "a letter first");
    refused(&["ok", "--name", "Nf4"], "a letter first");
    refused(&["nf4-kernel"], "no name of a backend that q4 has");
    refused(&["ok", "--vendor", "a\"b"], "--vendor");
    let names = |path: &Path| {
        let mut all: Vec<_> = fs::read_dir(path).unwrap().map(|f| f.unwrap().file_name()).collect();
        all.sort();
        all
    };
    assert_eq!(names(desk.0.path()), ["file", "full", "link"]);
    assert_eq!(
        (names(&desk.path("full")), fs::read_to_string(desk.path("file")).unwrap()),
        (vec!["thesis.txt".into()], "a file".into())
    );
    // Empty is as good as absent, and folders above are made.
    fs::create_dir(desk.path("empty")).unwrap();
    for folder in ["empty", "a/b/c1"] {
        assert!(new(&[folder]).status.success(), "{folder}");
        let want =
            [".gitignore", "Makefile", "README.md", "kernel.cpp", "kernel.hpp", "plugin.cpp", "q4_plugin.h"];
        assert_eq!(names(&desk.path(folder)), want);
    }
}

#[test]
fn the_header_is_the_one_this_program_was_built_with() {
    let header = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/abi/include/q4_plugin.h");
    let header = fs::read_to_string(header).unwrap();
    let desk = Desk::new();
    assert_eq!(out(&desk.q4(&["plugin", "header"])), header);
    assert_eq!(document("plugin-header", &desk.q4(&["--json", "plugin", "header"]))["header"], header);
}

/// One process: no child is started, the file itself is mapped, and there is never a certificate.
#[test]
#[cfg(target_os = "linux")]
fn a_case_runs_in_one_process() {
    let desk = Desk::new();
    // It ends every process that has a parent of its own name, or maps it otherwise than from its file.
    let edit = ("lanes[TILE][GROUP] = {{0}}", "lanes[TILE][GROUP] = {{only_here()}}");
    let library = {
        let made = desk.q4(&["plugin", "new", "--lang", "c", "volta"]);
        assert!(made.status.success(), "{}", err(&made));
        let kernel = desk.path("volta/kernel.c");
        let source = fs::read_to_string(&kernel).unwrap().replace(edit.0, edit.1);
        let check = "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n\
            __attribute__((constructor)) static void counts(void) { FILE *f = fopen(getenv(\"SEEN\"), \"a\"); \
            fprintf(f, \"%d\\n\", (int)getpid()); fclose(f); }\n\
            static float only_here(void) { static int found; if (found) return 0.f; char line[4096]; FILE *f = fopen(\"/proc/self/maps\", \"r\"); \
            while (fgets(line, sizeof line, f)) found |= strstr(line, \"/volta/libvolta.so\") != 0; fclose(f); \
            if (!found) abort(); return 0.f; }\n";
        fs::write(&kernel, check.to_owned() + &source).unwrap();
        desk.build("volta", "make", &["CFLAGS=-O1"]);
        desk.path("volta/libvolta.so").display().to_string()
    };
    let run = |args: &[&str]| {
        let _ = fs::remove_file(desk.path("seen"));
        let mut command = q4();
        desk.home(&mut command);
        command.env("SEEN", desk.path("seen")).args(["--plugin", &library, "conformance", "--in-process"]);
        let output = command.args(args).output().unwrap();
        let seen = fs::read_to_string(desk.path("seen")).unwrap_or_default();
        (output, seen.lines().count())
    };
    let (output, processes) = run(&["--replay", CASE]);
    assert!(output.status.success(), "{}{}", out(&output), err(&output));
    assert!(out(&output).contains("1 passed, 0 failed"), "{}", out(&output));
    assert_eq!(processes, 1, "the library was loaded into other processes too");
    // Everything passes, and yet it is no run that a certificate is written for.
    let (output, _) = run(&["--json"]);
    assert!(output.status.success(), "{}", err(&output));
    let report = document("conformance", &output);
    assert_eq!((&report["conformant"], &report["complete"]), (&true.into(), &false.into()));
    assert!(!desk.path("data/q4/certificates").exists());
}

#[test]
#[cfg(target_os = "linux")]
fn a_crash_names_library_and_offset_and_the_message_is_in_words() {
    let desk = Desk::new();
    let library = desk.volta("-O1 -g", FAULTS);
    let output = desk.q4(&["--plugin", &library, "conformance", "--replay", CASE]);
    assert_eq!(output.status.code(), Some(5), "{}", err(&output));
    let text = out(&output);
    let at =
        text.find("signal 11 (SIGSEGV) at address 0x8 in libvolta.so+0x").unwrap_or_else(|| panic!("{text}"));
    assert!(text[at..].contains("; on the stack: libvolta.so+0x"), "{text}");
    if has("addr2line") {
        let offset = text[at..].split_once("libvolta.so+").unwrap().1;
        let offset = offset.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap();
        let place = Command::new("addr2line").args(["-Cfe", &library, offset]).output().unwrap();
        let source = fs::read_to_string(desk.path("volta/kernel.c")).unwrap();
        let line = 1 + source.lines().position(|l| l.contains(FAULTS.1)).unwrap();
        let found = out(&place);
        assert!(found.starts_with("kernel_row\n") && found.contains(&format!("kernel.c:{line}")), "{found}");
    }
    for word in ["Err(", "Reject {", "Some(", "[Reject"] {
        assert!(!text.contains(word), "{text}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn gdb_shows_source_lines_of_one_case() {
    if !has("gdb") {
        return;
    }
    let desk = Desk::new();
    let library = desk.volta("-O1 -g", FAULTS);
    let gdb =
        ["gdb", "-q", "-batch", "-ex", "set debuginfod enabled off", "-ex", "run", "-ex", "bt 2", "--args"];
    let seen = desk.under(&gdb, &["--plugin", &library, "conformance", "--replay", CASE, "--in-process"]);
    let text = out(&seen);
    assert!(
        text.contains("SIGSEGV") && text.contains("#0 ") && text.contains("kernel_row ("),
        "{text}{}",
        err(&seen)
    );
    assert!(text.contains(" at kernel.c:") && text.contains(" at plugin.c:"), "{text}");
}

#[test]
#[cfg(target_os = "linux")]
fn valgrind_finds_a_read_past_the_end_and_hidden_instructions_are_named() {
    if !has("valgrind") {
        return;
    }
    let desk = Desk::new();
    let library = desk.volta("-O1 -g", READS_PAST_THE_END);
    let valgrind = ["valgrind", "-q", "--error-exitcode=99"];
    let case = ["--plugin", &library, "conformance", "--replay", CASE, "--in-process"];
    let seen = desk.under(&valgrind, &case);
    assert_eq!(seen.status.code(), Some(99), "{}", err(&seen));
    assert!(err(&seen).contains("Invalid read of size 4"), "{}", err(&seen));
    assert!(err(&seen).contains("kernel_row (kernel.c:"), "{}", err(&seen));

    // A backend for instructions that valgrind does not have claims nothing there.
    let facts = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if !facts.contains(" avx512bw ") {
        return skipped("AVX-512");
    }
    let plugin = desk.path("volta/plugin.c");
    let source = fs::read_to_string(&plugin).unwrap();
    let (from, to) = (
        "    check(spec, &v);\n    return v.is_refused",
        "    check(spec, &v);\n    if (!memmem(env->cpu_features.ptr, env->cpu_features.len, \"avx512bw\", 8))\n        \
         refuse(&v, \"device-arch\", \"avx512bw\", \"without\", 0);\n    return v.is_refused",
    );
    assert!(source.contains(from));
    fs::write(&plugin, "#define _GNU_SOURCE\n".to_owned() + &source.replace(from, to)).unwrap();
    desk.build("volta", "make", &["CFLAGS=-O1 -g"]);
    let seen = desk.under(&["valgrind", "-q"], &case);
    assert_eq!(seen.status.code(), Some(5), "{}{}", out(&seen), err(&seen));
    assert!(out(&seen).contains("the processor has ") && out(&seen).contains(" avx512bw "), "{}", out(&seen));
    assert!(
        out(&seen).contains("valgrind") && !err(&seen).contains("Q4-E0901"),
        "{}{}",
        out(&seen),
        err(&seen)
    );
}

#[test]
#[cfg(target_os = "linux")]
fn the_head_of_a_sanitizers_report_is_shown() {
    let found = Command::new("cc").arg("-print-file-name=libasan.so").output().unwrap();
    let runtime = out(&found).trim().to_owned();
    if !runtime.starts_with('/') {
        return skipped("libasan");
    }
    let desk = Desk::new();
    let library = desk.volta("-O1 -g -fsanitize=address", READS_PAST_THE_END);
    let with = |args: &[&str], preload: bool| {
        let mut command = q4();
        desk.home(&mut command);
        if preload {
            command.env("LD_PRELOAD", &runtime).env("ASAN_OPTIONS", "detect_leaks=0");
        }
        command.args(["--plugin", &library, "conformance", "--replay", CASE]).args(args).output().unwrap()
    };
    let words = ["AddressSanitizer: heap-buffer-overflow", "kernel_row ", "kernel.c:"];
    let alone = with(&["--in-process"], true);
    assert!(!alone.status.success());
    words.iter().for_each(|w| assert!(err(&alone).contains(w), "no {w}: {}", err(&alone)));
    let judged = with(&[], true);
    assert_eq!(judged.status.code(), Some(5), "{}{}", out(&judged), err(&judged));
    words.iter().for_each(|w| assert!(out(&judged).contains(w), "no {w}: {}", out(&judged)));
    // Without the runtime the trial fails, and says what the sanitizer said.
    let refused = with(&[], false);
    assert!(!refused.status.success());
    assert!(err(&refused).contains("ASan runtime does not come first"), "{}", err(&refused));
}

#[test]
fn lists_are_one_json_document() {
    let desk = Desk::new();
    let backend = ["--backend", "nf4-kernel", "conformance", "--list", "--level", "L1"];
    let text = out(&desk.q4(&backend));
    let list = document("conformance-list", &desk.q4(&[&["--json"][..], &backend].concat()));
    let names: Vec<&str> =
        list["backends"][0]["cases"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
    assert!(names.len() > 10 && names == text.lines().collect::<Vec<_>>());
    assert_eq!(list["backends"][0]["name"], "nf4-kernel");
    let matrix = document("diagnose-matrix", &desk.q4(&["--json", "diagnose", "--matrix"]));
    let rows = matrix["rows"].as_array().unwrap();
    let table = out(&desk.q4(&["diagnose", "--matrix"]));
    assert_eq!(rows.len() + 2, table.lines().count(), "{table}");
    assert!(rows.iter().any(|r| r["backend"] == "nf4-kernel" && r["path"] == "fused-dequant"), "{matrix}");
}
