//! Facts about the machine, collected once and then frozen: selection looks at these and at nothing else.
use crate::Device;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// One CUDA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaDevice {
    /// Ordinal of the CUDA runtime.
    pub ordinal: u32,
    /// Compute capability, e.g. `(9, 0)`. What code may be gated on.
    pub capability: (u32, u32),
    /// Marketing name, for display only.
    pub name: String,
    /// Bytes of device memory.
    pub memory: u64,
}

impl CudaDevice {
    /// `sm_90`.
    pub fn arch(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }
}

/// A device that a third party's backend brings: see [`crate::Q4Backend::devices`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VendorDevice {
    /// As `--device` names it: `acme:0`.
    pub device: Device,
    /// Name for display.
    pub name: String,
    /// All that results there may depend on: model, driver, firmware. A certificate is about one of them.
    pub fingerprint: String,
    /// Bytes of its memory.
    pub memory: u64,
}

/// A shared kernel library that was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LibraryFacts {
    /// File it was loaded from.
    pub path: String,
    /// Its own version.
    pub version: String,
    /// Digest of the file, lower-case hex; empty where it is q4's own.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub sha256: String,
}

/// Whether a library can be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// With its version as major * 1000 + minor * 10 (cuBLASLt: as it counts itself).
    Yes(u32),
    /// Why not, for people.
    No(String),
}

impl Found {
    /// The version, or why there is none.
    ///
    /// # Errors
    /// Why the library cannot be used, for people.
    pub fn version(&self) -> std::result::Result<u32, &str> {
        match self {
            Self::Yes(v) => Ok(*v),
            Self::No(why) => Err(why),
        }
    }
}

/// What kernels inside this program can be made of on a CUDA device; looked for together with the devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaTools {
    /// NVRTC, which compiles kernels.
    pub nvrtc: Found,
    /// cuBLASLt, behind dense products.
    pub cublaslt: Found,
    /// Compute capabilities whose machine code is on disk already, by the name of the backend it belongs to.
    pub images: BTreeMap<String, Vec<(u32, u32)>>,
    /// Devices that are there and cannot be opened, by ordinal, with the reason.
    pub unusable: BTreeMap<u32, String>,
}

impl Default for CudaTools {
    /// Nobody looked.
    fn default() -> Self {
        let none = || Found::No("nothing of CUDA was looked for".into());
        Self { nvrtc: none(), cublaslt: none(), images: BTreeMap::new(), unusable: BTreeMap::new() }
    }
}

/// The machine.
///
/// ```
/// use q4_core::{CudaDevice, HostEnv};
///
/// let here = HostEnv::collect();
/// assert_eq!(here.arch, std::env::consts::ARCH);
///
/// // A machine that is not here is data as well: what would be selected there is an ordinary test.
/// let h200 = CudaDevice { ordinal: 0, capability: (9, 0), name: "NVIDIA H200".into(), memory: 141 << 30 };
/// let there = HostEnv { cuda: vec![h200], cuda_driver: Some(13000), ..here.clone() };
/// assert_eq!(there.cuda_device(0).map(CudaDevice::arch).as_deref(), Some("sm_90"));
/// assert_eq!(there.no_cuda(1), "no cuda:1, only cuda:0 NVIDIA H200");
/// assert_ne!(there.fingerprint(), here.fingerprint());
/// ```
#[derive(Clone, Default, PartialEq, Eq, Serialize)]
pub struct HostEnv {
    /// `x86_64`, `aarch64`.
    pub arch: String,
    /// CPU features kernels care about, sorted.
    pub cpu_features: Vec<String>,
    /// Processors this process may run on.
    pub processors: usize,
    /// CUDA devices, by ordinal.
    pub cuda: Vec<CudaDevice>,
    /// Version of the CUDA driver, e.g. 13000.
    pub cuda_driver: Option<u32>,
    /// What is missing where devices were looked for and none can be used.
    pub cuda_missing: Option<String>,
    /// What there is to run kernels on them with.
    pub cuda_tools: CudaTools,
    /// Libraries the built-in backends loaded, by backend name.
    pub libraries: BTreeMap<String, LibraryFacts>,
    /// Devices of third parties' backends, in the order of their names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vendor: Vec<VendorDevice>,
}

/// Where nobody brings a device, as if there were no such thing: fingerprints are made of this text.
impl fmt::Debug for HostEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = f.debug_struct("HostEnv");
        all.field("arch", &self.arch).field("cpu_features", &self.cpu_features);
        all.field("processors", &self.processors).field("cuda", &self.cuda);
        all.field("cuda_driver", &self.cuda_driver).field("cuda_missing", &self.cuda_missing);
        all.field("cuda_tools", &self.cuda_tools).field("libraries", &self.libraries);
        if !self.vendor.is_empty() {
            all.field("vendor", &self.vendor);
        }
        all.finish()
    }
}

impl HostEnv {
    /// Looks at this machine. Devices and libraries are added by whoever loads them.
    pub fn collect() -> Self {
        Self {
            arch: std::env::consts::ARCH.into(),
            cpu_features: cpu_features(),
            processors: processors(),
            ..Self::default()
        }
    }
    /// Why there is no such device, for the `have` of a reason.
    pub fn no_cuda(&self, ordinal: u32) -> String {
        match (&self.cuda_missing, self.cuda.as_slice()) {
            (Some(why), _) => why.clone(),
            (None, []) => format!("no cuda:{ordinal}"),
            (None, all) => {
                let names: Vec<_> = all.iter().map(|d| format!("cuda:{} {}", d.ordinal, d.name)).collect();
                format!("no cuda:{ordinal}, only {}", names.join(", "))
            }
        }
    }
    /// The facts of a third party's device.
    pub fn vendor_device(&self, device: Device) -> Option<&VendorDevice> {
        self.vendor.iter().find(|d| d.device == device)
    }
    /// The device with this ordinal.
    pub fn cuda_device(&self, ordinal: u32) -> Option<&CudaDevice> {
        self.cuda.iter().find(|d| d.ordinal == ordinal)
    }
    /// FNV-1a of all facts; reports quote it, certificates compare it.
    pub fn fingerprint(&self) -> u64 {
        format!("{self:?}")
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
    }
}

/// Processors this process may use: the scheduler's affinity mask and the cgroup's quota, whichever is
/// smaller.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether the processor multiplies bf16 tiles (AMX) and the system lets this process use them, for which it
/// is asked.
#[cfg(target_arch = "x86_64")]
pub fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const TILE_AND_BF16: u32 = 1 << 24 | 1 << 22;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_BF16 == TILE_AND_BF16 && grants_tiles()
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn grants_tiles() -> bool {
    const ARCH_PRCTL: isize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let status: isize;
    // SAFETY: a system call without pointers; it changes rcx and r11 and no memory.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") ARCH_PRCTL => status, in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA, out("rcx") _, out("r11") _, options(nostack));
    }
    status == 0
}
#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn grants_tiles() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<String> {
    macro_rules! probe {
        ($($f:tt),*) => { [$(($f, std::arch::is_x86_feature_detected!($f))),*] };
    }
    let mut found: Vec<String> = probe!(
        "avx2",
        "fma",
        "f16c",
        "avxvnni",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512vbmi",
        "avx512vnni",
        "avx512bf16",
        "avx512fp16"
    )
    .iter()
    .filter(|(_, yes)| *yes)
    .map(|(f, _)| (*f).to_owned())
    .chain(has_tiles().then(|| "amx-bf16".to_owned()))
    .collect();
    found.sort();
    found
}

#[cfg(target_arch = "aarch64")]
fn cpu_features() -> Vec<String> {
    macro_rules! probe {
        ($($f:tt),*) => { [$(($f, std::arch::is_aarch64_feature_detected!($f))),*] };
    }
    let all = probe!("bf16", "dotprod", "fp16", "i8mm", "neon", "sve", "sve2");
    all.iter().filter(|(_, yes)| *yes).map(|(f, _)| (*f).to_owned()).collect()
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> Vec<String> {
    Vec::new()
}
