//! The raw calls on a device: quantising a matrix, and the product of two quantised matrices.
use super::Engine;
use super::memory::Staging;
use super::prepare::{self, scale_bytes};
use super::simple::{Quantised, Raw};
use crate::call::{Exec, Fail, Mat, Outcome};
use crate::prepare::{Part, Plan};
use q4_core::{ActGlobal, Convention, GlobalScale, Rule};
use q4_cuda::{Buffer, Stored};
use std::sync::Arc;

/// x to codes and row-major scales at device addresses. Returns the per-tensor scale that was used. Waits.
///
/// # Safety
/// x and the outputs are device memory of the right sizes.
pub unsafe fn quantize(
    engine: &Arc<Engine>,
    x: &Mat,
    rule: Rule,
    global: ActGlobal,
    source: q4_core::DType,
    (codes, scales): (u64, u64),
    exec: &Exec,
) -> Outcome<Option<GlobalScale>> {
    let (k, stream) = (&engine.simple, exec.stream());
    let scratch = Buffer::new(&engine.gpu, 16)?;
    scratch.upload(0, &[-1i32; 4])?;
    let (global_at, bad) = (scratch.ptr(), scratch.ptr() + 8);
    // SAFETY: forwarded; the scratch lives until the wait below.
    unsafe {
        let address = match global {
            ActGlobal::None => 0,
            ActGlobal::Static(g) => {
                k.set_global(g, global_at, stream)?;
                global_at
            }
            ActGlobal::PerCall => {
                k.global_of(x, rule, source, global_at, stream)?;
                global_at
            }
        };
        k.nvfp4(x, rule, source, address, &Stored { codes, scales, bad, ..Stored::default() }, stream)?;
    }
    engine.gpu.synchronize()?;
    let mut back = [0i32; 4];
    scratch.download(0, &mut back)?;
    if back[2] != -1 {
        let what = format!("x: row {}", back[2]);
        return Err(Fail::invalid(what, "finite values to quantise", "NaN or infinity"));
    }
    Ok(match global {
        ActGlobal::None => None,
        _ => Some(GlobalScale::new(rule.convention(), f32::from_bits(back[0].cast_unsigned()))?),
    })
}

/// `y = A B^T`. Packs b; waits.
///
/// # Safety
/// The operands are readable, in host or device memory; y is device memory.
pub unsafe fn scaled_mm(engine: &Arc<Engine>, a: &Part, plan: Plan, y: &Mat, exec: &Exec) -> Outcome {
    let rename = |f: Fail| Fail { text: f.text.replacen("segment 0", "b", 1), ..f };
    // SAFETY: forwarded.
    let w = unsafe { prepare::prepare(engine, &plan, exec) }.map_err(rename)?;
    let m = a.rows;
    let code_bytes = m * a.groups * 8;
    let [q_at, steps_at, codes_at, scales_at, end] = {
        let mut at = 256usize;
        [0, m * w.k, m * a.groups * 4, code_bytes, scale_bytes(a, m)].map(|size| {
            at = (at + size).next_multiple_of(256);
            at
        })
    };
    let scratch = Buffer::new(&engine.gpu, end)?;
    scratch.upload(0, &[-1i32; 2])?;
    let mut staging = Staging::new(&engine.gpu)?;
    let raw = Raw {
        codes: scratch.ptr() + codes_at as u64,
        scales: scratch.ptr() + scales_at as u64,
        is_tiled: a.is_tiled,
        rows: m,
        groups: a.groups,
        bad: scratch.ptr(),
    };
    let (q, steps) = (scratch.ptr() + q_at as u64, scratch.ptr() + steps_at as u64);
    let (value, kind) = match a.global {
        None => (1.0, 0),
        Some(g) => (g.value(), if g.convention() == Convention::Multiply { 1 } else { 2 }),
    };
    // SAFETY: forwarded; the scratch lives until the wait below.
    unsafe {
        staging.copy(a.codes, code_bytes, raw.codes, exec)?;
        staging.copy(a.scales, scale_bytes(a, m), raw.scales, exec)?;
        engine.simple.expand(&raw, q, steps)?;
        let bad = engine.simple.get_words(raw.bad, 1)?[0];
        if bad != u64::MAX {
            let (row, group) = (bad as usize / a.groups, bad as usize % a.groups);
            let f = crate::prepare::bad_scale(0, row, group, 0x7f);
            return Err(Fail { text: f.text.replacen("segment 0", "a", 1), ..f });
        }
        let global = if kind == 0 { 0 } else { scratch.ptr() + 16 };
        if kind != 0 {
            scratch.upload(16, &[value])?;
        }
        let q = Quantised { q, steps, global, convention: kind, factor: 0.25 };
        engine.simple.forward_int(&w, q, y, exec.stream())?;
    }
    Ok(engine.gpu.synchronize()?)
}
