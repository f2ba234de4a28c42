//! Which CUDA libraries this process can open, and the devices behind them.
use crate::{check, driver};
use cudarc::{cublaslt::sys as cublaslt, nvrtc::sys as nvrtc};
use libloading::Library;
use q4_core::{Code, CudaDevice, Error, Found, Result};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The libraries kernels may need.
#[derive(Clone, Debug)]
pub struct Libraries {
    /// `libcuda.so.1`, part of the driver.
    pub driver: Found,
    /// `libnvrtc.so`, the run-time compiler.
    pub nvrtc: Found,
    /// `libcublasLt.so`, dense products.
    pub cublaslt: Found,
}

/// Looks once per process. Folders in `Q4_CUDA_LIBS` (colon-separated) come before the loader's own search.
pub fn libraries() -> &'static Libraries {
    static FOUND: OnceLock<Libraries> = OnceLock::new();
    FOUND.get_or_init(|| {
        // A library opened by path answers to its soname later, which is how the loader's search is preceded.
        // NVRTC's built-ins first: it opens them by name when it compiles.
        for dir in folders() {
            for stem in ["libnvrtc-builtins.so", "libnvrtc.so", "libcublas.so", "libcublasLt.so"] {
                preload(&dir, stem);
            }
        }
        Libraries { driver: probe_driver(), nvrtc: probe_nvrtc(), cublaslt: probe_cublaslt() }
    })
}

fn folders() -> Vec<PathBuf> {
    let named = std::env::var_os("Q4_CUDA_LIBS").unwrap_or_default();
    std::env::split_paths(&named).filter(|p| p.is_absolute()).collect()
}

fn preload(dir: &Path, stem: &str) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    let mut files: Vec<_> = entries.flatten().map(|e| e.path()).collect();
    files.sort();
    for file in files {
        let is_it = file.file_name().is_some_and(|n| n.to_string_lossy().starts_with(stem));
        if is_it {
            // SAFETY: loading a vendor library runs its initialisers; the user named the folder.
            if let Ok(lib) = unsafe { Library::new(&file) } {
                std::mem::forget(lib); // it stays until the process ends
            }
        }
    }
}

fn absent(library: &str) -> Found {
    let named: Vec<_> = folders().iter().map(|d| d.display().to_string()).collect();
    let named = if named.is_empty() { "Q4_CUDA_LIBS is not set".to_owned() } else { named.join(":") };
    Found::No(format!("{library} not found by the loader ({named})"))
}

/// cudarc panics on a missing symbol; an old library must be a reason, not a crash.
fn quietly(library: &str, ask: impl FnOnce() -> Found) -> Found {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(ask))
        .unwrap_or_else(|_| Found::No(format!("{library} lacks an entry of CUDA 13")))
}

fn probe_driver() -> Found {
    // SAFETY: opening the driver library runs its initialisers.
    if !unsafe { driver::is_culib_present() } {
        return absent("libcuda.so.1 (the NVIDIA driver)");
    }
    quietly("libcuda.so.1", || {
        let mut version = 0;
        // SAFETY: the library is present; the out pointer is valid.
        let status = unsafe { driver::cuInit(0) };
        if let Err(e) = check(status, "cuInit") {
            return Found::No(e.parts().last().map_or_else(|| e.to_string(), |p| p.1.to_owned()));
        }
        // SAFETY: as above.
        unsafe { driver::cuDriverGetVersion(&mut version) };
        Found::Yes(version as u32)
    })
}

fn probe_nvrtc() -> Found {
    // SAFETY: opening the library runs its initialisers.
    if !unsafe { nvrtc::is_culib_present() } {
        return absent("libnvrtc.so (NVRTC, CUDA's run-time compiler)");
    }
    quietly("libnvrtc.so", || {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is present; the out pointers are valid.
        unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
        Found::Yes((major * 1000 + minor * 10) as u32)
    })
}

fn probe_cublaslt() -> Found {
    // SAFETY: opening the library runs its initialisers.
    if !unsafe { cublaslt::is_culib_present() } {
        return absent("libcublasLt.so");
    }
    // SAFETY: the library is present.
    quietly("libcublasLt.so", || Found::Yes(unsafe { cublaslt::cublasLtGetVersion() } as u32))
}

/// The CUDA devices of this machine; an error that says what is missing where there is no driver.
pub fn devices() -> Result<Vec<CudaDevice>> {
    if let Found::No(why) = &libraries().driver {
        return Err(Error::new(Code::DeviceMissing, "CUDA").need("a CUDA driver").have(why.clone()));
    }
    let mut count = 0;
    // SAFETY: the driver is loaded and initialised; so for the calls below, whose out pointers are valid.
    check(unsafe { driver::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount")?;
    (0..count)
        .map(|ordinal| {
            let device = handle(ordinal)?;
            let mut name = [0u8; 256];
            let mut memory = 0;
            // SAFETY: see above; the name is at most its buffer, NUL included.
            unsafe {
                check(driver::cuDeviceGetName(name.as_mut_ptr().cast(), 256, device), "cuDeviceGetName")?;
                check(driver::cuDeviceTotalMem_v2(&mut memory, device), "cuDeviceTotalMem")?;
            }
            let end = name.iter().position(|b| *b == 0).unwrap_or(0);
            Ok(CudaDevice {
                ordinal: ordinal as u32,
                capability: capability(device)?,
                name: String::from_utf8_lossy(&name[..end]).into_owned(),
                memory: memory as u64,
            })
        })
        .collect()
}

pub(crate) fn handle(ordinal: i32) -> Result<driver::CUdevice> {
    let mut device = 0;
    // SAFETY: the driver is loaded; the out pointer is valid.
    check(unsafe { driver::cuDeviceGet(&mut device, ordinal) }, "cuDeviceGet")?;
    Ok(device)
}

pub(crate) fn attribute(device: driver::CUdevice, which: driver::CUdevice_attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: as above.
    check(unsafe { driver::cuDeviceGetAttribute(&mut value, which, device) }, "cuDeviceGetAttribute")?;
    Ok(value as u32)
}

pub(crate) fn capability(device: driver::CUdevice) -> Result<(u32, u32)> {
    use driver::CUdevice_attribute_enum as A;
    Ok((
        attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}
