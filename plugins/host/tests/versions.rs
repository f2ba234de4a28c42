//! Old and new fit together both ways: libraries and programs of two minors, in all four pairs, compute the
//! same.
#![allow(clippy::unwrap_used)]
mod built;

use q4_conformance::{golden, measure};
use q4_core::{Activations, Candidate, ExecPath, HostEnv, Result, ThreadPool};
use q4_plugin_host::{Door, Loader, Speaks};

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
            ("    .probe = probe,\n#endif\n};", "    .probe = probe,\n#endif\n}};"),
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
                    outputs += measure(&*backend, ExecPath::FusedDequant, problem, &env, &pool)?
                        .map_or(0, |m| m.outputs);
                }
                Ok(())
            })?;
            assert!(outputs > 1000, "{age}, {}: {outputs}", path.display());
        }
    }
    Ok(())
}
