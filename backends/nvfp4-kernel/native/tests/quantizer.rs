//! Quantising rows, and the product of two operands that are both packed.
#![allow(clippy::unwrap_used)]
mod harness;
use NVFP4::abi;
use harness::{Ctx, Lent, Matrix, Rng, Source, api, call};
use q4_core::formats::nvfp4;
use q4_core::{DType, GlobalScale, Rule};
use std::ptr;

#[test]
fn quantize_is_the_codec_for_every_rule() {
    let ctx = Ctx::new("portable");
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
                let (mut codes, mut scales) = (vec![0u8; m * k / 2], vec![0u8; m * k / 16]);
                let mut out = quantized(&mut codes, &mut scales);
                let exec = Lent::threads(3).exec(&mut []);
                let raw = x.raw();
                // SAFETY: live operands of the stated sizes.
                call(|e| unsafe { api().quantize.unwrap()(ctx.0, &raw, &q, &mut out, &exec, e) }).unwrap();
                let (mut want_c, mut want_s) = (vec![0u8; m * k / 2], vec![0u8; m * k / 16]);
                nvfp4::Quantizer { rule, global, source: dtype }
                    .quantize_row(&values, &mut want_c, &mut want_s)
                    .unwrap();
                assert!(codes == want_c && scales == want_s, "{rule:?} {dtype} {kind}");
                assert_eq!(out.global_convention, harness::convention(global));
                assert_eq!(out.global_scale, global.map_or(0.0, GlobalScale::value));
            }
        }
    }
}

fn quantized(codes: &mut [u8], scales: &mut [u8]) -> abi::Quantized {
    abi::Quantized {
        struct_size: size_of::<abi::Quantized>(),
        codes: codes.as_mut_ptr().cast(),
        codes_bytes: codes.len() as u64,
        scales: scales.as_mut_ptr().cast(),
        scales_bytes: scales.len() as u64,
        global_scale: 0.0,
        global_convention: 0,
    }
}

#[test]
fn quantize_refuses_what_it_cannot_do() {
    let ctx = Ctx::new("portable");
    let x = Matrix::of(&Rng(3).floats(64), 2, 32, DType::F32);
    let q = abi::Quantizer {
        struct_size: size_of::<abi::Quantizer>(),
        rule: 1,
        source_dtype: 0,
        global_kind: 0,
        global_convention: 0,
        global_scale: 0.0,
        reserved: 0,
    };
    let refused = |x: abi::Matrix, q: abi::Quantizer, codes: usize, scales: usize, part: &str| {
        let (mut codes, mut scales) = (vec![0; codes], vec![0; scales]);
        let mut out = quantized(&mut codes, &mut scales);
        // SAFETY: pointers address what the sizes say.
        let e = call(|e| unsafe { api().quantize.unwrap()(ctx.0, &x, &q, &mut out, ptr::null(), e) })
            .expect_err(part);
        assert!(e.text.contains(part), "{part}: {}", e.text);
    };
    refused(x.raw(), q, 31, 4, "32 bytes of codes");
    refused(x.raw(), q, 32, 3, "4 bytes of scales");
    refused(x.raw(), abi::Quantizer { rule: 0, ..q }, 32, 4, "rule 1 to 5");
    refused(x.raw(), abi::Quantizer { source_dtype: 4, ..q }, 32, 4, "source_dtype");
    refused(x.raw(), abi::Quantizer { reserved: 4, ..q }, 32, 4, "reserved");
    refused(x.raw(), abi::Quantizer { global_kind: 1, ..q }, 32, 4, "convention 1 or 2");
    refused(abi::Matrix { cols: 24, ..x.raw() }, q, 32, 4, "k % 16 == 0");
    let mut values = Rng(3).floats(64);
    values[33] = f32::NAN;
    refused(Matrix::of(&values, 2, 32, DType::F32).raw(), q, 32, 4, "x: row 1: need finite");
    let per_call = abi::Quantizer { global_kind: 2, ..q };
    refused(Matrix::of(&values, 2, 32, DType::F32).raw(), per_call, 32, 4, "x: row 1: need finite");
}

#[test]
fn scaled_mm_is_the_product_of_what_its_operands_mean() {
    let mut rng = Rng(4);
    let globals = [None, GlobalScale::multiply(0.02).ok(), GlobalScale::divide(30.0).ok()];
    for (case, (m, n, k)) in [(1, 1, 16), (3, 40, 80), (20, 130, 320)].into_iter().enumerate() {
        let (a, b) = (
            Source::random(m, k, globals[case], &mut rng),
            Source::random(n, k, globals[2 - case], &mut rng),
        );
        let tile = |s: &Source| Source {
            scales: q4_core::formats::swizzle::to_blocked(&s.scales, s.rows, k / 16),
            layout: abi::SCALE_128X4,
            ..s.clone()
        };
        for (isa, ctx) in Ctx::all() {
            let mut first: Option<Vec<u8>> = None;
            for (a, b) in [(a.clone(), b.clone()), (tile(&a), b.clone()), (tile(&a), tile(&b))] {
                for threads in [1, 3] {
                    let y = Matrix::blank(m, n, n + 2, DType::F32);
                    let (exec, raw) = (Lent::threads(threads).exec(&mut []), y.raw());
                    let (sa, sb) = (a.segment(), b.segment());
                    // SAFETY: live operands of the stated sizes.
                    call(|e| unsafe { api().scaled_mm.unwrap()(ctx.0, &sa, &sb, k as u64, &raw, &exec, e) })
                        .unwrap();
                    assert!(y.gaps_are_untouched());
                    assert!(*first.get_or_insert_with(|| y.bytes.clone()) == y.bytes, "{isa}");
                }
            }
            let y = Matrix { bytes: first.unwrap(), ..Matrix::blank(m, n, n + 2, DType::F32) };
            let (va, vb) = (a.values(), b.values());
            for (r, c) in (0..m).flat_map(|r| (0..n).map(move |c| (r, c))) {
                let terms = (0..k).map(|i| f64::from(va[r * k + i]) * f64::from(vb[c * k + i]));
                let (want, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                let bound = (k as f64 / 16.0 + 24.0) * 2f64.powi(-24) * size;
                assert!((f64::from(y.get(r, c)) - want).abs() <= bound, "{isa} m={m} n={n} k={k} ({r}, {c})");
            }
        }
    }
}

#[test]
fn scaled_mm_names_the_operand_that_is_wrong() {
    let ctx = Ctx::new("portable");
    let mut rng = Rng(5);
    let (a, b) = (Source::random(2, 32, None, &mut rng), Source::random(3, 32, None, &mut rng));
    let y = Matrix::blank(2, 3, 3, DType::F32);
    let refused = |a: abi::Segment, b: abi::Segment, k: u64, y: abi::Matrix, part: &str| {
        // SAFETY: pointers are NULL or address what the sizes say.
        let e = call(|e| unsafe { api().scaled_mm.unwrap()(ctx.0, &a, &b, k, &y, ptr::null(), e) })
            .expect_err(part);
        assert!(e.text.contains(part), "{part}: {}", e.text);
    };
    let (sa, sb) = (a.segment(), b.segment());
    refused(abi::Segment { codes: ptr::null(), ..sa }, sb, 32, y.raw(), "a: codes and scales");
    refused(sa, abi::Segment { codes: ptr::null(), ..sb }, 32, y.raw(), "b: need codes and scales");
    refused(sa, sb, 24, y.raw(), "k % 16");
    refused(sa, sb, 48, y.raw(), "bytes of codes");
    refused(sa, sb, 32, abi::Matrix { rows: 1, ..y.raw() }, "y: [2, 3]; have [1, 3]");
    let mut nan = a.clone();
    nan.scales[3] = 0x7f;
    refused(nan.segment(), sb, 32, y.raw(), "a: scale of row 1, block 1");
    refused(sb, nan.segment(), 32, Matrix::blank(3, 2, 2, DType::F32).raw(), "b: scale of row 1, block 1");
}
