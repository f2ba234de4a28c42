//! A described weight to an operand of FP4 tensor cores.
use super::super::Engine;
use super::super::memory::Memory;
use super::super::prepare::{finished, stream};
use super::super::simple::Raw;
use super::super::simple::Span;
use super::kernels::Operand;
use super::{Native, Weight, padded};
use crate::prepare::Plan;
use q4_core::formats::swizzle;
use q4_core::memory::UnifiedMemory;
use q4_core::{Activations, Code, Error, Reject, Result, ThreadPool};
use q4_cuda::{check, driver};
use std::sync::Arc;

/// Packs a weight on the device; waits until it is complete.
pub fn prepare(
    engine: &Arc<Engine>,
    plan: &Plan<'_>,
    unified: UnifiedMemory,
    threads: &ThreadPool,
) -> Result<Weight> {
    let refused = |r: &Reject| {
        let what = "a product on FP4 tensor cores";
        Error::new(Code::Unsupported, what).need(r.need.clone()).have(r.have.clone())
    };
    let native = engine.native.as_ref().map_err(refused)?;
    if let Some(reason) = native.refuse([plan.n, plan.k, plan.max_m]) {
        return Err(refused(&reason));
    }
    finished(engine, plan, build(engine, native, plan, unified, threads))
}

/// The weight, and the first scale that no weight may have.
fn build(
    engine: &Arc<Engine>,
    native: &Native,
    plan: &Plan<'_>,
    unified: UnifiedMemory,
    threads: &ThreadPool,
) -> Result<(Weight, Option<(usize, usize)>)> {
    let Activations::Nvfp4(act) = plan.activations else {
        return Err(Error::new(Code::Unsupported, "the native path")
            .need("nvfp4 activations")
            .have(plan.activations.to_string()));
    };
    let (gpu, padded) = (&engine.gpu, padded(plan.n, plan.k));
    let [rows, columns] = padded;
    let spans = plan.spans();
    let table: Vec<_> = plan.parts.iter().zip(&spans).map(|(p, s)| Span::new(s.end, 0, p.global)).collect();
    let scales_at = (rows * columns / 2).next_multiple_of(256);
    let spans_at = scales_at + swizzle::blocked_len(rows, columns / 16);
    let memory = Memory::new(gpu, spans_at + size_of_val(&table[..]), unified)?;
    let base = memory.ptr();
    gpu.bind()?;
    // SAFETY: our own memory.
    let status = unsafe { driver::cuMemsetD8Async(base, 0, spans_at, std::ptr::null_mut()) };
    check(status, "cuMemsetD8Async")?;
    memory.upload(gpu, spans_at, Span::bytes(&table))?;
    let operand = Operand {
        codes: base,
        scales: base + scales_at as u64,
        spans: base + spans_at as u64,
        n: plan.n as u32,
        k: plan.k as u32,
        groups: (columns / 16) as u32,
        span_count: table.len() as u32,
    };
    let pack = |raw: &Raw, first| {
        // SAFETY: the memory has the size of the layout.
        unsafe { native.kernels.pack(raw, first, &operand) }
    };
    let bad = stream(engine, plan, 1, threads, pack)?;
    let weight = Weight {
        info: plan.info(memory.len() as u64),
        engine: engine.clone(),
        kernels: native.kernels.clone(),
        product: native.product(padded),
        _memory: memory,
        operand,
        padded,
        spans,
        act,
        n: plan.n,
        k: plan.k,
        x: plan.x,
        y: plan.y,
        max_m: plan.max_m,
    };
    Ok((weight, bad))
}
