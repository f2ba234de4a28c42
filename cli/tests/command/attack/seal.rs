//! Certificates, caches and keys that are forged, moved, damaged or no files at all.
use super::{NAME, Scene};
use crate::err;
use q4_conformance::{Certificate, Certificates, Key};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

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
    // What q4 itself remembers of another user's run, with the library's kinds beside, under the right name
    // and key.
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
