//! A library passes the suite in process, the checks of its table included; a table that forgets a rule does
//! not. The examples are judged in processes of their own, by the tests of `q4 conformance`.
#![allow(clippy::unwrap_used)]
mod built;

use q4_conformance::{AbiProbe, CaseResult, InProcess, Options, Outcome, Profile, Report, run_with};
use q4_core::{Candidate, HostEnv, Result, ThreadPool};
use q4_plugin_host::{Loaded, TableCases};
use std::path::Path;

struct Abi(TableCases);

impl AbiProbe for Abi {
    fn cases(&self) -> Vec<String> {
        self.0.cases()
    }
    fn run(&self, case: &str) -> Result<()> {
        self.0.run(case)
    }
}

fn suite(path: &Path) -> Report {
    let Loaded { candidate, table, .. } = q4_plugin_host::load(path).unwrap();
    let Candidate::Live(backend) = candidate else { unreachable!("loaded libraries live") };
    let options = Options::of(Profile::Inference);
    run_with(&InProcess, &*backend, Some(&Abi(table)), &options, &HostEnv::collect(), &ThreadPool::new(2))
}

/// Zero points and types of scales reach a library.
#[test]
fn a_library_of_int4_is_conformant() {
    let dir = tempfile::tempdir().unwrap();
    let path = built::groups::acme_int4(dir.path());
    let report = suite(&path);
    assert!(report.conformant, "{}", report.text());
    for schema in ["int4@1", "int4-asym@1"] {
        let passed = |case: &CaseResult| case.outcome == Outcome::Pass && case.id.contains(schema);
        let count = report.cases.iter().filter(|(_, case)| passed(case)).count();
        assert!(count > 100, "{schema}: {count}");
    }
}

/// A check, and an edit of the C example that it catches.
const BROKEN: [(&str, &str, &str); 14] = [
    ("query-of-an-unknown-major", "abi_major != Q4_ABI_MAJOR || ", ""),
    ("query-of-an-unknown-interface", " || id != Q4_INTERFACE_BACKEND", ""),
    (
        "longer-spec",
        "spec->struct_size < sizeof *spec)\n        return fail(err, Q4_E_ABI, \"spec of",
        "spec->struct_size != sizeof *spec)\n        return fail(err, Q4_E_ABI, \"spec of",
    ),
    (
        "shorter-spec",
        "spec->struct_size < sizeof *spec)\n        return fail(err, Q4_E_ABI, \"spec of",
        "0)\n        return fail(err, Q4_E_ABI, \"spec of",
    ),
    (
        "unknown-numbers",
        "if (s->activations != Q4_ACT_NATIVE)",
        "if (s->activations == Q4_ACT_INT8 || s->activations == Q4_ACT_NVFP4)",
    ),
    ("error-buffers", "len < err->cap ? len : err->cap", "len"),
    ("error-buffers", "err->len = len;", "err->len = len < err->cap ? len : err->cap;"),
    ("longer-segments", "i * w->segments[0].struct_size", "i * sizeof *w->segments"),
    (
        "longer-info",
        "out->reserved = 0;",
        "memset((char *)out + sizeof *out, 0, out->struct_size - sizeof *out);",
    ),
    ("longer-operands", "m->struct_size < sizeof *m", "m->struct_size != sizeof *m"),
    ("overlapping-operands", "    if (share(in, out, exec))", "    if (0)"),
    ("overlapping-operands", "x < y + b_bytes && y < x + a_bytes", "x <= y + b_bytes && y <= x + a_bytes"),
    ("overlapping-operands", "const void *work = exec ? exec->workspace : NULL;", "const void *work = NULL;"),
    (
        "no-threads",
        "if (exec && exec->parallel && j->pieces > 1) {",
        "if (exec->threads == 0) return; else {",
    ),
];

/// With products of 16 bits, in tiles, too.
#[test]
fn tables_that_break_a_rule_are_caught_by_its_check() {
    let dir = tempfile::tempdir().unwrap();
    let failed = |name: &str, accepts: &str, edits: &[(&str, &str)]| -> Vec<String> {
        let path = built::narrow(dir.path(), name, accepts, edits);
        let table = q4_plugin_host::load(&path).unwrap().table;
        table.cases().into_iter().filter(|c| table.run(c).is_err()).collect()
    };
    let tiles = "s->x_dtype == Q4_BF16 && s->y_dtype == Q4_BF16 && each(s, 128) && s->k % 1024 == 0 && \
         s->schema == Q4_SCHEMA_NVFP4 && s->scale_layout == Q4_SCALE_128X4";
    for (who, accepts) in [("all", "1"), ("tiles", tiles)] {
        assert!(failed(who, accepts, &[]).is_empty(), "{who}");
        for (i, (case, from, to)) in BROKEN.into_iter().enumerate() {
            let failed = failed(&format!("{who}-{i}"), accepts, &[(from, to)]);
            assert!(failed.contains(&case.to_owned()), "{case}, {who}: {failed:?}");
        }
    }
}
