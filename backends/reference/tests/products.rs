//! What the oracle promises besides the lattice of the conformance suite.
#![allow(clippy::unwrap_used)]
mod contract;

use contract::{Subject, built, forward, subjects};
use q4_conformance::lattice;
use q4_core::oracle::{Column, Input, roundoff};
use q4_core::{
    ActGlobal, ActQuant, Activations, Convention, DType, Dense, Dispatch, ExecPath, GlobalScale, Nf4,
    NibbleOrder, Nvfp4, Policy, Q4Schema, RejectCode, Result, RowDecoder, Rule, ScaleLayout, ThreadPool,
};
use q4_reference as _;

const NVFP4: Q4Schema =
    Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, global: Some(Convention::Divide) });
const NF4: Q4Schema =
    Q4Schema::Nf4(Nf4 { nibble_order: NibbleOrder::LowFirst, block: 4096, nested: Some(256) });
const DENSE: Q4Schema = Q4Schema::Dense(Dense { dtype: DType::F16 });

#[test]
fn every_result_is_the_exact_one_rounded_once() -> Result<()> {
    let (oracle, pool) = (oracle(), ThreadPool::new(2));
    for schema in [NVFP4, NF4, DENSE] {
        oracle.is_right_for(schema)?;
        lattice::each(schema, &mut |p| {
            let (n, k) = (p.weight.n(), p.weight.k);
            let w = oracle.prepare(p, (p.io, p.io), &pool)?;
            assert!(w.info().resident_bytes >= schema.stored_bytes(n, k));
            let y = forward(&*w, &p.x, (p.io, p.io), &pool)?;
            let (input, decoder) = (Input::new(&p.x, k, &p.activations, p.io)?, RowDecoder::new(&p.weight)?);
            for j in 0..n {
                let column = Column::new(&decoder, j);
                for r in 0..p.m {
                    let exact = input.dot(r, &column).0;
                    // Subnormal numbers of f16 are 2^-24 apart.
                    let limit = (exact.abs() * roundoff(p.io)).max(0.5f64.powi(25));
                    assert!((f64::from(y[r * n + j]) - exact).abs() <= limit, "{} y[{r}, {j}]", p.name);
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn strides_are_followed_and_gaps_left_alone() -> Result<()> {
    oracle().follows_strides(NVFP4)
}

#[test]
fn neither_threads_nor_rows_nor_segments_change_a_bit() -> Result<()> {
    let oracle = oracle();
    oracle.ignores_threads(NVFP4)?;
    oracle.keeps_rows_apart(NVFP4)?;
    oracle.keeps_segments_apart(NF4)
}

#[test]
fn the_decoded_matrix_is_rounded_once_and_damage_refused() -> Result<()> {
    oracle().rounds_the_decoded_matrix_once(NF4)?;
    oracle().refuses_damage(NVFP4)
}

#[test]
fn every_reason_is_given_at_once() {
    use RejectCode::*;
    let global = ActGlobal::Static(GlobalScale::divide(2.0).unwrap());
    let other_convention = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global });
    let expect = [
        PathUnsupported,
        DeviceAbsent,
        ActivationsUnsupported,
        DtypeUnsupported,
        DtypeUnsupported,
        ShapeUnsupported,
        ShapeUnsupported,
    ];
    assert_eq!(oracle().reasons(NVFP4, other_convention), expect);
}

#[test]
fn it_serves_whoever_names_it_and_nobody_else() -> Result<()> {
    let oracle = oracle();
    for schema in [NVFP4, NF4, DENSE] {
        oracle.is_dispatched_and_counted(schema)?;
        lattice::each(schema, &mut |p| {
            let spec = oracle.spec(p, (p.io, p.io));
            let unasked = Dispatch::new(built(None), Policy::default()).select(&spec);
            assert!(unasked.is_err(), "only the oracle is linked here");
            Ok(())
        })?;
    }
    Ok(())
}

fn oracle() -> Subject {
    subjects("reference", ExecPath::Reference).remove(0)
}
