//! L2, large: products of a size that keeps every part of a device busy at once, where blocks race, counters
//! wrap and grids end. Some rows and columns are compared with the exact sums, and all bits with those of the
//! next calls.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::Problem;
use crate::product::{self, failed};
use q4_core::{DType, Device, ExecPath, OpSet, Result};

/// Calls whose bits are compared.
const CALLS: usize = 3;
/// Rows and columns that are compared with the exact sums, at most; the last ones are among them.
const SAMPLE: [usize; 2] = [8, 48];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let (claim, seed) = (scope.claim, scope.seed);
    let path = claim.path;
    let Some((schema, activations)) = scope.usual() else { return };
    // Weights of a real model where there is a device to fill: a wide one, and a narrow one whose k is
    // shared.
    let (wide, narrow) = ([6144, 2560], [2560, 4096]);
    let calls =
        [(1, DType::F32, wide), (72, DType::BF16, wide), (200, DType::F32, wide), (400, DType::BF16, narrow)];
    for (i, (m, io, size)) in calls.into_iter().enumerate() {
        // Of dense paths, whose sums cost most here.
        if !scope.is_packed() && !scope.has_turn(i) {
            continue;
        }
        let id = format!("large/{}/{}/{io}/m{m}/s{seed}", claim.schema, claim.activations);
        let [n, k] = if claim.device == Device::Cpu { [640, 384] } else { size };
        let sketch = scope.sketch(schema, activations, io, [n, k, m]);
        scope.add(all, Level::L2, id, move |bench| sketch.with(|problem| check(bench, path, problem)));
    }
}

fn check(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    product::with(bench, path, problem, OpSet::FORWARD, |w| {
        let n = problem.weight.n();
        let (rows, columns) = (spread(problem.m, SAMPLE[0]), spread(n, SAMPLE[1]));
        let exact = product::exact_part(problem, &problem.activations, &rows, &columns)?;
        let first = product::forward(w, problem, Layout::PLAIN, product::STALE, bench.threads)?;
        let y = first.values();
        let at = |r: &usize| columns.iter().map(|c| y[r * n + c]).collect::<Vec<_>>();
        let part: Vec<f32> = rows.iter().flat_map(at).collect();
        let worst = exact.compare_at("y", &part, product::forward_bound(path, problem), &rows, &columns)?;
        product::check_sums(path, problem, &y)?;
        let want = first.bits();
        for call in 1..CALLS {
            let again = product::forward(w, problem, Layout::PLAIN, product::STALE, bench.threads)?;
            if let Some(at) = again.bits().iter().zip(&want).position(|(a, b)| a != b) {
                let at = at / problem.io.size();
                return Err(failed("the same call gave other bits")
                    .need(format!("those of the first of {CALLS} calls"))
                    .have(format!("y[{}, {}] differs in call {}", at / n, at % n, call + 1)));
            }
        }
        Ok(Seen::within(part.len() + (CALLS - 1) * y.len(), worst))
    })
}

/// Up to `count` of `0..n`, evenly, the last one included.
pub(super) fn spread(n: usize, count: usize) -> Vec<usize> {
    let count = count.min(n);
    (1..=count).map(|i| i * n / count - 1).collect()
}

#[test]
fn a_sample_ends_with_the_last() {
    for (n, count) in [(1, 8), (7, 8), (8, 8), (72, 8), (640, 48), (6144, 48)] {
        let all = spread(n, count);
        assert_eq!((all.len(), all.last()), (count.min(n), Some(&(n - 1))));
        assert!(all.windows(2).all(|w| w[0] < w[1]), "{all:?}");
    }
}
