//! No product allocates: counted by an allocator of its own, hence a file of its own.
#![allow(clippy::unwrap_used)]
use q4_conformance::lattice;
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    BuiltinOptions, DType, Device, ExecContext, ExecPath, LinearSpec, Nf4, NibbleOrder, OpSet, Q4Schema,
    Registry, Result, SegmentSpec, TensorViewMut, ThreadPool,
};
use q4_heap::{COUNTED, Heap};
use q4_nf4_kernel as _;

#[global_allocator]
static HEAP: Heap = COUNTED;

#[test]
fn no_call_allocates() -> Result<()> {
    let (pool, io) = (ThreadPool::new(2), DType::BF16);
    let schema = Q4Schema::Nf4(Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: None });
    let registry = Registry::builtin(&BuiltinOptions::default())?;
    let backend = registry.live("nf4-kernel").unwrap();
    let mut calls = 0;
    lattice::each(schema, &mut |p| {
        if p.io != io {
            return Ok(());
        }
        let (m, n, k) = (p.m, p.weight.n(), p.weight.k);
        let spec = LinearSpec {
            segments: p
                .weight
                .segments
                .iter()
                .map(|s| SegmentSpec { name: "layer".into(), rows: s.rows })
                .collect(),
            schema,
            k,
            max_m: m,
            x: io,
            y: io,
            activations: p.activations,
            device: Device::Cpu,
            ops: OpSet::ALL,
        };
        let w = backend.prepare(&p.weight, &spec, ExecPath::FusedDequant, &mut ExecContext::cpu(&pool))?;
        let x = IoBuffer::new(io, &p.x);
        let (mut y, mut dx) = (IoBuffer::new(io, &vec![0.0; m * n]), IoBuffer::new(io, &vec![0.0; m * k]));
        let mut scratch = vec![0u8; w.workspace(m) + 64];
        let bytes = [scratch.len()];
        let workspace = Some(TensorViewMut::of(&mut scratch, &bytes)?);
        let mut cx = ExecContext { workspace, ..ExecContext::cpu(&pool) };
        let before = q4_heap::calls();
        w.forward(x.view(m, k)?, y.view_mut(m, n)?, &mut cx)?;
        w.backward_input(y.view(m, n)?, dx.view_mut(m, k)?, &mut cx)?;
        assert_eq!(q4_heap::calls(), before, "{}", p.name);
        calls += 2;
        Ok(())
    })?;
    assert!(calls >= 8, "{calls} calls");
    Ok(())
}
