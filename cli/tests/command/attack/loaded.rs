//! Between a file and the program that has loaded it.
use super::{NAME, Scene};
use crate::err;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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
