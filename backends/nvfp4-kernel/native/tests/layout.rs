//! Compiles the header as a C user would and compares every size, offset and constant with `abi.rs`.
#![allow(clippy::unwrap_used)]
use NVFP4::abi;
use std::fmt::Write;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes the C lines of a struct and returns the lines they should print. The pattern makes a forgotten
/// field an error.
macro_rules! layout {
    ($c:ident, $want:ident; $($rust:ident = $name:literal { $($field:ident),* })*) => { $(
        let _ = |v: abi::$rust| { let abi::$rust { $($field: _),* } = v; };
        writeln!($c, "    printf(\"%s %zu\\n\", \"{0}\", sizeof({0}));", $name).unwrap();
        $want.push(format!("{} {}", $name, size_of::<abi::$rust>()));
        $(
            let field = stringify!($field);
            let size = format!("sizeof((({0} *)0)->{field})", $name);
            writeln!($c, "    printf(\"%s %zu %zu\\n\", \"{0}.{field}\", offsetof({0}, {field}), {size});", $name).unwrap();
            let bytes = field_size(|v: &abi::$rust| &raw const v.$field);
            $want.push(format!("{}.{field} {} {bytes}", $name, offset_of!(abi::$rust, $field)));
        )*
    )* };
}

macro_rules! constants {
    ($c:ident, $want:ident; $($name:ident)*) => { $(
        let name = concat!("NVFP4_", stringify!($name));
        writeln!($c, "    printf(\"%s %lld\\n\", \"{name}\", (long long){name});").unwrap();
        $want.push(format!("{name} {}", i64::from(abi::$name)));
    )* };
}

fn field_size<S, F>(_: impl Fn(&S) -> *const F) -> usize {
    size_of::<F>()
}

#[test]
fn the_header_is_strict_c_and_has_the_layout_of_abi_rs() {
    let (mut c, mut want) = (String::new(), Vec::new());
    c.push_str("#include \"nvfp4.h\"\n#include <stdio.h>\nint main(void) {\n");
    layout! { c, want;
        Error = "nvfp4_error" { struct_size, ptr, cap, len, native_code }
        CtxDesc = "nvfp4_ctx_desc" { struct_size, device_type, device, flags, reserved, isa }
        Segment = "nvfp4_segment" {
            struct_size, rows, codes, codes_bytes, scales, scales_bytes, global_scale, global_convention, scale_layout,
            reserved
        }
        WeightDesc = "nvfp4_weight_desc" {
            struct_size, n, k, segments, n_segments, path, activations, x_dtype, y_dtype, act_rule, act_global_kind,
            act_global, act_global_convention, max_m, reserved
        }
        Matrix = "nvfp4_matrix" { struct_size, data, bytes, rows, cols, ld, dtype, reserved }
        Exec = "nvfp4_exec" {
            struct_size, stream, workspace, workspace_bytes, parallel, parallel_user, threads, reserved
        }
        DeviceInfo = "nvfp4_device_info" {
            struct_size, device_type, cc_major, cc_minor, paths, activations, has_native_image, isa, isa_available, build
        }
        Quantizer = "nvfp4_quantizer" {
            struct_size, rule, source_dtype, global_kind, global_convention, global_scale, reserved
        }
        Quantized = "nvfp4_quantized" {
            struct_size, codes, codes_bytes, scales, scales_bytes, global_scale, global_convention
        }
        Fusion = "nvfp4_fusion" { struct_size, parts, norm_eps, norm_weight }
        Api = "nvfp4_api" {
            struct_size, abi_major, abi_minor, version, ctx_create, ctx_destroy, device_info, can_prepare, prepare,
            release, weight_bytes, workspace, forward, backward_input, dequantize, quantize, scaled_mm,
            managed_supported, managed_alloc, managed_free, managed_is, managed_prefetch, empty_cache, fuses,
            forward_fused
        }
    }
    constants! { c, want;
        ABI_MAJOR ABI_MINOR OK E_INVALID E_UNSUPPORTED E_NOMEM E_CUDA E_ABI E_INTERNAL DEVICE_CPU DEVICE_CUDA F32 F16 BF16
        PATH_NATIVE PATH_FUSED_DEQUANT PATH_DEQUANT_MATMUL ACT_NATIVE ACT_INT8 ACT_NVFP4 RULE_TORCHAO RULE_MODELOPT
        RULE_COMPRESSED_TENSORS RULE_TRANSFORMER_ENGINE RULE_RUNTIME GLOBAL_NONE GLOBAL_STATIC GLOBAL_PER_CALL
        CONVENTION_NONE CONVENTION_MULTIPLY CONVENTION_DIVIDE SCALE_ROW_MAJOR SCALE_128X4 CTX_MANAGED
        FUSE_NORM FUSE_GATE FUSE_ACCUMULATE
    }
    c.push_str("    return 0;\n}\n");
    let have = compile_and_run("layout", &c, &[]);
    assert_eq!(have.lines().collect::<Vec<_>>(), want);
}

/// A C program that reaches the table the way a user does: `dlopen`, one symbol, NVFP4_HAS.
#[test]
#[cfg(target_os = "linux")]
fn a_c_program_finds_the_table_in_the_shared_library() {
    let program = r#"
        #include "nvfp4.h"
        #include <dlfcn.h>
        #include <stdio.h>
        #include <string.h>
        int main(int argc, char **argv) {
            uint32_t minor = 99;
            void *lib = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
            if (!lib) { puts(dlerror()); return 1; }
            nvfp4_get_api_fn get;
            *(void **)&get = dlsym(lib, "nvfp4_get_api");
            const nvfp4_api *api = get(NVFP4_ABI_MAJOR, &minor);
            if (!api || get(NVFP4_ABI_MAJOR + 1, NULL)) return 2;
            if (!NVFP4_HAS(api, forward_fused) || api->struct_size != sizeof *api) return 3;
            char text[64];
            nvfp4_error e = {sizeof e, text, sizeof text, 0, 0};
            nvfp4_ctx_desc desc = {sizeof desc, NVFP4_DEVICE_CUDA, 63, 0, 0, NULL};
            nvfp4_ctx *ctx = NULL;
            if (api->ctx_create(&desc, &ctx, NULL, NULL, &e) != NVFP4_E_UNSUPPORTED || ctx) return 4;
            if (!strstr(text, "device-absent") || strlen(text) != 63 || e.len < 64) return 5;
            desc.device_type = NVFP4_DEVICE_CPU;
            desc.device = 0;
            if (api->ctx_create(&desc, &ctx, NULL, NULL, &e) != NVFP4_OK || !ctx || e.len) return 6;
            nvfp4_device_info info = {.struct_size = sizeof info};
            if (api->device_info(ctx, &info, &e) != NVFP4_OK || !info.isa[0]) return 7;
            api->ctx_destroy(ctx);
            printf("%u.%u\n", (unsigned)api->abi_major, (unsigned)minor);
            return 0;
        }"#;
    let library = library();
    let have = compile_and_run("client", program, &[library.to_str().unwrap()]);
    assert_eq!(have, "1.1\n");
    let symbols = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output();
    if let Ok(symbols) = symbols.map(|o| String::from_utf8(o.stdout).unwrap()) {
        let names: Vec<_> = symbols.lines().filter_map(|l| l.split_whitespace().last()).collect();
        assert_eq!(names, ["nvfp4_get_api"], "one exported symbol");
    }
}

/// The shared library that cargo built beside this test.
#[cfg(target_os = "linux")]
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().join("libNVFP4.so");
    assert!(path.exists(), "cargo builds the library before its tests: {}", path.display());
    path
}

fn compile_and_run(name: &str, program: &str, arguments: &[&str]) -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, binary) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&source, program).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let flags = ["-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-pedantic", "-Werror"];
    let out = Command::new(cc)
        .args(flags)
        .arg("-I")
        .arg(include)
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .arg("-ldl")
        .output()
        .expect("a C compiler is needed to test a C header");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let out = Command::new(&binary).args(arguments).output().unwrap();
    assert!(out.status.success(), "{name}: {:?} {}", out.status, String::from_utf8_lossy(&out.stdout));
    String::from_utf8(out.stdout).unwrap()
}
