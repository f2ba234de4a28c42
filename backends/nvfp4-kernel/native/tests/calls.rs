//! What a caller can get wrong, what the library cannot do, and the calls without a prepared weight.
#![allow(clippy::unwrap_used)]
mod harness;
use NVFP4::abi;
use harness::{
    Ctx, Failure, Lent, Matrix, Reasons, Rng, Scratch, Source, Weight, api, call, collect, ctx_desc,
    weight_desc,
};
use q4_core::DType;
use std::ffi::c_void;
use std::ptr;

fn create(desc: *const abi::CtxDesc) -> (Result<(), Failure>, Reasons) {
    let (mut reasons, mut c) = (Reasons::new(), ptr::null_mut());
    let user: *mut c_void = (&raw mut reasons).cast();
    // SAFETY: a description or NULL.
    let outcome = call(|e| unsafe { api().ctx_create.unwrap()(desc, &mut c, Some(collect), user, e) });
    assert_eq!(outcome.is_err(), c.is_null());
    // SAFETY: NULL or just made.
    unsafe { api().ctx_destroy.unwrap()(c) };
    (outcome, reasons)
}

#[test]
fn contexts_that_cannot_be_had_say_why() {
    let base = ctx_desc();
    let cases = [
        (
            abi::CtxDesc { device_type: abi::DEVICE_CUDA, device: 63, ..base },
            abi::E_UNSUPPORTED,
            "device-absent",
        ),
        (abi::CtxDesc { device: 1, ..base }, abi::E_UNSUPPORTED, "device-absent"),
        (abi::CtxDesc { isa: c"sse9".as_ptr(), ..base }, abi::E_UNSUPPORTED, "kernel-image-missing"),
        (abi::CtxDesc { device_type: 3, ..base }, abi::E_INVALID, "invalid-argument"),
        (abi::CtxDesc { flags: 1, ..base }, abi::E_INVALID, "invalid-argument"),
        (abi::CtxDesc { reserved: 1, ..base }, abi::E_INVALID, "invalid-argument"),
    ];
    for (desc, status, code) in cases {
        let (outcome, reasons) = create(&desc);
        assert_eq!(outcome.unwrap_err().status, status, "{desc:?}");
        assert_eq!(reasons.iter().map(|r| r[0].as_str()).collect::<Vec<_>>(), [code], "{desc:?}");
    }
    for isa in [c"portable", c"avx2", c"avx512", c"avx512vnni", c"amx", c"neon", c"neondotprod", c"neoni8mm"]
    {
        let has = harness::available().iter().any(|a| a.as_bytes() == isa.to_bytes());
        let (outcome, reasons) = create(&abi::CtxDesc { isa: isa.as_ptr(), ..base });
        assert_eq!(outcome.is_ok(), has, "{isa:?}");
        assert!(has || reasons[0][0] == "device-arch", "{reasons:?}");
    }
    assert_eq!(create(ptr::null()).0.unwrap_err().status, abi::E_INVALID);
    assert_eq!(create(&abi::CtxDesc { struct_size: 4, ..base }).0.unwrap_err().status, abi::E_INVALID);
    // SAFETY: `out` may be NULL in a wrong call.
    let no_out =
        call(|e| unsafe { api().ctx_create.unwrap()(&base, ptr::null_mut(), None, ptr::null_mut(), e) });
    assert_eq!(no_out.unwrap_err().text, "out: need a pointer; have NULL");
}

#[test]
fn the_cpu_fuses_no_norm_and_says_so() {
    let ctx = Ctx::new("portable");
    let source = Source::random(16, 64, None, &mut Rng(1));
    let segments = [source.segment()];
    let w = Weight::new(&ctx, &weight_desc(&segments, 64)).unwrap();
    let x = Matrix::of(&Rng(2).floats(2 * 64), 2, 64, DType::F32);
    let mut plain = Matrix::blank(2, 16, 16, DType::F32);
    w.forward(&x, &mut plain, &Lent::serial()).unwrap();
    let norm = [1f32; 64];
    // (parts, is a norm's weight given, status)
    for (parts, has_norm, status) in [
        (0, false, abi::OK),
        (0, true, abi::E_INVALID),
        (abi::FUSE_NORM, false, abi::E_INVALID),
        (abi::FUSE_NORM, true, abi::E_UNSUPPORTED),
        (abi::FUSE_NORM | abi::FUSE_ACCUMULATE, true, abi::E_UNSUPPORTED),
        (abi::FUSE_ACCUMULATE, false, abi::OK),
        (8, false, abi::E_INVALID),
    ] {
        let fusion = abi::Fusion {
            struct_size: size_of::<abi::Fusion>(),
            parts,
            norm_eps: 1e-6,
            norm_weight: if has_norm { norm.as_ptr().cast() } else { ptr::null() },
        };
        let y = Matrix::blank(2, 16, 16, DType::F32);
        let (raw_x, raw_y, exec) = (x.raw(), y.raw(), Lent::serial().exec(&mut []));
        // SAFETY: live operands of the stated sizes.
        let outcome =
            call(|e| unsafe { api().forward_fused.unwrap()(w.0, &raw_x, &fusion, &raw_y, &exec, e) });
        assert_eq!(outcome.map_or_else(|f| f.status, |()| abi::OK), status, "{parts} {has_norm}");
        if status == abi::OK && parts == 0 {
            assert_eq!(y.bytes, plain.bytes);
        }
        // SAFETY: a live weight.
        let fuses = unsafe { api().fuses.unwrap()(w.0, 2, parts) };
        assert_eq!(fuses, i32::from(status == abi::OK || parts == 0), "{parts}");
    }
}

#[test]
fn structs_of_other_versions_are_read_by_their_size() {
    // Older: what it does not have is zero. Here that leaves `isa` NULL, so garbage behind it must not be
    // read.
    let old = abi::CtxDesc { struct_size: 24, isa: ptr::dangling(), ..ctx_desc() };
    create(&old).0.unwrap();
    // Newer: bytes behind ours are ignored, and not written.
    #[repr(C)]
    struct Newer(abi::DeviceInfo, [u8; 40]);
    // SAFETY: all-zero is a valid value.
    let mut info = Newer(unsafe { std::mem::zeroed() }, [0xab; 40]);
    info.0.struct_size = size_of::<Newer>();
    let ctx = Ctx::new("portable");
    // SAFETY: valid arguments.
    call(|e| unsafe { api().device_info.unwrap()(ctx.0, &mut info.0, e) }).unwrap();
    assert_eq!((info.0.struct_size, info.1), (size_of::<Newer>(), [0xab; 40]));
    assert_eq!((info.0.paths, info.0.activations), (1 << abi::PATH_FUSED_DEQUANT, 0b1110));
    // Shorter than ours: only so much is written.
    let mut short = Newer(info.0, [0; 40]);
    (short.0.struct_size, short.0.build) = (size_of::<abi::DeviceInfo>() - 64, [7; 64]);
    // SAFETY: valid arguments.
    call(|e| unsafe { api().device_info.unwrap()(ctx.0, &mut short.0, e) }).unwrap();
    assert_eq!(short.0.build, [7; 64]);
    // Segments lie as far apart as the caller's struct is long.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Longer(abi::Segment, u64);
    let mut rng = Rng(1);
    let parts = [3, 18].map(|rows| Source::random(rows, 32, None, &mut rng));
    let mut long = parts.each_ref().map(|p| Longer(p.segment(), u64::MAX));
    long.iter_mut().for_each(|s| s.0.struct_size = size_of::<Longer>());
    let plain = parts.each_ref().map(Source::segment);
    let mut out = [Matrix::blank(21, 32, 32, DType::F32), Matrix::blank(21, 32, 32, DType::F32)];
    let desc = weight_desc(&plain, 32);
    Weight::new(&ctx, &desc).unwrap().dequantize(&mut out[0], &Lent::serial()).unwrap();
    let desc = abi::WeightDesc { segments: long.as_ptr().cast(), ..desc };
    Weight::new(&ctx, &desc).unwrap().dequantize(&mut out[1], &Lent::serial()).unwrap();
    assert!(out[0].bytes == out[1].bytes);
}

#[test]
fn an_error_text_is_cut_and_its_length_is_not() {
    let mut buffer = [0x55u8; 16];
    let mut e = abi::Error {
        struct_size: size_of::<abi::Error>(),
        ptr: buffer.as_mut_ptr().cast(),
        cap: 8,
        len: 0,
        native_code: 1,
    };
    // SAFETY: a wrong call with a valid error.
    let status = unsafe { api().empty_cache.unwrap()(ptr::null_mut(), &mut e) };
    assert_eq!((status, e.len, e.native_code), (abi::E_INVALID, "ctx: need a pointer; have NULL".len(), 0));
    assert_eq!(&buffer, b"ctx: ne\0UUUUUUUU");
    // SAFETY: no error at all is allowed.
    assert_eq!(unsafe { api().empty_cache.unwrap()(ptr::null_mut(), ptr::null_mut()) }, abi::E_INVALID);
}

fn can_prepare(ctx: &Ctx, desc: &abi::WeightDesc) -> (Result<(), Failure>, Reasons) {
    let mut reasons = Reasons::new();
    let user: *mut c_void = (&raw mut reasons).cast();
    // SAFETY: a description whose segments live.
    let outcome = call(|e| unsafe { api().can_prepare.unwrap()(ctx.0, desc, Some(collect), user, e) });
    (outcome, reasons)
}

#[test]
fn can_prepare_gives_every_reason_and_agrees_with_prepare() {
    let ctx = Ctx::new("portable");
    let source = Source::random(4, 32, None, &mut Rng(1));
    let segments = [source.segment()];
    let good = weight_desc(&segments, 32);
    assert_eq!(can_prepare(&ctx, &good), (Ok(()), Reasons::new()));
    let unread = [abi::Segment { codes: ptr::null(), scales: ptr::null(), ..segments[0] }];
    assert_eq!(can_prepare(&ctx, &abi::WeightDesc { segments: unread.as_ptr(), ..good }).0, Ok(()));

    let short = [abi::Segment { codes_bytes: 63, scales_bytes: 7, ..segments[0] }];
    let bad = abi::WeightDesc {
        n: 5,
        segments: short.as_ptr(),
        path: abi::PATH_NATIVE,
        x_dtype: 9,
        y_dtype: 0,
        activations: abi::ACT_INT8,
        act_rule: abi::RULE_MODELOPT,
        max_m: 0,
        reserved: 1,
        ..good
    };
    let (outcome, reasons) = can_prepare(&ctx, &bad);
    let all: Vec<_> =
        reasons.iter().map(|[code, need, have]| format!("{code}: need {need}; have {have}")).collect();
    assert_eq!(outcome, Err(Failure { status: abi::E_INVALID, text: all.join("\n") }));
    for part in [
        "max_m > 0",
        "64 bytes of codes",
        "8 bytes of scales",
        "n = 5 rows",
        "tensor cores",
        "x_dtype",
        "y_dtype",
        "act_rule",
        "3 (nvfp4) on the native path",
    ] {
        assert_eq!(all.iter().filter(|r| r.contains(part)).count(), 1, "{part} in {all:#?}");
    }
    assert_eq!(all.len(), 10, "{all:#?}");
    assert_eq!(Weight::new(&ctx, &bad).err(), outcome.err(), "prepare refuses with the same words");

    let limits = abi::WeightDesc { k: 40, path: abi::PATH_DEQUANT_MATMUL, segments: unread.as_ptr(), ..good };
    let (outcome, reasons) = can_prepare(&ctx, &limits);
    assert_eq!(outcome.unwrap_err().status, abi::E_UNSUPPORTED);
    assert_eq!(
        reasons.iter().map(|r| r[0].as_str()).collect::<Vec<_>>(),
        ["shape-unsupported", "path-unsupported"]
    );
}

#[test]
fn wrong_descriptions_are_refused() {
    let ctx = Ctx::new("portable");
    let source = Source::random(4, 32, None, &mut Rng(1));
    let s = source.segment();
    let refused = |segments: &[abi::Segment], change: &dyn Fn(&mut abi::WeightDesc), part: &str| {
        let mut desc = weight_desc(segments, 32);
        change(&mut desc);
        let e = Weight::new(&ctx, &desc).err().unwrap_or_else(|| panic!("taken: {part}"));
        assert_eq!(e.status, abi::E_INVALID, "{e:?}");
        assert!(
            e.text.contains(part) && e.text.contains("need ") && e.text.contains("have "),
            "{part}: {e:?}"
        );
    };
    let segment = |s: abi::Segment, part: &str| refused(&[s], &|_| {}, part);
    segment(abi::Segment { codes: ptr::null(), ..s }, "segment 0: need codes and scales");
    segment(abi::Segment { scales: ptr::null(), ..s }, "segment 0: need codes and scales");
    segment(abi::Segment { codes_bytes: 63, ..s }, "64 bytes of codes");
    segment(abi::Segment { scales_bytes: 7, ..s }, "8 bytes of scales");
    segment(abi::Segment { scale_layout: abi::SCALE_128X4, ..s }, "512 bytes of scales");
    segment(abi::Segment { scale_layout: 0, ..s }, "scale_layout");
    segment(abi::Segment { reserved: 1, ..s }, "reserved");
    refused(&[s, abi::Segment { rows: 0, ..s }], &|_| {}, "segment 1: rows > 0");
    segment(abi::Segment { rows: u64::MAX, ..s }, "address space");
    segment(abi::Segment { struct_size: 0, ..s }, "struct_size");
    segment(abi::Segment { global_convention: 3, ..s }, "convention 0, 1 or 2");
    segment(abi::Segment { global_scale: 1.0, ..s }, "without a convention");
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        segment(
            abi::Segment { global_scale: value, global_convention: abi::CONVENTION_MULTIPLY, ..s },
            "finite and above 0",
        );
    }
    let other = abi::Segment { struct_size: size_of::<abi::Segment>() - 4, ..s };
    refused(&[s, other], &|_| {}, "struct_size = 64, as the first");
    let desc = |change: &dyn Fn(&mut abi::WeightDesc), part: &str| refused(&[s], change, part);
    desc(&|d| d.n = 0, "n > 0");
    desc(&|d| d.n = u64::MAX, "address space");
    desc(&|d| d.k = 0, "k > 0");
    desc(&|d| d.k = u64::MAX - 15, "address space");
    desc(&|d| (d.n, d.k) = (1 << 40, 1 << 40), "address space");
    desc(&|d| d.max_m = 0, "max_m > 0");
    desc(&|d| d.segments = ptr::null(), "one to n; have NULL");
    desc(&|d| d.n_segments = 0, "one to n");
    desc(&|d| d.n_segments = u64::MAX, "one to n");
    desc(&|d| d.path = 0, "path 1, 2 or 3");
    desc(&|d| d.activations = 4, "activations");
    desc(&|d| d.act_global_kind = 1, "act_rule and act_global*");
    desc(&|d| d.struct_size = 16, "segments");
    let act = |change: &dyn Fn(&mut abi::WeightDesc), part: &str| {
        let with_rule = |d: &mut abi::WeightDesc| {
            (d.activations, d.act_rule) = (abi::ACT_NVFP4, abi::RULE_MODELOPT);
            change(d);
        };
        refused(&[s], &with_rule, part);
    };
    act(&|d| d.act_rule = 6, "rule 1 to 5");
    act(&|d| d.act_global_kind = 3, "global kind");
    act(&|d| d.act_global = 1.0, "no per-tensor scale");
    act(&|d| (d.act_global_kind, d.act_global_convention) = (2, 1), "no per-tensor scale");
    act(&|d| d.act_global_kind = 1, "convention 1 or 2");
    act(
        &|d| (d.act_global_kind, d.act_global, d.act_global_convention) = (1, 1.0, 2),
        "convention of modelopt",
    );
    act(&|d| (d.act_global_kind, d.act_global, d.act_global_convention) = (1, f32::NAN, 1), "finite");
    let w = Weight::new(&ctx, &abi::WeightDesc { k: 24, ..weight_desc(&[s], 32) });
    assert_eq!(w.err().map(|e| e.status), Some(abi::E_UNSUPPORTED));
}

#[test]
fn scales_that_are_nan_or_negative_are_refused_with_their_place() {
    let ctx = Ctx::new("portable");
    for lent in [Lent::serial(), Lent::threads(3)] {
        for byte in [0x7f, 0x80, 0x81, 0xff] {
            let (first, mut second) =
                (Source::random(4, 64, None, &mut Rng(1)), Source::random(40, 64, None, &mut Rng(2)));
            (second.scales[4 * 9 + 2], second.scales[4 * 30]) = (byte, byte);
            let tiled = Source {
                scales: q4_core::formats::swizzle::to_blocked(&second.scales, 40, 4),
                layout: abi::SCALE_128X4,
                ..second.clone()
            };
            for second in [second, tiled] {
                let segments = [first.segment(), second.segment()];
                let e = Weight::with(&ctx, &weight_desc(&segments, 64), &lent).err().unwrap();
                assert_eq!(e.status, abi::E_INVALID);
                assert!(e.text.starts_with("segment 1: scale of row 9, block 2: need"), "{}", e.text);
                assert!(e.text.ends_with(&format!("have {byte:#04x}")), "{}", e.text);
            }
        }
    }
}

#[test]
fn wrong_operands_are_refused_and_nothing_is_written() {
    let ctx = Ctx::new("portable");
    let source = Source::random(20, 32, None, &mut Rng(1));
    let segments = [source.segment()];
    let mut desc = weight_desc(&segments, 32);
    (desc.activations, desc.max_m) = (abi::ACT_INT8, 2);
    let w = Weight::new(&ctx, &desc).unwrap();
    let (x, y) = (Matrix::of(&Rng(2).floats(64), 2, 32, DType::F32), Matrix::blank(2, 20, 20, DType::F32));
    let mut scratch = Scratch::new(w.workspace(2));
    let exec = Lent::serial().exec(scratch.bytes());
    let run = |x: &abi::Matrix, y: &abi::Matrix, exec: *const abi::Exec| {
        // SAFETY: pointers are NULL or address what the sizes say; wrong ones must be refused before use.
        call(|e| unsafe { api().forward.unwrap()(w.0, x, y, exec, e) })
    };
    let (good_x, good_y) = (x.raw(), y.raw());
    let refused = |x: abi::Matrix, y: abi::Matrix, exec: *const abi::Exec, part: &str| {
        let e = run(&x, &y, exec).expect_err(part);
        assert_eq!(e.status, abi::E_INVALID);
        assert!(
            e.text.contains(part) && e.text.contains("need ") && e.text.contains("have "),
            "{part}: {}",
            e.text
        );
    };
    for (changed, part) in [
        (abi::Matrix { data: ptr::null_mut(), ..good_x }, "x: need data"),
        (abi::Matrix { data: good_x.data.wrapping_byte_add(1), ..good_x }, "aligned to 4 bytes"),
        (abi::Matrix { bytes: 255, ..good_x }, "x: need 256 bytes; have 255 bytes"),
        (abi::Matrix { ld: 31, ..good_x }, "x: need ld >= 32; have 31"),
        (abi::Matrix { ld: u64::MAX, ..good_x }, "address space"),
        (abi::Matrix { ld: u64::MAX / 4, ..good_x }, "address space"),
        (abi::Matrix { rows: 0, ..good_x }, "at least one row"),
        (abi::Matrix { rows: u64::MAX, ..good_x }, "address space"),
        (abi::Matrix { cols: 16, ..good_x }, "32 columns; have [2, 16]"),
        (abi::Matrix { dtype: 0, ..good_x }, "dtype"),
        (abi::Matrix { dtype: abi::BF16, ..good_x }, "x: need float32; have bfloat16"),
        (abi::Matrix { reserved: 1, ..good_x }, "reserved"),
        (abi::Matrix { rows: 1, ..good_x }, "the same number of rows"),
        (abi::Matrix { struct_size: 0, ..good_x }, "struct_size"),
    ] {
        refused(changed, good_y, &exec, part);
    }
    refused(good_x, abi::Matrix { cols: 21, ..good_y }, &exec, "20 columns");
    refused(good_x, abi::Matrix { bytes: 159, ..good_y }, &exec, "y: need 160 bytes");
    refused(good_x, good_y, ptr::null(), "workspace: need");
    refused(good_x, good_y, &abi::Exec { workspace: ptr::null_mut(), ..exec }, "have 0 bytes");
    refused(
        good_x,
        good_y,
        &abi::Exec { workspace_bytes: exec.workspace_bytes - 1, ..exec },
        "workspace: need",
    );
    refused(
        good_x,
        good_y,
        &abi::Exec { workspace: exec.workspace.wrapping_byte_add(32), ..exec },
        "64-byte alignment",
    );
    refused(good_x, good_y, &abi::Exec { reserved: 1, ..exec }, "exec: need reserved");
    let three = Matrix::of(&Rng(2).floats(96), 3, 32, DType::F32);
    let out = Matrix::blank(3, 20, 20, DType::F32);
    refused(three.raw(), out.raw(), &exec, "at most max_m = 2");
    assert!(y.bytes.iter().chain(&out.bytes).all(|&b| b == harness::POISON), "y was written");
    for (i, bad) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
        let mut values = Rng(2).floats(64);
        values[32 + i] = bad;
        refused(Matrix::of(&values, 2, 32, DType::F32).raw(), good_y, &exec, "x: row 1: need finite");
    }
    run(&good_x, &good_y, &exec).unwrap();
    // SAFETY: NULL handles must be refused.
    unsafe {
        let f = api().forward.unwrap();
        assert_eq!(f(ptr::null(), &good_x, &good_y, &exec, ptr::null_mut()), abi::E_INVALID);
        assert_eq!(f(w.0, ptr::null(), &good_y, &exec, ptr::null_mut()), abi::E_INVALID);
        assert_eq!(f(w.0, &good_x, ptr::null(), &exec, ptr::null_mut()), abi::E_INVALID);
        assert_eq!(api().workspace.unwrap()(ptr::null(), 1), 0);
        assert_eq!(api().workspace.unwrap()(w.0, u64::MAX), u64::MAX);
        api().release.unwrap()(ptr::null_mut());
    }
}

#[test]
fn not_a_number_spreads_where_nothing_is_quantised() {
    let source = Source::random(20, 32, None, &mut Rng(1));
    for (isa, ctx) in Ctx::all() {
        let mut values = Rng(2).floats(64);
        values[40] = f32::NAN;
        let mut y = Matrix::blank(2, 20, 20, DType::F32);
        let segments = [source.segment()];
        let w = Weight::new(&ctx, &weight_desc(&segments, 32)).unwrap();
        w.forward(&Matrix::of(&values, 2, 32, DType::F32), &mut y, &Lent::serial()).unwrap();
        let y = y.values();
        assert!(y[..20].iter().all(|v| v.is_finite()) && y[20..].iter().all(|v| v.is_nan()), "{isa}");
    }
}

/// Leaves out the last task.
unsafe extern "C" fn lazy(_: *mut c_void, tasks: usize, body: abi::TaskFn, arg: *mut c_void) {
    // SAFETY: the library's own body and argument.
    (1..tasks).for_each(|t| unsafe { body(arg, t) });
}

#[test]
fn threads_that_leave_work_undone_are_an_error() {
    let ctx = Ctx::new("portable");
    let source = Source::random(200, 32, None, &mut Rng(1));
    let segments = [source.segment()];
    let w = Weight::new(&ctx, &weight_desc(&segments, 32)).unwrap();
    let (x, y) = (Matrix::of(&[1.0; 32], 1, 32, DType::F32), Matrix::blank(1, 200, 200, DType::F32));
    let exec = abi::Exec { parallel: Some(lazy), threads: 2, ..Lent::serial().exec(&mut []) };
    let (x, y) = (x.raw(), y.raw());
    // SAFETY: live operands.
    let e = call(|e| unsafe { api().forward.unwrap()(w.0, &x, &y, &exec, e) }).unwrap_err();
    assert_eq!(e.status, abi::E_INTERNAL);
    assert!(e.text.starts_with("parallel: need"), "{}", e.text);
}

#[test]
fn memory_is_what_the_format_needs() {
    let ctx = Ctx::new("portable");
    let (n, k, m) = (512, 4096, 8);
    let source = Source::random(n, k, None, &mut Rng(1));
    let segments = [source.segment()];
    for (activations, x_dtype, bytes) in [
        (abi::ACT_NATIVE, abi::F32, 0),
        (abi::ACT_NATIVE, abi::BF16, 4 * m * k),
        (abi::ACT_INT8, abi::BF16, m * k + m * k / 2),
    ] {
        let desc = abi::WeightDesc { activations, x_dtype, ..weight_desc(&segments, k) };
        let w = Weight::new(&ctx, &desc).unwrap();
        assert_eq!(w.workspace(m), bytes);
        // SAFETY: a live weight.
        let resident = unsafe { api().weight_bytes.unwrap()(w.0) };
        assert!((n * k * 9 / 16..n * k * 9 / 16 + 1024).contains(&(resident as usize)), "{resident}");
    }
}

#[test]
fn there_is_no_managed_memory_on_a_cpu_and_no_cache() {
    let ctx = Ctx::new("portable");
    let (mut reasons, mut p) = (Reasons::new(), ptr::null_mut());
    let user: *mut c_void = (&raw mut reasons).cast();
    let t = api();
    // SAFETY: valid arguments.
    unsafe {
        let e = call(|e| t.managed_supported.unwrap()(ctx.0, Some(collect), user, e)).unwrap_err();
        assert_eq!((e.status, reasons[0][0].as_str()), (abi::E_UNSUPPORTED, "device-arch"));
        let e = call(|e| t.managed_alloc.unwrap()(ctx.0, 64, &mut p, e)).unwrap_err();
        assert_eq!((e.status, p), (abi::E_UNSUPPORTED, ptr::null_mut()));
        call(|e| t.managed_free.unwrap()(ctx.0, ptr::null_mut(), e)).unwrap();
        assert_eq!(t.managed_is.unwrap()(ctx.0, user), 0);
        let e = call(|e| t.managed_prefetch.unwrap()(ctx.0, user, 8, 0, ptr::null_mut(), e)).unwrap_err();
        assert_eq!(e.status, abi::E_UNSUPPORTED);
        call(|e| t.empty_cache.unwrap()(ctx.0, e)).unwrap();
    }
}
