//! Products fused with a gate or an addition, on every instruction set of this machine: the bits of the
//! separate steps.
#![allow(clippy::unwrap_used)]
mod harness;
use harness::{Ctx, Desc, Lent, Matrix, Rng, Source, Weight};
use q4_core::exponential::silu;
use q4_core::{ActGlobal, ActQuant, Activations, DType, FuseSet, GlobalScale, Rule};

const GATE: FuseSet = FuseSet::GATE;
const ADD: FuseSet = FuseSet::ACCUMULATE;
const W4A4: Activations = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None });

#[test]
fn a_fused_product_has_the_bits_of_its_steps() {
    let mut rng = Rng(1);
    let (half, k) = (48, 144);
    let scale = |v| Some(GlobalScale::multiply(v).unwrap());
    let sources =
        [Source::random(half, k, scale(0.01), &mut rng), Source::random(half, k, scale(0.02), &mut rng)];
    for (isa, ctx) in Ctx::all() {
        for activations in [Activations::Native, Activations::Int8, W4A4] {
            let mut desc = Desc::of(&sources, k);
            (desc.activations, desc.max_m) = (activations, 128);
            let w = Weight::new(&ctx, &desc).unwrap();
            let mut gated = Vec::new();
            for m in [1, 4, 8, 9, 67] {
                let x = Matrix::of(&rng.floats(m * k), m, k, DType::F32);
                let mut product = Matrix::blank(m, 2 * half, 2 * half, DType::F32);
                w.forward(&x, &mut product, &Lent::serial()).unwrap();
                for parts in [GATE, ADD, GATE.with(ADD)] {
                    let (gates, adds) = (parts.contains(GATE), parts.contains(ADD));
                    let what = format!("{isa}, activations {activations}, parts {}, m = {m}", parts.0);
                    let columns = if gates { half } else { 2 * half };
                    let before = if adds { rng.floats(m * columns) } else { vec![0.0; m * columns] };
                    let mut y = Matrix::of(&before, m, columns + 3, DType::F32);
                    let outcome = w.fused(&x, parts, &mut y, &Lent::threads(3));
                    assert_eq!(outcome.is_ok(), w.fuses(m, parts), "{what}: {outcome:?}");
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
                        if gates {
                            let gate =
                                if isa == "portable" { silu::<false>(want) } else { silu::<true>(want) };
                            want = gate * product.get(r, c + half);
                        }
                        if adds {
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
    let mut values = rng.floats(m * k);
    values[5 * k + 3] = 1e-42;
    values[17 * k] = 1e38;
    let x = Matrix::of(&values, m, k, DType::F32);
    for (isa, ctx) in Ctx::all() {
        let w = Weight::new(&ctx, &Desc::of(std::slice::from_ref(&source), k)).unwrap();
        let mut product = Matrix::blank(m, n, n, DType::F32);
        w.forward(&x, &mut product, &Lent::serial()).unwrap();
        let mut y = Matrix::of(&vec![1.0; m * n], m, n, DType::F32);
        w.fused(&x, ADD, &mut y, &Lent::threads(2)).unwrap();
        let want: Vec<f32> = product.values().into_iter().map(|v| 1.0 + v).collect();
        assert_eq!(y.values(), want, "{isa}");
    }
}

#[test]
fn gates_of_part_of_a_row_block_are_left_to_the_caller() {
    let mut rng = Rng(3);
    for (n, takes) in [(32, true), (48, false), (66, false), (64, true)] {
        let source = Source::random(n, 64, None, &mut rng);
        for (isa, ctx) in Ctx::all() {
            let w = Weight::new(&ctx, &Desc::of(std::slice::from_ref(&source), 64)).unwrap();
            assert_eq!(w.fuses(32, GATE), takes, "{isa}: {n}");
            assert!(w.fuses(32, ADD) && w.fuses(1, ADD) && !w.fuses(32, FuseSet::NORM), "{isa}: {n}");
        }
    }
}
