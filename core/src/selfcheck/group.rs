//! The same gate for weights that one call multiplies.
use super::{IoBuffer, Room, SelfChecks, kind, noise};
use crate::oracle::{Column, Input, Units, bound};
use crate::stage::StagedGroup;
use crate::{
    Code, Device, Error, ExecContext, LinearSpec, PreparedGroup, PreparedInfo, Q4Weight, Result, RowDecoder,
    Selection, TensorView, ThreadPool,
};
use std::sync::atomic::Ordering;

impl SelfChecks {
    /// Fails where `group`, made of `weights` for `specs`, or another group of its kind, computes wrongly.
    pub(crate) fn require_group(
        &self,
        s: &Selection,
        specs: &[LinearSpec],
        weights: &[Q4Weight<'_>],
        group: Box<dyn PreparedGroup>,
        (info, threads): (&PreparedInfo, &ThreadPool),
    ) -> Result<Box<dyn PreparedGroup>> {
        let Some(spec) = specs.first() else { return Ok(group) };
        if self.skip {
            self.skips.fetch_add(1, Ordering::Relaxed);
            return Ok(group);
        }
        let kind = format!("{} of {} rows, {} in one call", kind(s, spec), spec.max_m, specs.len());
        let mut verdicts = self.verdicts.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(verdict) = verdicts.get(&kind) {
            return verdict.clone().map(|()| group);
        }
        let (group, ratio) = match spec.device {
            Device::Cpu => {
                let ratio = check(&*group, info, weights, specs, threads);
                (group, ratio)
            }
            device => {
                let staged = StagedGroup::new(group, device, s.backend.memory(device)?);
                let ratio = check(&staged, info, weights, specs, threads);
                (staged.into_inner(), ratio)
            }
        };
        tracing::debug!(%kind, ?ratio, "self-check");
        let verdict = ratio.map(drop);
        verdicts.insert(kind, verdict.clone());
        verdict.map(|()| group)
    }
}

/// Calls `group`, made of `weights` for `specs` and with operands in host memory, with rows for all experts
/// and for every other one. Every output must be written, and some of each row be the oracle's. Returns the
/// largest error over its bound.
///
/// # Errors
/// As [`check`](super::check).
fn check(
    group: &dyn PreparedGroup,
    info: &PreparedInfo,
    weights: &[Q4Weight<'_>],
    specs: &[LinearSpec],
    threads: &ThreadPool,
) -> Result<f64> {
    let Some(spec) = specs.first() else { return Ok(0.0) };
    let (count, n, k) = (weights.len(), spec.n(), spec.k);
    let decoders = weights.iter().map(RowDecoder::new).collect::<Result<Vec<_>>>()?;
    let fail = |what: String| {
        let what = format!("{} via {}, {count} weights in one call: {what}", info.backend, info.path);
        Error::new(Code::SelfCheckFailed, what)
            .fix("do not use this backend on this machine; please report it with `q4 diagnose --json`")
    };
    let mut worst = 0f64;
    for step in [1, 2] {
        // Expert e has rows where e + 1 is a multiple of the step; the last that fit get what is left.
        let mut at = vec![0i32];
        for e in 0..count {
            let room = spec.max_m as i32 - at[e];
            let wanted = if (e + 1) % step == 0 { 1 + (e % 3) as i32 } else { 0 };
            at.push(at[e] + wanted.min(room));
        }
        let m = at[count] as usize;
        if m == 0 {
            continue;
        }
        let x: Vec<f32> = (0..m * k).map(|i| (noise(i as u64) - 0.5) * 4.0).collect();
        let x = IoBuffer::new(spec.x, &x);
        let mut y = IoBuffer::poisoned(spec.y, m * n);
        let mut scratch = Room::of(group.workspace(m), &info.backend)?;
        let mut cx = ExecContext::cpu(threads);
        cx.workspace = Some(scratch.view()?);
        group.forward(x.view(m, k)?, TensorView::of(&at, &[count + 1])?, y.view_mut(m, n)?, &mut cx)?;
        if let Some(at) = y.unwritten() {
            return Err(fail(format!("y[{}, {}] was not written", at / n, at % n)));
        }
        let values = x.to_f32();
        for (e, (decoder, spec)) in decoders.iter().zip(specs).enumerate() {
            let input = Input::new(&values, k, &spec.activations, spec.x)?;
            let units = Units::of(info.path, &spec.activations);
            for r in at[e] as usize..at[e + 1] as usize {
                for column in [0, n / 2, n - 1] {
                    let (exact, abs) = input.dot(r, &Column::new(decoder, column));
                    let (got, limit) = (y.at(r * n + column), bound(info.path, units, spec.y, k, exact, abs));
                    let ratio = (got - exact).abs() / limit;
                    if ratio.is_nan() || ratio > 1.0 {
                        return Err(fail(format!("y[{r}, {column}] of weight {e} is wrong"))
                            .need(format!("{exact:e} within {limit:e}"))
                            .have(format!("{got:e}")));
                    }
                    worst = worst.max(ratio);
                }
            }
        }
    }
    Ok(worst)
}
