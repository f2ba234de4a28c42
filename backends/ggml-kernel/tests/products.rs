//! What the kernels for blocks of GGML promise besides the lattice of the conformance suite, on every
//! instruction set.
#![allow(clippy::unwrap_used)]
#[path = "../../reference/tests/contract/mod.rs"]
mod contract;

use contract::{Subject, built, integer_sums_agree, subjects, vector_kernels_agree};
use q4_conformance::Problem;
use q4_core::formats::encodings;
use q4_core::formats::ggml::Blocks;
use q4_core::formats::sample::{Draw, uniform};
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, DType, ExecPath, Ggml, OwnedParts, Part, Q4Schema, Q4Weight,
    RejectCode, Result, Rule, Segment, ThreadPool,
};
use q4_ggml_kernel as _;

#[test]
fn codes_scales_and_minima_are_decoded_rightly() -> Result<()> {
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
    kernels().iter().try_for_each(|s| s.follows_strides(of(Blocks::Q4K)))
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
    for (blocks, recorded, of_integers) in [
        (Blocks::Q4K, 0xddb4_4900_75e2_0061, 0xe711_c805_64f9_9511),
        (Blocks::Q5K, 0x6812_9cfa_4eb5_f4c5, 0xd075_7475_d932_d7da),
        (Blocks::Q6K, 0x0238_5331_920f_9d78, 0xcd7c_49c9_1e84_5023),
        (Blocks::Q80, 0xa121_c1b3_2696_97da, 0x3930_a248_a0ae_e2d3),
    ] {
        let (schema, n, k) = (of(blocks), 50, 768);
        let parts = schema.sample([n, k], &Draw { seed: 4, tame: true });
        let segments = [Segment { rows: n, data: parts.lend()? }];
        let floats = |seed, len: usize| -> Vec<f32> {
            let draw = Draw { seed, tame: true };
            (0..len).map(|i| uniform(draw.word(i)) * 2.0 - 1.0).collect()
        };
        let (x, dy) = (floats(5, 9 * k), floats(6, 9 * n));
        let weight = Q4Weight { schema, k, segments: &segments };
        vector_kernels_agree(&kernels(), weight, [&x, &dy], recorded)?;
        integer_sums_agree("ggml-kernel", weight, &x, of_integers)?;
    }
    Ok(())
}

#[test]
fn every_reason_is_given_at_once() {
    use RejectCode::*;
    let subject = &kernels()[0];
    let quantised = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None };
    let codes = subject.reasons(of(Blocks::Q6K), Activations::Nvfp4(quantised));
    for code in
        [PathUnsupported, ActivationsUnsupported, DtypeUnsupported, ShapeUnsupported, DeviceUnsupported]
    {
        assert!(codes.contains(&code), "{code:?} in {codes:?}");
    }
    let codes = subject.reasons(encodings("nf4")[0], Activations::Native);
    assert!(codes.contains(&SchemaUnsupported), "{codes:?}");
}

#[test]
fn an_isa_is_honoured_or_the_backend_does_not_live() {
    let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
    for isa in ["avx1024", foreign] {
        assert!(built(Some(isa)).live("ggml-kernel").is_none(), "{isa}");
    }
}

#[test]
fn damage_is_refused_and_nothing_is_widened() -> Result<()> {
    let (subject, pool) = (kernels().remove(0), ThreadPool::new(1));
    // Bytes of a block of 256 or 32: codes, scales and minima a byte each, two f16 for scales of scales.
    let resident = [(Blocks::Q4K, 148), (Blocks::Q5K, 180), (Blocks::Q6K, 212), (Blocks::Q80, 34)];
    for (blocks, bytes) in resident {
        let (schema, k) = (of(blocks), 2 * blocks.elements());
        subject.refuses_damage(schema)?;
        let whole = schema.sample([16, k], &Draw { seed: 1, tame: true });
        let prepare = |parts: &OwnedParts| {
            let segments = [Segment { rows: 16, data: parts.lend()? }];
            let weight = Q4Weight { schema, k, segments: &segments };
            let problem = Problem {
                name: blocks.name().into(),
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
        assert_eq!(prepare(&whole)?.info().resident_bytes, 16 * 2 * bytes, "{blocks:?}");
        let mut damaged = whole.clone();
        schema.spoil(&mut damaged, 15, k);
        assert_ne!(damaged.bytes(Part::Codes), whole.bytes(Part::Codes));
        assert_eq!(prepare(&damaged).err().map(|e| e.code()), Some(Code::ScaleInvalid), "{blocks:?}");
    }
    Ok(())
}

#[test]
fn dispatch_checks_it_and_counts_its_calls() -> Result<()> {
    kernels()[0].is_dispatched_and_counted(of(Blocks::Q4K))
}

const fn of(blocks: Blocks) -> Q4Schema {
    Q4Schema::Ggml(Ggml { blocks })
}

fn all() -> [Q4Schema; 4] {
    Blocks::ALL.map(of)
}

fn kernels() -> Vec<Subject> {
    subjects("ggml-kernel", ExecPath::FusedDequant)
}
