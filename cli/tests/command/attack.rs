//! Libraries whose author has read the source of q4: docs/threat-model.md has a row for each, with the test here that holds.
//!
//! Who has passed the suite and lies later is made by sealing a certificate for it, as the suite would have.
use crate::plugin::{User, built};
use crate::{document, err, out};
use q4_conformance::{Certificate, Certificates, Key};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const NAME: &str = "acme-c";
const CLAIMS: [&str; 3] = [
    "nvfp4@1/native/cpu/fused-dequant",
    "nf4@1/native/cpu/fused-dequant",
    "nf4-dq@1/native/cpu/fused-dequant",
];

/// A user, and the libraries that somebody gave them.
struct Scene {
    user: User,
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        Self { user: User::new(), dir: tempfile::tempdir().unwrap() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn witness(&self) -> PathBuf {
        self.at("witness")
    }

    /// Whether code of a library ran since this was asked last.
    fn ran(&self) -> bool {
        fs::remove_file(self.witness()).is_ok()
    }

    fn build(&self, attack: &str, more: &[&str]) -> PathBuf {
        let define = format!("-DATTACK_{attack}");
        let flags = [&[&*define][..], more].concat();
        built::attack(self.dir.path(), &attack.to_lowercase(), &flags, &self.witness())
    }

    fn edited(&self, name: &str, edits: &[(&str, &str)]) -> PathBuf {
        built::attack_with(self.dir.path(), name, &[], &self.witness(), edits)
    }

    fn all(&self) -> Certificates {
        Certificates::under(&self.user.data())
    }

    fn certificate(&self, plugin: &Path) -> Certificate {
        self.user.certificate(plugin, NAME, "1.0.0", &CLAIMS)
    }

    /// As if it had passed.
    fn certify(&self, plugin: &Path) -> PathBuf {
        self.all().write(&self.certificate(plugin)).unwrap()
    }

    /// The error of an attempt to use it: status 6, and these words in it.
    fn refused(&self, plugin: &Path, says: &[&str]) -> Value {
        let output = self.user.answer(plugin, &[]);
        assert_eq!(output.status.code(), Some(6), "{}: {}{}", plugin.display(), out(&output), err(&output));
        let error = document("error", &output);
        let text = error.to_string();
        says.iter().for_each(|word| assert!(text.contains(word), "{word}: {error}"));
        error
    }

    /// The same, and nothing of it ran in any process.
    fn refused_unrun(&self, plugin: &Path, says: &[&str]) {
        self.ran();
        self.refused(plugin, says);
        assert!(!self.ran(), "{}: it ran", plugin.display());
    }

    fn q4(&self, plugin: &Path, args: &[&str]) -> Output {
        self.user.q4(plugin).args(args).output().unwrap()
    }

    /// The answer it gives.
    fn answer(&self, plugin: &Path) -> Value {
        let output = self.user.answer(plugin, &[]);
        assert!(output.status.success(), "{}{}", out(&output), err(&output));
        document("generate", &output)
    }
}

/// Every attack of `attack.h` that compiles without more.
const ATTACKS: [&str; 29] = [
    "ALWAYS",
    "ARGV",
    "BEHIND",
    "CALL1000",
    "CLOSE012",
    "EXIT_CONSTRUCTOR",
    "EXIT_FORWARD",
    "EXIT_RELEASE",
    "FORGECASES",
    "FORGEJUDGE",
    "FORK",
    "HANG",
    "IFUNC",
    "INTERPOSE",
    "K4096",
    "K768",
    "M400",
    "MALLOC",
    "MXCSR",
    "M_BELOW_MAX",
    "NAMES",
    "PRINTS",
    "PROCESS",
    "RESTORES",
    "SIGNALS",
    "THREADS",
    "THREADS4",
    "THREAD_BACKGROUND",
    "TLS",
];

#[test]
fn without_a_certificate_nothing_of_any_runs() {
    let scene = Scene::new();
    for attack in ATTACKS {
        scene.refused_unrun(&scene.build(attack, &[]), &["conformance-missing", "none in"]);
    }
    // Whatever the verb, and whether or not the backend is named.
    let plugin = scene.build("ALWAYS", &[]);
    for verb in [
        &["diagnose"][..],
        &["explain", "demo"],
        &["logits", "demo", "--ids", "1", "--out", "/nonexistent/x"],
        &["trace", "demo", "--ids", "1", "--against", "reference"],
        &["bench", "demo"],
        &["eval", "demo", "--data", "/nonexistent"],
        &["chat", "demo"],
        &["--backend", NAME, "generate", "demo", "-p", "x"],
        &["--backend", "nvfp4-kernel", "generate", "demo", "-p", "x"],
    ] {
        let output = scene.q4(&plugin, verb);
        assert_eq!(output.status.code(), Some(6), "{verb:?}: {}{}", out(&output), err(&output));
        assert!(err(&output).contains("q4 conformance --plugin"), "{verb:?}: {}", err(&output));
        assert!(!scene.ran(), "{verb:?}: it ran");
    }
}

/// The JSON of a certificate for `plugin` that nobody sealed.
fn forged(scene: &Scene, plugin: &Path) -> String {
    serde_json::to_string(&scene.certificate(plugin)).unwrap()
}

#[test]
fn a_library_that_writes_its_own_certificate_has_none() {
    let scene = Scene::new();
    let target = scene.user.data().join("certificates/forged.json");
    fs::create_dir_all(target.parent().unwrap()).unwrap();
    let text = scene.at("forged.json");
    let [from, to] =
        [("FORGED", &text), ("TARGET", &target)].map(|(n, p)| format!("-D{n}=\"{}\"", p.display()));
    let plugin = scene.build("SELFCERT", &[&from, &to]);
    fs::write(&text, forged(&scene, &plugin)).unwrap();
    scene.refused_unrun(&plugin, &["conformance-missing", "none in"]);
    assert!(!target.exists());
    // Where it may run, in the suite, it writes one.
    scene.q4(&plugin, &["conformance", "--list"]);
    assert!(scene.ran() && target.exists());
    scene.refused_unrun(&plugin, &["void: seal: made with a key that is not in"]);
    Key::open_or_make(&scene.user.data()).unwrap();
    scene.refused_unrun(&plugin, &["void: seal: not written by q4 conformance of this user"]);
}

#[test]
fn a_forged_cache_of_self_checks_is_no_check() {
    let scene = Scene::new();
    // A library that is wrong everywhere, with a certificate: the self-check of this process is what is left.
    let plugin = scene.build("ALWAYS", &[]);
    scene.certify(&plugin);
    scene.refused(&plugin, &["Q4-E0307"]);
    // What q4 itself remembers of another user's run, with the library's kinds beside, under the right name and key.
    let output = crate::q4()
        .env("XDG_DATA_HOME", scene.user.0.path())
        .args(["generate", "-p", "x", "-n", "1"])
        .output();
    assert!(output.unwrap().status.success());
    let folder = scene.user.data().join("self-checks");
    let key = Key::open(&scene.user.data()).unwrap().unwrap();
    for file in fs::read_dir(&folder).unwrap().map(|f| f.unwrap().path()) {
        let mut cache: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let passed = cache["passed"].as_array_mut().unwrap();
        let sha256 = scene.certificate(&plugin).sha256;
        let forged = |kind: &Value| {
            let words: Vec<_> = kind.as_str().unwrap().split(" sha256 ").next().unwrap().split(' ').collect();
            format!("{NAME} 1.0.0 {} sha256 {sha256}", words[2..].join(" "))
        };
        let kinds: Vec<String> = passed.iter().map(forged).collect();
        passed.extend(kinds.into_iter().map(Value::from));
        cache.as_object_mut().unwrap().remove("hmac_sha256");
        fs::write(&file, key.seal(&cache).unwrap()).unwrap();
    }
    scene.refused(&plugin, &["Q4-E0307"]);
}

#[test]
fn a_certificate_of_something_else_is_void_and_says_of_what() {
    let scene = Scene::new();
    let plugin = scene.edited("honest", &[]);
    let other = scene.edited("other", &[("#define VENDOR  \"ACME\"", "#define VENDOR  \"ACME again\"")]);
    let whole = scene.certificate(&plugin);
    let changed = |change: &dyn Fn(&mut Certificate)| {
        let mut certificate = whole.clone();
        change(&mut certificate);
        certificate
    };
    for (certificate, says) in [
        (scene.certificate(&other), "void: library bytes, sha256"),
        (changed(&|c| c.machine = "00".repeat(16)), "void: machine: certified with"),
        (
            changed(&|c| {
                c.machine = "00".repeat(16);
                c.facts.push("avx1024".into());
            }),
            "certified with avx1024, now with nothing else",
        ),
        (changed(&|c| c.suite = "0.9.0".into()), "void: suite: certified 0"),
        (changed(&|c| c.version = "0.9.0".into()), "void: version: certified 0.9.0, now 1.0.0"),
        (changed(&|c| c.claims.clear()), "it certifies no claim"),
        (changed(&|c| c.schema = "q4.certificate/1".into()), "void: schema: certified q4.certificate/1"),
    ] {
        let file = scene.all().write(&certificate).unwrap();
        scene.refused_unrun(&plugin, &["conformance-missing", says, "q4 conformance --plugin"]);
        fs::remove_file(file).unwrap();
    }
    // Another user's is another key's.
    let theirs = Scene::new();
    let file = Certificates::under(&theirs.user.data()).write(&whole).unwrap();
    let own = scene.user.data().join("certificates").join(file.file_name().unwrap());
    fs::copy(&file, &own).unwrap();
    scene.refused_unrun(&plugin, &["void: seal: not written by q4 conformance of this user"]);
    // One value changed by hand.
    let file = scene.all().write(&whole).unwrap();
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("fused-dequant", "native-kernel")).unwrap();
    scene.refused_unrun(&plugin, &["void: seal: not written by q4 conformance of this user"]);
    // A key that others can read seals nothing.
    scene.certify(&plugin);
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(Key::path(&scene.user.data()), fs::Permissions::from_mode(0o644)).unwrap();
    scene.refused_unrun(&plugin, &["void: seal", "only you can read"]);
    fs::set_permissions(Key::path(&scene.user.data()), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(scene.answer(&plugin)["executed"][0]["backend"], NAME);
}

#[test]
fn pipes_and_devices_in_the_folders_of_q4_hang_nobody() {
    let scene = Scene::new();
    let (plugin, data) = (scene.edited("honest", &[]), scene.user.data());
    let file = scene.certify(&plugin);
    let generate = || {
        let mut command = crate::q4();
        command.env("XDG_DATA_HOME", scene.user.0.path()).args(["generate", "-p", "x", "-n", "1"]);
        let start = Instant::now();
        let output = command.output().unwrap();
        assert!(output.status.success() && start.elapsed() < Duration::from_secs(60), "{}", err(&output));
        err(&output)
    };
    generate();
    let cache = fs::read_dir(data.join("self-checks")).unwrap().next().unwrap().unwrap().path();
    for (kind, word) in
        [(&["mkfifo"][..], "a pipe"), (&["ln", "-s", "/dev/zero"], "a device"), (&["mkdir"], "a directory")]
    {
        for path in [&file, &cache] {
            fs::remove_file(path).unwrap();
            assert!(Command::new(kind[0]).args(&kind[1..]).arg(path).status().unwrap().success());
        }
        scene.refused_unrun(&plugin, &["conformance-missing", "void:", word]);
        let said = generate();
        assert!(said.contains("self-checks are not remembered") && said.contains(word), "{said}");
        for path in [&file, &cache] {
            if path.is_dir() {
                fs::remove_dir(path).unwrap()
            } else {
                fs::remove_file(path).unwrap()
            }
            fs::write(path, "").unwrap();
        }
    }
}

/// `write` fails as on a full disk: the limit of a file's size is 0, and the signal that says so is ignored.
#[test]
fn a_full_disk_keeps_no_part_of_a_file() {
    let scene = Scene::new();
    let script = "trap '' XFSZ; ulimit -f 0; exec \"$@\"";
    let words = ["generate", "-p", "x", "-n", "1"];
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_q4")]).args(words);
    let output = command.env("XDG_DATA_HOME", scene.user.0.path()).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    let files = |folder: PathBuf| {
        fs::read_dir(folder).into_iter().flatten().flatten().filter(|e| !e.path().is_dir()).count()
    };
    assert_eq!((files(scene.user.data()), files(scene.user.data().join("self-checks"))), (0, 0));
}

/// `name.so` with a function `payload` that says `lies`; its constructor leaves a trace in `WITNESS`.
fn payload(scene: &Scene, name: &str, lies: i32, flags: &[&str]) -> PathBuf {
    let ran = scene.at(&format!("{name}-ran"));
    let text = format!(
        "#include <fcntl.h>\n#include <unistd.h>\n__attribute__((constructor)) static void early(void) {{ \
         close(open(\"{}\", O_CREAT | O_WRONLY, 0600)); }}\nint payload(void) {{ return {lies}; }}\n",
        ran.display()
    );
    built::compile(scene.dir.path(), name, flags, &text)
}

fn payload_ran(scene: &Scene, name: &str) -> bool {
    fs::remove_file(scene.at(&format!("{name}-ran"))).is_ok()
}

#[test]
fn a_library_that_another_one_needs_is_certified_with_it() {
    let scene = Scene::new();
    let (dir, absolute) = (scene.dir.path().display().to_string(), scene.at("pay.so").display().to_string());
    let origin = "-Wl,-rpath,$ORIGIN".to_owned();
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{dir}");
    let folder = format!("-L{dir}");
    // By path; by name in a folder of an RPATH; by name beside itself; by name through another one.
    for (soname, flags) in [
        (&[][..], vec![&*absolute]),
        (&["-Wl,-soname,pay.so"], vec![&*rpath, &*folder, "-l:pay.so"]),
        (&["-Wl,-soname,pay.so"], vec![&*origin, &*folder, "-l:pay.so"]),
    ] {
        payload(&scene, "pay", 0, soname);
        let plugin = scene.build("PAYLOAD", &[&["-Wl,--no-as-needed"][..], &flags].concat());
        scene.certify(&plugin);
        assert_eq!(scene.answer(&plugin)["executed"][0]["backend"], NAME);
        assert!(payload_ran(&scene, "pay"), "it is loaded with it");
        payload(&scene, "pay", 1, soname);
        scene.refused_unrun(&plugin, &["conformance-missing", "pay.so, which it loads: certified"]);
        assert!(!payload_ran(&scene, "pay"), "{flags:?}: it ran");
        fs::remove_file(scene.at("pay.so")).unwrap();
        scene.refused_unrun(&plugin, &["library-missing", "pay.so"]);
    }
}

#[test]
fn what_a_needed_library_needs_is_certified_too() {
    let scene = Scene::new();
    let deep = |lies| payload(&scene, "deep", lies, &["-Wl,-soname,deep.so"]);
    deep(0);
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", scene.dir.path().display());
    let folder = format!("-L{}", scene.dir.path().display());
    let middle = "extern int payload(void);\nint middle(void) { return payload(); }\n";
    let flags = ["-Wl,-soname,mid.so", &*folder, "-Wl,--no-as-needed", "-l:deep.so"];
    built::compile(scene.dir.path(), "mid", &flags, middle);
    // Its RPATH finds what the one in the middle needs.
    let plugin = scene.build("NAMES", &[&rpath, &folder, "-Wl,--no-as-needed", "-l:mid.so"]);
    let certificate = scene.certificate(&plugin);
    let names: Vec<_> = certificate.needs.iter().map(|n| n.name.as_str()).collect();
    assert_eq!(names, ["deep.so", "mid.so"]);
    scene.all().write(&certificate).unwrap();
    deep(1);
    scene.refused_unrun(&plugin, &["deep.so, which it loads: certified"]);
    assert!(!payload_ran(&scene, "deep"));
}

#[test]
fn a_library_put_in_the_way_of_a_needed_one_is_not_taken() {
    let scene = Scene::new();
    payload(&scene, "pay", 0, &["-Wl,-soname,pay.so"]);
    let runpath = format!("-Wl,--enable-new-dtags,-rpath,{}", scene.dir.path().display());
    let folder = format!("-L{}", scene.dir.path().display());
    let plugin = scene.build("PAYLOAD", &["-Wl,--no-as-needed", &runpath, &folder, "-l:pay.so"]);
    scene.certify(&plugin);
    // The loader would look there before it looks where RUNPATH says.
    let way = Scene::new();
    payload(&way, "pay", 1, &["-Wl,-soname,pay.so"]);
    let mut command = scene.user.q4(&plugin);
    let output = command
        .env("LD_LIBRARY_PATH", way.dir.path())
        .args(["--json", "generate", "-p", "x"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", out(&output));
    assert!(document("error", &output).to_string().contains("pay.so, which it loads"), "{}", out(&output));
    assert!(!payload_ran(&way, "pay"));
}

#[test]
fn a_library_that_opens_another_one_by_itself_is_refused() {
    let scene = Scene::new();
    let other = payload(&scene, "pay", 1, &[]);
    let plugin = scene.build("DLOPEN", &[&format!("-DPAYLOAD=\"{}\"", other.display()), "-ldl"]);
    scene.certify(&plugin);
    scene.refused(&plugin, &["library-untrusted", "pay.so in the process"]);
    // So does the suite.
    let output = scene.q4(&plugin, &["--json", "conformance", "--list"]);
    assert_eq!(output.status.code(), Some(6));
    assert!(out(&output).contains("pay.so in the process"), "{}", out(&output));
}

#[test]
fn ways_around_needed_libraries_are_refused() {
    let scene = Scene::new();
    payload(&scene, "pay", 0, &[]);
    for (name, flag, says) in [
        ("filter", "-Wl,-F,pay.so", "filters or auditors"),
        ("auxiliary", "-Wl,-f,pay.so", "filters or auditors"),
        ("audit", "-Wl,--audit,/tmp/pay.so", "filters or auditors"),
        ("absent", "-Wl,--no-as-needed,-l:pay.so", "none in"),
    ] {
        let folder = format!("-L{}", scene.dir.path().display());
        // Without a soname it is known by the name the linker was given.
        payload(&scene, "pay", 0, &["-Wl,-soname,pay.so"]);
        let plugin = built::attack(scene.dir.path(), name, &[&folder, flag], &scene.witness());
        scene.refused_unrun(&plugin, &["Q4-E0306", says]);
    }
    // By a path that depends on the folder of whoever starts q4.
    payload(&scene, "pay", 0, &["-Wl,-soname,./pay.so"]);
    let full = scene.at("pay.so").display().to_string();
    let plugin =
        built::attack(scene.dir.path(), "relative", &["-Wl,--no-as-needed", &full], &scene.witness());
    scene.refused_unrun(&plugin, &["library-untrusted", "by absolute path"]);
}

/// Certified, and another one where it is used: each process checks a product before it believes one.
#[test]
fn a_library_that_lies_by_the_command_line_fails_its_self_check() {
    let scene = Scene::new();
    let plugin = scene.build("ARGV", &[]);
    scene.certify(&plugin);
    for _ in 0..2 {
        scene.refused(&plugin, &["Q4-E0307"]);
    }
}

#[test]
fn a_library_that_lies_with_four_threads_fails_its_self_check() {
    let scene = Scene::new();
    let plugin = scene.build("THREADS4", &[]);
    scene.certify(&plugin);
    let mut command = Command::new(env!("CARGO_BIN_EXE_q4"));
    command.env("XDG_DATA_HOME", scene.user.0.path()).arg("--plugin").arg(&plugin);
    let output = command.args(["--threads", "4", "--json", "generate", "-p", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", out(&output));
    assert_eq!(document("error", &output)["code"], "Q4-E0307");
}

/// Whatever else misses it, a comparison with the oracle in the products' own shapes and names does not.
#[test]
fn trace_names_the_call_of_a_library_that_lies_by_name_or_shape() {
    for attack in ["NAMES", "K768"] {
        let scene = Scene::new();
        let plugin = scene.build(attack, &[]);
        scene.certify(&plugin);
        let output = scene
            .q4(&plugin, &["--no-self-check", "--json", "trace", "--ids", "1,2,3", "--against", "reference"]);
        let report = document("trace", &output);
        assert!(!report["first_divergence"].is_null(), "{attack}: {report}");
        assert_eq!(output.status.code(), Some(3), "{attack}");
    }
}

#[test]
fn a_path_that_no_processor_has_is_refused() {
    let scene = Scene::new();
    let plugin = scene.edited(
        "native",
        &[
            ("s->path != Q4_PATH_FUSED_DEQUANT", "s->path != Q4_PATH_NATIVE_KERNEL"),
            ("\"fused-dequant\", \"another path\"", "\"native\", \"another path\""),
            ("out->path = Q4_PATH_FUSED_DEQUANT", "out->path = Q4_PATH_NATIVE_KERNEL"),
            ("1, Q4_PATH_FUSED_DEQUANT, 0}", "1, Q4_PATH_NATIVE_KERNEL, 0}"),
            (".priority = -20", ".priority = 2147483647"),
        ],
    );
    let claims = CLAIMS.map(|c| c.replace("fused-dequant", "native-kernel"));
    let claims: Vec<_> = claims.iter().map(String::as_str).collect();
    scene.all().write(&scene.user.certificate(&plugin, NAME, "1.0.0", &claims)).unwrap();
    scene.refused(&plugin, &["Q4-E0305", "path-unsupported", "units for 4-bit operands; have the CPU"]);
    let output = scene.q4(&plugin, &["--json", "conformance", "--level", "L1"]);
    assert_eq!(output.status.code(), Some(5), "{}", out(&output));
}

#[test]
fn priority_takes_no_product_that_nobody_gave_it() {
    let scene = Scene::new();
    let plugin = scene.edited("first", &[(".priority = -20", ".priority = 2147483647")]);
    scene.certify(&plugin);
    scene.ran();
    let mut command = crate::q4();
    command.env("XDG_DATA_HOME", scene.user.0.path()).arg("--plugin-dir").arg(scene.dir.path());
    let output = command.args(["--json", "generate", "-p", "x", "-n", "2"]).output().unwrap();
    let report = document("generate", &output);
    assert_eq!(report["executed"][0]["backend"], "nvfp4-kernel", "{report}");
    assert!(!scene.ran(), "nobody asked for it");
    let some = format!("*.mlp.*={NAME}");
    let output = scene.q4(&plugin, &["--backend", &some, "--json", "explain", "demo"]);
    let report = document("explain", &output);
    for layer in report["layers"].as_array().unwrap() {
        let (name, chosen) = (layer["name"].as_str().unwrap(), layer["chosen"]["backend"].as_str().unwrap());
        assert_eq!(chosen, if name.contains("mlp") { NAME } else { "nvfp4-kernel" }, "{name}");
    }
}

#[test]
fn more_than_was_certified_is_refused() {
    let scene = Scene::new();
    let plugin = scene.edited(
        "wider",
        &[
            ("if (s->activations != Q4_ACT_NATIVE)", "if (0)"),
            ("out->activations = Q4_ACT_NATIVE", "out->activations = Q4_ACT_INT8"),
        ],
    );
    scene.certify(&plugin);
    let output = scene.q4(&plugin, &["--activations", "int8", "--json", "generate", "-p", "x"]);
    assert_eq!(output.status.code(), Some(6), "{}", out(&output));
    let error = document("error", &output);
    assert!(error.to_string().contains("a kind of product that its certificate is about"), "{error}");
}

#[test]
fn a_name_of_a_builtin_is_taken() {
    let scene = Scene::new();
    let plugin = scene.edited("taken", &[("#define NAME    \"acme-c\"", "#define NAME    \"nvfp4-kernel\"")]);
    scene.all().write(&scene.user.certificate(&plugin, "nvfp4-kernel", "1.0.0", &CLAIMS)).unwrap();
    scene.refused(&plugin, &["Q4-E0306", "exists already"]);
}

#[test]
fn a_constructor_that_ends_the_process_ends_a_child() {
    let scene = Scene::new();
    let plugin = scene.build("EXIT_CONSTRUCTOR", &[]);
    scene.certify(&plugin);
    scene.refused(&plugin, &["died-in-probe", "exited with status 0"]);
}

#[test]
fn code_in_a_resolver_and_static_storage_end_a_child() {
    let scene = Scene::new();
    for (attack, code) in [("IFUNC", "died-in-probe"), ("TLS", "library-missing")] {
        let plugin = scene.build(attack, &[]);
        scene.certify(&plugin);
        scene.refused(&plugin, &[code]);
    }
}

#[test]
fn scratch_without_measure_meets_the_memory_limit() {
    let scene = Scene::new();
    let plugin = scene.edited("hogs", &[(
        "    uint64_t columns = p->k > p->n ? p->k : p->n;\n",
        "    uint64_t columns = p->k > p->n ? p->k : p->n;\n    if (p->stranger) return (uint64_t)1 << 40;\n",
    )]);
    scene.certify(&plugin);
    let output = scene.user.answer(&plugin, &[]);
    assert_eq!(output.status.code(), Some(7), "{}{}", out(&output), err(&output));
}

#[test]
fn symbols_of_a_library_replace_nobody_s() {
    let scene = Scene::new();
    let plugin = scene.build("INTERPOSE", &[]);
    scene.certify(&plugin);
    let report = scene.answer(&plugin);
    assert_eq!(report["text"], "I am the q4 demo model, made of four-bit numbers.");
    assert_eq!(report["executed"][0]["backend"], NAME);
}

/// Somebody swaps the file all the time: what has no certificate never runs, in no process.
#[test]
fn a_file_that_is_swapped_while_it_is_loaded_runs_nothing_else() {
    let scene = Scene::new();
    let good = scene.edited("good", &[]);
    scene.certify(&good);
    let (evil_ran, bytes) = (scene.at("evil-ran"), fs::read(&good).unwrap());
    let early = format!(
        "__attribute__((constructor)) static void late(void) {{ close(open(\"{}\", O_CREAT | O_WRONLY, 0600)); }}\n\
         Q4_PLUGIN_DESCRIPTOR(",
        evil_ran.display()
    );
    let evil = scene.edited("evil", &[("Q4_PLUGIN_DESCRIPTOR(", &early)]);
    let evil_bytes = fs::read(&evil).unwrap();
    for way in ["rename", "link", "in place"] {
        let path = scene.at(&format!("swapped-{}.so", way.len()));
        fs::write(&path, &bytes).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                let spare = scene.at("spare");
                let swap = |from: &Path, bytes: &[u8]| match way {
                    "rename" => {
                        fs::write(&spare, bytes).unwrap();
                        fs::rename(&spare, &path).unwrap();
                    }
                    "link" => {
                        symlink(from, &spare).unwrap();
                        fs::rename(&spare, &path).unwrap();
                    }
                    _ => fs::write(&path, bytes).unwrap(),
                };
                while !stop.load(Ordering::Relaxed) {
                    swap(&evil, &evil_bytes);
                    std::thread::sleep(Duration::from_millis(3));
                    swap(&good, &bytes);
                    std::thread::sleep(Duration::from_millis(3));
                }
            });
            for _ in 0..8 {
                let output = scene.q4(&path, &["--json", "explain", "demo"]);
                assert!(matches!(output.status.code(), Some(0 | 6)), "{way}: {}", err(&output));
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(!evil_ran.exists(), "{way}");
    }
}

/// A file of other bytes, or a part of one, under the path that was judged.
#[test]
fn a_file_that_was_replaced_since_is_another_one() {
    let scene = Scene::new();
    let plugin = scene.edited("judged", &[]);
    scene.certify(&plugin);
    assert_eq!(scene.answer(&plugin)["executed"][0]["backend"], NAME);
    let whole = fs::read(&plugin).unwrap();
    let other = scene.build("ALWAYS", &[]);
    fs::copy(&other, &plugin).unwrap();
    scene.refused_unrun(&plugin, &["void: library bytes"]);
    for part in [0, 64, whole.len() / 2, whole.len() - 1] {
        fs::write(&plugin, &whole[..part]).unwrap();
        scene.refused_unrun(&plugin, &["Q4-E0306", "library-missing"]);
    }
    fs::write(&plugin, [&whole[..], b"more"].concat()).unwrap();
    scene.refused_unrun(&plugin, &["bytes behind its end"]);
}

/// Rules of the header, each broken where its case looks. The honest library passes the same cases.
#[test]
fn conduct_that_the_header_forbids_fails_its_case() {
    let scene = Scene::new();
    let honest = scene.edited("honest", &[]);
    let listed = scene.q4(&honest, &["conformance", "--list", "--level", "L5"]);
    let listed = out(&listed);
    let case = |part: &str| {
        let mut ids = listed
            .lines()
            .filter(|id| id.contains(part) && (part.ends_with("load") || id.contains("nvfp4@1/native")));
        ids.next().unwrap_or_else(|| panic!("{part}: {listed}")).to_owned()
    };
    let (load, forward, release) = (case("conduct/load"), case("conduct/forward"), case("conduct/release"));
    let replay = |plugin: &Path, id: &str| {
        scene.q4(plugin, &["--json", "conformance", "--time-limit", "5", "--replay", id])
    };
    for id in [&load, &forward, &release] {
        let output = replay(&honest, id);
        assert_eq!(output.status.code(), Some(0), "{id}: {}{}", out(&output), err(&output));
    }
    for (attack, id) in [
        ("SIGNALS", &load),
        ("PROCESS", &load),
        ("THREAD_BACKGROUND", &load),
        ("PRINTS", &forward),
        ("MALLOC", &forward),
        ("FORK", &forward),
        ("THREADS", &forward),
        ("BEHIND", &forward),
        ("RESTORES", &forward),
        ("HANG", &forward),
        ("CLOSE012", &release),
        #[cfg(target_arch = "x86_64")]
        ("MXCSR", &forward),
    ] {
        let output = replay(&scene.build(attack, &[]), id);
        assert_eq!(output.status.code(), Some(5), "{attack}: {}{}", out(&output), err(&output));
    }
}

#[test]
fn statuses_and_texts_of_a_judged_library_are_not_believed() {
    let scene = Scene::new();
    for attack in ["FORGEJUDGE", "FORGECASES", "EXIT_CONSTRUCTOR"] {
        let plugin = scene.build(attack, &["-DATTACK_ALWAYS"]);
        let output = scene.q4(&plugin, &["--json", "conformance", "--level", "L2", "--sample", "2"]);
        assert_eq!(output.status.code(), Some(5), "{attack}: {}{}", out(&output), err(&output));
    }
    assert!(scene.user.certificates().is_empty());
}

#[test]
fn a_certified_library_that_ends_the_program_ends_it_without_success() {
    let scene = Scene::new();
    for attack in ["EXIT_FORWARD", "EXIT_RELEASE"] {
        let plugin = scene.build(attack, &[]);
        scene.certify(&plugin);
        let output = scene.user.answer(&plugin, &[]);
        assert_eq!(output.status.code(), Some(6), "{attack}: {}{}", out(&output), err(&output));
    }
    // In a process of its own it ends that.
    let plugin = scene.build("EXIT_FORWARD", &[]);
    let output = scene.user.answer(&plugin, &["--isolate"]);
    assert_eq!(output.status.code(), Some(6), "{}{}", out(&output), err(&output));
}

/// Isolated or not, it is the same certificate.
#[test]
fn an_isolated_library_needs_its_certificate_and_its_payload_too() {
    let scene = Scene::new();
    payload(&scene, "pay", 0, &["-Wl,-soname,pay.so"]);
    let (origin, folder) = ("-Wl,-rpath,$ORIGIN", format!("-L{}", scene.dir.path().display()));
    let plugin = scene.build("PAYLOAD", &["-Wl,--no-as-needed", origin, &folder, "-l:pay.so"]);
    let refused = |says: &str| {
        let output = scene.user.answer(&plugin, &["--isolate"]);
        assert_eq!(output.status.code(), Some(6), "{}", out(&output));
        assert!(document("error", &output).to_string().contains(says), "{}", out(&output));
        assert!(!scene.ran() && !payload_ran(&scene, "pay"), "{says}: it ran");
    };
    refused("conformance-missing");
    scene.certify(&plugin);
    let output = scene.user.answer(&plugin, &["--isolate"]);
    assert!(output.status.success(), "{}", err(&output));
    assert!(scene.ran() && payload_ran(&scene, "pay"));
    payload(&scene, "pay", 1, &["-Wl,-soname,pay.so"]);
    refused("pay.so, which it loads: certified");
}
