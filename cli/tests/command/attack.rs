//! Libraries whose author has read the source of q4: docs/threat-model.md has a row for each, with the test
//! here that holds.
//!
//! Who has passed the suite and lies later is made by sealing a certificate for it, as the suite would have.
mod judged;
mod lies;
mod loaded;
mod needed;
mod seal;

use crate::plugin::{User, built};
use crate::{document, err, out};
use q4_conformance::{Certificate, Certificates};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

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
        &["logits", "demo", "--ids", "1", "--out", absent!("/x")],
        &["trace", "demo", "--ids", "1", "--against", "reference"],
        &["bench", "demo"],
        &["eval", "demo", "--data", absent!()],
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

/// A source that nothing but the test above builds would be an attack without a defence.
#[test]
fn every_source_has_a_test_of_its_own() {
    let header = include_str!("../../../plugins/host/tests/built/attack.h");
    let tests = [
        include_str!("attack/judged.rs"),
        include_str!("attack/lies.rs"),
        include_str!("attack/loaded.rs"),
        include_str!("attack/needed.rs"),
        include_str!("attack/seal.rs"),
        include_str!("isolate.rs"),
    ];
    let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    for rest in header.split("defined ATTACK_").skip(1) {
        let name = &rest[..rest.find(|c| !is_name(c)).unwrap()];
        assert!(tests.iter().any(|t| t.contains(&format!("\"{name}\""))), "{name}: no test builds it");
    }
}
