//! L2, drawn: products whose extents nobody chose. Every run has its seed; together they leave no size out.
use super::Scope;
use super::large::spread;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::{self, Problem};
use crate::product::{self, failed};
use q4_core::{ExecPath, OpSet, Result, ThreadPool};

/// Products of a claim, shared out among its encodings and formats, so that each has every residue of m and
/// k.
const COUNT: usize = 128;
/// Most multiplications of one.
const WORK: usize = 4_000_000;
/// Rows and columns that are compared element by element, at most; the last ones are among them.
const SAMPLE: [usize; 2] = [10, 40];
/// Threads that are lent.
const THREADS: [usize; 8] = [1, 2, 3, 4, 5, 6, 8, 16];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let kinds: Vec<_> = scope
        .encodings()
        .into_iter()
        .flat_map(|e| scope.quantizers().into_iter().map(move |a| (e, a)))
        .collect();
    let Some((schema, activations)) = kinds.first() else { return };
    let work = match path {
        _ if scope.repeats() => WORK / 8,
        _ if scope.is_oracle() => WORK / 4,
        _ => WORK,
    };
    let sketches = lattice::drawn(scope.claim, (*schema, *activations), COUNT, scope.seed, work);
    for (i, sketch) in sketches.into_iter().enumerate() {
        // Of dense paths; all residues are among those of a part.
        if !scope.is_packed() && !scope.has_turn(i + i / 16) {
            continue;
        }
        // Residues walk with i: encodings take every one of them in turns of their own.
        let (schema, activations) = kinds[(i / 16 + i) % kinds.len()];
        let sketch = scope.limits.fit(lattice::Sketch { schema, activations, ..sketch });
        let threads = THREADS[crate::stored::mix(scope.seed ^ i as u64) as usize % THREADS.len()];
        let name = format!("drawn/t{threads}/{}", sketch.name());
        scope.add(all, Level::L2, name, move |bench| {
            sketch.with(|problem| check(bench, path, problem, threads))
        });
    }
}

fn check(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>, threads: usize) -> Result<Seen> {
    product::with(bench, path, problem, OpSet::FORWARD, |w| {
        let pool = ThreadPool::new(threads);
        let first = product::forward(w, problem, Layout::PLAIN, product::STALE, &pool)?;
        let seen = sampled(path, problem, &first.values(), SAMPLE)?;
        let again = product::forward(w, problem, Layout::HOSTILE, 0, bench.threads)?;
        let n = problem.weight.n();
        // Sums behind a dense copy are the library's own, which splits them by where rows lie.
        let is_steady = path != ExecPath::DequantMatmul;
        if let Some(at) = again.bits().iter().zip(first.bits()).position(|(a, b)| is_steady && *a != b) {
            let at = at / problem.io.size();
            return Err(failed("the same product gave other bits elsewhere and with other threads")
                .have(format!("y[{}, {}] differs", at / n, at % n)));
        }
        Ok(seen)
    })
}

/// Some elements against the exact sums, and all of them in sums of blocks of columns.
pub(super) fn sampled(path: ExecPath, problem: &Problem<'_>, y: &[f32], sample: [usize; 2]) -> Result<Seen> {
    let n = problem.weight.n();
    let (rows, columns) = (spread(problem.m, sample[0]), spread(n, sample[1]));
    let exact = product::exact_part(problem, &problem.activations, &rows, &columns)?;
    let at = |r: &usize| columns.iter().map(|c| y[r * n + c]).collect::<Vec<_>>();
    let part: Vec<f32> = rows.iter().flat_map(at).collect();
    let worst = exact.compare_at("y", &part, product::forward_bound(path, problem), &rows, &columns)?;
    let sums = product::check_sums(path, problem, y)?;
    Ok(Seen::within(part.len() + sums, worst))
}
