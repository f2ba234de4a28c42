//! libNVFP4 on a CUDA device: the same table, other memory. A context opens the device and its kernels; a
//! call enqueues work on the caller's stream and allocates nothing.
mod backward;
mod decode;
mod forward;
pub mod fp4;
#[cfg(test)]
mod layout;
mod managed;
mod memory;
mod prefill;
mod prepare;
mod quantize;
mod simple;
mod tiles;
mod weight;

pub use backward::{backward_input, dequantize};
pub use forward::{Fast, Fuse, forward, fuses, types, workspace};
pub use managed::{alloc, free, is_managed, prefetch, supported};
pub use prepare::prepare;
pub use quantize::{quantize, scaled_mm};
pub use weight::Weight;

use crate::abi;
use crate::call::{Fail, Finding, Outcome, fixed, read, write};
use memory::Staging;
use q4_core::Code;
use q4_cuda::{Found, Gpu, libraries};
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;

/// What a CUDA `nvfp4_ctx` points to, shared with its weights.
pub struct Engine {
    /// The device.
    pub gpu: Arc<Gpu>,
    /// Kernels for everything.
    pub simple: simple::Kernels,
    /// Kernels for some calls, the better ones first.
    pub fast: Vec<Box<dyn Fast>>,
    /// FP4 tensor cores, or why there is no using them.
    pub native: Result<fp4::Native, Finding>,
    /// Weights go to managed memory.
    pub is_managed: bool,
    staging: Mutex<Option<Staging>>,
}

impl Engine {
    /// Opens device `ordinal`; Err holds every reason why there is none.
    pub fn open(ordinal: i32, is_managed: bool) -> Result<Arc<Self>, Vec<Finding>> {
        let one = |code, need: &str, have: String| vec![Finding::limit(code, need, have)];
        if let Found::No(why) = &libraries().driver {
            return Err(one("device-absent", "a CUDA driver (libcuda.so.1)", why.clone()));
        }
        let found = q4_cuda::devices().map_err(|e| one("device-absent", "a CUDA device", e.to_string()))?;
        let Some(device) = u32::try_from(ordinal).ok().and_then(|o| found.iter().find(|d| d.ordinal == o))
        else {
            let have: Vec<_> = found.iter().map(|d| format!("cuda:{} {}", d.ordinal, d.name)).collect();
            let have = if have.is_empty() { "no CUDA device".into() } else { have.join(", ") };
            return Err(one("device-absent", &format!("cuda:{ordinal}"), have));
        };
        if device.capability < (8, 0) {
            return Err(one("device-arch", "sm_80 or newer", device.arch()));
        }
        let gpu = Gpu::open(device.ordinal)
            .map_err(|e| one("device-absent", "a usable CUDA device", e.to_string()))?;
        // Those that are not on disk yet compile side by side.
        let (simple, decode, prefill, native) = std::thread::scope(|scope| {
            let decode = scope.spawn(|| decode::Kernels::load(&gpu));
            let prefill = scope.spawn(|| prefill::Kernels::load(&gpu));
            let native = scope.spawn(|| fp4::Native::open(&gpu));
            let simple = simple::Kernels::load(&gpu);
            let ended =
                |_| Err(Finding::limit("kernel-image-missing", "FP4 products", "opening them panicked"));
            (simple, joined(decode), joined(prefill), native.join().unwrap_or_else(ended))
        });
        let missing = |e: q4_core::Error| {
            let code = match e.to_string() {
                text if text.contains("UNSUPPORTED_PTX") || text.contains("NO_BINARY") => "driver-too-old",
                _ => "kernel-image-missing",
            };
            one(code, &format!("kernels of libNVFP4 for {}", gpu.arch()), parts(&e))
        };
        let simple = simple.map_err(missing)?;
        if is_managed {
            managed::supported(&gpu).map_err(|why| one("device-arch", "managed memory", why))?;
        }
        let mut fast: Vec<Box<dyn Fast>> = Vec::new();
        fast.push(Box::new(decode.map_err(missing)?));
        if let Some(k) = prefill.map_err(missing)? {
            fast.push(Box::new(k));
        }
        Ok(Arc::new(Self { gpu, simple, fast, native, is_managed, staging: Mutex::new(None) }))
    }

    /// Fills in what the context can do.
    ///
    /// # Safety
    /// `out` is NULL or a writable size-prefixed struct.
    pub unsafe fn device_info(&self, out: *mut abi::DeviceInfo) -> Outcome {
        // SAFETY: forwarded.
        let size = unsafe { read(out, "device_info")? }.struct_size;
        let version =
            |f: &Found| f.version().map_or("none".to_owned(), |v| format!("{}.{}", v / 1000, v % 1000 / 10));
        let all = libraries();
        let info = abi::DeviceInfo {
            struct_size: size,
            device_type: abi::DEVICE_CUDA,
            cc_major: self.gpu.capability.0 as i32,
            cc_minor: self.gpu.capability.1 as i32,
            paths: 1 << abi::PATH_FUSED_DEQUANT | u32::from(self.native.is_ok()) << abi::PATH_NATIVE,
            activations: 1 << abi::ACT_NATIVE | 1 << abi::ACT_INT8 | 1 << abi::ACT_NVFP4,
            has_native_image: 1,
            isa: fixed(&self.gpu.arch()),
            isa_available: fixed(&self.gpu.arch()),
            build: fixed(&format!("driver {}, nvrtc {}", version(&all.driver), version(&all.nvrtc))),
        };
        // SAFETY: forwarded.
        unsafe { write(out, &info) };
        Ok(())
    }

    /// Gives back what `prepare` keeps between weights.
    pub fn empty_cache(&self) {
        self.staging.lock().unwrap_or_else(|e| e.into_inner()).take();
    }
}

/// What a thread that loads kernels came to.
fn joined<T>(thread: ScopedJoinHandle<'_, q4_core::Result<T>>) -> q4_core::Result<T> {
    thread.join().unwrap_or_else(|_| Err(q4_core::Error::new(Code::Internal, "loading kernels")))
}

/// An error's parts on one line.
fn parts(e: &q4_core::Error) -> String {
    let all: Vec<_> = e.parts().filter(|(name, _)| *name != "fix").map(|p| p.1).collect();
    all.join("; ")
}

/// Puts the shape of a call into its failure.
fn shaped(e: q4_core::Error, what: &str, m: usize, [n, k]: [usize; 2], gpu: &Gpu) -> Fail {
    let out_of_memory = e.code() == Code::OutOfMemory;
    let mut fail = Fail::from(e.within(format!("{what} of [{m}, {k}] by [{n}, {k}] on {}", gpu.device())));
    if out_of_memory {
        fail.status = abi::E_NOMEM;
    }
    fail
}
