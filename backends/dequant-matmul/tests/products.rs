//! What the dense path promises besides the lattice of the conformance suite.
#![allow(clippy::unwrap_used)]
#[path = "../../reference/tests/contract/mod.rs"]
mod contract;

use contract::{IO, Subject, backward, both, built, forward, subjects};
use q4_conformance::Problem;
use q4_core::oracle::{Units, bound};
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, Convention, DType, Dense, ExecContext, ExecPath, GlobalScale,
    Nf4, NibbleOrder, Nvfp4, Nvfp4Parts, OpSet, Part, Q4Schema, Q4Weight, RejectCode, Result, Rule,
    ScaleLayout, Segment, SegmentData, TensorView, TensorViewMut, ThreadPool,
};
use q4_dequant_matmul as _;

const NVFP4: Q4Schema =
    Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Multiply) });

#[test]
fn every_encoding_is_decoded_rightly() -> Result<()> {
    let subject = dense_path();
    for global in [None, Some(Convention::Divide)] {
        subject.is_right_for(Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, global }))?;
    }
    let nibble_order = NibbleOrder::LowFirst;
    subject.is_right_for(Q4Schema::Nf4(Nf4 { nibble_order, block: 4096, nested: Some(256) }))?;
    subject.is_right_for(Q4Schema::Dense(Dense { dtype: DType::F16 }))?;
    subject.rounds_the_decoded_matrix_once(NVFP4)?;
    subject.takes_any_type_of_x(NVFP4)
}

#[test]
fn tiles_meet_without_a_seam() -> Result<()> {
    let subject = dense_path();
    // Across the edges of tiles in rows, outputs and terms, in both directions; k that no block divides;
    // short sums.
    for (m, n, k) in [(257, 97, 513), (2, 1100, 98), (3, 5, 83), (4, 7, 2), (1, 1, 1), (300, 3, 16)] {
        for dtype in IO {
            let stored = IoBuffer::new(dtype, &noise(n * k, 1));
            let measured = subject.is_right(&dense(&stored, (m, n, k), noise(m * k, 2), dtype))?;
            assert_eq!(
                (measured.outputs, measured.backward.is_some(), measured.decoded),
                (m * n, true, Some(n * k))
            );
        }
    }
    Ok(())
}

#[test]
fn threads_do_not_change_a_bit() -> Result<()> {
    let (subject, pools) = (dense_path(), [1, 2, 3, 7].map(ThreadPool::new));
    subject.ignores_threads(NVFP4)?;
    let (m, n, k) = (260, 200, 600);
    for io in IO {
        let stored = IoBuffer::new(DType::F32, &noise(n * k, 1));
        let p = dense(&stored, (m, n, k), noise(m * k, 2), io);
        let w = subject.prepare(&p, (io, io), &pools[0])?;
        let run = |pool| both(&*w, &p.x, &p.x[..m * n], (io, io), pool);
        let one = run(&pools[0])?;
        for pool in &pools[1..] {
            assert!(run(pool)? == one, "{io} on {} threads", pool.threads());
        }
    }
    Ok(())
}

#[test]
fn strides_are_followed_and_gaps_left_alone() -> Result<()> {
    dense_path().follows_strides(NVFP4)
}

#[test]
fn a_rounded_copy_is_not_passed_off_as_the_decoded_matrix() -> Result<()> {
    let (subject, pool) = (dense_path(), ThreadPool::new(1));
    let stored = IoBuffer::new(DType::F32, &noise(5 * 16, 1));
    let p = dense(&stored, (1, 5, 16), noise(16, 2), DType::F32);
    for y in [DType::F16, DType::BF16] {
        let w = subject.prepare(&p, (DType::F32, y), &pool)?;
        assert!(!w.info().ops.contains(OpSet::DEQUANTIZE));
        let mut out = [0f32; 5 * 16];
        let e = w.dequantize(TensorViewMut::of(&mut out, &[5, 16])?, &mut ExecContext::cpu(&pool));
        assert_eq!(e.unwrap_err().code(), Code::Unsupported);
    }
    Ok(())
}

#[test]
fn a_half_precision_copy_keeps_rows_of_any_size() -> Result<()> {
    let (subject, pool, k, types) = (dense_path(), ThreadPool::new(1), 64, (DType::F32, DType::F16));
    let sizes = [1e-9, 1.0, 1e7];
    let values: Vec<f32> = noise(3 * k, 1).iter().enumerate().map(|(i, v)| v * sizes[i / k]).collect();
    let x: Vec<f32> = noise(k, 2).iter().map(|v| v * 1e-4).collect();
    let stored = IoBuffer::F32(values.clone());
    let p = dense(&stored, (1, 3, k), x, DType::F32);
    let w = subject.prepare(&p, types, &pool)?;
    assert_eq!(w.info().resident_bytes, 3 * 64 * 2 + 3 * 4);
    for (y, row) in forward(&*w, &p.x, types, &pool)?.iter().zip(values.chunks(k)) {
        let terms = p.x.iter().zip(row).map(|(x, w)| f64::from(*x) * f64::from(*w));
        let (exact, abs) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
        let limit = bound(ExecPath::DequantMatmul, Units::Full, DType::F16, k, exact, abs);
        assert!((f64::from(*y) - exact).abs() <= limit, "{y}, not {exact} within {limit}");
    }
    for (r, size) in sizes.iter().enumerate() {
        let mut dy = [0.0; 3];
        dy[r] = 0.5;
        let dx = backward(&*w, &dy, types, &pool)?;
        let limit = |w: &f32| w.abs().max(size * 1e-7) * 0.5f32.powi(12);
        assert!(
            dx.iter().zip(&values[r * k..]).all(|(dx, w)| (dx - w * 0.5).abs() <= limit(w)),
            "row of {size}"
        );
    }
    Ok(())
}

#[test]
fn every_reason_is_given_at_once() {
    use RejectCode::*;
    let global = ActGlobal::Static(GlobalScale::divide(2.0).unwrap());
    let other_convention = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global });
    let expect = [
        PathUnsupported,
        ActivationsUnsupported,
        OpUnsupported,
        DtypeUnsupported,
        DtypeUnsupported,
        ShapeUnsupported,
        ShapeUnsupported,
        DeviceAbsent,
    ];
    assert_eq!(dense_path().reasons(NVFP4, other_convention), expect);
}

#[test]
fn an_isa_that_is_not_there_is_refused() {
    let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
    for isa in ["avx1024", foreign] {
        assert!(built(Some(isa)).live("dequant-matmul").is_none(), "{isa}");
    }
    assert!(!subjects("dequant-matmul", ExecPath::DequantMatmul).is_empty());
}

#[test]
fn damage_is_refused() -> Result<()> {
    let (subject, pool) = (dense_path(), ThreadPool::new(1));
    subject.refuses_damage(NVFP4)?;
    let codes = [0x35u8; 32];
    let scales = [0x38, 0x38, 0x38, 0x7f];
    let data = Nvfp4Parts {
        codes: TensorView::of(&codes, &[32])?,
        scales: TensorView::of_bytes(&scales, DType::F8E4M3, &[4])?,
        global: Some(GlobalScale::multiply(1.0)?),
    }
    .into();
    let weight = Q4Weight { schema: NVFP4, k: 16, segments: &[Segment { rows: 4, data }] };
    let p = Problem { weight, ..dense(&IoBuffer::F32(vec![0.0; 64]), (1, 4, 16), Vec::new(), DType::F32) };
    let e = subject.prepare(&p, (DType::F32, DType::F32), &pool).err().unwrap();
    assert_eq!(e.code(), Code::ValueInvalid, "a NaN scale");
    assert!(e.to_string().contains("row 3"), "{e}");
    Ok(())
}

#[test]
fn dispatch_checks_it_and_counts_its_calls() -> Result<()> {
    let nf4 = Q4Schema::Nf4(Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: Some(256) });
    let schemas = [NVFP4, nf4, Q4Schema::Dense(Dense { dtype: DType::BF16 })];
    schemas.into_iter().try_for_each(|schema| dense_path().is_dispatched_and_counted(schema))
}

fn dense_path() -> Subject {
    subjects("dequant-matmul", ExecPath::DequantMatmul).remove(0)
}

/// `x[m, k]` rounded to `io` against a dense weight.
fn dense(stored: &IoBuffer, (m, n, k): (usize, usize, usize), x: Vec<f32>, io: DType) -> Problem<'_> {
    let view = stored.view(n, k).unwrap();
    let segments =
        Box::leak(Box::new([Segment { rows: n, data: SegmentData::default().with(Part::Codes, view) }]));
    Problem {
        name: format!("dense/{io}/n{n}.k{k}.m{m}"),
        weight: Q4Weight { schema: Q4Schema::Dense(Dense { dtype: view.dtype() }), k, segments },
        x: IoBuffer::new(io, &x).to_f32(),
        m,
        max_m: m,
        activations: Activations::Native,
        io,
        recorded: None,
    }
}

/// Uniform in [-1, 1), the same in every run.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let word = |i: u64| (i ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mix = |i: u64| (word(i) ^ word(i) >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (1..=len as u64).map(|i| (mix(i) >> 40) as f32 / (1u32 << 23) as f32 - 1.0).collect()
}
