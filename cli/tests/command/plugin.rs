//! Third-party libraries through the real `q4`: they are judged, certified and used.
#[path = "../../../plugins/host/tests/built/mod.rs"]
pub mod built;

use crate::{document, err, out, q4};
use q4_conformance::facts::{facts, machine};
use q4_conformance::{Certificate, Certificates, Limits, Needed, Profile, Proven, SUITE_VERSION};
use q4_core::HostEnv;
use q4_plugin_host::{Loader, Need};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A user with a folder for data of their own.
pub struct User(pub TempDir);

impl User {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    pub fn q4(&self, plugin: &Path) -> Command {
        let mut command = q4();
        command.env("XDG_DATA_HOME", self.0.path()).arg("--plugin").arg(plugin);
        command
    }

    /// Asks the demo model, greedily.
    pub fn generate(&self, plugin: &Path, backend: &str) -> Output {
        self.answer(plugin, &["--backend", backend])
    }

    /// The same with other options.
    pub fn answer(&self, plugin: &Path, options: &[&str]) -> Output {
        let mut command = self.q4(plugin);
        command.args(options).args([
            "--json",
            "generate",
            "demo",
            "-p",
            "Who are you?",
            "--temperature",
            "0",
        ]);
        command.output().unwrap()
    }

    /// A certificate of `plugin`, as the suite would have written it.
    pub fn certificate(&self, plugin: &Path, backend: &str, version: &str, claims: &[&str]) -> Certificate {
        let (env, found) = (HostEnv::collect(), Loader::default().examine(plugin).unwrap());
        let needed = |n: &Need| Needed {
            name: n.name.clone(),
            path: n.path.display().to_string(),
            sha256: n.sha256.clone(),
        };
        let ops = |dtype| json!({ "dtype": dtype, "backward": true, "dequantize": true });
        let types = ["float32", "bfloat16", "float16"].map(ops);
        let everything: Limits = serde_json::from_value(json!({
            "encodings": ["any"], "quantizers": ["any"], "types": types,
            "segments": 3, "n_multiple": 1, "k_multiple": 1,
        }))
        .unwrap();
        Certificate {
            schema: "q4.certificate/2".into(),
            backend: backend.into(),
            version: version.into(),
            sha256: found.sha256().to_owned(),
            needs: found.needs().iter().map(needed).collect(),
            suite: SUITE_VERSION.into(),
            profile: Profile::Inference,
            claims: claims
                .iter()
                .map(|claim| Proven { claim: (*claim).to_owned(), limits: everything.clone() })
                .collect(),
            machine: machine(&env),
            facts: facts(&env),
            device: None,
        }
    }

    /// Where q4 keeps this user's files.
    pub fn data(&self) -> PathBuf {
        self.0.path().join("q4")
    }

    /// The one error of such an attempt: exit status 6 and a code.
    pub fn refused(&self, plugin: &Path, backend: &str) -> Value {
        let output = self.generate(plugin, backend);
        let name = plugin.display();
        assert_eq!(output.status.code(), Some(6), "{name}: {}{}", out(&output), err(&output));
        let error = document("error", &output);
        assert!(error["code"].as_str().unwrap().starts_with("Q4-E03"), "{name}: {error}");
        assert!(err(&output).contains(error["code"].as_str().unwrap()), "{name}");
        error
    }

    pub fn certificates(&self) -> Vec<PathBuf> {
        let folder = fs::read_dir(self.data().join("certificates"));
        folder.into_iter().flatten().map(|file| file.unwrap().path()).collect()
    }
}

/// Everything from an author's build to a user's answer.
fn is_certified_and_answers(plugin: &Path, backend: &str) {
    let (user, plugin) = (User::new(), &fs::canonicalize(plugin).unwrap());
    // Nobody is used without having been judged.
    let error = user.refused(plugin, backend);
    assert!(error["what"].as_str().unwrap().ends_with("is refused: conformance-missing"), "{error}");
    let command = format!("q4 conformance --plugin {}", plugin.display());
    assert_eq!(error["fix"], command.as_str(), "{error}");
    let judged = user.q4(plugin).args(["--json", "conformance", "--profile", "training"]).output().unwrap();
    assert!(judged.status.success(), "{}{}", out(&judged), err(&judged));
    let report = document("conformance", &judged);
    assert_eq!((&report["conformant"], &report["complete"]), (&true.into(), &true.into()));
    let levels: Vec<_> = report["claims"].as_array().unwrap().iter().map(|c| &c["levels"]).collect();
    assert!(levels.len() > 1, "{report}");
    for (levels, claim) in levels.iter().zip(report["claims"].as_array().unwrap()) {
        let whole = claim["claim"] == "backend";
        for level in if whole { &["L0", "L4"][..] } else { &["L1", "L2", "L3", "L4", "L5"] } {
            assert!(levels[level]["passed"].as_u64() > Some(0), "{level} of {claim}");
        }
    }
    assert_eq!(user.certificates().len(), 1);
    // The checks of its table were among the cases.
    let listed = user.q4(plugin).args(["conformance", "--list", "--level", "L0"]).output().unwrap();
    assert!(out(&listed).contains("L0/backend/table/overlapping-operands\n"), "{}", out(&listed));

    // Named as a backend, or as a file alone: it computes, and nobody else.
    for options in [&["--backend", backend][..], &[]] {
        let answer = user.answer(plugin, options);
        assert!(answer.status.success(), "{}", err(&answer));
        let report = document("generate", &answer);
        assert_eq!(report["text"], "I am the q4 demo model, made of four-bit numbers.");
        let executed = report["executed"].as_array().unwrap();
        assert_eq!((executed.len(), &executed[0]["backend"]), (1, &backend.into()), "{report}");
        assert_eq!((&report["downgraded"], &executed[0]["path"]), (&0.into(), &"fused-dequant".into()));
    }

    // A server shows the certificate of whoever computes.
    #[cfg(unix)]
    {
        let proofs = crate::serve::certificates(user.q4(plugin), &["--backend", backend]);
        let proof = &proofs["backends"][0];
        let certificate: Certificate = serde_json::from_value(proof["certificate"].clone()).unwrap();
        assert_eq!((&proof["backend"], &proof["origin"]), (&backend.into(), &"plugin".into()), "{proofs}");
        assert_eq!(
            (&*certificate.backend, proof["library"]["sha256"].as_str()),
            (backend, Some(&*certificate.sha256))
        );
    }

    // One byte voids the certificate.
    let changed = user.0.path().join("changed.so");
    let mut bytes = fs::read(plugin).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&changed, bytes).unwrap();
    let error = user.refused(&changed, backend);
    assert!(error["have"].as_str().unwrap().contains("void: library bytes"), "{error}");
    meaning_of_a_name(&user, plugin, backend);
}

/// What a library that has a certificate serves, by how it was named.
fn meaning_of_a_name(user: &User, plugin: &Path, backend: &str) {
    let executed = |options: &[&str], path: &Path| {
        let answer = user.answer(path, options);
        assert!(answer.status.success(), "{options:?}: {}", err(&answer));
        let report = document("generate", &answer);
        let all = report["executed"].as_array().unwrap().iter();
        let mut names: Vec<_> = all.map(|e| e["backend"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    let some = format!("*.mlp.*={backend}");
    assert_eq!(
        executed(&["--backend", &some], plugin),
        [backend, "nvfp4-kernel"],
        "the layers it was named for"
    );
    // Others were named for all there is, or it computes nothing of the kind: it stops, and says why.
    for (options, why) in [
        (&["--backend", "nvfp4-kernel"][..], "not-selected: need `nvfp4-kernel`, as named"),
        (&["--compute", "dequant-matmul-only"], "path-not-admitted"),
    ] {
        let answer = user.answer(plugin, options);
        assert_eq!(answer.status.code(), Some(6), "{options:?}: {}", out(&answer));
        let error = document("error", &answer);
        assert!(error["code"] == "Q4-E0305" && error["have"].as_str().unwrap().contains(why), "{error}");
    }
    // One that was found in a folder waits until it is named.
    let folder = user.0.path().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::copy(plugin, folder.join("found.so")).unwrap();
    let in_folder = |options: &[&str]| {
        let mut command = q4();
        command.env("XDG_DATA_HOME", user.0.path()).arg("--plugin-dir").arg(&folder).args(options);
        command.args(["--json", "generate", "demo", "-p", "x", "-n", "2"]).output().unwrap()
    };
    for (options, who) in [(&[][..], "nvfp4-kernel"), (&["--backend", backend], backend)] {
        let answer = in_folder(options);
        assert!(answer.status.success(), "{}", err(&answer));
        let report = document("generate", &answer);
        assert_eq!(report["executed"][0]["backend"], who, "{report}");
        assert_eq!((report["executed"].as_array().unwrap().len(), &report["downgraded"]), (1, &0.into()));
    }
    // A comparison names it for one side.
    let mut command = user.q4(plugin);
    command.args(["--json", "trace", "demo", "--ids", "1,2,3", "--against", backend]);
    let report = document("trace", &command.output().unwrap());
    assert_eq!(report["executed_against"][0]["backend"], backend, "{report}");
    assert_eq!(report["executed"][0]["backend"], "nvfp4-kernel", "{report}");
}

#[test]
fn the_c_example_is_certified_and_answers() {
    is_certified_and_answers(&built::acme_c(), "acme-c");
}

#[test]
fn the_rust_example_is_certified_and_answers() {
    is_certified_and_answers(&built::acme_nvfp4(), "acme-nvfp4");
}

/// Judged, selected, shown and named by a certificate; no model runs there, which is said.
#[test]
fn a_device_that_a_plugin_brings_is_judged_and_no_model_runs_there() {
    let (user, plugin, device) = (User::new(), built::acme_arena(), "acme-arena:0");
    let run = |words: &[&str]| {
        let output = user.q4(&plugin).args(["--device", device]).args(words).output().unwrap();
        (output.status.code(), out(&output) + &err(&output))
    };
    let (code, text) = run(&["conformance", "--sample", "1", "--no-certificate"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("nf4@1/native/acme-arena:0/fused-dequant"), "{text}");
    let (code, text) = run(&["generate", "demo", "-p", "x", "-n", "1"]);
    let said = text.contains("a model on acme-arena:0") && text.contains("cpu or cuda:N");
    assert!(code != Some(0) && said, "{code:?}: {text}");
    // Without a certificate about this very device nothing of it runs.
    let (code, text) = run(&["diagnose"]);
    assert!(code == Some(6) && text.contains("--device acme-arena:0"), "{code:?}: {text}");
    let claims = ["nvfp4@1/native/acme-arena:0/fused-dequant", "nf4@1/native/acme-arena:0/fused-dequant"];
    let mut certificate = user.certificate(&plugin, "acme-arena", "1.0.0", &claims);
    let mut certify = |own: Option<&str>| {
        certificate.device = own.map(str::to_owned);
        let path = Certificates::under(&user.data()).write(&certificate).unwrap();
        let said = run(&["--backend", "acme-arena", "explain", "demo"]);
        fs::remove_file(path).unwrap();
        said
    };
    for (own, why) in [
        (None, "certified without acme-arena:0"),
        (Some("acme-arena:1 ACME arena (acme-arena 1, 4 GiB)"), "certified for acme-arena:1"),
        (Some("acme-arena:0 ACME arena (acme-arena 2, 4 GiB)"), "the device that its certificate is about"),
    ] {
        let (code, text) = certify(own);
        assert!(code == Some(6) && text.contains(why), "{own:?}, {code:?}: {text}");
    }
    let (code, text) = certify(Some("acme-arena:0 ACME arena (acme-arena 1, 4 GiB)"));
    assert!(code == Some(0) && text.contains("acme-arena"), "{code:?}: {text}");
    certificate.device = Some("acme-arena:0 ACME arena (acme-arena 1, 4 GiB)".into());
    Certificates::under(&user.data()).write(&certificate).unwrap();
    let (_, text) = run(&["diagnose"]);
    assert!(text.contains("vendor    acme-arena:0 (ACME arena, acme-arena 1, 4 GiB)"), "{text}");
    assert!(text.contains("device    acme-arena:0 (as named"), "{text}");
    // On the CPU that certificate is about nothing.
    let output = user.q4(&plugin).args(["explain", "demo"]).output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", err(&output));
    let output = q4().args(["--device", "acme:0", "diagnose"]).output().unwrap();
    assert!(err(&output).contains("no library with a device of its own"), "{}", err(&output));
}
