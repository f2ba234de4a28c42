//! What the int4 kernels promise besides the lattice of the conformance suite, on every instruction set.
#![allow(clippy::unwrap_used)]
#[path = "../../reference/tests/contract/mod.rs"]
mod contract;

use contract::{Subject, built, integer_sums_agree, subjects, vector_kernels_agree};
use q4_conformance::Problem;
use q4_core::formats::sample::{Draw, uniform};
use q4_core::formats::{encodings, int4::Zeros};
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, DType, ExecPath, Int4, OwnedParts, Part, Q4Schema, Q4Weight,
    RejectCode, Result, Rule, Segment, ThreadPool,
};
use q4_int4_kernel as _;

const SYMMETRIC: Q4Schema = int4(128, DType::BF16, Zeros::Middle);
const ASYMMETRIC: Q4Schema = int4(32, DType::F16, Zeros::Points);
const AFFINE: Q4Schema = int4(64, DType::BF16, Zeros::Biases);

#[test]
fn groups_scales_and_zero_points_are_decoded_rightly() -> Result<()> {
    // Groups that are longer than a chain and no multiple of one, too.
    let rare = [
        int4(16, DType::F32, Zeros::Points),
        int4(80, DType::F32, Zeros::Middle),
        int4(192, DType::BF16, Zeros::Points),
        int4(16, DType::F32, Zeros::Biases),
        int4(192, DType::F16, Zeros::Biases),
    ];
    for subject in kernels() {
        for schema in [SYMMETRIC, ASYMMETRIC, AFFINE].into_iter().chain(rare) {
            subject.is_right_for(schema)?;
        }
        subject.takes_any_type_of_x(ASYMMETRIC)?;
        subject.rounds_the_decoded_matrix_once(ASYMMETRIC)?;
    }
    Ok(())
}

#[test]
fn strides_are_followed_and_gaps_left_alone() -> Result<()> {
    kernels().iter().try_for_each(|s| s.follows_strides(ASYMMETRIC))
}

#[test]
fn neither_threads_nor_rows_nor_segments_change_a_bit() -> Result<()> {
    for subject in kernels() {
        for schema in [SYMMETRIC, ASYMMETRIC, AFFINE] {
            subject.ignores_threads(schema)?;
            subject.keeps_rows_apart(schema)?;
            subject.keeps_segments_apart(schema)?;
        }
    }
    Ok(())
}

#[test]
fn vector_kernels_agree_bit_for_bit() -> Result<()> {
    // What every architecture must come to.
    for (schema, recorded, of_integers) in [
        (SYMMETRIC, 0xd916_751b_4734_5055, 0x20d0_1a7c_b08a_6d51),
        (ASYMMETRIC, 0x0b2d_3213_4ccd_5ccd, 0x1388_8a20_b4eb_9b9c),
        (AFFINE, 0x6173_2f5b_9643_3739, 0xdee9_9829_3c1f_92a5),
    ] {
        let (n, k) = (50, 384);
        let parts = schema.sample([n, k], &Draw { seed: 4, tame: true });
        let segments = [Segment { rows: n, data: parts.lend()? }];
        let floats = |seed, len: usize| -> Vec<f32> {
            let draw = Draw { seed, tame: true };
            (0..len).map(|i| uniform(draw.word(i)) * 2.0 - 1.0).collect()
        };
        let (x, dy) = (floats(5, 9 * k), floats(6, 9 * n));
        let weight = Q4Weight { schema, k, segments: &segments };
        vector_kernels_agree(&kernels(), weight, [&x, &dy], recorded)?;
        integer_sums_agree("int4-kernel", weight, &x, of_integers)?;
    }
    Ok(())
}

#[test]
fn every_reason_is_given_at_once() {
    use RejectCode::*;
    let subject = &kernels()[0];
    let quantised = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None };
    let codes = subject.reasons(SYMMETRIC, Activations::Nvfp4(quantised));
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
        assert!(built(Some(isa)).live("int4-kernel").is_none(), "{isa}");
    }
}

#[test]
fn damage_is_refused_and_nothing_is_widened() -> Result<()> {
    let (subject, pool) = (kernels().remove(0), ThreadPool::new(1));
    subject.refuses_damage(ASYMMETRIC)?;
    let whole = ASYMMETRIC.sample([16, 64], &Draw { seed: 1, tame: true });
    let prepare = |parts: &OwnedParts| {
        let segments = [Segment { rows: 16, data: parts.lend()? }];
        subject.prepare(&problem(ASYMMETRIC, &segments), (DType::F32, DType::F32), &pool)
    };
    // A scale of two bytes and a zero point of one for each of two groups.
    assert_eq!(prepare(&whole)?.info().resident_bytes, 16 * 64 / 2 + 16 * 2 * 3);
    for (part, at, byte) in [(Part::Zeros, 31, 16), (Part::Scales, 63, 0x7c)] {
        let mut damaged = whole.clone();
        damaged.bytes_mut(part)[at] = byte;
        assert_eq!(prepare(&damaged).err().map(|e| e.code()), Some(Code::ScaleInvalid), "{part:?}");
    }
    Ok(())
}

#[test]
fn biases_are_as_wide_as_scales_and_finite() -> Result<()> {
    let (subject, pool) = (kernels().remove(0), ThreadPool::new(1));
    subject.refuses_damage(AFFINE)?;
    let whole = AFFINE.sample([16, 64], &Draw { seed: 1, tame: true });
    let prepare = |parts: &OwnedParts| {
        let segments = [Segment { rows: 16, data: parts.lend()? }];
        subject.prepare(&problem(AFFINE, &segments), (DType::F32, DType::F32), &pool)
    };
    assert_eq!(prepare(&whole)?.info().resident_bytes, 16 * 64 / 2 + 16 * (2 + 2));
    let mut damaged = whole;
    damaged.bytes_mut(Part::Zeros)[30..].copy_from_slice(&0x7f80u16.to_le_bytes());
    let e = prepare(&damaged).err().unwrap();
    assert!(e.code() == Code::ScaleInvalid && e.to_string().contains("bias of group 15"), "{e}");
    Ok(())
}

/// One row of nothing: to prepare a weight of 64 in features.
fn problem<'a>(schema: Q4Schema, segments: &'a [Segment<'a>]) -> Problem<'a> {
    Problem {
        name: "int4".into(),
        weight: Q4Weight { schema, k: 64, segments },
        x: Vec::new(),
        m: 1,
        max_m: 1,
        activations: Activations::Native,
        io: DType::F32,
        recorded: None,
    }
}

#[test]
fn dispatch_checks_it_and_counts_its_calls() -> Result<()> {
    kernels()[0].is_dispatched_and_counted(SYMMETRIC)
}

const fn int4(group: u32, scales: DType, zeros: Zeros) -> Q4Schema {
    Q4Schema::Int4(Int4 { group, scales, zeros })
}

fn kernels() -> Vec<Subject> {
    subjects("int4-kernel", ExecPath::FusedDequant)
}
