//! One problem through one backend: forward, backward and decode, each output against the exact value. What
//! `diagnose` and the tests of backends need of the suite.
use crate::case::Bench;
use crate::guarded::Layout;
use crate::lattice::Problem;
use crate::product;
use q4_core::{DType, Device, ExecPath, HostEnv, OpSet, Q4Backend, Reject, Result, ThreadPool};

/// What a backend made of a problem.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Outputs compared.
    pub outputs: usize,
    /// Largest forward error over its bound.
    pub forward: f64,
    /// Largest `dx` error over its bound; `None` when the backend does not offer it.
    pub backward: Option<f64>,
    /// Decoded values compared bit for bit; `None` when the backend does not offer it.
    pub decoded: Option<usize>,
}

/// Runs `problem` through `backend` on `path` and `device`. `Ok(Err(reasons))` when it is refused beforehand.
///
/// # Errors
/// [`Code::ConformanceFailed`](q4_core::Code::ConformanceFailed) with the element that is wrong, and those of
/// the backend.
pub fn measure(
    device: Device,
    backend: &dyn Q4Backend,
    path: ExecPath,
    problem: &Problem<'_>,
    env: &HostEnv,
    threads: &ThreadPool,
) -> Result<std::result::Result<Measured, Vec<Reject>>> {
    let bench = Bench { backend, env, device, threads, abi: None, proofs: &[] };
    let bench = &bench;
    let mut spec = product::spec(bench, problem, OpSet::ALL);
    if backend.can_prepare(&spec, path, env).is_err() {
        spec.ops = OpSet::FORWARD;
    }
    if let Err(reasons) = backend.can_prepare(&spec, path, env) {
        return Ok(Err(reasons));
    }
    let run = || -> Result<std::result::Result<Measured, Vec<Reject>>> {
        let prepared = match product::prepare(bench, path, &problem.weight, &spec)? {
            Ok(prepared) => prepared,
            Err(reasons) => return Ok(Err(reasons)),
        };
        let ops = prepared.info().ops;
        let exact = product::exact_forward(problem)?;
        let y = product::forward(&*prepared, problem, Layout::PLAIN, product::STALE, threads)?.values();
        let forward = exact.compare("y", &y, product::forward_bound(path, problem))?;
        let backward = ops.contains(OpSet::BACKWARD_INPUT).then(|| {
            let dy = gradient(problem);
            let dx = product::backward(&*prepared, problem, &dy, Layout::PLAIN, threads)?.values();
            product::exact_backward(problem, &dy)?.compare("dx", &dx, product::backward_bound(path, problem))
        });
        let decoded = ops
            .contains(OpSet::DEQUANTIZE)
            .then(|| product::check_decode(&*prepared, &problem.weight, DType::F32, Layout::PLAIN, threads));
        Ok(Ok(Measured {
            outputs: exact.values.len(),
            forward,
            backward: backward.transpose()?,
            decoded: decoded.transpose()?,
        }))
    };
    run().map_err(|e| e.within(&problem.name))
}

/// Gradients of y, exact in every io dtype.
pub(crate) fn gradient(problem: &Problem<'_>) -> Vec<f32> {
    (0..problem.m * problem.weight.n()).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect()
}
