//! The entries of the table: each translates its arguments, calls, and translates what comes back. No panic
//! leaves a library: it becomes a status and a text, and whoever it came from is never used again.
use super::{Instance, Weight, tell};
use crate::threads::{self, POOL};
use crate::{borrow, codes, lend, message};
use q4_core::{Code, Error, ExecContext, FuseSet, Q4Weight, Result, TensorView, TensorViewMut};
use q4_plugin_abi::{
    self as abi, Q4Backend, Q4Device, Q4Env, Q4Error, Q4Exec, Q4Footprint, Q4Fusion, Q4LinearSpec, Q4Matrix,
    Q4Prepared, Q4PreparedInfo, Q4ProbeSink, Q4RejectSink, Q4Status, Q4Str, Q4Weight as RawWeight, status,
};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) unsafe extern "C" fn destroy(b: *mut Q4Backend) {
    // SAFETY: made by `create`, destroyed once.
    let instance = unsafe { Box::from_raw(b.cast::<Instance>()) };
    quietly(&AtomicBool::default(), || drop(instance));
}

pub(super) unsafe extern "C" fn release(p: *mut Q4Prepared) {
    // SAFETY: made by `prepare`, released once.
    let weight = unsafe { Box::from_raw(p.cast::<Weight>()) };
    quietly(&AtomicBool::default(), || drop(weight));
}

pub(super) unsafe extern "C" fn can_prepare(
    b: *const Q4Backend,
    spec: *const Q4LinearSpec,
    env: *const Q4Env,
    sink: Q4RejectSink,
    user: *mut c_void,
    err: *mut Q4Error,
) -> Q4Status {
    let mut accepted = true;
    let body = |instance: &Instance| {
        // SAFETY: the caller's structures.
        let ((spec, path), env) = unsafe { (borrow::spec(spec)?, borrow::env(env)?) };
        if let Err(reasons) = instance.backend.can_prepare(&spec, path, &env) {
            accepted = false;
            // SAFETY: the caller's sink with the caller's argument.
            unsafe { tell(&reasons, sink, user) };
        }
        Ok(())
    };
    // SAFETY: a live backend and the caller's buffer.
    match unsafe { of(b, err, body) } {
        status::OK if !accepted => status::UNSUPPORTED,
        status => status,
    }
}

pub(super) unsafe extern "C" fn prepare(
    b: *const Q4Backend,
    spec: *const Q4LinearSpec,
    weight: *const RawWeight,
    exec: *const Q4Exec,
    out: *mut *mut Q4Prepared,
    err: *mut Q4Error,
) -> Q4Status {
    let body = |instance: &Instance| {
        // SAFETY: the caller's structures, which live until this call returns.
        let (spec, path) = unsafe { borrow::spec(spec) }?;
        // SAFETY: as above.
        let segments = unsafe { borrow::segments(weight, &spec) }?;
        let weight = Q4Weight { schema: spec.schema, k: spec.k, segments: &segments };
        weight.validate()?;
        // SAFETY: as above.
        let prepared = unsafe { with(exec, |cx| instance.backend.prepare(&weight, &spec, path, cx)) }?;
        let made = Box::new(Weight { weight: prepared.into(), poisoned: instance.poisoned.clone() });
        if out.is_null() {
            return Err(Error::new(Code::ShapeMismatch, "prepare")
                .need("a place for the weight")
                .have("NULL"));
        }
        // SAFETY: the caller's place for a pointer.
        unsafe { *out = Box::into_raw(made).cast() };
        Ok(())
    };
    // SAFETY: a live backend and the caller's buffer.
    unsafe { of(b, err, body) }
}

pub(super) unsafe extern "C" fn info(
    p: *const Q4Prepared,
    out: *mut Q4PreparedInfo,
    err: *mut Q4Error,
) -> Q4Status {
    let body = |w: &Weight| {
        // SAFETY: the caller's structure.
        let given = unsafe { borrow::read(out, "place for facts") }?;
        let i = w.weight.info();
        let path =
            codes::path_to(i.path).ok_or_else(|| Error::new(Code::Internal, "path without a number"))?;
        let facts = Q4PreparedInfo {
            struct_size: given.struct_size,
            n: i.n as u64,
            k: i.k as u64,
            resident_bytes: i.resident_bytes,
            path,
            activations: lend::activation_kind(&i.activations),
            ops: u32::from(i.ops.0),
            reserved: 0,
        };
        // SAFETY: `read` found all fields of the first version, and those are all there are.
        unsafe { *out = facts };
        Ok(())
    };
    // SAFETY: a live weight and the caller's buffer.
    unsafe { on(p, err, body) }
}

pub(super) unsafe extern "C" fn workspace(p: *const Q4Prepared, m: u64) -> u64 {
    // SAFETY: a live weight.
    let w = unsafe { &*p.cast::<Weight>() };
    let Ok(m) = usize::try_from(m) else { return abi::WORKSPACE_OVERFLOW };
    quietly(&w.poisoned, || w.weight.workspace(m) as u64).unwrap_or(abi::WORKSPACE_OVERFLOW)
}

pub(super) unsafe extern "C" fn forward(
    p: *const Q4Prepared,
    x: *const Q4Matrix,
    y: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live weight; operands, scratch and buffer of the caller, good until this call returns.
    unsafe {
        on(p, err, |w| {
            let (x, y) = (borrow::view(x)?, borrow::view_mut(y)?);
            with(exec, |cx| {
                borrow::apart([Some(&x), Some(&y.as_view()), scratch(cx).as_ref(), None])?;
                w.weight.forward(x, y, cx)
            })
        })
    }
}

pub(super) unsafe extern "C" fn fuses(p: *const Q4Prepared, m: u64, parts: u32) -> u32 {
    // SAFETY: a live weight.
    let w = unsafe { &*p.cast::<Weight>() };
    let (Ok(m), Some(set)) = (usize::try_from(m), borrow::fuse_set(parts)) else { return 0 };
    quietly(&w.poisoned, || u32::from(w.weight.fuses(m, set))).unwrap_or(0)
}

pub(super) unsafe extern "C" fn forward_fused(
    p: *const Q4Prepared,
    x: *const Q4Matrix,
    fusion: *const Q4Fusion,
    y: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live weight; operands, scratch and buffer of the caller, good until this call returns.
    unsafe {
        on(p, err, |w| {
            let (x, fusion, y) = (borrow::view(x)?, borrow::fusion(fusion)?, borrow::view_mut(y)?);
            if fusion.set() != FuseSet::NONE && !w.weight.fuses(x.as_matrix()?.0, fusion.set()) {
                return Err(Error::new(Code::Unsupported, "a fused product")
                    .need("a combination that fuses() agrees to")
                    .have(format!("parts {:#05b}", fusion.set().0)));
            }
            with(exec, |cx| {
                let norm = fusion.norm.as_ref().map(|norm| &norm.weight);
                borrow::apart([Some(&x), Some(&y.as_view()), norm, scratch(cx).as_ref()])?;
                w.weight.forward_fused(x, &fusion, y, cx)
            })
        })
    }
}

pub(super) unsafe extern "C" fn footprint(
    b: *const Q4Backend,
    spec: *const Q4LinearSpec,
    out: *mut Q4Footprint,
    err: *mut Q4Error,
) -> Q4Status {
    let body = |instance: &Instance| {
        // SAFETY: the caller's structures.
        let ((spec, path), given) = unsafe { (borrow::spec(spec)?, borrow::read(out, "place for sizes")?) };
        let f = instance.backend.footprint(&spec, path);
        let told = Q4Footprint {
            struct_size: given.struct_size,
            resident_bytes: f.resident,
            workspace_bytes: f.workspace,
        };
        // SAFETY: `read` found all fields of the first version, and those are all there are.
        unsafe { *out = told };
        Ok(())
    };
    // SAFETY: a live backend and the caller's buffer.
    unsafe { of(b, err, body) }
}

pub(super) unsafe extern "C" fn backward_input(
    p: *const Q4Prepared,
    dy: *const Q4Matrix,
    dx: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: as in `forward`.
    unsafe {
        on(p, err, |w| {
            let (dy, dx) = (borrow::view(dy)?, borrow::view_mut(dx)?);
            with(exec, |cx| {
                borrow::apart([Some(&dy), Some(&dx.as_view()), scratch(cx).as_ref(), None])?;
                w.weight.backward_input(dy, dx, cx)
            })
        })
    }
}

pub(super) unsafe extern "C" fn dequantize(
    p: *const Q4Prepared,
    out: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: as in `forward`.
    unsafe {
        on(p, err, |w| {
            let out = borrow::view_mut(out)?;
            with(exec, |cx| {
                borrow::apart([Some(&out.as_view()), scratch(cx).as_ref(), None, None])?;
                w.weight.dequantize(out, cx)
            })
        })
    }
}

pub(super) unsafe extern "C" fn probe(
    b: *const Q4Backend,
    env: *const Q4Env,
    sink: Q4ProbeSink,
    user: *mut c_void,
    err: *mut Q4Error,
) -> Q4Status {
    let body = |instance: &Instance| {
        // SAFETY: the caller's structure.
        let env = unsafe { borrow::env(env) }?;
        for item in instance.backend.probe(&env) {
            let mut detail = item.detail;
            for reason in &item.reasons {
                detail += &format!("{}{reason}", if detail.is_empty() { "" } else { "; " });
            }
            let failed = u32::from(!item.reasons.is_empty());
            // SAFETY: the caller's sink with the caller's argument; the texts live until it returns.
            unsafe { sink(user, Q4Str::new(&item.id), failed, Q4Str::new(&detail)) };
        }
        Ok(())
    };
    // SAFETY: a live backend and the caller's buffer.
    unsafe { of(b, err, body) }
}

pub(super) unsafe extern "C" fn device(
    b: *const Q4Backend,
    id: u32,
    out: *mut Q4Device,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend, and the caller's structure and buffer.
    unsafe { of(b, err, |i| i.devices.tell(&*i.backend, id, out)) }
}

pub(super) unsafe extern "C" fn device_alloc(
    b: *const Q4Backend,
    id: u32,
    bytes: u64,
    out: *mut *mut c_void,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend, and the caller's place and buffer.
    unsafe {
        of(b, err, |i| {
            *out = std::ptr::without_provenance_mut(i.devices.alloc(&*i.backend, id, bytes)? as usize);
            Ok(())
        })
    }
}

pub(super) unsafe extern "C" fn device_free(
    b: *const Q4Backend,
    id: u32,
    at: *mut c_void,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend and the caller's buffer.
    unsafe { of(b, err, |i| i.devices.free(id, at)) }
}

pub(super) unsafe extern "C" fn copy_in(
    b: *const Q4Backend,
    id: u32,
    to: *mut c_void,
    from: *const c_void,
    bytes: u64,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend, and the caller's bytes and buffer.
    unsafe { of(b, err, |i| i.devices.copy_in(id, to, from, bytes)) }
}

pub(super) unsafe extern "C" fn copy_out(
    b: *const Q4Backend,
    id: u32,
    to: *mut c_void,
    from: *const c_void,
    bytes: u64,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: as above.
    unsafe { of(b, err, |i| i.devices.copy_out(id, to, from, bytes)) }
}

pub(super) unsafe extern "C" fn synchronize(b: *const Q4Backend, id: u32, err: *mut Q4Error) -> Q4Status {
    // SAFETY: a live backend and the caller's buffer.
    unsafe { of(b, err, |i| i.devices.synchronize(&*i.backend, id)) }
}

/// Asks a backend.
///
/// # Safety
/// `b` is a live backend, `err` as the contract says.
pub(super) unsafe fn of(
    b: *const Q4Backend,
    err: *mut Q4Error,
    body: impl FnOnce(&Instance) -> Result<()>,
) -> Q4Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        let instance = &*b.cast::<Instance>();
        guarded(&instance.poisoned, err, || body(instance))
    }
}

/// Asks a weight.
///
/// # Safety
/// `p` is a live weight, `err` as the contract says.
unsafe fn on(p: *const Q4Prepared, err: *mut Q4Error, body: impl FnOnce(&Weight) -> Result<()>) -> Q4Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        let w = &*p.cast::<Weight>();
        guarded(&w.poisoned, err, || body(w))
    }
}

pub(super) fn scratch<'a>(cx: &'a ExecContext<'_>) -> Option<TensorView<'a>> {
    cx.workspace.as_ref().map(TensorViewMut::as_view)
}

/// Runs `body` with the scratch and the threads of `exec`; NULL is this thread alone.
///
/// # Safety
/// `exec` is as the contract says.
pub(super) unsafe fn with<R>(
    exec: *const Q4Exec,
    body: impl FnOnce(&mut ExecContext<'_>) -> Result<R>,
) -> Result<R> {
    if exec.is_null() {
        return body(&mut ExecContext::cpu(&POOL));
    }
    // SAFETY: forwarded to the caller.
    let (exec, device, workspace) = unsafe {
        let exec = borrow::read(exec, "execution context")?;
        let (device, workspace) = borrow::workspace(&exec)?;
        (exec, device, workspace)
    };
    let mut cx = ExecContext { device, stream: exec.stream as usize, workspace, threads: &POOL };
    threads::during(&exec, || body(&mut cx))
}

/// Runs `body`, turns its error into a status and a text, and its panic into the end of this backend.
///
/// # Safety
/// `err` is as the contract says.
pub(super) unsafe fn guarded(
    poisoned: &AtomicBool,
    err: *mut Q4Error,
    body: impl FnOnce() -> Result<()>,
) -> Q4Status {
    let (status, text) = if poisoned.load(Ordering::Relaxed) {
        (status::PANICKED, "an earlier call panicked".to_owned())
    } else {
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(())) => (status::OK, String::new()),
            Ok(Err(e)) => (codes::status_to(e.code()), message::line(&e)),
            Err(payload) => {
                poisoned.store(true, Ordering::Relaxed);
                (status::PANICKED, told(payload))
            }
        }
    };
    // SAFETY: forwarded to the caller.
    unsafe { message::write(err, &text, 0) };
    status
}

thread_local! {
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// A library prints nothing: its panics are told to the caller. The hook is that of the library's own
/// standard library.
pub(super) fn quiet() {
    std::panic::set_hook(Box::new(|info| {
        // A thread that is ending has no place for it any more.
        let _ = LAST_PANIC.try_with(|last| {
            if let Ok(mut last) = last.try_borrow_mut() {
                *last = info.to_string().replace('\n', " ");
            }
        });
    }));
}

/// Text of a panic: what the hook saw on this thread, or the payload of one that came from another.
fn told(payload: Box<dyn Any + Send>) -> String {
    let seen = LAST_PANIC.try_with(|last| last.try_borrow_mut().map(|mut l| std::mem::take(&mut *l)));
    let text = seen.ok().and_then(std::result::Result::ok).filter(|t| !t.is_empty()).unwrap_or_else(|| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("without a text").to_owned()
    });
    // A payload may panic when it is dropped.
    std::mem::forget(payload);
    text
}

/// What `body` gives, or nothing and `poisoned` set where it panics.
pub(super) fn quietly<R>(poisoned: &AtomicBool, body: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(body))
        .inspect_err(|_| poisoned.store(true, Ordering::Relaxed))
        .map_err(std::mem::forget)
        .ok()
}
