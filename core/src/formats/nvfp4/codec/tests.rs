//! Hand-computed blocks of the quantisers, and the mistakes that decoders of this format have made before.
use super::*;
use crate::Convention;

const PLAIN: Quantizer = Quantizer { rule: Rule::TorchAo, global: None, source: DType::F32 };
const RUNTIME: Quantizer = Quantizer { rule: Rule::Runtime, ..PLAIN };

fn block(q: Quantizer, x: &[f32]) -> (u8, [u8; 8]) {
    let (mut codes, mut scale) = ([0; 8], [0]);
    q.quantize_row(x, &mut codes, &mut scale).expect("finite, right lengths");
    (scale[0], codes)
}

fn ramp(step: f32) -> Vec<f32> {
    (0..16).map(|i| step * (i as f32 - 8.0)).collect()
}

#[test]
fn hand_computed_blocks_of_both_single_level_rules() {
    let table = [0., 0.5, 1., 1.5, 2., 3., 4., 6., -0.5, -1., -1.5, -2., -3., -4., -6., 0.24];
    let want = (0x38, [0x10, 0x32, 0x54, 0x76, 0xa9, 0xcb, 0xed, 0x0f]);
    assert_eq!(block(RUNTIME, &table), want);
    assert_eq!(block(PLAIN, &table), want);

    let mut ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0].repeat(2);
    ties[8..].iter_mut().for_each(|v| *v = -*v);
    assert_eq!(block(PLAIN, &ties), (0x38, [0x20, 0x42, 0x64, 0x76, 0xa8, 0xca, 0xec, 0xfe]));
    // 1 + 1e-12 is 1 in f32, so these are ties; any larger step (as f64 would have) puts them below their
    // thresholds.
    assert_eq!(block(RUNTIME, &ties), (0x38, [0x21, 0x43, 0x65, 0x77, 0xa9, 0xcb, 0xed, 0xff]));
    for v in ties.iter_mut().filter(|v| v.abs() < 6.0) {
        *v = if *v > 0.0 { v.next_down() } else { v.next_up() };
    }
    assert_eq!(block(RUNTIME, &ties), (0x38, [0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe]));

    assert_eq!(block(RUNTIME, &ramp(0.01)), (0x07, [0xff, 0xee, 0xcd, 0x9b, 0x10, 0x43, 0x65, 0x76]));
    assert_eq!(block(PLAIN, &ramp(0.01)), (0x08, [0xef, 0xde, 0xcd, 0x9b, 0x10, 0x43, 0x55, 0x66]));
    assert_eq!(block(RUNTIME, &ramp(0.001)), (0x01, [0xee, 0xdd, 0xbc, 0x9a, 0x10, 0x32, 0x54, 0x65]));
    assert_eq!(block(PLAIN, &ramp(0.001)), (0x08, [0x99, 0x99, 0x89, 0x88, 0x00, 0x00, 0x11, 0x11]));
    assert_eq!(block(RUNTIME, &[1e-4; 16]), (0x00, [0x77; 8]));
    assert_eq!(block(PLAIN, &[1e-4; 16]), (0x08, [0x00; 8]));
}

#[test]
fn even_elements_are_low_nibbles() {
    let mut x = [0.0; 16];
    (x[0], x[1], x[15]) = (6.0, -1.0, 0.5);
    assert_eq!(block(PLAIN, &x), (0x38, [0xa7, 0, 0, 0, 0, 0, 0, 0x10]));
    let mut out = [0.0; 16];
    dequantize_row(&[0xa7, 0, 0, 0, 0, 0, 0, 0x10], &[0x38], None, &mut out);
    assert_eq!(out, x);
}

#[test]
fn scales_repeat_over_their_block_and_do_not_tile() {
    let mut out = [0.0; 48];
    dequantize_row(&[0x22; 24], &[0x38, 0x40, 0x48], None, &mut out);
    let want: Vec<f32> = [1.0, 2.0, 4.0].iter().flat_map(|&s| [s; 16]).collect();
    assert_eq!(out[..], want[..]);
}

#[test]
fn scale_bytes_are_e4m3_and_not_integers() {
    for (byte, want) in [(0x01, 0.001953125), (0x08, 0.015625), (0x38, 1.0), (0x77, 240.0)] {
        let mut out = [0.0; 16];
        dequantize_row(&[0x22; 8], &[byte], None, &mut out);
        assert_eq!(out, [want; 16], "{byte:#04x}");
    }
}

#[test]
fn scales_of_the_top_exponent_row_are_finite() {
    let mut out = [0.0; 16];
    dequantize_row(&[0x77; 8], &[0x7e], None, &mut out);
    assert_eq!(out, [2688.0; 16]);
    assert_eq!(block(PLAIN, &[2688.0; 16]), (0x7e, [0x77; 8]));
}

#[test]
fn a_multiplying_scale_is_not_a_divisor() -> Result<()> {
    let mut out = [0.0; 16];
    dequantize_row(&[0x22; 8], &[0x40], Some(GlobalScale::multiply(0.25)?), &mut out);
    assert_eq!(out, [0.5; 16]);
    dequantize_row(&[0x22; 8], &[0x40], Some(GlobalScale::divide(0.25)?), &mut out);
    assert_eq!(out, [8.0; 16]);
    Ok(())
}

#[test]
fn decoding_rounds_the_scale_first() -> Result<()> {
    let (s, g) = (1.375f32, 0.1f32);
    assert_ne!((3.0 * s) * g, 3.0 * (s * g), "the two orders must differ here, or this test proves nothing");
    let mut out = [0.0; 16];
    dequantize_row(&[0x55; 8], &[e4m3::encode(s)], Some(GlobalScale::multiply(g)?), &mut out);
    assert_eq!(out, [3.0 * (s * g); 16]);
    Ok(())
}

#[test]
fn every_code_under_every_scale() {
    let codes: [u8; 8] = std::array::from_fn(|i| (2 * i) as u8 | ((2 * i + 1) as u8) << 4);
    for byte in 0..=255u8 {
        let mut out = [0.0; 16];
        dequantize_row(&codes, &[byte], None, &mut out);
        for (v, code) in out.into_iter().zip(e2m1::VALUES) {
            let want = code * e4m3::TABLE[usize::from(byte)];
            assert!(v.to_bits() == want.to_bits() || (e4m3::is_nan(byte) && v.is_nan()), "{byte:#04x}");
        }
    }
}

#[test]
fn an_all_zero_tensor_is_zero_under_every_rule() -> Result<()> {
    for (rule, amax) in Rule::ALL.into_iter().flat_map(|r| [(r, 0.0), (r, f32::from_bits(1)), (r, 1e-41)]) {
        for global in [None, Some(global_from_amax(rule, amax, DType::BF16)?)] {
            let (scale, codes) = block(Quantizer { rule, global, source: DType::BF16 }, &[0.0; 16]);
            assert!(!e4m3::is_nan(scale) && scale < 0x80, "{rule:?}");
            let mut out = [1.0; 16];
            dequantize_row(&codes, &[scale], global, &mut out);
            assert_eq!(out, [0.0; 16], "{rule:?} {global:?}");
        }
    }
    Ok(())
}

#[test]
fn zero_blocks_get_the_scale_of_their_library() {
    let scale = |rule| block(Quantizer { rule, ..PLAIN }, &[0.0; 16]).0;
    assert_eq!(Rule::ALL.map(scale), [0x08, 0x38, 0x20, 0x00, 0x00]);
}

#[test]
fn compressed_tensors_rounds_in_the_type_of_the_source() -> Result<()> {
    // 6.37 / 6 is just below the tie at 1.0625; 1 / 6 in bf16 is 0.16699219, which puts the product above it.
    let q = Quantizer {
        rule: Rule::CompressedTensors,
        global: Some(GlobalScale::divide(6.37)?),
        source: DType::F32,
    };
    assert_eq!(block(q, &[1.0; 16]).0, 0x38);
    assert_eq!(block(Quantizer { source: DType::BF16, ..q }, &[1.0; 16]).0, 0x39);
    assert_eq!(block(Quantizer { source: DType::F16, ..q }, &[1.0; 16]).0, 0x38);
    // 1 / 5 in bf16 is 0.20019531; 2688 times that is 538.125, whose nearest bf16 is 540. That of 537.6 would
    // be 536. In f32 the reciprocal already costs one unit in the last place: the quotient itself rounds
    // to 537.6.
    let global = |source| global_from_amax(Rule::CompressedTensors, 5.0, source).map(GlobalScale::value);
    assert_eq!((global(DType::F32)?, global(DType::BF16)?), (537.60004, 540.0));
    assert_eq!(2688.0f32 / 5.0, 537.6);
    Ok(())
}

#[test]
fn no_finite_input_gives_a_nan_scale() -> Result<()> {
    let tiny = f32::from_bits(1);
    for rule in Rule::ALL {
        for amax in [tiny, 1e-40, f32::MIN_POSITIVE, 1e-30, 1.0, 1e30, f32::MAX] {
            for tensor in [amax, 1.0, f32::MAX] {
                let q = Quantizer {
                    rule,
                    global: Some(global_from_amax(rule, tensor, DType::F32)?),
                    source: DType::F32,
                };
                let mut x = [0.0; 16];
                (x[0], x[1]) = (amax, -amax / 3.0);
                for x in [x, [amax; 16]] {
                    let (mut codes, mut scales) = ([0; 8], [0]);
                    q.quantize_row(&x, &mut codes, &mut scales)?;
                    assert!(scales[0] < 0x7f, "{rule:?} {amax:e} {tensor:e}");
                    q.quantize_row_four_over_six(&x, &mut codes, &mut scales)?;
                    assert!(scales[0] < 0x7f, "{rule:?} {amax:e} {tensor:e}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn what_cannot_be_quantised_is_refused() -> Result<()> {
    let (mut codes, mut scales) = ([0; 8], [0]);
    for rule in Rule::ALL {
        let q = Quantizer { rule, ..PLAIN };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 16];
            x[7] = bad;
            let e = q.quantize_row(&x, &mut codes, &mut scales).expect_err("not finite");
            assert_eq!(e.code(), Code::ValueInvalid);
            assert!(e.what().contains("element 7"), "{e}");
            let e = global_from_amax(rule, bad, DType::F32).expect_err("not finite");
            assert_eq!(e.code(), Code::ValueInvalid);
        }
        assert!(global_from_amax(rule, -1.0, DType::F32).is_err());
        let other = match rule.convention() {
            Convention::Multiply => GlobalScale::divide(1.0)?,
            Convention::Divide => GlobalScale::multiply(1.0)?,
        };
        let e = Quantizer { global: Some(other), ..q }.quantize_row(&[1.0; 16], &mut codes, &mut scales);
        assert_eq!(e.expect_err("convention").code(), Code::SchemaInvalid);
    }
    for (k, c, s) in [(15, 8, 1), (16, 7, 1), (16, 8, 0), (0, 8, 1)] {
        let e = PLAIN.quantize_row(&[1.0; 16][..k], &mut codes[..c], &mut scales[..s]).expect_err("lengths");
        assert_eq!(e.code(), Code::ShapeMismatch);
    }
    Ok(())
}

#[test]
fn four_over_six_never_has_a_larger_error_and_is_sometimes_smaller() -> Result<()> {
    let x: Vec<f32> =
        (0..16 * 64u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e7 - 0.8).collect();
    let amax = x.iter().fold(0f32, |a, v| a.max(v.abs()));
    for rule in Rule::ALL {
        let q = Quantizer {
            rule,
            global: Some(global_from_amax(rule, 1.75 * amax, DType::F32)?),
            source: DType::F32,
        };
        let error = |four_over_six: bool| -> Result<Vec<f64>> {
            let (mut codes, mut scales, mut out) = (vec![0; 512], vec![0; 64], vec![0.0; 1024]);
            match four_over_six {
                true => q.quantize_row_four_over_six(&x, &mut codes, &mut scales)?,
                false => q.quantize_row(&x, &mut codes, &mut scales)?,
            }
            dequantize_row(&codes, &scales, q.global, &mut out);
            let error =
                |(x, o): (&[f32], &[f32])| x.iter().zip(o).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            Ok(x.chunks(16).zip(out.chunks(16)).map(error).collect())
        };
        let (six, best) = (error(false)?, error(true)?);
        assert!(six.iter().zip(&best).all(|(s, b)| *b <= *s * (1.0 + 1e-6)), "{rule:?}");
        assert!(best.iter().sum::<f64>() < 0.95 * six.iter().sum::<f64>(), "{rule:?}");
    }
    Ok(())
}

#[test]
fn a_search_never_has_a_larger_error_and_beats_four_over_six() -> Result<()> {
    // About normal, as weights are: sums of four even ones.
    let even = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 16_777_216.0 - 0.5;
    let x: Vec<f32> = (0..16 * 256u32).map(|i| (0..4).map(|j| even(4 * i + j)).sum::<f32>() * 0.02).collect();
    let amax = x.iter().fold(0f32, |a, v| a.max(v.abs()));
    for rule in Rule::ALL {
        for global in [Some(global_from_amax(rule, amax, DType::F32)?), None] {
            let scale = if global.is_some() { 1.0 } else { 1e3 };
            let x: Vec<f32> = x.iter().map(|v| v * scale).collect();
            let q = Quantizer { rule, global, source: DType::F32 };
            let error = |method: u8| -> Result<Vec<f64>> {
                let (mut codes, mut scales, mut out) = (vec![0; 2048], vec![0; 256], vec![0.0; 4096]);
                match method {
                    0 => q.quantize_row(&x, &mut codes, &mut scales)?,
                    1 => q.quantize_row_four_over_six(&x, &mut codes, &mut scales)?,
                    _ => q.quantize_row_search(&x, &mut codes, &mut scales)?,
                }
                dequantize_row(&codes, &scales, q.global, &mut out);
                let error =
                    |(x, o): (&[f32], &[f32])| x.iter().zip(o).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                Ok(x.chunks(16).zip(out.chunks(16)).map(error).collect())
            };
            let [rtn, four, search] = [error(0)?, error(1)?, error(2)?];
            assert!(rtn.iter().zip(&search).all(|(r, s)| *s <= *r * (1.0 + 1e-6)), "{rule:?}");
            let sum = |errors: &[f64]| errors.iter().sum::<f64>();
            assert!(sum(&search) < 0.95 * sum(&four), "{rule:?}: {} {}", sum(&search), sum(&four));
        }
    }
    Ok(())
}

#[test]
fn a_search_keeps_what_is_exact_and_what_is_zero() {
    let mut x = [6.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0, -4.0].repeat(2);
    let (mut codes, mut scales) = ([0; 8], [0]);
    let (mut rtn, mut rtn_scale) = ([0; 8], [0]);
    for fill in [None, Some(0.0), Some(-0.0), Some(f32::MIN_POSITIVE / 8.0), Some(f32::MAX)] {
        if let Some(fill) = fill {
            x.fill(fill);
        }
        PLAIN.quantize_row_search(&x, &mut codes, &mut scales).expect("finite");
        PLAIN.quantize_row(&x, &mut rtn, &mut rtn_scale).expect("finite");
        assert_eq!((codes, scales), (rtn, rtn_scale), "{fill:?}");
    }
}

#[test]
fn four_over_six_maps_amax_to_four_where_that_is_exact() {
    let mut x = [4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0, 3.0].repeat(2);
    let (mut codes, mut scales) = ([0; 8], [0]);
    PLAIN.quantize_row_four_over_six(&x, &mut codes, &mut scales).expect("finite");
    let mut out = [0.0; 16];
    dequantize_row(&codes, &scales, None, &mut out);
    assert_eq!((scales[0], out[..].to_vec()), (0x38, x.clone()));
    // Both are exact: the one that maps amax to 6 is kept.
    x.fill(6.0);
    PLAIN.quantize_row_four_over_six(&x, &mut codes, &mut scales).expect("finite");
    assert_eq!((scales[0], codes), (0x38, [0x77; 8]));
}
