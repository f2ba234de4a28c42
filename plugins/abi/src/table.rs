//! The two symbols of a library and the table behind them.
use crate::{
    ABI_MAJOR, ABI_MINOR, MAGIC, Q4Device, Q4Env, Q4Error, Q4Exec, Q4Footprint, Q4Fusion, Q4LinearSpec,
    Q4Matrix, Q4Options, Q4PreparedInfo, Q4ProbeSink, Q4RejectSink, Q4Status, Q4Str, Q4Weight,
};
use core::ffi::c_void;

/// Constant data of type [`Q4Descriptor`]. It holds no pointer, so it can be read from the file as it lies
/// there.
pub const DESCRIPTOR_SYMBOL: &str = "q4_plugin_descriptor";
/// A function of type [`Q4PluginQuery`].
pub const QUERY_SYMBOL: &str = "q4_plugin_query";

/// Who a library is. Texts are UTF-8, filled up with NUL.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Q4Descriptor {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// Bytes of this structure.
    pub descriptor_size: u32,
    /// Major of the contract it was built for.
    pub abi_major: u32,
    /// Minor.
    pub abi_minor: u32,
    /// 0.
    pub flags: u32,
    /// Backend name: 1 to 63 of `a-z`, `0-9` and `-`, a letter first.
    pub name: [u8; 64],
    /// Version of the code that computes.
    pub version: [u8; 32],
    /// Who made it.
    pub vendor: [u8; 64],
}

impl Q4Descriptor {
    /// The descriptor of a library built for this version of the contract.
    ///
    /// # Panics
    /// While compiling, when a text does not fit.
    pub const fn new(name: &str, version: &str, vendor: &str) -> Self {
        Self {
            magic: MAGIC,
            descriptor_size: size_of::<Self>() as u32,
            abi_major: ABI_MAJOR,
            abi_minor: ABI_MINOR,
            flags: 0,
            name: fill(name),
            version: fill(version),
            vendor: fill(vendor),
        }
    }
}

const fn fill<const N: usize>(text: &str) -> [u8; N] {
    let bytes = text.as_bytes();
    assert!(bytes.len() < N, "text of a plugin descriptor is too long");
    let mut out = [0; N];
    let mut i = 0;
    while i < bytes.len() {
        out[i] = bytes[i];
        i += 1;
    }
    out
}

/// `(schema, revision, path)` a backend can ever serve. Numbers a program does not know are passed over.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Q4Offer {
    /// [`crate::schema`].
    pub schema: u32,
    /// Revision of the encoding.
    pub revision: u32,
    /// [`crate::path`].
    pub path: u32,
    /// 0.
    pub reserved: u32,
}

/// A backend of the library, opaque.
#[repr(C)]
pub struct Q4Backend {
    _private: [u8; 0],
}

/// A prepared weight of the library, opaque.
#[repr(C)]
pub struct Q4Prepared {
    _private: [u8; 0],
}

/// Weights of the library that one call multiplies, opaque. Since 1.2.
#[repr(C)]
pub struct Q4Group {
    _private: [u8; 0],
}

/// Interface [`crate::INTERFACE_BACKEND`]. Everything without a remark must be there; the header says what
/// each does.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, clippy::type_complexity)] // each entry is documented in q4_plugin.h, where its signature can be read
pub struct Q4BackendV1 {
    pub struct_size: usize,
    pub abi_major: u32,
    pub abi_minor: u32,
    /// Name, version and vendor are those of the descriptor.
    pub name: Q4Str,
    pub version: Q4Str,
    pub vendor: Q4Str,
    /// Tie-break between equal paths, larger wins.
    pub priority: i32,
    pub reserved: u32,
    pub n_offers: u64,
    pub offers: *const Q4Offer,
    pub create: Option<unsafe extern "C" fn(out: *mut *mut Q4Backend, err: *mut Q4Error) -> Q4Status>,
    pub destroy: Option<unsafe extern "C" fn(b: *mut Q4Backend)>,
    pub can_prepare: Option<
        unsafe extern "C" fn(
            b: *const Q4Backend,
            spec: *const Q4LinearSpec,
            env: *const Q4Env,
            sink: Q4RejectSink,
            user: *mut c_void,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    pub prepare: Option<
        unsafe extern "C" fn(
            b: *const Q4Backend,
            spec: *const Q4LinearSpec,
            weight: *const Q4Weight,
            exec: *const Q4Exec,
            out: *mut *mut Q4Prepared,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    pub release: Option<unsafe extern "C" fn(p: *mut Q4Prepared)>,
    pub info: Option<
        unsafe extern "C" fn(p: *const Q4Prepared, out: *mut Q4PreparedInfo, err: *mut Q4Error) -> Q4Status,
    >,
    pub workspace: Option<unsafe extern "C" fn(p: *const Q4Prepared, m: u64) -> u64>,
    pub forward: Option<Product>,
    pub dequantize: Option<
        unsafe extern "C" fn(
            p: *const Q4Prepared,
            out: *const Q4Matrix,
            exec: *const Q4Exec,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    /// May be NULL: inference only.
    pub backward_input: Option<Product>,
    /// Since 1.1; may be NULL.
    pub probe: Option<
        unsafe extern "C" fn(
            b: *const Q4Backend,
            env: *const Q4Env,
            sink: Q4ProbeSink,
            user: *mut c_void,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    /// Since 1.2; may be NULL: there are no options.
    pub create_with: Option<
        unsafe extern "C" fn(
            options: *const Q4Options,
            out: *mut *mut Q4Backend,
            sink: Q4RejectSink,
            user: *mut c_void,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    /// Since 1.2; may be NULL: the program estimates.
    pub footprint: Option<
        unsafe extern "C" fn(
            b: *const Q4Backend,
            spec: *const Q4LinearSpec,
            out: *mut Q4Footprint,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    /// Since 1.2; may be NULL: nothing is fused.
    pub fuses: Option<unsafe extern "C" fn(p: *const Q4Prepared, m: u64, parts: u32) -> u32>,
    /// Since 1.2; there when `fuses` is.
    pub forward_fused: Option<
        unsafe extern "C" fn(
            p: *const Q4Prepared,
            x: *const Q4Matrix,
            fusion: *const Q4Fusion,
            y: *const Q4Matrix,
            exec: *const Q4Exec,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    /// Since 1.2; may be NULL, with the five below: it has no device of its own.
    pub device: Option<
        unsafe extern "C" fn(
            b: *const Q4Backend,
            device_id: u32,
            out: *mut Q4Device,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    pub device_alloc: Option<
        unsafe extern "C" fn(
            b: *const Q4Backend,
            device_id: u32,
            bytes: u64,
            out: *mut *mut c_void,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    pub device_free: Option<
        unsafe extern "C" fn(
            b: *const Q4Backend,
            device_id: u32,
            at: *mut c_void,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    pub copy_in: Option<Transfer>,
    pub copy_out: Option<Transfer>,
    pub synchronize:
        Option<unsafe extern "C" fn(b: *const Q4Backend, device_id: u32, err: *mut Q4Error) -> Q4Status>,
    /// Since 1.2; may be NULL, with the three below: weights are called one by one.
    pub group: Option<
        unsafe extern "C" fn(
            b: *const Q4Backend,
            weights: *const *const Q4Prepared,
            n_weights: u64,
            exec: *const Q4Exec,
            out: *mut *mut Q4Group,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
    pub release_group: Option<unsafe extern "C" fn(g: *mut Q4Group)>,
    pub group_workspace: Option<unsafe extern "C" fn(g: *const Q4Group, m: u64) -> u64>,
    pub forward_grouped: Option<
        unsafe extern "C" fn(
            g: *const Q4Group,
            x: *const Q4Matrix,
            offsets: *const i32,
            y: *const Q4Matrix,
            exec: *const Q4Exec,
            err: *mut Q4Error,
        ) -> Q4Status,
    >,
}

type Transfer = unsafe extern "C" fn(
    b: *const Q4Backend,
    device_id: u32,
    to: *mut c_void,
    from: *const c_void,
    bytes: u64,
    err: *mut Q4Error,
) -> Q4Status;

type Product = unsafe extern "C" fn(
    p: *const Q4Prepared,
    input: *const Q4Matrix,
    output: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status;

// SAFETY: a table is constant data and functions that any thread may call.
unsafe impl Sync for Q4BackendV1 {}
// SAFETY: as above.
unsafe impl Send for Q4BackendV1 {}

/// Question and answer of a query.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Interface {
    /// Bytes of this structure as the asking program knows it.
    pub struct_size: usize,
    /// In: minor of the program. Out: minor of the table.
    pub abi_minor: u32,
    /// 0.
    pub reserved: u32,
    /// Out: the table, which lives as long as the library.
    pub table: *const c_void,
}

/// Fills `out` with the table `id` of major `abi_major`; `ABI` when there is none. May be called more than
/// once.
pub type Q4PluginQuery = unsafe extern "C" fn(abi_major: u32, id: u32, out: *mut Q4Interface) -> Q4Status;
