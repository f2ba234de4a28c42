//! What only a device can show: the raw calls on device memory, managed memory, and how failures are told.
//! Products are the suite's.
#![allow(clippy::unwrap_used)]
mod harness;
use NVFP4::abi;
use harness::{Ctx, Matrix, Reasons, Rng, Source, Weight, api, call, collect, ctx_desc, weight_desc};
use q4_core::formats::nvfp4;
use q4_core::{DType, GlobalScale, Rule};
use q4_cuda::{Buffer, Gpu};
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

/// A context on cuda:0; `None`, said in words, without a device.
fn device(flags: u32) -> Option<(Ctx, Arc<Gpu>)> {
    let gpu = match q4_cuda::devices().map(|all| all.len()) {
        Ok(1..) => Gpu::open(0).unwrap(),
        other => {
            println!("skipped: no CUDA device ({other:?})");
            return None;
        }
    };
    let desc = abi::CtxDesc { device_type: abi::DEVICE_CUDA, flags, ..ctx_desc() };
    let mut c = ptr::null_mut();
    // SAFETY: valid arguments.
    call(|e| unsafe { api().ctx_create.unwrap()(&desc, &mut c, None, ptr::null_mut(), e) }).unwrap();
    Some((Ctx(c), gpu))
}

fn exec() -> abi::Exec {
    harness::Lent::threads(3).exec(&mut [])
}

/// `m` in device memory.
fn up(gpu: &Arc<Gpu>, m: &Matrix) -> (Buffer, abi::Matrix) {
    let b = Buffer::of(gpu, &m.bytes).unwrap();
    let raw = abi::Matrix { data: b.ptr() as *mut c_void, ..m.raw() };
    (b, raw)
}

#[test]
fn a_device_that_is_not_there_is_refused_with_reasons() {
    let desc = abi::CtxDesc { device_type: abi::DEVICE_CUDA, device: 63, ..ctx_desc() };
    let (mut c, mut reasons) = (ptr::null_mut(), Reasons::new());
    let user = (&raw mut reasons).cast();
    // SAFETY: valid arguments.
    let refused = call(|e| unsafe { api().ctx_create.unwrap()(&desc, &mut c, Some(collect), user, e) });
    assert_eq!(refused.unwrap_err().status, abi::E_UNSUPPORTED);
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    assert_eq!(reasons[0][0], "device-absent");
    if q4_cuda::libraries().driver.version().is_err() {
        assert!(reasons[0][2].contains("libcuda.so.1"), "{reasons:?}");
    }
}

#[test]
fn quantize_is_the_codec_on_the_device() {
    let Some((ctx, gpu)) = device(0) else { return };
    let (m, k) = (3, 1040);
    for rule in Rule::ALL {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let x = Matrix::of(&Rng(3).floats(m * k), m, k + 1, dtype);
            let values = x.values();
            let amax = values.iter().fold(0f32, |a, v| a.max(v.abs()));
            let found = nvfp4::global_from_amax(rule, amax, dtype).unwrap();
            let stated = GlobalScale::new(rule.convention(), 0.5).unwrap();
            for (kind, global) in [(0, None), (1, Some(stated)), (2, Some(found))] {
                let q = abi::Quantizer {
                    struct_size: size_of::<abi::Quantizer>(),
                    rule: 1 + Rule::ALL.iter().position(|r| *r == rule).unwrap() as u32,
                    source_dtype: 0,
                    global_kind: kind,
                    global_convention: if kind == 1 { harness::convention(global) } else { 0 },
                    global_scale: if kind == 1 { 0.5 } else { 0.0 },
                    reserved: 0,
                };
                let (_keep, raw) = up(&gpu, &x);
                let codes = Buffer::zeroed(&gpu, m * k / 2).unwrap();
                let scales = Buffer::zeroed(&gpu, m * k / 16).unwrap();
                let mut out = abi::Quantized {
                    struct_size: size_of::<abi::Quantized>(),
                    codes: codes.ptr() as *mut c_void,
                    codes_bytes: codes.len() as u64,
                    scales: scales.ptr() as *mut c_void,
                    scales_bytes: scales.len() as u64,
                    global_scale: 0.0,
                    global_convention: 0,
                };
                // SAFETY: live operands of the stated sizes.
                call(|e| unsafe { api().quantize.unwrap()(ctx.0, &raw, &q, &mut out, &exec(), e) }).unwrap();
                let (mut have_c, mut have_s) = (vec![0u8; m * k / 2], vec![0u8; m * k / 16]);
                codes.download(0, &mut have_c).unwrap();
                scales.download(0, &mut have_s).unwrap();
                let (mut want_c, mut want_s) = (vec![0u8; m * k / 2], vec![0u8; m * k / 16]);
                nvfp4::Quantizer { rule, global, source: dtype }
                    .quantize_row(&values, &mut want_c, &mut want_s)
                    .unwrap();
                assert!(have_c == want_c && have_s == want_s, "{rule:?} {dtype} {kind}");
                assert_eq!(out.global_scale, global.map_or(0.0, GlobalScale::value));
            }
        }
    }
}

#[test]
fn scaled_mm_multiplies_stored_operands_from_host_and_device_memory() {
    let Some((ctx, gpu)) = device(0) else { return };
    let (m, n, k) = (5, 37, 272);
    let a = Source::random(m, k, Some(GlobalScale::multiply(0.25).unwrap()), &mut Rng(1));
    let b = Source::random(n, k, Some(GlobalScale::divide(3.0).unwrap()), &mut Rng(2));
    let (wa, wb) = (a.values(), b.values());
    let codes = Buffer::of(&gpu, &a.codes).unwrap();
    let on_device = abi::Segment { codes: codes.ptr() as *const c_void, ..a.segment() };
    for a in [a.segment(), on_device] {
        let blank = Matrix::blank(m, n, n + 3, DType::F32);
        let (y, raw) = up(&gpu, &blank);
        // SAFETY: live operands of the stated sizes.
        call(|e| unsafe { api().scaled_mm.unwrap()(ctx.0, &a, &b.segment(), k as u64, &raw, &exec(), e) })
            .unwrap();
        let mut have = blank.clone();
        y.download(0, &mut have.bytes).unwrap();
        assert!(have.gaps_are_untouched());
        for i in 0..m {
            for j in 0..n {
                let terms = (0..k).map(|t| f64::from(wa[i * k + t]) * f64::from(wb[j * k + t]));
                let (want, size) = terms.fold((0.0, 0.0), |(s, z), t| (s + t, z + t.abs()));
                let off = (f64::from(have.get(i, j)) - want).abs();
                assert!(off <= size * 64.0 * 0.5f64.powi(24), "[{i}, {j}]: {off:e} of {size:e}");
            }
        }
    }
}

#[test]
fn managed_memory_keeps_its_contract() {
    let Some((ctx, gpu)) = device(abi::CTX_MANAGED) else { return };
    let (api, mut p) = (api(), ptr::null_mut());
    // SAFETY: valid arguments throughout; `p` is freed once.
    unsafe {
        call(|e| api.managed_supported.unwrap()(ctx.0, None, ptr::null_mut(), e)).unwrap();
        call(|e| api.managed_alloc.unwrap()(ctx.0, 1 << 20, &mut p, e)).unwrap();
        assert_eq!(api.managed_is.unwrap()(ctx.0, p), 1);
        assert_eq!(api.managed_is.unwrap()(ctx.0, (&raw const p).cast()), 0);
        p.cast::<u8>().write_bytes(7, 1 << 20);
        call(|e| api.managed_prefetch.unwrap()(ctx.0, p, 1 << 20, 0, ptr::null_mut(), e)).unwrap();
        gpu.synchronize().unwrap();
        assert_eq!(p.cast::<u8>().add(12345).read(), 7);
        call(|e| api.managed_free.unwrap()(ctx.0, p, e)).unwrap();
        // More than there is is refused before the driver is asked.
        let total = gpu.memory().unwrap().1;
        let refused = call(|e| api.managed_alloc.unwrap()(ctx.0, total, &mut p, e)).unwrap_err();
        assert_eq!(refused.status, abi::E_NOMEM, "{}", refused.text);
    }
    let source = Source::random(48, 128, None, &mut Rng(5));
    let segments = [source.segment()];
    let w = Weight::new(&ctx, &weight_desc(&segments, 128)).unwrap();
    let (out, raw) = up(&gpu, &Matrix::blank(48, 128, 128, DType::F32));
    // SAFETY: live operands of the stated sizes.
    call(|e| unsafe { api.dequantize.unwrap()(w.0, &raw, &exec(), e) }).unwrap();
    gpu.synchronize().unwrap();
    let mut have = vec![0f32; 48 * 128];
    out.download(0, &mut have).unwrap();
    assert_eq!(have, source.values());
}

#[test]
fn a_bad_scale_is_named_and_the_next_weight_works() {
    let Some((ctx, _)) = device(0) else { return };
    let mut source = Source::random(40, 128, None, &mut Rng(5));
    source.scales[17 * 8 + 3] = 0x7f;
    let segments = [source.segment()];
    let refused = Weight::new(&ctx, &weight_desc(&segments, 128)).err().unwrap();
    assert_eq!(refused.status, abi::E_INVALID);
    assert!(refused.text.contains("scale of row 17, block 3"), "{}", refused.text);
    source.scales[17 * 8 + 3] = 0x38;
    let segments = [source.segment()];
    assert!(Weight::new(&ctx, &weight_desc(&segments, 128)).is_ok());
}
