//! Machine code on a device, and launching it.
use crate::cache::{Cache, Key};
use crate::compile;
use crate::{Gpu, Mirror, Source, addresses, check, driver};
use q4_core::{Code, Error, Result};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, Weak};

/// The functions of one source, loaded on one device.
#[derive(Clone)]
pub struct Kernels(Arc<Module>);

struct Module {
    gpu: Arc<Gpu>,
    source: Source,
    raw: driver::CUmodule,
}

// SAFETY: module handles may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; loading and unloading happen once.
unsafe impl Sync for Module {}

impl Kernels {
    /// The machine code of `source` for `gpu`: from the cache on disk, else compiled now, else a prebuilt
    /// image. `options` go to the compiler, e.g. `-DQ4_X=1`, and are part of the image's identity. One
    /// image is on the device once, however often it is loaded; different ones compile side by side.
    pub fn load(gpu: &Arc<Gpu>, source: &Source, options: &[&str]) -> Result<Self> {
        let place = loaded(gpu, source, options);
        let mut place = place.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(module) = place.upgrade() {
            return Ok(Self(module));
        }
        let cache = Cache::of_user();
        let image = compile::image(source, &gpu.arch, options, &cache)?;
        let kernels = match Self::of_image(gpu, source, &image.bytes) {
            // What is on disk may be damaged: compile it again, once.
            Err(_) if image.from_cache => {
                cache.forget(&image);
                let image = compile::image(source, &gpu.arch, options, &cache)?;
                Self::of_image(gpu, source, &image.bytes)?
            }
            other => other?,
        };
        *place = Arc::downgrade(&kernels.0);
        Ok(kernels)
    }

    /// Whether [`load`](Self::load) would find the image or could make it; compiles nothing.
    pub fn available(gpu: &Gpu, source: &Source, options: &[&str]) -> Result<()> {
        compile::available(source, &gpu.arch, options, &Cache::of_user())
    }

    fn of_image(gpu: &Arc<Gpu>, source: &Source, image: &[u8]) -> Result<Self> {
        gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a cubin states its own size; the driver checks what it reads and keeps nothing of ours.
        let status = unsafe { driver::cuModuleLoadData(&mut raw, image.as_ptr().cast()) };
        check(status, &format!("loading kernels `{}` for {}", source.name, gpu.arch.target()))?;
        Ok(Self(Arc::new(Module { gpu: gpu.clone(), source: *source, raw })))
    }

    /// The device they are loaded on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.0.gpu
    }

    /// The function `name` (`extern "C" __global__` in the source).
    ///
    /// # Errors
    /// Unless it takes what `A` says: [`Source::takes`]; what the driver says.
    pub fn get<A: Mirror>(&self, name: &str) -> Result<Kernel<A>> {
        self.0.source.takes::<A>(name)?;
        self.0.gpu.bind()?;
        let text =
            CString::new(name).map_err(|_| Error::new(Code::Internal, "a kernel's name with a NUL in it"))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name is NUL-terminated; the out pointer is valid.
        let status = unsafe { driver::cuModuleGetFunction(&mut raw, self.0.raw, text.as_ptr()) };
        check(status, &format!("kernel `{name}` of `{}`", self.0.source.name))?;
        let kernel = Kernel { module: self.0.clone(), raw, name: name.into(), takes: PhantomData };
        // One division of the on-chip memory for all: a processor must drain before it changes it, and
        // kernels that overlap would wait for that.
        kernel.carve(100)?;
        Ok(kernel)
    }

    /// The same with up to `shared` bytes of dynamic shared memory.
    pub fn get_with<A: Mirror>(&self, name: &str, shared: u32) -> Result<Kernel<A>> {
        let kernel = self.get(name)?;
        kernel.allow_shared(shared).map(|()| kernel)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: loaded once, unloaded once; kernels of it keep it alive.
            unsafe { driver::cuModuleUnload(self.raw) };
        }
    }
}

/// Where the module of an image is kept while someone has it; its lock is held while it is made.
fn loaded(gpu: &Gpu, source: &Source, options: &[&str]) -> Arc<Mutex<Weak<Module>>> {
    static ALL: Mutex<BTreeMap<String, Arc<Mutex<Weak<Module>>>>> = Mutex::new(BTreeMap::new());
    let name = format!("{} {}", gpu.device(), Key::new(source, &gpu.arch, options).prefix());
    ALL.lock().unwrap_or_else(|e| e.into_inner()).entry(name).or_default().clone()
}

/// One function on a device, which takes the fields of `A`.
#[derive(Clone)]
pub struct Kernel<A> {
    module: Arc<Module>,
    raw: driver::CUfunction,
    name: Arc<str>,
    takes: PhantomData<fn(A)>,
}

// SAFETY: function handles may be used from any thread.
unsafe impl<A> Send for Kernel<A> {}
// SAFETY: as above.
unsafe impl<A> Sync for Kernel<A> {}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory; above 48 KiB from [`Kernels::get_with`].
    pub shared: u32,
    /// The queue; 0 is the default one.
    pub stream: usize,
    /// The kernel may start while the one before it in the stream drains: it executes `griddepcontrol.wait`
    /// before it touches anything the one before writes or reads. Without effect where the device has
    /// no clusters.
    pub overlap: bool,
}

impl Launch {
    /// Blocks of `block` threads, once everything before them in `stream` is done.
    pub fn new(grid: [usize; 3], block: [u32; 3], stream: usize) -> Self {
        Self { grid: grid.map(|n| n as u32), block, shared: 0, stream, overlap: false }
    }

    /// Blocks of `threads` threads and `shared` bytes, which may start while the kernel before them drains.
    pub fn overlapping(grid: [usize; 3], threads: u32, shared: u32, stream: usize) -> Self {
        Self { shared, overlap: true, ..Self::new(grid, [threads, 1, 1], stream) }
    }
}

impl<A: Mirror> Kernel<A> {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets the driver divide the on-chip memory, whose larger part may then be cache: for kernels that
    /// stream, and beside which no others run. Once, when the kernel is prepared.
    ///
    /// # Errors
    /// What the driver says.
    pub fn prefer_cache(&self) -> Result<()> {
        self.module.gpu.bind()?;
        self.carve(-1)
    }

    /// `percent` of the on-chip memory as shared memory, -1: the driver's choice. Its context is current.
    fn carve(&self, percent: i32) -> Result<()> {
        let which = driver::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function is alive.
        let status = unsafe { driver::cuFuncSetAttribute(self.raw, which, percent) };
        check(status, &format!("on-chip memory of kernel `{}`", self.name))
    }

    /// Raises the limit on dynamic shared memory.
    fn allow_shared(&self, bytes: u32) -> Result<()> {
        use driver::CUfunction_attribute_enum as A;
        self.module.gpu.bind()?;
        let which = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is alive.
        let status = unsafe { driver::cuFuncSetAttribute(self.raw, which, bytes as i32) };
        check(status, &format!("{bytes} bytes of shared memory for kernel `{}`", self.name))
    }

    /// Enqueues it. A fault of the kernel surfaces when its stream is waited for.
    ///
    /// # Safety
    /// What `args` address is valid on the device until the work is done, and large enough for this launch.
    pub unsafe fn launch(&self, how: Launch, args: A) -> Result<()> {
        use driver::CUlaunchAttributeID_enum as Id;
        self.module.gpu.bind()?;
        let mut attribute = driver::CUlaunchAttribute {
            id: Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: driver::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let overlap = how.overlap && self.module.gpu.arch.clusters;
        let config = driver::CUlaunchConfig {
            gridDimX: how.grid[0],
            gridDimY: how.grid[1],
            gridDimZ: how.grid[2],
            blockDimX: how.block[0],
            blockDimY: how.block[1],
            blockDimZ: how.block[2],
            sharedMemBytes: how.shared,
            hStream: how.stream as driver::CUstream,
            attrs: &raw mut attribute,
            numAttrs: u32::from(overlap),
        };
        self.module.gpu.launched(&self.name, how.grid, how.block);
        let mut at = addresses(&args);
        // SAFETY: by contract; the configuration and the arguments outlive the call, and are as many and as
        // large as the kernel's parameters.
        let status =
            unsafe { driver::cuLaunchKernelEx(&config, self.raw, at.as_mut_ptr(), std::ptr::null_mut()) };
        if status == driver::CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        check(status, &format!("launching kernel `{}`: {how:?}", self.name))
    }
}
