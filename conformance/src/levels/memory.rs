//! L5, memory: no path but the dense one may have a dense copy, and nothing that is released stays.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::Problem;
use crate::memory::{resident_of, watch_in};
use crate::product::{self, failed};
use q4_core::device::DeviceMemory;
use q4_core::{DType, Device, ExecContext, ExecPath, OpSet, Result};
use std::sync::Arc;

/// Large enough that a dense copy in 16 bits stands out from everything else a process does.
const SHAPE: [usize; 3] = [2048, 3072, 2];
/// Allocators keep and return pages as they see fit; what a backend takes, it takes every time.
const ATTEMPTS: usize = 4;
/// Prepared and released this often.
const ROUNDS: usize = 1000;
/// Growth of the process that allocators cause by themselves.
const SLACK: u64 = 3 << 20;

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let Some((schema, activations)) = scope.usual() else { return };
    if path != ExecPath::DequantMatmul && schema.is_packed() {
        let sketch = scope.sketch(schema, activations, DType::BF16, SHAPE);
        scope.add(all, Level::L5, format!("no-dense-copy/{}", sketch.name()), move |bench| {
            sketch.with(|problem| every_time(|| no_dense_copy(bench, path, problem)))
        });
    }
    let sketch = scope.sketch(schema, activations, scope.io(), [64, 256, 2]);
    scope.add(all, Level::L5, format!("released/{}", sketch.name()), move |bench| {
        sketch.with(|problem| every_time(|| released(bench, path, problem)))
    });
}

/// Free memory of the device at some time; nothing on the CPU, whose memory is watched otherwise.
struct Free(Option<(Arc<dyn DeviceMemory>, u64)>);

impl Free {
    fn of(bench: &Bench<'_>) -> Result<Self> {
        if bench.device == Device::Cpu {
            return Ok(Self(None));
        }
        let memory = bench.backend.memory(bench.device)?;
        let free = memory.free()?;
        Ok(Self(Some((memory, free))))
    }
    /// Bytes that were free then and are not now.
    fn taken(&self) -> Result<Option<u64>> {
        self.0.as_ref().map(|(memory, before)| Ok(before.saturating_sub(memory.free()?))).transpose()
    }
}

/// [`watch_in`] of the process that runs the backend. One that cannot be looked at has something to hide.
fn watch(bench: &Bench<'_>, body: impl FnOnce()) -> Result<crate::memory::Taken> {
    let process = bench.elsewhere().map(|e| e.process());
    let taken = watch_in(process, body);
    match process {
        Some(id) if taken.resident_left.is_none() => Err(failed("the memory of the process that runs it")
            .need(format!("/proc/{id}/status that can be read"))
            .have("one that cannot")),
        _ => Ok(taken),
    }
}

/// Fails when every attempt does.
fn every_time(attempt: impl Fn() -> Result<Seen>) -> Result<Seen> {
    let mut last = attempt();
    for _ in 1..ATTEMPTS {
        if last.is_ok() {
            break;
        }
        last = attempt();
    }
    last
}

/// What is kept, what is asked for and what is really taken, from before `prepare` to the end of a call:
/// together less than the smallest dense copy.
fn no_dense_copy(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    let (m, n, k) = (problem.m, problem.weight.n(), problem.weight.k);
    let dense = (n * k * 2) as u64;
    let spec = product::spec(bench, problem, OpSet::FORWARD);
    let device = Free::of(bench)?;
    let mut prepared = None;
    let kept = watch(bench, || prepared = Some(product::prepare(bench, path, &problem.weight, &spec)))?;
    let w = match prepared.transpose()?.ok_or_else(|| failed("nothing was prepared"))? {
        Ok(w) => w,
        Err(reasons) => return Ok(Seen::Refused(reasons)),
    };
    let claimed = w.info().resident_bytes + w.workspace(m) as u64;
    let over = |what: &str, bytes: u64| {
        failed(what).need(format!("less than a dense copy, {dense} bytes")).have(format!("{bytes} bytes"))
    };
    if claimed >= dense {
        return Err(over("resident_bytes and workspace", claimed));
    }
    // Buffers of the suite exist before the call is watched.
    let mut y = None;
    let during = watch(bench, || {
        y = Some(product::forward(&*w, problem, Layout::PLAIN, product::STALE, bench.threads));
    })?;
    y.transpose()?;
    if let Some(taken) = device.taken()?.filter(|taken| *taken >= dense) {
        return Err(over("device memory", taken));
    }
    // Exactly known where allocations are counted; tables that are made once are small.
    let said = w.info().resident_bytes;
    if let Some(left) = kept.allocated_left.filter(|left| *left > said + said / 8 + (64 << 10)) {
        return Err(failed("info(): resident_bytes")
            .need(format!("{left}, which it keeps"))
            .have(said.to_string()));
    }
    let own = (w.workspace(m) + 64 * (m * (n + k))) as u64;
    for (signal, kept, during) in [
        ("memory allocated", kept.allocated_left, during.allocated_peak),
        ("memory resident", kept.resident_left, during.resident_peak),
    ] {
        let Some((kept, during)) = kept.zip(during) else { continue };
        let taken = kept + during.saturating_sub(own);
        if taken >= dense {
            return Err(over(signal, taken));
        }
    }
    Ok(Seen::exactly(3))
}

/// A thousand weights, one after the other, leave nothing behind.
fn released(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    let spec = product::spec(bench, problem, OpSet::FORWARD);
    if let Err(reasons) = bench.backend.can_prepare(&spec, path, bench.env) {
        return Ok(Seen::Refused(reasons));
    }
    let round = || -> Result<()> {
        let mut cx = ExecContext::on(spec.device, 0, bench.threads);
        drop(bench.backend.prepare(&problem.weight, &spec, path, &mut cx)?);
        Ok(())
    };
    (0..ROUNDS / 10).try_for_each(|_| round())?;
    let device = Free::of(bench)?;
    let process = bench.elsewhere().map_or_else(|| "self".to_owned(), |e| e.process().to_string());
    let before = resident_of(&process);
    let mut result = Ok(());
    let watched = watch(bench, || result = (0..ROUNDS).try_for_each(|_| round()))?;
    result?;
    let grown = resident_of(&process).zip(before).map(|(now, before)| now.saturating_sub(before));
    // A thread or a table that is made once is not a leak; a byte a round is.
    let allocated = watched.allocated_left.filter(|left| *left >= ROUNDS as u64);
    let resident = grown.filter(|grown| *grown > SLACK);
    // What other processes take of the device in the meantime cannot be told from it.
    let on_device = device.taken()?.filter(|taken| *taken > SLACK);
    let more = |bytes: u64| format!("{bytes} bytes more than before");
    let of_all = |bytes: u64| format!("{} on the device, by all its processes", more(bytes));
    if let Some(have) = allocated.or(resident).map(more).or(on_device.map(of_all)) {
        return Err(failed(&format!("{ROUNDS} weights were prepared and released"))
            .need("no growth")
            .have(have));
    }
    // A weight after a thousand others is as right as the first.
    let seen = super::forward::check(bench, path, problem)?;
    Ok(Seen::exactly(ROUNDS).and(seen))
}
