//! A backend behind the C table: every entry translates, calls and translates back, and no panic leaves it.
use crate::devices::Devices;
use crate::{borrow, codes, lend, message, threads, threads::POOL};
use q4_core::{
    BuiltinOptions, Code, Error, ExecContext, FuseSet, PreparedWeight, Q4Backend as Backend, Q4Weight,
    Reject, Result, TensorView, TensorViewMut,
};
use q4_plugin_abi as abi;
use q4_plugin_abi::{
    Q4Backend, Q4BackendV1, Q4Device, Q4Env, Q4Error, Q4Exec, Q4Footprint, Q4Fusion, Q4Interface,
    Q4LinearSpec, Q4Matrix, Q4Offer, Q4Options, Q4Prepared, Q4PreparedInfo, Q4ProbeSink, Q4RejectSink,
    Q4Status, Q4Str, Q4Weight as RawWeight, status,
};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::mem::size_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

type Create = unsafe extern "C" fn(out: *mut *mut Q4Backend, err: *mut Q4Error) -> Q4Status;
type CreateWith = unsafe extern "C" fn(
    options: *const Q4Options,
    out: *mut *mut Q4Backend,
    sink: Q4RejectSink,
    user: *mut c_void,
    err: *mut Q4Error,
) -> Q4Status;
type Constructed = std::result::Result<Arc<dyn Backend>, Vec<Reject>>;

/// The one backend of a library. Made by [`export_backend!`](crate::export_backend).
pub struct Export {
    construct: fn(&BuiltinOptions) -> Constructed,
    create: Create,
    create_with: Option<CreateWith>,
    made: OnceLock<Option<Made>>,
}

struct Made {
    backend: Arc<dyn Backend>,
    table: Q4BackendV1,
    _offers: Vec<Q4Offer>,
}

// SAFETY: the pointers of the table lead into `_offers` and the backend's descriptor, which are never
// changed.
unsafe impl Send for Made {}
// SAFETY: as above.
unsafe impl Sync for Made {}

impl Export {
    /// A backend that is built by `construct` when the library is first asked for it, and once more for
    /// every `create_with`, where there is one.
    pub const fn new(
        construct: fn(&BuiltinOptions) -> Constructed,
        create: Create,
        create_with: Option<CreateWith>,
    ) -> Self {
        Self { construct, create, create_with, made: OnceLock::new() }
    }

    fn made(&self) -> Option<&Made> {
        self.made
            .get_or_init(|| {
                quiet();
                catch_unwind(AssertUnwindSafe(|| {
                    let backend = (self.construct)(&BuiltinOptions::default()).ok()?;
                    Some(Made::new(backend, self.create, self.create_with))
                }))
                .unwrap_or_else(|payload| {
                    std::mem::forget(payload);
                    None
                })
            })
            .as_ref()
    }

    /// Answers `q4_plugin_query`.
    ///
    /// # Safety
    /// `out` is as the contract says.
    pub unsafe fn query(&self, abi_major: u32, id: u32, out: *mut Q4Interface) -> Q4Status {
        // SAFETY: forwarded to the caller.
        if abi_major != abi::ABI_MAJOR || id != abi::INTERFACE_BACKEND || unsafe { abi::read(out) }.is_none()
        {
            return status::ABI;
        }
        let Some(made) = self.made() else { return status::PANICKED };
        // SAFETY: `read` found all fields of the first version.
        unsafe {
            (*out).abi_minor = abi::ABI_MINOR;
            (*out).table = (&raw const made.table).cast();
        }
        status::OK
    }

    /// Answers `create`.
    ///
    /// # Safety
    /// Both pointers are as the contract says.
    pub unsafe fn create(&self, out: *mut *mut Q4Backend, err: *mut Q4Error) -> Q4Status {
        let (Some(made), false) = (self.made(), out.is_null()) else { return status::INTERNAL };
        // SAFETY: forwarded to the caller.
        unsafe {
            message::write(err, "", 0);
            *out = Instance::raw(made.backend.clone());
        }
        status::OK
    }

    /// Answers `create_with`.
    ///
    /// # Safety
    /// All pointers are as the contract says.
    pub unsafe fn create_with(
        &self,
        options: *const Q4Options,
        out: *mut *mut Q4Backend,
        sink: Q4RejectSink,
        user: *mut c_void,
        err: *mut Q4Error,
    ) -> Q4Status {
        if self.made().is_none() || out.is_null() {
            return status::INTERNAL;
        }
        let mut refused = false;
        let body = || {
            // SAFETY: forwarded to the caller.
            let options = unsafe { borrow::options(options) }?;
            match (self.construct)(&options) {
                // SAFETY: as above.
                Ok(backend) => unsafe { *out = Instance::raw(backend) },
                Err(reasons) => {
                    refused = true;
                    // SAFETY: as above.
                    unsafe { tell(&reasons, sink, user) };
                }
            }
            Ok(())
        };
        // SAFETY: as above.
        match unsafe { guarded(&AtomicBool::new(false), err, body) } {
            status::OK if refused => status::UNSUPPORTED,
            status => status,
        }
    }
}

/// Hands over every reason.
///
/// # Safety
/// The sink takes `user`.
unsafe fn tell(reasons: &[Reject], sink: Q4RejectSink, user: *mut c_void) {
    for r in reasons {
        // SAFETY: forwarded to the caller; the texts live until it returns.
        unsafe { sink(user, Q4Str::new(r.code.as_str()), Q4Str::new(&r.need), Q4Str::new(&r.have)) };
    }
}

impl Made {
    fn new(backend: Arc<dyn Backend>, create: Create, create_with: Option<CreateWith>) -> Self {
        let d = backend.descriptor();
        let offer = |(schema, path): &(std::borrow::Cow<'static, str>, q4_core::ExecPath)| {
            let (schema, revision) = codes::schema_to(schema)?;
            Some(Q4Offer { schema, revision, path: codes::path_to(*path)?, reserved: 0 })
        };
        let offers: Vec<Q4Offer> = d.offers.iter().filter_map(offer).collect();
        let table = Q4BackendV1 {
            struct_size: size_of::<Q4BackendV1>(),
            abi_major: abi::ABI_MAJOR,
            abi_minor: abi::ABI_MINOR,
            name: Q4Str::new(&d.name),
            version: Q4Str::new(&d.version),
            vendor: Q4Str::new(&d.vendor),
            priority: d.priority,
            reserved: 0,
            n_offers: offers.len() as u64,
            offers: offers.as_ptr(),
            create: Some(create),
            destroy: Some(destroy),
            can_prepare: Some(can_prepare),
            prepare: Some(prepare),
            release: Some(release),
            info: Some(info),
            workspace: Some(workspace),
            forward: Some(forward),
            dequantize: Some(dequantize),
            backward_input: Some(backward_input),
            probe: Some(probe),
            create_with,
            footprint: Some(footprint),
            fuses: Some(fuses),
            forward_fused: Some(forward_fused),
            device: Some(device),
            device_alloc: Some(device_alloc),
            device_free: Some(device_free),
            copy_in: Some(copy_in),
            copy_out: Some(copy_out),
            synchronize: Some(synchronize),
        };
        Self { backend, table, _offers: offers }
    }
}

/// What a `q4_backend` is.
struct Instance {
    backend: Arc<dyn Backend>,
    devices: Devices,
    /// Set by a panic, here or in a weight: whatever it left half done is never used again.
    poisoned: Arc<AtomicBool>,
}

impl Instance {
    fn raw(backend: Arc<dyn Backend>) -> *mut Q4Backend {
        let devices = Devices::of(&*backend);
        Box::into_raw(Box::new(Self { backend, devices, poisoned: Arc::default() })).cast()
    }
}

/// What a `q4_prepared` is.
struct Weight {
    weight: Box<dyn PreparedWeight>,
    poisoned: Arc<AtomicBool>,
}

unsafe extern "C" fn destroy(b: *mut Q4Backend) {
    // SAFETY: made by `create`, destroyed once.
    drop_quietly(unsafe { Box::from_raw(b.cast::<Instance>()) });
}

unsafe extern "C" fn release(p: *mut Q4Prepared) {
    // SAFETY: made by `prepare`, released once.
    drop_quietly(unsafe { Box::from_raw(p.cast::<Weight>()) });
}

unsafe extern "C" fn can_prepare(
    b: *const Q4Backend,
    spec: *const Q4LinearSpec,
    env: *const Q4Env,
    sink: Q4RejectSink,
    user: *mut c_void,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend.
    let instance = unsafe { &*b.cast::<Instance>() };
    let mut accepted = true;
    let body = || {
        // SAFETY: the caller's structures.
        let ((spec, path), env) = unsafe { (borrow::spec(spec)?, borrow::env(env)?) };
        if let Err(reasons) = instance.backend.can_prepare(&spec, path, &env) {
            accepted = false;
            // SAFETY: the caller's sink with the caller's argument.
            unsafe { tell(&reasons, sink, user) };
        }
        Ok(())
    };
    // SAFETY: the caller's buffer.
    match unsafe { guarded(&instance.poisoned, err, body) } {
        status::OK if !accepted => status::UNSUPPORTED,
        status => status,
    }
}

unsafe extern "C" fn prepare(
    b: *const Q4Backend,
    spec: *const Q4LinearSpec,
    weight: *const RawWeight,
    exec: *const Q4Exec,
    out: *mut *mut Q4Prepared,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend.
    let instance = unsafe { &*b.cast::<Instance>() };
    let body = || {
        // SAFETY: the caller's structures, which live until this call returns.
        let (spec, path) = unsafe { borrow::spec(spec) }?;
        // SAFETY: as above.
        let segments = unsafe { borrow::segments(weight, &spec) }?;
        let weight = Q4Weight { schema: spec.schema, k: spec.k, segments: &segments };
        weight.validate()?;
        // SAFETY: as above.
        let prepared = unsafe { with(exec, |cx| instance.backend.prepare(&weight, &spec, path, cx)) }?;
        let made = Box::new(Weight { weight: prepared, poisoned: instance.poisoned.clone() });
        if out.is_null() {
            return Err(Error::new(Code::ShapeMismatch, "prepare")
                .need("a place for the weight")
                .have("NULL"));
        }
        // SAFETY: the caller's place for a pointer.
        unsafe { *out = Box::into_raw(made).cast() };
        Ok(())
    };
    // SAFETY: the caller's buffer.
    unsafe { guarded(&instance.poisoned, err, body) }
}

unsafe extern "C" fn info(p: *const Q4Prepared, out: *mut Q4PreparedInfo, err: *mut Q4Error) -> Q4Status {
    // SAFETY: a live weight.
    let w = unsafe { &*p.cast::<Weight>() };
    let body = || {
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
    // SAFETY: the caller's buffer.
    unsafe { guarded(&w.poisoned, err, body) }
}

unsafe extern "C" fn workspace(p: *const Q4Prepared, m: u64) -> u64 {
    // SAFETY: a live weight.
    let w = unsafe { &*p.cast::<Weight>() };
    let Ok(m) = usize::try_from(m) else { return abi::WORKSPACE_OVERFLOW };
    match catch_unwind(AssertUnwindSafe(|| w.weight.workspace(m))) {
        Ok(bytes) => bytes as u64,
        Err(payload) => {
            std::mem::forget(payload);
            w.poisoned.store(true, Ordering::Relaxed);
            abi::WORKSPACE_OVERFLOW
        }
    }
}

unsafe extern "C" fn forward(
    p: *const Q4Prepared,
    x: *const Q4Matrix,
    y: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live weight.
    let w = unsafe { &*p.cast::<Weight>() };
    // SAFETY: operands, scratch and buffer of the caller, good until this call returns.
    unsafe {
        guarded(&w.poisoned, err, || {
            let (x, y) = (borrow::view(x)?, borrow::view_mut(y)?);
            with(exec, |cx| {
                borrow::apart([Some(&x), Some(&y.as_view()), scratch(cx).as_ref(), None])?;
                w.weight.forward(x, y, cx)
            })
        })
    }
}

unsafe extern "C" fn fuses(p: *const Q4Prepared, m: u64, parts: u32) -> u32 {
    // SAFETY: a live weight.
    let w = unsafe { &*p.cast::<Weight>() };
    let (Ok(m), Some(set)) = (usize::try_from(m), borrow::fuse_set(parts)) else { return 0 };
    catch_unwind(AssertUnwindSafe(|| u32::from(w.weight.fuses(m, set)))).unwrap_or_else(|payload| {
        std::mem::forget(payload);
        w.poisoned.store(true, Ordering::Relaxed);
        0
    })
}

unsafe extern "C" fn forward_fused(
    p: *const Q4Prepared,
    x: *const Q4Matrix,
    fusion: *const Q4Fusion,
    y: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live weight.
    let w = unsafe { &*p.cast::<Weight>() };
    // SAFETY: operands, scratch and buffer of the caller, good until this call returns.
    unsafe {
        guarded(&w.poisoned, err, || {
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

unsafe extern "C" fn footprint(
    b: *const Q4Backend,
    spec: *const Q4LinearSpec,
    out: *mut Q4Footprint,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend.
    let instance = unsafe { &*b.cast::<Instance>() };
    let body = || {
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
    // SAFETY: the caller's buffer.
    unsafe { guarded(&instance.poisoned, err, body) }
}

unsafe extern "C" fn backward_input(
    p: *const Q4Prepared,
    dy: *const Q4Matrix,
    dx: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live weight.
    let w = unsafe { &*p.cast::<Weight>() };
    // SAFETY: as in `forward`.
    unsafe {
        guarded(&w.poisoned, err, || {
            let (dy, dx) = (borrow::view(dy)?, borrow::view_mut(dx)?);
            with(exec, |cx| {
                borrow::apart([Some(&dy), Some(&dx.as_view()), scratch(cx).as_ref(), None])?;
                w.weight.backward_input(dy, dx, cx)
            })
        })
    }
}

unsafe extern "C" fn dequantize(
    p: *const Q4Prepared,
    out: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live weight.
    let w = unsafe { &*p.cast::<Weight>() };
    // SAFETY: as in `forward`.
    unsafe {
        guarded(&w.poisoned, err, || {
            let out = borrow::view_mut(out)?;
            with(exec, |cx| {
                borrow::apart([Some(&out.as_view()), scratch(cx).as_ref(), None, None])?;
                w.weight.dequantize(out, cx)
            })
        })
    }
}

unsafe extern "C" fn probe(
    b: *const Q4Backend,
    env: *const Q4Env,
    sink: Q4ProbeSink,
    user: *mut c_void,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend.
    let instance = unsafe { &*b.cast::<Instance>() };
    let body = || {
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
    // SAFETY: the caller's buffer.
    unsafe { guarded(&instance.poisoned, err, body) }
}

unsafe extern "C" fn device(b: *const Q4Backend, id: u32, out: *mut Q4Device, err: *mut Q4Error) -> Q4Status {
    // SAFETY: a live backend, and the caller's structure and buffer.
    unsafe {
        let i = &*b.cast::<Instance>();
        guarded(&i.poisoned, err, || i.devices.tell(&*i.backend, id, out))
    }
}

unsafe extern "C" fn device_alloc(
    b: *const Q4Backend,
    id: u32,
    bytes: u64,
    out: *mut *mut c_void,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend, and the caller's place and buffer.
    unsafe {
        let i = &*b.cast::<Instance>();
        guarded(&i.poisoned, err, || {
            *out = std::ptr::without_provenance_mut(i.devices.alloc(&*i.backend, id, bytes)? as usize);
            Ok(())
        })
    }
}

unsafe extern "C" fn device_free(
    b: *const Q4Backend,
    id: u32,
    at: *mut c_void,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend and the caller's buffer.
    unsafe {
        let i = &*b.cast::<Instance>();
        guarded(&i.poisoned, err, || i.devices.free(id, at))
    }
}

unsafe extern "C" fn copy_in(
    b: *const Q4Backend,
    id: u32,
    to: *mut c_void,
    from: *const c_void,
    bytes: u64,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live backend, and the caller's bytes and buffer.
    unsafe {
        let i = &*b.cast::<Instance>();
        guarded(&i.poisoned, err, || i.devices.copy_in(id, to, from, bytes))
    }
}

unsafe extern "C" fn copy_out(
    b: *const Q4Backend,
    id: u32,
    to: *mut c_void,
    from: *const c_void,
    bytes: u64,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: as above.
    unsafe {
        let i = &*b.cast::<Instance>();
        guarded(&i.poisoned, err, || i.devices.copy_out(id, to, from, bytes))
    }
}

unsafe extern "C" fn synchronize(b: *const Q4Backend, id: u32, err: *mut Q4Error) -> Q4Status {
    // SAFETY: a live backend and the caller's buffer.
    unsafe {
        let i = &*b.cast::<Instance>();
        guarded(&i.poisoned, err, || i.devices.synchronize(&*i.backend, id))
    }
}

fn scratch<'a>(cx: &'a ExecContext<'_>) -> Option<TensorView<'a>> {
    cx.workspace.as_ref().map(TensorViewMut::as_view)
}

/// Runs `body` with the scratch and the threads of `exec`; NULL is this thread alone.
///
/// # Safety
/// `exec` is as the contract says.
unsafe fn with<R>(exec: *const Q4Exec, body: impl FnOnce(&mut ExecContext<'_>) -> Result<R>) -> Result<R> {
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
unsafe fn guarded(poisoned: &AtomicBool, err: *mut Q4Error, body: impl FnOnce() -> Result<()>) -> Q4Status {
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
fn quiet() {
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

fn drop_quietly<T>(value: T) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        std::mem::forget(payload);
    }
}
