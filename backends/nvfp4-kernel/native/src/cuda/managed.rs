//! Memory that host and device share, never more than the device has free.
use super::Engine;
use super::memory::{Managed, pointer_attribute, prefetch as move_pages};
use crate::abi;
use crate::call::{Fail, Outcome};
use q4_cuda::driver::{self, CUdevice_attribute_enum as Attribute, CUpointer_attribute_enum as Pointer};
use q4_cuda::{Gpu, check};
use std::ffi::c_void;

/// Whether the device has it; Err says why not.
pub fn supported(gpu: &Gpu) -> Result<(), String> {
    let mut yes = 0;
    // SAFETY: the device exists; the out pointer is valid.
    let status = unsafe {
        driver::cuDeviceGetAttribute(
            &mut yes,
            Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
            gpu.handle(),
        )
    };
    match check(status, "cuDeviceGetAttribute") {
        Ok(()) if yes != 0 => Ok(()),
        Ok(()) => Err(format!("{} without concurrent managed access", gpu.device())),
        Err(e) => Err(e.to_string()),
    }
}

/// `bytes` of it.
pub fn alloc(engine: &Engine, bytes: u64) -> Outcome<*mut c_void> {
    let bytes = usize::try_from(bytes).ok().filter(|b| *b > 0 && *b <= isize::MAX as usize);
    let bytes =
        bytes.ok_or_else(|| Fail::invalid("bytes", "above 0, in the address space", "another number"))?;
    supported(&engine.gpu).map_err(|why| Fail {
        status: abi::E_UNSUPPORTED,
        text: format!("managed memory: {why}"),
        native: 0,
    })?;
    Ok(Managed::new(&engine.gpu, bytes)?.into_raw() as *mut c_void)
}

/// Frees what `alloc` gave.
///
/// # Safety
/// `p` is NULL or came from `alloc` and is not used again.
pub unsafe fn free(engine: &Engine, p: *mut c_void) -> Outcome {
    if p.is_null() {
        return Ok(());
    }
    if !is_managed(engine, p) {
        return Err(Fail::invalid("managed_free", "an address from managed_alloc", format!("{p:p}")));
    }
    engine.gpu.bind()?;
    // SAFETY: by contract.
    Ok(check(unsafe { driver::cuMemFree_v2(p.addr() as u64) }, "cuMemFree")?)
}

/// Whether `p` is in managed memory.
pub fn is_managed(engine: &Engine, p: *const c_void) -> bool {
    pointer_attribute(&engine.gpu, p.addr() as u64, Pointer::CU_POINTER_ATTRIBUTE_IS_MANAGED) & 1 != 0
}

/// Moves pages to the ctx's device, or to the host with device -1.
pub fn prefetch(engine: &Engine, p: *const c_void, bytes: u64, device: i32, stream: *mut c_void) -> Outcome {
    if !is_managed(engine, p) {
        return Err(Fail::invalid("managed_prefetch", "managed memory", format!("{p:p}")));
    }
    let to_device = device >= 0;
    Ok(move_pages(&engine.gpu, p.addr() as u64, bytes as usize, to_device, stream.addr())?)
}
