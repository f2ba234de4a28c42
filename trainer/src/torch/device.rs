//! Where training computes, and what memory is left there.
//!
//! A libtorch with CUDA is looked for only when a CUDA device is named: the binary links the CPU part alone.
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use q4_core::memory::{self, human};
use q4_core::{Code, Error, Result};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

unsafe extern "C" {
    fn q4_device_memory(device: i8, out: *mut i64) -> bool;
    fn q4_device_reset_peaks(device: i8) -> bool;
    fn q4_device_synchronize(device: i8) -> bool;
    fn q4_deterministic(on: bool) -> bool;
}

/// `cpu`, `cuda` or `cuda:N`. [`Code::DeviceMissing`] when libtorch's CUDA part or the device is not there.
pub fn open(name: &str) -> Result<Device> {
    let index = match name {
        "cpu" | "auto" => return Ok(Device::Cpu),
        "cuda" => 0,
        _ => name
            .strip_prefix("cuda:")
            .and_then(|n| n.parse::<usize>().ok())
            .ok_or_else(|| Error::new(Code::Usage, format!("--device {name}")).need("cpu, cuda or cuda:N"))?,
    };
    let missing = |have: String| {
        Error::new(Code::DeviceMissing, format!("--device {name}"))
            .need("a CUDA device and libtorch 2.11 with CUDA on the library path")
            .have(have)
            .fix("LD_LIBRARY_PATH=.../site-packages/torch/lib q4-train ..., or --device cpu")
    };
    // SAFETY: libtorch's own library; its initialisers only register kernels.
    let library = unsafe { Library::open(Some("libtorch_cuda.so"), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|e| missing(std::error::Error::source(&e).map_or(e.to_string(), ToString::to_string)))?;
    // Its kernels are registered for the life of the process.
    std::mem::forget(library);
    let count = tch::Cuda::device_count();
    if index >= count.max(0) as usize {
        return Err(missing(format!("{count} CUDA devices")));
    }
    let device = Device::Cuda(index);
    // The allocator has no figures before its first allocation.
    drop(Tensor::f_zeros([1], (Kind::Float, device)).map_err(|e| missing(e.to_string()))?);
    if Memory::of(device).device_total == 0 {
        return Err(missing("a libtorch that does not say how much memory the device has".into()));
    }
    Ok(device)
}

/// `the CPU` or `cuda:N`.
pub fn name(device: Device) -> String {
    match device {
        Device::Cuda(n) => format!("cuda:{n}"),
        _ => "the CPU".into(),
    }
}

/// Asks libtorch for kernels whose result does not depend on the order of threads, where it has them.
pub fn deterministic(on: bool) -> Result<()> {
    // SAFETY: a plain switch.
    if unsafe { q4_deterministic(on) } {
        Ok(())
    } else {
        Err(Error::new(Code::BackendFailed, "libtorch: deterministic kernels"))
    }
}

/// What is used and what is free. Device figures are zero on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Resident bytes of this process.
    pub rss: u64,
    /// Bytes the machine (or its cgroup) could still give.
    pub host_free: u64,
    /// Bytes tensors hold on the device.
    pub device: u64,
    /// The most they held since the last [`reset_peaks`].
    pub device_peak: u64,
    /// Bytes libtorch took from the device, cached ones included.
    pub device_reserved: u64,
    /// The most it had taken since the last [`reset_peaks`].
    pub device_reserved_peak: u64,
    /// Bytes free on the device, for everybody.
    pub device_free: u64,
    /// Bytes the device has.
    pub device_total: u64,
}

impl Memory {
    /// Now.
    pub fn of(device: Device) -> Self {
        let host_free = memory::available().unwrap_or(u64::MAX);
        let mut m = Self { rss: resident().unwrap_or(0), host_free, ..Self::default() };
        if let Device::Cuda(n) = device {
            let mut raw = [0i64; 6];
            // SAFETY: writes six values.
            if unsafe { q4_device_memory(n as i8, raw.as_mut_ptr()) } {
                let [device, peak, reserved, reserved_peak, free, total] = raw.map(|v| v.max(0) as u64);
                (m.device, m.device_peak, m.device_reserved) = (device, peak, reserved);
                (m.device_reserved_peak, m.device_free, m.device_total) = (reserved_peak, free, total);
            }
        }
        m
    }

    /// Bytes in use where the model lives, for a limit.
    pub fn used(&self, device: Device) -> u64 {
        if device.is_cuda() { self.device } else { self.rss }
    }

    /// The most that was in use there.
    pub fn peak(&self, device: Device) -> u64 {
        if device.is_cuda() { self.device_peak } else { memory::peak_resident().unwrap_or(self.rss) }
    }
}

/// Stops before the host does: over the limit, or nearly nothing left on host or device.
pub fn guard(device: Device, limit: Option<u64>) -> Result<Memory> {
    let m = Memory::of(device);
    let refuse = |what: &str, need: String, have: u64| {
        Err(Error::new(Code::OutOfMemory, format!("{what}: training stops while the host still breathes"))
            .need(need)
            .have(human(have))
            .fix("a smaller preset (--preset full-24g, lora-8g), fewer rows a step, or a higher --memory-limit"))
    };
    if let Some(limit) = limit.filter(|l| m.used(device) > *l) {
        return refuse("--memory-limit", format!("{} at most", human(limit)), m.used(device));
    }
    if m.host_free < RESERVE {
        return refuse("host memory", format!("{} left for others", human(RESERVE)), m.host_free);
    }
    Ok(m)
}

/// What the host keeps for itself.
const RESERVE: u64 = 256 << 20;

/// Peaks start again from what is in use.
pub fn reset_peaks(device: Device) {
    if let Device::Cuda(n) = device {
        // SAFETY: resets counters. Failure leaves older, larger peaks.
        unsafe { q4_device_reset_peaks(n as i8) };
    }
}

/// Waits for everything queued on the device; [`Code::BackendFailed`] when something there failed.
pub fn synchronize(device: Device) -> Result<()> {
    match device {
        // SAFETY: waits.
        Device::Cuda(n) if !unsafe { q4_device_synchronize(n as i8) } => {
            Err(Error::new(Code::BackendFailed, format!("cuda:{n}: a kernel failed")))
        }
        _ => Ok(()),
    }
}

fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}
