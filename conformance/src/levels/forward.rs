//! L2: `y = x W^T` over recorded products and the lattice, with poisoned surroundings, and what becomes of
//! NaN.
use super::Scope;
use super::drawn::sampled;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::{self, Problem};
use crate::product::{self, failed};
use crate::{Level, golden};
use q4_core::{Activations, DType, ExecPath, OpSet, Result};

/// Products for each type of input and output of one encoding and activation format.
const NATIVE: usize = 28;
const INT8: usize = 22;
const NVFP4: usize = 7;
/// Multiplications of a product whose every element is compared by itself. Of larger ones of q4's own dense
/// paths that is a sample, and sums of all.
const WORK: usize = 1_000_000;
/// Rows and columns of that sample.
const SAMPLE: [usize; 2] = [16, 48];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let claim = scope.claim;
    let path = claim.path;
    for name in golden::names(claim.schema, claim.activations) {
        scope.add(all, Level::L2, name.clone(), move |bench| {
            golden::one(&name, |problem| check(bench, path, problem))
        });
    }
    let count = match claim.activations {
        "native" => NATIVE,
        "int8" | "fp8" => INT8,
        _ => NVFP4,
    };
    // Half of them where another claim has the same code, and where the sums are those of the oracle.
    let [again, known] = [scope.repeats(), scope.is_oracle()].map(usize::from);
    let count = (count >> (again + known)).max(2);
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        // As many segments as nobody has asked for.
        let formats = scope.quantizers();
        if scope.limits.segments >= 3 && !formats.is_empty() {
            let base = scope.sketch(schema, formats[i % formats.len()], scope.io(), [1, 80, 3]);
            let sketch = scope.limits.fit(lattice::Sketch { rows: vec![5, 1, 16, 33, 2], ..base });
            let name = format!("segments/{}", sketch.name());
            scope.add(all, Level::L2, name, move |bench| sketch.with(|problem| check(bench, path, problem)));
        }
        for activations in scope.quantizers() {
            for sketch in lattice::sketches(schema, activations, count, scope.seed) {
                let sketch = scope.limits.fit(sketch);
                let name = format!("lattice/{}", sketch.name());
                scope.add(all, Level::L2, name, move |bench| {
                    sketch.with(|problem| check(bench, path, problem))
                });
            }
            for (what, value) in [("nan", f32::NAN), ("inf", f32::INFINITY), ("minus-inf", f32::NEG_INFINITY)]
            {
                for (i, (io, shape, [row, column])) in NOT_FINITE.into_iter().enumerate() {
                    // Some have a sign.
                    let value = if value.is_nan() && i % 2 == 1 { -value } else { value };
                    // Every row count with NaN, each other one with an infinity.
                    if i % 2 == usize::from(what == "inf") && what != "nan" {
                        continue;
                    }
                    let mut sketch = scope.sketch(schema, activations, io, shape);
                    sketch.max_m = sketch.max_m.max(scope.limits.max_m.unwrap_or(32).min(32));
                    let name = format!("{what}/{}", sketch.name());
                    scope.add(all, Level::L2, name, move |bench| {
                        let at = |share: usize, of: usize| share * (of - 1) / 6;
                        sketch.with(|problem| {
                            let place = (at(row, problem.m), at(column, problem.weight.k));
                            not_finite(bench, path, problem, value, place)
                        })
                    });
                }
            }
        }
    }
}

/// Calls that one element makes useless; odd and even numbers of rows, one and many. With the element's
/// place, in sixths of rows and columns: the first, the last, and some in between.
const NOT_FINITE: [(DType, [usize; 3], [usize; 2]); 7] = [
    (DType::F32, [33, 80, 5], [3, 6]),
    (DType::BF16, [64, 256, 1], [0, 4]),
    (DType::F16, [17, 272, 17], [6, 3]),
    (DType::F32, [130, 128, 65], [0, 0]),
    (DType::F32, [48, 96, 2], [6, 6]),
    (DType::BF16, [40, 144, 8], [3, 0]),
    (DType::F16, [65, 64, 30], [6, 1]),
];

pub(super) fn check(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    product::with(bench, path, problem, OpSet::FORWARD, |w| {
        // Stale scratch that reads as NaN, and stale scratch that reads as a huge number.
        let stale = [(Layout::PLAIN, 0xff), (Layout::HOSTILE, product::STALE)];
        let call = |(layout, fill)| product::forward(w, problem, layout, fill, bench.threads);
        let mut seen = Seen::exactly(0);
        let is_known = bench.abi.is_none() && !super::is_packed(path);
        if is_known && problem.recorded.is_none() && problem.m * problem.weight.n() * problem.weight.k > WORK
        {
            for way in stale {
                seen = seen.and(sampled(path, problem, &call(way)?.values(), SAMPLE)?);
            }
            return Ok(seen);
        }
        let exact = product::exact_forward(problem)?;
        let terms = product::forward_bound(path, problem);
        for way in stale {
            let y = call(way)?.values();
            seen = seen.and(Seen::within(y.len(), exact.compare("y", &y, terms)?));
        }
        Ok(seen)
    })
}

/// One element of one row is not finite: that row is not finite either, or the call fails; other rows do not
/// notice.
fn not_finite(
    bench: &Bench<'_>,
    path: ExecPath,
    problem: &Problem<'_>,
    value: f32,
    (row, column): (usize, usize),
) -> Result<Seen> {
    product::with(bench, path, problem, OpSet::FORWARD, |w| {
        let (m, k, n) = (problem.m, problem.weight.k, problem.weight.n());
        let before = product::forward(w, problem, Layout::PLAIN, product::STALE, bench.threads)?;
        let clean = before.values();
        let mut x = problem.x.clone();
        x[row * k + column] = value;
        let spoilt = Problem { name: String::new(), weight: problem.weight, x, recorded: None, ..*problem };
        let spoilt = product::forward(w, &spoilt, Layout::PLAIN, product::STALE, bench.threads);
        // It leaves nothing behind, refused or not.
        let after = product::forward(w, problem, Layout::PLAIN, product::STALE, bench.threads)?;
        if after.bits() != before.bits() {
            return Err(failed("a call after one that was not finite gave other bits")
                .need("those of the call before it")
                .have(format!("x[{row}, {column}] was {value}")));
        }
        let y = match spoilt {
            Ok(y) => y.values(),
            Err(e) if e.code() == q4_core::Code::ConformanceFailed => return Err(e),
            Err(_) => return Ok(Seen::exactly(m * n)),
        };
        let per_call = matches!(
            problem.activations,
            Activations::Nvfp4(q4_core::ActQuant { global: q4_core::ActGlobal::PerCall, .. })
        );
        let refuses = problem.activations != Activations::Native;
        // A device whose calls do not wait cannot refuse: the row is NaN there, all rows where they share a
        // scale.
        if refuses && bench.device == q4_core::Device::Cpu {
            return Err(failed("an input that cannot be quantised gave a result")
                .need("an error")
                .have(format!("{value}")));
        }
        for (i, (&got, &before)) in y.iter().zip(&clean).enumerate() {
            let (r, c) = (i / n, i % n);
            let is_right = match r == row {
                true if refuses || value.is_nan() => got.is_nan(),
                true => !got.is_finite(),
                false if per_call => got.is_nan(),
                false => got.to_bits() == before.to_bits(),
            };
            if !is_right {
                let need = match r == row {
                    true if refuses || value.is_nan() => "NaN".to_owned(),
                    false if per_call => "NaN".to_owned(),
                    true => "infinity or NaN".to_owned(),
                    false => format!("{before:e}, as without it"),
                };
                return Err(failed(&format!("y[{r}, {c}] with x[{row}, {column}] = {value}"))
                    .need(need)
                    .have(format!("{got:e}")));
            }
        }
        Ok(Seen::exactly(m * n))
    })
}
