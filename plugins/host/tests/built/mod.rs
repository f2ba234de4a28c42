//! Libraries for the tests: the examples, built once as their authors would build them, and C sources
//! compiled with `cc`.
#![allow(dead_code, clippy::unwrap_used)] // every test file uses a part of it
pub mod groups;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// `plugins/`, from any package of the workspace.
pub fn plugins() -> PathBuf {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.map(|a| a.join("plugins")).find(|p| p.join("abi/include").is_dir()).unwrap()
}

/// Folder with the examples. Cargo keeps concurrent test processes from building at the same time; the copy
/// that follows is written under another name and renamed, so nobody maps half a file.
static EXAMPLES: LazyLock<PathBuf> = LazyLock::new(|| {
    let target = plugins().join("../target/plugin-examples");
    let out = target.join(format!("out-{}", std::process::id()));
    let built = Command::new("sh")
        .arg(plugins().join("examples/build.sh"))
        .arg(&out)
        .env("CARGO_TARGET_DIR", &target)
        .env_remove("RUSTFLAGS")
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let done = target.join("out");
    std::fs::create_dir_all(&done).unwrap();
    for name in ["libacme_arena.so", "libacme_c.so", "libacme_nvfp4.so"] {
        std::fs::rename(out.join(name), done.join(name)).unwrap();
    }
    std::fs::remove_dir(&out).unwrap();
    done.canonicalize().unwrap()
});

/// The C example.
pub fn acme_c() -> PathBuf {
    EXAMPLES.join("libacme_c.so")
}

/// The C example on a device of its own.
pub fn acme_arena() -> PathBuf {
    EXAMPLES.join("libacme_arena.so")
}

/// The Rust example.
pub fn acme_nvfp4() -> PathBuf {
    EXAMPLES.join("libacme_nvfp4.so")
}

/// Compiles C `source` against the header into `dir/name.so`.
pub fn compile(dir: &Path, name: &str, flags: &[&str], source: &str) -> PathBuf {
    let (file, so) = (dir.join(format!("{name}.c")), dir.join(format!("{name}.so")));
    std::fs::write(&file, source).unwrap();
    let built = Command::new("cc")
        .args(["-std=c11", "-w", "-O1", "-fPIC", "-shared"])
        .args(flags)
        .arg("-I")
        .arg(plugins().join("abi/include"))
        .arg(&file)
        .arg("-o")
        .arg(&so)
        .arg("-lm")
        .output()
        .unwrap();
    assert!(built.status.success(), "{name}: {}", String::from_utf8_lossy(&built.stderr));
    so
}

/// A plugin that does everything right and computes nothing, with `edits` made to its source: each `(from,
/// to)` must be there.
pub fn stub(dir: &Path, name: &str, edits: &[(&str, &str)]) -> PathBuf {
    edited(dir, name, include_str!("stub.c"), &[], edits)
}

/// The C example, edited, with the flags of a compiler.
pub fn example(dir: &Path, name: &str, flags: &[&str], edits: &[(&str, &str)]) -> PathBuf {
    edited(dir, name, &acme_c_source(), flags, edits)
}

/// The C example as one source, with what it includes of its own.
pub fn acme_c_source() -> String {
    let read = |file: &str| std::fs::read_to_string(plugins().join("examples/c").join(file)).unwrap();
    let mut source = read("acme_c.c");
    for header in ["acme_numbers.h", "acme_kernels.h"] {
        let text = read(header).replace("#include \"acme_numbers.h\"\n", "");
        source = source.replace(&format!("#include \"{header}\"\n"), &text);
    }
    source
}

/// The C example on a device of its own, edited.
pub fn arena(dir: &Path, name: &str, edits: &[(&str, &str)]) -> PathBuf {
    let folder = plugins().join("examples/c");
    let source = std::fs::read_to_string(folder.join("acme_arena.c")).unwrap();
    // It includes the other one.
    let include = format!("-I{}", folder.display());
    edited(dir, name, &source, &["-ffp-contract=off", "-fvisibility=hidden", &include], edits)
}

/// The C example, edited, that accepts of its products only those where `accepts` holds, a condition in C on
/// the spec `s`.
pub fn narrow(dir: &Path, name: &str, accepts: &str, edits: &[(&str, &str)]) -> PathBuf {
    let (check, first) =
        ("static void check(const q4_linear_spec *s,", "    if (s->path != Q4_PATH_FUSED_DEQUANT)\n");
    let each = format!(
        "static int each(const q4_linear_spec *s, uint64_t factor)
{{
    for (uint64_t i = 0; i < s->n_segments; i++)
        if (s->segment_rows[i] % factor)
            return 0;
    return 1;
}}

{check}"
    );
    let refused = format!(
        "    if (!({accepts}))
        refuse(v, \"shape-unsupported\", \"a narrower product\", \"this one\");
{first}"
    );
    example(dir, name, &[], &[&[(check, &*each), (first, &*refused)][..], edits].concat())
}

/// The C example with one attack of `attack.h` in it: `-DATTACK_NAME` and more `flags`. Whenever code of it
/// runs, in whatever process, it says so in the file `witness`.
pub fn attack(dir: &Path, name: &str, flags: &[&str], witness: &Path) -> PathBuf {
    attack_with(dir, name, flags, witness, &[])
}

/// The same, edited.
pub fn attack_with(
    dir: &Path,
    name: &str,
    flags: &[&str],
    witness: &Path,
    edits: &[(&str, &str)],
) -> PathBuf {
    let header = plugins().join("host/tests/built/attack.h");
    let include = format!("#include \"{}\"\n#include \"q4_plugin.h\"", header.display());
    let product = "return product(p, x, y, p->k, all, all, forward_task, parts, exec, err);";
    let attacked = "q4_status done;
    before();
    done = product(p, x, y, p->k, all, all, forward_task, parts, exec, err);
    if (done == Q4_OK && lies(p->n, p->k, x->rows, p->max_m, p->stranger, exec ? exec->threads : 0))
        for (uint64_t r = 0; r < y->rows; r++)
            store((char *)y->data + r * y->ld * size_of(y->dtype), y->dtype, all - 1, 7.0f);
    after(x->data, y->data, y->bytes);
    return done;";
    let known = "p->n = spec->n, p->k = spec->k, p->max_m = spec->max_m;
    p->stranger = spec->segment_names[0].len > 6 && !memcmp(spec->segment_names[0].ptr, \"model.\", 6);";
    let splices = [
        ("#include \"q4_plugin.h\"", &*include),
        ("    uint64_t n, k, max_m;\n", "    uint64_t n, k, max_m;\n    int stranger;\n"),
        ("p->n = spec->n, p->k = spec->k, p->max_m = spec->max_m;", known),
        (product, attacked),
        ("    if (p) {\n        free(p->codes);", "    if (p) {\n        leave();\n        free(p->codes);"),
    ];
    // Counted by whoever asks for the output of tests.
    println!("hostile library: {}", flags.join(" "));
    let witness = format!("-DWITNESS=\"{}\"", witness.display());
    let flags =
        [&[&*witness, "-D_GNU_SOURCE", "-ffp-contract=off", "-fvisibility=hidden"][..], flags].concat();
    example(dir, name, &flags, &[&splices[..], edits].concat())
}

fn edited(dir: &Path, name: &str, source: &str, flags: &[&str], edits: &[(&str, &str)]) -> PathBuf {
    let mut source = source.to_owned();
    for (from, to) in edits {
        assert!(source.contains(from), "{name}: `{from}` is not in the source any more");
        source = source.replace(from, to);
    }
    compile(dir, name, flags, &source)
}
