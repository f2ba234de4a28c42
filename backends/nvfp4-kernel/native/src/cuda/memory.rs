//! Device memory of weights, plain or managed, and the pinned memory their bytes pass through.
use crate::call::Exec;
use q4_core::{Code, Error, Result};
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
    /// `bytes` of unspecified content.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize, is_managed: bool) -> Result<Self> {
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
        prefetch(gpu, ptr, len, true, 0)?;
        Ok(it)
    }
    /// Gives the address up; the caller frees it.
    pub fn into_raw(self) -> u64 {
        let ptr = self.ptr;
        std::mem::forget(self);
        ptr
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

/// Moves managed pages to the device or to the host.
pub fn prefetch(gpu: &Gpu, ptr: u64, len: usize, to_device: bool, stream: usize) -> Result<()> {
    gpu.bind()?;
    let kind = if to_device {
        CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE
    } else {
        CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_HOST
    };
    let place = CUmemLocation { type_: kind, id: if to_device { gpu.handle() } else { 0 } };
    // SAFETY: managed memory of the caller; the driver checks the range.
    check(
        unsafe { driver::cuMemPrefetchAsync_v2(ptr, len, place, 0, stream as driver::CUstream) },
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

    /// Enqueues a copy of `len` bytes at `from`, in host or device memory, to the device address `to`.
    ///
    /// # Safety
    /// `from` is readable, `to` writable, for `len` bytes.
    pub unsafe fn copy(&mut self, from: *const u8, len: usize, to: u64, exec: &Exec) -> Result<()> {
        if is_on_device(&self.gpu, from) {
            // SAFETY: by contract.
            return check(
                unsafe { driver::cuMemcpyDtoDAsync_v2(to, from.addr() as u64, len, std::ptr::null_mut()) },
                "cuMemcpyDtoD",
            );
        }
        for at in (0..len).step_by(HALF) {
            let bytes = HALF.min(len - at);
            let (pinned, busy) = &mut self.halves[self.next];
            self.next = 1 - self.next;
            if let Some(event) = busy.take() {
                event.wait()?;
            }
            let target = Bytes(pinned.as_mut_slice::<u8>().as_mut_ptr());
            // SAFETY: inside, by contract.
            let source = Bytes(unsafe { from.add(at) }.cast_mut());
            let tasks = exec.tasks(bytes.div_ceil(1 << 18));
            exec.run(tasks, |t| {
                let part = crate::call::part(bytes, tasks, t);
                let (source, target) = (&source, &target);
                // SAFETY: tasks copy disjoint parts between different allocations.
                unsafe {
                    source.0.add(part.start).copy_to_nonoverlapping(target.0.add(part.start), part.len())
                };
            })
            .map_err(|f| Error::new(Code::Internal, f.text))?;
            // SAFETY: `to` is writable; the half is left alone until its event.
            unsafe { pinned.send(0, to + at as u64, bytes, 0)? };
            *busy = Some(Event::record(&self.gpu, 0)?);
        }
        Ok(())
    }
}

/// Addresses tasks touch disjoint parts of.
struct Bytes(*mut u8);
// SAFETY: as said.
unsafe impl Sync for Bytes {}

/// Whether the driver knows `p` as memory of a device.
fn is_on_device(gpu: &Gpu, p: *const u8) -> bool {
    use driver::{CUmemorytype_enum, CUpointer_attribute_enum as A};
    pointer_attribute(gpu, p.addr() as u64, A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        == CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as u32
}

/// A 32-bit fact about an address; 0 for one that is not CUDA's.
pub(super) fn pointer_attribute(gpu: &Gpu, address: u64, mut which: driver::CUpointer_attribute) -> u32 {
    let mut value = 0u32;
    if gpu.bind().is_err() {
        return 0;
    }
    let mut to = (&raw mut value).cast();
    // SAFETY: one attribute of four bytes; any address may be asked for, and foreign ones are no error of
    // this call.
    let status = unsafe { driver::cuPointerGetAttributes(1, &mut which, &mut to, address) };
    if status == driver::CUresult::CUDA_SUCCESS { value } else { 0 }
}
