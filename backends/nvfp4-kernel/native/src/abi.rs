//! The types of `include/nvfp4.h`, field for field: one file for the library and for whoever calls it, so
//! that the two cannot drift apart. A layout test compares it with the compiled header.
#![allow(missing_docs, dead_code)] // the header is the documentation; a caller uses a part of it
use std::ffi::{c_char, c_void};

pub const ABI_MAJOR: u32 = 1;
pub const ABI_MINOR: u32 = 1;

pub type Status = i32;
pub const OK: Status = 0;
pub const E_INVALID: Status = -1;
pub const E_UNSUPPORTED: Status = -2;
pub const E_NOMEM: Status = -3;
pub const E_CUDA: Status = -4;
pub const E_ABI: Status = -5;
pub const E_INTERNAL: Status = -6;

pub const DEVICE_CPU: i32 = 1;
pub const DEVICE_CUDA: i32 = 2;

pub const F32: u32 = 1;
pub const F16: u32 = 2;
pub const BF16: u32 = 3;

pub const PATH_NATIVE: u32 = 1;
pub const PATH_FUSED_DEQUANT: u32 = 2;
pub const PATH_DEQUANT_MATMUL: u32 = 3;

pub const ACT_NATIVE: u32 = 1;
pub const ACT_INT8: u32 = 2;
pub const ACT_NVFP4: u32 = 3;

pub const RULE_TORCHAO: u32 = 1;
pub const RULE_MODELOPT: u32 = 2;
pub const RULE_COMPRESSED_TENSORS: u32 = 3;
pub const RULE_TRANSFORMER_ENGINE: u32 = 4;
pub const RULE_RUNTIME: u32 = 5;

pub const GLOBAL_NONE: u32 = 0;
pub const GLOBAL_STATIC: u32 = 1;
pub const GLOBAL_PER_CALL: u32 = 2;

pub const CONVENTION_NONE: u32 = 0;
pub const CONVENTION_MULTIPLY: u32 = 1;
pub const CONVENTION_DIVIDE: u32 = 2;

pub const SCALE_ROW_MAJOR: u32 = 1;
pub const SCALE_128X4: u32 = 2;

pub const CTX_MANAGED: u32 = 1;

pub const FUSE_NORM: u32 = 1;
pub const FUSE_GATE: u32 = 2;
pub const FUSE_ACCUMULATE: u32 = 4;

/// `nvfp4_ctx`, opaque.
#[repr(C)]
pub struct Ctx {
    _private: [u8; 0],
}

/// `nvfp4_weight`, opaque.
#[repr(C)]
pub struct Weight {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Error {
    pub struct_size: usize,
    pub ptr: *mut c_char,
    pub cap: usize,
    pub len: usize,
    pub native_code: i64,
}

pub type ReasonFn =
    unsafe extern "C" fn(user: *mut c_void, code: *const c_char, need: *const c_char, have: *const c_char);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CtxDesc {
    pub struct_size: usize,
    pub device_type: i32,
    pub device: i32,
    pub flags: u32,
    pub reserved: u32,
    pub isa: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    pub struct_size: usize,
    pub rows: u64,
    pub codes: *const c_void,
    pub codes_bytes: u64,
    pub scales: *const c_void,
    pub scales_bytes: u64,
    pub global_scale: f32,
    pub global_convention: u32,
    pub scale_layout: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WeightDesc {
    pub struct_size: usize,
    pub n: u64,
    pub k: u64,
    pub segments: *const Segment,
    pub n_segments: u64,
    pub path: u32,
    pub activations: u32,
    pub x_dtype: u32,
    pub y_dtype: u32,
    pub act_rule: u32,
    pub act_global_kind: u32,
    pub act_global: f32,
    pub act_global_convention: u32,
    pub max_m: u64,
    pub reserved: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub struct_size: usize,
    pub data: *mut c_void,
    pub bytes: u64,
    pub rows: u64,
    pub cols: u64,
    pub ld: u64,
    pub dtype: u32,
    pub reserved: u32,
}

pub type TaskFn = unsafe extern "C" fn(arg: *mut c_void, task: usize);
pub type ParallelFn = unsafe extern "C" fn(user: *mut c_void, tasks: usize, body: TaskFn, arg: *mut c_void);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Exec {
    pub struct_size: usize,
    pub stream: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
    pub parallel: Option<ParallelFn>,
    pub parallel_user: *mut c_void,
    pub threads: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceInfo {
    pub struct_size: usize,
    pub device_type: i32,
    pub cc_major: i32,
    pub cc_minor: i32,
    pub paths: u32,
    pub activations: u32,
    pub has_native_image: u32,
    pub isa: [c_char; 32],
    pub isa_available: [c_char; 96],
    pub build: [c_char; 64],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Quantizer {
    pub struct_size: usize,
    pub rule: u32,
    pub source_dtype: u32,
    pub global_kind: u32,
    pub global_convention: u32,
    pub global_scale: f32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Quantized {
    pub struct_size: usize,
    pub codes: *mut c_void,
    pub codes_bytes: u64,
    pub scales: *mut c_void,
    pub scales_bytes: u64,
    pub global_scale: f32,
    pub global_convention: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Fusion {
    pub struct_size: usize,
    pub parts: u32,
    pub norm_eps: f32,
    pub norm_weight: *const c_void,
}

type Sink = Option<ReasonFn>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Api {
    pub struct_size: usize,
    pub abi_major: u32,
    pub abi_minor: u32,
    pub version: *const c_char,
    pub ctx_create:
        Option<unsafe extern "C" fn(*const CtxDesc, *mut *mut Ctx, Sink, *mut c_void, *mut Error) -> Status>,
    pub ctx_destroy: Option<unsafe extern "C" fn(*mut Ctx)>,
    pub device_info: Option<unsafe extern "C" fn(*mut Ctx, *mut DeviceInfo, *mut Error) -> Status>,
    pub can_prepare:
        Option<unsafe extern "C" fn(*mut Ctx, *const WeightDesc, Sink, *mut c_void, *mut Error) -> Status>,
    pub prepare: Option<
        unsafe extern "C" fn(
            *mut Ctx,
            *const WeightDesc,
            *const Exec,
            *mut *mut Weight,
            *mut Error,
        ) -> Status,
    >,
    pub release: Option<unsafe extern "C" fn(*mut Weight)>,
    pub weight_bytes: Option<unsafe extern "C" fn(*const Weight) -> u64>,
    pub workspace: Option<unsafe extern "C" fn(*const Weight, u64) -> u64>,
    pub forward: Option<
        unsafe extern "C" fn(*const Weight, *const Matrix, *const Matrix, *const Exec, *mut Error) -> Status,
    >,
    pub backward_input: Option<
        unsafe extern "C" fn(*const Weight, *const Matrix, *const Matrix, *const Exec, *mut Error) -> Status,
    >,
    pub dequantize:
        Option<unsafe extern "C" fn(*const Weight, *const Matrix, *const Exec, *mut Error) -> Status>,
    pub quantize: Option<
        unsafe extern "C" fn(
            *mut Ctx,
            *const Matrix,
            *const Quantizer,
            *mut Quantized,
            *const Exec,
            *mut Error,
        ) -> Status,
    >,
    pub scaled_mm: Option<
        unsafe extern "C" fn(
            *mut Ctx,
            *const Segment,
            *const Segment,
            u64,
            *const Matrix,
            *const Exec,
            *mut Error,
        ) -> Status,
    >,
    pub managed_supported: Option<unsafe extern "C" fn(*mut Ctx, Sink, *mut c_void, *mut Error) -> Status>,
    pub managed_alloc: Option<unsafe extern "C" fn(*mut Ctx, u64, *mut *mut c_void, *mut Error) -> Status>,
    pub managed_free: Option<unsafe extern "C" fn(*mut Ctx, *mut c_void, *mut Error) -> Status>,
    pub managed_is: Option<unsafe extern "C" fn(*mut Ctx, *const c_void) -> i32>,
    pub managed_prefetch:
        Option<unsafe extern "C" fn(*mut Ctx, *const c_void, u64, i32, *mut c_void, *mut Error) -> Status>,
    pub empty_cache: Option<unsafe extern "C" fn(*mut Ctx, *mut Error) -> Status>,
    pub fuses: Option<unsafe extern "C" fn(*const Weight, u64, u32) -> i32>,
    pub forward_fused: Option<
        unsafe extern "C" fn(
            *const Weight,
            *const Matrix,
            *const Fusion,
            *const Matrix,
            *const Exec,
            *mut Error,
        ) -> Status,
    >,
}

/// `nvfp4_get_api`.
pub type GetApiFn = unsafe extern "C" fn(abi_major: u32, minor_out: *mut u32) -> *const Api;
