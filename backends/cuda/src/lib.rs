//! What q4's kernels need of CUDA, opened at run time: a program that never names a CUDA device needs none of it.
//!
//! A [`Gpu`] is a device's primary context. [`Kernels`] come from header-free CUDA C++ that NVRTC compiles to machine code
//! at first use and that stays on disk; where there is no NVRTC, prebuilt images stand in. A missing library is an error
//! value that says what was looked for. Nothing else in the workspace calls the driver.
mod access;
mod arena;
mod buffer;
mod cache;
mod call;
mod compile;
mod dense;
mod gpu;
mod graph;
mod kernel;
mod libraries;
mod rows;
mod stage;
mod stream;

pub use access::Access;
pub use buffer::{Buffer, Pinned, view, view_mut};
pub use cache::{Cache, CachedImage};
pub use call::{check_call, check_place, scratch};
pub use compile::Source;
pub use cudarc::cublaslt::sys as cublaslt;
pub use cudarc::driver::sys as driver;
pub use dense::{Blas, DenseProduct};
pub use gpu::Gpu;
pub use graph::Graph;
pub use kernel::{Kernel, Kernels, Launch};
pub use libraries::{Found, Libraries, devices, libraries};
pub use rows::{Matrix, ROWS, RowKernels, Stored, convention, number, rule};
pub use stream::{Event, Stream};

use driver::CUresult;
use q4_core::{Code, Error, Result};
use std::cell::Cell;
use std::ffi::CStr;

thread_local! {
    static LAST: Cell<i64> = const { Cell::new(0) };
}

/// The driver's number for the last failure that [`check`] saw on this thread, 0 before the first.
pub fn last_status() -> i64 {
    LAST.get()
}

/// Turns a status into an error that names it; out-of-memory has its own code.
pub fn check(status: CUresult, doing: &str) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    LAST.set(status as i64);
    let code = match status {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Code::OutOfMemory,
        CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => Code::DeviceMissing,
        _ => Code::BackendFailed,
    };
    Err(Error::new(code, format!("CUDA: {doing}")).have(format!(
        "{} ({}): {}",
        text(status, Text::Name),
        status as i64,
        text(status, Text::Meaning)
    )))
}

enum Text {
    Name,
    Meaning,
}

fn text(status: CUresult, what: Text) -> String {
    let mut p = std::ptr::null();
    // SAFETY: the driver is loaded (it produced `status`) and stores a static text.
    let known = unsafe {
        match what {
            Text::Name => driver::cuGetErrorName(status, &mut p),
            Text::Meaning => driver::cuGetErrorString(status, &mut p),
        }
    };
    if known != CUresult::CUDA_SUCCESS || p.is_null() {
        return format!("{status:?}");
    }
    // SAFETY: NUL-terminated and static, by the driver's contract.
    unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
}

/// The arguments of a launch: pointers to the values named, which live as long as the statement.
#[macro_export]
macro_rules! args {
    ($($e:expr),* $(,)?) => { &mut [$( ::std::ptr::from_ref(&$e).cast::<::std::ffi::c_void>().cast_mut() ),*] };
}
