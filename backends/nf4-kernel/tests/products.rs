//! What the NF4 kernels promise besides the lattice of the conformance suite, on every instruction set.
#![allow(clippy::unwrap_used)]
#[path = "../../reference/tests/contract/mod.rs"]
mod contract;

use contract::{Subject, built, subjects, vector_kernels_agree};
use q4_core::{
    Absmax, ActGlobal, ActQuant, Activations, Code, DType, Dense, ExecPath, HostEnv, Nf4, Nf4Parts,
    NibbleOrder, Q4Schema, Q4Weight, RejectCode, Result, Rule, Segment, TensorView, ThreadPool,
};
use q4_nf4_kernel as _;

const PLAIN: Q4Schema = nf4(NibbleOrder::HighFirst, 64, None);
const NESTED: Q4Schema = nf4(NibbleOrder::LowFirst, 128, Some(256));

#[test]
fn block_sizes_orders_and_nestings_are_decoded_rightly() -> Result<()> {
    use NibbleOrder::{HighFirst, LowFirst};
    // Blocks shorter than a chain, longer than a row, and those that checkpoints have, the other way round.
    let schemas = [
        (HighFirst, 32, None),
        (LowFirst, 32, Some(256)),
        (LowFirst, 64, Some(256)),
        (HighFirst, 4096, None),
    ];
    for subject in kernels() {
        for (order, block, nested) in schemas {
            subject.is_right_for(nf4(order, block, nested))?;
        }
        subject.takes_any_type_of_x(NESTED)?;
        subject.rounds_the_decoded_matrix_once(NESTED)?;
    }
    Ok(())
}

#[test]
fn strides_are_followed_and_gaps_left_alone() -> Result<()> {
    kernels().iter().try_for_each(|s| s.follows_strides(NESTED))
}

#[test]
fn neither_threads_nor_rows_nor_segments_change_a_bit() -> Result<()> {
    for subject in kernels() {
        subject.ignores_threads(PLAIN)?;
        subject.keeps_rows_apart(PLAIN)?;
        subject.keeps_segments_apart(NESTED)?;
    }
    Ok(())
}

#[test]
fn vector_kernels_agree_bit_for_bit() -> Result<()> {
    // FNV-1a over all bits below: what every architecture must come to.
    const RECORDED: u64 = 0xf25c_5238_3083_ed6a;
    let (n, k, most) = (50, 320, 9);
    let mut seed = 1u32;
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        seed >> 8
    };
    let mut floats = |n: usize| (0..n).map(|_| next() as f32 / 8_388_608.0 - 1.0).collect::<Vec<f32>>();
    let (absmax, x, dy) = (floats(n * k / 64), floats(most * k), floats(most * n));
    let codes: Vec<u8> = (0..n * k / 2).map(|_| next() as u8).collect();
    let absmax = Absmax::Plain(TensorView::of(&absmax, &[absmax.len()])?);
    let data = Nf4Parts { codes: TensorView::of(&codes, &[codes.len()])?, absmax }.into();
    let segments = [Segment { rows: n, data }];
    let weight = Q4Weight { schema: PLAIN, k, segments: &segments };
    vector_kernels_agree(&kernels(), weight, [&x, &dy], RECORDED)
}

#[test]
fn every_reason_is_given_at_once() {
    use RejectCode::*;
    let subject = &kernels()[0];
    let quantised = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None };
    let codes = subject.reasons(PLAIN, Activations::Nvfp4(quantised));
    let expect = [
        PathUnsupported,
        ShapeUnsupported,
        ActivationsUnsupported,
        DtypeUnsupported,
        DtypeUnsupported,
        DeviceAbsent,
    ];
    assert_eq!(codes, expect);
    let codes = subject.reasons(Q4Schema::Dense(Dense { dtype: DType::F32 }), Activations::Native);
    assert!(codes.contains(&SchemaUnsupported), "{codes:?}");
}

#[test]
fn an_isa_is_honoured_or_the_backend_does_not_live() {
    let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
    for isa in ["avx1024", foreign] {
        assert!(built(Some(isa)).live("nf4-kernel").is_none(), "{isa}");
    }
    for subject in kernels() {
        let detail = &subject.backend.probe(&HostEnv::default())[0].detail;
        assert!(detail.starts_with(subject.isa.trim_end_matches("vnni")), "{}: {detail}", subject.isa);
    }
}

#[test]
fn damage_is_refused() -> Result<()> {
    let (subject, pool) = (kernels().remove(0), ThreadPool::new(1));
    subject.refuses_damage(PLAIN)?;
    let (codes, mut absmax) = (vec![0x5au8; 16 * 64 / 2], vec![0.5; 16]);
    let mut prepare = |last: f32| {
        absmax[15] = last;
        let data = Nf4Parts {
            codes: TensorView::of(&codes, &[codes.len()])?,
            absmax: Absmax::Plain(TensorView::of(&absmax, &[16])?),
        }
        .into();
        let weight = Q4Weight { schema: PLAIN, k: 64, segments: &[Segment { rows: 16, data }] };
        let (x, activations, io) = (Vec::new(), Activations::Native, DType::F32);
        let problem = q4_conformance::Problem {
            name: "absmax".into(),
            weight,
            x,
            m: 1,
            max_m: 1,
            activations,
            io,
            recorded: None,
        };
        subject.prepare(&problem, (io, io), &pool)
    };
    assert_eq!(prepare(0.5)?.info().resident_bytes, 16 * 64 / 2 + 16 * 4);
    assert_eq!(prepare(f32::INFINITY).err().map(|e| e.code()), Some(Code::ScaleInvalid));
    Ok(())
}

#[test]
fn dispatch_checks_it_and_counts_its_calls() -> Result<()> {
    [PLAIN, NESTED].into_iter().try_for_each(|schema| kernels()[0].is_dispatched_and_counted(schema))
}

const fn nf4(nibble_order: NibbleOrder, block: u32, nested: Option<u32>) -> Q4Schema {
    Q4Schema::Nf4(Nf4 { nibble_order, block, nested })
}

fn kernels() -> Vec<Subject> {
    subjects("nf4-kernel", ExecPath::FusedDequant)
}
