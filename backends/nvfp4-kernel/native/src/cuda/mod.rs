//! NVFP4 products on a CUDA device: an engine opens the device and its kernels; a call enqueues work on the
//! caller's stream and allocates nothing.
mod decode;
mod forward;
mod fp4;
#[cfg(test)]
mod layout;
mod memory;
mod prefill;
mod prepare;
mod simple;
mod tiles;
mod weight;

pub use prepare::prepare;
pub use weight::Weight;

use forward::Fast;
use memory::Staging;
use q4_core::{BuiltinOptions, Code, Error, Reject, RejectCode, Result};
use q4_cuda::{File, Gpu};
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;

/// What kernels include.
const FILES: &[File] = q4_cuda::files!(
    "../../cuda/",
    "layout.cuh",
    "spans.cuh",
    "copy.cuh",
    "elements.cuh",
    "output.cuh",
    "gemv.cu"
);

/// What computes on one device, shared with its weights.
pub struct Engine {
    /// The device.
    gpu: Arc<Gpu>,
    /// Kernels for everything.
    simple: simple::Kernels,
    /// Kernels for some calls, the better ones first.
    fast: Vec<Box<dyn Fast>>,
    /// FP4 tensor cores, or why there is no using them.
    native: std::result::Result<fp4::Native, Reject>,
    staging: Mutex<Option<Staging>>,
}

impl Engine {
    /// Compiles or finds the kernels for `gpu`.
    pub fn open(gpu: &Arc<Gpu>) -> Result<Self> {
        // Those that are not on disk yet compile side by side.
        let (simple, decode, prefill, native) = std::thread::scope(|scope| {
            let decode = scope.spawn(|| decode::Kernels::load(gpu));
            let prefill = scope.spawn(|| prefill::Kernels::load(gpu));
            let native = scope.spawn(|| fp4::Native::open(gpu));
            let simple = simple::Kernels::load(gpu);
            let ended = |_| {
                let need = "FP4 products";
                Err(Reject::new(RejectCode::KernelImageMissing, need, "opening them panicked"))
            };
            (simple, joined(decode), joined(prefill), native.join().unwrap_or_else(ended))
        });
        let mut fast: Vec<Box<dyn Fast>> = vec![Box::new(decode?)];
        if let Some(kernels) = prefill? {
            fast.push(Box::new(kernels));
        }
        Ok(Self { gpu: gpu.clone(), simple: simple?, fast, native, staging: Mutex::new(None) })
    }
}

/// Capabilities of this machine's devices whose kernels are on disk, so that no compiler is needed.
pub fn images(options: &BuiltinOptions) -> Vec<(u32, u32)> {
    let mut all = q4_cuda::images(options, &simple::SOURCE, &[Vec::new()]);
    let decode = q4_cuda::images(options, &decode::GEMV, &[Vec::new()]);
    all.retain(|capability| decode.contains(capability));
    all
}

/// What a thread that loads kernels came to.
fn joined<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| Err(Error::new(Code::Internal, "loading kernels")))
}

/// An error's parts on one line.
fn parts(e: &Error) -> String {
    let all: Vec<_> = e.parts().filter(|(name, _)| *name != "fix").map(|p| p.1).collect();
    all.join("; ")
}

/// Puts the shape of a call into its failure.
fn shaped(e: Error, what: &str, m: usize, [n, k]: [usize; 2], gpu: &Gpu) -> Error {
    e.within(format!("{what} of [{m}, {k}] by [{n}, {k}] on {}", gpu.device()))
}
