//! The same products on a CUDA device. A weight is packed on the host and lives on the device; a call
//! enqueues one kernel on the stream it is given, and neither waits nor allocates. The caller's current
//! context is current again when a call returns.
//!
//! CUDA is opened at run time: what is missing is a reason in the verdict, and the library loads without it.
use crate::pack::{GROUP, each_block, globals};
use crate::product::check_rows;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUfunction};
use cudarc::nvrtc::result::{self as compiler, NvrtcError};
use cudarc::nvrtc::sys as nvrtc;
use q4_plugin_sdk::q4_core::rows::{check_matrix, check_product};
use q4_plugin_sdk::q4_core::{
    Nvfp4,
    Code, Convention, DType, Device, Error, ExecContext, HostEnv, LinearSpec, PreparedInfo, PreparedWeight,
    ProbeItem, Q4Schema, Q4Weight, Reject, RejectCode, Result, TensorView, TensorViewMut,
};
use std::ffi::{CString, c_void};
use std::ptr::from_mut;
use std::sync::{Mutex, OnceLock, PoisonError};

const SOURCE: &str = include_str!("product.cu");

/// Why products cannot run on device `ordinal`; `env` has the facts about it.
pub fn missing(ordinal: u32, env: &HostEnv) -> Option<Reject> {
    match env.cuda_device(ordinal) {
        None => Some(Reject::new(RejectCode::DeviceAbsent, "a CUDA device", env.no_cuda(ordinal))),
        Some(device) => kernels_for(device.capability).err(),
    }
}

/// What there is of CUDA, for people. A machine without it is no finding.
pub fn probe(env: &HostEnv) -> Vec<ProbeItem> {
    if env.cuda.is_empty() {
        let why = libraries().as_ref().map_or_else(|r| r.have.clone(), |_| "no device was looked for".into());
        return vec![ProbeItem {
            id: "acme.cuda".into(),
            reasons: Vec::new(),
            detail: format!("none: {why}"),
        }];
    }
    let one = |d: &q4_plugin_sdk::q4_core::CudaDevice| ProbeItem {
        id: format!("acme.cuda:{}", d.ordinal).into(),
        reasons: kernels_for(d.capability).err().into_iter().collect(),
        detail: d.arch(),
    };
    env.cuda.iter().map(one).collect()
}

fn kernels_for((major, minor): (u32, u32)) -> Result<(), Reject> {
    let arch = format!("sm_{major}{minor}");
    if major < 8 {
        return Err(Reject::new(RejectCode::DeviceArch, "sm_80 or newer", arch));
    }
    let compiled = libraries().as_ref().map_err(Clone::clone)?;
    if compiled.contains(&((10 * major + minor) as i32)) {
        return Ok(());
    }
    let have = format!("one for {compiled:?}");
    Err(Reject::new(RejectCode::KernelImageMissing, format!("an NVRTC that compiles for {arch}"), have))
}

/// Opens the driver and the compiler, once; the architectures the compiler knows, 90 for sm_90.
fn libraries() -> &'static Result<Vec<i32>, Reject> {
    static FOUND: OnceLock<Result<Vec<i32>, Reject>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let absent = |have: String| Reject::new(RejectCode::DeviceAbsent, "a CUDA driver", have);
        let no_compiler = |have| Reject::new(RejectCode::LibraryMissing, "NVRTC, CUDA's compiler", have);
        // SAFETY: libraries of the vendor are opened; out pointers are valid and the list has the length that
        // was asked for.
        unsafe {
            // Asked first: a call into a library that is not there panics.
            if !sys::is_culib_present() {
                return Err(absent("the loader finds no libcuda.so".into()));
            }
            result::init().map_err(|e| absent(e.to_string()))?;
            if !nvrtc::is_culib_present() {
                return Err(no_compiler("the loader finds no libnvrtc.so".to_owned()));
            }
            let mut count = 0;
            nvrtc::nvrtcGetNumSupportedArchs(&mut count).result().map_err(|e| no_compiler(e.to_string()))?;
            let mut archs = vec![0; count as usize];
            nvrtc::nvrtcGetSupportedArchs(archs.as_mut_ptr())
                .result()
                .map_err(|e| no_compiler(e.to_string()))?;
            Ok(archs)
        }
    })
}

/// A device: the context that all libraries of a process share, and our kernels in it.
pub struct Gpu {
    ordinal: u32,
    context: sys::CUcontext,
    forward_few: CUfunction,
    forward_many: CUfunction,
    backward: CUfunction,
    dequantize: CUfunction,
}

// SAFETY: these handles may be used from any thread in which the context is current.
unsafe impl Send for Gpu {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Device `ordinal`. The first call compiles; what it made stays until the process ends.
    pub fn open(ordinal: u32) -> Result<&'static Self> {
        static OPEN: Mutex<Vec<&'static Gpu>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = open.iter().find(|g| g.ordinal == ordinal) {
            return Ok(gpu);
        }
        let gpu: &'static Self = Box::leak(Box::new(Self::new(ordinal)?));
        open.push(gpu);
        Ok(gpu)
    }

    fn new(ordinal: u32) -> Result<Self> {
        let refused =
            |r: Reject| Error::new(Code::DeviceMissing, format!("cuda:{ordinal}")).need(r.need).have(r.have);
        libraries().as_ref().map_err(|r| refused(r.clone()))?;
        let device = result::device::get(ordinal as i32).map_err(failed("cuDeviceGet"))?;
        // SAFETY: the driver is there; all handles are its own, and the image is whole.
        unsafe {
            let number = |which| result::device::get_attribute(device, which).map_err(failed("attribute"));
            let major = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32;
            let minor = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32;
            kernels_for((major, minor)).map_err(refused)?;
            let image = compile(&format!("--gpu-architecture=sm_{major}{minor}"))?;
            let context = result::primary_ctx::retain(device).map_err(failed("cuDevicePrimaryCtxRetain"))?;
            let _current = Current::push(context)?;
            let module =
                result::module::load_data(image.as_ptr().cast()).map_err(failed("cuModuleLoadData"))?;
            let kernel = |name: &str| {
                let name = CString::new(name).unwrap_or_default();
                result::module::get_function(module, name).map_err(failed("cuModuleGetFunction"))
            };
            Ok(Self {
                ordinal,
                context,
                forward_few: kernel("forward_few")?,
                forward_many: kernel("forward_many")?,
                backward: kernel("backward")?,
                dequantize: kernel("dequantize")?,
            })
        }
    }

    /// Enqueues `kernel` on the stream of a call; blocks have 256 threads and walk what a grid cannot hold.
    ///
    /// # Safety
    /// `args` are the parameters of the kernel, and what they address is there until the stream has run it.
    unsafe fn launch(
        &self,
        kernel: CUfunction,
        (x, y): (usize, usize),
        cx: &ExecContext<'_>,
        args: &mut [*mut c_void],
    ) -> Result<()> {
        let _current = Current::push(self.context)?;
        let (grid, stream) = ((x as u32, y.min(65535) as u32, 1), cx.stream as sys::CUstream);
        // SAFETY: by contract.
        unsafe { result::launch_kernel(kernel, grid, (256, 1, 1), 0, stream, args) }
            .map_err(failed("cuLaunchKernel"))
    }
}

/// Machine code of the kernels; `arch` is an option of NVRTC.
fn compile(arch: &str) -> Result<Vec<u8>> {
    let failed = |e: NvrtcError, log: &str| {
        Error::new(Code::BackendFailed, format!("product.cu with {arch}")).have(format!("{e}: {log}"))
    };
    let source = CString::new(SOURCE).unwrap_or_default();
    let program = compiler::create_program(&source, Some(c"product.cu")).map_err(|e| failed(e, ""))?;
    // SAFETY: the program is alive; the buffer has the size that was asked for.
    unsafe {
        let done = compiler::compile_program(program, &[arch, "--std=c++17"]).map_err(|e| {
            let log = compiler::get_program_log(program).unwrap_or_default();
            failed(e, &String::from_utf8_lossy(&log.iter().map(|c| *c as u8).collect::<Vec<_>>()))
        });
        let image = done.and_then(|()| {
            let mut size = 0;
            nvrtc::nvrtcGetCUBINSize(program, &mut size).result().map_err(|e| failed(e, "size"))?;
            let mut image = vec![0u8; size];
            nvrtc::nvrtcGetCUBIN(program, image.as_mut_ptr().cast())
                .result()
                .map_err(|e| failed(e, "code"))?;
            Ok(image)
        });
        // Nothing is left to do about a program that cannot be destroyed.
        let _ = compiler::destroy_program(program);
        image
    }
}

/// Our context is current on this thread; dropped, the one before is.
struct Current;

impl Current {
    fn push(context: sys::CUcontext) -> Result<Self> {
        // SAFETY: a context that is never released.
        unsafe { sys::cuCtxPushCurrent_v2(context) }.result().map_err(failed("cuCtxPushCurrent"))?;
        Ok(Self)
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut ours = std::ptr::null_mut();
        // SAFETY: pushed by `push` on this thread.
        unsafe { sys::cuCtxPopCurrent_v2(&mut ours) };
    }
}

fn failed(doing: &str) -> impl Fn(DriverError) -> Error {
    move |e| {
        let full = e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let code = if full { Code::OutOfMemory } else { Code::BackendFailed };
        Error::new(code, doing).have(e.to_string())
    }
}

/// `Weight` of `product.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Packed {
    codes: u64,
    scales: u64,
    globals: u64,
    n: u32,
    k: u32,
    pitch: u32,
    divides: u32,
}

/// `Matrix` of `product.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Matrix {
    data: u64,
    ld: u64,
    rows: u32,
    dtype: u32,
}

impl Matrix {
    fn of(view: &TensorView<'_>) -> Result<Self> {
        let (rows, _, ld) = view.as_matrix()?;
        let dtype = match view.dtype() {
            DType::F32 => 1,
            DType::F16 => 2,
            _ => 3,
        };
        Ok(Self { data: view.as_ptr().addr() as u64, ld: ld as u64, rows: rows as u32, dtype })
    }
}

/// A prepared weight, in one block of device memory.
pub struct Weight {
    gpu: &'static Gpu,
    memory: sys::CUdeviceptr,
    packed: Packed,
    info: PreparedInfo,
    x: DType,
    y: DType,
    max_m: usize,
}

impl Weight {
    /// Packs a validated weight for `gpu`; `info` gets the bytes it takes there.
    pub fn new(
        gpu: &'static Gpu,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        mut info: PreparedInfo,
    ) -> Result<Self> {
        // Rows are padded to the 16 bytes a lane loads.
        let (n, k, pitch) = (w.n(), w.k, w.k.next_multiple_of(32));
        let scales_at = n * pitch / 2;
        let globals_at = (scales_at + n * pitch / GROUP).next_multiple_of(4);
        let mut bytes = vec![0u8; globals_at];
        each_block(w, |row, group, codes, scale| {
            bytes[(row * pitch + group * GROUP) / 2..][..GROUP / 2].copy_from_slice(codes);
            bytes[scales_at + row * pitch / GROUP + group] = scale;
        })?;
        for (end, global) in globals(w)? {
            let global = global.map_or(1.0, |g| g.value());
            while bytes.len() < globals_at + 4 * end {
                bytes.extend(global.to_le_bytes());
            }
        }
        let divides = matches!(w.schema, Q4Schema::Nvfp4(Nvfp4 { global: Some(Convention::Divide), .. }));
        info.resident_bytes = bytes.len() as u64;
        let _current = Current::push(gpu.context)?;
        // SAFETY: a context is current.
        let memory = unsafe { result::malloc_sync(bytes.len()) }.map_err(failed("memory of a weight"))?;
        let packed = Packed {
            codes: memory,
            scales: memory + scales_at as u64,
            globals: memory + globals_at as u64,
            n: n as u32,
            k: k as u32,
            pitch: pitch as u32,
            divides: u32::from(divides),
        };
        let weight = Self { gpu, memory, packed, info, x: spec.x, y: spec.y, max_m: spec.max_m };
        // SAFETY: as many bytes as were allocated. The copy may be under way when the first call returns,
        // hence the second.
        unsafe {
            result::memcpy_htod_sync(memory, &bytes).map_err(failed("cuMemcpyHtoD"))?;
            result::stream::synchronize(result::stream::null()).map_err(failed("cuStreamSynchronize"))?;
        }
        Ok(weight)
    }

    /// Operands and call are on the weight's device.
    fn check_place(&self, operands: &[&TensorView<'_>], cx: &ExecContext<'_>) -> Result<()> {
        let ours = Device::Cuda(self.gpu.ordinal);
        match operands.iter().map(|v| v.device()).chain([cx.device]).find(|d| *d != ours) {
            None => Ok(()),
            Some(other) => Err(Error::new(Code::ShapeMismatch, "device of a call")
                .need(ours.to_string())
                .have(other.to_string())),
        }
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        if let Ok(_current) = Current::push(self.gpu.context) {
            // SAFETY: allocated by `new`, freed once; the driver waits for work that uses it. A lost device
            // has nothing to free.
            let _ = unsafe { result::free_sync(self.memory) };
        }
    }
}

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, _: usize) -> usize {
        0 // sums are in registers
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (mut w, y) = (self.packed, y.as_view());
        self.check_place(&[&x, &y], cx)?;
        let m = check_product((&x, self.x, w.k as usize), (&y, self.y, w.n as usize))?;
        check_rows(m, self.max_m)?;
        let (mut x, mut y) = (Matrix::of(&x)?, Matrix::of(&y)?);
        let args = &mut [from_mut(&mut w).cast(), from_mut(&mut x).cast(), from_mut(&mut y).cast()];
        // A block has eight warps, each of one or of four columns.
        let (kernel, rows, columns) =
            if m < 4 { (self.gpu.forward_few, 1, 8) } else { (self.gpu.forward_many, 8, 32) };
        let grid = (self.info.n.div_ceil(columns), m.div_ceil(rows));
        // SAFETY: operands of the shapes and types checked above, good until the caller's stream has run the
        // kernel.
        unsafe { self.gpu.launch(kernel, grid, cx, args) }
    }

    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let (mut w, dx) = (self.packed, dx.as_view());
        self.check_place(&[&dy, &dx], cx)?;
        let m = check_product((&dy, self.y, w.n as usize), (&dx, self.x, w.k as usize))?;
        check_rows(m, self.max_m)?;
        let (mut dy, mut dx) = (Matrix::of(&dy)?, Matrix::of(&dx)?);
        let args = &mut [from_mut(&mut w).cast(), from_mut(&mut dy).cast(), from_mut(&mut dx).cast()];
        // SAFETY: as in `forward`.
        unsafe {
            self.gpu.launch(self.gpu.backward, (self.info.k.div_ceil(8 * 256), m.div_ceil(4)), cx, args)
        }
    }

    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (mut w, out) = (self.packed, out.as_view());
        self.check_place(&[&out], cx)?;
        check_matrix(&out, out.dtype(), w.n as usize, w.k as usize)?;
        let mut out = Matrix::of(&out)?;
        let args = &mut [from_mut(&mut w).cast(), from_mut(&mut out).cast()];
        // SAFETY: as in `forward`.
        unsafe {
            self.gpu.launch(self.gpu.dequantize, (self.info.k.div_ceil(8 * 256), self.info.n), cx, args)
        }
    }
}
