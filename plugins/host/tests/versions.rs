//! Old and new fit together both ways: libraries and programs of two minors, in all four pairs, compute the
//! same.
#![allow(clippy::unwrap_used)]
mod built;

use q4_conformance::{Level, Options, Profile, golden, measure, run};
use q4_core::{Activations, Candidate, Device, ExecPath, HostEnv, Result, ThreadPool};
use q4_plugin_host::{Door, Loader, Speaks};

/// As they were built when those versions were new; the sources have gone on.
#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn libraries_that_were_built_for_earlier_minors_pass_the_suite() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    for (file, minor) in [("acme-1.0-x86_64.so", 0), ("acme-1.1-x86_64.so", 1)] {
        let loaded = Loader { door: Door::C, ..Loader::default() }.load(&folder.join(file)).unwrap();
        assert_eq!(loaded.descriptor.abi, (1, minor));
        let table = loaded.table.clone();
        for case in table.cases() {
            table.run(&case).unwrap_or_else(|e| panic!("{file}: {case}: {e}"));
        }
        let Candidate::Live(backend) = loaded.candidate else { unreachable!("loaded libraries live") };
        let levels = vec![Level::L0, Level::L1, Level::L2, Level::L3, Level::L4];
        let options = Options { levels, sample: Some(200), ..Options::of(Profile::Training) };
        let report = run(&*backend, &options, &HostEnv::collect(), &ThreadPool::new(2));
        assert!(report.conformant && report.passed > 1000, "{file}: {}", report.text());
    }
}

#[test]
fn four_pairs_of_ages_work() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let old = built::example(dir.path(), "old", &["-DQ4_ABI_MINOR=0u"], &[("\"acme-c\"", "\"acme-old\"")]);
    let now = built::example(dir.path(), "now", &[], &[]);
    // A minor that does not exist yet: one more entry, behind everything this program knows.
    let newer = built::example(
        dir.path(),
        "newer",
        &[],
        &[
            ("\"acme-c\"", "\"acme-newer\""),
            (
                "static const q4_backend_v1 TABLE = {\n    .struct_size = sizeof(q4_backend_v1),",
                "typedef struct { q4_backend_v1 now; q4_status (*later)(void); } newer_table;\nstatic q4_status later(void) { return Q4_OK; }\nstatic const newer_table NEWER = {.later = later, .now = {\n    .struct_size = sizeof(newer_table),",
            ),
            ("forward_grouped,\n#endif\n};", "forward_grouped,\n#endif\n}};"),
            (".abi_minor = Q4_ABI_MINOR", ".abi_minor = Q4_ABI_MINOR + 1"),
            ("out->table = &TABLE;", "out->table = &NEWER;"),
        ],
    );
    for (speaks, age) in [(Speaks::FIRST, "an old program"), (Speaks::default(), "this program")] {
        for (path, probes) in
            [(&old, false), (&now, speaks != Speaks::FIRST), (&newer, speaks != Speaks::FIRST)]
        {
            let loaded = Loader { speaks, door: Door::C, ..Loader::default() }.load(path).unwrap();
            let Candidate::Live(backend) = loaded.candidate else { unreachable!("loaded libraries live") };
            let env = HostEnv::collect();
            let has_probe = backend.probe(&env).iter().any(|i| i.id == "acme.isa");
            assert_eq!(has_probe, probes, "{age}, {}", path.display());
            let (pool, mut outputs) = (ThreadPool::new(1), 0);
            golden::each(&mut |problem| {
                if problem.activations == Activations::Native && problem.weight.k % 16 == 0 {
                    outputs += measure(Device::Cpu, &*backend, ExecPath::FusedDequant, problem, &env, &pool)?
                        .map_or(0, |m| m.outputs);
                }
                Ok(())
            })?;
            assert!(outputs > 1000, "{age}, {}: {outputs}", path.display());
        }
    }
    Ok(())
}
