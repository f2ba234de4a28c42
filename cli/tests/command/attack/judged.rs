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

/// Wrong in the last of its outputs, and only there where few would look: in long rows, with many inputs,
/// with fewer than it was made for, after a thousand calls. The honest library passes the same cases.
#[test]
fn a_lie_where_few_would_look_fails_a_case() {
    let scene = Scene::new();
    let honest = scene.edited("honest", &[]);
    let listed = out(&scene.q4(&honest, &["conformance", "--list", "--level", "L2", "--level", "L5"]));
    // `n`, `k`, `m` and the most that m may be, from `n5+11.k144.m554of995`.
    let sizes = |id: &str| -> Option<[usize; 4]> {
        let (n, rest) = id.split("/n").last()?.split_once(".k")?;
        let (k, m) = rest.split('/').next()?.split_once(".m")?;
        let (m, most) = m.split_once("of").unwrap_or((m, m));
        let n = n.split('+').map(str::parse::<usize>).sum::<Result<_, _>>().ok()?;
        Some([n, k.parse().ok()?, m.parse().ok()?, most.parse().ok()?])
    };
    // The cheapest one of those that look there.
    let case = |part: &str, looks: &dyn Fn([usize; 4]) -> bool| {
        let ids = listed.lines().filter(|id| id.contains(part));
        let those = ids.filter_map(|id| Some((sizes(id).filter(|s| looks(*s))?, id)));
        let cheapest = those.min_by_key(|([n, k, m, _], _)| n * k * m);
        cheapest.unwrap_or_else(|| panic!("{part}: {listed}")).1.to_owned()
    };
    let cases = [
        ("K4096", case("L2/", &|[_, k, ..]| k >= 2048)),
        ("M400", case("L2/", &|[_, _, m, _]| m > 400)),
        ("M_BELOW_MAX", case("L2/", &|[_, _, m, most]| m < most)),
        ("CALL1000", case("/many-calls/", &|_| true)),
    ];
    for (attack, id) in &cases {
        for (plugin, status) in [(&honest, 0), (&scene.build(attack, &[]), 5)] {
            let output = scene.q4(plugin, &["--json", "conformance", "--replay", id]);
            assert_eq!(
                output.status.code(),
                Some(status),
                "{attack}: {id}: {}{}",
                out(&output),
                err(&output)
            );
        }
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
