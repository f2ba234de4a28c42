//! What q4's kernels need of CUDA, opened at run time: a program that never names a CUDA device needs none of
//! it.
//!
//! A [`Gpu`] is a device's primary context. [`Kernels`] come from CUDA C++ without headers of CUDA's, which
//! NVRTC compiles to machine code at first use and which stays on disk; where there is no NVRTC, prebuilt
//! images stand in. A missing library is an error value that says what was looked for. Nothing else in the
//! workspace calls the driver.
mod access;
mod ahead;
mod arch;
mod arena;
mod buffer;
mod cache;
mod call;
mod compile;
mod dense;
mod few;
mod fp4;
mod gpu;
mod graph;
mod kernel;
mod libraries;
mod lt;
mod map;
mod mirror;
mod row;
mod rows;
mod source;
mod stage;
mod stream;

pub use access::{Engines, Needs, images};
pub use ahead::ahead;
pub use arch::{ARCHS, Arch, HOPPER};
pub use buffer::{Buffer, Pinned, view, view_mut};
pub use cache::{Cache, CachedImage};
pub use call::{check_call, check_norm, check_place, scratch};
pub use cudarc::cublaslt::sys as cublaslt;
pub use cudarc::driver::sys as driver;
pub use dense::DenseProduct;
pub use few::{Align, Chip, FEW_ROWS, FEW_STAGES, FewPlan, FewRows, UNIT, Width};
pub use fp4::{FP4_COLUMNS, FP4_ROWS, Fp4Operands, Fp4Product, fp4_lacks};
pub use gpu::Gpu;
pub use graph::{Graph, Nodes};
pub use kernel::{Kernel, Kernels, Launch};
pub use libraries::{Libraries, devices, libraries};
pub use lt::Blas;
pub use map::TensorMap;
pub use mirror::{Field, Mirror, addresses};
pub use q4_core::Found;
pub use row::RowWidth;
pub use rows::{Matrix, ROWS, RowKernels, Stored, convention, number, output, over_rows, rule};
pub use source::{File, Source};
pub use stream::{Event, Stream};

use driver::CUresult;
use q4_core::{Code, Error, Result};
use std::ffi::CStr;

/// Turns a status into an error that names it: out-of-memory and a device that is not there have codes of
/// their own.
pub fn check(status: CUresult, doing: &str) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let e = Error::new(code(status), format!("CUDA: {doing}")).have(format!(
        "{} ({}): {}",
        text(status, Text::Name),
        status as i64,
        text(status, Text::Meaning)
    ));
    Err(if is_fault(status) {
        // The context is lost for this process, the device is not.
        e.fix("run it again; with CUDA_LAUNCH_BLOCKING=1 the kernel that fails is the one that is named")
    } else {
        e
    })
}

fn code(status: CUresult) -> Code {
    use CUresult::*;
    match status {
        CUDA_ERROR_OUT_OF_MEMORY => Code::OutOfMemory,
        CUDA_ERROR_NO_DEVICE
        | CUDA_ERROR_INVALID_DEVICE
        | CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUDA_ERROR_DEVICE_NOT_LICENSED
        | CUDA_ERROR_SYSTEM_NOT_READY
        | CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUDA_ERROR_NOT_INITIALIZED
        | CUDA_ERROR_DEINITIALIZED => Code::DeviceMissing,
        _ => Code::BackendFailed,
    }
}

/// Work on the device ended early: a kernel's doing or the hardware's.
fn is_fault(status: CUresult) -> bool {
    use CUresult::*;
    matches!(
        status,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_UNKNOWN
    )
}

#[test]
fn statuses_have_codes() {
    assert_eq!(code(CUresult::CUDA_ERROR_OUT_OF_MEMORY).exit(), 7);
    for lost in [CUresult::CUDA_ERROR_NO_DEVICE, CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE] {
        assert_eq!((code(lost), code(lost).exit(), is_fault(lost)), (Code::DeviceMissing, 6, false));
    }
    for fault in [CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE] {
        assert_eq!((code(fault), code(fault).exit(), is_fault(fault)), (Code::BackendFailed, 6, true));
    }
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
