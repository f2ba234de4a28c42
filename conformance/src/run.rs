//! One run of the suite: enumeration, execution, waivers, and the report.
use crate::options::Options;
use crate::report::Report;
use crate::runner::{InProcess, Runner};
use crate::{AbiProbe, Bench, cases, proofs};
use q4_core::{HostEnv, Q4Backend, ThreadPool};
use std::time::Instant;

/// Runs the suite in this process: for tests, and for backends that are trusted not to end it.
pub fn run(backend: &dyn Q4Backend, options: &Options, env: &HostEnv, threads: &ThreadPool) -> Report {
    run_with(&InProcess, backend, None, options, env, threads)
}

/// Runs the suite through `runner`, with the checks of a plugin host where there is one.
pub fn run_with(
    runner: &dyn Runner,
    backend: &dyn Q4Backend,
    abi: Option<&dyn AbiProbe>,
    options: &Options,
    env: &HostEnv,
    threads: &ThreadPool,
) -> Report {
    let start = Instant::now();
    let proofs = proofs(backend, env, options.device);
    let bench = Bench { backend, env, device: options.device, threads, abi, proofs: &proofs };
    let cases = cases(&proofs, abi, options);
    let name = backend.descriptor().name.to_string();
    let mut results = Vec::with_capacity(cases.len());
    let mut waivers = options.waivers.judge(&name, options.today);
    runner.run(&cases, &bench, &mut |mut result| {
        waivers.apply(&mut result);
        let goes_on = !(options.fail_fast && result.outcome.is_bad());
        results.push(result);
        goes_on
    });
    Report::of(
        backend.descriptor(),
        env,
        options,
        &proofs,
        results,
        waivers.notes(options.is_complete()),
        start.elapsed(),
    )
}
