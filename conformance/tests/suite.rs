//! The suite about itself: what it enumerates, replays, refuses to call a pass, and how it reports.
use q4_conformance::liars::{honest, honest_units, mutants};
use q4_conformance::{
    AbiProbe, InProcess, Level, Options, Outcome, Profile, Report, Waivers, cases, claims, proofs, run,
    run_with,
};
use q4_core::{
    BackendDescriptor, Code, Error, ExecContext, ExecPath, HostEnv, LinearSpec, PreparedWeight, ProbeItem,
    Q4Backend, Q4Weight, Reject, RejectCode, Result, ThreadPool, Verdict,
};
use std::collections::BTreeSet;
use std::sync::Arc;

fn mutant(name: &str) -> Arc<dyn Q4Backend> {
    mutants().find(|l| l.name == name).unwrap_or_else(|| panic!("no liar {name}")).backend()
}

fn judge(backend: &dyn Q4Backend, options: &Options) -> Report {
    run(backend, options, &HostEnv::default(), &ThreadPool::new(2))
}

fn decode() -> Options {
    Options { levels: vec![Level::L1], ..Options::of(Profile::Inference) }
}

#[test]
fn ids_are_identities_and_do_not_depend_on_what_else_runs() {
    let (backend, env) = (honest(), HostEnv::default());
    let found = proofs(&*backend, &env, q4_core::Device::Cpu);
    let all = cases(&found, None, &Options::of(Profile::Training));
    let ids: BTreeSet<_> = all.iter().map(|c| c.id.clone()).collect();
    assert_eq!(ids.len(), all.len());
    assert!(all.len() > 3000, "{}", all.len());
    for level in Level::ALL {
        let alone = Options { levels: vec![level], ..Options::of(Profile::Training) };
        assert!(cases(&found, None, &alone).iter().all(|c| ids.contains(&c.id) && c.level == level));
    }
    let inference = cases(&found, None, &Options::of(Profile::Inference));
    assert!(inference.iter().all(|c| c.level != Level::L3) && inference.len() < all.len());
}

#[test]
fn a_failure_can_be_run_again_from_its_id_alone() {
    let backend = mutant("accumulates-in-half");
    let options =
        Options { levels: vec![Level::L2], seed: 41, sample: Some(4), ..Options::of(Profile::Training) };
    let report = judge(&*backend, &options);
    let lattice = report.failures.iter().find(|f| f.id.contains("/lattice/")).expect("a seeded failure");
    assert!(lattice.id.ends_with("/s41"), "{}", lattice.id);
    let again = judge(&*backend, &Options::of(Profile::Training).replaying(&lattice.id));
    assert_eq!(again.failures, std::slice::from_ref(lattice));
    assert!(lattice.replay.ends_with(&format!("--replay '{}'", lattice.id)));
    assert_eq!((again.failed, again.passed), (1, 0));
    let honest = judge(&*honest(), &Options::of(Profile::Training).replaying(&lattice.id));
    assert!(honest.conformant && !honest.complete && honest.passed == 1, "{}", honest.text());
}

#[test]
fn nothing_executed_is_a_failure() {
    for options in [
        Options { claims: vec!["nvfp5@1".into()], ..decode() },
        Options::of(Profile::Inference).replaying("L2/nvfp4@1/native/cpu/fused-dequant/no-such-case/s0"),
    ] {
        let report = judge(&*honest(), &options);
        assert!(!report.conformant && report.passed == 0, "{}", report.text());
        assert!(report.notes.iter().any(|n| n.starts_with("nothing executed")), "{:?}", report.notes);
    }
}

/// Says everything right and computes nothing.
struct Idle(Arc<dyn Q4Backend>);

impl Q4Backend for Idle {
    fn descriptor(&self) -> &BackendDescriptor {
        self.0.descriptor()
    }
    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        self.0.probe(env)
    }
    fn can_prepare(&self, _: &LinearSpec, path: ExecPath, _: &HostEnv) -> Verdict {
        Err(vec![Reject::new(RejectCode::PathUnsupported, "another path", path.as_str())])
    }
    fn prepare(
        &self,
        _: &Q4Weight<'_>,
        _: &LinearSpec,
        _: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        Err(Error::new(Code::Unsupported, "idle"))
    }
}

#[test]
fn a_backend_that_claims_nothing_does_not_conform() {
    let backend = Idle(honest());
    for options in [Options::of(Profile::Inference), decode()] {
        let report = judge(&backend, &options);
        assert!(!report.conformant && report.failed == 0, "{}", report.text());
        assert!(report.notes.iter().any(|n| n.starts_with("nothing executed")), "{:?}", report.notes);
    }
    let levels = vec![Level::L0];
    let described = judge(&backend, &Options { levels, ..Options::of(Profile::Inference) });
    assert!(described.conformant && !described.complete, "{}", described.text());
}

#[test]
fn claims_are_what_can_be_prepared() {
    let found: Vec<_> = claims(&*honest(), &HostEnv::default(), q4_core::Device::Cpu)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(found.len(), 37);
    assert_eq!(found[0], "nvfp4@1/native/cpu/fused-dequant");
    let admits = |pattern: &str| {
        let options = Options { claims: vec![pattern.into()], ..Options::default() };
        claims(&*honest(), &HostEnv::default(), q4_core::Device::Cpu)
            .iter()
            .filter(|c| options.admits(c))
            .count()
    };
    let counts =
        ["nvfp4@1", "nvfp4@1/int8", "*/native/*", "nf4", "nf4@1/nvfp4/cpu/fused-dequant"].map(admits);
    assert_eq!(counts, [3, 1, 12, 0, 1]);
}

#[test]
fn a_waiver_excuses_and_never_certifies() -> Result<()> {
    let file = "[[waiver]]\ncase = \"L1/nf4@1/*\"\nbackend = \"honest\"\ndevice = \"cpu\"\nreason = \"known\"\nexpires = \"2999-01-01\"\n";
    let options = Options { waivers: Waivers::parse(file)?, ..decode() };
    let backend = mutant("nf4-entry-off");
    let plain = judge(&*backend, &decode());
    assert!(!plain.conformant && plain.failed > 0);
    let waived = judge(&*backend, &options);
    assert!(waived.waived > 0);
    // nf4-dq has the same fault and no waiver.
    assert!(
        !waived.conformant
            && waived.failures.iter().any(|f| f.outcome == Outcome::Fail && f.id.contains("nf4-dq@1"))
    );
    let right = judge(&*honest(), &options);
    assert!(
        right.conformant && right.notes.iter().any(|n| n.starts_with("unexpected pass")),
        "{:?}",
        right.notes
    );
    Ok(())
}

/// A library whose table nobody checks.
struct Foreign;

impl AbiProbe for Foreign {
    fn cases(&self) -> Vec<String> {
        Vec::new()
    }
    fn run(&self, _: &str) -> Result<()> {
        Ok(())
    }
}

#[test]
fn nothing_is_taken_as_shared_or_known_in_a_library() {
    let found = proofs(&*honest(), &HostEnv::default(), q4_core::Device::Cpu);
    let of = |path: ExecPath, activations: &str, abi: Option<&dyn AbiProbe>| {
        let mut proof = found.iter().find(|p| p.claim.activations == activations).expect("a claim").clone();
        proof.claim.path = path;
        let options =
            Options { levels: vec![Level::L2, Level::L3, Level::L5], ..Options::of(Profile::Training) };
        let all = cases(&[proof], abi, &options);
        all.into_iter().map(|c| c.id.replace(path.as_str(), "path")).collect::<BTreeSet<_>>()
    };
    for activations in ["native", "int8"] {
        let packed = of(ExecPath::FusedDequant, activations, Some(&Foreign));
        for path in [ExecPath::DequantMatmul, ExecPath::Reference] {
            let (own, foreign) = (of(path, activations, None), of(path, activations, Some(&Foreign)));
            // What q4's own dense code shares between kinds of input is looked at less often.
            assert!(activations == "native" || own.len() + 50 < foreign.len(), "{path}: {}", own.len());
            // Copies of another size than what is stored are no fault of theirs.
            assert!(foreign.len() + 10 > packed.len(), "{path} {activations}: {}", foreign.len());
        }
    }
}

#[test]
fn a_host_of_libraries_adds_its_own_checks() {
    struct Table;
    impl AbiProbe for Table {
        fn cases(&self) -> Vec<String> {
            vec!["negotiation".into(), "null-outputs".into()]
        }
        fn run(&self, case: &str) -> Result<()> {
            match case {
                "negotiation" => Ok(()),
                _ => Err(Error::new(Code::ConformanceFailed, "destroy was called twice")),
            }
        }
    }
    let options = Options { levels: vec![Level::L0], ..Options::of(Profile::Inference) };
    let report =
        run_with(&InProcess, &*honest(), Some(&Table), &options, &HostEnv::default(), &ThreadPool::new(1));
    assert_eq!((report.passed, report.failed), (5, 1), "{}", report.text());
    assert_eq!(report.failures[0].id, "L0/backend/table/null-outputs");
}

#[test]
fn a_panic_is_a_crash_and_the_rest_still_runs() {
    let is_of_17 = |id: &str| id.contains(".m17") || id.contains("/model/");
    let options = Options {
        levels: vec![Level::L2],
        claims: vec!["nf4@1/native".into()],
        ..Options::of(Profile::Inference)
    };
    let report = judge(&*mutant("panics"), &options);
    assert!(
        report.failures.iter().all(|f| f.outcome == Outcome::Crash && is_of_17(&f.id)),
        "{}",
        report.text()
    );
    assert!(!report.failures.is_empty() && report.passed > 100);
}

/// The defects of the program this one replaces, each by its name.
#[test]
fn old_defects_do_not_come_back() {
    for name in
        ["scales-tiled", "scales-as-integers", "nibble-order-ignored", "nibbles-swapped", "top-row-nan"]
    {
        assert!(judge(&*mutant(name), &decode()).failed > 0, "{name}");
    }
}

#[test]
fn the_correct_backend_passes_with_any_seed() {
    for seed in 0..4 {
        let options = Options { seed, sample: Some(6), ..Options::of(Profile::Training) };
        for backend in [honest(), honest_units()] {
            let report = judge(&*backend, &options);
            assert!(report.conformant, "seed {seed}:\n{}", report.text());
        }
    }
}
