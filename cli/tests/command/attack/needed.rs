//! Libraries that a library needs: what they are is certified with it.
use super::{NAME, Scene};
use crate::plugin::built;
use crate::{document, err, out};
use std::fs;
use std::path::PathBuf;

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
