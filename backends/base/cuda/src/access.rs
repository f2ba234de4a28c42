//! Whether a backend has a device, decided from facts, and its engine on that device, built when it is first
//! needed.
use crate::compile::on_disk;
use crate::{ARCHS, Arch, Gpu, Source, devices};
use q4_core::{BuiltinOptions, Device, Found, HostEnv, ProbeItem, Reject, RejectCode, Result, Verdict};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

/// What the products of a backend need of CUDA besides a device and its driver.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Name of the backend, under which [`HostEnv::cuda_tools`] lists its machine code.
    pub backend: &'static str,
    /// Products are cuBLASLt's.
    pub cublaslt: bool,
}

impl Needs {
    /// Whether products can run on `device` of the machine `env`: a pure function of both, with every reason.
    /// The CPU needs nothing.
    pub fn verdict(&self, device: Device, env: &HostEnv) -> Verdict {
        let ordinal = match device {
            Device::Cpu => return Ok(()),
            Device::Cuda(ordinal) => ordinal,
            other => {
                return Err(vec![Reject::new(RejectCode::DeviceAbsent, "cpu or cuda", other.to_string())]);
            }
        };
        let Some(gpu) = env.cuda_device(ordinal) else {
            return Err(vec![Reject::new(RejectCode::DeviceAbsent, "a CUDA device", env.no_cuda(ordinal))]);
        };
        let mut reasons = Vec::new();
        let tools = &env.cuda_tools;
        if let Some(why) = tools.unusable.get(&ordinal) {
            let need = "a CUDA device that can be opened";
            reasons.push(Reject::new(RejectCode::DeviceAbsent, need, why.clone()));
        }
        if gpu.capability < ARCHS[0].capability {
            let need = format!("{} or newer", ARCHS[0].target());
            reasons.push(Reject::new(RejectCode::DeviceArch, need, gpu.arch()));
        }
        let has_image = tools.images.get(self.backend).is_some_and(|all| all.contains(&gpu.capability));
        if let (Found::No(why), false) = (&tools.nvrtc, has_image) {
            let need = format!("kernels for {}: NVRTC, or a prebuilt image", gpu.arch());
            reasons.push(Reject::new(RejectCode::KernelImageMissing, need, why.clone()));
        }
        if let (Found::No(why), true) = (&tools.cublaslt, self.cublaslt) {
            reasons.push(Reject::new(RejectCode::LibraryMissing, "cuBLASLt", why.clone()));
        }
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }

    /// A line of a probe for each device of `env`: that it is used, or why not.
    pub fn items(&self, env: &HostEnv) -> Vec<ProbeItem> {
        let item = |device: &q4_core::CudaDevice| ProbeItem {
            id: format!("context.cuda:{}", device.ordinal).into(),
            reasons: self.verdict(Device::Cuda(device.ordinal), env).err().unwrap_or_default(),
            detail: "kernels load with the first weight".to_owned(),
        };
        env.cuda.iter().map(item).collect()
    }
}

/// Capabilities of this machine's devices that `source` is on disk for, compiled with each of the options
/// `told`, so that no compiler is needed. Looks only where a program asked for a device.
pub fn images(options: &BuiltinOptions, source: &Source, told: &[Vec<String>]) -> Vec<(u32, u32)> {
    if options.cuda.is_none() {
        return Vec::new();
    }
    let mut all: Vec<_> = devices().unwrap_or_default().into_iter().map(|d| d.capability).collect();
    all.sort_unstable();
    all.dedup();
    all.retain(|capability| told.iter().all(|told| on_disk(source, &Arch::of(*capability), told)));
    all
}

/// What a backend computes with on each device, built by the first weight there: who computes nothing
/// compiles nothing.
pub struct Engines<T> {
    build: fn(&Arc<Gpu>) -> Result<T>,
    built: Mutex<BTreeMap<u32, Place<T>>>,
}

/// Of one device; filled once, with what it was or why it is not.
type Place<T> = Arc<OnceLock<Result<Arc<T>>>>;

impl<T> Engines<T> {
    /// None yet.
    pub fn new(build: fn(&Arc<Gpu>) -> Result<T>) -> Self {
        Self { build, built: Mutex::default() }
    }

    /// That of `device`.
    ///
    /// # Errors
    /// What the driver, the compiler or `build` says; [`q4_core::Code::DeviceMissing`] where there is no such
    /// device.
    pub fn of(&self, device: Device) -> Result<Arc<T>> {
        let Device::Cuda(ordinal) = device else {
            let what = "kernels of a device";
            return Err(q4_core::Error::new(q4_core::Code::DeviceMissing, what).have(device.to_string()));
        };
        let place = {
            let mut all = self.built.lock().unwrap_or_else(|e| e.into_inner());
            all.entry(ordinal).or_default().clone()
        };
        place.get_or_init(|| Gpu::open(ordinal).and_then(|gpu| (self.build)(&gpu)).map(Arc::new)).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::{CudaDevice, CudaTools};

    const DENSE: Needs = Needs { backend: "dense", cublaslt: true };

    /// A machine with everything, and a device of that capability.
    fn machine(capability: (u32, u32)) -> HostEnv {
        let device = CudaDevice { ordinal: 0, capability, name: "imagined".into(), memory: 1 << 34 };
        let (nvrtc, cublaslt) = (Found::Yes(13_000), Found::Yes(130_000));
        HostEnv {
            cuda: vec![device],
            cuda_tools: CudaTools { nvrtc, cublaslt, ..CudaTools::default() },
            ..HostEnv::default()
        }
    }

    fn codes(v: Verdict) -> Vec<RejectCode> {
        v.err().into_iter().flatten().map(|r| r.code).collect()
    }

    #[test]
    fn what_a_machine_lacks_is_listed_whole() {
        use RejectCode::{DeviceAbsent, DeviceArch, KernelImageMissing, LibraryMissing};
        let verdict = |env: &HostEnv| codes(DENSE.verdict(Device::Cuda(0), env));
        assert_eq!(verdict(&machine((9, 0))), []);
        assert_eq!(verdict(&HostEnv::default()), [DeviceAbsent]);
        assert_eq!(codes(DENSE.verdict(Device::Cuda(1), &machine((9, 0)))), [DeviceAbsent]);
        assert_eq!(codes(DENSE.verdict(Device::Cpu, &HostEnv::default())), []);
        let mut bare = machine((7, 5));
        bare.cuda_tools = Default::default();
        bare.cuda_tools.unusable.insert(0, "busy".into());
        assert_eq!(verdict(&bare), [DeviceAbsent, DeviceArch, KernelImageMissing, LibraryMissing]);
        let kernels = Needs { backend: "kernels", cublaslt: false };
        assert_eq!(
            codes(kernels.verdict(Device::Cuda(0), &bare)),
            [DeviceAbsent, DeviceArch, KernelImageMissing]
        );
    }

    #[test]
    fn an_image_stands_in_for_the_compiler_on_its_own_device_and_for_its_own_backend() {
        let mut env = machine((9, 0));
        env.cuda_tools.nvrtc = Found::No("no NVRTC".into());
        let verdict = |env: &HostEnv| codes(DENSE.verdict(Device::Cuda(0), env));
        for (backend, capability, fits) in
            [("dense", (9, 0), true), ("dense", (8, 0), false), ("other", (9, 0), false)]
        {
            env.cuda_tools.images = [(backend.to_owned(), vec![capability])].into();
            assert_eq!(verdict(&env).is_empty(), fits, "{backend} {capability:?}");
        }
    }
}
