//! L2, reach: extents beyond any lattice, each with others so small that it costs little. Prompts of
//! thousands of rows, the columns of a vocabulary, the longest sums of large models, weights that were
//! prepared for a whole context.
use super::Scope;
use super::drawn::sampled;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::{Problem, Sketch};
use crate::stored::mix;
use crate::{Level, product};
use q4_core::{ExecPath, OpSet, Result};

/// `[n, k, m]` and the most rows there may be. Counters of 16 bits end within four of them.
const REACH: [([usize; 3], usize); 13] = [
    ([24, 64, 1031], 1031),
    ([17, 48, 2050], 4096),
    ([40, 32, 4099], 4099),
    ([9, 16, 66_001], 66_001),
    ([2050, 16, 515], 515),
    ([20, 4112, 517], 1000),
    ([33_000, 16, 3], 8),
    ([151_936, 16, 1], 1),
    ([70_001, 16, 2], 64),
    ([7, 29_568, 2], 2),
    ([5, 65_552, 1], 512),
    ([72, 256, 1], 40_960),
    ([130, 144, 6], 131_072),
];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let (encodings, formats) = (scope.encodings(), scope.quantizers());
    if encodings.is_empty() || formats.is_empty() {
        return;
    }
    let turn = mix(scope.seed ^ crate::lattice::hash(&scope.claim.to_string())) as usize;
    // A library sees them all; so do q4's own packed kernels, whose other activations, and whose dense paths,
    // share their code and see a part that the seed chooses.
    let is_whole = !scope.is_own || scope.is_packed() && scope.claim.activations == "native";
    let every = if scope.repeats() { 8 } else { 4 };
    for (i, ([n, k, m], max_m)) in REACH.into_iter().enumerate() {
        if !(if is_whole { scope.has_turn(i) } else { (i + turn) % every == 0 }) {
            continue;
        }
        let (schema, format) = (encodings[(i + turn) % encodings.len()], formats[i % formats.len()]);
        let sketch = scope.sketch(schema, format, scope.io(), [n, k, m]);
        let sketch = scope.limits.fit(Sketch { max_m, ..sketch });
        let name = format!("reach/{}", sketch.name());
        scope.add(all, Level::L2, name, move |bench| sketch.with(|problem| check(bench, path, problem)));
    }
}

fn check(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    product::with(bench, path, problem, OpSet::FORWARD, |w| {
        let y = product::forward(w, problem, Layout::PLAIN, product::STALE, bench.threads)?;
        sampled(path, problem, &y.values(), [10, 40])
    })
}
