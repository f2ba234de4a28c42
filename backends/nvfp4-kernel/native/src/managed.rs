//! Memory that host and device share: the entries exist on every device, and on the CPU say that there is none.
use crate::call::{Finding, Outcome, Sink};
use crate::ctx::Context;
use std::{ffi::c_void, ptr};

/// Whether managed memory can be had: never, on the CPU.
pub fn supported(_: &Context, sink: &Sink) -> Outcome {
    Err(sink.report(vec![Finding::limit("device-arch", "a CUDA device with managed memory", "cpu")]))
}

/// The answer of every call that needs it.
pub fn refuse(ctx: &Context) -> Outcome {
    supported(ctx, &Sink(None, ptr::null_mut()))
}

/// Nothing can have been allocated, so only NULL can be freed.
pub fn free(ctx: &Context, p: *mut c_void) -> Outcome {
    if p.is_null() { Ok(()) } else { refuse(ctx) }
}
