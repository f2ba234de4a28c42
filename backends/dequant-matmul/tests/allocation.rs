//! No product allocates: counted by an allocator of its own, hence a file of its own.
#![allow(clippy::unwrap_used)]
use q4_core::{
    Absmax, Activations, BuiltinOptions, DType, Device, ExecContext, ExecPath, LinearSpec, NibbleOrder,
    OpSet, Q4Schema, Q4Weight, Registry, Segment, SegmentData, SegmentSpec, TensorView, TensorViewMut,
    ThreadPool,
};
use q4_dequant_matmul as _;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

struct Counting;
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
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

#[test]
fn no_call_allocates() {
    let (n, k, pool) = (130, 256, ThreadPool::new(2));
    let schema = Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: None };
    let (codes, absmax) = (vec![0x5au8; n * k / 2], vec![0.5f32; n * k / 64]);
    let absmax = Absmax::Plain(TensorView::of(&absmax, &[absmax.len()]).unwrap());
    let data = SegmentData::Nf4 { codes: TensorView::of(&codes, &[codes.len()]).unwrap(), absmax };
    let w = Q4Weight { schema, k, segments: &[Segment { rows: n, data }] };
    let registry = Registry::builtin(&BuiltinOptions::default()).unwrap();
    for activations in [Activations::Native, Activations::Int8] {
        let spec = LinearSpec {
            segments: vec![SegmentSpec { name: "layer".into(), rows: n }],
            schema,
            k,
            max_m: 40,
            x: DType::BF16,
            y: DType::BF16,
            activations,
            device: Device::Cpu,
            ops: OpSet::FORWARD,
        };
        let backend = registry.live("dequant-matmul").unwrap();
        let p = backend.prepare(&w, &spec, ExecPath::DequantMatmul, &mut ExecContext::cpu(&pool)).unwrap();
        for m in [1, 4, 40] {
            let x = vec![half::bf16::ONE; m * k];
            let mut y = vec![half::bf16::ZERO; m * n];
            let mut dx = vec![half::bf16::ZERO; m * k];
            let mut scratch = vec![0u8; p.workspace(m) + 64];
            let bytes = [scratch.len()];
            let workspace = TensorViewMut::of(&mut scratch, &bytes).unwrap();
            let mut cx = ExecContext { workspace: Some(workspace), ..ExecContext::cpu(&pool) };
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            let xv = TensorView::of(&x, &[m, k]).unwrap();
            p.forward(xv, TensorViewMut::of(&mut y, &[m, n]).unwrap(), &mut cx).unwrap();
            let dy = TensorView::of(&y, &[m, n]).unwrap();
            p.backward_input(dy, TensorViewMut::of(&mut dx, &[m, k]).unwrap(), &mut cx).unwrap();
            assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "{activations}, m = {m}");
            assert!(y.iter().chain(&dx).any(|v| *v != half::bf16::ZERO));
        }
    }
}
