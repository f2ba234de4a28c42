//! Libraries that are damaged, foreign, or mean harm: each is refused with its code, and one process survives
//! them all.
#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
#![allow(clippy::unwrap_used)]
mod built;

use q4_core::{Code, Error, RejectCode};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

struct Refused {
    count: usize,
    dir: tempfile::TempDir,
}

impl Refused {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `path` is refused with `code`, and its reason says `word` and which file it is.
    fn file(&mut self, path: &Path, code: RejectCode, word: &str) {
        let refusal =
            q4_plugin_host::load(path).err().unwrap_or_else(|| panic!("{} was loaded", path.display()));
        let texts: Vec<String> = refusal.reasons.iter().map(ToString::to_string).collect();
        assert!(refusal.reasons.iter().any(|r| r.code == code), "{}: {texts:?}", path.display());
        assert!(texts.iter().any(|t| t.contains(word)), "{}: `{word}` in {texts:?}", path.display());
        assert!(texts.iter().all(|t| t.contains(&*path.to_string_lossy())), "{texts:?}");
        let error = Error::from(refusal);
        assert_eq!((error.code(), error.code().exit()), (Code::LibraryRefused, 6));
        self.count += 1;
    }

    /// A copy of a good library with `bytes` written at `at`.
    fn patched(&mut self, good: &[u8], at: usize, bytes: &[u8], code: RejectCode, word: &str) {
        let path = self.path(&format!("patched-{at}-{}.so", self.count));
        let mut copy = good.to_vec();
        copy[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(&path, copy).unwrap();
        self.file(&path, code, word);
    }

    /// The stub with one thing wrong.
    fn stub(&mut self, name: &str, edits: &[(&str, &str)], code: RejectCode, word: &str) {
        let path = built::stub(self.dir.path(), name, edits);
        self.file(&path, code, word);
    }
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn every_hostile_library_is_refused_in_one_process() {
    let mut r = Refused { count: 0, dir: tempfile::tempdir().unwrap() };
    files(&mut r);
    headers(&mut r);
    descriptors(&mut r);
    tables(&mut r);
    // After all of that, a good library still loads here.
    let good = built::stub(r.dir.path(), "good", &[]);
    assert_eq!(q4_plugin_host::load(&good).map(|l| l.descriptor.name).ok().as_deref(), Some("stub"));
    assert!(r.count >= 70, "{}", r.count);
}

fn files(r: &mut Refused) {
    use RejectCode::LibraryMissing as Missing;
    let good = built::stub(r.dir.path(), "owned", &[]);
    r.file(&r.path("absent.so"), Missing, "No such file");
    r.file(Path::new("stub.so"), Missing, "a path with a folder");
    let folder = r.path("");
    r.file(&folder, Missing, "regular file");
    r.file(Path::new("/dev/zero"), Missing, "regular file");
    let pipe = r.path("pipe.so");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    r.file(&pipe, Missing, "regular file");
    symlink(r.path("loop-b.so"), r.path("loop-a.so")).unwrap();
    symlink(r.path("loop-a.so"), r.path("loop-b.so")).unwrap();
    r.file(&r.path("loop-a.so"), Missing, "symbolic links");
    symlink(r.path("absent.so"), r.path("dangling.so")).unwrap();
    r.file(&r.path("dangling.so"), Missing, "No such file");
    // Regular, and not to be read from its start: also for root, whom permissions do not stop.
    r.file(Path::new("/proc/self/mem"), Missing, "unreadable");
    let copy = |name: &str| {
        let to = r.path(name);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(&good, &to).unwrap();
        to
    };
    let (open_file, open_folder, deep) = (copy("open.so"), copy("open/p.so"), copy("above/below/p.so"));
    let (sticky, linked) = (copy("sticky/p.so"), copy("kept/p.so"));
    chmod(&open_file, 0o757);
    chmod(open_folder.parent().unwrap(), 0o777);
    chmod(deep.parent().unwrap().parent().unwrap(), 0o777);
    chmod(sticky.parent().unwrap(), 0o1777);
    let link = r.path("open/link.so");
    symlink(&linked, &link).unwrap();
    for path in [open_file, open_folder, deep, sticky, link] {
        r.file(&path, RejectCode::LibraryUntrusted, "writable by everybody");
    }
    assert!(q4_plugin_host::load(&linked).is_ok(), "the same file by its own name");
}

fn headers(r: &mut Refused) {
    use RejectCode::{AbiMismatch, LibraryMissing as Missing};
    let good = fs::read(built::stub(r.dir.path(), "headers", &[])).unwrap();
    let mut part = |name: &str, bytes: &[u8], word: &str| {
        let path = r.path(name);
        fs::write(&path, bytes).unwrap();
        r.file(&path, Missing, word);
    };
    part("empty.so", b"", "no ELF header");
    part("text.so", b"#!/bin/sh\necho pwned\n", "no ELF header");
    part("header.so", &good[..100], "program headers");
    part("half.so", &good[..good.len() / 2], "a file of");
    part("cut.so", &good[..good.len() - 64], "section headers");
    part("tail.so", &[&good[..], b"and more"].concat(), "8 bytes behind its end");
    r.patched(&good, 18, &[8, 0], AbiMismatch, "machine 8");
    r.patched(&good, 4, &[1], AbiMismatch, "class 1");
    r.patched(&good, 5, &[2], AbiMismatch, "encoding 2");
    r.patched(&good, 16, &[2, 0], AbiMismatch, "type 2");
    r.patched(&good, 32, &[0xff; 8], Missing, "program headers");
    r.patched(&good, 54, &[1, 0], Missing, "program headers");
    r.patched(&good, 64 + 32, &[0xff; 8], Missing, "segment");
    // Every program header becomes one that is not known: there is no dynamic section then.
    let (mut blind, count) = (good.clone(), usize::from(good[56]));
    (0..count).for_each(|i| blind[64 + 56 * i..][..4].fill(0x7f));
    let path = r.path("blind.so");
    fs::write(&path, blind).unwrap();
    r.file(&path, Missing, "dynamic section");
}

const DESCRIPTOR: &str = "Q4_PLUGIN_DESCRIPTOR(NAME, \"1.0\", \"nobody\");";

fn descriptors(r: &mut Refused) {
    use RejectCode::{AbiMismatch, LibraryMissing, LibraryTooOld, SymbolMissing};
    let fields = |magic: &str, size: &str, major: &str, name: &str| {
        format!(
            "Q4_EXPORT const q4_descriptor q4_plugin_descriptor = {{{magic}, {size}, {major}, 1u, 0u, {name}, \"1.0\", \"nobody\"}};"
        )
    };
    let (magic, size) = ("{'q','4','p','l','u','g','i','n'}", "sizeof(q4_descriptor)");
    let mut with = |case: &str, text: &str, code, word| r.stub(case, &[(DESCRIPTOR, text)], code, word);
    with("no-descriptor", "", SymbolMissing, "q4_plugin_descriptor");
    with(
        "bad-magic",
        &fields("{'p','l','u','g','i','n','q','4'}", size, "1u", "NAME"),
        AbiMismatch,
        "pluginq4",
    );
    with("newer-major", &fields(magic, size, "2u", "NAME"), AbiMismatch, "interface 2.1");
    with("older-major", &fields(magic, size, "0u", "NAME"), LibraryTooOld, "interface 0.1");
    with("short-descriptor", &fields(magic, "24u", "1u", "NAME"), AbiMismatch, "24");
    with("upper-case", &fields(magic, size, "1u", "\"Stub\""), AbiMismatch, "`Stub`");
    with("traversal", &fields(magic, size, "1u", "\"../stub\""), AbiMismatch, "`../stub`");
    with("no-name", &fields(magic, size, "1u", "\"\""), AbiMismatch, "a name of");
    with("not-utf8", &fields(magic, size, "1u", "\"s\\xff\""), AbiMismatch, "UTF-8");
    let endless = format!("\"{}\"", "a".repeat(64));
    with("endless-name", &fields(magic, size, "1u", &endless), AbiMismatch, "UTF-8 that ends");
    let control = fields(magic, size, "1u", "NAME").replace("\"nobody\"", "\"no\\033[2Jbody\"");
    with("escape-sequence", &control, AbiMismatch, "a vendor");
    // Another declaration than the header's.
    let include =
        "#define q4_plugin_descriptor declared\n#include \"q4_plugin.h\"\n#undef q4_plugin_descriptor";
    let mut own = |case: &str, text: &str, word| {
        let edits = [("#include \"q4_plugin.h\"", include), (DESCRIPTOR, text)];
        r.stub(case, &edits, AbiMismatch, word);
    };
    own("in-bss", "Q4_EXPORT q4_descriptor q4_plugin_descriptor;", "constant data");
    own("tiny", "Q4_EXPORT const char q4_plugin_descriptor[4] = {'q', '4', 'p', 'l'};", "constant data");
    let changing = format!(
        "{}\n__attribute__((constructor)) static void change(void) {{ memcpy(q4_plugin_descriptor.name, \"other\", 6); }}",
        fields(magic, size, "1u", "NAME").replace("const ", "")
    );
    own("changing", &changing, "in memory");
    let query = "q4_status q4_plugin_query(uint32_t major";
    r.stub("no-query", &[(query, "static q4_status ask(uint32_t major")], SymbolMissing, "q4_plugin_query");
    r.stub(
        "unresolved",
        &[(
            "    return say(err, Q4_OK, \"\");\n}\nstatic void release",
            "    extern int nowhere(void);\n    return nowhere();\n}\nstatic void release",
        )],
        LibraryMissing,
        "nowhere",
    );
}

fn tables(r: &mut Refused) {
    use RejectCode::{AbiMismatch, Internal, Panicked, SchemaUnsupported};
    const ANSWER: &str = "out->table = &TABLE;\n    return Q4_OK;";
    let mut answer = |case: &str, text: &str, code, word| r.stub(case, &[(ANSWER, text)], code, word);
    answer("says-abi", "return Q4_E_ABI;", AbiMismatch, "does not have it");
    answer("says-nonsense", "return 12345;", Internal, "12345");
    answer("says-panicked", "return Q4_E_PANICKED;", Panicked, "panicked");
    answer("no-table", "out->table = 0; return Q4_OK;", AbiMismatch, "NULL");
    answer("wild-table", "out->table = (void *)16; return Q4_OK;", AbiMismatch, "0x10");
    answer("crooked-table", "out->table = (char *)&TABLE + 1; return Q4_OK;", AbiMismatch, "aligned");
    let edge = "out->table = (void *)((uintptr_t)-1 - 7); return Q4_OK;";
    answer("table-at-the-edge", edge, AbiMismatch, "memory that can be read");
    const SIZE: &str = ".struct_size = sizeof(q4_backend_v1)";
    r.stub("empty-table", &[(SIZE, ".struct_size = 0")], AbiMismatch, "struct_size 0");
    r.stub(
        "short-table",
        &[(SIZE, ".struct_size = offsetof(q4_backend_v1, probe) - 1")],
        AbiMismatch,
        "at least",
    );
    r.stub("table-of-2", &[(".abi_major = Q4_ABI_MAJOR", ".abi_major = 2")], AbiMismatch, "table of 2.");
    for name in [
        "create",
        "destroy",
        "can_prepare",
        "prepare",
        "release",
        "info",
        "workspace",
        "forward",
        "dequantize",
    ] {
        let (from, to) = (format!(".{name} = {name}"), format!(".{name} = NULL"));
        r.stub(&format!("without-{name}"), &[(&from, &to)], AbiMismatch, &format!("`{name}`"));
    }
    r.stub("data-as-code", &[(".forward = forward", ".forward = (void *)OFFERS")], AbiMismatch, "no code");
    r.stub("wild-code", &[("/*LATE*/", ".probe = (void *)1,")], AbiMismatch, "`probe`");
    r.stub(
        "another-name",
        &[(".name = Q4_STR(NAME)", ".name = Q4_STR(\"nvfp4-kernel\")")],
        AbiMismatch,
        "`nvfp4-kernel`",
    );
    r.stub("wild-name", &[(".name = Q4_STR(NAME)", ".name = {(char *)8, 4}")], AbiMismatch, "no text");
    r.stub(
        "endless-text",
        &[(".version = Q4_STR(\"1.0\")", ".version = {\"1.0\", (size_t)-1}")],
        AbiMismatch,
        "no text",
    );
    r.stub("no-offer", &[(".n_offers = 1", ".n_offers = 0")], AbiMismatch, "offers");
    r.stub("offers-nowhere", &[(".offers = OFFERS", ".offers = NULL")], AbiMismatch, "offers");
    r.stub("a-billion-offers", &[(".n_offers = 1", ".n_offers = 1000000000")], AbiMismatch, "offers");
    r.stub("unknown-offers", &[("{{Q4_SCHEMA_NVFP4, 1,", "{{77, 1,")], SchemaUnsupported, "77");
    const CREATE: &str = "*out = &BACKEND; return say(err, Q4_OK, \"\");";
    r.stub(
        "create-fails",
        &[(CREATE, "return say(err, Q4_E_DEVICE, \"no accelerator\");")],
        Internal,
        "no accelerator",
    );
    r.stub(
        "create-panics",
        &[(CREATE, "return say(err, Q4_E_PANICKED, \"index out of bounds\");")],
        Panicked,
        "index out of bounds",
    );
    r.stub("create-nothing", &[(CREATE, "return say(err, Q4_OK, \"\");")], Internal, "NULL");
}
