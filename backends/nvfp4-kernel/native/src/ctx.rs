//! A context: the device and the instruction set, chosen once so that nothing later depends on the
//! environment.
use crate::call::{Finding, Outcome, Sink, fixed, read, write};
use crate::{abi, isa::Isa, memory::Arena};
use std::ffi::CStr;

/// What `nvfp4_ctx` points to on the CPU.
pub struct Context {
    /// What its kernels run.
    pub isa: Isa,
    /// Where its weights are.
    pub arena: Arena,
}

/// Makes a context.
///
/// # Safety
/// `desc` is NULL or a size-prefixed struct whose `isa` is NULL or NUL-terminated.
pub unsafe fn create(desc: *const abi::CtxDesc, sink: &Sink) -> Outcome<Context> {
    // SAFETY: forwarded.
    let desc = unsafe { read(desc, "ctx_desc")? };
    let mut all = Vec::new();
    match desc.device_type {
        abi::DEVICE_CPU if desc.device == 0 => {}
        abi::DEVICE_CPU => all.push(Finding::limit("device-absent", "CPU 0", format!("CPU {}", desc.device))),
        other => all.push(Finding::mistake("device_type 1 (CPU) or 2 (CUDA)", other.to_string())),
    }
    if desc.flags != 0 || desc.reserved != 0 {
        all.push(Finding::mistake("flags and reserved = 0", format!("{} and {}", desc.flags, desc.reserved)));
    }
    let isa = if desc.isa.is_null() {
        Isa::best()
    } else {
        // SAFETY: NUL-terminated, by contract.
        let name = unsafe { CStr::from_ptr(desc.isa) }.to_string_lossy();
        match Isa::parse(&name) {
            Some(isa) if isa.is_available() => isa,
            Some(isa) => {
                all.push(Finding::limit("device-arch", isa.needs(), format!("a processor with {}", names())));
                isa
            }
            None => {
                let known: Vec<_> = Isa::ALL.map(Isa::name).into();
                all.push(Finding::limit("kernel-image-missing", known.join(", "), format!("\"{name}\"")));
                Isa::Portable
            }
        }
    };
    if all.is_empty() { Ok(Context { isa, arena: Arena::default() }) } else { Err(sink.report(all)) }
}

/// Fills in what the context can do.
///
/// # Safety
/// `out` is NULL or a writable size-prefixed struct.
pub unsafe fn device_info(ctx: &Context, out: *mut abi::DeviceInfo) -> Outcome {
    // SAFETY: forwarded.
    let size = unsafe { read(out, "device_info")? }.struct_size;
    let info = abi::DeviceInfo {
        struct_size: size,
        device_type: abi::DEVICE_CPU,
        cc_major: 0,
        cc_minor: 0,
        paths: 1 << abi::PATH_FUSED_DEQUANT,
        activations: 1 << abi::ACT_NATIVE | 1 << abi::ACT_INT8 | 1 << abi::ACT_NVFP4,
        has_native_image: 1,
        isa: fixed(ctx.isa.name()),
        isa_available: fixed(&names()),
        build: fixed(&format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)),
    };
    // SAFETY: forwarded.
    unsafe { write(out, &info) };
    Ok(())
}

fn names() -> String {
    Isa::available().map(Isa::name).collect::<Vec<_>>().join(",")
}
