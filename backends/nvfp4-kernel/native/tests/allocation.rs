//! Calls on a prepared weight allocate nothing: they are the decode path.
#![allow(clippy::unwrap_used)]
mod harness;
use harness::{Ctx, Desc, Lent, Matrix, Rng, Scratch, Source, Weight};
use q4_core::{ActGlobal, ActQuant, Activations, DType, Rule};
use q4_heap::{COUNTED, Heap};

#[global_allocator]
static HEAP: Heap = COUNTED;

#[test]
fn calls_on_a_weight_allocate_nothing() {
    let mut rng = Rng(1);
    let (n, k) = (200, 1040);
    let source = Source::random(n, k, None, &mut rng);
    let w4a4 = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::PerCall });
    let lent = Lent::threads(3);
    for (isa, ctx) in Ctx::all() {
        for activations in [Activations::Native, Activations::Int8, w4a4] {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let mut desc = Desc::of(std::slice::from_ref(&source), k);
                (desc.activations, desc.x, desc.y) = (activations, dtype, dtype);
                let w = Weight::new(&ctx, &desc).unwrap();
                for m in [1, 7] {
                    let x = Matrix::of(&rng.floats(m * k), m, k, dtype);
                    let (mut y, mut dx) = (Matrix::blank(m, n, n, dtype), Matrix::blank(m, k, k, dtype));
                    let mut scratch = Scratch::new(w.workspace(m));
                    let mut cx = lent.context(scratch.bytes());
                    let before = q4_heap::calls_here();
                    w.0.forward(x.view(), y.view_mut(), &mut cx).unwrap();
                    w.0.backward_input(y.view(), dx.view_mut(), &mut cx).unwrap();
                    let after = q4_heap::calls_here();
                    assert_eq!(after - before, 0, "{isa} activations {activations} {dtype} m={m}");
                }
            }
        }
    }
    assert!(q4_heap::calls_here() > 0, "the allocator counts");
}
