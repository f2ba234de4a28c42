//! Every built-in backend through the suite, on every instruction set, and through the records that
//! `diagnose` shows.
use q4_conformance::{Level, Options, Profile, Verdict, check_paths, golden, lattice, measure, run};
use q4_core::{BuiltinOptions, Candidate, Device, ExecPath, Registry, Result, ThreadPool};
use {
    q4_dequant_matmul as _, q4_fp8_kernel as _, q4_ggml_kernel as _, q4_int4_kernel as _,
    q4_mxfp4_kernel as _, q4_nf4_kernel as _, q4_nvfp4_kernel as _, q4_reference as _,
};

#[test]
fn every_claim_holds() -> Result<()> {
    let threads = ThreadPool::new(3);
    for isa in isas() {
        let registry =
            Registry::builtin(&BuiltinOptions { isa: isa.map(str::to_owned), ..BuiltinOptions::default() })?;
        for candidate in registry.candidates() {
            let Candidate::Live(backend) = candidate else { panic!("{} is not live", candidate.name()) };
            let is_kernel = backend.descriptor().offers.iter().any(|(_, p)| *p == ExecPath::FusedDequant);
            if isa.is_some() && !is_kernel {
                continue;
            }
            // Tests run unoptimised and beside each other: a sample of the numerics, and no case that
            // measures memory.
            let levels = [Level::L0, Level::L1, Level::L2, Level::L3, Level::L4];
            let options =
                Options { levels: levels.to_vec(), sample: Some(60), ..Options::of(Profile::Training) };
            let report = run(&**backend, &options, registry.env(), &threads);
            println!("{}", report.text());
            assert!(
                report.conformant,
                "{} on {}:\n{}",
                candidate.name(),
                isa.unwrap_or("best"),
                report.text()
            );
            assert!(report.passed > 100, "{} cases", report.passed);
        }
    }
    Ok(())
}

#[test]
fn problems_of_the_lattice_can_be_measured_one_by_one() -> Result<()> {
    let registry = Registry::builtin(&BuiltinOptions::default())?;
    let threads = ThreadPool::new(2);
    let backend = registry.live("nf4-kernel").expect("live everywhere");
    let mut outputs = 0;
    lattice::each(lattice::usual()[4], &mut |problem| {
        if problem.m == 1 {
            let measured =
                measure(Device::Cpu, &**backend, ExecPath::FusedDequant, problem, registry.env(), &threads)?;
            outputs += measured.expect("claimed").outputs;
        }
        Ok(())
    })?;
    assert!(outputs > 0);
    Ok(())
}

#[test]
fn every_live_path_computes_the_recorded_products() -> Result<()> {
    let registry = Registry::builtin(&BuiltinOptions::default())?;
    assert!(registry.candidates().iter().all(|c| matches!(c, Candidate::Live(_))), "a built-in is dead");
    let reports = check_paths(&registry, q4_core::Device::Cpu, &ThreadPool::new(2))?;
    let mut passed = 0;
    for (backend, rows) in &reports {
        for r in rows {
            let (path, message) = (r.path, r.message.as_deref().unwrap_or(""));
            println!(
                "{backend:<15} {path:<14} {:<8} {:<7} {:?} {message}",
                r.schema, r.activations, r.verdict
            );
            assert_ne!(r.verdict, Verdict::Fail, "{backend}");
            passed += usize::from(r.verdict == Verdict::Pass);
        }
    }
    assert!(passed >= 10, "{passed} paths passed");
    Ok(())
}

#[test]
fn there_are_recorded_products() -> Result<()> {
    let (mut names, mut recorded) = (Vec::new(), 0);
    golden::each(&mut |p| {
        recorded += usize::from(p.recorded.is_some());
        names.push(p.name.clone());
        Ok(())
    })?;
    let all = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all, "names are identities");
    assert!(all >= 50 && recorded >= 32, "{recorded} of {all} recorded");
    Ok(())
}

fn isas() -> Vec<Option<&'static str>> {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
        let avx512 = std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512vbmi");
        let all = [(true, None), (true, Some("portable")), (avx2, Some("avx2")), (avx512, Some("avx512"))];
        all.into_iter().filter(|a| a.0).map(|a| a.1).collect()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let dotprod = std::arch::is_aarch64_feature_detected!("dotprod");
        let all =
            [(true, None), (true, Some("portable")), (true, Some("neon")), (dotprod, Some("neondotprod"))];
        all.into_iter().filter(|a| a.0).map(|a| a.1).collect()
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    vec![None, Some("portable")]
}
