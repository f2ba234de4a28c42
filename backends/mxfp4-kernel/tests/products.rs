//! What the MXFP4 kernels promise besides the lattice of the conformance suite, on every instruction set.
#![allow(clippy::unwrap_used)]
#[path = "../../reference/tests/contract/mod.rs"]
mod contract;

use contract::{Subject, built, integer_sums_agree, subjects, vector_kernels_agree};
use q4_conformance::Problem;
use q4_core::formats::encodings;
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, DType, ExecPath, Mxfp4, Part, Q4Schema, Q4Weight, RejectCode,
    Result, Rule, Segment, SegmentData, TensorView, ThreadPool,
};
use q4_mxfp4_kernel as _;

const MXFP4: Q4Schema = Q4Schema::Mxfp4(Mxfp4);

#[test]
fn products_are_right_whatever_x_is_and_wherever_it_lies() -> Result<()> {
    for subject in kernels() {
        subject.is_right_for(MXFP4)?;
        subject.takes_any_type_of_x(MXFP4)?;
        subject.rounds_the_decoded_matrix_once(MXFP4)?;
        subject.follows_strides(MXFP4)?;
    }
    Ok(())
}

#[test]
fn neither_threads_nor_rows_nor_segments_change_a_bit() -> Result<()> {
    for subject in kernels() {
        subject.ignores_threads(MXFP4)?;
        subject.keeps_rows_apart(MXFP4)?;
        subject.keeps_segments_apart(MXFP4)?;
    }
    Ok(())
}

#[test]
fn vector_kernels_agree_bit_for_bit() -> Result<()> {
    // FNV-1a over all bits below: what every architecture must come to.
    const RECORDED: u64 = 0x1a10_274a_74c3_ba71;
    const OF_INTEGERS: u64 = 0x7a48_150d_f1a8_0bcd;
    let (n, k, most) = (50, 320, 9);
    let mut seed = 1u32;
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        seed >> 8
    };
    let mut floats = |n: usize| (0..n).map(|_| next() as f32 / 8_388_608.0 - 1.0).collect::<Vec<f32>>();
    let (x, dy) = (floats(most * k), floats(most * n));
    let codes: Vec<u8> = (0..n * k / 2).map(|_| next() as u8).collect();
    let scales: Vec<u8> = (0..n * k / 32).map(|_| 118 + (next() % 12) as u8).collect();
    let segments = [Segment { rows: n, data: data(&codes, &scales, n, k)? }];
    let weight = Q4Weight { schema: MXFP4, k, segments: &segments };
    vector_kernels_agree(&kernels(), weight, [&x, &dy], RECORDED)?;
    integer_sums_agree("mxfp4-kernel", weight, &x, OF_INTEGERS)
}

#[test]
fn every_reason_is_given_at_once() {
    use RejectCode::*;
    let subject = &kernels()[0];
    let quantised = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None };
    let codes = subject.reasons(MXFP4, Activations::Nvfp4(quantised));
    for code in [PathUnsupported, ActivationsUnsupported, DtypeUnsupported, ShapeUnsupported, DeviceAbsent] {
        assert!(codes.contains(&code), "{code:?} in {codes:?}");
    }
    let codes = subject.reasons(encodings("nf4")[0], Activations::Native);
    assert!(codes.contains(&SchemaUnsupported), "{codes:?}");
}

#[test]
fn an_isa_is_honoured_or_the_backend_does_not_live() {
    let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
    for isa in ["avx1024", foreign] {
        assert!(built(Some(isa)).live("mxfp4-kernel").is_none(), "{isa}");
    }
}

#[test]
fn damage_is_refused_and_a_scale_is_a_byte() -> Result<()> {
    let (subject, pool) = (kernels().remove(0), ThreadPool::new(1));
    subject.refuses_damage(MXFP4)?;
    let (codes, mut scales) = (vec![0x5au8; 16 * 64 / 2], vec![120u8; 32]);
    let mut prepare = |last: u8| {
        scales[31] = last;
        let segments = [Segment { rows: 16, data: data(&codes, &scales, 16, 64)? }];
        let problem = problem(Q4Weight { schema: MXFP4, k: 64, segments: &segments }, Vec::new(), 1);
        subject.prepare(&problem, (DType::F32, DType::F32), &pool)
    };
    assert_eq!(prepare(120)?.info().resident_bytes, 16 * 64 / 2 + 32);
    assert_eq!(prepare(255).err().map(|e| e.code()), Some(Code::ScaleInvalid));
    Ok(())
}

#[test]
fn dispatch_checks_it_and_counts_its_calls() -> Result<()> {
    kernels()[0].is_dispatched_and_counted(MXFP4)
}

fn data<'a>(codes: &'a [u8], scales: &'a [u8], n: usize, k: usize) -> Result<SegmentData<'a>> {
    let codes = TensorView::of(codes, &[n, k / 2])?;
    Ok(SegmentData::default()
        .with(Part::Codes, codes)
        .with(Part::Scales, TensorView::of(scales, &[n, k / 32])?))
}

fn problem(weight: Q4Weight<'_>, x: Vec<f32>, m: usize) -> Problem<'_> {
    let (activations, io) = (Activations::Native, DType::F32);
    Problem { name: "mxfp4".into(), weight, x, m, max_m: m, activations, io, recorded: None }
}

fn kernels() -> Vec<Subject> {
    subjects("mxfp4-kernel", ExecPath::FusedDequant)
}
