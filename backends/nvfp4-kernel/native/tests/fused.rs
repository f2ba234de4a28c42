//! Products fused with a gate or an addition, on every instruction set of this machine: the bits of the
//! separate steps.
#![allow(clippy::unwrap_used)]
mod harness;
use NVFP4::abi;
use harness::{Ctx, Failure, Lent, Matrix, Rng, Scratch, Source, Weight, api, call, weight_desc};
use q4_core::exponential::silu;
use q4_core::{DType, GlobalScale};
use std::ptr;

const GATE: u32 = abi::FUSE_GATE;
const ADD: u32 = abi::FUSE_ACCUMULATE;

fn fuses(w: &Weight, m: usize, parts: u32) -> bool {
    // SAFETY: a live weight.
    unsafe { api().fuses.unwrap()(w.0, m as u64, parts) == 1 }
}

fn fused(w: &Weight, x: &Matrix, parts: u32, y: &mut Matrix, lent: &Lent) -> Result<(), Failure> {
    let mut scratch = Scratch::new(w.workspace(x.rows));
    let (x, y, exec) = (x.raw(), y.raw(), lent.exec(scratch.bytes()));
    let fusion =
        abi::Fusion { struct_size: size_of::<abi::Fusion>(), parts, norm_eps: 0.0, norm_weight: ptr::null() };
    // SAFETY: live operands of the stated sizes.
    call(|e| unsafe { api().forward_fused.unwrap()(w.0, &x, &fusion, &y, &exec, e) })
}

#[test]
fn a_fused_product_has_the_bits_of_its_steps() {
    let mut rng = Rng(1);
    let (half, k) = (48, 144);
    let scale = |v| Some(GlobalScale::multiply(v).unwrap());
    let sources =
        [Source::random(half, k, scale(0.01), &mut rng), Source::random(half, k, scale(0.02), &mut rng)];
    let segments = sources.each_ref().map(Source::segment);
    for (isa, ctx) in Ctx::all() {
        for activations in [abi::ACT_NATIVE, abi::ACT_INT8, abi::ACT_NVFP4] {
            let mut desc = weight_desc(&segments, k);
            (desc.activations, desc.max_m) = (activations, 128);
            if activations == abi::ACT_NVFP4 {
                desc.act_rule = abi::RULE_MODELOPT;
            }
            let w = Weight::new(&ctx, &desc).unwrap();
            let mut gated = Vec::new();
            for m in [1, 4, 8, 9, 67] {
                let x = Matrix::of(&rng.floats(m * k), m, k, DType::F32);
                let mut product = Matrix::blank(m, 2 * half, 2 * half, DType::F32);
                w.forward(&x, &mut product, &Lent::serial()).unwrap();
                for parts in [GATE, ADD, GATE | ADD] {
                    let what = format!("{isa}, activations {activations}, parts {parts}, m = {m}");
                    let columns = if parts & GATE != 0 { half } else { 2 * half };
                    let before =
                        if parts & ADD != 0 { rng.floats(m * columns) } else { vec![0.0; m * columns] };
                    let mut y = Matrix::of(&before, m, columns + 3, DType::F32);
                    let outcome = fused(&w, &x, parts, &mut y, &Lent::threads(3));
                    assert_eq!(outcome.is_ok(), fuses(&w, m, parts), "{what}: {outcome:?}");
                    if outcome.is_err() {
                        assert_eq!(y.values(), before, "{what}: written though refused");
                        continue;
                    }
                    if parts == GATE {
                        gated.push(m);
                    }
                    for (i, before) in before.into_iter().enumerate() {
                        let (r, c) = (i / columns, i % columns);
                        let mut want = product.get(r, c);
                        if parts & GATE != 0 {
                            let gate =
                                if isa == "portable" { silu::<false>(want) } else { silu::<true>(want) };
                            want = gate * product.get(r, c + half);
                        }
                        if parts & ADD != 0 {
                            want += before;
                        }
                        assert_eq!(y.get(r, c).to_bits(), want.to_bits(), "{what}, row {r}, column {c}");
                    }
                    assert!(y.gaps_are_untouched(), "{what}");
                }
            }
            assert!(gated.ends_with(&[9, 67]), "{isa}: {gated:?} rows take a gate along");
        }
    }
}

/// On a matrix unit such a row goes another way than the rest, and must be added once all the same.
#[test]
fn rows_out_of_a_units_range_are_added_once() {
    let mut rng = Rng(2);
    let (n, k, m) = (32, 64, 20);
    let source = Source::random(n, k, None, &mut rng);
    let segments = [source.segment()];
    let mut values = rng.floats(m * k);
    values[5 * k + 3] = 1e-42;
    values[17 * k] = 1e38;
    let x = Matrix::of(&values, m, k, DType::F32);
    for (isa, ctx) in Ctx::all() {
        let w = Weight::new(&ctx, &weight_desc(&segments, k)).unwrap();
        let mut product = Matrix::blank(m, n, n, DType::F32);
        w.forward(&x, &mut product, &Lent::serial()).unwrap();
        let mut y = Matrix::of(&vec![1.0; m * n], m, n, DType::F32);
        fused(&w, &x, ADD, &mut y, &Lent::threads(2)).unwrap();
        let want: Vec<f32> = product.values().into_iter().map(|v| 1.0 + v).collect();
        assert_eq!(y.values(), want, "{isa}");
    }
}

#[test]
fn gates_of_part_of_a_row_block_are_left_to_the_caller() {
    let mut rng = Rng(3);
    for (n, takes) in [(32, true), (48, false), (66, false), (64, true)] {
        let source = Source::random(n, 64, None, &mut rng);
        let segments = [source.segment()];
        for (isa, ctx) in Ctx::all() {
            let w = Weight::new(&ctx, &weight_desc(&segments, 64)).unwrap();
            assert_eq!(fuses(&w, 32, GATE), takes, "{isa}: {n}");
            assert!(fuses(&w, 32, ADD) && fuses(&w, 1, ADD) && !fuses(&w, 32, abi::FUSE_NORM), "{isa}: {n}");
        }
    }
}
