//! No call on a prepared weight allocates on this side of the table: decode steps must not depend on an
//! allocator's mood.
#![allow(clippy::unwrap_used)]
use q4_core::{
    ActGlobal, ActQuant, Activations, BuiltinOptions, Candidate, DType, Device, ExecContext, ExecPath,
    LinearSpec, Nvfp4, Nvfp4Parts, OpSet, Q4Schema, Q4Weight, Registry, Rule, ScaleLayout, Segment,
    SegmentSpec, TensorView, TensorViewMut, ThreadPool,
};
use q4_heap::{COUNTED, Heap};
use q4_nvfp4_kernel::NAME;

#[global_allocator]
static HEAP: Heap = COUNTED;

#[test]
fn calls_allocate_nothing() {
    let registry = Registry::builtin(&BuiltinOptions::default()).unwrap();
    let Some(Candidate::Live(backend)) = registry.candidates().iter().find(|c| c.name() == NAME) else {
        panic!("libNVFP4 lies beside the tests")
    };
    let (n, k, m) = (64, 128, 2);
    let (codes, scales) = (vec![0x5au8; n * k / 2], vec![0x38u8; n * k / 16]);
    let segments = [Segment {
        rows: n,
        data: Nvfp4Parts {
            codes: TensorView::of(&codes, &[n, k / 2]).unwrap(),
            scales: TensorView::of_bytes(&scales, DType::F8E4M3, &[n, k / 16]).unwrap(),
            global: None,
        }
        .into(),
    }];
    let schema = Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None });
    let pool = ThreadPool::new(2);
    let w4a4 = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::PerCall });
    for activations in [Activations::Native, Activations::Int8, w4a4] {
        let spec = LinearSpec {
            segments: vec![SegmentSpec { name: "m".into(), rows: n }],
            schema,
            k,
            max_m: m,
            x: DType::F32,
            y: DType::F32,
            activations,
            device: Device::Cpu,
            ops: OpSet::ALL,
        };
        let mut cx = ExecContext::cpu(&pool);
        let w = Q4Weight { schema, k, segments: &segments };
        let weight = backend.prepare(&w, &spec, ExecPath::FusedDequant, &mut cx).unwrap();
        let (x, mut y, mut dx) = (vec![0.5f32; m * k], vec![0f32; m * n], vec![0f32; m * k]);
        let mut scratch = vec![0u64; weight.workspace(m) / 8 + 16];
        let at = scratch.as_ptr().align_offset(64);
        let bytes = (scratch.len() - at) * 8;
        // SAFETY: as many bytes of a live, otherwise unused allocation.
        let scratch =
            unsafe { std::slice::from_raw_parts_mut(scratch[at..].as_mut_ptr().cast::<u8>(), bytes) };
        cx.workspace = Some(TensorViewMut::of(scratch, &[bytes]).unwrap());
        let before = q4_heap::calls();
        for _ in 0..10 {
            let out = TensorViewMut::of(&mut y, &[m, n]).unwrap();
            weight.forward(TensorView::of(&x, &[m, k]).unwrap(), out, &mut cx).unwrap();
            let out = TensorViewMut::of(&mut dx, &[m, k]).unwrap();
            weight.backward_input(TensorView::of(&y, &[m, n]).unwrap(), out, &mut cx).unwrap();
        }
        assert_eq!(q4_heap::calls(), before, "{activations:?}");
        assert!(y.iter().all(|v| v.is_finite() && *v != 0.0));
    }
}
