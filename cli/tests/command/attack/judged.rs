//! What the suite finds in a library that it judges.
use super::Scene;
use crate::{err, out};
use std::path::Path;

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
