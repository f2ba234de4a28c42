//! Everything a Rust author needs to ship a backend as a shared library: implement [`q4_core::Q4Backend`],
//! say [`export_backend!`], build a `cdylib`.
//!
//! The macro exports both doors of the contract, catches every panic, writes errors into the caller's buffers
//! and translates both ways, so that no C type appears in a backend. [`lend`], [`borrow`], [`codes`] and
//! [`message`] are that translation; the program's side uses them too, so each number is written down once.
//!
//! A library has its own copy of q4-core. The [`q4_core::ThreadPool`] in the context of a call runs tasks on
//! the threads the program lent to that call.
pub mod borrow;
pub mod codes;
mod devices;
mod export;
pub mod lend;
pub mod message;
mod threads;

pub use export::Export;

pub use q4_core;
#[doc(hidden)]
pub use q4_plugin_abi as abi;
#[cfg(feature = "abi-stable")]
#[doc(hidden)]
pub use q4_plugin_root as root;

/// Exports the two symbols of a plugin, and with the feature `abi-stable` the typed door as well.
///
/// `export_backend!(expression)` takes anything that implements [`q4_core::Q4Backend`]. It is evaluated once,
/// when the library is first asked for its table; a panic there refuses the library. Name, version and vendor
/// are those of the package unless they are given, and must be those of the backend's descriptor.
///
/// `export_backend!(construct = function, name = .., version = .., vendor = ..)` is for a backend with
/// options: `function` is a `fn(&BuiltinOptions) -> Result<Arc<dyn Q4Backend>, Vec<Reject>>`, called with the
/// default for programs that have none to give, which may not fail, and once for each that has.
///
/// ```
/// use q4_plugin_sdk::q4_core::{ExecPath, NullBackend};
///
/// // Any `Q4Backend`, with the name, version and vendor of its descriptor; this one refuses everything.
/// q4_plugin_sdk::export_backend!(
///     NullBackend::new("acme-nvfp4", &[("nvfp4", ExecPath::FusedDequant)]),
///     name = "acme-nvfp4",
///     version = "0.1.0",
///     vendor = "q4",
/// );
///
/// # fn main() {
/// // What a program reads from the file before it loads it.
/// assert!(Q4_PLUGIN_DESCRIPTOR.name.starts_with(b"acme-nvfp4\0"));
/// assert!(Q4_PLUGIN_DESCRIPTOR.version.starts_with(b"0.1.0\0"));
/// # }
/// ```
#[macro_export]
macro_rules! export_backend {
    ($backend:expr $(,)?) => {
        $crate::export_backend!(
            $backend,
            name = env!("CARGO_PKG_NAME"),
            version = env!("CARGO_PKG_VERSION"),
            vendor = env!("CARGO_PKG_AUTHORS")
        );
    };
    (construct = $construct:expr, name = $name:expr, version = $version:expr, vendor = $vendor:expr $(,)?) => {
        #[doc(hidden)]
        unsafe extern "C" fn __q4_plugin_create_with(
            options: *const $crate::abi::Q4Options,
            out: *mut *mut $crate::abi::Q4Backend,
            sink: $crate::abi::Q4RejectSink,
            user: *mut ::std::ffi::c_void,
            err: *mut $crate::abi::Q4Error,
        ) -> $crate::abi::Q4Status {
            // SAFETY: the caller's pointers, as the contract says.
            unsafe { Q4_PLUGIN_EXPORT.create_with(options, out, sink, user, err) }
        }

        $crate::__export!(
            $construct,
            ::std::option::Option::Some(__q4_plugin_create_with),
            $name,
            $version,
            $vendor
        );
    };
    ($backend:expr, name = $name:expr, version = $version:expr, vendor = $vendor:expr $(,)?) => {
        $crate::__export!(
            |_| ::std::result::Result::Ok(::std::sync::Arc::new($backend)),
            ::std::option::Option::None,
            $name,
            $version,
            $vendor
        );
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __export {
    ($construct:expr, $create_with:expr, $name:expr, $version:expr, $vendor:expr) => {
        #[doc(hidden)]
        #[unsafe(export_name = "q4_plugin_descriptor")]
        pub static Q4_PLUGIN_DESCRIPTOR: $crate::abi::Q4Descriptor =
            $crate::abi::Q4Descriptor::new($name, $version, $vendor);

        #[doc(hidden)]
        static Q4_PLUGIN_EXPORT: $crate::Export =
            $crate::Export::new($construct, __q4_plugin_create, $create_with);

        #[doc(hidden)]
        unsafe extern "C" fn __q4_plugin_create(
            out: *mut *mut $crate::abi::Q4Backend,
            err: *mut $crate::abi::Q4Error,
        ) -> $crate::abi::Q4Status {
            // SAFETY: the caller's pointers, as the contract says.
            unsafe { Q4_PLUGIN_EXPORT.create(out, err) }
        }

        #[doc(hidden)]
        #[unsafe(export_name = "q4_plugin_query")]
        pub unsafe extern "C" fn __q4_plugin_query(
            abi_major: u32,
            id: u32,
            out: *mut $crate::abi::Q4Interface,
        ) -> $crate::abi::Q4Status {
            // SAFETY: the caller's pointer, as the contract says.
            unsafe { Q4_PLUGIN_EXPORT.query(abi_major, id, out) }
        }

        $crate::__export_root!(__q4_plugin_query, $vendor);
    };
}

#[cfg(feature = "abi-stable")]
#[doc(hidden)]
#[macro_export]
macro_rules! __export_root {
    ($query:path, $vendor:expr) => {
        #[doc(hidden)]
        extern "C" fn __q4_plugin_vendor() -> $crate::root::abi_stable::std_types::RStr<'static> {
            $crate::root::abi_stable::std_types::RStr::from_str($vendor)
        }
        #[doc(hidden)]
        unsafe extern "C" fn __q4_plugin_root_query(
            abi_major: u32,
            id: u32,
            out: *mut ::std::ffi::c_void,
        ) -> $crate::abi::Q4Status {
            // SAFETY: both doors take the same structure.
            unsafe { $query(abi_major, id, out.cast()) }
        }
        $crate::root::export_root!(__q4_plugin_vendor, __q4_plugin_root_query);
    };
}

#[cfg(not(feature = "abi-stable"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __export_root {
    ($query:path, $vendor:expr) => {};
}
