//! L3, steadiness: the bits of a gradient depend on its operands and on nothing else; gradients of any size
//! are right, and those that are not finite stay so.
use super::Scope;
use super::backward::gradients;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::{Guarded, Layout, Place, Workspace};
use crate::lattice::{Problem, Sketch};
use crate::product::{self, Lent, failed};
use crate::tolerance::bound;
use q4_core::selfcheck::IoBuffer;
use q4_core::{DType, ExecPath, OpSet, PreparedWeight, Result, ThreadPool};
use std::sync::Barrier;

const OPS: OpSet = OpSet::FORWARD.with(OpSet::BACKWARD_INPUT);
/// Calls of one weight: some steps of training.
const CALLS: usize = 1100;

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let Some((usual, activations)) = scope.usual() else { return };
    let has = |io: DType| scope.limits.has(OpSet::BACKWARD_INPUT, Some(io));
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        let shapes = [(DType::F32, [130, 272, 5]), (DType::F32, [64, 256, 1]), (DType::BF16, [97, 144, 33])];
        // One shape each, all of them for the first.
        for (_, (io, shape)) in shapes.into_iter().enumerate().filter(|(j, _)| i == 0 || *j == i % 3) {
            let sketch = scope.sketch(schema, activations, io, shape);
            if !has(sketch.io) {
                continue;
            }
            let ops = if scope.limits.has(OpSet::DEQUANTIZE, Some(sketch.io)) { OpSet::ALL } else { OPS };
            let name = format!("steady/{}", sketch.name());
            scope.add(all, Level::L3, name, move |bench| sketch.with(|p| steady(bench, path, p, ops)));
        }
    }
    for io in crate::limits::IO.into_iter().filter(|io| has(*io)) {
        for (name, scale) in SCALES {
            let sketch = scope.sketch(usual, activations, io, [65, 128, 6]);
            let name = format!("values/{name}/{}", sketch.name());
            scope.add(all, Level::L3, name, move |bench| {
                sketch.with(|problem| scaled(bench, path, problem, scale))
            });
        }
    }
    if has(scope.io()) {
        let sketch = scope.sketch(usual, activations, scope.io(), [48, 144, 7]);
        for (name, value) in [("nan", f32::NAN), ("inf", f32::INFINITY), ("minus-inf", f32::NEG_INFINITY)] {
            let sketch = sketch.clone();
            scope.add(all, Level::L3, format!("{name}/{}", sketch.name()), move |bench| {
                sketch.with(|problem| not_finite(bench, path, problem, value))
            });
        }
        let sketch = scope.sketch(usual, activations, scope.io(), [16, 32, 3]);
        scope.add(all, Level::L3, format!("many-calls/{}", sketch.name()), move |bench| {
            many_calls(bench, path, &sketch)
        });
    }
}

/// What ordinary gradients are multiplied by: those of a loss that was scaled, of late layers, and of early
/// ones.
const SCALES: [(&str, f32); 4] =
    [("large", 1024.0), ("small", 1.0 / 16_384.0), ("tiny", 1e-12), ("huge", 1e12)];

fn gradient(
    w: &dyn PreparedWeight,
    problem: &Problem<'_>,
    dy: &[f32],
    lent: Lent,
    threads: &ThreadPool,
) -> Result<Guarded> {
    let (from, to) = ((problem.io, dy, problem.m), (problem.io, problem.weight.k));
    product::called(w, OpSet::BACKWARD_INPUT, from, to, lent, threads)
}

fn steady(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>, ops: OpSet) -> Result<Seen> {
    // A dense copy that does not hold the values exactly is not decoded.
    let all = product::spec(bench, problem, ops);
    let ops = if bench.backend.can_prepare(&all, path, bench.env).is_ok() { ops } else { OPS };
    product::with(bench, path, problem, ops, |w| {
        let dy = gradients(problem, problem.io);
        let first = gradient(w, problem, &dy, Lent::PLAIN, bench.threads)?;
        let terms = product::backward_bound(path, problem);
        product::exact_backward(problem, &dy)?.compare("dx", &first.values(), terms)?;
        let (want, k, size) = (first.bits(), problem.weight.k, problem.io.size());
        let same = |what: &str, dx: &Guarded| match dx.bits().iter().zip(&want).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(failed(&format!("the bits of dx depend on {what}")).have(format!(
                "dx[{}, {}] differs",
                at / size / k,
                at / size % k
            ))),
        };
        let mut calls = 1;
        for count in [1, 3, 7, 16] {
            let dx = gradient(w, problem, &dy, Lent::PLAIN, &ThreadPool::new(count))?;
            same(&format!("the number of threads, here {count}"), &dx)?;
            calls += 1;
        }
        let at = |place| Layout { place, gap: 0 };
        let apart = |gap| Layout { gap, ..Layout::PLAIN };
        let lent = |input, output| Lent { input, output, ..Lent::PLAIN };
        for (what, lent) in [
            ("alignment", Lent::alike(at(Place::Offset(1)))),
            ("the alignment of dy", lent(at(Place::Offset(4)), Layout::PLAIN)),
            ("the alignment of dx", lent(Layout::PLAIN, at(Place::Offset(4)))),
            ("the alignment of a page", Lent::alike(at(Place::Start))),
            ("the stride", Lent::alike(apart(16))),
            ("the stride of dy", lent(apart(9), Layout::PLAIN)),
            ("the stride of dx", lent(Layout::PLAIN, apart(1000))),
            ("what the workspace held", Lent { fill: 0xff, ..Lent::PLAIN }),
            ("workspace that nobody asked for", Lent { spare: 8192, ..Lent::PLAIN }),
            ("what dx held", Lent { held: Some(0x3f), ..Lent::PLAIN }),
            ("what dx held", Lent { held: Some(0), ..Lent::PLAIN }),
        ] {
            same(what, &gradient(w, problem, &dy, lent, bench.threads)?)?;
            calls += 1;
        }
        // Between forward calls, decodings and other gradients, each as right as the first.
        let forward = || product::forward(w, problem, Layout::PLAIN, product::STALE, bench.threads);
        let y = forward()?;
        let terms = product::forward_bound(path, problem);
        product::exact_forward(problem)?.compare("y", &y.values(), terms)?;
        let other: Vec<f32> = dy.iter().rev().map(|v| -v).collect();
        for turn in 0..3 {
            if turn != 1 && forward()?.bits() != y.bits() {
                return Err(failed("the bits of y depend on the gradients in between"));
            }
            if turn != 0 && ops == OpSet::ALL {
                product::check_decode(w, &problem.weight, DType::F32, Layout::PLAIN, bench.threads)?;
            }
            gradient(w, problem, &other, Lent::PLAIN, bench.threads)?;
            same("the calls before", &gradient(w, problem, &dy, Lent::PLAIN, bench.threads)?)?;
            calls += 1;
        }
        let start = Barrier::new(4);
        let caller = |i: usize| -> Result<()> {
            let own = ThreadPool::new(1);
            start.wait();
            for call in 0..4 {
                if (i + call) % 2 == 0 {
                    same("other calls at the same time", &gradient(w, problem, &dy, Lent::PLAIN, &own)?)?;
                } else {
                    gradient(w, problem, &other, Lent::PLAIN, &own)?;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..4).map(|i| scope.spawn(move || caller(i))).collect();
            all.into_iter().map(|t| t.join()).collect::<Vec<_>>()
        })
        .into_iter()
        .try_for_each(|result| result.map_err(|_| failed("a concurrent call panicked"))?)?;
        Ok(Seen::exactly((calls + 8) * want.len() / size))
    })
}

fn scaled(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>, scale: f32) -> Result<Seen> {
    product::with(bench, path, problem, OPS, |w| {
        let dy: Vec<f32> = gradients(problem, problem.io).iter().map(|v| v * scale).collect();
        let dy = IoBuffer::new(problem.io, &dy).to_f32();
        // What no number of the type holds is another case.
        let dy: Vec<f32> = dy.into_iter().map(|v| if v.is_finite() { v } else { 1.0 }).collect();
        let exact = product::exact_backward(problem, &dy)?;
        let dx = gradient(w, problem, &dy, Lent::PLAIN, bench.threads)?.values();
        let worst = exact.compare("dx", &dx, product::backward_bound(path, problem))?;
        Ok(Seen::within(dx.len(), worst))
    })
}

/// A gradient that is not finite is not lost: who scales a loss looks for it.
fn not_finite(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>, value: f32) -> Result<Seen> {
    product::with(bench, path, problem, OPS, |w| {
        let (n, k) = (problem.weight.n(), problem.weight.k);
        let dy = gradients(problem, problem.io);
        let clean = gradient(w, problem, &dy, Lent::PLAIN, bench.threads)?.values();
        for (row, column) in [(0, 0), (problem.m / 2, n / 2), (problem.m - 1, n - 1)] {
            let mut spoilt = dy.clone();
            spoilt[row * n + column] = value;
            let Ok(dx) = gradient(w, problem, &spoilt, Lent::PLAIN, bench.threads) else { continue };
            for (i, (got, before)) in dx.values().into_iter().zip(&clean).enumerate() {
                let is_right = match i / k == row {
                    true if value.is_nan() => got.is_nan(),
                    true => !got.is_finite(),
                    false => got.to_bits() == before.to_bits(),
                };
                if !is_right {
                    return Err(failed(&format!(
                        "dx[{}, {}] with dy[{row}, {column}] = {value}",
                        i / k,
                        i % k
                    ))
                    .have(format!("{got:e}, and {before:e} without it")));
                }
            }
        }
        Ok(Seen::exactly(3 * clean.len()))
    })
}

/// The last of many gradients has the bits of the first.
fn many_calls(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch) -> Result<Seen> {
    sketch.with(|problem| {
        product::with(bench, path, problem, OPS, |w| {
            let (m, k, n) = (problem.m, problem.weight.k, problem.weight.n());
            let values = gradients(problem, problem.io);
            let exact = product::exact_backward(problem, &values)?;
            let dy = Guarded::input(problem.io, &values, m, n, Layout::PLAIN);
            let mut dx = Guarded::output(problem.io, m, k, Layout::PLAIN);
            let mut scratch = Workspace::new(w.workspace(m), product::STALE);
            let terms = product::backward_bound(path, problem);
            let is_right = |(exact, got): (&(f64, f64), f32)| {
                (exact.0 - f64::from(got)).abs() <= bound(terms, exact.0, exact.1)
            };
            for call in 0..CALLS {
                let mut cx = q4_core::ExecContext::cpu(bench.threads);
                cx.workspace = scratch.view()?;
                dx.poison();
                w.backward_input(dy.view()?, dx.view_mut()?, &mut cx)?;
                if !exact.values.iter().zip(dx.values()).all(is_right) {
                    exact.compare("dx", &dx.values(), terms)?;
                    return Err(failed("a later gradient was wrong").have(format!("call {}", call + 1)));
                }
            }
            Ok(Seen::exactly(CALLS * m * k))
        })
    })
}
