//! L2, models: the products that models are made of. All of Qwen3 from 0.6B to 8B, and the longest sum of the
//! 32B.
//!
//! Nothing here is left to what smaller shapes suggest: tiles for wide weights, sums that are split and
//! counters that wrap begin at sizes that no lattice has.
use super::Scope;
use super::drawn::sampled;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::Sketch;
use crate::{Level, product};
use q4_core::{ExecPath, OpSet, Result};

/// Out features of the segments and in features: q/k/v, o, gate/up and down of each model. Where two models
/// share a product it is here once.
const PRODUCTS: [(&[usize], usize); 17] = [
    (&[2048, 1024, 1024], 1024),
    (&[1024], 2048),
    (&[3072, 3072], 1024),
    (&[1024], 3072),
    (&[2048, 1024, 1024], 2048),
    (&[2048], 2048),
    (&[6144, 6144], 2048),
    (&[2048], 6144),
    (&[4096, 1024, 1024], 2560),
    (&[2560], 4096),
    (&[9728, 9728], 2560),
    (&[2560], 9728),
    (&[4096, 1024, 1024], 4096),
    (&[4096], 4096),
    (&[12288, 12288], 4096),
    (&[4096], 12288),
    (&[640], 25600),
];
/// Products of one model.
const PER_MODEL: usize = 4;
/// The product with the most weights.
const WIDEST: usize = 14;
/// Weights of a product that is there again for another claim of the same code, at most.
const REPEATED: usize = 32_000_000;
/// Multiplications of a call with many rows, at most.
const WORK: usize = 150_000_000;
/// Rows of calls: one of decoding, a few, and a prompt, as many as [`WORK`] allows.
const ROWS: [usize; 4] = [1, 7, 17, 96];
/// The product that has a prompt of [`PROMPT`] rows and more whatever the work.
const PROMPTED: usize = 1;
const PROMPT: usize = 512;
/// In features of other models, each with a few out features.
const OTHERS: [usize; 15] =
    [512, 768, 896, 1280, 1536, 1792, 2304, 3584, 4864, 5120, 5376, 7168, 8192, 11008, 14336];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let (encodings, formats) = (scope.encodings(), scope.quantizers());
    for (i, (rows, k)) in PRODUCTS.into_iter().enumerate() {
        let turn = crate::stored::mix(scope.seed ^ i as u64) as usize;
        let macs = rows.iter().sum::<usize>() * k;
        if scope.repeats() && (macs > REPEATED || i % PER_MODEL != scope.seed as usize % PER_MODEL) {
            continue;
        }
        // Kinds of products walk with i: whoever has a turn has one of each.
        if !scope.has_turn(i + i / PER_MODEL) {
            continue;
        }
        // Of stored floats a model has one wide product, its head.
        if scope.is_own && scope.claim.schema == "dense" && macs > REPEATED && i != WIDEST {
            continue;
        }
        let (Some(schema), Some(format)) =
            (encodings.get(i % encodings.len().max(1)), formats.get(turn % formats.len().max(1)))
        else {
            return;
        };
        let most = if scope.is_packed() { ROWS.len() } else { 2 };
        let mut calls: Vec<usize> =
            ROWS[..most].iter().copied().filter(|m| *m == 1 || m * macs <= WORK).collect();
        if i == PROMPTED && scope.is_packed() {
            calls.push(PROMPT + turn % 89);
        }
        // One more than a power of two, as a conversation has it, and seldom the most there could be.
        let max_m = calls.iter().max().map_or(1, |m| if turn % 2 == 0 { *m } else { m + turn % 700 });
        let base = scope.sketch(*schema, *format, scope.io(), [1, k, 1]);
        let sketch = scope.limits.fit(Sketch { rows: rows.to_vec(), max_m, ..base });
        let name = format!("model/{}", sketch.name());
        let most = scope.limits.max_m.unwrap_or(usize::MAX);
        scope.add(all, Level::L2, name, move |bench| each(bench, path, &sketch, &calls, most));
    }
    let Some((schema, format)) = scope.usual() else { return };
    let others = if scope.repeats() { 4 } else { OTHERS.len() };
    for (i, k) in OTHERS.into_iter().enumerate().take(others).filter(|(i, _)| scope.has_turn(*i)) {
        let n = 24 + crate::stored::mix(scope.seed ^ 77 ^ i as u64) as usize % 200;
        let sketch =
            scope.limits.fit(Sketch { max_m: 8, ..scope.sketch(schema, format, scope.io(), [n, k, 5]) });
        let name = format!("model/{}", sketch.name());
        scope.add(all, Level::L2, name, move |bench| each(bench, path, &sketch, &[1, 5], sketch.m));
    }
}

/// One weight, one call after the other.
fn each(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch, calls: &[usize], most: usize) -> Result<Seen> {
    sketch.weight().lend(|weight| {
        let mut prepared = None;
        let mut seen = Seen::Refused(Vec::new());
        for m in calls.iter().copied().filter(|m| *m <= most) {
            let sketch = Sketch { m, ..sketch.clone() };
            let problem = sketch.problem(weight);
            let w = match &prepared {
                Some(w) => w,
                None => {
                    let spec = product::spec(bench, &problem, OpSet::FORWARD);
                    match product::prepare(bench, path, weight, &spec)? {
                        Ok(w) => prepared.insert(w),
                        Err(reasons) => return Ok(Seen::Refused(reasons)),
                    }
                }
            };
            let y = product::forward(&**w, &problem, Layout::PLAIN, product::STALE, bench.threads)?;
            seen = seen.and(sampled(path, &problem, &y.values(), [6, 24])?);
        }
        Ok(seen)
    })
}
