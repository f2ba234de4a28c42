//! A library that changes how the program rounds, as those linked with `-ffast-math` do, is refused with the
//! cause named.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![allow(clippy::unwrap_used)]
mod built;

use q4_core::RejectCode;
use std::hint::black_box;

#[test]
fn a_library_that_flushes_subnormals_is_refused_and_its_change_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    // What crtfastmath.o does.
    let early = "__attribute__((constructor)) static void early(void) \
                 { __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040); }";
    let path = built::stub(dir.path(), "fast", &[("/*EARLY*/", early)]);
    let refusal = q4_plugin_host::load(&path).err().unwrap();
    let reason = &refusal.reasons[0];
    assert_eq!(reason.code, RejectCode::AbiMismatch, "{reason}");
    assert!(reason.need.contains("-ffast-math") && reason.have.contains("MXCSR 0x1f80 before"), "{reason}");
    let smallest = black_box(f32::MIN_POSITIVE);
    assert!(black_box(smallest / 2.0) > 0.0, "subnormals are still zero");

    let harmless = built::stub(dir.path(), "plain", &[]);
    assert!(q4_plugin_host::load(&harmless).is_ok());
}
