//! The header says what the crate says: sizes and offsets of every field as a C and a C++ compiler see them,
//! constants included, and a snapshot so that neither can change unnoticed.
#![allow(clippy::unwrap_used)]
use q4_plugin_abi as abi;
use q4_plugin_abi::*;
use std::fmt::Write;
use std::mem::{align_of, offset_of, size_of};
use std::path::Path;
use std::process::Command;

/// `(C name, size, alignment, fields)`.
type Struct = (&'static str, usize, usize, Vec<(&'static str, usize, usize)>);

fn size_at<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! structs {
    ($($rust:ty = $c:literal { $($field:ident),* };)*) => {
        vec![$(($c, size_of::<$rust>(), align_of::<$rust>(),
            vec![$((stringify!($field), offset_of!($rust, $field), size_at(|s: &$rust| &s.$field))),*])),*]
    };
}

fn structs() -> Vec<Struct> {
    structs! {
        Q4Str = "q4_str" { ptr, len };
        Q4Error = "q4_error" { struct_size, ptr, cap, len, native_code };
        Q4Descriptor = "q4_descriptor" {
            magic, descriptor_size, abi_major, abi_minor, flags, name, version, vendor
        };
        Q4Offer = "q4_offer" { schema, revision, path, reserved };
        Q4LinearSpec = "q4_linear_spec" {
            struct_size, schema, schema_revision, scale_layout, global_convention, nibble_order, block, nested_block,
            dense_dtype, n_segments, segment_rows, segment_names, n, k, max_m, x_dtype, y_dtype, path, ops, activations,
            act_rule, act_global_kind, act_global_convention, act_global, device_type, device_id, scale_dtype
        };
        Q4Segment = "q4_segment" {
            struct_size, rows, codes, codes_bytes, scales, scales_bytes, nested_map, nested_map_bytes, nested_absmax,
            nested_absmax_bytes, nested_offset, global_scale, global_convention, reserved, zeros, zeros_bytes
        };
        Q4Weight = "q4_weight" { struct_size, n_segments, segments };
        Q4CudaDevice = "q4_cuda_device" { struct_size, ordinal, cc_major, cc_minor, reserved, memory, name, unusable };
        Q4Found = "q4_found" { version, reserved, missing };
        Q4Env = "q4_env" {
            struct_size, arch, cpu_features, processors, cuda_driver, n_cuda, cuda, cuda_missing, nvrtc, cublaslt
        };
        Q4Matrix = "q4_matrix" {
            struct_size, data, bytes, rows, cols, ld, dtype, device_type, device_id, reserved
        };
        Q4Exec = "q4_exec" {
            struct_size, stream, workspace, workspace_bytes, parallel, parallel_user, threads, device_type, device_id,
            reserved
        };
        Q4PreparedInfo = "q4_prepared_info" {
            struct_size, n, k, resident_bytes, path, activations, ops, reserved
        };
        Q4Fusion = "q4_fusion" { struct_size, parts, norm_eps, norm_weight };
        Q4Footprint = "q4_footprint" { struct_size, resident_bytes, workspace_bytes };
        Q4Device = "q4_device" { struct_size, name, fingerprint, memory_bytes, free_bytes };
        Q4Options = "q4_options" { struct_size, isa, has_cuda, cuda, unified_memory, reserved };
        Q4BackendV1 = "q4_backend_v1" {
            struct_size, abi_major, abi_minor, name, version, vendor, priority, reserved, n_offers, offers, create,
            destroy, can_prepare, prepare, release, info, workspace, forward, dequantize, backward_input, probe,
            create_with, footprint, fuses, forward_fused, device, device_alloc, device_free, copy_in, copy_out, synchronize,
            group, release_group, group_workspace, forward_grouped
        };
        Q4Interface = "q4_interface" { struct_size, abi_minor, reserved, table };
    }
}

macro_rules! constants {
    ($($c:literal = $rust:expr;)*) => { vec![$(($c, i64::from($rust))),*] };
}

fn constants() -> Vec<(&'static str, i64)> {
    constants! {
        "Q4_ABI_MAJOR" = ABI_MAJOR; "Q4_ABI_MINOR" = ABI_MINOR; "Q4_INTERFACE_BACKEND" = INTERFACE_BACKEND;
        "Q4_OK" = status::OK; "Q4_E_UNSUPPORTED" = status::UNSUPPORTED; "Q4_E_INVALID" = status::INVALID_ARGUMENT;
        "Q4_E_NOMEM" = status::OUT_OF_MEMORY; "Q4_E_DEVICE" = status::DEVICE; "Q4_E_ABI" = status::ABI;
        "Q4_E_INTERNAL" = status::INTERNAL; "Q4_E_NON_FINITE" = status::NON_FINITE;
        "Q4_E_SCALE_INVALID" = status::SCALE_INVALID; "Q4_E_PANICKED" = status::PANICKED;
        "Q4_SCHEMA_NVFP4" = schema::NVFP4; "Q4_SCHEMA_NF4" = schema::NF4; "Q4_SCHEMA_NF4_DQ" = schema::NF4_DQ;
        "Q4_SCHEMA_DENSE" = schema::DENSE; "Q4_SCHEMA_MXFP4" = schema::MXFP4;
        "Q4_SCHEMA_INT4" = schema::INT4; "Q4_SCHEMA_INT4_ASYM" = schema::INT4_ASYM;
        "Q4_SCHEMA_Q4_K" = schema::Q4_K; "Q4_SCHEMA_Q5_K" = schema::Q5_K;
        "Q4_SCHEMA_Q6_K" = schema::Q6_K; "Q4_SCHEMA_Q8_0" = schema::Q8_0;
        "Q4_SCHEMA_FP8" = schema::FP8; "Q4_SCHEMA_INT4_AFFINE" = schema::INT4_AFFINE;
        "Q4_F32" = dtype::F32; "Q4_F16" = dtype::F16; "Q4_BF16" = dtype::BF16;
        "Q4_PATH_NATIVE_KERNEL" = abi::path::NATIVE_KERNEL; "Q4_PATH_FUSED_DEQUANT" = abi::path::FUSED_DEQUANT;
        "Q4_PATH_DEQUANT_MATMUL" = abi::path::DEQUANT_MATMUL; "Q4_PATH_REFERENCE" = abi::path::REFERENCE;
        "Q4_PATH_FUSED_ROUNDED" = abi::path::FUSED_ROUNDED;
        "Q4_OP_FORWARD" = op::FORWARD; "Q4_OP_BACKWARD_INPUT" = op::BACKWARD_INPUT; "Q4_OP_DEQUANTIZE" = op::DEQUANTIZE;
        "Q4_FUSE_NORM" = fuse::NORM; "Q4_FUSE_GATE" = fuse::GATE; "Q4_FUSE_ACCUMULATE" = fuse::ACCUMULATE;
        "Q4_UNIFIED_DISABLED" = unified_memory::DISABLED; "Q4_UNIFIED_PREFER" = unified_memory::PREFER;
        "Q4_UNIFIED_REQUIRE" = unified_memory::REQUIRE;
        "Q4_ACT_NATIVE" = activations::NATIVE; "Q4_ACT_INT8" = activations::INT8; "Q4_ACT_NVFP4" = activations::NVFP4;
        "Q4_ACT_FP8" = activations::FP8;
        "Q4_RULE_TORCHAO" = rule::TORCHAO; "Q4_RULE_MODELOPT" = rule::MODELOPT;
        "Q4_RULE_COMPRESSED_TENSORS" = rule::COMPRESSED_TENSORS;
        "Q4_RULE_TRANSFORMER_ENGINE" = rule::TRANSFORMER_ENGINE; "Q4_RULE_RUNTIME" = rule::RUNTIME;
        "Q4_GLOBAL_NONE" = global_kind::NONE; "Q4_GLOBAL_STATIC" = global_kind::STATIC;
        "Q4_GLOBAL_PER_CALL" = global_kind::PER_CALL; "Q4_GLOBAL_PER_ROW" = global_kind::PER_ROW;
        "Q4_GLOBAL_PER_BLOCK" = global_kind::PER_BLOCK;
        "Q4_CONVENTION_NONE" = convention::NONE; "Q4_CONVENTION_MULTIPLY" = convention::MULTIPLY;
        "Q4_CONVENTION_DIVIDE" = convention::DIVIDE;
        "Q4_SCALE_NONE" = scale_layout::NONE; "Q4_SCALE_ROW_MAJOR" = scale_layout::ROW_MAJOR;
        "Q4_SCALE_128X4" = scale_layout::TILES_128X4;
        "Q4_NIBBLE_NONE" = nibble_order::NONE; "Q4_NIBBLE_LOW_FIRST" = nibble_order::LOW_FIRST;
        "Q4_NIBBLE_HIGH_FIRST" = nibble_order::HIGH_FIRST;
        "Q4_DEVICE_CPU" = DEVICE_CPU; "Q4_DEVICE_CUDA" = DEVICE_CUDA; "Q4_DEVICE_VENDOR" = DEVICE_VENDOR;
    }
}

/// What the crate says, in the form the C program prints.
fn of_the_crate() -> String {
    let mut out = String::new();
    for (c, size, align, fields) in structs() {
        writeln!(out, "{c} {size} align {align}").unwrap();
        for (field, offset, size) in fields {
            writeln!(out, "  {field} {offset} {size}").unwrap();
        }
    }
    for (c, value) in constants() {
        writeln!(out, "{c} {value}").unwrap();
    }
    out
}

fn program() -> String {
    let mut c = String::from(
        "#include \"q4_plugin.h\"\n#include <stdio.h>\n#ifdef __cplusplus\n#define ALIGN alignof\n#else\n#define ALIGN _Alignof\n#endif\nint main(void) {\n",
    );
    for (name, _, _, fields) in structs() {
        writeln!(
            c,
            "{{ {name} s; (void)s; printf(\"{name} %zu align %zu\\n\", sizeof s, (size_t)ALIGN({name}));"
        )
        .unwrap();
        for (field, _, _) in fields {
            writeln!(c, "printf(\"  {field} %zu %zu\\n\", offsetof({name}, {field}), sizeof s.{field});")
                .unwrap();
        }
        c += "}\n";
    }
    for (name, _) in constants() {
        writeln!(c, "printf(\"{name} %lld\\n\", (long long){name});").unwrap();
    }
    c + "return 0; }\n"
}

/// Compiles and runs `source`; `extra` goes before it.
fn output(compiler: &str, extension: &str, extra: &[&str], source: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (file, exe) = (dir.path().join(format!("layout.{extension}")), dir.path().join("layout"));
    std::fs::write(&file, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let compiled = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-pedantic", "-Werror"])
        .args(extra)
        .arg("-I")
        .args([&include, &file])
        .arg("-o")
        .arg(&exe)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    String::from_utf8(Command::new(exe).output().unwrap().stdout).unwrap()
}

#[test]
fn c_sees_what_rust_sees() {
    assert_eq!(output("cc", "c", &["-std=c11"], &program()), of_the_crate());
}

#[test]
fn cxx_sees_what_rust_sees() {
    assert_eq!(output("c++", "cpp", &["-std=c++17"], &program()), of_the_crate());
}

/// What an author's compiler says of the header and of a plugin's outline, under the strictest of the usual
/// flags.
#[test]
fn no_standard_and_no_warning_flag_objects() {
    let outline = "#include \"q4_plugin.h\"\n#include \"q4_plugin.h\"\n\
        Q4_PLUGIN_DESCRIPTOR(\"acme\", \"1.0.0\", \"ACME\");\n\
        static const q4_str NAME = Q4_STR(\"acme\");\n\
        q4_status q4_plugin_query(uint32_t major, uint32_t id, q4_interface *out)\n\
        { (void)major, (void)id; return Q4_HAS(out, table) && NAME.len ? Q4_E_ABI : Q4_E_INVALID; }\n\
        int main(void) { q4_interface i = {sizeof(q4_interface), 0, 0, 0}; return q4_plugin_query(0, 0, &i) != Q4_E_ABI; }\n";
    let strict = ["-Wshadow", "-Wconversion", "-Wstrict-aliasing", "-Wundef", "-fvisibility=hidden"];
    let c = ["c99", "c11", "c17", "gnu99"].map(|s| ("cc", "c", s));
    let cxx = ["c++98", "c++11", "c++14", "c++17", "c++20", "c++23"].map(|s| ("c++", "cpp", s));
    for (compiler, extension, standard) in c.iter().chain(&cxx) {
        let standard = format!("-std={standard}");
        output(compiler, extension, &[&[standard.as_str()], &strict[..]].concat(), outline);
    }
}

/// The macro defines what the loader looks for, also where nothing is exported unless it says so.
#[test]
#[cfg(target_os = "linux")]
fn the_descriptor_is_exported_from_c_and_cxx() {
    let dir = tempfile::tempdir().unwrap();
    for (compiler, extension) in [("cc", "c"), ("c++", "cpp")] {
        let (file, so) = (dir.path().join(format!("d.{extension}")), dir.path().join("d.so"));
        std::fs::write(&file, "#include \"q4_plugin.h\"\nQ4_PLUGIN_DESCRIPTOR(\"acme\", \"1\", \"ACME\");\n")
            .unwrap();
        let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Werror", "-fvisibility=hidden", "-fPIC", "-shared", "-I"]).arg(include);
        let built = command.arg(&file).arg("-o").arg(&so).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let names = Command::new("nm").arg("-D").arg(&so).output().unwrap().stdout;
        assert!(String::from_utf8_lossy(&names).contains(" R q4_plugin_descriptor"), "{compiler}");
    }
}

/// What the header says of formats and machines is what the code of q4 says.
#[test]
fn facts_in_the_header_are_those_of_the_code() {
    let read =
        |path: &str| std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let header = HEADER.replace("\n *", " ").split_whitespace().collect::<Vec<_>>().join(" ");
    let host = read("../../core/src/host.rs");
    // Words in quotes inside of the lists that are asked for.
    let mut words: Vec<&str> = Vec::new();
    for list in host.split("probe!(").skip(1).map(|rest| &rest[..rest.find(')').unwrap()]) {
        words.extend(list.split('"').skip(1).step_by(2));
    }
    words.push("amx-bf16");
    assert!(host.contains("\"amx-bf16\"") && words.len() == 19, "{words:?}");
    let [start, middle, end] =
        ["x86_64 amx", "aarch64 bf16", "Ask for the nearest"].map(|w| header.find(w).unwrap());
    let mut told: Vec<&str> = header[start..middle].split(' ').skip(1).filter(|w| !w.is_empty()).collect();
    told.extend(header[middle..end].split(' ').skip(1).filter(|w| !w.is_empty()));
    words.sort_unstable();
    told.sort_unstable();
    assert_eq!(told, words);
    let nf4 = read("../../core/src/formats/nf4/codec.rs");
    let at = header.find("codebook: ").unwrap() + "codebook: ".len();
    let told: Vec<f32> = header[at..].split([' ', ',']).map_while(|w| w.parse().ok()).collect();
    assert_eq!(told.len(), 16);
    for value in told.iter().filter(|v| v.fract() != 0.0) {
        assert!(nf4.contains(&format!("{value}")), "{value}");
    }
    assert!(
        read("../../core/src/formats/swizzle.rs").contains("(row % 32) * 16 + (row % TILE_ROWS / 32) * 4")
    );
}

#[test]
fn the_first_minor_is_a_prefix() {
    let source = "#include \"q4_plugin.h\"\n#include <stdio.h>\nint main(void) { printf(\"%zu\", sizeof(q4_backend_v1)); return 0; }";
    let size = output("cc", "c", &["-std=c11", "-DQ4_ABI_MINOR=0u"], source);
    assert_eq!(size, <Q4BackendV1 as Prefixed>::MIN.to_string());
}

/// Fields that the lists above forgot would leave a hole, and holes are not allowed: every byte has a name.
#[test]
fn every_byte_of_a_structure_has_a_name() {
    for (c, size, align, fields) in structs() {
        let mut end = 0;
        for (field, offset, bytes) in fields {
            assert_eq!(offset, end, "{c}.{field} begins where the field before it ends");
            end = offset + bytes;
        }
        assert_eq!(end, size, "{c} ends with its last field (alignment {align})");
    }
}

#[test]
fn the_layout_is_what_it_was() {
    if cfg!(target_pointer_width = "64") {
        insta::assert_snapshot!(of_the_crate());
    }
}

#[test]
fn readers_and_writers_of_any_age_understand_each_other() {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Newer {
        now: Q4Interface,
        later: u64,
    }
    let mut newer = Newer {
        now: Q4Interface {
            struct_size: size_of::<Newer>(),
            abi_minor: 9,
            reserved: 0,
            table: std::ptr::null(),
        },
        later: 0xdead,
    };
    // SAFETY: a live structure that is as long as it says.
    let read = |from: &Newer| unsafe { abi::read((&raw const *from).cast::<Q4Interface>()) };
    assert_eq!(
        read(&newer).map(|i| i.abi_minor),
        Some(9),
        "a longer structure is read as far as it is known"
    );
    newer.now.struct_size = <Q4Interface as Prefixed>::MIN;
    assert!(read(&newer).is_some());
    newer.now.struct_size -= 1;
    assert!(read(&newer).is_none(), "shorter than the first version");
    // SAFETY: NULL is allowed.
    assert!(unsafe { abi::read::<Q4Interface>(std::ptr::null()) }.is_none());
    let crooked = (&raw const newer).cast::<u8>().wrapping_add(1).cast::<Q4Interface>();
    // SAFETY: a misaligned pointer is not followed.
    assert!(unsafe { abi::read(crooked) }.is_none());
}
