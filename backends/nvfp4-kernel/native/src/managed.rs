//! Memory that host and device share: the entries exist on every device, and on the CPU say that there is
//! none.
use crate::call::{Finding, Outcome, Sink};
use crate::cuda;
use crate::handle::Context;
use std::{ffi::c_void, ptr};

/// Whether managed memory can be had.
pub fn supported(c: &Context, sink: &Sink) -> Outcome {
    let have = match c {
        Context::Cpu(_) => "cpu".to_owned(),
        Context::Cuda(e) => match cuda::supported(&e.gpu) {
            Ok(()) => return Ok(()),
            Err(why) => why,
        },
    };
    Err(sink.report(vec![Finding::limit("device-arch", "a CUDA device with managed memory", have)]))
}

/// `bytes` of it.
pub fn alloc(c: &Context, bytes: u64) -> Outcome<*mut c_void> {
    match c {
        Context::Cpu(_) => supported(c, &Sink(None, ptr::null_mut())).map(|()| ptr::null_mut()),
        Context::Cuda(e) => cuda::alloc(e, bytes),
    }
}

/// Frees what `alloc` gave; on the CPU only NULL can be freed.
///
/// # Safety
/// `p` is NULL or came from `alloc` and is not used again.
pub unsafe fn free(c: &Context, p: *mut c_void) -> Outcome {
    match c {
        Context::Cpu(_) if p.is_null() => Ok(()),
        Context::Cpu(_) => supported(c, &Sink(None, ptr::null_mut())),
        // SAFETY: forwarded.
        Context::Cuda(e) => unsafe { cuda::free(e, p) },
    }
}

/// Whether `p` is in managed memory.
pub fn is_managed(c: &Context, p: *const c_void) -> bool {
    matches!(c, Context::Cuda(e) if cuda::is_managed(e, p))
}

/// Moves pages.
pub fn prefetch(c: &Context, p: *const c_void, bytes: u64, device: i32, stream: *mut c_void) -> Outcome {
    match c {
        Context::Cpu(_) => supported(c, &Sink(None, ptr::null_mut())),
        Context::Cuda(e) => cuda::prefetch(e, p, bytes, device, stream),
    }
}
