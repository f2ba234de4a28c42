//! Lends device memory to the checks of core.
use crate::{Buffer, Gpu, Stream, devices, libraries};
use q4_core::Result;
use q4_core::device::{DeviceBytes, DeviceMemory, DeviceSupport, FoundDevices};
use std::sync::Arc;

q4_core::inventory::submit! {
    DeviceSupport { probe, memory }
}

fn probe() -> Result<FoundDevices> {
    let all = libraries();
    Ok(FoundDevices {
        devices: devices()?,
        driver: all.driver.version().unwrap_or(0),
        nvrtc: all.nvrtc.clone(),
        cublaslt: all.cublaslt.clone(),
    })
}

fn memory(ordinal: u32) -> Result<Arc<dyn DeviceMemory>> {
    let gpu = Gpu::open(ordinal)?;
    let stream = Stream::new(&gpu)?;
    Ok(Arc::new(Memory { gpu, stream }))
}

struct Memory {
    gpu: Arc<Gpu>,
    stream: Stream,
}

impl DeviceMemory for Memory {
    fn alloc(&self, len: usize) -> Result<Box<dyn DeviceBytes>> {
        Ok(Box::new(Buffer::new(&self.gpu, len)?))
    }
    fn stream(&self) -> usize {
        self.stream.raw()
    }
    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
    fn free(&self) -> Result<u64> {
        Ok(self.gpu.memory()?.0)
    }
}

impl DeviceBytes for Buffer {
    fn address(&self) -> u64 {
        self.ptr()
    }
    fn upload(&self, at: usize, data: &[u8]) -> Result<()> {
        Buffer::upload(self, at, data)
    }
    fn download(&self, at: usize, out: &mut [u8]) -> Result<()> {
        Buffer::download(self, at, out)
    }
}
