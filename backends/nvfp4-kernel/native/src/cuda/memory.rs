//! Device memory of weights, plain or managed, and the pinned memory their bytes pass through.
use crate::call::Threads;
use q4_core::memory::UnifiedMemory;
use q4_core::{Code, Error, Result, ThreadPool};
use q4_cuda::driver::{self, CUmemAttach_flags_enum, CUmemLocation, CUmemLocationType_enum};
use q4_cuda::{Buffer, Event, Gpu, Pinned, check};
use std::sync::Arc;

/// Bytes on the device.
pub enum Memory {
    /// Device memory beside other weights.
    Plain(Buffer),
    /// Shared with the host, prefetched to the device.
    Managed(Managed),
}

impl Memory {
    /// `bytes` of unspecified content, shared with the host where that is asked for and there is such memory.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize, unified: UnifiedMemory) -> Result<Self> {
        let is_managed = unified.grant(&gpu.managed())?;
        if is_managed {
            Managed::new(gpu, bytes).map(Self::Managed)
        } else {
            Buffer::lasting(gpu, bytes).map(Self::Plain)
        }
    }
    /// Device address.
    pub fn ptr(&self) -> u64 {
        match self {
            Self::Plain(b) => b.ptr(),
            Self::Managed(m) => m.ptr,
        }
    }
    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Plain(b) => b.len(),
            Self::Managed(m) => m.len,
        }
    }
    /// Copies host bytes to byte `at`; waits.
    pub fn upload(&self, gpu: &Gpu, at: usize, data: &[u8]) -> Result<()> {
        assert!(at + data.len() <= self.len());
        gpu.bind()?;
        // SAFETY: both ranges are valid. A copy from pageable memory has left it when the call returns.
        check(
            unsafe { driver::cuMemcpyHtoD_v2(self.ptr() + at as u64, data.as_ptr().cast(), data.len()) },
            "cuMemcpyHtoD",
        )
    }
}

/// Managed memory that prefers its device.
pub struct Managed {
    gpu: Arc<Gpu>,
    ptr: u64,
    len: usize,
}

/// What is left free of a device: more managed memory than there is device memory can hang the card.
const RESERVE: u64 = 256 << 20;

impl Managed {
    /// `len` bytes, at most what the device has free.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        let free = gpu.memory()?.0.saturating_sub(RESERVE);
        if len as u64 > free {
            return Err(Error::new(Code::OutOfMemory, "managed memory")
                .need(format!("{len} bytes"))
                .have(format!("{free} bytes free on {} beside a reserve", gpu.device())));
        }
        let mut ptr = 0;
        let flags = CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: a context is current (`memory` bound it); the out pointer is valid.
        check(unsafe { driver::cuMemAllocManaged(&mut ptr, len.max(1), flags) }, "cuMemAllocManaged")?;
        let it = Self { gpu: gpu.clone(), ptr, len };
        prefetch(gpu, ptr, len)?;
        Ok(it)
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: allocated by `new`, freed once.
            unsafe { driver::cuMemFree_v2(self.ptr) };
        }
    }
}

/// Moves managed pages to the device.
fn prefetch(gpu: &Gpu, ptr: u64, len: usize) -> Result<()> {
    gpu.bind()?;
    let place =
        CUmemLocation { type_: CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu.handle() };
    // SAFETY: managed memory of ours; the driver checks the range.
    check(
        unsafe { driver::cuMemPrefetchAsync_v2(ptr, len, place, 0, std::ptr::null_mut()) },
        "cuMemPrefetchAsync",
    )
}

/// Bytes of one half of the pinned memory.
const HALF: usize = 16 << 20;

/// Two halves of pinned memory: one is filled by the caller's threads while the other is on its way.
pub struct Staging {
    gpu: Arc<Gpu>,
    halves: [(Pinned, Option<Event>); 2],
    next: usize,
    /// Raw bytes on the device, grown as needed.
    raw: Option<Buffer>,
}

impl Staging {
    /// Empty.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let half = || Ok::<_, Error>((Pinned::new(gpu, HALF)?, None));
        Ok(Self { gpu: gpu.clone(), halves: [half()?, half()?], next: 0, raw: None })
    }

    /// Room for `bytes` raw bytes on the device.
    pub fn raw(&mut self, bytes: usize) -> Result<u64> {
        if self.raw.as_ref().is_none_or(|b| b.len() < bytes) {
            self.raw = None;
            self.raw = Some(Buffer::new(&self.gpu, bytes)?);
        }
        self.raw.as_ref().map(Buffer::ptr).ok_or_else(|| Error::new(Code::Internal, "staging"))
    }

    /// Enqueues a copy of bytes of the host to the device address `to`.
    ///
    /// # Safety
    /// `to` is writable for as many bytes.
    pub unsafe fn copy(&mut self, bytes: &[u8], to: u64, threads: &ThreadPool) -> Result<()> {
        let threads = Threads(threads);
        for (i, piece) in bytes.chunks(HALF).enumerate() {
            let (pinned, busy) = &mut self.halves[self.next];
            self.next = 1 - self.next;
            if let Some(event) = busy.take() {
                event.wait()?;
            }
            let target = Bytes(pinned.as_mut_slice::<u8>().as_mut_ptr());
            threads.each(threads.tasks(piece.len().div_ceil(1 << 18)), piece.len(), |part| {
                let target = &target;
                // SAFETY: tasks copy disjoint parts between different allocations.
                unsafe {
                    piece
                        .as_ptr()
                        .add(part.start)
                        .copy_to_nonoverlapping(target.0.add(part.start), part.len());
                };
            });
            // SAFETY: `to` is writable; the half is left alone until its event.
            unsafe { pinned.send(0, to + (i * HALF) as u64, piece.len(), 0)? };
            *busy = Some(Event::record(&self.gpu, 0)?);
        }
        Ok(())
    }
}

/// Addresses tasks touch disjoint parts of.
struct Bytes(*mut u8);
// SAFETY: as said.
unsafe impl Sync for Bytes {}
