//! Calls on a prepared weight allocate nothing: they are the decode path.
#![allow(clippy::unwrap_used)]
mod harness;
use NVFP4::abi;
use harness::{Ctx, Lent, Matrix, Rng, Scratch, Source, Weight, api, weight_desc};
use q4_core::DType;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: forwards to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: forwarded.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: forwarded.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs the tasks in order: a pool that itself allocates nothing.
unsafe extern "C" fn in_order(
    _: *mut std::ffi::c_void,
    tasks: usize,
    body: abi::TaskFn,
    arg: *mut std::ffi::c_void,
) {
    // SAFETY: the library's own body and argument.
    (0..tasks).for_each(|t| unsafe { body(arg, t) });
}

#[test]
fn calls_on_a_weight_allocate_nothing() {
    let mut rng = Rng(1);
    let (n, k) = (200, 1040);
    let source = Source::random(n, k, None, &mut rng);
    for (isa, ctx) in Ctx::all() {
        for (activations, kind) in
            [(abi::ACT_NATIVE, 0), (abi::ACT_INT8, 0), (abi::ACT_NVFP4, abi::GLOBAL_PER_CALL)]
        {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let segments = [source.segment()];
                let mut desc = weight_desc(&segments, k);
                (desc.activations, desc.act_global_kind) = (activations, kind);
                desc.act_rule = if activations == abi::ACT_NVFP4 { abi::RULE_MODELOPT } else { 0 };
                (desc.x_dtype, desc.y_dtype) = (harness::dtype_code(dtype), harness::dtype_code(dtype));
                let w = Weight::new(&ctx, &desc).unwrap();
                for m in [1, 7] {
                    let x = Matrix::of(&rng.floats(m * k), m, k, dtype);
                    let (y, dx) = (Matrix::blank(m, n, n, dtype), Matrix::blank(m, k, k, dtype));
                    let mut scratch = Scratch::new(w.workspace(m));
                    let mut exec = Lent::serial().exec(scratch.bytes());
                    exec.parallel = Some(in_order);
                    exec.threads = 3;
                    let (x, y, dx) = (x.raw(), y.raw(), dx.raw());
                    let before = COUNT.get();
                    // SAFETY: live operands of the stated sizes.
                    let status = unsafe {
                        let f = api().forward.unwrap()(w.0, &x, &y, &exec, ptr::null_mut());
                        f | api().backward_input.unwrap()(w.0, &y, &dx, &exec, ptr::null_mut())
                    };
                    let after = COUNT.get();
                    assert_eq!(
                        (status, after - before),
                        (0, 0),
                        "{isa} activations {activations} {dtype} m={m}"
                    );
                }
            }
        }
    }
    assert!(COUNT.get() > 0, "the allocator counts");
}
