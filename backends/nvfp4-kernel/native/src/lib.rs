//! libNVFP4: block-scaled 4-bit kernels behind one exported symbol, `nvfp4_get_api`; `include/nvfp4.h` is its
//! documentation. This file is the table and nothing else: convert, call, convert back.
#![allow(non_snake_case)] // the library is called NVFP4
pub mod abi;
mod activations;
mod backward;
mod call;
mod ctx;
mod cuda;
mod forward;
mod handle;
mod isa;
mod kernels;
mod managed;
mod memory;
mod output;
mod prepare;
mod quantize;
mod weight;
#[cfg_attr(not(target_arch = "x86_64"), path = "wide/none.rs")]
mod wide;

use call::{Exec, Fail, Mat, Sink, entry, guarded};
use handle::{Context, Weight};
use std::ffi::c_void;
use std::ptr;

/// The table for `abi_major`, or NULL; `*minor_out` gets the minor.
///
/// # Safety
/// `minor_out` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_get_api(abi_major: u32, minor_out: *mut u32) -> *const abi::Api {
    if abi_major != abi::ABI_MAJOR {
        return ptr::null();
    }
    // A hook that cannot be set costs a message on a bug, nothing else.
    let _ = guarded(call::quiet_panics);
    // SAFETY: by contract.
    if let Some(minor) = unsafe { minor_out.as_mut() } {
        *minor = abi::ABI_MINOR;
    }
    &API.0
}

struct Table(abi::Api);
// SAFETY: the only pointer in it is a static text.
unsafe impl Sync for Table {}

static API: Table = Table(abi::Api {
    struct_size: size_of::<abi::Api>(),
    abi_major: abi::ABI_MAJOR,
    abi_minor: abi::ABI_MINOR,
    version: concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast(),
    ctx_create: Some(ctx_create),
    ctx_destroy: Some(ctx_destroy),
    device_info: Some(device_info),
    can_prepare: Some(can_prepare),
    prepare: Some(prepare_weight),
    release: Some(release),
    weight_bytes: Some(weight_bytes),
    workspace: Some(workspace),
    forward: Some(forward_rows),
    backward_input: Some(backward_input),
    dequantize: Some(dequantize),
    quantize: Some(quantize_rows),
    scaled_mm: Some(scaled_mm),
    managed_supported: Some(managed_supported),
    managed_alloc: Some(managed_alloc),
    managed_free: Some(managed_free),
    managed_is: Some(managed_is),
    managed_prefetch: Some(managed_prefetch),
    empty_cache: Some(empty_cache),
    fuses: Some(fuses),
    forward_fused: Some(forward_fused),
});

/// Defines an entry: the body may fail, panic and use unchecked arguments, whose validity is the header's
/// contract.
macro_rules! entries {
    ($(fn $name:ident($($arg:ident: $t:ty),*) $body:block)*) => { $(
        unsafe extern "C" fn $name($($arg: $t,)* error: *mut abi::Error) -> abi::Status {
            // SAFETY: the caller keeps to the header: pointers are NULL or address what their types and sizes say.
            unsafe { entry(error, || $body) }
        }
    )* };
}

entries! {
    fn ctx_create(desc: *const abi::CtxDesc, out: *mut *mut abi::Ctx, sink: Option<abi::ReasonFn>, user: *mut c_void) {
        let out = output(out)?;
        *out = Box::into_raw(Box::new(Context::open(desc, &Sink(sink, user))?)).cast();
        Ok(())
    }
    fn device_info(c: *mut abi::Ctx, out: *mut abi::DeviceInfo) {
        match Context::of(c)? {
            Context::Cpu(c) => ctx::device_info(c, out),
            Context::Cuda(e) => e.device_info(out),
        }
    }
    fn can_prepare(c: *mut abi::Ctx, desc: *const abi::WeightDesc, sink: Option<abi::ReasonFn>, user: *mut c_void) {
        let c = Context::of(c)?;
        let plan = prepare::Plan::read(desc, |shape| c.refuse_native(shape));
        plan.map(drop).map_err(|all| Sink(sink, user).report(all))
    }
    fn prepare_weight(
        c: *mut abi::Ctx, desc: *const abi::WeightDesc, exec: *const abi::Exec, out: *mut *mut abi::Weight
    ) {
        let (c, out) = (Context::of(c)?, output(out)?);
        let w = c.prepare(prepare::Plan::read(desc, |shape| c.refuse_native(shape))?, &Exec::read(exec)?)?;
        *out = Box::into_raw(Box::new(w)).cast();
        Ok(())
    }
    fn forward_rows(
        w: *const abi::Weight, x: *const abi::Matrix, y: *const abi::Matrix, exec: *const abi::Exec
    ) {
        let w = Weight::of(w)?;
        let (n, k, x_type, y_type) = w.shape();
        let x = Mat::read(x, "x", Some(k), Some(x_type))?;
        let y = Mat::read(y, "y", Some(n), Some(y_type))?;
        w.forward(x, y, &Exec::read(exec)?)
    }
    fn forward_fused(
        w: *const abi::Weight, x: *const abi::Matrix, fusion: *const abi::Fusion, y: *const abi::Matrix,
        exec: *const abi::Exec
    ) {
        Weight::of(w)?.forward_fused(x, fusion, y, &Exec::read(exec)?)
    }
    fn backward_input(
        w: *const abi::Weight, dy: *const abi::Matrix, dx: *const abi::Matrix, exec: *const abi::Exec
    ) {
        let w = Weight::of(w)?;
        let (n, k, x_type, y_type) = w.shape();
        let dy = Mat::read(dy, "dy", Some(n), Some(y_type))?;
        let dx = Mat::read(dx, "dx", Some(k), Some(x_type))?;
        w.backward_input(dy, dx, &Exec::read(exec)?)
    }
    fn dequantize(w: *const abi::Weight, out: *const abi::Matrix, exec: *const abi::Exec) {
        let w = Weight::of(w)?;
        let (n, k, ..) = w.shape();
        let out = Mat::read(out, "out", Some(k), None)?;
        if out.rows != n {
            return Err(Fail::invalid("out", format!("{n} rows"), out.rows));
        }
        w.dequantize(out, &Exec::read(exec)?)
    }
    fn quantize_rows(
        c: *mut abi::Ctx, x: *const abi::Matrix, quantizer: *const abi::Quantizer, out: *mut abi::Quantized,
        exec: *const abi::Exec
    ) {
        quantize::quantize(Context::of(c)?, x, quantizer, out, exec)
    }
    fn scaled_mm(
        c: *mut abi::Ctx, a: *const abi::Segment, b: *const abi::Segment, k: u64, y: *const abi::Matrix,
        exec: *const abi::Exec
    ) {
        quantize::scaled_mm(Context::of(c)?, a, b, k, y, exec)
    }
    fn managed_supported(c: *mut abi::Ctx, sink: Option<abi::ReasonFn>, user: *mut c_void) {
        managed::supported(Context::of(c)?, &Sink(sink, user))
    }
    fn managed_alloc(c: *mut abi::Ctx, bytes: u64, out: *mut *mut c_void) {
        let out = output(out)?;
        *out = managed::alloc(Context::of(c)?, bytes)?;
        Ok(())
    }
    fn managed_free(c: *mut abi::Ctx, p: *mut c_void) {
        managed::free(Context::of(c)?, p)
    }
    fn managed_prefetch(c: *mut abi::Ctx, p: *const c_void, bytes: u64, device: i32, stream: *mut c_void) {
        managed::prefetch(Context::of(c)?, p, bytes, device, stream)
    }
    fn empty_cache(c: *mut abi::Ctx) {
        if let Context::Cuda(e) = Context::of(c)? {
            e.empty_cache();
        }
        Ok(())
    }
}

unsafe extern "C" fn ctx_destroy(c: *mut abi::Ctx) {
    if !c.is_null() {
        // SAFETY: came from `ctx_create` and is not used again, by the header.
        let _ = guarded(|| drop(unsafe { Box::from_raw(c.cast::<Context>()) }));
    }
}

unsafe extern "C" fn release(w: *mut abi::Weight) {
    if !w.is_null() {
        // SAFETY: came from `prepare` and is not used again, by the header.
        let _ = guarded(|| drop(unsafe { Box::from_raw(w.cast::<Weight>()) }));
    }
}

unsafe extern "C" fn weight_bytes(w: *const abi::Weight) -> u64 {
    // SAFETY: by the header.
    unsafe { Weight::of(w) }.map_or(0, Weight::bytes)
}

unsafe extern "C" fn workspace(w: *const abi::Weight, m: u64) -> u64 {
    // SAFETY: by the header.
    unsafe { Weight::of(w) }.map_or(0, |w| w.workspace(m))
}

unsafe extern "C" fn fuses(w: *const abi::Weight, m: u64, parts: u32) -> i32 {
    // SAFETY: by the header.
    unsafe { Weight::of(w) }.map_or(0, |w| i32::from(w.fuses(m, parts)))
}

unsafe extern "C" fn managed_is(c: *mut abi::Ctx, p: *const c_void) -> i32 {
    // SAFETY: by the header.
    let c = unsafe { Context::of(c) };
    guarded(|| c.map_or(0, |c| i32::from(managed::is_managed(c, p)))).unwrap_or(0)
}

/// Where a handle goes; NULL until there is one.
unsafe fn output<'a, T>(out: *mut *mut T) -> call::Outcome<&'a mut *mut T> {
    // SAFETY: NULL or writable, by the header.
    let out = unsafe { out.as_mut() }.ok_or_else(|| Fail::invalid("out", "a pointer", "NULL"))?;
    *out = ptr::null_mut();
    Ok(out)
}
