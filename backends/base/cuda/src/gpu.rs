//! A device: its primary context and the facts kernels are chosen by.
use crate::arena::Arena;
use crate::libraries::{attribute, capability, handle};
use crate::{Arch, Found, check, driver, libraries};
use q4_core::memory::ManagedSupport;
use q4_core::{Code, Device, Error, Result};
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// One device's primary context, the one every CUDA library of a process shares.
pub struct Gpu {
    ordinal: u32,
    context: driver::CUcontext,
    handle: driver::CUdevice,
    /// What such devices can do.
    pub arch: Arch,
    /// Multiprocessors.
    pub processors: u32,
    /// Bytes of shared memory a block may ask for.
    pub shared: u32,
    /// Bytes of second-level cache.
    pub l2: u32,
    /// What was launched last: the kernel that a fault found later most likely belongs to.
    last: Mutex<Last>,
    arena: OnceLock<Option<Arena>>,
}

#[derive(Default)]
struct Last {
    kernel: Option<Launched>,
    /// The product enqueued last, for people: its kernel may be another library's.
    product: String,
}

struct Launched {
    name: Arc<str>,
    grid: [u32; 3],
    block: [u32; 3],
}

// SAFETY: a context handle may be used from any thread; every use makes it current first.
unsafe impl Send for Gpu {}
// SAFETY: as above; the rest is plain data behind a lock.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Device `ordinal`. One per device and process; the context lives until the process ends.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        static OPEN: Mutex<Vec<Arc<Gpu>>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(gpu) = open.iter().find(|g| g.ordinal == ordinal) {
            return Ok(gpu.clone());
        }
        let gpu = Arc::new(Self::retain(ordinal)?);
        open.push(gpu.clone());
        Ok(gpu)
    }

    fn retain(ordinal: u32) -> Result<Self> {
        use driver::CUdevice_attribute_enum as A;
        if let Found::No(why) = &libraries().driver {
            return Err(Error::new(Code::DeviceMissing, format!("cuda:{ordinal}"))
                .need("a CUDA driver")
                .have(why.clone()));
        }
        let handle = handle(ordinal as i32).map_err(|e| e.within(format!("cuda:{ordinal}")))?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is initialised; the out pointer is valid.
        check(unsafe { driver::cuDevicePrimaryCtxRetain(&mut context, handle) }, "cuDevicePrimaryCtxRetain")?;
        Ok(Self {
            ordinal,
            context,
            handle,
            arch: Arch::of(capability(handle)?),
            processors: attribute(handle, A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared: attribute(handle, A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2: attribute(handle, A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            last: Mutex::default(),
            arena: OnceLock::new(),
        })
    }

    /// Which device this is.
    pub fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }
    /// Its handle, for calls this crate does not wrap.
    pub fn handle(&self) -> driver::CUdevice {
        self.handle
    }

    /// Makes it current on this thread; cheap, and done by every method that needs it.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context was retained and is never released.
        check(unsafe { driver::cuCtxSetCurrent(self.context) }, "cuCtxSetCurrent")
    }

    /// Where lasting buffers lie; `None` where the driver gives every one a block of its own.
    pub(crate) fn arena(&self) -> Option<&Arena> {
        let new = || Arena::new(self.device(), self.handle, self.memory().ok()?.1);
        self.arena.get_or_init(new).as_ref()
    }

    /// Free and total bytes of device memory.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current; the out pointers are valid.
        check(unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    /// Whether host and device can use memory they share at the same time, which managed weights need.
    pub fn managed(&self) -> ManagedSupport {
        let which = driver::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        match attribute(self.handle, which) {
            Ok(0) => ManagedSupport::No(format!("{} without concurrent managed access", self.device())),
            Ok(_) => ManagedSupport::Yes,
            Err(e) => ManagedSupport::No(e.to_string()),
        }
    }

    /// Waits for everything issued to the device; reports a fault with the kernel launched last.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: a context is current.
        self.blame(check(unsafe { driver::cuCtxSynchronize() }, "cuCtxSynchronize"))
    }

    /// Adds to a failure what was enqueued last.
    pub fn blame(&self, outcome: Result<()>) -> Result<()> {
        outcome.map_err(|e| {
            let last = self.last();
            let mut what = format!("cuda:{}", self.ordinal);
            if !last.product.is_empty() {
                what += &format!(", last product {}", last.product);
            }
            if let Some(Launched { name, grid, block }) = &last.kernel {
                what += &format!(", last kernel `{name}` of {grid:?} blocks of {block:?} threads");
            }
            e.within(what)
        })
    }

    /// A product is about to be enqueued: a fault found later may be its doing.
    pub fn enqueues(&self, product: std::fmt::Arguments<'_>) {
        let mut last = self.last();
        last.product.clear();
        // A String takes everything.
        let _ = last.product.write_fmt(product);
    }

    pub(crate) fn launched(&self, name: &Arc<str>, grid: [u32; 3], block: [u32; 3]) {
        self.last().kernel = Some(Launched { name: name.clone(), grid, block });
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(|e| e.into_inner())
    }
}
