//! Certified, and another one where it is used: each process checks a product before it believes one.
use super::{CLAIMS, NAME, Scene};
use crate::{document, err, out};
use std::process::Command;

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
