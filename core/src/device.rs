//! Devices that are not the CPU, and their memory. Core opens no library; whoever can reach a device
//! registers here.
use crate::{Code, CudaDevice, Device, Error, Found, HostEnv, Result};
use std::sync::Arc;

/// How a process reaches devices: `inventory::submit! { DeviceSupport { .. } }`.
pub struct DeviceSupport {
    /// The devices and the libraries of their vendor, or what is missing.
    pub probe: fn() -> Result<FoundDevices>,
    /// The memory of one of them.
    pub memory: fn(u32) -> Result<Arc<dyn DeviceMemory>>,
}
inventory::collect!(DeviceSupport);

/// Devices and what came with them.
pub struct FoundDevices {
    /// The devices, by ordinal.
    pub devices: Vec<CudaDevice>,
    /// Version of their driver, e.g. 13000.
    pub driver: u32,
    /// The run-time compiler.
    pub nvrtc: Found,
    /// The library of dense products.
    pub cublaslt: Found,
}

/// Memory of one device and the queue of work on it.
pub trait DeviceMemory: Send + Sync {
    /// `len` bytes of unspecified content, aligned to 256.
    ///
    /// # Errors
    /// [`Code::OutOfMemory`] where there is not so much, and faults of the device.
    fn alloc(&self, len: usize) -> Result<Box<dyn DeviceBytes>>;
    /// The queue products are issued to.
    fn stream(&self) -> usize;
    /// Waits for all work in the queue.
    ///
    /// # Errors
    /// Faults of any of it.
    fn synchronize(&self) -> Result<()>;
    /// Bytes of it that are free.
    ///
    /// # Errors
    /// Faults of the device.
    fn free(&self) -> Result<u64>;
}

/// Bytes on a device.
///
/// # Errors
/// Copies fail with faults of the device, those of earlier work in its queue included.
pub trait DeviceBytes: Send + Sync {
    /// Address on the device.
    fn address(&self) -> u64;
    /// Copies host bytes to byte `at`; waits.
    fn upload(&self, at: usize, data: &[u8]) -> Result<()>;
    /// Copies bytes from `at` on; waits for the copy only.
    fn download(&self, at: usize, out: &mut [u8]) -> Result<()>;
}

/// The devices this process can reach, or what is missing to reach one.
///
/// # Errors
/// [`Code::DeviceMissing`] in a build without CUDA, and what the driver says.
fn devices() -> Result<FoundDevices> {
    match inventory::iter::<DeviceSupport>.into_iter().next() {
        Some(s) => (s.probe)(),
        None => {
            Err(Error::new(Code::DeviceMissing, "CUDA").need("a build with CUDA support").have("this one"))
        }
    }
}

/// The memory of `device`.
///
/// # Errors
/// [`Code::DeviceMissing`] in a build that cannot reach the device, and what its driver says.
pub fn memory_of(device: Device) -> Result<Arc<dyn DeviceMemory>> {
    match (device, inventory::iter::<DeviceSupport>.into_iter().next()) {
        (Device::Cuda(ordinal), Some(s)) => (s.memory)(ordinal),
        _ => Err(Error::new(Code::DeviceMissing, format!("memory of {device}"))
            .need("a build that can reach the device")
            .have("this one")),
    }
}

impl HostEnv {
    /// Enters the CUDA devices and libraries, or what is missing to reach one. The device that is to be used,
    /// if any, is opened: one that is there but cannot be is a fact too.
    pub fn find_cuda(&mut self, used: Option<u32>) {
        match devices() {
            Ok(found) => {
                if found.devices.is_empty() {
                    self.cuda_missing = Some("a driver without a device".into());
                }
                (self.cuda, self.cuda_driver) = (found.devices, Some(found.driver));
                self.cuda_tools.nvrtc = found.nvrtc;
                self.cuda_tools.cublaslt = found.cublaslt;
                if let Some(ordinal) = used.filter(|n| self.cuda_device(*n).is_some())
                    && let Err(e) = memory_of(Device::Cuda(ordinal))
                {
                    self.cuda_tools.unusable.insert(ordinal, e.to_string());
                }
            }
            Err(e) => {
                let parts = e.parts().filter(|(name, _)| *name == "have").map(|p| p.1.to_owned());
                self.cuda_missing = Some(parts.last().unwrap_or_else(|| e.what().to_owned()));
            }
        }
    }
}
