//! Every built-in backend on every recorded product and over the whole lattice.
use q4_conformance::{Verdict, check_paths, golden, lattice, measure};
use q4_core::{BuiltinOptions, Candidate, ExecPath, Registry, Result, ThreadPool};
use {q4_dequant_matmul as _, q4_nf4_kernel as _, q4_nvfp4_kernel as _, q4_reference as _};

/// What must be computed, not refused: (backend, path, encoding).
const CLAIMS: [(&str, ExecPath, &str); 10] = [
    ("nvfp4-kernel", ExecPath::FusedDequant, "nvfp4"),
    ("nf4-kernel", ExecPath::FusedDequant, "nf4"),
    ("nf4-kernel", ExecPath::FusedDequant, "nf4-dq"),
    ("dequant-matmul", ExecPath::DequantMatmul, "nvfp4"),
    ("dequant-matmul", ExecPath::DequantMatmul, "nf4"),
    ("dequant-matmul", ExecPath::DequantMatmul, "nf4-dq"),
    ("dequant-matmul", ExecPath::DequantMatmul, "dense"),
    ("reference", ExecPath::Reference, "nvfp4"),
    ("reference", ExecPath::Reference, "nf4"),
    ("reference", ExecPath::Reference, "dense"),
];

#[test]
fn every_claim_holds_over_the_lattice() -> Result<()> {
    for isa in isas() {
        let registry =
            Registry::builtin(&BuiltinOptions { isa: isa.map(str::to_owned), ..BuiltinOptions::default() })?;
        let threads = ThreadPool::new(3);
        for (name, path, schema) in CLAIMS {
            // Only kernels have instruction sets to choose from.
            if isa.is_some() && path != ExecPath::FusedDequant {
                continue;
            }
            let backend = registry.live(name).unwrap_or_else(|| panic!("{name} is not live"));
            let (mut cases, mut outputs, mut worst) = (0, 0, 0f64);
            for encoding in lattice::SCHEMAS.into_iter().filter(|s| s.id().name == schema) {
                lattice::each(encoding, &mut |problem| {
                    match measure(&**backend, path, problem, registry.env(), &threads)? {
                        Ok(m) => {
                            cases += 1;
                            outputs += m.outputs;
                            worst = worst.max(m.forward).max(m.backward.unwrap_or(0.0));
                        }
                        Err(reasons) => panic!("{name} refuses {}: {reasons:?}", problem.name),
                    }
                    Ok(())
                })?;
            }
            assert!(cases > 0, "{name} {schema}: nothing ran");
            println!(
                "{name:<15} {path:<14} {schema:<7} {:<10} {cases:>4} cases {outputs:>8} outputs, error/bound {worst:.3}",
                isa.unwrap_or("best")
            );
        }
    }
    Ok(())
}

#[test]
fn every_live_path_computes_the_recorded_products() -> Result<()> {
    let registry = Registry::builtin(&BuiltinOptions::default())?;
    assert!(registry.candidates().iter().all(|c| matches!(c, Candidate::Live(_))), "a built-in is dead");
    let reports = check_paths(&registry, &ThreadPool::new(2))?;
    let mut passed = 0;
    for (backend, rows) in &reports {
        for r in rows {
            println!(
                "{backend:<15} {:<14} {:<8} {:<7} {:?} {} cases, {} outputs, error/bound {:.3} {}",
                r.path,
                r.schema,
                r.activations,
                r.verdict,
                r.cases,
                r.outputs,
                r.error_over_bound,
                r.message.as_deref().unwrap_or("")
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
    #[cfg(not(target_arch = "x86_64"))]
    vec![None, Some("portable")]
}
