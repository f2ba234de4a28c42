//! `diagnose` and `bench`: what they report is what ran.
use super::{document, err, json, out, run};

#[test]
fn diagnose_computes_on_every_live_path() {
    let report = json("diagnose", &[]);
    let backends = report["backends"].as_array().unwrap();
    let names: Vec<_> = backends.iter().map(|b| b["name"].as_str().unwrap()).collect();
    assert_eq!(names, q4_core::BUILTINS);
    for b in backends {
        assert_eq!(b["state"], "live", "{b}");
        let paths = b["paths"].as_array().unwrap();
        assert!(!paths.is_empty(), "{b}");
        for p in paths {
            assert_eq!(p["verdict"], "pass", "{p}");
            assert!(
                p["outputs"].as_u64().unwrap() > 0 && p["error_over_bound"].as_f64().unwrap() <= 1.0,
                "{p}"
            );
        }
    }
    assert!(report["findings"].as_array().unwrap().is_empty());
}

#[test]
fn a_library_that_is_refused_is_a_finding() {
    let output = run(&["--json", "--nvfp4-lib", absent!(), "diagnose"]);
    assert_eq!(output.status.code(), Some(3));
    let report = document("diagnose", &output);
    assert_eq!(report["findings"][0]["code"], "backend-dead");
    assert_eq!(report["findings"][0]["backend"], "nvfp4-kernel");
}

#[test]
fn the_support_matrix_of_the_readme_is_what_diagnose_prints() {
    let readme = include_str!("../../../README.md");
    let (_, rest) = readme.split_once("<!-- matrix -->\n").unwrap();
    let (matrix, _) = rest.split_once("<!-- /matrix -->").unwrap();
    assert_eq!(matrix, out(&run(&["diagnose", "--matrix"])));
}

#[test]
fn bench_reports_a_roofline_beside_every_figure() {
    let report = json(
        "bench",
        &["--prefill", "8,16", "--decode", "4", "--batch", "1,40", "-r", "2", "--backend", "nvfp4-kernel"],
    );
    let rows = report["results"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|r| r["what"].as_str().unwrap()).collect();
    assert_eq!(names, ["pp8", "pp16", "tg4", "batch 1", "batch 40"]);
    for r in rows {
        for field in ["median", "min", "max", "roofline", "fraction"] {
            assert!(r[field].as_f64().is_some_and(|v| v > 0.0), "{field} of {r}");
        }
    }
    assert_eq!(report["executed"][0]["backend"], "nvfp4-kernel");
    assert_eq!(report["executed"].as_array().unwrap().len(), 1);
    assert!(report["memory"]["peak_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn bench_tells_loading_from_the_prompt() {
    let report = json("bench", &["--first-token", "-r", "2", "--backend", "nvfp4-kernel"]);
    let field = |name: &str| report[name].as_f64().unwrap();
    assert!(field("load_s") > 0.0 && field("first_s") > 0.0 && field("warm_s") > 0.0);
    let again = report["again_s"].as_array().unwrap();
    assert_eq!(again.len(), 2);
    assert!(again.iter().all(|s| s.as_f64().unwrap() >= field("warm_s")));
    let work = field("load_s") + field("first_s") - field("warm_s");
    assert!((field("work_s") - work).abs() < 1e-9);
    assert!(report["executed"].as_array().unwrap().iter().all(|e| e["calls"].as_u64().unwrap() > 0));
}

#[test]
fn bench_refuses_what_would_do_nothing() {
    for line in [
        ["bench", "--format", "nf4"],
        ["bench", "--write", "x"],
        ["bench", "--prefill=0", "--decode=1"],
        ["bench", "--batch=4,0", "--decode=1"],
        ["bench", "--batch=4", "--decode=0"],
        ["bench", "--first-token", "--batch=4"],
        ["bench", "--first-token", "--depth=4"],
        ["bench", "--shape=qwen3-0.6b", "--quantize=nf4"],
    ] {
        assert_eq!(run(&line).status.code(), Some(2), "{line:?}");
    }
    let nf4 = ["bench", "--shape", "qwen3-0.6b", "--format", "nf4", "--write", absent!("/model")];
    assert_eq!(run(&nf4).status.code(), Some(2));
}

#[test]
fn bench_does_what_its_advice_says() {
    let bench = ["--nvfp4-lib", absent!(), "bench", "--prefill", "8", "--decode", "1", "-r", "1"];
    let refused = run(&bench);
    assert_eq!(refused.status.code(), Some(6));
    let advice = "--compute kernel-or-fallback";
    assert!(err(&refused).contains(&format!("fix: {advice}")), "{}", err(&refused));
    let taken = run(&[&["-q", "--json", "--compute", "kernel-or-fallback"], &bench[..]].concat());
    let report = document("bench", &taken);
    assert_eq!(
        (&report["downgraded"], &report["executed"][0]["path"]),
        (&24.into(), &"dequant-matmul".into())
    );
    assert!(err(&taken).contains("24 products run on dense copies"), "{}", err(&taken));
}
