//! What the kernels for FP8 promise besides the lattice of the conformance suite, on every
//! instruction set.
#![allow(clippy::unwrap_used)]
#[path = "../../reference/tests/contract/mod.rs"]
mod contract;

use contract::{Subject, built, subjects, vector_kernels_agree};
use q4_conformance::Problem;
use q4_core::formats::encodings;
use q4_core::formats::sample::{Draw, uniform};
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, DType, ExecPath, OwnedParts, Part, Q4Schema, Q4Weight,
    RejectCode, Result, Rule, Segment, ThreadPool,
};
use q4_fp8_kernel as _;

#[test]
fn codes_and_scales_of_every_tile_are_decoded_rightly() -> Result<()> {
    for subject in kernels() {
        for schema in all() {
            subject.is_right_for(schema)?;
            subject.takes_any_type_of_x(schema)?;
            subject.rounds_the_decoded_matrix_once(schema)?;
        }
    }
    Ok(())
}

#[test]
fn strides_are_followed_and_gaps_left_alone() -> Result<()> {
    kernels().iter().try_for_each(|s| s.follows_strides(all()[0]))
}

#[test]
fn neither_threads_nor_rows_nor_segments_change_a_bit() -> Result<()> {
    for subject in kernels() {
        for schema in all() {
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
    for (schema, recorded) in
        all().into_iter().zip([0x8247_a619_3395_64ce, 0xc046_bca5_0ed7_512a, 0x4d8a_3d6c_7989_ff07])
    {
        let (n, k) = (50, 592);
        let parts = schema.sample([n, k], &Draw { seed: 4, tame: true });
        let segments = [Segment { rows: n, data: parts.lend()? }];
        let floats = |seed, len: usize| -> Vec<f32> {
            let draw = Draw { seed, tame: true };
            (0..len).map(|i| uniform(draw.word(i)) * 2.0 - 1.0).collect()
        };
        let (x, dy) = (floats(5, 9 * k), floats(6, 9 * n));
        vector_kernels_agree(&kernels(), Q4Weight { schema, k, segments: &segments }, [&x, &dy], recorded)?;
    }
    Ok(())
}

#[test]
fn every_reason_is_given_at_once() {
    use RejectCode::*;
    let subject = &kernels()[0];
    let quantised = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None };
    let codes = subject.reasons(all()[0], Activations::Nvfp4(quantised));
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
        assert!(built(Some(isa)).live("fp8-kernel").is_none(), "{isa}");
    }
}

#[test]
fn damage_is_refused_and_nothing_is_widened() -> Result<()> {
    let (subject, pool) = (kernels().remove(0), ThreadPool::new(1));
    // A scale of 2 or 4 bytes for the rows and columns of a tile, kept for each row.
    for (schema, scales) in all().into_iter().zip([2 * 2, 2, 4]) {
        let k = 256;
        subject.refuses_damage(schema)?;
        let whole = schema.sample([16, k], &Draw { seed: 1, tame: true });
        let prepare = |parts: &OwnedParts| {
            let segments = [Segment { rows: 16, data: parts.lend()? }];
            let weight = Q4Weight { schema, k, segments: &segments };
            let problem = Problem {
                name: schema.label(),
                weight,
                x: Vec::new(),
                m: 1,
                max_m: 1,
                activations: Activations::Native,
                io: DType::F32,
                recorded: None,
            };
            subject.prepare(&problem, (DType::F32, DType::F32), &pool)
        };
        assert_eq!(prepare(&whole)?.info().resident_bytes, 16 * (256 + scales), "{schema}");
        let mut damaged = whole.clone();
        schema.spoil(&mut damaged, 15, k);
        assert_ne!(damaged.bytes(Part::Codes), whole.bytes(Part::Codes));
        assert_eq!(prepare(&damaged).err().map(|e| e.code()), Some(Code::ValueInvalid), "{schema}");
        let mut damaged = whole.clone();
        damaged.bytes_mut(Part::Scales).fill(0xff);
        assert_eq!(prepare(&damaged).err().map(|e| e.code()), Some(Code::ScaleInvalid), "{schema}");
    }
    Ok(())
}

#[test]
fn dispatch_checks_it_and_counts_its_calls() -> Result<()> {
    kernels()[0].is_dispatched_and_counted(all()[0])
}

/// Scales of squares, of out features and of a matrix.
fn all() -> Vec<Q4Schema> {
    encodings("fp8")[..3].to_vec()
}

fn kernels() -> Vec<Subject> {
    subjects("fp8-kernel", ExecPath::FusedDequant)
}
