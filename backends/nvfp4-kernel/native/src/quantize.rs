//! The raw calls, without a prepared weight: quantising a matrix, and the product of two quantised matrices.
use crate::abi;
use crate::activations::{self, Quantised};
use crate::call::{Exec, Fail, Finding, Mat, Outcome, dtype, part, read, write};
use crate::handle::Context;
use crate::kernels::GROUPS;
use crate::memory::Packed;
use crate::output::Output;
use crate::prepare::{Part, Plan, act_global, check_scales, rule};
use crate::{ctx, cuda, forward};
use q4_core::formats::nvfp4;
use q4_core::{ActGlobal, Convention, DType, FuseSet, GlobalScale, Rule};
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements widened at once.
const CHUNK: usize = 1024;

/// x to codes and row-major scales.
///
/// # Safety
/// Size-prefixed structs or NULL; x is readable, the outputs writable.
pub unsafe fn quantize(
    ctx: &Context,
    x: *const abi::Matrix,
    quantizer: *const abi::Quantizer,
    out: *mut abi::Quantized,
    exec: *const abi::Exec,
) -> Outcome {
    // SAFETY: forwarded.
    let (x, q, mut to, exec) = unsafe {
        (
            Mat::read(x, "x", None, None)?,
            read(quantizer, "quantizer")?,
            read(out, "quantized")?,
            Exec::read(exec)?,
        )
    };
    let mut all = Vec::new();
    let rule = rule(q.rule, &mut all);
    let global = act_global(rule, q.global_kind, q.global_convention, q.global_scale, &mut all);
    let source = if q.source_dtype == 0 { Some(x.dtype) } else { dtype(q.source_dtype) };
    if source.is_none() || q.reserved != 0 {
        let have = format!("{} and {}", q.source_dtype, q.reserved);
        all.push(Finding::mistake("source_dtype 0 to 3, reserved = 0", have));
    }
    if x.cols % 16 != 0 {
        all.push(Finding::limit("shape-unsupported", "k % 16 == 0", format!("k = {}", x.cols)));
    }
    let elements = x.rows * x.cols;
    for (what, at, have, need) in [
        ("codes", to.codes, to.codes_bytes, elements / 2),
        ("scales", to.scales, to.scales_bytes, elements / 16),
    ] {
        if at.is_null() || have < need as u64 {
            let have = if at.is_null() { "NULL".into() } else { format!("{have} bytes") };
            all.push(Finding::mistake(format!("quantized: {need} bytes of {what}"), have));
        }
    }
    if !all.is_empty() {
        return Err(all.into());
    }
    let source = source.unwrap_or(x.dtype);
    let global = match ctx {
        // SAFETY: forwarded.
        Context::Cuda(e) => unsafe {
            let at = (to.codes.addr() as u64, to.scales.addr() as u64);
            cuda::quantize(e, &x, rule, global, source, at, &exec)?
        },
        // SAFETY: forwarded.
        Context::Cpu(c) => unsafe { on_cpu(c, &x, rule, global, source, &to, &exec)? },
    };
    to.global_scale = global.map_or(0.0, |g| g.value());
    to.global_convention = match global.map(|g| g.convention()) {
        None => abi::CONVENTION_NONE,
        Some(Convention::Multiply) => abi::CONVENTION_MULTIPLY,
        Some(Convention::Divide) => abi::CONVENTION_DIVIDE,
    };
    // SAFETY: forwarded.
    unsafe { write(out, &to) };
    Ok(())
}

/// The same in host memory; returns the per-tensor scale that was used.
unsafe fn on_cpu(
    ctx: &ctx::Context,
    x: &Mat,
    rule: Rule,
    global: ActGlobal,
    source: DType,
    to: &abi::Quantized,
    exec: &Exec,
) -> Outcome<Option<GlobalScale>> {
    let global = match global {
        ActGlobal::None => None,
        ActGlobal::Static(g) => Some(g),
        ActGlobal::PerCall => {
            // SAFETY: x is readable.
            let amax = unsafe { activations::amax(x, ctx.isa.kernels(), exec)? };
            Some(nvfp4::global_from_amax(rule, amax, source)?)
        }
    };
    let quantizer = nvfp4::Quantizer { rule, global, source };
    let (codes, scales) = (Bytes(to.codes.cast()), Bytes(to.scales.cast()));
    let refused = AtomicUsize::new(usize::MAX);
    let tasks = exec.tasks(x.rows);
    exec.run(tasks, |t| {
        let mut values = [0.0; CHUNK];
        for row in part(x.rows, tasks, t) {
            for col in (0..x.cols).step_by(CHUNK) {
                let values = &mut values[..CHUNK.min(x.cols - col)];
                let at = row * x.cols + col;
                // SAFETY: inside x and inside the outputs, whose rows are this task's.
                let outcome = unsafe {
                    x.load(row, col, values);
                    quantizer.quantize_row(
                        values,
                        codes.part(at / 2, values.len() / 2),
                        scales.part(at / 16, values.len() / 16),
                    )
                };
                if outcome.is_err() {
                    refused.fetch_min(row, Ordering::Relaxed);
                }
            }
        }
    })?;
    if let row @ 0..usize::MAX = refused.into_inner() {
        return Err(Fail::invalid(format!("x: row {row}"), "finite values to quantise", "NaN or infinity"));
    }
    Ok(global)
}

/// `y = A B^T`.
///
/// # Safety
/// Size-prefixed structs or NULL; the operands are readable, y is writable.
pub unsafe fn scaled_mm(
    ctx: &Context,
    a: *const abi::Segment,
    b: *const abi::Segment,
    k: u64,
    y: *const abi::Matrix,
    exec: *const abi::Exec,
) -> Outcome {
    // SAFETY: forwarded.
    let (a_raw, b_raw, y, exec) =
        unsafe { (read(a, "a")?, read(b, "b")?, Mat::read(y, "y", None, None)?, Exec::read(exec)?) };
    let desc = abi::WeightDesc {
        struct_size: size_of::<abi::WeightDesc>(),
        n: b_raw.rows,
        k,
        segments: b,
        n_segments: 1,
        path: abi::PATH_FUSED_DEQUANT,
        activations: abi::ACT_NVFP4,
        x_dtype: abi::F32,
        y_dtype: abi::F32,
        act_rule: abi::RULE_TORCHAO,
        act_global_kind: abi::GLOBAL_NONE,
        act_global: 0.0,
        act_global_convention: abi::CONVENTION_NONE,
        max_m: a_raw.rows.max(1),
        reserved: 0,
    };
    // SAFETY: forwarded; one segment exists.
    let plan = unsafe { Plan::read(&desc, |shape| ctx.refuse_native(shape)) }?;
    let mut all = Vec::new();
    let a = Part::new(&a_raw, "a", k as usize, &mut all);
    if !a.has_bytes() {
        all.push(Finding::mistake("a: codes and scales", "NULL"));
    }
    if (y.rows as u64, y.cols as u64) != (a_raw.rows, b_raw.rows) {
        let have = format!("[{}, {}]", y.rows, y.cols);
        all.push(Finding::mistake(format!("y: [{}, {}]", a_raw.rows, b_raw.rows), have));
    }
    if !all.is_empty() {
        return Err(all.into());
    }
    let ctx = match ctx {
        // SAFETY: forwarded.
        Context::Cuda(e) => return unsafe { cuda::scaled_mm(e, &a, plan, &y, &exec) },
        Context::Cpu(c) => c,
    };
    // SAFETY: forwarded.
    unsafe {
        check_scales(&[a], &exec).map_err(|f| Fail { text: f.text.replacen("segment 0", "a", 1), ..f })?
    };
    // SAFETY: forwarded.
    let w = unsafe {
        plan.build(ctx, &exec).map_err(|f| Fail { text: f.text.replacen("segment 0", "b", 1), ..f })?
    };
    let bytes = Quantised::bytes(a.rows as u64, w.k).and_then(|b| usize::try_from(b).ok());
    let scratch = Packed::alone(bytes.unwrap_or(usize::MAX))?;
    let q = Quantised::new(scratch.as_ptr(), a.rows);
    let tasks = exec.tasks(a.rows);
    exec.run(tasks, |t| {
        for row in part(a.rows, tasks, t) {
            for tile in 0..w.tiles() {
                let groups = tile * GROUPS..((tile + 1) * GROUPS).min(a.groups);
                // SAFETY: row and groups are inside a, row and tile inside the scratch, the rows this task's.
                unsafe { q.expand(row, tile, groups.map(|g| a.group(row, g))) };
            }
        }
    })?;
    let y = &Output::new(&w, a.rows, FuseSet::NONE, y)?;
    forward::multiply(&w.kernels().bytes, q.rows(), y, forward::nvfp4_factor(a.global), &exec)
}

/// Output bytes that tasks write disjoint parts of.
struct Bytes(*mut u8);
// SAFETY: as said.
unsafe impl Sync for Bytes {}
impl Bytes {
    #[allow(clippy::mut_from_ref)] // the caller's memory, cut by rows
    unsafe fn part(&self, at: usize, len: usize) -> &mut [u8] {
        // SAFETY: inside and unaliased, by the contract of the callers.
        unsafe { slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}
