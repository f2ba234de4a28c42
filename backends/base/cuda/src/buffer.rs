//! Device memory that is freed when it is dropped, and views of it.
use crate::{Gpu, check, driver};
use bytemuck::Pod;
use q4_core::{Code, DType, Error, Result, TensorView, TensorViewMut};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of device memory, 256-byte aligned.
pub struct Buffer {
    gpu: Arc<Gpu>,
    ptr: u64,
    len: usize,
    in_arena: bool,
}

/// Free bytes of a device that managed memory leaves alone.
const MANAGED_RESERVE: u64 = 256 << 20;

impl Buffer {
    /// `len` bytes of unspecified content.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        gpu.bind()?;
        let mut ptr = 0;
        // SAFETY: a context is current; the out pointer is valid.
        check(unsafe { driver::cuMemAlloc_v2(&mut ptr, len.max(1)) }, "cuMemAlloc").map_err(|e| {
            let free = gpu.memory().map_or(0, |m| m.0);
            e.need(format!("{len} bytes of device memory ({free} free)"))
        })?;
        Ok(Self { gpu: gpu.clone(), ptr, len, in_arena: false })
    }
    /// As [`new`](Self::new), for what stays: beside others of its kind, without the driver's rounding.
    pub fn lasting(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        let Some(arena) = gpu.arena() else { return Self::new(gpu, len) };
        let ptr = gpu.bind().and_then(|()| arena.take(len));
        let ptr = ptr.map_err(|e| e.within(format!("{len} bytes for weights")))?;
        Ok(Self { gpu: gpu.clone(), ptr, len, in_arena: true })
    }
    /// `len` bytes of zero.
    pub fn zeroed(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        let b = Self::new(gpu, len)?;
        b.fill(0)?;
        Ok(b)
    }
    /// A copy of host elements that stays.
    pub fn lasting_of<T: Pod>(gpu: &Arc<Gpu>, data: &[T]) -> Result<Self> {
        let b = Self::lasting(gpu, size_of_val(data))?;
        b.upload(0, data)?;
        Ok(b)
    }
    /// A copy of host elements that stays, in memory shared with the host whose pages are moved to the
    /// device; never more than the device has free, because more can hang the card.
    pub fn managed_of<T: Pod>(gpu: &Arc<Gpu>, data: &[T]) -> Result<Self> {
        let len = size_of_val(data);
        let free = gpu.memory()?.0.saturating_sub(MANAGED_RESERVE);
        if len as u64 > free {
            return Err(Error::new(Code::OutOfMemory, "managed memory")
                .need(format!("{len} bytes"))
                .have(format!("{free} bytes free on {} beside a reserve", gpu.device())));
        }
        let mut ptr = 0;
        let flags = driver::CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: a context is current (`memory` bound it); the out pointer is valid.
        check(unsafe { driver::cuMemAllocManaged(&mut ptr, len.max(1), flags) }, "cuMemAllocManaged")?;
        let b = Self { gpu: gpu.clone(), ptr, len, in_arena: false };
        b.upload(0, data)?;
        let kind = driver::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;
        let place = driver::CUmemLocation { type_: kind, id: gpu.handle() };
        // SAFETY: the range is ours; moving pages changes no byte of them.
        let status =
            unsafe { driver::cuMemPrefetchAsync_v2(ptr, len.max(1), place, 0, std::ptr::null_mut()) };
        check(status, "cuMemPrefetchAsync")?;
        Ok(b)
    }
    /// A copy of host elements.
    pub fn of<T: Pod>(gpu: &Arc<Gpu>, data: &[T]) -> Result<Self> {
        let b = Self::new(gpu, size_of_val(data))?;
        b.upload(0, data)?;
        Ok(b)
    }

    /// Device address.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }
    /// No byte at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Where it lives.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Sets every byte; waits.
    pub fn fill(&self, byte: u8) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: the range is ours. The call may return before it is done, hence the wait.
        unsafe {
            check(driver::cuMemsetD8_v2(self.ptr, byte, self.len), "cuMemsetD8")?;
            check(driver::cuStreamSynchronize(std::ptr::null_mut()), "cuStreamSynchronize")
        }
    }
    /// Copies host elements to byte `at`; waits.
    pub fn upload<T: Pod>(&self, at: usize, data: &[T]) -> Result<()> {
        self.inside(at, size_of_val(data))?;
        self.gpu.bind()?;
        // SAFETY: both ranges are valid; a copy from pageable memory has left it when the call returns.
        unsafe {
            check(
                driver::cuMemcpyHtoD_v2(self.ptr + at as u64, data.as_ptr().cast(), size_of_val(data)),
                "cuMemcpyHtoD",
            )?;
            check(driver::cuStreamSynchronize(std::ptr::null_mut()), "cuStreamSynchronize")
        }
    }
    /// Copies bytes from `at` into host elements. Work on other streams than the default one must be
    /// complete.
    pub fn download<T: Pod>(&self, at: usize, out: &mut [T]) -> Result<()> {
        self.inside(at, size_of_val(out))?;
        self.gpu.bind()?;
        let bytes = size_of_val(out);
        // SAFETY: both ranges are valid; the call waits.
        let status = unsafe { driver::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), self.ptr + at as u64, bytes) };
        self.gpu.blame(check(status, "cuMemcpyDtoH"))
    }

    fn inside(&self, at: usize, bytes: usize) -> Result<()> {
        match at.checked_add(bytes).filter(|end| *end <= self.len) {
            Some(_) => Ok(()),
            None => Err(Error::new(Code::ShapeMismatch, "copy of device memory")
                .need(format!("bytes {at}..{} inside it", at.saturating_add(bytes)))
                .have(format!("{} bytes", self.len))),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.gpu.bind().is_err() {
            return;
        }
        match self.gpu.arena().filter(|_| self.in_arena) {
            Some(arena) => {
                // An error is that of a kernel, whose stream reports it too.
                let _ = self.gpu.synchronize();
                arena.free(self.ptr, self.len);
            }
            // SAFETY: allocated by `new`, freed once; the driver waits for work that uses it.
            None => drop(unsafe { driver::cuMemFree_v2(self.ptr) }),
        }
    }
}

/// A contiguous view of `shape` from byte `at` of a buffer.
pub fn view<'a>(b: &'a Buffer, at: usize, dtype: DType, shape: &[usize]) -> Result<TensorView<'a>> {
    let (ptr, rest, shape, strides) = place(b, at, shape)?;
    // SAFETY: `rest` bytes from `ptr` belong to the buffer, which the view borrows.
    unsafe { TensorView::from_raw(ptr, rest, b.gpu.device(), dtype, &shape, &strides) }
}

/// As [`view`], writable. A buffer has interior mutability, as device memory does: the caller keeps views of
/// one range apart and in order on one stream.
pub fn view_mut<'a>(b: &'a Buffer, at: usize, dtype: DType, shape: &[usize]) -> Result<TensorViewMut<'a>> {
    let (ptr, rest, shape, strides) = place(b, at, shape)?;
    // SAFETY: as above; device memory is only written by work that the caller orders.
    unsafe { TensorViewMut::from_raw(ptr, rest, b.gpu.device(), dtype, &shape, &strides) }
}

type Placed = (NonNull<c_void>, usize, Vec<i64>, Vec<i64>);

fn place(b: &Buffer, at: usize, shape: &[usize]) -> Result<Placed> {
    b.inside(at, 0)?;
    let ptr = NonNull::new((b.ptr + at as u64) as *mut c_void)
        .ok_or_else(|| Error::new(Code::Internal, "device memory at address 0"))?;
    let dims: Vec<i64> = shape.iter().map(|d| *d as i64).collect();
    let mut strides = vec![1; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i].max(1);
    }
    Ok((ptr, b.len - at, dims, strides))
}

/// Host memory the device copies from and to without a detour, and without the host waiting.
pub struct Pinned {
    gpu: Arc<Gpu>,
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `len` bytes of zero.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        gpu.bind()?;
        let mut ptr = std::ptr::null_mut();
        // SAFETY: a context is current; the out pointer is valid; the bytes are initialised before anyone
        // reads them.
        unsafe {
            check(driver::cuMemHostAlloc(&mut ptr, len.max(1), 0), "cuMemHostAlloc")?;
            std::ptr::write_bytes(ptr.cast::<u8>(), 0, len);
        }
        let ptr = NonNull::new(ptr.cast()).ok_or_else(|| Error::new(Code::OutOfMemory, "cuMemHostAlloc"))?;
        Ok(Self { gpu: gpu.clone(), ptr, len })
    }
    /// Address, for asynchronous copies.
    pub fn ptr(&self) -> *mut c_void {
        self.ptr.as_ptr().cast()
    }
    /// The address kernels write to.
    pub fn on_device(&self) -> Result<u64> {
        self.gpu.bind()?;
        let mut at = 0;
        // SAFETY: allocated by `new`; the out pointer is valid.
        let status = unsafe { driver::cuMemHostGetDevicePointer_v2(&mut at, self.ptr(), 0) };
        check(status, "cuMemHostGetDevicePointer").map(|()| at)
    }
    /// Word `i` of 64 bits, which a kernel may be writing: one that was there.
    pub fn word(&self, i: usize) -> u64 {
        assert!(8 * i + 8 <= self.len);
        // SAFETY: page-aligned, initialised and inside by the line above; the device stores such words whole.
        unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().cast::<u64>().add(i)) }.load(Ordering::Acquire)
    }
    /// The bytes as elements. No copy into them may be under way.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        // SAFETY: page-aligned, initialised, every bit pattern is a value (Pod).
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast(), self.len / size_of::<T>()) }
    }
    /// The same, writable. No copy from or into them may be under way.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        // SAFETY: as above, and unique.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), self.len / size_of::<T>()) }
    }
    /// Enqueues a copy of `bytes` from byte `at` to the device address `to`.
    ///
    /// # Safety
    /// `to` addresses `bytes` bytes of device memory; the bytes here stay as they are until the copy is done.
    pub unsafe fn send(&self, at: usize, to: u64, bytes: usize, stream: usize) -> Result<()> {
        assert!(at + bytes <= self.len);
        self.gpu.bind()?;
        // SAFETY: by contract; inside by the line above.
        check(
            unsafe {
                driver::cuMemcpyHtoDAsync_v2(to, self.ptr().byte_add(at), bytes, stream as driver::CUstream)
            },
            "cuMemcpyHtoDAsync",
        )
    }
    /// Enqueues a copy of `bytes` from the device address `from` to its start.
    ///
    /// # Safety
    /// `from` addresses `bytes` bytes of device memory; nobody reads the bytes here until the copy is done.
    pub unsafe fn receive(&self, from: u64, bytes: usize, stream: usize) -> Result<()> {
        assert!(bytes <= self.len);
        self.gpu.bind()?;
        // SAFETY: by contract.
        check(
            unsafe { driver::cuMemcpyDtoHAsync_v2(self.ptr(), from, bytes, stream as driver::CUstream) },
            "cuMemcpyDtoHAsync",
        )
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: allocated by `new`, freed once.
            unsafe { driver::cuMemFreeHost(self.ptr()) };
        }
    }
}
