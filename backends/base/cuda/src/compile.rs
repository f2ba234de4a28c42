//! From CUDA C++ to machine code: the cache, then NVRTC, then prebuilt images.
use crate::cache::{Cache, Image, Key};
use crate::{Arch, Found, Source, libraries};
use cudarc::nvrtc::sys as nvrtc;
use q4_core::{Code, Error, Result};
use std::ffi::CString;

impl Source {
    /// Machine code for `arch`, which need not be here; only NVRTC must.
    pub fn compile(&self, arch: &Arch, options: &[&str]) -> Result<Vec<u8>> {
        if let Found::No(why) = &libraries().nvrtc {
            return Err(Error::new(
                Code::BackendFailed,
                format!("kernels `{}` for {}", self.name, arch.target()),
            )
            .need("NVRTC")
            .have(why.clone()));
        }
        compile(self, arch, options)
    }
}

impl Arch {
    /// Whether NVRTC, which is here, makes code for it: an old one knows old devices only.
    pub fn is_known(&self) -> bool {
        let mut count = 0;
        // SAFETY: NVRTC was found; it writes the number, then as many.
        let known = unsafe {
            if ok(nvrtc::nvrtcGetNumSupportedArchs(&mut count), "number of architectures").is_err() {
                return false;
            }
            let mut known = vec![0; count.max(0) as usize];
            if ok(nvrtc::nvrtcGetSupportedArchs(known.as_mut_ptr()), "architectures").is_err() {
                return false;
            }
            known
        };
        let (major, minor) = self.capability;
        known.contains(&((major * 10 + minor) as i32))
    }
}

/// The machine code of `source` for `arch`.
pub(crate) fn image(source: &Source, arch: &Arch, options: &[&str], cache: &Cache) -> Result<Image> {
    let key = Key::new(source, arch, options);
    let version = match &libraries().nvrtc {
        Found::Yes(v) => *v,
        Found::No(why) => return prebuilt(&key, cache, why),
    };
    if let Some((bytes, path)) = cache.read(&key, version) {
        return Ok(Image { bytes, from_cache: true, path: Some(path) });
    }
    let bytes = compile(source, arch, options)?;
    // A cache that cannot be written costs the next start a second, nothing else.
    let path = cache.write(&key, version, &bytes).ok();
    Ok(Image { bytes, from_cache: false, path })
}

/// Whether [`image`] would find or could make it.
pub(crate) fn available(source: &Source, arch: &Arch, options: &[&str], cache: &Cache) -> Result<()> {
    match &libraries().nvrtc {
        Found::Yes(_) => Ok(()),
        Found::No(why) => prebuilt(&Key::new(source, arch, options), cache, why).map(drop),
    }
}

/// Whether an image of any compiler is there, so that none is needed.
pub(crate) fn on_disk(source: &Source, arch: &Arch, options: &[String]) -> bool {
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    Cache::of_user().any(&Key::new(source, arch, &options)).is_some()
}

fn prebuilt(key: &Key, cache: &Cache, why: &str) -> Result<Image> {
    match cache.any(key) {
        Some((bytes, path)) => Ok(Image { bytes, from_cache: false, path: Some(path) }),
        None => Err(Error::new(Code::BackendFailed, format!("kernels `{}` for {}", key.name, key.arch))
            .need(format!("NVRTC, or a prebuilt image `{}`", key.prefix()))
            .have(format!("{why}; no such image in {}", cache.places()))
            .fix("install NVRTC, CUDA's run-time compiler, or name its folder in Q4_CUDA_LIBS")),
    }
}

fn compile(source: &Source, arch: &Arch, options: &[&str]) -> Result<Vec<u8>> {
    let c = |s: &str| CString::new(s).map_err(|_| Error::new(Code::Internal, "a NUL in kernel source"));
    let (text, name) = (c(&source.whole())?, c(&format!("{}.cu", source.name))?);
    let mut all =
        vec![c(&format!("--gpu-architecture={}", arch.target()))?, c("--std=c++17")?, c(&arch.option())?];
    for o in options {
        all.push(c(o)?);
    }
    let pointers: Vec<_> = all.iter().map(|o| o.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    // SAFETY: NVRTC is present; all texts are NUL-terminated and outlive the calls; out pointers are valid
    // and buffers have the size NVRTC asked for.
    unsafe {
        let none = std::ptr::null();
        ok(nvrtc::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), 0, none, none), "create")?;
        let status = nvrtc::nvrtcCompileProgram(program, pointers.len() as i32, pointers.as_ptr());
        let outcome = if status == nvrtc::nvrtcResult::NVRTC_SUCCESS {
            let mut size = 0;
            ok(nvrtc::nvrtcGetCUBINSize(program, &mut size), "size of the image").and_then(|()| {
                let mut cubin = vec![0u8; size];
                ok(nvrtc::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast()), "image").map(|()| cubin)
            })
        } else {
            let mut size = 0;
            nvrtc::nvrtcGetProgramLogSize(program, &mut size);
            let mut log = vec![0u8; size.max(1)];
            nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            let what = format!("compiling kernels `{}` for {}", source.name, arch.target());
            Err(Error::new(Code::BackendFailed, what).have(format!("{status:?}: {log}")))
        };
        nvrtc::nvrtcDestroyProgram(&mut program);
        outcome
    }
}

fn ok(status: nvrtc::nvrtcResult, doing: &str) -> Result<()> {
    if status == nvrtc::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(Error::new(Code::BackendFailed, format!("NVRTC: {doing}")).have(format!("{status:?}")))
}

#[test]
fn an_old_compiler_knows_old_devices_and_a_new_one_all() {
    let Found::Yes(version) = libraries().nvrtc else {
        return println!("skipped: no NVRTC");
    };
    let unknown: Vec<_> = crate::ARCHS.into_iter().filter(|a| !a.is_known()).collect();
    assert!(unknown.iter().all(|a| a.fp4), "{version} does not know {unknown:?}");
    assert!(version < 12_090 || unknown.is_empty(), "{version} does not know {unknown:?}");
}
