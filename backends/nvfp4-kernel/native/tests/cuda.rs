//! What only a device can show: managed memory, and how failures are told. Products are the suite's.
#![allow(clippy::unwrap_used)]
mod harness;
use harness::{Desc, Lent, Matrix, Rng, Source};
use q4_core::memory::UnifiedMemory;
use q4_core::{
    BuiltinOptions, Code, DType, Device, ExecContext, ExecPath, Nvfp4Parts, PreparedWeight, Q4Weight, Result,
    Segment, TensorView,
};
use q4_cuda::{Buffer, Gpu, view_mut};
use std::sync::Arc;

/// The first device; `None`, said in words, without one.
fn device() -> Option<Arc<Gpu>> {
    match q4_cuda::devices().map(|all| all.len()) {
        Ok(1..) => Some(Gpu::open(0).unwrap()),
        other => {
            println!("skipped: no CUDA device ({other:?})");
            None
        }
    }
}

fn prepare(source: &Source, unified_memory: UnifiedMemory) -> Result<Box<dyn PreparedWeight>> {
    let options = BuiltinOptions { cuda: Some(0), unified_memory, ..BuiltinOptions::default() };
    let backend = NVFP4::construct(&options).unwrap();
    let desc = Desc::of(std::slice::from_ref(source), source.k);
    let spec = q4_core::LinearSpec { device: Device::Cuda(0), ..desc.spec() };
    let codes = TensorView::of(&source.codes, &[source.codes.len()])?;
    let scales = TensorView::of_bytes(&source.scales, DType::F8E4M3, &[source.scales.len()])?;
    let data = Nvfp4Parts { codes, scales, global: source.global }.into();
    let segments = [Segment { rows: source.rows, data }];
    let w = Q4Weight { schema: spec.schema, k: source.k, segments: &segments };
    let lent = Lent::threads(3);
    backend.prepare(&w, &spec, ExecPath::FusedDequant, &mut ExecContext::on(Device::Cuda(0), 0, &lent.0))
}

#[test]
fn managed_memory_holds_the_same_weight() {
    let Some(gpu) = device() else { return };
    let source = Source::random(48, 128, None, &mut Rng(5));
    for unified in [UnifiedMemory::Disabled, UnifiedMemory::Prefer, UnifiedMemory::Require] {
        let w = prepare(&source, unified).unwrap();
        let blank = Matrix::blank(48, 128, 128, DType::F32);
        let out = Buffer::of(&gpu, &blank.bytes).unwrap();
        let lent = Lent::serial();
        let mut cx = ExecContext::on(Device::Cuda(0), 0, &lent.0);
        w.dequantize(view_mut(&out, 0, DType::F32, &[48, 128]).unwrap(), &mut cx).unwrap();
        gpu.synchronize().unwrap();
        let mut have = vec![0f32; 48 * 128];
        out.download(0, &mut have).unwrap();
        assert_eq!(have, source.values(), "{unified:?}");
    }
}

#[test]
fn a_bad_scale_is_named_and_the_next_weight_works() {
    if device().is_none() {
        return;
    }
    let mut source = Source::random(40, 128, None, &mut Rng(5));
    source.scales[17 * 8 + 3] = 0x7f;
    let refused = prepare(&source, UnifiedMemory::Disabled).err().unwrap();
    assert_eq!(refused.code(), Code::ScaleInvalid);
    assert!(refused.what().ends_with("(row 17, block 3)"), "{refused}");
    source.scales[17 * 8 + 3] = 0x38;
    assert!(prepare(&source, UnifiedMemory::Disabled).is_ok());
}
