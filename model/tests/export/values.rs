//! What is lost, and what the result depends on.
use crate::plans::nvfp4;
use crate::{MODELS, exported};
use q4_core::detect::Layout;
use q4_core::formats::nf4;
use q4_core::{Code, DType, Part, Result, Rule, ThreadPool};
use q4_model::checkpoint::TensorStore;
use q4_model::export::ExportPlan;
use q4_model::quantize::{Method, Quantized, Rows, Scales, Target, ToNf4, ToNvfp4, amax, quantize, sqnr_db};

#[test]
fn the_noise_is_what_the_formats_are_known_for() -> Result<()> {
    let (n, k) = (256, 2048);
    let bytes: Vec<u8> = gaussian(n * k, 0.02).into_iter().flat_map(f32::to_le_bytes).collect();
    let rows = Rows::new("gauss", &bytes, DType::F32, n, k)?;
    let pool = ThreadPool::new(2);
    let sqnr = |target: Target| sqnr_db(&rows, &quantize(&rows, &target, None, &pool)?, &pool);
    let nvfp4 = |rule, scales, method| Target::Nvfp4(ToNvfp4 { rule, scales, method });
    let single = sqnr(nvfp4(Rule::TorchAo, Scales::Single, Method::Rtn))?;
    let two = sqnr(nvfp4(Rule::ModelOpt, Scales::TwoLevel, Method::Rtn))?;
    let best = sqnr(nvfp4(Rule::ModelOpt, Scales::TwoLevel, Method::FourOverSix))?;
    let nf4 = sqnr(Target::Nf4(ToNf4 { block: 64, double: false }))?;
    for (got, published) in [(single, 17.68), (two, 20.42), (best, 21.20), (nf4, 20.71)] {
        assert!((got - published).abs() < 0.5, "{got} dB, published {published}");
    }
    let runtime = sqnr(nvfp4(Rule::Runtime, Scales::Single, Method::Rtn))?;
    assert!(single < two && runtime < two && two < best, "{runtime} {single} {two} {best}");
    for rule in Rule::ALL {
        let (rtn, four) = (
            sqnr(nvfp4(rule, Scales::TwoLevel, Method::Rtn))?,
            sqnr(nvfp4(rule, Scales::TwoLevel, Method::FourOverSix))?,
        );
        assert!(four >= rtn, "{rule:?}: {four} < {rtn}");
    }
    Ok(())
}

#[test]
fn a_result_depends_on_the_weights_alone() -> Result<()> {
    // 70 000 elements: several pieces, the last one ragged; NF4 blocks cross rows.
    let (n, k) = (125, 560);
    let values = gaussian(n * k, 1.0);
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let rows = Rows::new("w", &bytes, DType::F32, n, k)?;
    let (one, three) = (ThreadPool::new(1), ThreadPool::new(3));
    let nvfp4 = Target::Nvfp4(ToNvfp4 {
        rule: Rule::CompressedTensors,
        scales: Scales::TwoLevel,
        method: Method::Rtn,
    });
    for target in [
        nvfp4,
        Target::Nf4(ToNf4 { block: 4096, double: true }),
        Target::Nf4(ToNf4 { block: 32, double: false }),
    ] {
        let (a, b) = (quantize(&rows, &target, None, &one)?, quantize(&rows, &target, None, &three)?);
        Part::ALL.iter().for_each(|part| assert_eq!(a.parts.bytes(*part), b.parts.bytes(*part)));
        assert_eq!(a.parts.offset, b.parts.offset);
        assert_eq!(sqnr_db(&rows, &a, &one)?, sqnr_db(&rows, &b, &three)?);
    }
    let q = quantize(&rows, &Target::Nf4(ToNf4 { block: 64, double: false }), None, &three)?;
    let (mut codes, mut absmax) = (vec![0; n * k / 2], vec![0.0; (n * k).div_ceil(64)]);
    nf4::quantize(&values, 64, &mut codes, &mut absmax)?;
    assert_eq!(
        (q.parts.bytes(Part::Codes), q.parts.to_f32(Part::Scales)),
        (&codes[..], absmax),
        "pieces change nothing"
    );
    assert_eq!(amax(&rows, &three)?, values.iter().fold(0.0, |a: f32, v| a.max(v.abs())));
    Ok(())
}

#[test]
fn a_shared_scale_covers_its_group() -> Result<()> {
    let bytes: Vec<u8> = gaussian(64, 1.0).into_iter().flat_map(f32::to_le_bytes).collect();
    let rows = Rows::new("w", &bytes, DType::F32, 4, 16)?;
    let pool = ThreadPool::new(1);
    let target =
        Target::Nvfp4(ToNvfp4 { rule: Rule::ModelOpt, scales: Scales::TwoLevel, method: Method::Rtn });
    let global = |q: &Quantized| q.parts.global.unwrap().value();
    assert_eq!(global(&quantize(&rows, &target, Some(2688.0), &pool)?), 1.0);
    let e = quantize(&rows, &target, Some(1e-3), &pool).expect_err("would saturate");
    assert_eq!(e.code(), Code::ValueInvalid);
    // Without sharing each matrix has its own scale.
    let plan = ExportPlan { share_groups: false, ..nvfp4(Layout::ModelOpt, None, Method::Rtn) };
    let (_dir, out, _) = exported(MODELS[0], &plan)?;
    let store = TensorStore::open(&out)?;
    let scale = |p: &str| {
        store.tensor(&format!("model.layers.0.self_attn.{p}.weight_scale_2")).and_then(|t| t.to_f32())
    };
    assert!(scale("q_proj")? != scale("k_proj")? || scale("k_proj")? != scale("v_proj")?);
    Ok(())
}

/// Normal values from a counter: element `i` does not depend on how many there are.
fn gaussian(len: usize, sigma: f64) -> Vec<f32> {
    let uniform = |counter: u64| {
        let mut z = counter.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x0123_4567_89AB_CDEF);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let value = |i: u64| {
        let radius = (-2.0 * (1.0 - uniform(2 * i)).ln()).sqrt();
        (sigma * radius * (std::f64::consts::TAU * uniform(2 * i + 1)).cos()) as f32
    };
    (0..len as u64).map(value).collect()
}
