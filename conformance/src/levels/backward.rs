//! L3: `dx = dy W` against the exact sums, and as the transpose of `forward`.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::{self, Problem};
use crate::product::{self, failed};
use crate::tolerance::bound;
use q4_core::{DType, ExecPath, OpSet, Result};

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let Some((_, activations)) = scope.usual() else { return };
    let has = |io: DType| scope.limits.has(OpSet::BACKWARD_INPUT, Some(io));
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        if i == 0 && has(scope.io()) && !scope.repeats() {
            for ([n, k, m], max_m) in REACH {
                let sketch = scope.sketch(schema, activations, scope.io(), [n, k, m]);
                let sketch = scope.limits.fit(lattice::Sketch { max_m, ..sketch });
                let name = format!("reach/{}", sketch.name());
                scope.add(all, Level::L3, name, move |bench| sketch.with(|p| check(bench, path, p)));
            }
        }
        let mut checked = lattice::sketches(schema, activations, 14, scope.seed);
        checked.extend(lattice::drawn(scope.claim, (schema, activations), DRAWN, scope.seed, WORK));
        for (j, sketch) in checked.into_iter().map(|s| scope.limits.fit(s)).enumerate() {
            if !has(sketch.io) || !scope.has_turn_of_weight(i + j) {
                continue;
            }
            let name = format!("lattice/{}", sketch.name());
            scope.add(all, Level::L3, name, move |bench| sketch.with(|problem| check(bench, path, problem)));
        }
        if scope.claim.activations == "native" && has(scope.io()) {
            for schema in schema.blocks() {
                let sketch = scope.sketch(schema, activations, scope.io(), [24, 512, 3]);
                let name = format!("blocks/{}", sketch.name());
                scope.add(all, Level::L3, name, move |bench| sketch.with(|p| check(bench, path, p)));
            }
        }
        if scope.claim.activations == "native" && has(scope.io()) {
            for shape in [[48, 64, 5], [64, 256, 17], [129, 144, 2], [16, 1040, 1], [1000, 64, 3]] {
                let sketch = scope.sketch(schema, activations, scope.io(), shape);
                let name = format!("transpose/{}", sketch.name());
                scope.add(all, Level::L3, name, move |bench| {
                    sketch.with(|problem| transpose(bench, path, problem))
                });
            }
        }
    }
}

/// `[n, k, m]` beyond what is drawn, and the most rows there may be.
const REACH: [([usize; 3], usize); 4] =
    [([9100, 32, 3], 3), ([24, 12_304, 2], 40_960), ([16, 32, 2051], 2051), ([40, 48, 1100], 4096)];

/// Products that are drawn for each encoding.
const DRAWN: usize = 16;
/// Most multiplications of one of them: every element is compared.
const WORK: usize = 2_000_000;

const OPS: OpSet = OpSet::FORWARD.with(OpSet::BACKWARD_INPUT);

fn check(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    product::with(bench, path, problem, OPS, |w| {
        let dy = gradients(problem, problem.io);
        let exact = product::exact_backward(problem, &dy)?;
        let terms = product::backward_bound(path, problem);
        let mut worst = 0f64;
        for layout in [Layout::PLAIN, Layout::HOSTILE] {
            let dx = product::backward(w, problem, &dy, layout, bench.threads)?;
            worst = worst.max(exact.compare("dx", &dx.values(), terms)?);
        }
        Ok(Seen::within(2 * exact.values.len(), worst))
    })
}

/// `Σ dy·(x W^T) = Σ (dy W)·x`, within what both sides may be off.
fn transpose(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    product::with(bench, path, problem, OPS, |w| {
        let dy = gradients(problem, problem.io);
        let y = product::forward(w, problem, Layout::PLAIN, product::STALE, bench.threads)?.values();
        let dx = product::backward(w, problem, &dy, Layout::PLAIN, bench.threads)?.values();
        let (exact_y, exact_dx) = (product::exact_forward(problem)?, product::exact_backward(problem, &dy)?);
        let side =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let slack = |values: &[(f64, f64)], by: &[f32], terms| -> f64 {
            values.iter().zip(by).map(|(v, b)| bound(terms, v.0, v.1) * f64::from(b.abs())).sum()
        };
        let (left, right) = (side(&dy, &y), side(&dx, &problem.x));
        let limit = slack(&exact_y.values, &dy, product::forward_bound(path, problem))
            + slack(&exact_dx.values, &problem.x, product::backward_bound(path, problem));
        let ratio = (left - right).abs() / limit;
        if ratio <= 1.0 {
            return Ok(Seen::within(1, ratio));
        }
        Err(failed("backward is not the transpose of forward")
            .need(format!("Σ dy·y = {left:e} within {limit:e}"))
            .have(format!("Σ dx·x = {right:e}")))
    })
}

/// Heavy-tailed gradients, rounded to the type of y, with a row of zeros.
pub(super) fn gradients(problem: &Problem<'_>, y: DType) -> Vec<f32> {
    let n = problem.weight.n();
    let plain = crate::measure::gradient(problem);
    let scaled = plain.iter().enumerate().map(|(i, v)| match (i / n, i % 19) {
        (1, _) => 0.0,
        (_, 7) => v * 64.0,
        _ => *v,
    });
    q4_core::selfcheck::IoBuffer::new(y, &scaled.collect::<Vec<_>>()).to_f32()
}
