//! A product through a plugin allocates nothing on the program's side.
#![allow(clippy::unwrap_used)]
mod built;

use q4_core::{
    Activations, Candidate, DType, Device, ExecContext, ExecPath, LinearSpec, Nvfp4, Nvfp4Parts, OpSet,
    Q4Schema, Q4Weight, ScaleLayout, Segment, SegmentSpec, TensorView, TensorViewMut, ThreadPool,
};
use q4_heap::{COUNTED, Heap};

#[global_allocator]
static HEAP: Heap = COUNTED;

#[test]
fn a_product_allocates_nothing() {
    let (n, k) = (64, 256);
    let (codes, scales) = (vec![0x21u8; n * k / 2], vec![0x38u8; n * k / 16]);
    let data = Nvfp4Parts {
        codes: TensorView::of(&codes, &[n, k / 2]).unwrap(),
        scales: TensorView::of_bytes(&scales, DType::F8E4M3, &[n, k / 16]).unwrap(),
        global: None,
    }
    .into();
    let segments = [Segment { rows: n, data }];
    let schema = Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None });
    let w = Q4Weight { schema, k, segments: &segments };
    let pool = ThreadPool::new(2);
    for path in [built::acme_c(), built::acme_nvfp4()] {
        let Candidate::Live(backend) = q4_plugin_host::load(&path).unwrap().candidate else {
            unreachable!("loaded libraries live")
        };
        let spec = LinearSpec {
            segments: vec![SegmentSpec { name: "w".into(), rows: n }],
            schema,
            k,
            max_m: 1,
            x: DType::BF16,
            y: DType::BF16,
            activations: Activations::Native,
            device: Device::Cpu,
            ops: OpSet::FORWARD,
        };
        let prepared =
            backend.prepare(&w, &spec, ExecPath::FusedDequant, &mut ExecContext::cpu(&pool)).unwrap();
        let x = vec![half::bf16::ONE; k];
        let mut y = vec![half::bf16::ZERO; n];
        let mut scratch = vec![0u64; prepared.workspace(1) / 8 + 16];
        let mut product = || {
            let bytes = bytes_of(&mut scratch);
            let at = bytes.as_ptr().align_offset(64);
            let len = bytes.len() - at;
            let mut cx = ExecContext::cpu(&pool);
            cx.workspace = Some(TensorViewMut::of(&mut bytes[at..], &[len]).unwrap());
            let x = TensorView::of(&x, &[1, k]).unwrap();
            prepared.forward(x, TensorViewMut::of(&mut y, &[1, n]).unwrap(), &mut cx).unwrap();
        };
        product();
        let before = q4_heap::calls();
        (0..10).for_each(|_| product());
        assert_eq!(q4_heap::calls(), before, "{}", path.display());
        // Codes 1 and 2 are 0.5 and 1; a scale of 0x38 is 1.
        assert_eq!(y[0].to_f32(), 0.75 * k as f32);
    }
}

/// The bytes of a buffer of words.
fn bytes_of(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: bytes have no alignment and no invalid value.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}
