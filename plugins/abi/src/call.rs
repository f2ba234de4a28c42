//! What a call gets: operands, scratch, the caller's threads; and what a prepared weight says about itself.
use crate::Q4Str;
use core::ffi::c_void;

/// Host memory. The numbers are those of DLPack.
pub const DEVICE_CPU: u32 = 1;
/// Memory of a CUDA device.
pub const DEVICE_CUDA: u32 = 2;
/// Memory of a device of the backend that is called. Since 1.2.
pub const DEVICE_VENDOR: u32 = 3;

/// A row-major matrix of borrowed elements, aligned for their type.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Matrix {
    /// Bytes of this structure.
    pub struct_size: usize,
    /// First element.
    pub data: *mut c_void,
    /// Bytes that may be read (inputs) or written (outputs) from `data`.
    pub bytes: u64,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
    /// Elements from one row to the next, at least `cols`; those between are never touched.
    pub ld: u64,
    /// [`crate::dtype`].
    pub dtype: u32,
    /// `DEVICE_CPU`, `DEVICE_CUDA` or `DEVICE_VENDOR`.
    pub device_type: u32,
    /// Ordinal; 0 for the CPU.
    pub device_id: u32,
    /// 0.
    pub reserved: u32,
}

/// One numbered task of a call.
pub type Q4TaskFn = unsafe extern "C" fn(arg: *mut c_void, task: usize);

/// Runs `body(arg, 0)` to `body(arg, tasks - 1)`, each once, in any order, on any threads, and returns when
/// all are done. `body` must not unwind.
pub type Q4Parallel = unsafe extern "C" fn(user: *mut c_void, tasks: usize, body: Q4TaskFn, arg: *mut c_void);

/// What a call may use besides its operands.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Exec {
    /// Bytes of this structure.
    pub struct_size: usize,
    /// `cudaStream_t`; NULL is the legacy default stream. Not looked at elsewhere.
    pub stream: *mut c_void,
    /// Scratch, 64-byte aligned on the CPU, 256 on devices.
    pub workspace: *mut c_void,
    /// Bytes at `workspace`.
    pub workspace_bytes: u64,
    /// The caller's threads; NULL: run the tasks on the calling thread. A library starts no thread.
    pub parallel: Option<Q4Parallel>,
    /// First argument of `parallel`.
    pub parallel_user: *mut c_void,
    /// Threads `parallel` has; results do not depend on it.
    pub threads: u32,
    /// `DEVICE_CPU`, `DEVICE_CUDA` or `DEVICE_VENDOR`.
    pub device_type: u32,
    /// Ordinal; 0 for the CPU.
    pub device_id: u32,
    /// 0.
    pub reserved: u32,
}

/// What a prepared weight is: facts the caller compares with what it asked for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4PreparedInfo {
    /// Bytes of this structure as the caller knows it; nothing is written past it.
    pub struct_size: usize,
    /// Out features.
    pub n: u64,
    /// In features.
    pub k: u64,
    /// Bytes it keeps.
    pub resident_bytes: u64,
    /// [`crate::path`] every call of it runs.
    pub path: u32,
    /// [`crate::activations`] every forward call of it uses.
    pub activations: u32,
    /// [`crate::op`] bits this weight really has.
    pub ops: u32,
    /// 0.
    pub reserved: u32,
}

/// What a product does besides multiplying. Since 1.2.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Fusion {
    /// Bytes of this structure.
    pub struct_size: usize,
    /// [`crate::fuse`] bits; others are `UNSUPPORTED`.
    pub parts: u32,
    /// With `NORM`: added to the mean square.
    pub norm_eps: f32,
    /// With `NORM`: f32 `[1, k]` on the device of the call, else NULL.
    pub norm_weight: *const Q4Matrix,
}

/// Bytes that a weight would take. Since 1.2.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Q4Footprint {
    /// Bytes of this structure as the caller knows it.
    pub struct_size: usize,
    /// What it keeps.
    pub resident_bytes: u64,
    /// Scratch of its largest call, of `max_m` rows.
    pub workspace_bytes: u64,
}

/// A device of the backend's own. Since 1.2.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Device {
    /// Bytes of this structure as the caller knows it.
    pub struct_size: usize,
    /// Name for display.
    pub name: Q4Str,
    /// All that results there may depend on: model, driver, firmware.
    pub fingerprint: Q4Str,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Of them, those that are free now.
    pub free_bytes: u64,
}

/// Answer of `workspace` when the number of bytes overflows.
pub const WORKSPACE_OVERFLOW: u64 = u64::MAX;
