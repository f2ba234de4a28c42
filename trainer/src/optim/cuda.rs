//! The same steps on device memory: `kernel.cu`, compiled by NVRTC when first needed, launched on the default
//! stream of the device's primary context, which is where libtorch works.
//!
//! The driver and NVRTC are opened at run time; nothing is linked. Results have the bits of the CPU's, sums
//! of squares aside, which are added in another order, always the same.
use super::layout::{MasterFormat, StateFormat, StateLayout};
use super::maps::{ROOT4, SIGNED4, SIGNED8, UNSIGNED8};
use super::{Hyper, Scalars, ScaleChoice, TILE};
use crate::rng::Philox;
use libloading::Library;
use q4_core::{Code, Error, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

const SOURCE: &str = include_str!("kernel.cu");
const THREADS: u32 = 256;

type Handle = *mut c_void;

/// The libraries, a context made current before every call, and the compiled kernels.
pub struct Launcher {
    driver: Arc<Library>,
    context: Handle,
    functions: Vec<(String, Handle)>,
    /// The code books on the device.
    maps: u64,
}

// SAFETY: handles of the driver may be used from any thread; every call makes the context current first.
unsafe impl Send for Launcher {}
// SAFETY: as above; nothing is changed after construction.
unsafe impl Sync for Launcher {}

#[derive(Clone, Copy)]
#[repr(C)]
struct Sections {
    at: [u64; 6],
    n: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Random {
    key: [u32; 2],
    counter: [u32; 3],
}

impl Launcher {
    /// Compiles for device `ordinal`. [`Code::DeviceMissing`] when there is no driver, no NVRTC or no such
    /// device.
    pub fn new(ordinal: usize) -> Result<Self> {
        let driver = Arc::new(open(&["libcuda.so.1", "nvcuda.dll"], "the CUDA driver")?);
        let mut this = Self { driver, context: null_mut(), functions: Vec::new(), maps: 0 };
        let (mut device, mut major, mut minor) = (0 as c_int, 0 as c_int, 0 as c_int);
        // SAFETY: the signatures are those of the driver; every pointer is to a live local.
        unsafe {
            this.call::<unsafe extern "C" fn(u32) -> c_int>(c"cuInit", |f| f(0))?;
            this.call::<unsafe extern "C" fn(*mut c_int, c_int) -> c_int>(c"cuDeviceGet", |f| {
                f(&mut device, ordinal as c_int)
            })?;
            for (attribute, value) in [(75, &mut major), (76, &mut minor)] {
                this.call::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>(
                    c"cuDeviceGetAttribute",
                    |f| f(value, attribute, device),
                )?;
            }
            let mut context: Handle = null_mut();
            this.call::<unsafe extern "C" fn(*mut Handle, c_int) -> c_int>(
                c"cuDevicePrimaryCtxRetain",
                |f| f(&mut context, device),
            )?;
            this.context = context;
        }
        let image = compile(&format!("--gpu-architecture=sm_{major}{minor}"))?;
        this.current()?;
        let mut module: Handle = null_mut();
        // SAFETY: the image is a complete cubin and outlives the call.
        unsafe {
            this.call::<unsafe extern "C" fn(*mut Handle, *const c_void) -> c_int>(
                c"cuModuleLoadData",
                |f| f(&mut module, image.as_ptr().cast()),
            )?;
        }
        for name in names() {
            let mut function: Handle = null_mut();
            let symbol = CString::new(name.as_str()).unwrap_or_default();
            // SAFETY: module and name are valid.
            unsafe {
                this.call::<unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int>(
                    c"cuModuleGetFunction",
                    |f| f(&mut function, module, symbol.as_ptr()),
                )?;
            }
            this.functions.push((name, function));
        }
        let books = [&SIGNED8.values, &SIGNED8.bounds, &UNSIGNED8.values, &UNSIGNED8.bounds];
        let mut floats: Vec<f32> = books.into_iter().flatten().copied().collect();
        floats.extend(SIGNED4.iter().chain(ROOT4.iter()));
        this.maps = this.allocate(4 * floats.len())?;
        this.upload(this.maps, bytemuck::cast_slice(&floats))?;
        Ok(this)
    }

    /// As [`super::adamw`], on device pointers aligned to 16 bytes; returns before it has run.
    ///
    /// # Safety
    /// `master` and `grad` must have `layout.len()` elements of their types and `state` `layout.bytes()`
    /// bytes, in memory of this device that nothing else uses before the default stream gets there.
    pub unsafe fn adamw(
        &self,
        hyper: &Hyper,
        layout: &StateLayout,
        (mut master, master_format): (u64, MasterFormat),
        (mut grad, grad_format): (u64, MasterFormat),
        mut state: u64,
        rng: Philox,
    ) -> Result<()> {
        aligned(&[master, grad, state])?;
        let mut scalars: Scalars = hyper.scalars()?;
        let mut sections =
            Sections { at: layout.sections().map(|range| range.start as u64), n: layout.len() as u64 };
        let (key, counter) = rng.parts();
        let mut random = Random { key, counter };
        let mut maps = self.maps;
        let name = adamw_name(layout.format(), master_format, grad_format);
        let mut arguments = [
            pointer(&mut scalars),
            pointer(&mut sections),
            pointer(&mut maps),
            pointer(&mut master),
            pointer(&mut grad),
            pointer(&mut state),
            pointer(&mut random),
        ];
        // SAFETY: the arguments are those of the kernel; the caller vouches for the memory.
        unsafe { self.launch(&name, layout.len().div_ceil(TILE), &mut arguments) }
    }

    /// As [`super::quantize_dequantize`] for `n` elements whose rows are multiples of 16, from and to f32 or
    /// bf16; a free scale rounds to bf16 once more. `info` receives two words: bits of the largest
    /// magnitude and the per-tensor scale. Where an element is not finite, all values and the scale are
    /// NaN.
    ///
    /// # Safety
    /// As [`Launcher::adamw`]; `info` has 8 bytes.
    pub unsafe fn quantize_dequantize(
        &self,
        (mut w, from): (u64, MasterFormat),
        n: usize,
        choice: ScaleChoice,
        (mut out, to): (u64, MasterFormat),
        mut info: u64,
    ) -> Result<()> {
        aligned(&[w, out])?;
        if n % 16 != 0 {
            return Err(Error::new(Code::ShapeMismatch, "weight to quantise")
                .need("a multiple of 16")
                .have(n.to_string()));
        }
        self.current()?;
        // SAFETY: the caller vouches for `info`.
        unsafe {
            self.call::<unsafe extern "C" fn(u64, u32, usize, Handle) -> c_int>(c"cuMemsetD32Async", |f| {
                f(info, 0, 2, null_mut())
            })?;
        }
        let (mut count, mut power) = (n as u64, u32::from(choice == ScaleChoice::PowerOfTwo));
        let tiles = n.div_ceil(TILE);
        let mut arguments = [pointer(&mut w), pointer(&mut count), pointer(&mut info)];
        // SAFETY: as in `adamw`.
        unsafe { self.launch(&format!("amax_{}", from.as_str()), tiles.min(1024), &mut arguments)? };
        let mut arguments = [
            pointer(&mut w),
            pointer(&mut count),
            pointer(&mut power),
            pointer(&mut info),
            pointer(&mut out),
        ];
        // SAFETY: as in `adamw`.
        unsafe { self.launch(&format!("value_{}_{}", from.as_str(), to.as_str()), tiles, &mut arguments) }
    }

    /// Writes the sum of the squares of `n` elements to the f64 at `out`. `scratch` has 8 bytes for each 4096
    /// elements.
    ///
    /// # Safety
    /// As [`Launcher::adamw`].
    pub unsafe fn sum_of_squares(
        &self,
        (mut grad, format): (u64, MasterFormat),
        n: usize,
        mut scratch: u64,
        mut out: u64,
    ) -> Result<()> {
        aligned(&[grad])?;
        let (mut count, mut tiles) = (n as u64, n.div_ceil(TILE) as u64);
        let mut arguments = [pointer(&mut grad), pointer(&mut count), pointer(&mut scratch)];
        // SAFETY: as in `adamw`.
        unsafe { self.launch(&format!("squares_{}", format.as_str()), tiles as usize, &mut arguments)? };
        let mut arguments = [pointer(&mut scratch), pointer(&mut tiles), pointer(&mut out)];
        // SAFETY: as in `adamw`.
        unsafe { self.launch("total", 1, &mut arguments) }
    }

    /// Device memory, for callers without an allocator of their own.
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        self.current()?;
        let mut at = 0u64;
        // SAFETY: `at` is a live local.
        unsafe {
            self.call::<unsafe extern "C" fn(*mut u64, usize) -> c_int>(c"cuMemAlloc_v2", |f| {
                f(&mut at, bytes.max(1))
            })?
        };
        Ok(at)
    }

    /// Gives memory of [`Launcher::allocate`] back.
    pub fn free(&self, at: u64) -> Result<()> {
        self.current()?;
        // SAFETY: the driver refuses what it did not allocate.
        unsafe { self.call::<unsafe extern "C" fn(u64) -> c_int>(c"cuMemFree_v2", |f| f(at)) }
    }

    /// Copies to memory of [`Launcher::allocate`].
    pub fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.current()?;
        // SAFETY: the driver refuses ranges outside of what it allocated.
        unsafe {
            self.call::<unsafe extern "C" fn(u64, *const c_void, usize) -> c_int>(c"cuMemcpyHtoD_v2", |f| {
                f(to, bytes.as_ptr().cast(), bytes.len())
            })
        }
    }

    /// Waits for the default stream and copies from device memory.
    pub fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.current()?;
        // SAFETY: as `upload`.
        unsafe {
            self.call::<unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int>(c"cuMemcpyDtoH_v2", |f| {
                f(bytes.as_mut_ptr().cast(), from, bytes.len())
            })
        }
    }

    /// Waits until everything launched has run.
    pub fn synchronize(&self) -> Result<()> {
        self.current()?;
        // SAFETY: no arguments.
        unsafe { self.call::<unsafe extern "C" fn() -> c_int>(c"cuCtxSynchronize", |f| f()) }
    }

    fn current(&self) -> Result<()> {
        // SAFETY: the context was retained and is never released.
        unsafe { self.call::<unsafe extern "C" fn(Handle) -> c_int>(c"cuCtxSetCurrent", |f| f(self.context)) }
    }

    /// # Safety
    /// `arguments` must fit the kernel.
    unsafe fn launch(&self, name: &str, blocks: usize, arguments: &mut [*mut c_void]) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let function = self.functions.iter().find(|(n, _)| n == name).map(|(_, f)| *f);
        let function = function.ok_or_else(|| Error::new(Code::Internal, format!("no kernel {name}")))?;
        self.current()?;
        type Launch = unsafe extern "C" fn(
            Handle,
            u32,
            u32,
            u32,
            u32,
            u32,
            u32,
            u32,
            Handle,
            *mut *mut c_void,
            *mut *mut c_void,
        ) -> c_int;
        // SAFETY: the caller vouches for the arguments; stream zero is the default one.
        unsafe {
            self.call::<Launch>(c"cuLaunchKernel", |f| {
                f(
                    function,
                    blocks as u32,
                    1,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    null_mut(),
                    arguments.as_mut_ptr(),
                    null_mut(),
                )
            })
        }
        .map_err(|e| e.within(name))
    }

    /// Calls a function of the driver and turns its status into an error.
    ///
    /// # Safety
    /// `F` must be the function's type.
    unsafe fn call<F: Copy>(&self, name: &CStr, run: impl FnOnce(F) -> c_int) -> Result<()> {
        // SAFETY: the caller vouches for the type.
        let function = unsafe { self.driver.get::<F>(name.to_bytes_with_nul()) };
        let failed = |have: String| {
            let code = if name == c"cuMemAlloc_v2" { Code::OutOfMemory } else { Code::DeviceMissing };
            Error::new(code, format!("CUDA: {}", name.to_string_lossy())).have(have)
        };
        let function = *function.map_err(|e| failed(e.to_string()))?;
        match run(function) {
            0 => Ok(()),
            status => Err(failed(format!("error {status}"))),
        }
    }
}

fn adamw_name(state: StateFormat, master: MasterFormat, grad: MasterFormat) -> String {
    format!("adamw_{}_{}_{}", state.as_str(), master.as_str(), grad.as_str())
}

/// Every kernel of the source.
fn names() -> Vec<String> {
    let floats = [MasterFormat::F32, MasterFormat::Bf16];
    let pairs = || floats.into_iter().flat_map(|a| floats.map(|b| (a, b)));
    let mut names: Vec<String> =
        StateFormat::ALL.into_iter().flat_map(|s| pairs().map(move |(a, b)| adamw_name(s, a, b))).collect();
    names.extend(pairs().map(|(a, b)| format!("value_{}_{}", a.as_str(), b.as_str())));
    names.extend(
        floats.iter().flat_map(|f| [format!("amax_{}", f.as_str()), format!("squares_{}", f.as_str())]),
    );
    names.push("total".into());
    names
}

fn pointer<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

fn aligned(pointers: &[u64]) -> Result<()> {
    match pointers.iter().find(|p| *p % 16 != 0) {
        None => Ok(()),
        Some(p) => Err(Error::new(Code::ShapeMismatch, "device pointer")
            .need("alignment to 16 bytes")
            .have(format!("{p:#x}"))),
    }
}

fn open(names: &[&str], what: &str) -> Result<Library> {
    let mut why = String::new();
    for name in names {
        // SAFETY: NVIDIA's libraries have no initialisers that break Rust's rules.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(library),
            Err(e) => why = e.to_string(),
        }
    }
    Err(Error::new(Code::DeviceMissing, format!("{what} cannot be opened"))
        .need(names.join(" or "))
        .have(why))
}

/// Compiles the source to a cubin. Contraction is off: every rounding is written out.
fn compile(architecture: &str) -> Result<Vec<u8>> {
    let nvrtc = open(&["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "nvrtc64_130_0.dll"], "NVRTC")?;
    let source = CString::new(SOURCE).map_err(|e| Error::new(Code::Internal, e.to_string()))?;
    let options: Vec<CString> =
        [architecture, "--fmad=false"].iter().filter_map(|o| CString::new(*o).ok()).collect();
    let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    type Create = unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int;
    type Compile = unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int;
    type Size = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
    type Get = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;
    let failed = |what: &str, have: String| Error::new(Code::Internal, format!("NVRTC: {what}")).have(have);
    let missing = |e: libloading::Error| failed("a function is missing", e.to_string());
    let mut program: Handle = null_mut();
    // SAFETY: signatures are those of NVRTC; buffers have the sizes it asked for; the program is used by this
    // thread only.
    unsafe {
        let get = |program: Handle, size: &[u8], text: &[u8]| -> Result<Vec<u8>> {
            let (size, text) =
                (nvrtc.get::<Size>(size).map_err(missing)?, nvrtc.get::<Get>(text).map_err(missing)?);
            let mut n = 0usize;
            let status = size(program, &mut n);
            let mut bytes = vec![0u8; n];
            match (status, text(program, bytes.as_mut_ptr().cast())) {
                (0, 0) => Ok(bytes),
                status => Err(failed("no result", format!("errors {status:?}"))),
            }
        };
        let status = nvrtc.get::<Create>(b"nvrtcCreateProgram\0").map_err(missing)?(
            &mut program,
            source.as_ptr(),
            c"optimizer.cu".as_ptr(),
            0,
            null_mut(),
            null_mut(),
        );
        if status != 0 {
            return Err(failed("no program", format!("error {status}")));
        }
        let status = nvrtc.get::<Compile>(b"nvrtcCompileProgram\0").map_err(missing)?(
            program,
            options.len() as c_int,
            options.as_ptr(),
        );
        if status != 0 {
            let log = get(program, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?;
            return Err(failed("the kernels do not compile", String::from_utf8_lossy(&log).into_owned()));
        }
        get(program, b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0")
    }
}
