//! The name a library is mapped under leads to its bytes from any process, and says which library it is.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]
mod built;

use q4_plugin_host::Loader;
use std::fs;
use std::path::Path;

/// A stub that writes down what the system's loader calls it.
fn stub(dir: &Path) -> std::path::PathBuf {
    let early = format!(
        "#include <dlfcn.h>\n#include <stdio.h>\n__attribute__((constructor)) static void early(void) {{ Dl_info i; \
         dladdr((void *)early, &i); FILE *f = fopen(\"{}\", \"w\"); fputs(i.dli_fname, f); fclose(f); }}",
        dir.join("name").display()
    );
    let edits = [
        ("#include \"q4_plugin.h\"", "#define _GNU_SOURCE\n#include \"q4_plugin.h\""),
        ("/*EARLY*/", &early),
    ];
    built::stub(dir, "named", &edits)
}

#[test]
fn a_debugger_finds_the_bytes_and_a_profiler_the_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = stub(dir.path());
    q4_plugin_host::load(&path).unwrap();
    let name = fs::read_to_string(dir.path().join("name")).unwrap();
    // In another process /proc/self would be that process.
    assert!(name.starts_with(&format!("/proc/{}/fd/", std::process::id())), "{name}");
    assert_eq!(fs::read(&name).unwrap(), fs::read(&path).unwrap());
    let seen = std::process::Command::new("cat").arg(&name).output().unwrap();
    assert_eq!(seen.stdout, fs::read(&path).unwrap(), "another process sees something else there");
    assert!(fs::read_to_string("/proc/self/maps").unwrap().contains("/memfd:q4-named.so"));
}

#[test]
fn in_place_the_file_itself_is_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let path = fs::canonicalize(stub(dir.path())).unwrap();
    Loader { in_place: true, ..Loader::default() }.load(&path).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("name")).unwrap(), path.display().to_string());
}
