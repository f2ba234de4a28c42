//! A described weight to an operand of FP4 tensor cores.
use super::super::Engine;
use super::super::memory::Memory;
use super::super::prepare::{finished, stream};
use super::super::simple::Span;
use super::kernels::Operand;
use super::{Native, Weight, padded};
use crate::call::{Exec, Fail, Outcome};
use crate::prepare::Plan;
use q4_core::formats::swizzle;
use q4_core::{Activations, Result};
use q4_cuda::{check, driver};
use std::sync::Arc;

/// Builds the weight; waits until it is complete.
///
/// # Safety
/// The segments' bytes are readable.
pub unsafe fn prepare(engine: &Arc<Engine>, plan: &Plan, exec: &Exec) -> Outcome<Weight> {
    let native = engine.native.as_ref().map_err(|f| Fail::from(vec![f.clone()]))?;
    // SAFETY: forwarded.
    let built = unsafe { build(engine, native, plan, exec) };
    // SAFETY: forwarded.
    unsafe { finished(engine, plan, built) }
}

/// The weight, and the first scale that no weight may have.
unsafe fn build(
    engine: &Arc<Engine>,
    native: &Native,
    plan: &Plan,
    exec: &Exec,
) -> Result<(Weight, Option<(usize, usize)>)> {
    let Activations::Nvfp4(act) = plan.activations else {
        return Err(q4_core::Error::new(q4_core::Code::Unsupported, "the native path")
            .need("nvfp4 activations")
            .have(plan.activations.to_string()));
    };
    let (gpu, padded) = (&engine.gpu, padded(plan.n, plan.k));
    let [rows, columns] = padded;
    let spans = plan.spans();
    let table: Vec<_> = plan.parts.iter().zip(&spans).map(|(p, s)| Span::new(s.end, 0, p.global)).collect();
    let scales_at = (rows * columns / 2).next_multiple_of(256);
    let spans_at = scales_at + swizzle::blocked_len(rows, columns / 16);
    let memory = Memory::new(gpu, spans_at + size_of_val(&table[..]), engine.is_managed)?;
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
    // SAFETY: forwarded; the memory has the size of the layout.
    let bad =
        unsafe { stream(engine, plan, 1, exec, |raw, first| native.kernels.pack(raw, first, &operand))? };
    let weight = Weight {
        engine: engine.clone(),
        kernels: native.kernels.clone(),
        product: native.product(padded),
        memory,
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
