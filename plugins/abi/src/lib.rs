//! The whole binary contract between q4 and a third-party backend: plain C data, one table of functions, no
//! code.
//!
//! `include/q4_plugin.h` is the same contract for C and C++, and is where the rules of every call are
//! written; a test compares the two field by field. A library exports two symbols: [`DESCRIPTOR_SYMBOL`],
//! constant data that says who it is and can be read from the file without running it, and [`QUERY_SYMBOL`],
//! which hands out a [`Q4BackendV1`].
//!
//! Structures that may grow begin with their size as the writer knows it. [`read`] copies what both sides
//! know and leaves the rest zero, so an older library works in a newer program and the reverse.
#![no_std]

mod call;
mod product;
mod table;

pub use call::{
    DEVICE_CPU, DEVICE_CUDA, DEVICE_VENDOR, Q4Device, Q4Exec, Q4Footprint, Q4Fusion, Q4Matrix, Q4Parallel,
    Q4PreparedInfo, Q4TaskFn, WORKSPACE_OVERFLOW,
};
pub use product::*;
pub use table::{
    DESCRIPTOR_SYMBOL, Q4Backend, Q4BackendV1, Q4Descriptor, Q4Group, Q4Interface, Q4Offer, Q4PluginQuery,
    Q4Prepared, QUERY_SYMBOL,
};

use core::ffi::c_void;

/// Layout or meaning of something that exists. A program accepts the majors it has tables for.
pub const ABI_MAJOR: u32 = 1;
/// Fields appended, numbers added. Both sides accept any minor of a known major.
///
/// 1.0: everything up to `backward_input`. 1.1: `probe`. 1.2: `create_with`, `footprint`, `fuses`,
/// `forward_fused`, what [`Q4Env`] says of a vendor's libraries, memory of a vendor's device, and grouped
/// products.
pub const ABI_MINOR: u32 = 2;
/// Number of the table [`Q4BackendV1`] among the interfaces a library may have.
pub const INTERFACE_BACKEND: u32 = 1;
/// First bytes of a [`Q4Descriptor`].
pub const MAGIC: [u8; 8] = *b"q4plugin";

/// Result of a call: 0, or one of [`status`]. Unknown negative values mean `INTERNAL`.
pub type Q4Status = i32;

/// Values of [`Q4Status`].
pub mod status {
    use super::Q4Status;
    /// Done.
    pub const OK: Q4Status = 0;
    /// Valid, but this library, device or shape cannot do it.
    pub const UNSUPPORTED: Q4Status = -1;
    /// Operands that do not fit together, or a number that is not in the contract.
    pub const INVALID_ARGUMENT: Q4Status = -2;
    /// Memory could not be had.
    pub const OUT_OF_MEMORY: Q4Status = -3;
    /// The device or its driver failed; `native_code` has its number.
    pub const DEVICE: Q4Status = -4;
    /// No table of that major, or a structure shorter than the first version of it.
    pub const ABI: Q4Status = -5;
    /// A bug in the library.
    pub const INTERNAL: Q4Status = -6;
    /// NaN or infinity where the product quantises its input.
    pub const NON_FINITE: Q4Status = -7;
    /// A stored scale that is NaN, infinite or negative.
    pub const SCALE_INVALID: Q4Status = -8;
    /// The library caught a panic or an exception and must not be used any more.
    pub const PANICKED: Q4Status = -99;
}

/// Borrowed UTF-8 without a terminator. Lives as long as the call it is part of, in a table as long as the
/// library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Str {
    /// May be NULL when `len` is 0.
    pub ptr: *const u8,
    /// Bytes.
    pub len: usize,
}

impl Q4Str {
    /// A string that outlives its use.
    pub const fn new(text: &str) -> Self {
        Self { ptr: text.as_ptr(), len: text.len() }
    }
}

/// Text of a failure, in memory of the caller. At most `cap` bytes of UTF-8 are written, without a
/// terminator; `len` becomes the length of the whole text even when that is more.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Error {
    /// Bytes of this structure as the caller knows it.
    pub struct_size: usize,
    /// Where the text goes; NULL when it is not wanted.
    pub ptr: *mut u8,
    /// Bytes at `ptr`.
    pub cap: usize,
    /// Out: bytes of the whole text, 0 after a success.
    pub len: usize,
    /// Out: number of the device's runtime with `DEVICE`, else 0.
    pub native_code: i64,
}

/// Takes one reason of a refusal; the texts live until it returns. `code` is the stable spelling of q4's
/// reasons, e.g. `shape-unsupported`. Called on the thread of the call, before that returns.
pub type Q4RejectSink = unsafe extern "C" fn(user: *mut c_void, code: Q4Str, need: Q4Str, have: Q4Str);

/// Takes the outcome of one check of a probe. With `failed` not 0, `detail` says why. As [`Q4RejectSink`]
/// otherwise.
pub type Q4ProbeSink = unsafe extern "C" fn(user: *mut c_void, id: Q4Str, failed: u32, detail: Q4Str);

/// Structures that begin with their size.
///
/// # Safety
/// `repr(C)`, the first field is `struct_size: usize`, all-zero bytes are a valid value, and `MIN` is the
/// size of the first version.
pub unsafe trait Prefixed: Copy {
    /// Bytes of the structure in the first minor of this major.
    const MIN: usize;
}

/// What both sides know of `*from`, the rest zero. `None` when it is NULL, misaligned or shorter than its
/// first version.
///
/// # Safety
/// If not NULL and aligned, `from` addresses a size, and at least that many bytes in all.
pub unsafe fn read<T: Prefixed>(from: *const T) -> Option<T> {
    // SAFETY: forwarded to the caller.
    unsafe { read_known(from, size_of::<T>()) }
}

/// As [`read`], for a reader that knows only the first `known` bytes.
///
/// # Safety
/// As [`read`].
pub unsafe fn read_known<T: Prefixed>(from: *const T, known: usize) -> Option<T> {
    if from.is_null() || !from.is_aligned() {
        return None;
    }
    // SAFETY: the caller vouches for the size.
    let given = unsafe { from.cast::<usize>().read() };
    if given < T::MIN {
        return None;
    }
    let mut out = core::mem::MaybeUninit::<T>::zeroed();
    let bytes = given.min(known).min(size_of::<T>());
    // SAFETY: `given` bytes are readable, `size_of::<T>()` are writable, and a local does not overlap the
    // caller's.
    unsafe { core::ptr::copy_nonoverlapping(from.cast::<u8>(), out.as_mut_ptr().cast(), bytes) };
    // SAFETY: all-zero bytes are a valid value, and so is any prefix of a valid one over them.
    Some(unsafe { out.assume_init() })
}

macro_rules! prefixed {
    ($($t:ty),*) => { $(
        // SAFETY: repr(C), begins with its size, numbers and pointers and absent functions when zero.
        unsafe impl Prefixed for $t {
            const MIN: usize = size_of::<$t>();
        }
    )* };
}
prefixed!(
    Q4Error,
    Q4LinearSpec,
    Q4Weight,
    Q4Matrix,
    Q4Exec,
    Q4Fusion,
    Q4Footprint,
    Q4Device,
    Q4Options,
    Q4PreparedInfo,
    Q4Interface
);
macro_rules! grown {
    ($($t:ty, $first:ident;)*) => { $(
        // SAFETY: as above; the field came after the first version.
        unsafe impl Prefixed for $t {
            const MIN: usize = core::mem::offset_of!($t, $first);
        }
    )* };
}
grown!(Q4Env, cuda_missing; Q4CudaDevice, unusable; Q4Segment, zeros; Q4BackendV1, probe;);

/// `q4_plugin.h`, the same contract for C and C++.
pub const HEADER: &str = include_str!("../include/q4_plugin.h");

/// The sources of this crate, which depends on nothing, for projects that bring it along: the root first,
/// then its modules.
pub const SOURCES: [(&str, &str); 4] = [
    ("lib", include_str!("lib.rs")),
    ("call", include_str!("call.rs")),
    ("product", include_str!("product.rs")),
    ("table", include_str!("table.rs")),
];
