//! The suite on a CUDA device, where there is one. `Q4_TEST_SAMPLE=N` keeps N cases of each level and claim.
use q4_conformance::{InProcess, Options, Profile, Report, run_with};
use q4_core::{BuiltinOptions, Candidate, Device, Registry, Result, ThreadPool};
use q4_cuda as _;
use {
    q4_dequant_matmul as _, q4_fp8_kernel as _, q4_ggml_kernel as _, q4_int4_kernel as _,
    q4_mxfp4_kernel as _, q4_nf4_kernel as _, q4_nvfp4_kernel as _,
};

/// The report of `backend` on `cuda:0`; `None`, said in words, without a device.
fn judge(backend: &str) -> Result<Option<Report>> {
    let registry = Registry::builtin(&BuiltinOptions { cuda: Some(0), ..BuiltinOptions::default() })?;
    let env = registry.env();
    if env.cuda_device(0).is_none() {
        println!("skipped: no CUDA device ({})", env.no_cuda(0));
        return Ok(None);
    }
    let live = match registry.candidates().iter().find(|c| c.name() == backend) {
        Some(Candidate::Live(b)) => b,
        other => panic!("{backend}: {:?}", other.map(Candidate::name)),
    };
    for item in live.probe(env) {
        println!("{}: {} {:?}", item.id, item.detail, item.reasons);
    }
    let sample = std::env::var("Q4_TEST_SAMPLE").ok().and_then(|n| n.parse().ok());
    let options = Options { device: Device::Cuda(0), sample, ..Options::of(Profile::Training) };
    let threads = ThreadPool::new(q4_core::processors());
    let report = run_with(&InProcess, &**live, None, &options, env, &threads);
    println!("{}", report.text());
    Ok(Some(report))
}

fn conforms(backend: &str) -> Result<()> {
    if let Some(report) = judge(backend)? {
        assert!(report.conformant, "{backend} does not conform on cuda:0");
    }
    Ok(())
}

#[test]
fn nvfp4_kernel_conforms_on_cuda() -> Result<()> {
    conforms("nvfp4-kernel")
}

#[test]
fn nf4_kernel_conforms_on_cuda() -> Result<()> {
    conforms("nf4-kernel")
}

#[test]
fn dequant_matmul_conforms_on_cuda() -> Result<()> {
    conforms("dequant-matmul")
}
