//! A backend behind the C table.
mod calls;
mod group;

use crate::devices::Devices;
use crate::{borrow, codes, message};
use calls::{guarded, quiet, quietly};
use q4_core::{BuiltinOptions, PreparedWeight, Q4Backend as Backend, Reject};
use q4_plugin_abi::{
    self as abi, Q4Backend, Q4BackendV1, Q4Error, Q4Interface, Q4Offer, Q4Options, Q4RejectSink, Q4Status,
    Q4Str, status,
};
use std::ffi::c_void;
use std::mem::size_of;
use std::sync::atomic::AtomicBool;
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
                quietly(&AtomicBool::default(), || {
                    let backend = (self.construct)(&BuiltinOptions::default()).ok()?;
                    Some(Made::new(backend, self.create, self.create_with))
                })
                .flatten()
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
            destroy: Some(calls::destroy),
            can_prepare: Some(calls::can_prepare),
            prepare: Some(calls::prepare),
            release: Some(calls::release),
            info: Some(calls::info),
            workspace: Some(calls::workspace),
            forward: Some(calls::forward),
            dequantize: Some(calls::dequantize),
            backward_input: Some(calls::backward_input),
            probe: Some(calls::probe),
            create_with,
            footprint: Some(calls::footprint),
            fuses: Some(calls::fuses),
            forward_fused: Some(calls::forward_fused),
            device: Some(calls::device),
            device_alloc: Some(calls::device_alloc),
            device_free: Some(calls::device_free),
            copy_in: Some(calls::copy_in),
            copy_out: Some(calls::copy_out),
            synchronize: Some(calls::synchronize),
            group: Some(group::group),
            release_group: Some(group::release_group),
            group_workspace: Some(group::group_workspace),
            forward_grouped: Some(group::forward_grouped),
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
    weight: Arc<dyn PreparedWeight>,
    poisoned: Arc<AtomicBool>,
}
